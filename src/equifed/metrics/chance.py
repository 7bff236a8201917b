"""How much of the spread over clients is chance: what few test samples alone would do.

Of clients that are served equally well the worst fifth lies far below the others where samples are
few; its expectation is the *chance floor*.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from equifed.metrics.intervals import check_counts
from equifed.metrics.reducers import Values, check_finite, count_of_fraction, worst_fraction

LEVEL = 0.025
"""Clients that are served equally are said to be unequal at most this often."""
DRAWS = 2000
FIFTH = 0.2
MOST_WORK = 5e7
"""Beyond this many operations the floor is drawn, not computed."""


def chance_floor(sizes: ArrayLike, accuracy: float, fraction: float = FIFTH) -> float:
    r"""Return the expected worst-fraction accuracy of clients that are served equally well.

    Of :math:`X_i = \mathrm{Binomial}(m_i, p)/m_i` the c smallest have the expected sum
    :math:`\int_0^1 E[(c - |\{i: X_i \le t\}|)_+]\,dt`, in which the number of clients at or below t
    is Poisson-binomial: computed exactly, or by seeded draws where that would take long.

    >>> round(chance_floor([48] * 105, 0.84), 2)
    0.76
    """
    m = check_finite(sizes, "sizes")
    if not 0 <= accuracy <= 1 or (m < 1).any():
        raise ValueError(
            f"accuracy must lie in [0, 1] and every size be at least 1, got {accuracy} and sizes "
            f"from {m.min():g}."
        )
    count = count_of_fraction(fraction, m.size)
    distinct = np.unique(m)
    if distinct.sum() * m.size * count > MOST_WORK:
        rows = max(100, min(DRAWS, int(2e6 / m.size)))  # of many clients few draws are enough
        shares = np.random.default_rng(0).binomial(m.astype(np.int64), accuracy, (rows, m.size)) / m
        return float(worst_fraction(shares, fraction, higher_is_better=True).mean())
    steps = np.unique(np.concatenate([np.arange(k + 1) / k for k in distinct]))
    below = _count_below(m, accuracy, steps[:-1], count)  # constant from one step to the next
    missing = (np.arange(count, 0, -1) * below).sum(axis=1)
    return float((missing * np.diff(steps)).sum() / count)


def _count_below(m: Values, p: float, at: Values, most: int) -> Values:
    """Return the chance that j clients lie at or below each place, j = 0..most - 1."""
    from scipy.special import bdtr

    found = np.zeros((len(at), most))
    found[:, 0] = 1.0
    places = {size: bdtr(np.floor(at * size + 1e-9), int(size), p) for size in np.unique(m)}
    for size in m:
        chance = places[size][:, None]
        moved = found * chance
        found -= moved
        found[:, 1:] += moved[:, :-1]
    return found


def variance_beyond_chance(correct: ArrayLike, sizes: ArrayLike) -> float:
    r"""Return how much the clients' true accuracies vary, an unbiased estimate.

    .. math:: \frac{1}{n-1}\sum_i (\hat p_i - \bar p)^2
              - \frac1n \sum_i \frac{\hat p_i (1 - \hat p_i)}{m_i - 1}

    over the clients with at least two samples; it may be negative, as an unbiased estimate of 0
    must be able to. NaN with fewer than two such clients.

    >>> variance_beyond_chance([30, 50], [60, 100]) < 0
    True
    """
    k, m = check_counts(correct, sizes)
    known = m >= 2
    if known.sum() < 2:
        return math.nan
    share, count = k[known] / m[known], m[known]
    noise = share * (1 - share) / (count - 1)
    return float(share.var(ddof=1) - noise.mean())


@dataclass(frozen=True)
class EqualService:
    """Whether measured accuracies are what clients that are served equally would have.

    Parameters
    ----------
    pooled : float
        Accuracy over the samples of all clients.
    worst : float
        Measured accuracy of the worst-served fifth, rounded up to whole clients.
    count : int
        How many clients that is.
    floor : float
        What it would be on average if all clients were served equally (:func:`chance_floor`).
    usual : tuple of float
        Between which values it would be in 95 of 100 such federations.
    p_value : float
        Of the hypothesis that all are served equally.
    underserved : tuple of int
        Clients that are served worse than chance explains, each by itself.

    Examples
    --------
    >>> from equifed.metrics import compare_to_chance
    >>> found = compare_to_chance(correct=[95, 96, 60], sizes=[100, 100, 100])
    >>> found.underserved  # the third is served worse than chance explains
    (2,)
    """

    pooled: float
    worst: float
    count: int
    floor: float
    usual: tuple[float, float]
    p_value: float
    underserved: tuple[int, ...]

    @property
    def equal(self) -> bool:
        """Whether chance explains the spread."""
        return self.p_value > LEVEL

    @property
    def low_fifth(self) -> bool:
        """Whether the worst-served fifth is lower than chance explains."""
        return not self.equal and self.worst < min(self.floor, self.usual[0])


def compare_to_chance(correct: ArrayLike, sizes: ArrayLike, seed: int = 0) -> EqualService:
    r"""Tell whether all clients are served equally well, given correct answers and samples.

    Given how many answers are correct in all, equal service deals them out to the clients as cards
    are dealt (multivariate hypergeometric), whatever the common accuracy is. Two statistics are
    held against that: the least of the clients' exact lower tails times n, which finds one
    underserved client, and :math:`\sum_i (k_i - m_i p)^2/m_i`, which finds a spread over many.
    The p-value is twice the smaller of theirs (Bonferroni), hence valid for any sizes.

    >>> compare_to_chance([30, 41, 35], [40, 50, 45]).equal
    True
    >>> compare_to_chance([30, 41, 9], [40, 50, 45]).underserved
    (2,)
    """
    k, m = check_counts(correct, sizes)
    if (m < 1).any():
        raise ValueError("every client needs at least one sample; leave the others out.")
    total, right, n = int(m.sum()), int(k.sum()), len(k)
    pooled = right / total
    dealt = np.random.default_rng(seed).multivariate_hypergeometric(
        m.astype(np.int64), right, size=DRAWS, method="marginals"
    )
    spread, chance = (((c - m * pooled) ** 2 / m).sum(axis=-1) for c in (k, dealt))
    wide = (1 + np.count_nonzero(chance >= spread * (1 - 1e-9))) / (DRAWS + 1)
    low = n * _lower_tails(k, m)
    fifths = worst_fraction(dealt / m, FIFTH, higher_is_better=True)
    return EqualService(
        pooled=pooled, worst=float(worst_fraction(k / m, FIFTH, higher_is_better=True)),
        count=count_of_fraction(FIFTH, n), floor=chance_floor(m, pooled),
        usual=(float(np.quantile(fifths, 0.025)), float(np.quantile(fifths, 0.975))),
        p_value=float(min(1.0, 2 * min(wide, low.min()))),
        underserved=tuple(np.flatnonzero(2 * low <= LEVEL).tolist()),
    )  # fmt: skip


def _lower_tails(k: Values, m: Values) -> Values:
    """Return how likely each client is to have so few correct answers, all being dealt out."""
    from scipy.stats import hypergeom

    return np.asarray(hypergeom.cdf(k, int(m.sum()), int(k.sum()), m), dtype=np.float64)


def find_worse_means(means: ArrayLike, errors: ArrayLike, sizes: ArrayLike) -> tuple[int, ...]:
    """Return the clients whose mean loss is above that of the others by more than chance.

    Welch's test of logarithms, one-sided, of each against the others, with Bonferroni's correction.
    """
    from scipy.special import stdtr

    mean, error, m = (check_finite(values) for values in (means, errors, sizes))
    n = len(mean)
    if n < 2:
        return ()
    others = (mean.sum() - mean) / (n - 1)
    noise = np.sqrt((error**2).sum() - error**2) / (n - 1)
    some = np.flatnonzero((m >= 2) & (error > 0) & (mean > 0) & (others > 0))
    mean, error, others, noise = mean[some], error[some], others[some], noise[some]
    width = np.hypot(error / mean, noise / others)
    tails = stdtr(m[some] - 1, np.log(others / mean) / width)
    return tuple(some[n * tails <= LEVEL].tolist())
