"""The only loop over rounds, what it records, who is told, when it stops."""

from equifed.training.files import RunFolderError, StoredRun, lock_folder
from equifed.training.final_model import StopWhen
from equifed.training.folder import RunFolder, is_complete, open_run_folder
from equifed.training.history import History
from equifed.training.loop import train
from equifed.training.play_round import TrainingError
from equifed.training.trackers import Callback

__all__ = [
    "Callback", "History", "RunFolder", "RunFolderError", "StopWhen", "StoredRun", "TrainingError",
    "is_complete", "lock_folder", "open_run_folder", "train",
]  # fmt: skip
