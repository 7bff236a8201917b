"""Fair and distributionally robust federated learning.

Names are imported when they are first used, so that ``import equifed`` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equifed.algorithms.afl import AFL
    from equifed.algorithms.fedavg import FedAvg, fedprox
    from equifed.algorithms.scaff_pd import ScaffPD
    from equifed.algorithms.scaffold import Scaffold
    from equifed.config import ConfigError, RunConfig
    from equifed.data import DataError, Federation, Split, load
    from equifed.engines.loop import LoopClients
    from equifed.engines.stacked import stacked
    from equifed.history import History
    from equifed.local import LocalSGD
    from equifed.metrics.evaluator import FederationEvaluator
    from equifed.objectives import Average, ChiSquare, CVaR, WorstCase
    from equifed.runs import build, resume, run
    from equifed.steps import AcceleratedSteps, ConstantSteps, GivenSteps, LinearSteps
    from equifed.stopping import Stop
    from equifed.streams import Stream
    from equifed.training import Callback, Missing, TrainingError, train

_HOMES = {
    "algorithms.afl": ("AFL",),
    "algorithms.fedavg": ("FedAvg", "fedprox"),
    "algorithms.scaff_pd": ("ScaffPD",),
    "algorithms.scaffold": ("Scaffold",),
    "config": ("ConfigError", "RunConfig"),
    "data": ("DataError", "Federation", "Split", "load"),
    "engines.loop": ("LoopClients",),
    "engines.stacked": ("stacked",),
    "history": ("History",),
    "local": ("LocalSGD",),
    "metrics.evaluator": ("FederationEvaluator",),
    "objectives": ("Average", "CVaR", "ChiSquare", "WorstCase"),
    "runs": ("build", "resume", "run"),
    "steps": ("AcceleratedSteps", "ConstantSteps", "GivenSteps", "LinearSteps"),
    "stopping": ("Stop",),
    "streams": ("Stream",),
    "training": ("Callback", "Missing", "TrainingError", "train"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AFL",
    "AcceleratedSteps",
    "Average",
    "CVaR",
    "Callback",
    "ChiSquare",
    "ConfigError",
    "ConstantSteps",
    "DataError",
    "FedAvg",
    "Federation",
    "FederationEvaluator",
    "GivenSteps",
    "History",
    "LinearSteps",
    "LocalSGD",
    "LoopClients",
    "Missing",
    "RunConfig",
    "ScaffPD",
    "Scaffold",
    "Split",
    "Stop",
    "Stream",
    "TrainingError",
    "WorstCase",
    "__version__",
    "build",
    "fedprox",
    "load",
    "resume",
    "run",
    "stacked",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("equifed")
    if name not in _HOME:
        raise AttributeError(f"module 'equifed' has no attribute {name!r}")
    return getattr(importlib.import_module(f"equifed.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
