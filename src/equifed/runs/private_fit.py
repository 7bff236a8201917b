"""``fit`` under differential privacy: few candidates, of which each is paid for, as is the choice.

Every client has one ledger for all its rows. A stated part of its mu^2 is for the losses on
validation rows that choose; the rest is for the candidates' runs, equally, but for second moments,
which are told once for all of them. The parts add up for every row, whichever split it is in, and
for persons with rows in both. The chosen model is not solved again: that would be paid for, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch

from equifed.algorithms.fair_newton import FairNewton
from equifed.contract.arrays import Losses
from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.models.predictor import Predictor
from equifed.objectives import Average, ChiSquare
from equifed.privacy.budget import Bounds, Planned
from equifed.privacy.clients import PrivateClients
from equifed.privacy.ledger import Ledger
from equifed.privacy.noise import make_noise
from equifed.privacy.plan import count_questions
from equifed.privacy.site import PrivateSite, Unanswered
from equifed.runs.candidates import (
    BASE,
    L2,
    OWN_L2,
    RHOS,
    Choice,
    Point,
    Score,
    find_best,
    model_for,
)
from equifed.runs.held_out import with_validation
from equifed.runs.outcome import describe_gain, list_rows, score_rows, tell_apart
from equifed.training.events import PRIVACY, describe_samples
from equifed.training.history import History
from equifed.training.loop import train

FEW_L2, FEW_RHOS, FEW_OWN = (1e-3,), (0.3,), tuple[float, ...]()
"""Of candidates that are paid for one by one: beside the noise one penalty is like another, and own
biases gain less than a third candidate takes from the others (``benchmarks.privacy --fit``)."""
CHOOSING = 0.2
"""Part of mu^2 for the validation losses."""


@dataclass(frozen=True, eq=False)
class Asked:
    """The sites of all clients, before anything was asked: their training and validation rows."""

    points: tuple[Point, ...]
    train: tuple[PrivateSite, ...]
    held: tuple[PrivateSite | None, ...]  # None: a client without validation rows
    told: str

    def lend(self, clients: PrivateClients) -> None:
        """Let clients answer from the budget of all candidates."""
        pairs = enumerate(self.train)
        sites = [clients.make_site(i, s.ledger, s.noise, s.planned, like=s) for i, s in pairs]
        clients.answer_as(sites, self.told)

    def score(self, run: History, plain: PrivateClients) -> Losses:
        """Ask every client for the loss of one candidate on its validation rows."""
        found = np.full(len(self.held), math.nan)
        for i, site in enumerate(self.held):
            if site is not None:  # its own bias is that of a shared model there
                own = {name: rows[i] for name, rows in (run.own or {}).items()}
                found[i] = site.losses(plain.flatten(cast(Any, {**(run.parameters or {}), **own})))
        return found

    def describe_noise(self) -> list[str]:
        """Say how far noise moves a difference of two mean losses; of squared ones it depends."""
        if self.train[0].linear == "squared":
            return []
        sigmas = [site.price("losses").sigma for site in self.held if site is not None]
        away = math.sqrt(2.0) * float(np.linalg.norm(sigmas)) / len(sigmas)
        told = f"Noise moves a difference of two such mean losses by {away:.2g} (its deviation)"
        return [f"{told}: smaller ones are no evidence."]


def fit_privately(
    data: Federation, privacy: Bounds, seed: int, tell: Callable[[str], None], keep_own: bool
) -> tuple[Choice, str, list[dict[str, Any]], dict[str, History]]:
    """Return the choice, what was gained, a row for every kind of candidate, and their runs."""
    if not isinstance(privacy, Bounds):
        raise TypeError(f"privacy must be ef.Privacy(...), got {type(privacy).__name__}.")
    if keep_own:
        raise Unanswered("Own models are functions of a client's rows; leave keep_own=False.")
    if data.test is None:
        raise Unanswered("A private model is measured on test rows alone; give test=0.25.")
    data = with_validation(data, seed, Unanswered)

    def build(p: Point) -> PrivateClients:
        own: Any = {} if p.own_l2 is None else {"own": "bias", "own_l2": p.own_l2}
        given: Any = {"privacy": privacy, "dtype": torch.float64, **own}
        return PrivateClients(data, *model_for(data), l2=p.l2, **given)

    plain = build(Point(0.0))
    asked = _plan(data, plain, Stream(seed).at("private fit"))
    scale = math.log(data.classes or 1)  # the loss of a model that knows nothing
    if data.classes is None:  # known from moments, at no price
        nothing = 0 * plain.initial(Stream(seed))
        scale = float(np.mean([site.losses(nothing) for site in asked.train]))
    runs, scores = dict[Point, History](), dict[Point, Score]()
    given: Any = {"rounds": privacy.rounds, "seed": seed, "evaluate": [], "progress": False}
    for p in asked.points:
        tell(f"{p.family}, {p.settings}")
        clients = build(p)
        asked.lend(clients)
        runs[p] = train(FairNewton(_objective(p, scale)), clients, **given)
        scores[p] = Score(asked.score(runs[p], plain), np.full(len(data), math.nan))
    ledgers = [site.ledger.to_dict() for site in asked.train]
    for event in (event for run in runs.values() for event in run.events):
        if event["event"] == PRIVACY:  # what all runs and the choice have cost is to be published
            event["ledgers"] = ledgers
    choice = _choose(data, asked, scores)
    best = {family: runs[p] for family, p in choice.best.items()}
    for family, p in choice.best.items():
        _read_test(best[family], build(p))
    mine, base = (
        score_rows(data, cast(Predictor, best[k].predictor()), "test") for k in (choice.name, BASE)
    )
    rows = list_rows(choice, best, None, "test")
    for row in rows:  # nothing else was asked of validation rows
        row["validation"] = {"loss": row["validation"]["loss"]}
    return choice, describe_gain(choice, best, "test", tell_apart(mine, base), False), rows, best


def _read_test(history: History, clients: PrivateClients) -> None:
    """Measure a run's model on test rows, now that the choice is made."""
    x = clients.flatten(cast(Any, history.parameters))
    if history.own is not None:
        rows = [part.flatten(1) for part in history.own.values()]
        clients = clients.with_own(torch.cat(rows, dim=1))
    history.add_evaluation(history.rounds[-1].round, clients.evaluate(x, ["test"]))
    describe_samples(clients, history, (), x)


def _objective(point: Point, scale: float) -> Average | ChiSquare:
    return Average() if point.rho is None else ChiSquare(point.rho, scale=scale)


def _plan(data: Federation, clients: PrivateClients, stream: Stream) -> Asked:
    """Split every client's budget, and return what answers."""
    privacy, validation, squared = clients.privacy, data.validation, data.classes is None
    assert validation is not None
    l2s, rhos, owns = (L2, RHOS, OWN_L2) if squared else (FEW_L2, FEW_RHOS, FEW_OWN)
    shared = tuple(Point(l2, rho=rho) for l2 in l2s for rho in (None, *rhos))
    points = (*shared, *(Point(l2, own_l2) for l2 in l2s for own_l2 in owns))
    runs = [FairNewton(_objective(p, 1.0)) for p in points]
    plans = zip(*(count_questions(r, privacy.rounds, data.train.sizes) for r in runs), strict=True)
    trained, held = list[PrivateSite](), list[PrivateSite | None]()
    for i, plan in enumerate(plans):  # noise is addressed by the ledger, which both sites share
        ledger = Ledger(privacy.epsilon, privacy.delta, unit=privacy.unit, name=data.names[i])
        given, part = (i, ledger, make_noise(stream.at(i), privacy.secret)), CHOOSING
        if not validation.sizes[i]:
            part = 0.0
        asked = Planned(1, sum(p.losses for p in plan), sum(p.gradients for p in plan))
        chosen = Planned(losses=len(points))
        if squared:  # all about squared losses follows from moments
            asked = chosen = Planned(moments=1)
        trained.append(clients.make_site(*given, replace(asked, part=1 - part)))
        own = replace(chosen, part=part)
        held.append(clients.make_site(*given, own, "validation") if part else None)
    asked_for = f"{len(points)} candidates of {privacy.rounds} rounds each"
    if squared:
        asked_for = f"second moments, from which all {len(points)} candidates follow,"
    told = (
        f"{privacy.describe()}: {asked_for} {1 - CHOOSING:.0%} of mu^2, what validation rows "
        f"tell to choose {CHOOSING:.0%}. Test rows are the simulation's own and cost nothing here; "
        "they did not influence the choice."
    )
    return Asked(points, tuple(trained), tuple(held), told)


def _choose(data: Federation, asked: Asked, scores: Mapping[Point, Score]) -> Choice:
    """Take the smallest mean of the noised losses."""
    best, point = find_best(scores), min(scores, key=lambda p: scores[p].mean)
    held, who = data.validation, sum(site is not None for site in asked.held)
    assert held is not None
    rows = f"{len(held):,} validation rows of {who} clients, reported with noise"
    notes = asked.told, *asked.describe_noise()
    told = {family: scores[p] for family, p in best.items()}
    l2s, model = np.full(len(data), L2[-1]), model_for(data)
    return Choice(point, best, told, (), l2s, rows, len(scores), notes, model, noised=True)
