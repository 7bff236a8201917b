r"""Means over seeds, and paired differences between two methods that saw the same seeds.

Runs with the same seed share data split, initial model and sampled clients, so the difference of
two methods *within a seed* varies far less than either method over seeds. The interval of the mean
difference is therefore built from the differences.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from equifed.contract.streams import Stream
from equifed.metrics.checks import Values
from equifed.metrics.intervals import Interval, check_level

Kind: TypeAlias = Literal["t", "bootstrap"]


def _one_per_seed(values: ArrayLike, name: str) -> Values:
    array = np.atleast_1d(np.asarray(values, dtype=np.float64))
    if array.ndim != 1 or array.size == 0 or not np.isfinite(array).all():
        raise ValueError(
            f"{name} must hold one finite number per seed, got shape {array.shape} with "
            f"non-finite entries at {np.flatnonzero(~np.isfinite(array)).tolist()}."
        )
    return array


def mean_interval(
    values: ArrayLike,
    *,
    level: float = 0.95,
    kind: Kind = "t",
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    r"""Return the mean over seeds with an interval for the mean over all seeds there could be.

    ``"t"``: :math:`\bar d \pm t_{s-1}\, \mathrm{sd}/\sqrt s`, exact for normal values.
    ``"bootstrap"``: percentiles of the means of resampled seeds, at levels widened for few seeds
    (Hesterberg's expanded percentile interval), :math:`\Phi(-t_{s-1}\sqrt{s/(s-1)})`; it follows
    skewness but never reaches beyond the observed values, so with fewer than about eight seeds
    ``"t"`` is the better choice.

    One seed tells nothing about the others: the limits are infinite. Equal values give an interval
    of width 0.

    References
    ----------
    Hesterberg, "What teachers should know about the bootstrap", The American Statistician 69, 2015.

    >>> interval = mean_interval([1.0, 2.0, 3.0])
    >>> interval.estimate, round(interval.lower, 4), round(interval.upper, 4)
    (2.0, -0.4841, 4.4841)
    """
    array = _one_per_seed(values, "values")
    estimate, s = float(array.mean()), array.size
    check_level(level)
    if kind not in ("t", "bootstrap"):
        raise ValueError(f"kind must be 't' or 'bootstrap', got {kind!r}.")
    if s == 1:
        return Interval(estimate, -math.inf, math.inf, level)
    from scipy.special import stdtrit

    t = float(stdtrit(s - 1, (1 + level) / 2))
    if kind == "t":
        half = t * float(array.std(ddof=1)) / math.sqrt(s)
        return Interval(estimate, estimate - half, estimate + half, level)
    pick = Stream(seed).at("bootstrap", "seeds").generator().integers(s, size=(resamples, s))
    tail = NormalDist().cdf(-t * math.sqrt(s / (s - 1)))
    lower, upper = np.quantile(array[pick].mean(axis=1), [tail, 1 - tail])
    return Interval(estimate, float(lower), float(upper), level)


def paired_difference(
    values: ArrayLike,
    baseline: ArrayLike,
    *,
    level: float = 0.95,
    kind: Kind = "t",
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Return the mean of ``values - baseline`` over seeds, with its interval.

    Entry i of both must come from the same seed. Options as for :func:`mean_interval`.

    >>> paired_difference([0.75, 0.5, 1.0], baseline=[0.5, 0.25, 0.75])
    Interval(estimate=0.25, lower=0.25, upper=0.25, level=0.95)
    """
    ours, theirs = _one_per_seed(values, "values"), _one_per_seed(baseline, "baseline")
    if ours.shape != theirs.shape:
        raise ValueError(
            f"values and baseline must come from the same seeds, got {ours.size} and {theirs.size}."
        )
    return mean_interval(ours - theirs, level=level, kind=kind, resamples=resamples, seed=seed)
