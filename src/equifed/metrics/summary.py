"""Every reducer under a stable name, with its meaning and direction, for tables and comparisons."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from equifed.metrics import reducers
from equifed.metrics.reducers import Reduced, check_finite


@dataclass(frozen=True)
class Reducer:
    """A named way from one value per client to one number.

    Parameters
    ----------
    name
        Key in :func:`summary`, snake case, stable.
    meaning
        One line for a table's legend.
    function
        A function of values of shape (n,) or (b, n).
    directed
        Whether the function takes ``higher_is_better``.
    level
        Whether it is a level of service, better in the direction of the values. Lower is fairer
        of all others.
    bounds
        Numbers that the result never leaves, whatever the values.
    signed
        Whether it is defined for negative values.
    extreme
        Whether it rests on a single client. The bootstrap is wrong for these.
    """

    name: str
    meaning: str
    function: Callable[..., Reduced]
    directed: bool = False
    level: bool = False
    bounds: tuple[float, float] = (-math.inf, math.inf)
    signed: bool = True
    extreme: bool = False

    def compute(self, values: ArrayLike, higher_is_better: bool) -> Reduced:
        """Return the number, or one for each row."""
        if self.directed:
            return self.function(values, higher_is_better=higher_is_better)
        return self.function(values)

    def lower_is_better(self, *, higher_is_better: bool) -> bool:
        """Return whether a lower result is preferable for values of the given direction.

        >>> REDUCERS["gini"].lower_is_better(higher_is_better=True)
        True
        >>> REDUCERS["worst"].lower_is_better(higher_is_better=True)
        False
        """
        return not (self.level and higher_is_better)


_FIFTH = "mean over the {}-served 20 % of clients, rounded up"
_GAP = (0.0, math.inf)
REDUCERS = {
    reducer.name: reducer
    for reducer in (
        Reducer("average_by_client", "mean over clients, each counted once",
                reducers.average_by_client, level=True),
        Reducer("worst", "value of the worst-served client", reducers.worst, True, True,
                extreme=True),
        Reducer("worst_20_percent", _FIFTH.format("worst"),
                partial(reducers.worst_fraction, fraction=0.2), True, True),
        Reducer("best_20_percent", _FIFTH.format("best"),
                partial(reducers.best_fraction, fraction=0.2), True, True),
        Reducer("spread", "range: largest minus smallest value", reducers.spread, bounds=_GAP,
                extreme=True),
        Reducer("standard_deviation", "standard deviation over clients (divided by n)",
                reducers.standard_deviation, bounds=_GAP),
        Reducer("gini", "Gini coefficient: 0 is equality", reducers.gini, bounds=(0.0, 1.0),
                signed=False),
        Reducer("twenty_twenty", "mean of the largest 20 % over mean of the smallest 20 %",
                reducers.twenty_twenty, bounds=(1.0, math.inf), signed=False),
    )
}  # fmt: skip
"""Every reducer of a plain vector by its name, in the order of tables."""


def summary(
    values: ArrayLike, sizes: ArrayLike | None = None, *, higher_is_better: bool
) -> dict[str, float]:
    """Return every reducer of one vector, by name, and ``clients``: how many were summarised.

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
            result["average_by_sample"] = reducers.average_by_sample(array, sizes)
    return result
