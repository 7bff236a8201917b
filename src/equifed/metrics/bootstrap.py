r"""Seeded bootstrap intervals for summaries, and what each of them is about.

* :func:`bootstrap_clients`: *other clients* from the same population, measured in the same way. The
  test noise of each client is part of the answer.
* :func:`bootstrap_accuracies` of other ``"samples"``: these clients, *other test samples*. How far
  may the summary of their true accuracies lie from the measured one?
* :func:`bootstrap_accuracies` of ``"both"``: other clients, and their *true* accuracies. The test
  noise is estimated and taken out.

**The interval.** With the estimate t, and the mean and standard deviation of the same statistic
over the resamples,

.. math:: 2t - \overline{t^*}\ \pm\ c\cdot\mathrm{sd}(t^*)

that is, the normal interval around the estimate corrected for its bias. The correction matters:
noise in the clients' accuracies widens their spread, so measured inequality is too high, and
resamples, which add the noise a second time, are too high twice. Percentile intervals therefore
miss systematically (the tests show it). When clients are resampled, c is a t quantile with n - 1
degrees of freedom times :math:`\sqrt{n/(n-1)}`, which the plain bootstrap of n items lacks.

**Near equality.** When all clients are truly alike, inequality is at its least and every resample
lies above it: no bootstrap reaches down to the truth. So if the counts do not reject one common
accuracy (chi-square test of homogeneity at the same level), the interval of
``bootstrap_accuracies`` is extended to what the statistic would be under a common accuracy, within
its Wilson limits. This only ever widens the interval.

**What it cannot do.** With few clients (30) intervals that resample clients hold five to ten points
less than they promise for the indices of inequality, whose distribution is skewed. A statistic that
rests on one client (minimum, maximum, range) has no valid bootstrap: see
:func:`~equifed.metrics.worst_client_interval`. :mod:`equifed.metrics.summary_intervals` knows which
those are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from equifed.contract.streams import Stream
from equifed.metrics.checks import Reduced, Values, check_finite, name_positions
from equifed.metrics.intervals import Interval, check_counts, check_level, wilson_interval

Statistic: TypeAlias = Callable[..., Reduced]
"""Takes one array (b, n) for each column given, and returns (b,) numbers; every reducer is one."""

Resample: TypeAlias = Literal["samples", "both"]
"""What is drawn anew: test samples of these clients, or clients and then their samples."""

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


def client_quantile(level: float, clients: int) -> float:
    """Return c for resampled clients; infinite for a single one, which shows no variation."""
    if clients < 2:
        return math.inf
    from scipy.special import stdtrit

    return float(stdtrit(clients - 1, (1 + level) / 2)) * math.sqrt(clients / (clients - 1))


def corrected_interval(
    estimate: float,
    draws: ArrayLike,
    *,
    quantile: float,
    level: float,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> Interval:
    """Return the bias-corrected normal interval of the module's docstring, clipped to ``bounds``.

    Where a draw is infinite (a ratio over zero) or the quantile is, nothing can be said: the limits
    are the bounds.

    >>> corrected_interval(1.0, [1.0, 3.0], quantile=1.0, level=0.68)
    Interval(estimate=1.0, lower=-1.0, upper=1.0, level=0.68)
    """
    array = np.asarray(draws, dtype=np.float64)
    if not (np.isfinite(array).all() and math.isfinite(estimate) and math.isfinite(quantile)):
        return Interval(estimate, *bounds, level)
    centre, half = 2 * estimate - array.mean(), quantile * array.std()
    limits = (centre - half, centre + half, centre)
    lower, upper, corrected = (float(np.clip(limit, *bounds)) for limit in limits)
    return Interval(estimate, lower, upper, level, corrected)


def _columns(columns: Sequence[ArrayLike]) -> list[Values]:
    arrays = [check_finite(column, f"column {i}") for i, column in enumerate(columns)]
    if not arrays or any(a.ndim != 1 or a.shape != arrays[0].shape for a in arrays):
        shapes = [a.shape for a in arrays]
        raise ValueError(
            f"columns must be vectors of one length, one entry per client, got {shapes}."
        )
    return arrays


def resample_clients(columns: list[Values], resamples: int, seed: int) -> Iterator[list[Values]]:
    """Yield blocks of resamples, each a list with one array (b, n) for each column."""
    draw = Stream(seed).at("bootstrap", "clients").generator()
    clients = columns[0].size
    for rows in split_resamples(resamples, clients):
        pick = draw.integers(clients, size=(rows, clients))
        yield [column[pick] for column in columns]


def resample_samples(k: Values, m: Values, resamples: int, seed: int) -> Iterator[Values]:
    """Yield blocks (b, n) of accuracies, the counts of each client drawn anew."""
    draw = Stream(seed).at("bootstrap", "samples").generator()
    trials, accuracy = m.astype(np.int64), k / m
    for rows in split_resamples(resamples, k.size):
        yield draw.binomial(trials, accuracy, size=(rows, k.size)) / m


def resample_both(k: Values, m: Values, resamples: int, seed: int) -> Iterator[Values]:
    """Yield blocks (b, n) of accuracies of clients drawn anew, with counts drawn anew."""
    draw = Stream(seed).at("bootstrap", "both").generator()
    for chosen, trials in resample_clients([k / m, m], resamples, seed):
        yield draw.binomial(trials.astype(np.int64), chosen) / trials


def check_measured(correct: ArrayLike, trials: ArrayLike) -> tuple[Values, Values]:
    """Return counts as :func:`check_counts` does, and refuse clients without test samples."""
    k, m = check_counts(correct, trials)
    if (m == 0).any():
        raise ValueError(
            f"clients at positions {name_positions(m == 0)} have no test sample; leave them out."
        )
    return k, m


def common_accuracies(k: Values, m: Values, level: float) -> Values | None:
    r"""Return the Wilson limits of one common accuracy as equal vectors, (2, n), if it may be.

    It may be when :math:`\sum_i (k_i - m_i \bar p)^2 / (m_i \bar p (1 - \bar p))`, with :math:`\bar
    p` pooled, does not exceed the chi-square quantile with n - 1 degrees of freedom; otherwise
    None.
    """
    pooled = k.sum() / m.sum()
    if 0 < pooled < 1:
        from scipy.special import chdtri

        distance = (np.square(k - m * pooled) / (m * pooled * (1 - pooled))).sum()
        if k.size > 1 and distance > chdtri(k.size - 1, 1 - level):
            return None
    limits = np.concatenate(wilson_interval(k.sum(), m.sum(), level))
    return np.repeat(limits[:, None], k.size, axis=1)


def widen(interval: Interval, at: Values) -> Interval:
    """Return the interval, extended to hold all the numbers in ``at``."""
    lower, upper = min(interval.lower, float(at.min())), max(interval.upper, float(at.max()))
    return replace(interval, lower=lower, upper=upper)


def bootstrap_clients(
    statistic: Statistic,
    *columns: ArrayLike,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Return an interval for a summary over the population from which the clients were drawn.

    Clients are drawn with replacement, each with all its columns: ``bootstrap_clients(gini,
    losses)``, ``bootstrap_clients(average_by_sample, accuracies, sizes)``. Sensible only if the
    clients are a sample of something larger; for a federation that is all there is, see
    :func:`bootstrap_accuracies`. One client gives infinite limits.

    >>> from equifed.metrics.levels import average_by_client
    >>> mean = bootstrap_clients(average_by_client, [0.5, 0.7, 0.9, 0.7], resamples=500)
    >>> mean.lower < 0.7 < mean.upper
    True
    """
    arrays = _columns(columns)
    blocks = resample_clients(arrays, resamples, seed)
    draws = np.concatenate([np.atleast_1d(statistic(*block)) for block in blocks])
    c = client_quantile(check_level(level), arrays[0].size)
    return corrected_interval(float(statistic(*arrays)), draws, quantile=c, level=level)


def bootstrap_accuracies(
    statistic: Statistic,
    correct: ArrayLike,
    trials: ArrayLike,
    *,
    resample: Resample = "samples",
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    r"""Return an interval for a summary of the clients' *true* accuracies.

    ``"samples"``: these clients and other test samples. Each client's count is drawn anew,
    :math:`k_i^* \sim \mathrm{Bin}(m_i, k_i/m_i)`. A client with nothing or everything right shows
    no variation, so with a handful of samples each the interval is too short.

    ``"both"``: other clients of the same kind. Clients are drawn with replacement, then counts
    within each. For an average this is cautious: the variance between measured clients already
    holds the test noise :math:`\sigma_w^2`, and the second level adds it again,
    :math:`(\sigma_b^2 + 2\sigma_w^2)/n` in place of :math:`(\sigma_b^2 + \sigma_w^2)/n`.

    >>> from equifed.metrics.inequality import gini
    >>> 0.0 < bootstrap_accuracies(gini, [60, 80, 95], [100, 100, 100], resamples=500).lower
    True
    """
    k, m = check_measured(correct, trials)
    c, blocks = resample_accuracies(k, m, resample, level, resamples, seed)
    draws = np.concatenate([np.atleast_1d(statistic(block)) for block in blocks])
    interval = corrected_interval(float(statistic(k / m)), draws, quantile=c, level=level)
    common = common_accuracies(k, m, level)
    return interval if common is None else widen(interval, np.asarray(statistic(common)))


def resample_accuracies(
    k: Values, m: Values, resample: Resample, level: float, resamples: int, seed: int
) -> tuple[float, Iterator[Values]]:
    """Return the c of the interval, and blocks (b, n) of accuracies."""
    check_level(level)
    if resample == "samples":
        z = NormalDist().inv_cdf((1 + level) / 2)
        return z, resample_samples(k, m, resamples, seed)
    if resample == "both":
        return client_quantile(level, k.size), resample_both(k, m, resamples, seed)
    raise ValueError(f"resample must be 'samples' or 'both', got {resample!r}.")
