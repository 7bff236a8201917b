"""When a run stops, and which model it gives out.

Rules to stop look at the history alone, so that a resumed run stops where it would have. A round
tells of the model that it *starts* from: its losses, its objective and its certificate are those of
the model after the round before. What a run gives out is the model that its numbers are about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from equifed.contract.absence import Memory
from equifed.contract.algorithm import Info
from equifed.contract.arrays import Index, Vector, Weights, check_settings
from equifed.metrics.metric import METRICS, as_metric, find_metric
from equifed.steps.schedules import share_of_latest
from equifed.training.history import History
from equifed.training.tables import GivenOut, MetricRecord, RoundRecord, certified

GiveOut = Literal["auto", "last", "certified", "average", "validation"]
SplitName = Literal["train", "validation", "test"]

# Sampled rounds from which a mean of convex models is mostly better than the last one, and never
# much worse; that of networks is not (``python -m benchmarks.sampling --mean``)
LONG = 50

# Looks at the history after a round and returns why to stop, or None. One that looks at the
# certificate has an attribute ``proof`` that is true: the model that is then given out must be the
# one that the certificate is about
StopRule = Callable[[History], str | None]


@dataclass(frozen=True)
class StopWhen:
    """When to stop before the last round; all of it is optional.

    >>> record = RoundRecord(1, None, 1, 0, 0, seconds=2.0)
    >>> StopWhen(seconds=1.0)(History(("a",), rounds=[record]))
    'the time limit of 1 s was reached'

    Parameters
    ----------
    seconds : float, optional
        After this much training time.
    at_gap, at_relative_gap : float, optional
        When a certificate proves the training objective to be this close to its minimum, as a
        number or as a fraction of the objective; the model of which it is proved is given out.
    target : float, optional
        When the metric is this good.
    patience : int, optional
        After this many evaluations without a better value of the metric.
    metric, split, of
        What target and patience look at. Looking at test data would make its result worthless as
        an estimate; validation is the default.
    """

    seconds: float | None = None
    target: float | None = None
    patience: int | None = None
    metric: str = "accuracy"
    split: SplitName = "validation"
    of: Literal["worst", "average"] = "worst"
    at_gap: float | None = None
    at_relative_gap: float | None = None

    def __post_init__(self) -> None:
        check_settings(self, seconds="(0, inf]", at_gap="(0, inf]", at_relative_gap="(0, 1)")
        check_settings(self, patience="[1, inf]")
        as_metric(self.metric)

    def __call__(self, history: History) -> str | None:
        """Return why to stop, or None."""
        spent = sum(record.seconds for record in history.rounds)
        if self.seconds is not None and spent >= self.seconds:
            return f"the time limit of {self.seconds:g} s was reached"
        return self._check_gap(history.rounds[-1]) or self._check_metric(history)

    def _check_gap(self, last: RoundRecord) -> str | None:
        """Look at the certificate of the model that the last round started from."""
        gap, size = last.numbers.get("gap"), abs(last.objective or 0.0)
        if gap is None:
            return None
        if self.at_gap is not None and gap <= self.at_gap:
            return f"the objective is proved to be within {gap:.3g} of its minimum"
        if self.at_relative_gap is None or not size or gap > self.at_relative_gap * size:
            return None
        return f"the objective is proved to be within {100 * gap / size:.2g} % of its minimum"

    def _check_metric(self, history: History) -> str | None:
        """Look at the clients' metric: is it good enough, or does it no longer improve."""
        _, values = history.series(self.metric, self.split)
        sign = find_metric(self.metric).sign
        gains = sign * values[:, ~np.isnan(values).all(axis=0)]  # of those who have samples
        if not self.needs_metric or not gains.size:
            return None
        scores = (np.nanmin if self.of == "worst" else np.nanmean)(gains, axis=1)
        what, n = f"{self.split} {self.metric} ({self.of})", self.patience
        if self.target is not None and scores[-1] >= sign * self.target:
            return f"{what} reached {abs(scores[-1]):.6g}"
        if n is None or len(scores) <= n or scores[-n:].max() > scores[:-n].max():
            return None
        return f"{what} has not improved for {n} evaluations"

    @property
    def needs_metric(self) -> bool:
        """Whether it looks at an evaluation."""
        return self.target is not None or self.patience is not None

    @property
    def proof(self) -> bool:
        """Whether it looks at the certificate."""
        return self.at_gap is not None or self.at_relative_gap is not None


def as_rules(given: Any) -> tuple[StopRule, ...]:
    """Return the rules that were asked for: none, one or several."""
    found = () if given is None else tuple(given) if isinstance(given, Iterable) else (given,)
    if any(isinstance(rule, type) or not callable(rule) for rule in found):
        raise ValueError(
            f"stop must be a rule, a sequence of rules or None, got {given!r}; use "
            "ef.StopWhen(at_gap=1e-3), or give a function of the history that returns why to stop, "
            "or None."
        )
    return found


# -- which model -----------------------------------------------------------------------------------


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
    """Keeps the models that may be returned, and chooses one at the end.

    ``"auto"`` is ``"certified"`` where a round of the last half has a certificate that says
    something; else ``"average"`` where steps of constant length leave noise: a round of the last
    half did without other clients than the round before, because they gave no usable answer (a
    client that is away all the time makes no noise), or :data:`LONG` rounds sampled clients whose
    losses are known to be convex. Else it is ``"last"``. An algorithm that gives out a mean of its
    own (DRFA, rFedFair) keeps to it, unless training stops at a certified gap.

    Parameters
    ----------
    wanted : str
        What was asked for.
    proof : bool
        Whether a stop rule looks at the certificate, which must then be that of what is given out.
    sampled : bool
        Whether rounds sample clients with convex losses, and those not asked are forgotten.

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("synthetic-regression", samples=50), "linear", l2=1e-3)
    >>> fair = ef.FairNewton(ef.objectives.ChiSquare(rho=0.1))
    >>> [ef.train(fair, clients, rounds=20, give_out=w).given_out.kind for w in ("auto", "last")]
    ['certified', 'last']
    """

    wanted: GiveOut = "auto"
    proof: bool = False
    sampled: bool = False

    def __post_init__(self) -> None:
        if self.wanted not in get_args(GiveOut):
            known = ", ".join(get_args(GiveOut))
            raise ValueError(f"give_out must be one of {known}, got {self.wanted!r}.")
        if self.proof and self.wanted not in ("auto", "certified"):
            raise ValueError(
                f"Training that stops at a certified gap returns the certified model, not "
                f"{self.wanted!r}; omit give_out or set it to 'certified'."
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
            best = kept.proved
            if best is None or not (best.given.gap or 0.0) <= record.numbers["gap"]:
                best = FinalModel(start, info.weights, certified(record))
            kept = replace(kept, proved=best, latest=r)
        if kept.mean is not None:
            return replace(kept, mean=kept.mean.add(end, info.weights, changed))
        if self.wanted == "average" or (self.wanted == "auto" and (changed or self.sampled)):
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
        noisy = mean is not None and (2 * mean.changed > r or (self.sampled and r >= LONG))
        return "average" if noisy and not own else "last"


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
