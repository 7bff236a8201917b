r"""Seeded bootstrap intervals for every reducer of accuracies: these clients, other test samples.

How far may the summary of the clients' true accuracies lie from the measured one?

**The interval.** With the estimate t, and the mean and standard deviation of the same statistic
over the resamples,

.. math:: 2t - \overline{t^*}\ \pm\ 1.96\cdot\mathrm{sd}(t^*)

that is, the normal interval around the estimate corrected for its bias: noise in the clients'
accuracies widens their spread, and resamples add the noise a second time, so that percentile
intervals miss systematically (the tests show it).

**Near equality.** When all clients are truly alike, every resample lies above the truth. So if the
counts do not reject one common accuracy (chi-square test of homogeneity at the same level), the
interval is extended to what the statistic would be under a common accuracy, within its Wilson
limits.

**What it cannot do.** A client with nothing or everything right shows no variation, so with a
handful of samples each the interval is too short. A statistic that rests on one client (worst,
range) has no valid bootstrap: see :func:`~equifed.metrics.worst_client_interval`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from equifed.contract.streams import Stream
from equifed.metrics.intervals import (
    MISS,
    Interval,
    check_counts,
    wilson_interval,
    worst_client_interval,
)
from equifed.metrics.reducers import Values, name_positions
from equifed.metrics.summary import REDUCERS

_BLOCK = 2_000_000  # numbers resampled at a time, so that memory does not grow with resamples


def split_resamples(resamples: int, clients: int) -> Iterator[int]:
    """Yield how many resamples of so many numbers to draw at a time."""
    if resamples < 2:
        raise ValueError(
            f"resamples must be at least 2 (1,000 or more to be useful), got {resamples}."
        )
    rows = max(1, _BLOCK // clients)
    for start in range(0, resamples, rows):
        yield min(rows, resamples - start)


def corrected_interval(estimate: float, draws: ArrayLike, bounds: tuple[float, float]) -> Interval:
    """Return the bias-corrected normal interval of the module's docstring, clipped to ``bounds``.

    Where a draw is infinite (a ratio over zero) nothing can be said: the limits are the bounds.

    >>> corrected_interval(1.0, [1.0, 1.0], (0.0, 9.0))
    Interval(estimate=1.0, lower=1.0, upper=1.0)
    """
    array = np.asarray(draws, dtype=np.float64)
    if not (np.isfinite(array).all() and math.isfinite(estimate)):
        return Interval(estimate, *bounds)
    half = NormalDist().inv_cdf(1 - MISS) * array.std()
    centre = 2 * estimate - array.mean()
    limits = (centre - half, centre + half, centre)
    return Interval(estimate, *(float(np.clip(limit, *bounds)) for limit in limits))


def accuracy_intervals(
    correct: ArrayLike,
    trials: ArrayLike,
    *,
    resamples: int = 1000,
    seed: int = 0,
    names: Collection[str] | None = None,
) -> dict[str, Interval]:
    r"""Return an interval for each reducer of the clients' *true* accuracies.

    These clients and other test samples: each client's count is drawn anew, :math:`k_i^* \sim
    \mathrm{Bin}(m_i, k_i/m_i)`. The worst client has the interval of
    :func:`~equifed.metrics.worst_client_interval` in place of the bootstrap. Of ``names``, where
    given, alone.

    >>> intervals = accuracy_intervals([60, 80, 95], [100, 100, 100], resamples=100)
    >>> round(intervals["worst"].estimate, 2), intervals["worst"].lower < 0.6
    (0.6, True)
    """
    k, m = check_counts(correct, trials)
    if (m == 0).any():
        raise ValueError(
            f"clients at positions {name_positions(m == 0)} have no test sample; leave them out."
        )
    chosen = [r for r in REDUCERS.values() if not r.extreme and (names is None or r.name in names)]
    blocks = resample_samples(k, m, resamples, seed)
    draws = [[r.compute(block, True) for r in chosen] for block in blocks]
    common, result = _common_accuracies(k, m), {}
    for r, found in zip(chosen, zip(*draws, strict=True), strict=True):
        bounds = (0.0, 1.0) if r.level else r.bounds
        one = corrected_interval(r.compute(k / m, True), np.concatenate(found), bounds)
        if common is not None:
            at = r.compute(common, True)
            ends = min(one.lower, float(at.min())), max(one.upper, float(at.max()))
            one = Interval(one.estimate, *ends, one.corrected)
        result[r.name] = one
    if names is None:
        result["worst"] = worst_client_interval(k, m).interval
    return result


def resample_samples(k: Values, m: Values, resamples: int, seed: int) -> Iterator[Values]:
    """Yield blocks (b, n) of accuracies, the counts of each client drawn anew."""
    draw = Stream(seed).at("bootstrap", "samples").generator()
    for rows in split_resamples(resamples, k.size):
        yield draw.binomial(m.astype(np.int64), k / m, size=(rows, k.size)) / m


def _common_accuracies(k: Values, m: Values) -> Values | None:
    r"""Return the Wilson limits of one common accuracy as equal vectors, (2, n), if it may be.

    It may be when :math:`\sum_i (k_i - m_i \bar p)^2 / (m_i \bar p (1 - \bar p))`, with :math:`\bar
    p` pooled, does not exceed the chi-square quantile with n - 1 degrees of freedom.
    """
    pooled = k.sum() / m.sum()
    if 0 < pooled < 1 and k.size > 1:
        from scipy.special import chdtri

        distance = (np.square(k - m * pooled) / (m * pooled * (1 - pooled))).sum()
        if distance > chdtri(k.size - 1, 2 * MISS):
            return None
    limits = np.concatenate(wilson_interval(k.sum(), m.sum()))
    return np.repeat(limits[:, None], k.size, axis=1)
