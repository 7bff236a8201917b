"""Modules, losses, flat parameters, tangent features."""
