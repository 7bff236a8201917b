"""Differential privacy: mechanisms that answer, and a ledger of what their answers cost."""
