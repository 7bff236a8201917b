"""The only loop over rounds, what it records, who is told, when it stops."""

from equifed.training.files import RunFolderError, lock_folder
from equifed.training.history import History
from equifed.training.loop import train
from equifed.training.play_round import TrainingError

__all__ = ["History", "RunFolderError", "TrainingError", "lock_folder", "train"]
