r"""How well clients are served: averages, the worst, the best, and how far they lie apart.

Every reducer takes finite numbers, one per client along the last axis: a vector of shape (n,) gives
a float, a stack of shape (b, n) gives (b,) numbers, which the bootstrap uses. A client without a
value (NaN) is refused with its position: whether it is left out is for the caller to decide.
``higher_is_better`` says whether values are like accuracies (True) or like losses (False), which
decides who is *worst*. Negative values are allowed here.

CVaR is a maximum over the capped simplex at level alpha, :math:`\Delta_\alpha = \{a \ge 0, \sum_i
a_i = 1, a_i \le 1/(\alpha n)\}`. The largest :math:`\langle a, v\rangle` over it is the mean of the
largest fraction alpha of the values, where the last client is counted in part when alpha n is no
integer. (IA prints :math:`\lfloor\alpha n\rfloor` clients, which is the same when it is one, and
nothing at all when alpha n < 1; there the capped simplex gives the extreme client.)
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Values: TypeAlias = NDArray[np.float64]
"""One number per client, shape (n,), or several such vectors, shape (b, n)."""

Reduced: TypeAlias = Any
"""A float for a vector (n,); an array (b,) for a stack of vectors (b, n)."""


def unwrap(result: ArrayLike) -> Reduced:
    """Return a Python float for one vector and an array for a stack of them."""
    array = np.asarray(result, dtype=np.float64)
    return float(array) if array.ndim == 0 else array


def name_positions(wrong: NDArray[np.bool_]) -> str:
    """Name the clients (positions along the last axis) for which something is wrong.

    >>> name_positions(np.array([False, True, True]))
    '1, 2'
    """
    clients = np.flatnonzero(wrong.reshape(-1, wrong.shape[-1]).any(axis=0))
    more = f" and {len(clients) - 10} more" if len(clients) > 10 else ""
    return ", ".join(map(str, clients[:10])) + more


def check_finite(values: ArrayLike, name: str = "values") -> Values:
    """Return ``values`` as float64 with at least one client, all finite, or say which are not."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim == 0 or array.shape[-1] == 0:
        raise ValueError(
            f"{name} must hold one number per client along the last axis, got shape {array.shape}."
        )
    wrong = ~np.isfinite(array)
    if wrong.any():
        raise ValueError(
            f"{name} must be finite, but clients at positions {name_positions(wrong)} are not; "
            "leave clients without a value out explicitly (summary(..., missing='drop') does)."
        )
    return array


def check_nonnegative(values: ArrayLike, name: str = "values") -> Values:
    """Return ``values`` as :func:`check_finite` does, and refuse negative ones."""
    array = check_finite(values, name)
    if (array < 0).any():
        raise ValueError(
            f"{name} must not be negative (shares and ratios lose their meaning), but clients at "
            f"positions {name_positions(array < 0)} are; use variance, spread or worst_fraction."
        )
    return array


def compute_shares(values: ArrayLike) -> Values:
    r"""Return the shares :math:`p_i = v_i / \sum_j v_j`; equal ones when all values are 0.

    Zero for everyone is perfect equality, and 1/n is the limit of the shares of (c, ..., c) as c
    goes to 0. The division by the largest value first keeps the sum from overflowing.

    >>> compute_shares([1.0, 3.0]), compute_shares([0.0, 0.0])
    (array([0.25, 0.75]), array([0.5, 0.5]))
    """
    array = check_nonnegative(values)
    top = array.max(axis=-1, keepdims=True)
    relative = np.divide(array, top, out=np.ones_like(array), where=top > 0)
    out: Values = relative / relative.sum(axis=-1, keepdims=True)
    return out


def check_fraction(value: float, name: str) -> float:
    """Return a fraction in (0, 1], or say that it is not one."""
    if not 0 < value <= 1:
        raise ValueError(f"{name} must lie in (0, 1], got {value}; write 20 % as 0.2.")
    return float(value)


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
    array, m = check_finite(values), check_nonnegative(sizes, "sizes")
    if m.shape[-1] != array.shape[-1]:
        raise ValueError(
            f"sizes must hold one number for each of the {array.shape[-1]} clients, "
            f"got {m.shape[-1]}."
        )
    if not (m.sum(axis=-1) > 0).all():
        raise ValueError("sizes must not all be zero.")
    return unwrap((compute_shares(m) * array).sum(axis=-1))


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


def variance(values: ArrayLike) -> Reduced:
    r"""Return :math:`\frac1n\sum_i (v_i - \bar v)^2`.

    Divided by n, not n - 1: the clients of the federation are all the clients there are. One client
    has variance 0.

    >>> variance([1.0, 2.0, 3.0, 6.0])
    3.5
    """
    array = check_finite(values)
    return unwrap((array - array[..., :1]).var(axis=-1))  # equal values: exactly 0


def standard_deviation(values: ArrayLike) -> Reduced:
    r"""Return the square root of :func:`variance`, in the unit of the values.

    >>> standard_deviation([1.0, 3.0])
    1.0
    """
    return unwrap(np.sqrt(variance(values)))


def average_top(values: Values, level: float) -> Values:
    """Return the mean of the largest fraction ``level`` of the values, the last one in part."""
    n = values.shape[-1]
    steps = np.arange(n + 1) / (level * n)
    # Rounding must not leave a crumb of weight beyond an integer level * n.
    steps = np.where(np.abs(steps - 1.0) < 1e-12, 1.0, steps)
    weights = np.diff(np.minimum(steps, 1.0))  # of the capped simplex's maximiser
    return np.asarray((-np.sort(-values, axis=-1) * weights).sum(axis=-1))


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
