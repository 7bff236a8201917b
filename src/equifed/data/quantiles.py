"""Order statistics of numbers that nobody sees together: from counts on a common grid."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

CELLS = 1024
"""Cells of a grid; every further grid divides one cell of the one before."""
PASSES = 4
QUARTILES = (0.25, 0.5, 0.75)


def count_cells(numbers: Numbers, low: float, high: float) -> list[int]:
    """Count sorted numbers below ``low``, and in the cells of a grid from there to ``high``.

    A cell holds its lower end; the last one both.

    >>> count_cells(np.array([0.0, 1.0, 2.0]), 1.0, 2.0)[:2], sum(count_cells(np.ones(3), 0, 2))
    ([1, 1], 3)
    """
    starts = np.searchsorted(numbers, _edges(low, high)[:-1], side="left")
    end = np.searchsorted(numbers, high, side="right")
    return [int(starts[0]), *np.diff([*starts.tolist(), int(end)]).tolist()]


def find_ranks(count: int) -> list[int]:
    """Return the ranks (from 0) of the numbers that the quartiles lie between, two for each."""
    places = [(count - 1) * p for p in QUARTILES]
    return [rank for h in places for rank in (math.floor(h), math.ceil(h))]


def find_cell(counts: Sequence[int], rank: int, low: float, high: float) -> tuple[float, float]:
    """Return the ends of the cell that holds the number of this rank."""
    if low == high:
        return low, high
    cell = int(np.searchsorted(np.cumsum(counts), rank, side="right")) - 1
    edges = _edges(low, high)
    return float(edges[cell]), float(edges[cell + 1])


def read_quartiles(cells: Sequence[tuple[float, float]], count: int) -> tuple[list[float], float]:
    """Return the three quartiles, as ``numpy.percentile`` interpolates them, and their error."""
    middle = [(low + high) / 2 for low, high in cells]
    error = max((high - low) / 2 for low, high in cells)
    places = [(count - 1) * p for p in QUARTILES]
    found = [
        below + (h - math.floor(h)) * (above - below)
        for h, below, above in zip(places, middle[::2], middle[1::2], strict=True)
    ]
    return found, error


def _edges(low: float, high: float) -> Numbers:
    return np.linspace(low, high, CELLS + 1)
