"""Fair and distributionally robust federated learning.

Names are imported when they are first used, so that ``import equifed`` costs next to nothing. The
algorithms are those of the catalogue; ``__init__.pyi`` tells type checkers the same names.
"""

from __future__ import annotations

import importlib
from typing import Any

_FOLDERS = ("data", "metrics", "objectives", "steps", "testing")
_HOMES = {
    "Callback": "training.trackers",
    "Federation": "data.federation",
    "Guard": "algorithms.guard_limits",
    "History": "training.history",
    "LocalSGD": "contract.local",
    "MissingPolicy": "training.play_round",
    "Privacy": "privacy.clients",
    "StopWhen": "training.final_model",
    "alone": "runs.alone",
    "compare": "runs.comparison",
    "fit": "runs.fit",
    "features": "models.features",
    "load": "datasets.registry",
    "load_predictor": "runs.load",
    "personalise": "runs.personalise",
    "resume": "runs.run",
    "run": "runs.run",
    "simulate": "engines.simulate",
    "train": "training.loop",
    "write_report": "report.page",
}


def _algorithms() -> dict[str, str]:
    from equifed.runs.catalogue import ALGORITHMS

    addresses = (entry.address.partition(":") for entry in ALGORITHMS.values())
    return {name: module.removeprefix("equifed.") for module, _, name in addresses}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("equifed")
    if name in _FOLDERS:
        return importlib.import_module(f"equifed.{name}")
    homes = _HOMES | (_algorithms() if name not in _HOMES and name[:1] != "_" else {})
    if name == "__all__":
        return sorted({*_HOMES, *_algorithms(), *_FOLDERS, "__version__"})
    if name not in homes:
        raise AttributeError(f"module 'equifed' has no attribute {name!r}")
    return getattr(importlib.import_module(f"equifed.{homes[name]}"), name)


def __dir__() -> list[str]:
    return list(__getattr__("__all__"))
