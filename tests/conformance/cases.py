"""Algorithms to try, from the catalogue: a new one is here as soon as it has its line there.

Every algorithm is tried as it comes, with sampled clients if it can sample, and with other values
for whatever else it lets one choose. ``MORE`` adds combinations that deserve a case.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from typing import Any

from equifed.algorithms import tilted_erm
from equifed.algorithms.drfa import DRFA
from equifed.algorithms.fedavg import FedAvg
from equifed.algorithms.qfedavg import QFedAvg
from equifed.algorithms.remembering import Remembering
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.algorithms.scaff_pd_ia import ScaffPDIA
from equifed.algorithms.server_optimised import ServerOptimised
from equifed.algorithms.shelf.local_work import Paced
from equifed.contract.algorithm import AnyAlgorithm
from equifed.contract.local import LocalSGD
from equifed.objectives import Average, ChiSquare, CVaR, Entropic, RelativeFairness
from equifed.runs.catalogue import ALGORITHMS
from equifed.runs.schema import Setting, alternatives, settings
from equifed.steps.schedules import ConstantSteps

STEPS = LocalSGD(lr=0.05, steps=3, batch_size=3)
EPOCHS = LocalSGD(lr=0.05, epochs=1, batch_size=3)  # ragged: from one to four steps
PRIMAL_DUAL = ConstantSteps(0.1, 0.2, 0.9)
INNER = ScaffPD(CVaR(0.5))
WORK = {
    "lr": 0.05, "objective": ChiSquare(0.1), "steps": PRIMAL_DUAL, "algorithm": INNER,
    "epsilon": 1.0, "rounds": 10, "clip": 1.0,
}  # fmt: skip
"""Settings that suit the small problems, where an algorithm has them."""

SAMPLED = {"participation": 0.5, "clients_per_round": 3}
OTHER = {
    "batch_size": 3,
    "gradient_batch_size": 4,
    "server_lr": 0.5,
    "objective": CVaR(0.5),
    "dual": Entropic(),
    "warmup": 1,
    "every": 2,
}

MORE: dict[str, AnyAlgorithm] = {
    "paced/stairs": Paced(FedAvg(EPOCHS), decay=0.9, every=2),
    "remembering/sampled": Remembering(ScaffPD(CVaR(0.5), participation=0.5)),
    "remembering/fedavg": Remembering(FedAvg(EPOCHS, participation=0.5)),
    "server-optimised/adam": ServerOptimised(FedAvg(EPOCHS), "adam"),
    "server-optimised/yogi": ServerOptimised(DRFA(STEPS, clients_per_round=3), "yogi", 0.05),
    "drfa/average": DRFA(STEPS, 0.02, clients_per_round=3, output="average"),
    "drfa/entropic": DRFA(STEPS, 0.02, ChiSquare(0.1), dual=Entropic()),
    "drfa/full": DRFA(STEPS, 0.05, ChiSquare(0.1), clients_per_round=2, ascent="full"),
    "q-fedavg/lipschitz": QFedAvg(STEPS, 0.5, 10.0, "size", 0.5),
    "tilted-erm/negative": tilted_erm(STEPS, -1.0, participation=0.5),
    "scaff-pd/relative": ScaffPD(RelativeFairness(phi=0.3), STEPS, PRIMAL_DUAL),
    "scaff-pd/average": ScaffPD(Average(), STEPS, PRIMAL_DUAL, participation=0.5),
    "scaff-pd/auto": ScaffPD(CVaR(0.5)),
    "scaff-pd-ia/given": ScaffPDIA(0.2, local=STEPS, steps=PRIMAL_DUAL),
    "scaff-pd-ia/chosen": ScaffPDIA(
        "auto", CVaR(0.5), CVaR(0.5), warmup=1, local=STEPS, steps=PRIMAL_DUAL
    ),
}


def vary(constructor: Callable[..., Any]) -> Iterator[tuple[str, AnyAlgorithm]]:
    """Yield an algorithm with the values that its signature invites."""
    wanted = settings(constructor)
    base = {key: value for key, value in WORK.items() if key in wanted}
    if "algorithm" in wanted and not _accepts(constructor, base):
        base["algorithm"] = FedAvg(EPOCHS)  # where SCAFF-PD is refused
    if "local" in wanted:
        base["local"] = EPOCHS if _accepts(constructor, {**base, "local": EPOCHS}) else STEPS
    sampled = {key: value for key, value in SAMPLED.items() if key in wanted}
    other = {key: value for key, value in OTHER.items() if key in wanted}
    other |= {key: _another(setting) for key, setting in wanted.items() if _another(setting)}
    yield "plain", constructor(**base)
    if sampled:
        yield "sampled", constructor(**base, **sampled)
    if other:
        yield "other", constructor(**{**base, **other})


def _accepts(constructor: Callable[..., Any], arguments: dict[str, Any]) -> bool:
    try:
        constructor(**arguments)
    except ValueError:
        return False
    return True


def _another(setting: Setting) -> Any:
    """Return a word that the setting may be and by default is not."""
    for part in alternatives(setting.annotation):
        if typing.get_origin(part) is typing.Literal:
            return next((w for w in typing.get_args(part) if w != setting.default), None)
    return None


CASES: dict[str, AnyAlgorithm] = {
    f"{name}/{kind}": algorithm
    for name, entry in ALGORITHMS.items()
    for kind, algorithm in vary(entry.load())
} | MORE
