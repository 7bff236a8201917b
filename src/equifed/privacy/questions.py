"""What an algorithm asks of every client, counted before the first round."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from equifed.algorithms.safeguarded import Safeguarded
from equifed.contract.algorithm import layers
from equifed.contract.arrays import Index
from equifed.privacy.budget import Planned
from equifed.privacy.site import Unanswered

HARMLESS = {Safeguarded}
"""Wrappers that ask nothing themselves."""


def _second_order(core: Any) -> dict[str, int]:
    return {"losses": 1, "gradients": 1}


def _local(core: Any) -> dict[str, int]:
    return {"steps": 1}


def _scaffold(core: Any) -> dict[str, int]:
    heard = {} if core.variates == "stored" else {"losses": 1, "gradients": 1}
    return heard | {"steps": 1}


def _scaff_pd(core: Any) -> dict[str, int]:
    twice = core.gradient_batch_size != core.loss_batch_size
    return {"losses": 1 + twice, "gradients": 1, "steps": 1}


def _drfa(core: Any) -> dict[str, int]:
    return {"losses": 1, "steps": 1}


ASKED: dict[str, Callable[[Any], dict[str, int]]] = {
    "FairNewton": _second_order,
    "FedAvg": _local,
    "Scaffold": _scaffold,
    "ScaffPD": _scaff_pd,
    "DRFA": _drfa,
}
"""Answers per round of the algorithms whose questions are known; "steps" are times J."""


def count_questions(algorithm: Any, rounds: int, sizes: Index) -> list[Planned]:
    """Return what every client with so many rows is asked, or refuse the algorithm.

    >>> import numpy as np
    >>> from equifed.algorithms.fedavg import FedAvg
    >>> from equifed.contract import LocalSGD
    >>> fedavg = FedAvg(LocalSGD(lr=0.1, steps=5))
    >>> count_questions(fedavg, 10, np.array([40]))
    [Planned(moments=0, losses=0, gradients=0, steps=50, q=1.0, idle=True)]
    """
    *around, core = layers(algorithm)
    name = type(core).__name__
    known = type(core).__module__.startswith("equifed.")
    if strange := [type(part).__name__ for part in around if type(part) not in HARMLESS]:
        raise Unanswered(
            f"{strange[0]} needs answers that the privacy budget does not plan for; leave it out."
        )
    if name not in ASKED or not known:
        raise Unanswered(
            f"{name} has no private version or no plan of its cost; under privacy use "
            f"{', '.join(ASKED)}."
        )
    asked, objective = ASKED[name](core), getattr(core, "objective", None)
    idle = objective is None or type(objective).__name__ == "Average"
    once = int(name == "FairNewton")
    extra = int(objective is not None and math.isinf(objective.l1_norm(len(sizes))))
    local = getattr(core, "local", None) if "steps" in asked else None
    steps = [0] * len(sizes) if local is None else local.steps_for(sizes).tolist()
    batch = None if local is None else local.batch_size
    return [
        Planned(
            once, rounds * asked.get("losses", 0) + extra, rounds * asked.get("gradients", 0),
            rounds * count, 1.0 if batch is None else min(1.0, batch / max(size, 1)), idle,
        )
        for size, count in zip(sizes.tolist(), steps, strict=True)
    ]  # fmt: skip
