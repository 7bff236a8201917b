"""Slow, obvious references: bisection, loops, a generic solver."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def capped_simplex_by_bisection(point: Array, caps: Array) -> Array:
    """Project onto {0 <= w <= caps, sum w = 1} by bisecting on the shift."""
    low, high = float(point.min() - caps.max() - 1.0), float(point.max())
    for _ in range(200):
        middle = 0.5 * (low + high)
        if np.clip(point - middle, 0.0, caps).sum() >= 1.0:
            low = middle
        else:
            high = middle
    return np.clip(point - 0.5 * (low + high), 0.0, caps)


def is_majorised(weights: Array, corner: Array, tolerance: float) -> bool:
    """Say whether weights lie in conv{permutations of corner}: prefix sums and equal totals."""
    prefix = np.cumsum(np.sort(weights)[::-1])
    bound = np.cumsum(np.sort(corner)[::-1])
    return bool((prefix <= bound + tolerance).all() and abs(prefix[-1] - bound[-1]) <= tolerance)
