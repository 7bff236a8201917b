"""From a TOML table or Python objects to a run folder, one or many.

Names are imported when they are first used: the catalogue in this package must stay light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equifed.runs.build import Run, build_run
    from equifed.runs.catalogue import unknown
    from equifed.runs.comparison import merge_tables
    from equifed.runs.config import RunConfig, apply_override
    from equifed.runs.many import Job, check_folders, make_job, run_jobs
    from equifed.runs.run import start

__all__ = [
    "Job", "Run", "RunConfig", "apply_override", "build_run", "check_folders", "make_job",
    "merge_tables", "run_jobs", "start", "unknown",
]  # fmt: skip
_MODULES = ("catalogue", "config", "build", "many", "run", "comparison")


def __getattr__(name: str) -> Any:
    for module in _MODULES if name in __all__ else ():
        if hasattr(home := importlib.import_module(f"equifed.runs.{module}"), name):
            return getattr(home, name)
    raise AttributeError(f"module 'equifed.runs' has no attribute {name!r}")
