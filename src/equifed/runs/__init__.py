"""From a TOML table or Python objects to a run folder, one or many.

Names are imported when they are first used: the catalogue in this package must stay light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equifed.runs.build import Run as Run
    from equifed.runs.build import build_run as build_run
    from equifed.runs.catalogue import unknown as unknown
    from equifed.runs.config import RunConfig as RunConfig
    from equifed.runs.config import apply_override as apply_override
    from equifed.runs.many import Job as Job
    from equifed.runs.many import check_folders as check_folders
    from equifed.runs.many import make_job as make_job
    from equifed.runs.many import merge_tables as merge_tables
    from equifed.runs.many import run_jobs as run_jobs
    from equifed.runs.run import start as start

_HOMES = {
    "build": ("Run", "build_run"),
    "catalogue": ("unknown",),
    "config": ("RunConfig", "apply_override"),
    "many": ("Job", "check_folders", "make_job", "merge_tables", "run_jobs"),
    "run": ("start",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"equifed.runs.{module}"), name)
    raise AttributeError(f"module 'equifed.runs' has no attribute {name!r}")
