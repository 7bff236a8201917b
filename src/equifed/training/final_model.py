"""Which model a run gives out, and what is known about that very model.

A round tells of the model that it *starts* from: its losses, its objective and its certificate are
those of the model after the round before. What a run gives out is the model that its numbers are
about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from equifed.contract.absence import Memory
from equifed.contract.algorithm import Info
from equifed.contract.arrays import Index, Vector, Weights
from equifed.metrics.metric import METRICS
from equifed.steps.schedules import share_of_latest
from equifed.training.tables import MetricRecord, RoundRecord

Kind = Literal["last", "certified", "average", "validation"]
GiveOut = Literal["auto", Kind]


@dataclass(frozen=True)
class GivenOut:
    """What a run gave out.

    Parameters
    ----------
    kind : str
        ``"last"``: what the algorithm gives out after its last round; ``"certified"``: the model
        with the smallest certified gap; ``"average"``: the mean of the models of the rounds, later
        ones counting more; ``"validation"``: the one whose worst client is served best on
        validation data.
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
        why = "whose worst client is served best on validation data"
        if self.kind == "certified":
            why = self.proof()
        return f"gave out the model of round {self.round}, {why}"

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
class FinalModel:
    """A model that a run may give out, and what it is.

    ``weights`` and ``own`` are the clients' weights and own parts that go with it; None: the last.
    """

    x: Vector
    weights: Weights | None
    given: GivenOut
    own: Vector | None = None


@dataclass(frozen=True, eq=False)
class Mean:
    """The mean of models and weights, later ones counting more."""

    x: Vector
    weights: Weights
    count: int
    changed: int  # the last round that did without others than the one before

    def add(self, x: Vector, weights: Weights, changed: int) -> Mean:
        """Return the mean with one more model."""
        share = share_of_latest(self.count + 1)
        mean, dual = self.x + share * (x - self.x), self.weights + share * (weights - self.weights)
        return Mean(mean, dual, self.count + 1, max(changed, self.changed))


@dataclass(frozen=True, eq=False)
class Kept:
    """What training remembers beside the algorithm's state; checkpoints hold it, too."""

    proved: FinalModel | None = None  # the model with the smallest certified gap
    latest: int = 0  # the last round that had a certificate
    lower: float | None = None  # the objective was proved not to fall below this
    mean: Mean | None = None
    validated: FinalModel | None = None  # the best one on validation data
    score: tuple[float, ...] = ()  # and how good it is
    lost: Index | None = None  # who gave no usable answer in the last round; None: nobody
    memory: Memory = Memory()  # noqa: RUF009 - what absent clients sent last
    own: Vector | None = None  # own parts (N, p) of all clients, where local steps move them
    stopped: str | None = None  # why, if a rule has ended the run
    leader: int = -1  # who has more than half of the weight; -1: nobody
    leads: int = 0  # for so many rounds


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
            here = certified(r, record.numbers, record.objective)
            best = kept.proved
            if best is None or not (best.given.gap or 0.0) <= record.numbers["gap"]:
                best = FinalModel(start, info.weights, here)
            kept = replace(kept, proved=best, latest=r)
        if kept.mean is not None:
            return replace(kept, mean=kept.mean.add(end, info.weights, changed))
        if self.wanted == "average" or (self.wanted == "auto" and changed):
            return replace(kept, mean=Mean(end, info.weights, 1, changed))
        return kept

    def after_evaluation(
        self, kept: Kept, r: int, x: Vector, weights: Weights | None, found: Sequence[MetricRecord]
    ) -> Kept:
        """Return what to keep after the evaluation of the model after round r."""
        if self.wanted != "validation":
            return kept
        score = _score(found)
        if score is None and kept.validated is None:
            raise ValueError(
                "give_out='validation' chooses by the validation split, which is not "
                "evaluated or which no client has: hold one out, and name it in evaluate."
            )
        if score is None or score <= kept.score:
            return kept
        best = FinalModel(x, weights, GivenOut("validation", r), kept.own)
        return replace(kept, validated=best, score=score)

    def choose(self, kept: Kept, r: int, model: Vector, own: bool) -> FinalModel:
        """Return what to give out after round r.

        ``model`` is what the algorithm gives out; ``own`` tells that it is not its last iterate.
        """
        kind, mean = self._kind(kept, r, own), kept.mean
        last = FinalModel(model, None, GivenOut("last", r))
        if kind == "average" and mean is not None:
            return FinalModel(mean.x, mean.weights, GivenOut("average", r))
        return {"certified": kept.proved, "validation": kept.validated}.get(kind) or last

    def _kind(self, kept: Kept, r: int, own: bool) -> GiveOut:
        if self.wanted != "auto":
            return self.wanted
        proved, mean = kept.proved, kept.mean
        says = proved is not None and (self.proof or not (own or proved.given.capped))
        if says and 2 * kept.latest > r:
            return "certified"
        return "average" if mean is not None and 2 * mean.changed > r and not own else "last"


def _score(records: Sequence[MetricRecord]) -> tuple[float, ...] | None:
    """Return how good a model is on validation data, None if there are none: larger is better.

    Accuracy decides where there is one, else the loss: of the worst client, then the average. A
    model that fewer clients have measured is worse, because the missing one may be the worst.
    """
    found = {record.metric: record for record in records if record.split == "validation"}
    for name, metric in METRICS.items():
        values = found[name].values if name in found else np.empty(0)
        gains = np.sort(metric.sign * values[~np.isnan(values)])
        if gains.size:
            return float(gains.size), float(gains[0]), float(gains.mean())
    return None
