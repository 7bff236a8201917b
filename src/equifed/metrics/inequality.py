r"""How unequally something is shared among clients: Lorenz curve, indices, ratios of tails.

All of them depend on the shares :math:`p_i = v_i/\sum_j v_j` alone, so they do not change when
every value is multiplied by one number, nor when clients are renamed. They need :math:`v_i \ge 0`
and refuse negative values. One client, and zero for every client, are perfect equality (equal
shares 1/n).

The indices measure inequality of what they are given: of accuracies or of losses. A gain of the
badly served lowers them in both cases. They are blind to the level: a model that is equally bad for
everyone scores perfectly, so read them beside an average. Of the indices here only :func:`atkinson`
and :func:`burden` look harder at one end of the distribution; :func:`atkinson` at the *low* end
(right for accuracies), :func:`burden` at the *high* end (right for losses).

The tails of :func:`relative_unfairness`, 20:20 and Palma are means over capped simplices, which
:mod:`equifed.metrics.levels` describes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from equifed.metrics.levels import (
    Reduced,
    Values,
    average_top,
    check_finite,
    check_fraction,
    check_nonnegative,
    compute_shares,
    unwrap,
)


def lorenz_curve(values: ArrayLike) -> tuple[Values, Values]:
    r"""Return the Lorenz curve as its n + 1 corners (x, y).

    :math:`y(k/n)` is the share of the total that belongs to the k clients with the smallest values;
    the curve is linear in between, convex, from (0, 0) to (1, 1), and on the diagonal under
    equality. IA Figure 4 displays :math:`y - x/2`.

    >>> lorenz_curve([3.0, 1.0])
    (array([0. , 0.5, 1. ]), array([0.  , 0.25, 1.  ]))
    """
    ordered = np.sort(compute_shares(values), axis=-1)
    start = np.zeros((*ordered.shape[:-1], 1))
    heights = np.concatenate([start, np.cumsum(ordered, axis=-1)], axis=-1)
    heights[..., -1] = 1.0
    return np.linspace(0.0, 1.0, ordered.shape[-1] + 1), heights


def gini(values: ArrayLike) -> Reduced:
    r"""Return the Gini coefficient, twice the area between the diagonal and the Lorenz curve.

    .. math:: G = 1 - 2\int_0^1 y(x)\,dx = \frac{\sum_i \sum_j |v_i - v_j|}{2 n \sum_i v_i}
              = \sum_{k=1}^{n} \frac{2k - n - 1}{n}\, p_{(k)}

    From 0 (equality) to 1 - 1/n (one client has everything). IA Section 6 (v) uses it on losses.

    >>> gini([1.0, 3.0])
    0.25
    """
    ordered = np.sort(compute_shares(values), axis=-1)
    n = ordered.shape[-1]
    ranks = (2 * np.arange(1, n + 1) - n - 1) / n
    return unwrap(np.maximum((ranks * ordered).sum(axis=-1), 0.0))


def entropy(values: ArrayLike) -> Reduced:
    r"""Return the entropy of the shares in nats, :math:`-\sum_i p_i\log p_i` with 0 log 0 = 0.

    From 0 to log n, which is equality. One of q-FFL's measures of uniformity (Li et al. 2020,
    Appendix).

    >>> round(entropy([0.5, 0.5, 0.0]), 6)
    0.693147
    """
    p = compute_shares(values)
    return unwrap(np.maximum(-(p * np.log(np.where(p > 0, p, 1.0))).sum(axis=-1), 0.0))


def theil(values: ArrayLike) -> Reduced:
    r"""Return Theil's T, :math:`\sum_i p_i\log(n p_i) = \log n - H(p)`.

    The same as :math:`\frac1n\sum_i \frac{v_i}{\bar v}\log\frac{v_i}{\bar v}`. From 0 (equality) to
    log n (one client has everything). Theil, "Economics and Information Theory", 1967.

    >>> round(theil([1.0, 0.0]), 6)
    0.693147
    """
    p = compute_shares(values)
    logs = np.log(np.where(p > 0, p.shape[-1] * p, 1.0))
    return unwrap(np.maximum((p * logs).sum(axis=-1), 0.0))  # below 0 by rounding only


def jain(values: ArrayLike) -> Reduced:
    r"""Return Jain's index :math:`(\sum_i v_i)^2 / (n\sum_i v_i^2)`: what fraction is served.

    From 1/n (one client has everything) to 1 (equality). Jain, Chiu and Hawe (1984).

    >>> jain([1.0, 1.0, 0.0, 0.0])
    0.5
    """
    p = compute_shares(values)
    return unwrap(np.minimum(1.0 / (p.shape[-1] * np.square(p).sum(axis=-1)), 1.0))


def cosine(values: ArrayLike) -> Reduced:
    r"""Return the cosine of the angle to the equal vector, :math:`\sum_i v_i / (\sqrt n\,|v|)`.

    1 is equality; for values that are not negative it is the square root of :func:`jain`. It is
    defined for negative values too, down to -1; the zero vector counts as equal. One of q-FFL's
    measures of uniformity.

    >>> round(cosine([1.0, 1.0, 0.0, 0.0]), 6)
    0.707107
    """
    array = check_finite(values)
    top = np.abs(array).max(axis=-1, keepdims=True)
    relative = np.divide(array, top, out=np.ones_like(array), where=top > 0)
    length = np.sqrt(array.shape[-1]) * np.sqrt(np.square(relative).sum(axis=-1))
    return unwrap(np.clip(relative.sum(axis=-1) / length, -1.0, 1.0))


def _mean_felt(values: ArrayLike, aversion: float, sign: int) -> Values:
    """Return the power mean of v / mean(v) with the exponent 1 ± aversion, 0 and ±∞ included."""
    # In logarithms, shifted by the largest term: no overflow for large exponents, no cancellation
    # near 0.
    if not aversion >= 0:
        raise ValueError(f"aversion must be at least 0 (infinity is allowed), got {aversion}.")
    exponent = 1.0 + sign * aversion
    relative = compute_shares(values) * np.shape(values)[-1]
    if np.isinf(exponent):
        return np.asarray(relative.max(axis=-1) if exponent > 0 else relative.min(axis=-1))
    vanishes = (relative == 0).any(axis=-1) & (exponent <= 0)
    # Where the mean vanishes the logarithms are not needed; 1 stands in for the zeros.
    safe = np.where(vanishes[..., None] & (relative == 0), 1.0, relative)
    with np.errstate(divide="ignore"):
        logs = np.log(safe)
    if exponent == 0:
        return np.where(vanishes, 0.0, np.exp(logs.mean(axis=-1)))
    terms = exponent * logs
    top = terms.max(axis=-1, keepdims=True)
    log_mean = top[..., 0] + np.log1p(np.expm1(terms - top).mean(axis=-1))
    return np.where(vanishes, 0.0, np.exp(log_mean / exponent))


def atkinson(values: ArrayLike, aversion: float) -> Reduced:
    r"""Return Atkinson's index: the fraction of the total that equality would make superfluous.

    .. math:: A_\varepsilon
              = 1 - \Bigl(\frac1n\sum_i (v_i/\bar v)^{1-\varepsilon}\Bigr)^{1/(1-\varepsilon)},
              \quad A_1 = 1 - \frac{(\prod_i v_i)^{1/n}}{\bar v},\quad A_\infty = 1 - \frac{\min_i
              v_i}{\bar v}

    From 0 (equality, or ``aversion`` = 0) to 1; with an aversion of 1 or more, a single zero among
    positive values gives 1. The larger the aversion, the more the *smallest* values count: the
    badly served when values are accuracies, but the *well* served when they are losses. IA Example
    2 applies :math:`A_\infty` to losses and so does this function
    if asked; :func:`burden` is the index that looks at the largest losses.

    References
    ----------
    Atkinson, "On the measurement of inequality", J. Econ. Theory 2, 1970. IA, Appendix B.

    >>> round(atkinson([1.0, 3.0], aversion=2.0), 12), atkinson([1.0, 3.0], aversion=float("inf"))
    (0.25, 0.5)
    """
    return unwrap(np.clip(1.0 - _mean_felt(values, aversion, -1), 0.0, 1.0))


def burden(losses: ArrayLike, aversion: float) -> Reduced:
    r"""Return Atkinson's idea turned towards losses: how much worse than their mean they *feel*.

    .. math:: B_\varepsilon
              = \Bigl(\frac1n\sum_i (\ell_i/\bar\ell)^{1+\varepsilon}\Bigr)^{1/(1+\varepsilon)} - 1,
              \qquad B_\infty = \frac{\max_i \ell_i}{\bar\ell} - 1

    An equal loss of :math:`(1 + B_\varepsilon)\bar\ell` for everyone is as bad as the given losses
    for somebody who weighs losses by the convex :math:`\ell^{1+\varepsilon}` (the q-FFL objective
    with q = ε). From 0 to n - 1. With aversion 1 it is :math:`1/\sqrt{\mathrm{jain}} - 1`.

    >>> burden([1.0, 3.0], aversion=float("inf"))
    0.5
    """
    return unwrap(np.maximum(_mean_felt(losses, aversion, 1) - 1.0, 0.0))


def relative_unfairness(values: ArrayLike, alpha: float, beta: float) -> Reduced:
    r"""Return how many times larger the large values are than the small ones.

    .. math:: R_{A,B}(v) = \frac{\max_{a\in\Delta_\alpha} \sum_i a_i v_i}
                                {\min_{b\in\Delta_\beta}\sum_i b_i v_i}

    The mean of the largest fraction ``alpha`` over the mean of the smallest fraction ``beta``. At
    least 1, and 1 means equality of those tails, whether values are losses (large is badly served)
    or accuracies (large is well served, as with incomes, for which the 20:20 and Palma ratios were
    made). Zero for every client gives 1; zero for the smallest fraction only gives infinity.
    Negative values are refused.

    With (1, 1/n) it is mean over minimum, so :math:`1 - 1/R` is Atkinson's index with infinite
    aversion.

    References
    ----------
    IA, Definition 1 and Example 2.

    >>> relative_unfairness([1.0, 2.0, 3.0, 6.0], alpha=0.25, beta=0.5)
    4.0
    """
    array = check_nonnegative(values)
    large = average_top(array, check_fraction(alpha, "alpha"))
    small = np.abs(average_top(-array, check_fraction(beta, "beta")))  # never -0
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.asarray(large / small)
    return unwrap(np.maximum(np.where(large == 0, 1.0, ratio), 1.0))


def twenty_twenty(values: ArrayLike) -> Reduced:
    """Return the 20:20 ratio, the mean of the largest 20 % over that of the smallest 20 %.

    >>> twenty_twenty([1.0, 2.0, 2.0, 2.0, 3.0])
    3.0
    """
    return relative_unfairness(values, alpha=0.2, beta=0.2)


def palma(values: ArrayLike) -> Reduced:
    """Return the Palma ratio, the mean of the largest 10 % over that of the smallest 40 %.

    As a ratio of *means*, like every R_{A,B}; the ratio of totals used for incomes is a quarter of
    it. (IA Example 2 prints the levels as (0.40, 0.10); its main text has them as here.)

    >>> palma([1.0] * 4 + [2.0] * 5 + [5.0])
    5.0
    """
    return relative_unfairness(values, alpha=0.1, beta=0.4)
