"""One method against all others on many data sets: what was chosen, and paired differences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equifed.metrics import (
    Interval,
    chance_floor,
    mean_interval,
    paired_difference,
    variance_beyond_chance,
    worst_fraction,
)
from experiments.harness.measures import for_new_samples

Array = NDArray[np.float64]
OURS, BASE, OWN, ALONE = "ours", "FedAvg", "FedAvg, own part", "alone"
OWN_SOLVED, SOLVED = "own part, solved for the average", "solved for the average"
"""Ours without its fair objective, and that without an own part."""
FIFTH, FEW = 0.2, 10
"""The worst fifth, and below how many clients the worst one stands for it."""


def worst(values: Array) -> float:
    """Return the accuracy of the worst fifth, or of the worst client where there are few."""
    if len(values) < FEW:
        return float(values.min())
    return float(worst_fraction(values, FIFTH, higher_is_better=True))


def score(told: Mapping[str, Any], split: str = "validation") -> float:
    """Return the mean of average and worst accuracy in a split; minus infinity after a failure."""
    if "failed" in told:
        return -math.inf
    values = np.array([v for v in told[split] if v is not None])
    return (float(values.mean()) + worst(values)) / 2


@dataclass(frozen=True)
class Trial:
    """A method in one split: what validation samples chose, and how the clients are served."""

    place: int
    settings: str
    failed: int
    accuracy: Array
    sizes: Array
    ratio: float
    gap: float | None = None
    tried: tuple[str, ...] = ()

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Trial | None:
        """Return the chosen one of the tries, of equals the middle one; None if all failed."""
        tries = answer["tries"]
        middle = (len(tries) - 1) / 2
        place = max(range(len(tries)), key=lambda k: (score(tries[k]), -abs(k - middle)))
        best = tries[place]
        failed = sum("failed" in one for one in tries)
        if "failed" in best:
            return None
        known = [k for k, v in enumerate(best["test"]) if v is not None]
        ratio = sum(best["test samples"]) / sum(best["train samples"])
        return cls(
            place, best["settings"], failed, np.array([best["test"][k] for k in known]),
            np.array([best["test samples"][k] for k in known], dtype=np.float64), ratio,
            best.get("gap"), tuple(one.get("settings", "") for one in tries),
        )  # fmt: skip

    @property
    def average(self) -> float:
        """Average accuracy over clients, %."""
        return 100 * float(self.accuracy.mean())

    @property
    def worst(self) -> float:
        """Accuracy of the worst fifth or of the worst of few clients, %."""
        return 100 * worst(self.accuracy)

    @property
    def floor(self) -> float:
        """What the worst would have if all were served equally, %."""
        n = len(self.accuracy)
        pooled = float(self.accuracy @ self.sizes / self.sizes.sum())
        return 100 * chance_floor(self.sizes, pooled, FIFTH if n >= FEW else 1 / n)

    @property
    def variance(self) -> float:
        """Variance of the true accuracies, in squared points; an unbiased estimate."""
        return 1e4 * variance_beyond_chance(np.round(self.accuracy * self.sizes), self.sizes)


Found = dict[str, dict[str, dict[int, Trial | None]]]
"""By data set, method and seed."""

Runs = Mapping[int, Trial | None]


# -- numbers ----------------------------------------------------------------------------------


def column(runs: Runs, measure: str) -> Array:
    """Return a measure of a method, seed by seed."""
    return np.array([getattr(one, measure) for one in runs.values() if one is not None])


def difference(
    methods: Mapping[str, Runs], other: str, measure: str, first: str = OURS
) -> tuple[Interval, Interval]:
    """Return ours minus another method over the seeds of both: 95 % over seeds, and for new data.

    Random splits share samples, and the second interval is widened for that.
    """
    mine, theirs = methods[first], methods[other]
    pairs = [(a, b) for s, a in mine.items() if a is not None and (b := theirs.get(s)) is not None]
    told = paired_difference(*([getattr(one[k], measure) for one in pairs] for k in (0, 1)))
    ratio = float(np.mean([a.ratio for a, _ in pairs]))
    return told, for_new_samples(told, len(pairs), ratio)


def published(methods: Mapping[str, Runs]) -> list[str]:
    """Return the methods as published: without an own part, not solved by us, and not alone."""
    others = (OURS, OWN, OWN_SOLVED, SOLVED, ALONE)
    return [m for m in methods if m not in others and len(column(methods[m], "worst"))]


def without_fairness(methods: Mapping[str, Runs], own: bool) -> str | None:
    """Return what ours is without its fair objective, where that was run.

    Where clients have no own part it is one model for all, solved for the average.
    """
    other = OWN_SOLVED if own else SOLVED
    return other if other in methods else None


def best_published(methods: Mapping[str, Runs], measure: str = "worst") -> str:
    """Return the published method with the highest mean on test samples, which flatters it."""
    return max(published(methods), key=lambda m: float(column(methods[m], measure).mean()))


def spread(runs: Runs) -> Interval:
    """Return the variance beyond chance, its mean over seeds and limits."""
    return mean_interval(column(runs, "variance"))


def is_ahead(methods: Mapping[str, Runs], new: bool = False) -> bool:
    """Tell whether ours serves the worst better than every published method, beyond 95 %."""
    return all(difference(methods, m, "worst")[new].lower > 0 for m in published(methods))
