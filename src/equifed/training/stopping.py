"""Reasons to stop before the last round.

Each looks at the history alone, so that a resumed run stops where it would have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from equifed.contract.arrays import Losses
from equifed.metrics.metric import as_metric, find_metric
from equifed.training.history import History

SplitName = Literal["train", "validation", "test"]
Of = Literal["worst", "average"]

StopRule = Callable[[History], str | None]
"""Looks at the history after a round and returns why to stop, or None.

One that looks at the certificate has an attribute ``proof`` that is true: the model that is then
given out must be the one that the certificate is about.
"""


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
class StopWhen:
    """When to stop before the last round; all of it is optional.

    >>> from equifed.training.history import RoundRecord
    >>> record = RoundRecord(1, None, 1, 0, 0, seconds=2.0)
    >>> StopWhen(seconds=1.0)(History(("a",), rounds=[record]))
    'the time limit of 1 s is over'

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

    def __call__(self, history: History) -> str | None:
        """Return why to stop, or None."""
        spent = sum(record.seconds for record in history.rounds)
        if self.seconds is not None and spent >= self.seconds:
            return f"the time limit of {self.seconds:g} s is over"
        gaps = ((self.at_gap, False), (self.at_relative_gap, True))
        found = (StopAtGap(gap, relative)(history) for gap, relative in gaps if gap is not None)
        return next(filter(None, found), None) or self._check_metric(history)

    def _check_metric(self, history: History) -> str | None:
        """Look at the clients' metric: is it good enough, or does it no longer improve."""
        scores = self._scores(history) if self.needs_metric else np.empty(0)
        what, wanted = f"{self.split} {self.metric} ({self.of})", self.target
        if (
            wanted is not None
            and len(scores)
            and scores[-1] >= find_metric(self.metric).sign * wanted
        ):
            return f"{what} reached {abs(scores[-1]):.6g}"
        n = self.patience
        if n is None or len(scores) <= n or scores[-n:].max() > scores[:-n].max():
            return None
        return f"{what} has not improved for {n} evaluations"

    def _scores(self, history: History) -> Losses:
        """Return one number an evaluation, larger is better; those without samples are left out."""
        _, values = history.series(self.metric, self.split)
        gains = find_metric(self.metric).sign * values[:, ~np.isnan(values).all(axis=0)]
        if gains.size == 0:
            return np.empty(0)
        reduce = np.nanmin if self.of == "worst" else np.nanmean
        return np.asarray(reduce(gains, axis=1))

    @property
    def needs_metric(self) -> bool:
        """Whether it looks at an evaluation."""
        return self.target is not None or self.patience is not None

    @property
    def needs_proof(self) -> bool:
        """Whether it looks at the certificate."""
        return self.at_gap is not None or self.at_relative_gap is not None

    proof = needs_proof

    def rules(self) -> tuple[StopRule, ...]:
        """Return it as a rule for :func:`equifed.train`; none if nothing was asked for."""
        asked = self.needs_metric or self.needs_proof or self.seconds is not None
        return (self,) if asked else ()


def as_rules(given: Any) -> tuple[StopRule, ...]:
    """Return rules that were asked for: none, one, several, or those of a ``StopWhen``."""
    if isinstance(given, StopWhen):
        return given.rules()
    found = () if given is None else tuple(given) if isinstance(given, Iterable) else (given,)
    if any(isinstance(rule, type) or not callable(rule) for rule in found):
        raise ValueError(
            f"stop must be a rule, a sequence of rules or None, got {given!r}; say "
            "ef.StopWhen(at_gap=1e-3), or give a function of the history that returns why to stop, "
            "or None."
        )
    return found
