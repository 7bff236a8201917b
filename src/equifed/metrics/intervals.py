"""How sure a number is: 95 % intervals for one client, for the worst of many, and over seeds.

The number of correct answers of a client, on samples drawn from its population, is binomial; the
intervals are for its *true* accuracy, the one on that population.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from equifed.contract.streams import Stream
from equifed.metrics.reducers import REDUCERS, Values, check_nonnegative, name_positions

MISS = 0.025
"""How often each of two limits misses."""


@dataclass(frozen=True)
class Interval:
    """An estimate, and two limits that hold with 95 % confidence.

    The limits may leave a biased estimate outside; ``corrected`` is the estimate without its bias,
    where it is known, and lies within them.

    >>> from equifed.metrics import paired_difference
    >>> found = paired_difference([0.8, 0.7, 0.9], baseline=[0.7, 0.7, 0.6])
    >>> round(found.estimate, 2), found.lower < 0 < found.upper  # three clients prove nothing
    (0.13, True)
    """

    estimate: float
    lower: float
    upper: float
    corrected: float | None = field(default=None, repr=False, compare=False)

    def __contains__(self, value: float) -> bool:
        return self.lower <= value <= self.upper


@dataclass(frozen=True)
class WorstClient:
    """What the data say about the lowest of the clients' true accuracies.

    ``observed`` is the client with the lowest measured accuracy; ``candidates`` are those that may
    be the one with the lowest true accuracy.

    >>> from equifed.metrics import worst_client_interval
    >>> found = worst_client_interval(correct=[95, 62, 60], trials=[100, 100, 100])
    >>> found.observed, found.candidates  # the second may be worse than the third
    (2, (1, 2))
    """

    interval: Interval
    observed: int
    candidates: tuple[int, ...]


def check_counts(correct: ArrayLike, trials: ArrayLike) -> tuple[Values, Values]:
    """Return counts of correct answers and of samples, shape (n,), or say what is wrong."""
    k = check_nonnegative(np.atleast_1d(np.asarray(correct)), "correct")
    m = check_nonnegative(np.atleast_1d(np.asarray(trials)), "trials")
    if k.ndim != 1 or k.shape != m.shape:
        raise ValueError(
            f"correct and trials must hold one count per client, got {k.shape} and {m.shape}."
        )
    fractional = (k != np.floor(k)) | (m != np.floor(m))
    if fractional.any():
        raise ValueError(
            f"correct and trials must be whole counts, but clients at positions "
            f"{name_positions(fractional)} have fractions; multiply accuracies by sample counts."
        )
    if (k > m).any():
        raise ValueError(
            f"correct must not exceed trials, but does at positions {name_positions(k > m)}; "
            "were the arguments swapped?"
        )
    return k, m


def correct_counts(accuracies: ArrayLike, sizes: ArrayLike) -> Values:
    """Return the numbers of correct answers behind accuracies; refuse what is no whole number."""
    p = np.atleast_1d(np.asarray(accuracies, dtype=np.float64))
    m = check_nonnegative(sizes, "sizes")
    if p.shape != m.shape:
        raise ValueError(f"accuracies and sizes must have one shape, got {p.shape} and {m.shape}.")
    product = np.where(m > 0, p * m, 0.0)
    whole = np.rint(product)
    wrong = ~(np.abs(product - whole) <= 1e-6 * np.maximum(m, 1.0)) | (whole < 0) | (whole > m)
    if wrong.any():
        raise ValueError(
            f"accuracy times size is not a whole count between 0 and size at positions "
            f"{name_positions(wrong)}; are accuracies and sizes of the same split?"
        )
    return whole


def limit_wilson(k: Values, m: Values) -> tuple[Values, Values]:
    """Return Wilson's limits of k correct answers of m, which need not be whole numbers."""
    z, samples = NormalDist().inv_cdf(1 - MISS), np.maximum(m, 1.0)  # no sample: 0 and 1 below
    p, shrink = k / samples, 1 + z**2 / samples
    centre = (p + z**2 / (2 * samples)) / shrink
    half = z / shrink * np.sqrt(p * (1 - p) / samples + (z / (2 * samples)) ** 2)
    lower, upper = np.clip(centre - half, 0.0, 1.0), np.clip(centre + half, 0.0, 1.0)
    return np.where(k == 0, 0.0, lower), np.where(k == m, 1.0, upper)


def limit_exactly(k: Values, m: Values, miss: float) -> tuple[Values, Values]:
    """Return limits that each miss on their side with probability at most ``miss``."""
    from scipy.special import betaincinv  # lazily: metrics stay cheap to import

    lower = betaincinv(np.maximum(k, 0.5), m - k + 1, miss)  # the beta quantile, vectorised
    upper = betaincinv(k + 1, np.maximum(m - k, 0.5), 1 - miss)
    return np.where(k == 0, 0.0, lower), np.where(k == m, 1.0, upper)


def wilson_interval(correct: ArrayLike, trials: ArrayLike) -> tuple[Values, Values]:
    r"""Return Wilson's score limits for each client's accuracy, shape (n,) each.

    .. math:: \frac{\hat p + z^2/2m \pm z\sqrt{\hat p(1-\hat p)/m + z^2/4m^2}}{1 + z^2/m}

    Every accuracy that a score test would not reject. Its coverage is near the nominal level on
    average over true accuracies, above or below at single ones. No sample gives [0, 1]. It holds
    for one client at a time: of 100 clients, 5 intervals are expected to miss.

    References
    ----------
    Wilson, JASA 22, 1927; Brown, Cai and DasGupta, Statistical Science 16, 2001.

    >>> [limit.round(4) for limit in wilson_interval([45, 0], [50, 10])]
    [array([0.7864, 0.    ]), array([0.9565, 0.2775])]
    """
    return limit_wilson(*check_counts(correct, trials))


def worst_client_interval(correct: ArrayLike, trials: ArrayLike) -> WorstClient:
    r"""Return an interval for :math:`p_{\min} = \min_i p_i`, the worst-served client's accuracy.

    With 100 equal clients the lowest measurement lies well below the common truth, and the ordinary
    interval of that client misses far too often. With :math:`\gamma = 0.05` and exact one-sided
    limits :math:`L_i(\cdot), U_i(\cdot)` of client i (Clopper and Pearson's),

    .. math:: \Bigl[\min_i L_i(\gamma/2),\ \min_i U_i(\gamma')\Bigr],
              \qquad \gamma' = 1 - (1-\gamma/2)^{1/n}

    covers it with probability at least 0.95. Let :math:`p_j = p_{\min}`. The lower limit exceeds
    :math:`p_j` only if :math:`L_j` does. If :math:`\min_i U_i < p_j`, some i has :math:`U_i < p_i`;
    none has with probability at least :math:`(1-\gamma')^n`, because clients are independent.

    The *candidates* are the clients with :math:`L_i(\gamma') \le \min_k U_k(\gamma')`: when all
    limits hold (probability at least 0.95), j is among them. One without samples always is.

    >>> worst = worst_client_interval(correct=[90, 45, 49], trials=[100, 50, 100])
    >>> worst.observed, worst.candidates
    (2, (2,))
    >>> round(worst.interval.lower, 2), round(worst.interval.upper, 2)
    (0.39, 0.61)
    """
    k, m = check_counts(correct, trials)
    if not (m > 0).any():
        raise ValueError("trials are zero for every client: nothing was measured.")
    adjusted = -math.expm1(math.log1p(-MISS) / k.size)  # gamma', Sidak's
    lower, _ = limit_exactly(k, m, MISS)
    low, high = limit_exactly(k, m, adjusted)
    measured = np.divide(k, m, out=np.full(k.shape, np.inf), where=m > 0)
    observed = int(measured.argmin())
    interval = Interval(float(measured[observed]), float(lower.min()), float(high.min()))
    return WorstClient(interval, observed, tuple(np.flatnonzero(low <= high.min()).tolist()))


def student_half(values: Values) -> float:
    """Return half the width of Student's interval for a mean."""
    from scipy.special import stdtrit

    t = float(stdtrit(len(values) - 1, 1 - MISS))
    return t * float(values.std(ddof=1)) / math.sqrt(len(values))


def mean_interval(values: ArrayLike) -> Interval:
    r"""Return the mean over seeds with an interval for the mean over all seeds there could be.

    :math:`\bar d \pm t_{s-1}\, \mathrm{sd}/\sqrt s`, exact for normal values. One seed tells
    nothing about the others: the limits are infinite. Equal values give an interval of width 0.

    >>> interval = mean_interval([1.0, 2.0, 3.0])
    >>> interval.estimate, round(interval.lower, 4), round(interval.upper, 4)
    (2.0, -0.4841, 4.4841)
    """
    array = check_seeds(values, "values")
    half = student_half(array) if array.size > 1 else math.inf
    estimate = float(array.mean())
    return Interval(estimate, estimate - half, estimate + half)


def check_seeds(values: ArrayLike, name: str) -> Values:
    """Return one finite number per seed, or say what is wrong."""
    array = np.atleast_1d(np.asarray(values, dtype=np.float64))
    if array.ndim != 1 or array.size == 0 or not np.isfinite(array).all():
        raise ValueError(
            f"{name} must hold one finite number per seed, got shape {array.shape} with "
            f"non-finite entries at {np.flatnonzero(~np.isfinite(array)).tolist()}."
        )
    return array


# -- every reducer of accuracies -------------------------------------------------------------------

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
    """Return the normal interval around an estimate without its bias, within ``bounds``."""
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
    r"""Return an interval for each reducer of the clients' *true* accuracies, or of ``names``.

    These clients and other test samples: each client's count is drawn anew, :math:`k_i^* \sim
    \mathrm{Bin}(m_i, k_i/m_i)`. With the estimate t the interval is :math:`2t - \overline{t^*} \pm
    1.96\,\mathrm{sd}(t^*)`, the normal one around the estimate without its bias: resamples add the
    samples' noise a second time, so that percentile intervals miss. Where a chi-square test does
    not reject one common accuracy it is extended to what the reducer would be under it, because
    then every resample lies above the truth. With a handful of samples per client it is too short.
    The worst client has :func:`~equifed.metrics.worst_client_interval` in place of a bootstrap.

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
    shuffled = Stream(seed).at("bootstrap", "samples").generator()

    def reduce(block: Values) -> Values:
        return np.column_stack([r.compute(block, True) for r in chosen])

    draws = resample(partial(draw_accuracies, k, m, shuffled), reduce, resamples, k.size)
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
