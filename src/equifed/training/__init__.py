"""The only loop over rounds, what it records, who is told, when it stops."""

from equifed.training.states import register_state

__all__ = ["register_state"]
