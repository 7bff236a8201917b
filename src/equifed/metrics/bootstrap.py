r"""Seeded bootstrap intervals for every reducer of accuracies: these clients, other test samples.

With the estimate t, and mean and deviation of the same statistic over resamples, the interval is
:math:`2t - \overline{t^*} \pm 1.96\,\mathrm{sd}(t^*)`, the normal one around the estimate without
its bias: resamples add the samples' noise a second time, so that percentile intervals miss (the
tests show it). When all clients are truly alike, every resample lies above the truth; so if a
chi-square test does not reject one common accuracy, the interval is extended to what the statistic
would be under it. With a handful of samples per client it is too short.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import partial
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


def resample(
    draw: Callable[[int], Values], reduce: Callable[[Values], Values], resamples: int, size: int
) -> Values:
    """Return the reduced draws, one per row, of ``size`` numbers each, drawn block by block."""
    if resamples < 2:
        raise ValueError(
            f"resamples must be at least 2 (1,000 or more to be useful), got {resamples}."
        )
    rows = max(1, _BLOCK // size)
    blocks = (min(rows, resamples - start) for start in range(0, resamples, rows))
    return np.concatenate([reduce(draw(block)) for block in blocks])


def corrected_interval(estimate: float, draws: ArrayLike, bounds: tuple[float, float]) -> Interval:
    """Return the interval of the module's docstring within ``bounds``; these if infinite."""
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
    draws = resample(
        partial(draw_accuracies, k, m, Stream(seed).at("bootstrap", "samples").generator()),
        lambda block: np.column_stack([r.compute(block, True) for r in chosen]),
        resamples,
        k.size,
    )
    common, result = _common_accuracies(k, m), {}
    for r, found in zip(chosen, draws.T, strict=True):
        bounds = (0.0, 1.0) if r.level else r.bounds
        one = corrected_interval(r.compute(k / m, True), found, bounds)
        if common is not None:
            at = r.compute(common, True)
            ends = min(one.lower, float(at.min())), max(one.upper, float(at.max()))
            one = Interval(one.estimate, *ends, one.corrected)
        result[r.name] = one
    if names is None:
        result["worst"] = worst_client_interval(k, m).interval
    return result


def draw_accuracies(k: Values, m: Values, draw: np.random.Generator, rows: int) -> Values:
    """Return accuracies (rows, n), the counts of each client drawn anew."""
    return draw.binomial(m.astype(np.int64), k / m, size=(rows, k.size)) / m


def _common_accuracies(k: Values, m: Values) -> Values | None:
    """Return Wilson's limits of one common accuracy, (2, n), unless chi-square rejects it."""
    pooled = k.sum() / m.sum()
    if 0 < pooled < 1 and k.size > 1:
        from scipy.special import chdtri

        distance = (np.square(k - m * pooled) / (m * pooled * (1 - pooled))).sum()
        if distance > chdtri(k.size - 1, 2 * MISS):
            return None
    limits = np.concatenate(wilson_interval(k.sum(), m.sum()))
    return np.repeat(limits[:, None], k.size, axis=1)
