"""Arguments that every objective checks: finite numbers, positive steps, priors."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equifed.contract.arrays import Weights

_SHOWN = 5


def finite(values: ArrayLike, name: str) -> NDArray[np.float64]:
    """Return ``values`` as a float64 vector, or say at which positions they are not numbers.

    >>> finite([1.0, float("nan"), 3.0], "losses")
    Traceback (most recent call last):
    ...
    ValueError: losses must be finite, got nan at position 1; leave those clients out.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} must be a vector, one number a client, got shape {array.shape}.")
    if not np.isfinite(array).all():
        bad = np.flatnonzero(~np.isfinite(array))
        seen = ", ".join(f"{array[i]} at position {i}" for i in bad[:_SHOWN])
        more = f" and {bad.size - _SHOWN} more" if bad.size > _SHOWN else ""
        raise ValueError(f"{name} must be finite, got {seen}{more}; leave those clients out.")
    return array


def step_size(step: float) -> float:
    """Return ``step`` if it is a finite number >= 0."""
    if not 0 <= step < np.inf:
        raise ValueError(f"step must be a finite number >= 0, got {step}.")
    return float(step)


def strength_of(value: float, name: str) -> float:
    """Return ``value`` if it is a finite number > 0."""
    if not 0 < value < np.inf:
        raise ValueError(f"{name} must be a finite number > 0, got {value}.")
    return float(value)


def frozen_numbers(
    numbers: Iterable[float] | None, name: str, *, zeros: bool = False
) -> tuple[float, ...] | None:
    """Return ``numbers`` as a tuple of finite positive numbers (None stays None)."""
    if numbers is None:
        return None
    array = finite(list(numbers), name)
    if (array < 0).any() or (not zeros and (array == 0).any()) or not array.any():
        raise ValueError(
            f"{name} needs {'nonnegative' if zeros else 'positive'} numbers, one per client, "
            f"got a smallest of {array.min():g} and a largest of {array.max():g}."
        )
    return tuple(float(a) for a in array)


def distribution(numbers: tuple[float, ...] | None, n: int, name: str) -> Weights:
    """Return ``numbers`` normalised to sum one; the uniform distribution for None."""
    if numbers is None:
        return np.full(n, 1.0 / n)
    if len(numbers) != n:
        raise ValueError(f"{name} has {len(numbers)} entries for {n} clients; give one per client.")
    share = np.asarray(numbers) / max(numbers)  # the division first: sums of 1e308 overflow
    return np.asarray(share / share.sum())
