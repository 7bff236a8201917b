"""Which model a run gives out, and what is known about that very model.

A round tells of the model that it *starts* from: its losses, its objective and its certificate are
those of the model after the round before. What a run gives out is the model that its numbers are
about.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

import numpy as np

from equifed.contract.absence import Memory
from equifed.contract.algorithm import Info
from equifed.contract.arrays import Index, Vector, Weights
from equifed.metrics.metric import METRICS
from equifed.training.tables import MetricRecord, RoundRecord

Kind = Literal[
    "last", "certified", "average",
    "validation", "validation-tail", "validation-average", "validation-mix",
]  # fmt: skip
GiveOut = Literal["auto", Kind]

VALIDATION = {
    "validation": "whose worst client is served best",
    "validation-tail": "whose worst fifth of the clients is served best",
    "validation-average": "whose clients are served best on average",
    "validation-mix": "whose average plus worst fifth of the clients is best",
}
"""Ways to choose by the validation split, and what they say of the model."""

TAIL = 0.2
"""The worst-served part of the clients that counts: the mean over its clients, rounded up."""

DECAY = 3.0
"""Of the mean of the models: round t counts about as t^3, those of the last half 94 %."""


@dataclass(frozen=True)
class GivenOut:
    """What a run gave out.

    Parameters
    ----------
    kind : str
        ``"last"``: what the algorithm gives out after its last round; ``"certified"``: the model
        with the smallest certified gap; ``"average"``: the mean of the models of the rounds, later
        ones counting more; ``"validation"``: the best one on validation data by its worst client,
        or, with ``-tail``, ``-average`` or ``-mix`` behind it, by its worst fifth of the clients,
        the average, or the sum of these two.
    round : int
        It is the model after this many rounds.
    gap, distance, objective : float, optional
        Its certificate and its objective, where they are known.
    capped : bool
        Whether the certificate says no more than that no objective is below its smallest value.
    """

    kind: Kind
    round: int
    gap: float | None = None
    distance: float | None = None
    objective: float | None = None
    capped: bool = False

    def __str__(self) -> str:
        if self.kind == "last":
            return f"gave out the last model, that of round {self.round}"
        if self.kind == "average":
            return f"gave out the mean of the models up to round {self.round}, later ones more"
        which = f"gave out the model of round {self.round}"
        if self.kind in VALIDATION:
            return f"{which}, {VALIDATION[self.kind]} on validation data"
        return f"{which}, {self.proof()}"

    def proof(self) -> str:
        """Say what its certificate proves.

        >>> GivenOut("certified", 7, gap=0.00123).proof()
        'certified to be within 0.00123 of the smallest objective there is'
        >>> GivenOut("certified", 7, gap=0.001, objective=0.4).proof()
        'certified to be within 0.001 of the smallest objective there is, 0.25 % of its own'
        >>> GivenOut("certified", 7, gap=0.5, objective=0.5, capped=True).proof()
        'nothing is proved yet: the bound on the gap is not below the objective itself, 0.5'
        """
        if self.capped:
            itself = "itself" if self.objective is None else f"itself, {self.objective:.3g}"
            return (
                f"nothing is proved yet: the bound on the gap is not below the objective {itself}"
            )
        assert self.gap is not None
        share = ""
        if self.objective:
            share = f", {100 * self.gap / abs(self.objective):.2g} % of its own"
        return f"certified to be within {self.gap:.3g} of the smallest objective there is{share}"


def certified(round: int, numbers: Mapping[str, float], objective: float | None) -> GivenOut:
    """Return what the record of a round proves about the model that it started from."""
    capped = "uncapped_gap" in numbers
    return GivenOut(
        "certified", round - 1, numbers["gap"], numbers.get("distance"), objective, capped
    )


@dataclass(frozen=True, eq=False)
class Proved:
    """The model with the smallest certified gap, and the weights with which that was proved."""

    x: Vector
    weights: Weights
    about: GivenOut
    latest: int  # the last round that had a certificate


@dataclass(frozen=True, eq=False)
class Mean:
    """The mean of models and weights."""

    x: Vector
    weights: Weights
    count: int
    changed: int  # the last round that did without others than the one before

    def add(self, x: Vector, weights: Weights, changed: int) -> Mean:
        """Return the mean with one more model, by polynomial decay (Shamir and Zhang 2013)."""
        t = self.count + 1
        share = (DECAY + 1) / (t + DECAY)
        mean, dual = self.x + share * (x - self.x), self.weights + share * (weights - self.weights)
        return Mean(mean, dual, t, max(changed, self.changed))


@dataclass(frozen=True, eq=False)
class Validated:
    """The model that is best on validation data."""

    x: Vector
    weights: Weights | None
    round: int
    score: tuple[float, ...]
    own: Vector | None = None  # own parts of that round, where they are more than a function of x


@dataclass(frozen=True, eq=False)
class Kept:
    """What training remembers beside the algorithm's state; checkpoints hold it, too."""

    proved: Proved | None = None
    mean: Mean | None = None
    validated: Validated | None = None
    lost: Index | None = None  # who gave no usable answer in the last round; None: nobody
    stopped: str | None = None  # why, if a rule has ended the run
    leader: int = -1  # who has more than half of the weight; -1: nobody
    leads: int = 0  # for so many rounds
    lower: float | None = None  # the objective was proved not to fall below this
    memory: Memory = Memory()  # noqa: RUF009 - what absent clients sent last


@dataclass(frozen=True, eq=False)
class Choice:
    """A model, the weights that belong to it if they are not the last ones, and what it is.

    ``own`` are the own parts that go with it, if they are not those of the last state.
    """

    x: Vector
    weights: Weights | None
    given: GivenOut
    own: Vector | None = None


@dataclass(frozen=True)
class Giver:
    """Keeps the models that may be given out, and chooses among them at the end.

    ``"auto"`` is ``"certified"`` where a round of the last half has a certificate that says
    something; else ``"average"`` where a round of the last half did without other clients than the
    round before, because they gave no usable answer: steps of constant length leave noise then. (A
    client that is away all the time makes no noise, and clients that are merely not sampled do not
    count.) Else it is ``"last"``. An algorithm that gives out a mean of its own (DRFA, rFedFair)
    keeps to it, unless training stops at a certified gap.

    Parameters
    ----------
    wanted : str
        What was asked for.
    proof : bool
        Whether a stop rule looks at the certificate, which must then be that of what is given out.
    """

    wanted: GiveOut = "auto"
    proof: bool = False

    def __post_init__(self) -> None:
        if self.wanted not in get_args(GiveOut):
            known = ", ".join(get_args(GiveOut))
            raise ValueError(f"give_out must be one of {known}, got {self.wanted!r}.")
        if self.proof and self.wanted not in ("auto", "certified"):
            raise ValueError(
                f"Training that stops at a certified gap gives out the certified model, not "
                f"{self.wanted!r}; leave give_out out or say 'certified'."
            )

    def after_round(
        self, kept: Kept, record: RoundRecord, start: Vector, end: Vector, info: Info, lost: Index
    ) -> Kept:
        """Return what to keep after a round from ``start`` to ``end`` without those ``lost``."""
        r = record.round
        before = () if kept.lost is None else kept.lost
        changed = 0 if np.array_equal(before, lost) else r
        kept = replace(kept, lost=lost if len(lost) else None)
        if self.wanted in ("auto", "certified") and "gap" in record.numbers:
            kept = replace(kept, proved=_better(kept.proved, record, start, info.weights))
        if kept.mean is not None:
            kept = replace(kept, mean=kept.mean.add(end, info.weights, changed))
        elif self.wanted == "average" or (self.wanted == "auto" and changed):
            kept = replace(kept, mean=Mean(end, info.weights, 1, changed))
        return kept

    def after_evaluation(
        self,
        kept: Kept,
        r: int,
        x: Vector,
        weights: Weights | None,
        found: Sequence[MetricRecord],
        own: Vector | None = None,
    ) -> Kept:
        """Return what to keep after the evaluation of the model after round r."""
        if self.wanted not in VALIDATION:
            return kept
        score, best = _score(found, self.wanted), kept.validated
        if score is None and best is None:
            raise ValueError(
                f"give_out={self.wanted!r} chooses by the validation split, which is not "
                "evaluated or which no client has: hold one out, and name it in evaluate."
            )
        if score is None or (best is not None and score <= best.score):
            return kept
        return replace(kept, validated=Validated(x, weights, r, score, own))

    def choose(self, kept: Kept, r: int, model: Vector, own: bool) -> Choice:
        """Return what to give out after round r.

        ``model`` is what the algorithm gives out; ``own`` tells that it is not its last iterate.
        """
        kind, proved, best = self._kind(kept, r, own), kept.proved, kept.validated
        if kind == "certified" and proved is not None:
            return Choice(proved.x, proved.weights, proved.about)
        if kind == "average" and kept.mean is not None:
            return Choice(kept.mean.x, kept.mean.weights, GivenOut("average", r))
        if kind in VALIDATION and best is not None:
            about = GivenOut(cast(Kind, kind), best.round)
            return Choice(best.x, best.weights, about, best.own)
        return Choice(model, None, GivenOut("last", r))

    def _kind(self, kept: Kept, r: int, own: bool) -> GiveOut:
        proved, mean = kept.proved, kept.mean
        if self.wanted != "auto":
            return self.wanted
        recent = proved is not None and 2 * proved.latest > r
        says = proved is not None and not (own or proved.about.capped)
        if recent and (says or self.proof):
            return "certified"
        if mean is not None and 2 * mean.changed > r and not own:
            return "average"
        return "last"


def _better(best: Proved | None, record: RoundRecord, start: Vector, weights: Weights) -> Proved:
    """Return the better one of the best model so far and the one that a round started from."""
    if best is not None and (best.about.gap or 0.0) <= record.numbers["gap"]:
        return replace(best, latest=record.round)
    here = certified(record.round, record.numbers, record.objective)
    return Proved(start, weights, here, record.round)


def _score(records: Sequence[MetricRecord], by: str) -> tuple[float, ...] | None:
    """Return how good a model is on validation data, None if there are none: larger is better.

    Accuracy decides where there is one, else the loss: of the worst client, of the worst fifth of
    the clients, on average, or the sum of these two; then the average. A model that fewer clients
    have measured is worse, because the missing one may be the worst.
    """
    found = {record.metric: record for record in records if record.split == "validation"}
    for name, metric in METRICS.items():
        values = found[name].values if name in found else np.empty(0)
        gains = np.sort(metric.sign * values[~np.isnan(values)])
        if gains.size:
            mean, tail = gains.mean(), gains[: math.ceil(TAIL * gains.size)].mean()
            first = {
                "validation": gains[0],
                "validation-tail": tail,
                "validation-average": mean,
                "validation-mix": mean + tail,
            }
            return float(gains.size), float(first[by]), float(mean)
    return None
