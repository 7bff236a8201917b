"""Fair and distributionally robust federated learning.

Names are imported when they are first used, so that ``import equifed`` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equifed.algorithms.afl import AFL
    from equifed.algorithms.agnostic_fedavg import AgnosticFedAvg
    from equifed.algorithms.delta_fl import DeltaFL
    from equifed.algorithms.drfa import DRFA
    from equifed.algorithms.fedavg import FedAvg, fedprox
    from equifed.algorithms.qfedavg import QFedAvg, qfedsgd
    from equifed.algorithms.rfedfair import RFedFair
    from equifed.algorithms.scaff_pd import ScaffPD
    from equifed.algorithms.scaff_pd_ia import ScaffPDIA
    from equifed.algorithms.scaffold import Scaffold
    from equifed.algorithms.tilted import TiltedERM
    from equifed.auto_steps import AutoSteps
    from equifed.certificate import Certify
    from equifed.config import ConfigError, RunConfig
    from equifed.data import DataError, Federation, Split, load
    from equifed.engines.loop import LoopClients
    from equifed.engines.stacked import stacked
    from equifed.history import History
    from equifed.local import LocalSGD
    from equifed.metrics.evaluator import FederationEvaluator
    from equifed.objectives import (
        KL,
        Average,
        ChiSquare,
        CVaR,
        Distance1,
        Distance2,
        Entropic,
        Euclidean,
        HeterogeneousCVaR,
        QFair,
        RelativeFairness,
        Tilted,
        Transport,
        WorstCase,
    )
    from equifed.runs import build, resume, run
    from equifed.steps import (
        AcceleratedSteps,
        ConstantSteps,
        GivenSteps,
        IntegratedSteps,
        LinearSteps,
    )
    from equifed.stopping import Stop
    from equifed.streams import Stream
    from equifed.training import Callback, Missing, TrainingError, train

_HOMES = {
    "algorithms.afl": ("AFL",),
    "algorithms.agnostic_fedavg": ("AgnosticFedAvg",),
    "algorithms.delta_fl": ("DeltaFL",),
    "algorithms.drfa": ("DRFA",),
    "algorithms.fedavg": (
        "FedAvg",
        "fedprox",
    ),
    "algorithms.qfedavg": (
        "QFedAvg",
        "qfedsgd",
    ),
    "algorithms.rfedfair": ("RFedFair",),
    "algorithms.scaff_pd": ("ScaffPD",),
    "algorithms.scaff_pd_ia": ("ScaffPDIA",),
    "algorithms.scaffold": ("Scaffold",),
    "algorithms.tilted": ("TiltedERM",),
    "auto_steps": ("AutoSteps",),
    "certificate": ("Certify",),
    "config": (
        "ConfigError",
        "RunConfig",
    ),
    "data": (
        "DataError",
        "Federation",
        "Split",
        "load",
    ),
    "engines.loop": ("LoopClients",),
    "engines.stacked": ("stacked",),
    "history": ("History",),
    "local": ("LocalSGD",),
    "metrics.evaluator": ("FederationEvaluator",),
    "objectives": (
        "KL",
        "Average",
        "ChiSquare",
        "CVaR",
        "Distance1",
        "Distance2",
        "Entropic",
        "Euclidean",
        "HeterogeneousCVaR",
        "QFair",
        "RelativeFairness",
        "Tilted",
        "Transport",
        "WorstCase",
    ),
    "runs": (
        "build",
        "resume",
        "run",
    ),
    "steps": (
        "AcceleratedSteps",
        "ConstantSteps",
        "GivenSteps",
        "IntegratedSteps",
        "LinearSteps",
    ),
    "stopping": ("Stop",),
    "streams": ("Stream",),
    "training": (
        "Callback",
        "Missing",
        "TrainingError",
        "train",
    ),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AFL",
    "DRFA",
    "KL",
    "AcceleratedSteps",
    "AgnosticFedAvg",
    "AutoSteps",
    "Average",
    "CVaR",
    "Callback",
    "Certify",
    "ChiSquare",
    "ConfigError",
    "ConstantSteps",
    "DataError",
    "DeltaFL",
    "Distance1",
    "Distance2",
    "Entropic",
    "Euclidean",
    "FedAvg",
    "Federation",
    "FederationEvaluator",
    "GivenSteps",
    "HeterogeneousCVaR",
    "History",
    "IntegratedSteps",
    "LinearSteps",
    "LocalSGD",
    "LoopClients",
    "Missing",
    "QFair",
    "QFedAvg",
    "RFedFair",
    "RelativeFairness",
    "RunConfig",
    "ScaffPD",
    "ScaffPDIA",
    "Scaffold",
    "Split",
    "Stop",
    "Stream",
    "Tilted",
    "TiltedERM",
    "TrainingError",
    "Transport",
    "WorstCase",
    "__version__",
    "build",
    "fedprox",
    "load",
    "qfedsgd",
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
