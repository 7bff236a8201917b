"""The only loop over rounds, what it records, who is told, when it stops."""

from equifed.training.history import History
from equifed.training.loop import TrainingError, train

__all__ = ["History", "TrainingError", "train"]
