"""``fit`` under differential privacy: few candidates, of which each is paid for, as is the choice.

Every client has one ledger for all its rows. A stated part of its mu^2 is for the losses on
validation rows that choose; the rest is for the candidates' runs, equally, but for second moments,
which are told once for all of them. The parts add up for every row, whichever split it is in, and
for persons with rows in both. The chosen model is not solved again: that would be paid for, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from equifed.algorithms.fair_newton import FairNewton
from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.privacy.budget import Bounds, Planned
from equifed.privacy.clients import PrivateClients
from equifed.privacy.ledger import Ledger
from equifed.privacy.noise import make_noise
from equifed.privacy.plan import count_questions
from equifed.privacy.site import PrivateSite, Unanswered
from equifed.runs.candidates import (
    L2,
    OWN_L2,
    RHOS,
    Choice,
    Point,
    Score,
    describe_held,
    model_for,
    with_validation,
)
from equifed.runs.outcome import Found, finish_trained
from equifed.training import History, train
from equifed.training.events import PRIVACY

# Of candidates that are paid for one by one: beside the noise one penalty is like another, and own
# biases gain less than a third candidate takes from the others (benchmarks.privacy --fit).
FEW_L2, FEW_RHOS, FEW_OWN = (1e-3,), (0.3,), tuple[float, ...]()
CHOOSING = 0.2  # part of mu^2 for the validation losses


def fit_privately(
    data: Federation, privacy: Bounds, seed: int, tell: Callable[[str], None], keep_own: bool
) -> tuple[Choice, Callable[[], Found]]:
    """Return the choice, and what reads test rows and says what was gained."""
    if not isinstance(privacy, Bounds):
        raise TypeError(f"privacy must be ef.Privacy(...), got {type(privacy).__name__}.")
    if keep_own:
        raise Unanswered("Own models are functions of a client's rows; leave keep_own=False.")
    if data.test is None:
        raise Unanswered("A private model is measured on test rows alone; give test=0.25.")
    data = with_validation(data, seed, Unanswered)
    plain, points = _build(Point(0.0), data, privacy), _list_points(data)
    trained, held = _plan(data, plain, points, Stream(seed).at("private fit"))
    notes, squared = [_describe(privacy, points, data)], data.classes is None
    scale = math.log(data.classes or 1)  # the loss of a model that knows nothing
    if squared:  # known from moments, at no price
        nothing = 0 * plain.initial(Stream(seed))
        scale = float(np.mean([site.losses(nothing) for site in trained]))
    else:  # of squared losses it depends
        sigmas = [site.price("losses").sigma for site in held if site is not None]
        away = math.sqrt(2.0) * float(np.linalg.norm(sigmas)) / len(sigmas)
        told = f"Noise moves a difference of two such mean losses by {away:.2g} (its deviation)"
        notes.append(f"{told}: smaller ones are no evidence.")
    runs, scores = dict[Point, History](), dict[Point, Score]()
    given: Any = {"rounds": privacy.rounds, "seed": seed, "evaluate": [], "progress": False}
    for p in points:
        tell(f"{p.family}, {p.settings}")
        clients = _build(p, data, privacy)
        sites = [clients.make_site(i, s.ledger, s.noise, s.planned, like=s)
                 for i, s in enumerate(trained)]  # fmt: skip
        clients.answer_as(sites, notes[0])
        runs[p] = train(FairNewton(p.objective(scale)), clients, **given)
        scores[p] = _score(runs[p], plain, held)
    ledgers = [site.ledger.to_dict() for site in trained]
    for event in (event for run in runs.values() for event in run.events):
        if event["event"] == PRIVACY:  # what all runs and the choice have cost is to be published
            event["ledgers"] = ledgers
    rows = f"{describe_held(data)}, reported with noise"
    choice = Choice.take(scores, rows, model_for(data), notes, noised=True)
    return choice, partial(finish_trained, data, choice, runs)


def _list_points(data: Federation) -> list[Point]:
    free = data.classes is None  # all about squared losses follows from moments
    l2s, rhos, owns = (L2, RHOS, OWN_L2) if free else (FEW_L2, FEW_RHOS, FEW_OWN)
    shared = [Point(l2, rho=rho) for l2 in l2s for rho in (None, *rhos)]
    return [*shared, *(Point(l2, own_l2) for l2 in l2s for own_l2 in owns)]


def _build(point: Point, data: Federation, privacy: Bounds) -> PrivateClients:
    own: Any = {} if point.own_l2 is None else {"own": "bias", "own_l2": point.own_l2}
    given: Any = {"privacy": privacy, "dtype": torch.float64, **own}
    return PrivateClients(data, *model_for(data), l2=point.l2, **given)


def _plan(
    data: Federation, clients: PrivateClients, points: Sequence[Point], stream: Stream
) -> tuple[list[PrivateSite], list[PrivateSite | None]]:
    """Split every client's budget, and return what answers for training and validation rows."""
    privacy, validation = clients.privacy, data.validation
    assert validation is not None
    plans = [count_questions(FairNewton(p.objective(1.0)), privacy.rounds, data.train.sizes)
             for p in points]  # fmt: skip
    trained, held = list[PrivateSite](), list[PrivateSite | None]()
    for i, plan in enumerate(zip(*plans, strict=True)):
        # noise is addressed by the ledger, which both sites share
        ledger = Ledger(privacy.epsilon, privacy.delta, unit=privacy.unit, name=data.names[i])
        given = (i, ledger, make_noise(stream.at(i), privacy.secret))
        part = CHOOSING if validation.sizes[i] else 0.0
        asked = Planned(1, sum(p.losses for p in plan), sum(p.gradients for p in plan))
        chosen = Planned(losses=len(points))
        if data.classes is None:
            asked = chosen = Planned(moments=1)
        trained.append(clients.make_site(*given, replace(asked, part=1 - part)))
        own = replace(chosen, part=part)
        held.append(clients.make_site(*given, own, "validation") if part else None)
    return trained, held


def _describe(privacy: Bounds, points: Sequence[Point], data: Federation) -> str:
    asked_for = f"{len(points)} candidates of {privacy.rounds} rounds each"
    if data.classes is None:
        asked_for = f"second moments, from which all {len(points)} candidates follow,"
    return (
        f"{privacy.describe()}: {asked_for} {1 - CHOOSING:.0%} of mu^2, what validation rows "
        f"tell to choose {CHOOSING:.0%}. Test rows are the simulation's own and cost nothing here; "
        "they did not influence the choice."
    )


def _score(run: History, plain: PrivateClients, held: Sequence[PrivateSite | None]) -> Score:
    """Ask every client for the loss of one candidate on its validation rows."""
    found = np.full(len(held), math.nan)
    for i, site in enumerate(held):
        if site is not None:  # its own bias is that of a shared model there
            own: Any = {name: rows[i] for name, rows in (run.own or {}).items()}
            found[i] = site.losses(plain.flatten({**(run.parameters or {}), **own}))
    return Score(found, np.full(len(held), math.nan))
