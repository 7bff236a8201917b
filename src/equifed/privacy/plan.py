"""What a budget buys before anything is asked, and what was spent: rows of tables."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from equifed.algorithms import DRFA, FairNewton, FedAvg, Safeguarded, Scaffold, ScaffPD
from equifed.contract import Index, LocalSGD
from equifed.contract.algorithm import layers
from equifed.objectives import Average, ChiSquare
from equifed.privacy.budget import Bounds, Planned
from equifed.privacy.ledger import Entry, Ledger, compose
from equifed.privacy.site import Unanswered
from equifed.training import History
from equifed.training.events import PRIVACY

ASKED: dict[type, Callable[[Any], dict[str, int]]] = {
    FairNewton: lambda core: {"moments": 1, "losses": 1, "gradients": 1},
    FedAvg: lambda core: {"steps": 1},
    Scaffold: lambda core: (
        {"steps": 1} | ({} if core.variates == "stored" else {"losses": 1, "gradients": 1})
    ),
    ScaffPD: lambda core: {
        "losses": 1 + (core.gradient_batch_size != core.loss_batch_size), "gradients": 1, "steps": 1
    },
    DRFA: lambda core: {"losses": 1, "steps": 1},
}  # fmt: skip
"""Answers per round of the algorithms whose questions are known; "steps" are times J, moments are
told once."""
ONE_STEP = LocalSGD(lr=1.0, steps=1)


def count_questions(algorithm: Any, rounds: int, sizes: Index) -> list[Planned]:
    """Return what every client with so many rows is asked, or refuse the algorithm."""
    *around, core = layers(algorithm)
    strange = [type(part).__name__ for part in around if type(part) is not Safeguarded]
    if strange:  # the safeguard asks nothing itself
        raise Unanswered(
            f"{strange[0]} needs answers that the privacy budget does not plan for; leave it out."
        )
    if type(core) not in ASKED:
        raise Unanswered(
            f"{type(core).__name__} has no private version or no plan of its cost; under privacy "
            f"use {', '.join(known.__name__ for known in ASKED)}."
        )
    asked = Counter(ASKED[type(core)](core))
    objective, local = getattr(core, "objective", None), getattr(core, "local", ONE_STEP)
    idle = objective is None or type(objective) is Average
    extra = objective is not None and math.isinf(objective.l1_norm(len(sizes)))
    given = asked["moments"], rounds * asked["losses"] + extra, rounds * asked["gradients"]
    steps = rounds * asked["steps"] * local.steps_for(sizes)
    shares = [min(1.0, (local.batch_size or size) / max(size, 1)) for size in sizes.tolist()]
    pairs = zip(steps.tolist(), shares, strict=True)
    return [Planned(*given, count, q, idle) for count, q in pairs]


def plan_answers(
    bounds: Bounds, algorithm: str, rows: Sequence[int], *, steps: int = 10,
    batch_size: int | None = None, fair: bool = True,
) -> list[list[Entry]]:  # fmt: skip
    """Return what sites of so many rows would answer, by a logistic model with a bias.

    Without ``fair`` weights do not follow losses.
    """
    local = LocalSGD(lr=0.1, steps=steps, batch_size=batch_size)
    objective = ChiSquare(1.0) if fair else Average()
    made: dict[str, Any] = {
        "fair-newton": FairNewton(objective), "fedavg": FedAvg(local), "scaffold": Scaffold(local),
        "scaff-pd": ScaffPD(objective, local), "drfa": DRFA(local, objective=objective),
    }  # fmt: skip
    if algorithm not in made:
        raise ValueError(f"algorithm must be one of {', '.join(made)}, got {algorithm!r}.")
    reach = bounds.reach()
    planned = count_questions(made[algorithm], bounds.rounds, np.array(rows))
    return [
        [
            bounds.price(kind, one, reach[kind], m, steps=count)
            for kind, count in one.counts().items()
        ]
        for m, one in zip(rows, planned, strict=True)
    ]


def list_entries(ledger: Ledger) -> list[dict[str, Any]]:
    """Return every kind of answer with its ``share`` of mu^2, and its epsilon ``alone``.

    Shares add up, epsilons do not; where rows are sampled there is no share.
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
