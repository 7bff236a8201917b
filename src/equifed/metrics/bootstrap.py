r"""Seeded bootstrap intervals for every reducer at once, and what they are about.

* :func:`summary_intervals`: *other clients* from the same population, measured in the same way. The
  test noise of each client is part of the answer.
* :func:`accuracy_intervals`: these clients, *other test samples*. How far may the summary of their
  true accuracies lie from the measured one?

**The interval.** With the estimate t, and the mean and standard deviation of the same statistic
over the resamples,

.. math:: 2t - \overline{t^*}\ \pm\ c\cdot\mathrm{sd}(t^*)

that is, the normal interval around the estimate corrected for its bias: noise in the clients'
accuracies widens their spread, and resamples add the noise a second time, so that percentile
intervals miss systematically (the tests show it). When clients are resampled, c is a t quantile
with n - 1 degrees of freedom times :math:`\sqrt{n/(n-1)}`, which the plain bootstrap of n items
lacks.

**Near equality.** When all clients are truly alike, every resample lies above the truth. So if the
counts do not reject one common accuracy (chi-square test of homogeneity at the same level), the
interval of an accuracy's summary is extended to what the statistic would be under a common
accuracy, within its Wilson limits.

**What it cannot do.** With few clients (30) intervals that resample clients hold five to ten points
less than they promise for the indices of inequality. A client with nothing or everything right
shows no variation, so with a handful of samples each the interval is too short. A statistic that
rests on one client (worst, best, range) has no valid bootstrap: see
:func:`~equifed.metrics.worst_client_interval`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
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
from equifed.metrics.reducers import Values, check_finite, name_positions
from equifed.metrics.summary import REDUCERS, Reducer

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


def corrected_interval(
    estimate: float, draws: ArrayLike, quantile: float, bounds: tuple[float, float]
) -> Interval:
    """Return the bias-corrected normal interval of the module's docstring, clipped to ``bounds``.

    Where a draw is infinite (a ratio over zero) or the quantile is, nothing can be said: the limits
    are the bounds.

    >>> corrected_interval(1.0, [1.0, 3.0], 1.0, (-9.0, 9.0))
    Interval(estimate=1.0, lower=-1.0, upper=1.0)
    """
    array = np.asarray(draws, dtype=np.float64)
    if not (np.isfinite(array).all() and math.isfinite(estimate) and math.isfinite(quantile)):
        return Interval(estimate, *bounds)
    centre, half = 2 * estimate - array.mean(), quantile * array.std()
    limits = (centre - half, centre + half, centre)
    return Interval(estimate, *(float(np.clip(limit, *bounds)) for limit in limits))


def summary_intervals(
    values: ArrayLike,
    *,
    higher_is_better: bool,
    resamples: int = 1000,
    seed: int = 0,
    names: Collection[str] | None = None,
) -> dict[str, Interval]:
    """Return an interval for each reducer over the population that the clients were drawn from.

    For losses and for anything else that is one number per client; clients are drawn with
    replacement. Sensible only if the clients are a sample of something larger; one client gives no
    finite limits. Reducers that rest on one client are left out, and so are those that are not
    defined for negative values when there are any, and all but ``names`` where these are given.

    >>> intervals = summary_intervals([0.2, 0.4, 0.3, 0.9], higher_is_better=False, resamples=100)
    >>> "gini" in intervals, "worst" in intervals
    (True, False)
    """
    array = check_finite(values)
    n, positive = array.size, bool((array >= 0).all())
    quantile = math.inf  # a single client shows no variation
    if n > 1:
        from scipy.special import stdtrit

        quantile = float(stdtrit(n - 1, 1 - MISS)) * math.sqrt(n / (n - 1))
    draw = Stream(seed).at("bootstrap", "clients").generator()
    blocks = (
        array[draw.integers(n, size=(rows, n))] for rows in split_resamples(resamples, n)
    )  # fmt: skip
    chosen = [r for r in _choose(names) if positive or r.signed]
    return _bound(chosen, array, blocks, higher_is_better, quantile)


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
    z = NormalDist().inv_cdf(1 - MISS)
    chosen = [  # levels of service lie between 0 and 1
        replace(r, bounds=(0.0, 1.0)) if r.level else r for r in _choose(names)
    ]
    result = _bound(chosen, k / m, resample_samples(k, m, resamples, seed), True, z)
    common = _common_accuracies(k, m)
    for r in chosen:
        if common is not None:
            at, found = r.compute(common, True), result[r.name]
            ends = min(found.lower, float(at.min())), max(found.upper, float(at.max()))
            result[r.name] = replace(found, lower=ends[0], upper=ends[1])
    if names is None:
        result["worst"] = worst_client_interval(k, m).interval
    return result


def resample_samples(k: Values, m: Values, resamples: int, seed: int) -> Iterator[Values]:
    """Yield blocks (b, n) of accuracies, the counts of each client drawn anew."""
    draw = Stream(seed).at("bootstrap", "samples").generator()
    for rows in split_resamples(resamples, k.size):
        yield draw.binomial(m.astype(np.int64), k / m, size=(rows, k.size)) / m


def _choose(names: Collection[str] | None) -> list[Reducer]:
    """Return the reducers that rest on more than one client, or those of them that are named."""
    return [r for r in REDUCERS.values() if not r.extreme and (names is None or r.name in names)]


def _bound(
    chosen: Sequence[Reducer],
    values: Values,
    blocks: Iterable[Values],
    higher_is_better: bool,
    quantile: float,
) -> dict[str, Interval]:
    """Return the interval of every chosen reducer from one set of resamples."""
    draws = [[r.compute(block, higher_is_better) for r in chosen] for block in blocks]
    return {
        r.name: corrected_interval(
            r.compute(values, higher_is_better), np.concatenate(found), quantile, r.bounds
        )
        for r, found in zip(chosen, zip(*draws, strict=True), strict=True)
    }


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
