"""From one number per client to one number: averages, the worst, spreads, how unequal the shares.

Every reducer takes finite numbers, one per client along the last axis: (n,) gives a float, (b, n)
gives (b,) numbers. ``higher_is_better`` tells accuracies (True) from losses (False). Lorenz curve,
Gini coefficient and ratios of tails are blind to the level: read them beside an average.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
    """Name the clients (positions along the last axis) for which something is wrong."""
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
            "leave clients without a value out."
        )
    return array


def check_nonnegative(values: ArrayLike, name: str = "values") -> Values:
    """Return ``values`` as :func:`check_finite` does, and refuse negative ones."""
    array = check_finite(values, name)
    if (array < 0).any():
        raise ValueError(
            f"{name} must not be negative (shares and ratios lose their meaning), but clients at "
            f"positions {name_positions(array < 0)} are; use spread or worst_fraction."
        )
    return array


def compute_shares(values: ArrayLike) -> Values:
    r"""Return the shares :math:`p_i = v_i / \sum_j v_j`; equal ones when all values are 0."""
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
    r"""Return :math:`\lceil k n\rceil`, at least 1: how many clients are a fraction of n."""
    return max(1, math.ceil(check_fraction(fraction, "fraction") * clients - 1e-9))


def worst_fraction(values: ArrayLike, fraction: float, *, higher_is_better: bool) -> Reduced:
    r"""Return the mean over the :math:`\lceil k n\rceil` worst-served clients, k = ``fraction``.

    The lowest accuracies or the highest losses. IA Section 6 (ii).

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


def worst(values: ArrayLike, *, higher_is_better: bool) -> Reduced:
    """Return the value of the worst-served client: the lowest accuracy or the highest loss.

    The worst of many noisy clients looks bad by chance: see
    :func:`~equifed.metrics.worst_client_interval` for what the data say about its true accuracy.

    >>> worst([0.5, 0.9], higher_is_better=True), worst([0.5, 0.9], higher_is_better=False)
    (0.5, 0.9)
    """
    array = check_finite(values)
    return unwrap(array.min(axis=-1) if higher_is_better else array.max(axis=-1))


def spread(values: ArrayLike) -> Reduced:
    r"""Return the range :math:`\max_i v_i - \min_i v_i`: between the best and the worst served.

    >>> spread([0.5, 0.75, 0.625])
    0.25
    """
    return unwrap(np.ptp(check_finite(values), axis=-1))


def standard_deviation(values: ArrayLike) -> Reduced:
    r"""Return :math:`\sqrt{\frac1n\sum_i (v_i - \bar v)^2}`, in the unit of the values.

    Divided by n, not n - 1: the clients of the federation are all the clients there are. One client
    has 0.

    >>> standard_deviation([1.0, 3.0])
    1.0
    """
    array = check_finite(values)
    return unwrap((array - array[..., :1]).std(axis=-1))  # equal values: exactly 0


def average_top(values: Values, level: float) -> Values:
    """Return the mean of the largest fraction ``level`` of the values, the last one in part."""
    n = values.shape[-1]
    steps = np.arange(n + 1) / (level * n)
    # Rounding must not leave a crumb of weight beyond an integer level * n.
    steps = np.where(np.abs(steps - 1.0) < 1e-12, 1.0, steps)
    weights = np.diff(np.minimum(steps, 1.0))  # of the capped simplex's maximiser
    return np.asarray((-np.sort(-values, axis=-1) * weights).sum(axis=-1))


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


def relative_unfairness(values: ArrayLike, alpha: float, beta: float) -> Reduced:
    r"""Return how many times larger the large values are than the small ones.

    .. math:: R_{A,B}(v) = \frac{\max_{a\in\Delta_\alpha} \sum_i a_i v_i}
                                {\min_{b\in\Delta_\beta}\sum_i b_i v_i}

    The mean of the largest fraction ``alpha`` over the mean of the smallest fraction ``beta``;
    (0.1, 0.4) is the Palma ratio. At least 1, and 1 means equality of those tails. Zero for every
    client gives 1; zero for the smallest fraction only gives infinity.

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


# -- by name ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reducer:
    """A named way from one value per client to one number; lower is fairer, unless of a level."""

    name: str  # key in :func:`summary`
    function: Callable[..., Reduced]  # of values of shape (n,) or (b, n)
    directed: bool = False  # the function takes ``higher_is_better``
    level: bool = False  # of service: better in the direction of the values
    bounds: tuple[float, float] = (-math.inf, math.inf)  # that the result never leaves
    signed: bool = True  # it is defined for negative values
    extreme: bool = False  # it rests on a single client: the bootstrap is wrong for it

    def compute(self, values: ArrayLike, higher_is_better: bool) -> Reduced:
        """Return the number, or one for each row."""
        if self.directed:
            return self.function(values, higher_is_better=higher_is_better)
        return self.function(values)

    def lower_is_better(self, *, higher_is_better: bool) -> bool:
        """Return whether a lower result is better for values of the given direction."""
        return not (self.level and higher_is_better)


REDUCERS = {
    reducer.name: reducer
    for reducer in (
        Reducer("average_by_client", average_by_client, level=True),
        Reducer("worst", worst, True, True, extreme=True),
        Reducer("worst_20_percent", partial(worst_fraction, fraction=0.2), True, True),
        Reducer("best_20_percent", partial(best_fraction, fraction=0.2), True, True),
        Reducer("spread", spread, bounds=(0.0, math.inf), extreme=True),
        Reducer("standard_deviation", standard_deviation, bounds=(0.0, math.inf)),
        Reducer("gini", gini, bounds=(0.0, 1.0), signed=False),
        Reducer("twenty_twenty", twenty_twenty, bounds=(1.0, math.inf), signed=False),
    )
}
"""Every reducer of a plain vector by its name, in the order of tables."""


def summary(
    values: ArrayLike, sizes: ArrayLike | None = None, *, higher_is_better: bool
) -> dict[str, float]:
    """Return every reducer of one vector by name, and the number of ``clients``.

    Reducers that are not defined for negative values are NaN when there are any.

    Parameters
    ----------
    values
        One number per client, shape (n,).
    sizes
        Sample counts; with them ``average_by_sample`` is added.
    higher_is_better
        True for accuracies, False for losses.

    >>> row = summary([0.9, 0.5, 0.7], higher_is_better=True)
    >>> row["worst"], round(row["average_by_client"], 6), round(row["spread"], 6)
    (0.5, 0.7, 0.4)
    """
    array = check_finite(values)
    if array.ndim != 1:
        raise ValueError(f"values must hold one number per client, shape (n,), got {array.shape}.")
    negative = bool((array < 0).any())
    result = {"clients": float(array.size)}
    with np.errstate(over="ignore", invalid="ignore"):  # losses of 1e300 have an infinite deviation
        for name, r in REDUCERS.items():
            defined = r.signed or not negative
            result[name] = r.compute(array, higher_is_better) if defined else math.nan
        if sizes is not None:
            result["average_by_sample"] = average_by_sample(array, sizes)
    return result
