"""Columns of numbers with bends, so that a linear model of them is not only a line.

A column z becomes z and max(z - k, 0) for a few knots k: a piecewise linear function of it. Knots
are quantiles of the training rows, found from counts alone: how many values are at most a mark,
added up over the clients, for the marks of three grids, each within one step of the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equifed.data.federation import Federation
from equifed.data.preparation import NumberColumn, Preparation, Target
from equifed.data.split import DataError, Split

Numbers = NDArray[np.float64]
LEVELS = (0.25, 0.5, 0.75)  # quantiles that may become knots
LEAST = 0.05  # share of the rows that lies on either side of a knot, at least
REACH, STEPS, GRIDS = 2.0, 16, 3  # quantiles are within 1.74 deviations of the mean (Cantelli)


def find_knots(count: Callable[[Numbers], Numbers], centre: Numbers, spread: Numbers) -> Numbers:
    """Return quantiles of columns, (columns, levels); NaN where a bend would be of few rows.

    ``count`` takes marks, (columns, m), and returns how many values of all clients are at most
    each; ``centre`` and ``spread`` are the columns' means and standard deviations.
    """
    total = count(np.full((len(centre), 1), np.inf))
    wide = (REACH * spread)[:, None]
    low = np.repeat(centre[:, None] - wide, len(LEVELS), axis=1)
    step = np.repeat(2 * wide / STEPS, len(LEVELS), axis=1)
    for _ in range(GRIDS):
        marks = low[..., None] + step[..., None] * np.arange(1, STEPS)
        counts = count(marks.reshape(len(centre), -1)).reshape(marks.shape)
        few = counts < (np.array(LEVELS) * total)[..., None]
        low, step = low + step * few.sum(axis=-1), step / STEPS
    knots = low + STEPS * step  # the end of the last interval
    below, upto = count(low), count(knots)
    knots = np.where((below >= LEAST * total) & (total - upto >= LEAST * total), knots, np.nan)
    again = np.diff(knots, axis=1, prepend=-np.inf) <= 2 * step * STEPS
    return np.where(again, np.nan, knots)


def count_below(values: Numbers, marks: Numbers) -> Numbers:
    """Return how many values of each column are at most each of its marks.

    >>> count_below(np.array([[1.0], [2.0], [3.0]]), np.array([[0.0, 2.0, 9.0]]))
    array([[0., 2., 3.]])
    """
    pairs = zip(np.sort(values, axis=0).T, marks, strict=True)
    return np.array([np.searchsorted(v, m, "right") for v, m in pairs], dtype=np.float64)


def bend(data: Federation, bent: Preparation | None = None) -> Federation:
    """Return the federation with bends in its columns of numbers, by its training rows.

    ``bent`` is the preparation of an earlier call, whose knots are taken.
    """
    prepared = data.preparation or _name_columns(data)
    starts = np.cumsum([0, *(len(column.titles) for column in prepared.columns)])[:-1]
    bent = bent or _fit(data.train.inputs[:, starts].astype(np.float64), prepared)

    def widen(split: Split) -> Split:
        pairs = zip(bent.columns, np.split(split.inputs, starts[1:], axis=1), strict=True)
        blocks = [c.bend(block) if isinstance(c, NumberColumn) else block for c, block in pairs]
        return replace(split, inputs=np.hstack(blocks))

    splits: dict[str, Any] = {label: widen(split) for label, split in data.splits().items()}
    return replace(data, **splits, preparation=bent, sha256="")


def find_lines(bent: Preparation) -> list[int]:
    """Return which features were there before the bends."""
    bends = [getattr(c, "knots", ()) for c in bent.columns]
    is_bend = [0 < k <= len(own) for c, own in zip(bent.columns, bends, strict=True)
               for k in range(len(c.titles))]  # fmt: skip
    return np.flatnonzero(~np.array(is_bend)).tolist()


def _name_columns(data: Federation) -> Preparation:
    """Return the preparation that leaves the columns of arrays as they are."""
    if len(data.input_shape) != 1 or data.layout is not None:
        raise DataError(
            f"curves=True bends columns, and samples of shape {data.input_shape} have none; give "
            "rows of features, or leave it out."
        )
    columns = tuple(NumberColumn(f"x{k}") for k in range(data.input_shape[0]))
    return Preparation(columns, Target("target", data.class_names or None))


def _fit(values: Numbers, prepared: Preparation) -> Preparation:
    """Return the preparation with knots in its columns of numbers, of which these are values."""
    # in one process the sum of the clients' counts is the count of all rows
    knots = find_knots(lambda m: count_below(values, m), values.mean(axis=0), values.std(axis=0))
    columns = [
        replace(c, knots=tuple(k[np.isfinite(k)].tolist())) if isinstance(c, NumberColumn) else c
        for c, k in zip(prepared.columns, knots, strict=True)
    ]
    return replace(prepared, columns=tuple(columns))
