"""What a budget buys before anything is asked, and what was spent: rows of tables."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from equifed.algorithms.drfa import DRFA
from equifed.algorithms.fair_newton import FairNewton
from equifed.algorithms.fedavg import FedAvg
from equifed.algorithms.safeguarded import Safeguarded
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.algorithms.scaffold import Scaffold
from equifed.contract.algorithm import layers
from equifed.contract.arrays import Index
from equifed.contract.local import LocalSGD
from equifed.objectives import Average, ChiSquare
from equifed.privacy.budget import Bounds, Planned
from equifed.privacy.ledger import Entry, Ledger, compose
from equifed.privacy.site import Unanswered
from equifed.training.events import PRIVACY
from equifed.training.history import History

HARMLESS = {Safeguarded}
"""Wrappers that ask nothing themselves."""

ASKED: dict[type, Callable[[Any], dict[str, int]]] = {
    FairNewton: lambda core: {"losses": 1, "gradients": 1},
    FedAvg: lambda core: {"steps": 1},
    Scaffold: lambda core: (
        {"steps": 1} | ({} if core.variates == "stored" else {"losses": 1, "gradients": 1})
    ),
    ScaffPD: lambda core: {
        "losses": 1 + (core.gradient_batch_size != core.loss_batch_size), "gradients": 1, "steps": 1
    },
    DRFA: lambda core: {"losses": 1, "steps": 1},
}  # fmt: skip
"""Answers per round of the algorithms whose questions are known; "steps" are times J."""


def count_questions(algorithm: Any, rounds: int, sizes: Index) -> list[Planned]:
    """Return what every client with so many rows is asked, or refuse the algorithm."""
    *around, core = layers(algorithm)
    if strange := [type(part).__name__ for part in around if type(part) not in HARMLESS]:
        raise Unanswered(
            f"{strange[0]} needs answers that the privacy budget does not plan for; leave it out."
        )
    if type(core) not in ASKED:
        raise Unanswered(
            f"{type(core).__name__} has no private version or no plan of its cost; under privacy "
            f"use {', '.join(known.__name__ for known in ASKED)}."
        )
    asked, objective = ASKED[type(core)](core), getattr(core, "objective", None)
    idle = objective is None or type(objective) is Average
    once = int(type(core) is FairNewton)
    extra = int(objective is not None and math.isinf(objective.l1_norm(len(sizes))))
    local = core.local if "steps" in asked else LocalSGD(lr=1.0, steps=1)
    steps = rounds * asked.get("steps", 0) * np.array(local.steps_for(sizes))
    losses, gradients = (rounds * asked.get(kind, 0) for kind in ("losses", "gradients"))
    return [
        Planned(
            once, losses + extra, gradients, count,
            min(1.0, (local.batch_size or size) / max(size, 1)), idle,
        )
        for size, count in zip(sizes.tolist(), steps.tolist(), strict=True)
    ]  # fmt: skip


def plan_answers(
    bounds: Bounds, algorithm: str, rows: Sequence[int], *, steps: int = 10,
    batch_size: int | None = None, fair: bool = True,
) -> list[list[Entry]]:  # fmt: skip
    """Return what a site of each of these numbers of rows would answer, with which noise.

    For linear models with a bias and the logistic loss; other losses have gradients as long as
    ``bounds.gradient`` says. Without ``fair`` weights do not follow losses.
    """
    local = LocalSGD(lr=0.1, steps=steps, batch_size=batch_size)
    objective = ChiSquare(1.0) if fair else Average()
    made: dict[str, Any] = {
        "fair-newton": FairNewton(objective), "fedavg": FedAvg(local), "scaffold": Scaffold(local),
        "scaff-pd": ScaffPD(objective, local), "drfa": DRFA(local, objective=objective),
    }  # fmt: skip
    if algorithm not in made:
        raise ValueError(f"algorithm must be one of {', '.join(made)}, got {algorithm!r}.")
    reach, found = bounds.reach(), []
    planned = count_questions(made[algorithm], bounds.rounds, np.array(rows))
    for m, one in zip(rows, planned, strict=True):
        scales, drawn = bounds.multipliers(one), {"steps": round(one.q * m)}
        found.append([
            bounds.price(kind, reach[kind], scales[kind], m, drawn.get(kind, m), steps=count)
            for kind, count in one.counts().items()
        ])  # fmt: skip
    return found


def list_entries(ledger: Ledger) -> list[dict[str, Any]]:
    """Return every kind of answer with its price, and which part of the budget it is.

    ``share`` is that of mu^2, which adds up; where rows are sampled there is none. ``alone`` is
    the epsilon of this kind without the others, which does not add up.
    """
    shares = [e.square / ledger.mu**2 if e.q == 1 else None for e in ledger.entries]
    pairs = zip(ledger.entries, shares, strict=True)
    return [asdict(e) | {"share": s, "alone": compose([e], ledger.delta)} for e, s in pairs]


def read_ledgers(path: Path) -> list[Ledger]:
    """Return the ledgers of a site's file, or of a finished run."""
    if path.is_dir():
        ends = [e for e in History.load(path, model=False).events if e["event"] == PRIVACY]
        if not ends:
            raise ValueError(
                f"{path} records no privacy: its clients answered without noise, or it is not "
                "finished. Give the folder of a private run, or a site's ledger file."
            )
        return [Ledger.from_dict(told) for told in ends[-1]["ledgers"]]
    try:
        return [Ledger.from_dict(json.loads(path.read_text(encoding="utf-8")))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a privacy ledger ({error}).") from error
