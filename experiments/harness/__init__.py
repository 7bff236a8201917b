"""The published experiments, run again: ``equifed reproduce NAME``.

Each experiment is a definition (``definitions/NAME.toml``: the paper's settings, the grids where
the paper searched, the seeds) and a function that runs it and says where it agrees with what was
published. The results that the project has stored, and their discussion, are in
``experiments/NAME`` of the repository.
"""

from experiments.harness.experiment import (
    EXPERIMENTS,
    Check,
    Context,
    Experiment,
    Outcome,
    Table,
)
from experiments.harness.running import reproduce

__all__ = [
    "EXPERIMENTS",
    "Check",
    "Context",
    "Experiment",
    "Outcome",
    "Table",
    "reproduce",
]
