r"""How well clients are served: averages, the worst, the best, and how far they lie apart.

``higher_is_better`` says whether the values are something like accuracies (True) or something like
losses (False). It decides who is *worst*. None of these reducers minds negative values.

CVaR is a maximum over the capped simplex at level alpha, :math:`\Delta_\alpha = \{a \ge 0, \sum_i
a_i = 1, a_i \le 1/(\alpha n)\}`. The largest :math:`\langle a, v\rangle` over it is the mean of the
largest fraction alpha of the values, where the last client is counted in part when alpha n is no
integer. (IA prints :math:`\lfloor\alpha n\rfloor` clients, which is the same when it is one, and
nothing at all when alpha n < 1; there the capped simplex gives the extreme client.)
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from equifed.metrics.checks import (
    Reduced,
    Values,
    check_finite,
    check_fraction,
    normalise_sizes,
    unwrap,
)


def average_by_client(values: ArrayLike) -> Reduced:
    r"""Return the plain mean over clients, :math:`\frac1n\sum_i v_i`: every client counts the same.

    This is the average of PD and IA (Table 1, column "All").

    >>> average_by_client([0.9, 0.5])
    0.7
    """
    return unwrap(check_finite(values).mean(axis=-1))


def average_by_sample(values: ArrayLike, sizes: ArrayLike) -> Reduced:
    r"""Return the mean over samples, :math:`\sum_i m_i v_i / \sum_i m_i`: large clients count more.

    With ``sizes`` the number of test samples this is the accuracy on the pooled test set.

    >>> average_by_sample([0.9, 0.5], sizes=[300, 100])
    0.8
    """
    array = check_finite(values)
    return unwrap((normalise_sizes(sizes, array) * array).sum(axis=-1))


def count_of_fraction(fraction: float, clients: int) -> int:
    r"""Return :math:`\lceil k n\rceil`, at least 1: how many clients "the worst k" are among n.

    Rounded up, so that a small federation still has a worst client; a product that is an integer
    but for rounding (0.1 * 30 is 3.0000000000000004) counts as that integer.

    >>> count_of_fraction(0.1, 30), count_of_fraction(0.1, 31), count_of_fraction(0.2, 3)
    (3, 4, 1)
    """
    return max(1, math.ceil(check_fraction(fraction, "fraction") * clients - 1e-9))


def worst_fraction(values: ArrayLike, fraction: float, *, higher_is_better: bool) -> Reduced:
    r"""Return the mean over the :math:`\lceil k n\rceil` worst-served clients, k = ``fraction``.

    The lowest accuracies or the highest losses. :func:`~equifed.metrics.cvar` is the same without
    rounding, with the last client counted in part. IA Section 6 (ii).

    >>> worst_fraction([0.5, 1.0, 0.75, 0.75], 0.5, higher_is_better=True)
    0.625
    >>> worst_fraction([0.5, 1.0, 0.75, 0.75], 0.5, higher_is_better=False)
    0.875
    """
    array = check_finite(values)
    count = count_of_fraction(fraction, array.shape[-1])
    ordered = np.sort(array, axis=-1)
    tail = ordered[..., :count] if higher_is_better else ordered[..., -count:]
    return unwrap(tail.mean(axis=-1))


def best_fraction(values: ArrayLike, fraction: float, *, higher_is_better: bool) -> Reduced:
    r"""Return the mean over the :math:`\lceil k n\rceil` best-served clients. IA Section 6 (iii).

    >>> best_fraction([0.5, 1.0, 0.75, 0.75], 0.5, higher_is_better=True)
    0.875
    """
    return worst_fraction(values, fraction, higher_is_better=not higher_is_better)


def minimum(values: ArrayLike) -> Reduced:
    """Return the smallest value, whoever that is good for.

    >>> minimum([0.5, 0.9])
    0.5
    """
    return unwrap(check_finite(values).min(axis=-1))


def maximum(values: ArrayLike) -> Reduced:
    """Return the largest value.

    >>> maximum([0.5, 0.9])
    0.9
    """
    return unwrap(check_finite(values).max(axis=-1))


def worst(values: ArrayLike, *, higher_is_better: bool) -> Reduced:
    """Return the value of the worst-served client: the lowest accuracy or the highest loss.

    The worst of many noisy clients looks bad by chance: see
    :func:`~equifed.metrics.worst_client_interval` for what the data say about its true accuracy.

    >>> worst([0.5, 0.9], higher_is_better=True), worst([0.5, 0.9], higher_is_better=False)
    (0.5, 0.9)
    """
    return minimum(values) if higher_is_better else maximum(values)


def best(values: ArrayLike, *, higher_is_better: bool) -> Reduced:
    """Return the value of the best-served client.

    >>> best([0.5, 0.9], higher_is_better=True)
    0.9
    """
    return worst(values, higher_is_better=not higher_is_better)


def spread(values: ArrayLike) -> Reduced:
    r"""Return the range :math:`\max_i v_i - \min_i v_i`: between the best and the worst served.

    >>> spread([0.5, 0.75, 0.625])
    0.25
    """
    return unwrap(np.ptp(check_finite(values), axis=-1))


def _from_first(values: ArrayLike) -> Values:
    """Return the distances to the first client: equal values then vary by exactly 0."""
    array = check_finite(values)
    return array - array[..., :1]


def variance(values: ArrayLike) -> Reduced:
    r"""Return :math:`\frac1n\sum_i (v_i - \bar v)^2`.

    Divided by n, not n - 1: the clients of the federation are all the clients there are. One client
    has variance 0.

    >>> variance([1.0, 2.0, 3.0, 6.0])
    3.5
    """
    return unwrap(_from_first(values).var(axis=-1))


def standard_deviation(values: ArrayLike) -> Reduced:
    r"""Return the square root of :func:`variance`, in the unit of the values.

    >>> standard_deviation([1.0, 3.0])
    1.0
    """
    return unwrap(_from_first(values).std(axis=-1))


def _top_weights(level: float, clients: int) -> Values:
    """Return the weights of the capped simplex's maximiser, for values in decreasing order."""
    steps = np.arange(clients + 1) / (level * clients)
    # Rounding must not leave a crumb of weight beyond an integer level * clients.
    steps = np.where(np.abs(steps - 1.0) < 1e-12, 1.0, steps)
    return np.diff(np.minimum(steps, 1.0))


def average_top(values: Values, level: float) -> Values:
    """Return the mean of the largest fraction ``level`` of the values, the last one in part."""
    descending = -np.sort(-values, axis=-1)
    out: Values = (descending * _top_weights(level, values.shape[-1])).sum(axis=-1)
    return out


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
    array = check_finite(losses)
    sign = -1.0 if higher_is_better else 1.0
    return unwrap(sign * average_top(sign * array, check_fraction(tail, "tail")))


def hcvar(losses: ArrayLike, alphas: ArrayLike, weights: ArrayLike | None = None) -> Reduced:
    r"""Return the heterogeneous CVaR, where each client has its own level :math:`\alpha_i`.

    .. math:: \max_q \sum_i p_i q_i \ell_i,\quad 0 \le q_i \le 1/\alpha_i,\ \sum_i p_i q_i = 1
              \qquad = \min_\eta\ \eta + \sum_i \frac{p_i}{\alpha_i} (\ell_i - \eta)_+

    The variational form is the definition here; :func:`hcvar_by_tail` is RC's conditional
    expectation, which is the same number where an atom at the quantile is counted in part
    (Lemma 1). The maximiser fills the caps in decreasing
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
    array, mass = _capped_mass(losses, alphas, weights)
    order = np.argsort(-array, axis=-1, kind="stable")
    caps = np.take_along_axis(mass, order, axis=-1)
    filled = np.minimum(np.cumsum(caps, axis=-1), 1.0)
    filled[..., -1] = 1.0  # the caps sum to at least 1; rounding must not lose the last crumb
    used = np.diff(filled, axis=-1, prepend=0.0)
    return unwrap((used * np.take_along_axis(array, order, axis=-1)).sum(axis=-1))


def hcvar_by_tail(
    losses: ArrayLike, alphas: ArrayLike, weights: ArrayLike | None = None
) -> Reduced:
    r"""Return the heterogeneous CVaR as the conditional expectation of RC's Definition 2.

    .. math:: \mathbb E_\alpha[\ell_i \mid \ell_i > v], \qquad P_\alpha(i) = \frac{p_i}{\alpha_i
              \tau_\alpha}, \quad \tau_\alpha = \sum_i \frac{p_i}{\alpha_i}, \quad
              v \text{ the } (1 - 1/\tau_\alpha)\text{-quantile}

    Client losses have atoms, so that the clients above v rarely have exactly the mass
    :math:`1/\tau_\alpha`, and sometimes none. Those at v are counted in the part that completes
    it, :math:`\tau_\alpha\{\mathbb E_\alpha[\ell_i; \ell_i > v] + v\,(1/\tau_\alpha -
    P_\alpha(\ell_i > v))\}`, which makes it :func:`hcvar`. Without atoms it is the formula above.

    Parameters
    ----------
    losses, alphas, weights
        As for :func:`hcvar`.

    References
    ----------
    RC, Definition 2 and Lemma 1; Rockafellar and Uryasev (2002) for atoms.

    >>> hcvar_by_tail([1.0, 2.0], alphas=[1.0, 1.0]), hcvar_by_tail([1.0, 2.0], alphas=[1.0, 0.5])
    (1.5, 2.0)
    """
    array, mass = _capped_mass(losses, alphas, weights)  # tau P_alpha
    order = np.argsort(-array, axis=-1, kind="stable")
    held = np.cumsum(np.take_along_axis(mass, order, axis=-1), axis=-1)
    first = np.minimum((held < 1.0 - 1e-12).sum(axis=-1, keepdims=True), array.shape[-1] - 1)
    v = np.take_along_axis(np.take_along_axis(array, order, axis=-1), first, axis=-1)
    above = np.where(array > v, mass, 0.0)
    rest = 1.0 - above.sum(axis=-1)
    return unwrap((above * array).sum(axis=-1) + rest * v[..., 0])


def _capped_mass(
    losses: ArrayLike, alphas: ArrayLike, weights: ArrayLike | None
) -> tuple[Values, Values]:
    """Return the losses and p_i / alpha_i, in one shape."""
    array = check_finite(losses)
    levels = check_finite(np.atleast_1d(np.asarray(alphas)), "alphas")
    if levels.shape not in ((1,), array.shape[-1:]):
        raise ValueError(
            f"alphas must be one level for each of the {array.shape[-1]} clients, or one for all, "
            f"got shape {levels.shape}."
        )
    if not ((levels > 0) & (levels <= 1)).all():
        raise ValueError(f"alphas must lie in (0, 1], got {np.asarray(alphas).tolist()}.")
    p = normalise_sizes(np.ones(array.shape[-1]) if weights is None else weights, array, "weights")
    return array, np.broadcast_to(p / levels, array.shape)
