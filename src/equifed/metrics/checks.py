"""What the metrics accept: finite numbers, one per client, along the last axis.

Every reducer takes a vector of shape (n,) and gives a float, or a stack of vectors of shape (b, n)
and gives (b,) numbers, one for each row. The bootstrap uses the second form. A client without a
value (NaN) is refused with its position: it is for the caller to decide whether it is left out,
never for an average.
"""

from __future__ import annotations

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


def normalise_sizes(sizes: ArrayLike, like: Values, name: str = "sizes") -> Values:
    r"""Return :math:`m_i / \sum_j m_j` for sample counts m that go with the vector ``like``."""
    array = check_nonnegative(sizes, name)
    if array.shape[-1] != like.shape[-1]:
        raise ValueError(
            f"{name} must hold one number for each of the {like.shape[-1]} clients, "
            f"got {array.shape[-1]}."
        )
    if not (array.sum(axis=-1) > 0).all():
        raise ValueError(f"{name} must not all be zero.")
    return compute_shares(array)
