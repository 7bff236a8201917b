r"""Tail averages over capped simplices: relative unfairness, 20:20, Palma, CVaR and HCVaR.

The capped simplex at level alpha is :math:`\Delta_\alpha = \{a \ge 0, \sum_i a_i = 1, a_i \le
1/(\alpha n)\}`. The largest :math:`\langle a, v\rangle` over it is the mean of the largest fraction
alpha of the values, where the last client is counted in part when alpha n is no integer. (IA prints
:math:`\lfloor\alpha n\rfloor` clients, which is the same when it is one, and nothing at all when
alpha n < 1; there the capped simplex gives the extreme client.)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from equifed.metrics.checks import (
    Reduced,
    Values,
    client_weights,
    finite,
    level_in_unit,
    nonnegative,
    reduced,
)


def _top_weights(level: float, clients: int) -> Values:
    """Return the weights of the capped simplex's maximiser, for values in decreasing order."""
    steps = np.arange(clients + 1) / (level * clients)
    # Rounding must not leave a crumb of weight beyond an integer level * clients.
    steps = np.where(np.abs(steps - 1.0) < 1e-12, 1.0, steps)
    return np.diff(np.minimum(steps, 1.0))


def _top_average(values: Values, level: float) -> Values:
    descending = -np.sort(-values, axis=-1)
    out: Values = (descending * _top_weights(level, values.shape[-1])).sum(axis=-1)
    return out


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
    array = nonnegative(values)
    large = _top_average(array, level_in_unit(alpha, "alpha"))
    small = np.abs(_top_average(-array, level_in_unit(beta, "beta")))  # never -0
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.asarray(large / small)
    return reduced(np.maximum(np.where(large == 0, 1.0, ratio), 1.0))


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


def cvar(losses: ArrayLike, tail: float, *, higher_is_better: bool = False) -> Reduced:
    r"""Return the conditional value at risk: the mean loss of the worst ``tail`` of clients.

    .. math:: \mathrm{CVaR} = \max_{a\in\Delta_{\rm tail}}\langle a, \ell\rangle
              = \min_\eta\ \eta + \frac{1}{\mathrm{tail}\cdot n}\sum_i (\ell_i - \eta)_+

    Unlike :func:`~equifed.metrics.worst_fraction` it does not round the number of clients, so it is
    continuous in ``tail``. With ``higher_is_better`` (accuracies) it is the mean of the lowest
    fraction.

    References
    ----------
    Rockafellar and Uryasev (2000); PD Section 3; RC Section 3.

    >>> cvar([1.0, 2.0, 3.0, 4.0], tail=0.375)
    3.6666666666666665
    """
    array = finite(losses)
    sign = -1.0 if higher_is_better else 1.0
    return reduced(sign * _top_average(sign * array, level_in_unit(tail, "tail")))


def hcvar(losses: ArrayLike, alphas: ArrayLike, weights: ArrayLike | None = None) -> Reduced:
    r"""Return the heterogeneous CVaR, where each client has its own level :math:`\alpha_i`.

    .. math:: \max_q \sum_i p_i q_i \ell_i,\quad 0 \le q_i \le 1/\alpha_i,\ \sum_i p_i q_i = 1
              \qquad = \min_\eta\ \eta + \sum_i \frac{p_i}{\alpha_i} (\ell_i - \eta)_+

    The variational form is the definition here; RC's conditional expectation differs from it when
    the quantile is an atom (Lemma 1 holds for this one). The maximiser fills the caps in decreasing
    order of loss. Equal levels give :func:`cvar`, levels of 1 the weighted average.

    Parameters
    ----------
    losses
        Any finite numbers; higher is worse.
    alphas
        One level in (0, 1] for each client, or one for all. A level below p_i acts like p_i.
    weights
        The p_i, up to a factor (sample counts will do); equal when left out.

    References
    ----------
    RC, Definitions 1 and 2, Lemma 1.

    >>> hcvar([1.0, 2.0], alphas=[1.0, 1.0]), hcvar([1.0, 2.0], alphas=[1.0, 0.5])
    (1.5, 2.0)
    """
    array = finite(losses)
    levels = finite(np.atleast_1d(np.asarray(alphas)), "alphas")
    if levels.shape not in ((1,), array.shape[-1:]):
        raise ValueError(
            f"alphas must be one level for each of the {array.shape[-1]} clients, or one for all, "
            f"got shape {levels.shape}."
        )
    if not ((levels > 0) & (levels <= 1)).all():
        raise ValueError(f"alphas must lie in (0, 1], got {np.asarray(alphas).tolist()}.")
    p = client_weights(np.ones(array.shape[-1]) if weights is None else weights, array, "weights")
    order = np.argsort(-array, axis=-1, kind="stable")
    caps = np.take_along_axis(np.broadcast_to(p / levels, array.shape), order, axis=-1)
    filled = np.minimum(np.cumsum(caps, axis=-1), 1.0)
    filled[..., -1] = 1.0  # the caps sum to at least 1; rounding must not lose the last crumb
    used = np.diff(filled, axis=-1, prepend=0.0)
    return reduced((used * np.take_along_axis(array, order, axis=-1)).sum(axis=-1))
