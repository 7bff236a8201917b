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
        """Return whether a lower result is better for values of the given direction."""
        return not (self.level and higher_is_better)


REDUCERS = {
    reducer.name: reducer
    for reducer in (
        Reducer("average_by_client", reducers.average_by_client, level=True),
        Reducer("worst", reducers.worst, True, True, extreme=True),
        Reducer("worst_20_percent", partial(reducers.worst_fraction, fraction=0.2), True, True),
        Reducer("best_20_percent", partial(reducers.best_fraction, fraction=0.2), True, True),
        Reducer("spread", reducers.spread, bounds=(0.0, math.inf), extreme=True),
        Reducer("standard_deviation", reducers.standard_deviation, bounds=(0.0, math.inf)),
        Reducer("gini", reducers.gini, bounds=(0.0, 1.0), signed=False),
        Reducer("twenty_twenty", reducers.twenty_twenty, bounds=(1.0, math.inf), signed=False),
    )
}
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
