"""Clients spread over the processes of a group."""
