"""``fit`` under differential privacy: few candidates, of which each is paid for, as is the choice.

Every client has one ledger for all its rows: a part of its mu^2 is for the losses on validation
rows that choose, the rest for the candidates' runs, equally, and for second moments, told once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from equifed.algorithms import FairNewton
from equifed.contract import Stream
from equifed.data import Federation
from equifed.privacy.clients import PrivateClients
from equifed.privacy.ledger import Bounds, Planned
from equifed.privacy.noise import make_noise
from equifed.privacy.site import PrivateSite, Unanswered
from equifed.runs import candidates
from equifed.runs.candidates import L2, OWN_L2, RHOS, Choice, Point, Score
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
    data = candidates.with_validation(data, seed, Unanswered)
    plain, points = _build(Point(0.0), data, privacy), _list_points(data)
    trained, held = _plan(data, plain, points, Stream(seed).at("private fit"))
    notes = [_describe(privacy, points, data)]
    if data.classes is None:  # the loss of a model that knows nothing is known from moments
        nothing = 0 * plain.initial(Stream(seed))
        scale = float(np.mean([site.losses(nothing) for site in trained]))
    else:  # of squared losses the noise depends
        scale = math.log(data.classes)
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
    rows = f"{candidates.describe_held(data)}, reported with noise"
    choice = Choice.take(scores, rows, candidates.model_for(data), notes, noised=True)
    return choice, partial(finish_trained, data, choice, runs)


def _list_points(data: Federation) -> list[Point]:
    free = data.classes is None  # all about squared losses follows from moments
    l2s, rhos, owns = (L2, RHOS, OWN_L2) if free else (FEW_L2, FEW_RHOS, FEW_OWN)
    shared = [Point(l2, rho=rho) for l2 in l2s for rho in (None, *rhos)]
    return [*shared, *(Point(l2, own_l2) for l2 in l2s for own_l2 in owns)]


def _build(point: Point, data: Federation, privacy: Bounds) -> PrivateClients:
    own: Any = {} if point.own_l2 is None else {"own": "bias", "own_l2": point.own_l2}
    given: Any = {"privacy": privacy, "dtype": torch.float64, **own}
    return PrivateClients(data, *candidates.model_for(data), l2=point.l2, **given)


def _plan(
    data: Federation, clients: PrivateClients, points: Sequence[Point], stream: Stream
) -> tuple[list[PrivateSite], list[PrivateSite | None]]:
    """Split every client's budget, and return what answers for training and validation rows."""
    privacy, times = clients.privacy, len(points) * clients.privacy.rounds
    asked, chosen = Planned(1, times, times), Planned(losses=len(points))
    if data.classes is None:
        asked = chosen = Planned(moments=1)
    assert data.validation is not None
    trained, held = list[PrivateSite](), list[PrivateSite | None]()
    for i, (ledger, rows) in enumerate(zip(clients.ledgers, data.validation.sizes, strict=True)):
        given = i, ledger, make_noise(stream.at(i), privacy.secret)  # addressed by the ledger
        part = CHOOSING if rows else 0.0
        trained.append(clients.make_site(*given, replace(asked, part=1 - part)))
        own = replace(chosen, part=part)
        held.append(clients.make_site(*given, own, "validation") if part else None)
    return trained, held


def _describe(privacy: Bounds, points: Sequence[Point], data: Federation) -> str:
    asked = f"{len(points)} candidates of {privacy.rounds} rounds each"
    if data.classes is None:
        asked = f"second moments, from which all {len(points)} candidates follow,"
    whole = f"{1 - CHOOSING:.0%} of mu^2, what validation rows tell to choose {CHOOSING:.0%}"
    free = "the simulation's own and cost nothing here; they did not influence the choice"
    return f"{privacy.describe()}: {asked} {whole}. Test rows are {free}."


def _score(run: History, plain: PrivateClients, held: Sequence[PrivateSite | None]) -> Score:
    """Ask every client for the loss of one candidate on its validation rows."""
    found = np.full(len(held), math.nan)
    for i, site in enumerate(held):
        if site is not None:  # its own bias is that of a shared model there
            own: Any = {name: rows[i] for name, rows in (run.own or {}).items()}
            found[i] = site.losses(plain.flatten({**(run.parameters or {}), **own}))
    return Score(found, np.full(len(held), math.nan))
