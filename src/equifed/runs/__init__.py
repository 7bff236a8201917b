"""From a TOML table or Python objects to a run folder, one or many.

Names are imported when they are first used: the catalogue in this package must stay light.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Job": "many", "Run": "build", "RunConfig": "config", "apply_override": "config",
    "build_run": "build", "check_folders": "many", "make_job": "many", "merge_tables": "comparison",
    "run_jobs": "many", "start": "run", "unknown": "catalogue",
}  # fmt: skip
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'equifed.runs' has no attribute {name!r}")
    return getattr(importlib.import_module(f"equifed.runs.{_HOMES[name]}"), name)
