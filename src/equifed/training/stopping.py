"""Reasons to stop before the last round.

Each looks at the history alone, so that a resumed run stops where it would have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from equifed.contract.arrays import Losses
from equifed.metrics.metric import as_metric, find_metric
from equifed.training.history import History
from equifed.training.loop import StopRule

SplitName = Literal["train", "validation", "test"]
Of = Literal["worst", "average"]


@dataclass(frozen=True)
class TimeLimit:
    """Stop when the rounds have taken this many seconds together.

    >>> from equifed.training.history import RoundRecord
    >>> TimeLimit(1.0)(History(("a",), rounds=[RoundRecord(1, None, 1, 0, 0, seconds=2.0)]))
    'the time limit of 1 s is over'
    """

    seconds: float

    def __call__(self, history: History) -> str | None:
        """Return why to stop, or None."""
        spent = sum(record.seconds for record in history.rounds)
        return f"the time limit of {self.seconds:g} s is over" if spent >= self.seconds else None


@dataclass(frozen=True)
class StopAtGap:
    """Stop when a round's certificate proves the objective this close to its minimum.

    It is the certificate of the model that the round started from, which is then given out. A
    ``relative`` gap is a fraction of the objective there.

    >>> from equifed.training.history import RoundRecord
    >>> record = RoundRecord(7, 0.5, 1, 0, 0, seconds=2.0, numbers={"gap": 1e-7})
    >>> StopAtGap(1e-6)(History(("a",), rounds=[record]))
    'the objective is certified to be within 1e-07 of its minimum'
    """

    gap: float
    relative: bool = False
    proof: ClassVar[bool] = True

    def __call__(self, history: History) -> str | None:
        """Return why to stop, or None."""
        last = history.rounds[-1]
        gap, value = last.numbers.get("gap"), last.objective
        if gap is None or (self.relative and not value):
            return None
        size = abs(value or 0.0) if self.relative else 1.0
        if gap > self.gap * size:
            return None
        within = f"{100 * gap / size:.2g} %" if self.relative else f"{gap:.3g}"
        return f"the objective is certified to be within {within} of its minimum"


@dataclass(frozen=True)
class Reached:
    """Stop when the worst client, or the average over clients, is as good as wanted."""

    value: float
    metric: str
    split: SplitName
    of: Of

    def __call__(self, history: History) -> str | None:
        """Return why to stop, or None."""
        scores = _scores(history, self.metric, self.split, self.of)
        wanted = _gain(self.metric) * self.value
        if not len(scores) or not scores[-1] >= wanted:
            return None
        return f"{self.split} {self.metric} ({self.of}) reached {abs(scores[-1]):.6g}"


@dataclass(frozen=True)
class NoImprovement:
    """Stop when this many evaluations in a row brought nothing better."""

    evaluations: int
    metric: str
    split: SplitName
    of: Of

    def __call__(self, history: History) -> str | None:
        """Return why to stop, or None."""
        scores = _scores(history, self.metric, self.split, self.of)
        if len(scores) <= self.evaluations:
            return None
        recent = scores[-self.evaluations :].max()
        if recent > scores[: -self.evaluations].max():
            return None
        what = f"{self.split} {self.metric} ({self.of})"
        return f"{what} has not improved for {self.evaluations} evaluations"


@dataclass(frozen=True)
class StopWhen:
    """When to stop before the last round; all of it is optional.

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
    of: Of = "worst"
    at_gap: float | None = None
    at_relative_gap: float | None = None

    def __post_init__(self) -> None:
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"seconds must be positive, got {self.seconds}.")
        if self.at_gap is not None and not self.at_gap > 0:
            raise ValueError(f"at_gap must be positive, got {self.at_gap}.")
        as_metric(self.metric)
        if self.at_relative_gap is not None and not 0 < self.at_relative_gap < 1:
            raise ValueError(f"at_relative_gap must lie in (0, 1), got {self.at_relative_gap}.")
        if self.patience is not None and self.patience < 1:
            raise ValueError(f"patience must be at least 1, got {self.patience}.")

    @property
    def needs_metric(self) -> bool:
        """Whether a rule looks at an evaluation."""
        return self.target is not None or self.patience is not None

    @property
    def needs_proof(self) -> bool:
        """Whether a rule looks at the certificate."""
        return self.at_gap is not None or self.at_relative_gap is not None

    def rules(self) -> tuple[StopRule, ...]:
        """Return the rules for :func:`equifed.train`."""
        watched = (self.metric, self.split, self.of)
        rules: list[StopRule] = []
        if self.seconds is not None:
            rules.append(TimeLimit(self.seconds))
        if self.at_gap is not None:
            rules.append(StopAtGap(self.at_gap))
        if self.at_relative_gap is not None:
            rules.append(StopAtGap(self.at_relative_gap, relative=True))
        if self.target is not None:
            rules.append(Reached(self.target, *watched))
        if self.patience is not None:
            rules.append(NoImprovement(self.patience, *watched))
        return tuple(rules)


def _gain(metric: str) -> float:
    """Return the sign that makes larger better."""
    return find_metric(metric).sign


def _scores(history: History, metric: str, split: SplitName, of: Of) -> Losses:
    """Return one number an evaluation, larger is better; clients without samples are left out."""
    _, values = history.series(metric, split)
    gains = _gain(metric) * values[:, ~np.isnan(values).all(axis=0)]
    if gains.size == 0:
        return np.empty(0)
    return np.asarray(np.nanmin(gains, axis=1) if of == "worst" else np.nanmean(gains, axis=1))
