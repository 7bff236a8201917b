"""The only loop over rounds, what it records, who is told, when it stops."""

from equifed.training.history import History
from equifed.training.loop import train
from equifed.training.missing import TrainingError
from equifed.training.states import register_state

__all__ = ["History", "TrainingError", "register_state", "train"]
