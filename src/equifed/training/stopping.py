"""Reasons to stop before the last round.

Each looks at the history alone, so that a resumed run stops where it would have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from equifed.metrics.metric import as_metric, find_metric
from equifed.training.history import History
from equifed.training.tables import RoundRecord

SplitName = Literal["train", "validation", "test"]

StopRule = Callable[[History], str | None]
"""Looks at the history after a round and returns why to stop, or None.

One that looks at the certificate has an attribute ``proof`` that is true: the model that is then
given out must be the one that the certificate is about.
"""


@dataclass(frozen=True)
class StopWhen:
    """When to stop before the last round; all of it is optional.

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
    of: Literal["worst", "average"] = "worst"
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
        return self._check_gap(history.rounds[-1]) or self._check_metric(history)

    def _check_gap(self, last: RoundRecord) -> str | None:
        """Look at the certificate of the model that the last round started from."""
        gap, size = last.numbers.get("gap"), abs(last.objective or 0.0)
        if gap is None:
            return None
        if self.at_gap is not None and gap <= self.at_gap:
            return f"the objective is certified to be within {gap:.3g} of its minimum"
        if self.at_relative_gap is None or not size or gap > self.at_relative_gap * size:
            return None
        return f"the objective is certified to be within {100 * gap / size:.2g} % of its minimum"

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
            f"stop must be a rule, a sequence of rules or None, got {given!r}; say "
            "ef.StopWhen(at_gap=1e-3), or give a function of the history that returns why to stop, "
            "or None."
        )
    return found
