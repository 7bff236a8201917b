"""Every reducer under a stable name, with its meaning and direction, for tables and comparisons."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from equifed.metrics import inequality, levels
from equifed.metrics.checks import Reduced, Values, check_finite, name_positions

Kernel: TypeAlias = Callable[[Values, bool], Reduced]
"""(values of shape (n,) or (b, n), higher_is_better) -> a number, or one for each row."""


class Direction(StrEnum):
    """When one value of a reducer is preferable to another."""

    LOWER = "lower"
    """Lower is fairer."""
    HIGHER = "higher"
    """Higher is fairer."""
    AS_VALUES = "as values"
    """A level of service: better in the direction of the values it was computed from."""


@dataclass(frozen=True)
class Reducer:
    """A named way from one value per client to one number.

    Parameters
    ----------
    name
        Key in :func:`summary`, snake case, stable.
    meaning
        One line for a table's legend.
    direction
        Which way is better; see :meth:`lower_is_better`.
    compute
        The kernel; works on (n,) and on (b, n).
    bounds
        Numbers that the result never leaves, whatever the values.
    signed
        Whether it is defined for negative values.
    extreme
        Whether it rests on a single client. The bootstrap is wrong for these.
    """

    name: str
    meaning: str
    direction: Direction
    compute: Kernel
    bounds: tuple[float, float] = (-math.inf, math.inf)
    signed: bool = False
    extreme: bool = False

    def lower_is_better(self, *, higher_is_better: bool) -> bool:
        """Return whether a lower result is preferable for values of the given direction.

        >>> describe("gini").lower_is_better(higher_is_better=True)
        True
        >>> describe("worst").lower_is_better(higher_is_better=True)
        False
        """
        if self.direction is Direction.AS_VALUES:
            return not higher_is_better
        return self.direction is Direction.LOWER


def _undirected(function: Callable[[Values], Reduced]) -> Kernel:
    return lambda values, higher_is_better: function(values)


def _directed(function: Callable[..., Reduced], *options: float) -> Kernel:
    return lambda values, higher: function(values, *options, higher_is_better=higher)


def percent_name(stem: str, fraction: float) -> str:
    """Return the name of a reducer over a fraction of the clients.

    >>> percent_name("worst", 0.2), percent_name("best", 0.125)
    ('worst_20_percent', 'best_12_5_percent')
    """
    return f"{stem}_{100 * fraction:.10g}_percent".replace(".", "_")


def _of_fraction(fraction: float) -> tuple[Reducer, ...]:
    percent = f"{100 * fraction:.10g} %"
    rows = (
        ("worst", f"mean over the worst-served {percent} of clients, rounded up",
         levels.worst_fraction),
        ("best", f"mean over the best-served {percent} of clients, rounded up",
         levels.best_fraction),
        ("cvar", f"mean over exactly the worst-served {percent} (CVaR)", levels.cvar),
    )  # fmt: skip
    level = partial(Reducer, direction=Direction.AS_VALUES, signed=True)
    return tuple(
        level(percent_name(stem, fraction), meaning, compute=_directed(function, fraction))
        for stem, meaning, function in rows
    )


def _levels() -> tuple[Reducer, ...]:
    level = partial(Reducer, direction=Direction.AS_VALUES, signed=True)
    return (
        level("average_by_client", "mean over clients, each counted once",
              compute=_undirected(levels.average_by_client)),
        level("worst", "value of the worst-served client", compute=_directed(levels.worst),
              extreme=True),
        level("best", "value of the best-served client", compute=_directed(levels.best),
              extreme=True),
        level("minimum", "smallest value", compute=_undirected(levels.minimum), extreme=True),
        level("maximum", "largest value", compute=_undirected(levels.maximum), extreme=True),
    )  # fmt: skip


def _spreads() -> tuple[Reducer, ...]:
    gap = partial(Reducer, direction=Direction.LOWER, bounds=(0.0, math.inf), signed=True)
    return (
        gap("spread", "range: largest minus smallest value", compute=_undirected(levels.spread),
            extreme=True),
        gap("variance", "variance over clients (divided by n)",
            compute=_undirected(levels.variance)),
        gap("standard_deviation", "standard deviation over clients (divided by n)",
            compute=_undirected(levels.standard_deviation)),
    )  # fmt: skip


def _shares() -> tuple[Reducer, ...]:
    unfair = partial(Reducer, direction=Direction.LOWER)
    unit, ratio, open_ended = (0.0, 1.0), (1.0, math.inf), (0.0, math.inf)
    return (
        unfair("twenty_twenty", "mean of the largest 20 % over mean of the smallest 20 %",
               compute=_undirected(inequality.twenty_twenty), bounds=ratio),
        unfair("palma", "mean of the largest 10 % over mean of the smallest 40 %",
               compute=_undirected(inequality.palma), bounds=ratio),
        unfair("gini", "Gini coefficient: 0 is equality",
               compute=_undirected(inequality.gini), bounds=unit),
        unfair("theil", "Theil's T: 0 is equality",
               compute=_undirected(inequality.theil), bounds=open_ended),
        unfair("atkinson_1", "Atkinson index with aversion 1, looks at small values",
               compute=_undirected(partial(inequality.atkinson, aversion=1.0)), bounds=unit),
        unfair("atkinson_infinite", "1 - minimum / mean",
               compute=_undirected(partial(inequality.atkinson, aversion=math.inf)), bounds=unit,
               extreme=True),
        unfair("burden_1", "root mean square over mean, minus 1; looks at large values",
               compute=_undirected(partial(inequality.burden, aversion=1.0)), bounds=open_ended),
        unfair("burden_infinite", "maximum / mean - 1",
               compute=_undirected(partial(inequality.burden, aversion=math.inf)),
               bounds=open_ended, extreme=True),
        Reducer("jain", "Jain's index: 1 is equality", Direction.HIGHER,
                _undirected(inequality.jain), bounds=unit),
        Reducer("entropy", "entropy of the shares in nats: log n is equality", Direction.HIGHER,
                _undirected(inequality.entropy), bounds=open_ended),
        Reducer("cosine", "cosine to the equal vector: 1 is equality", Direction.HIGHER,
                _undirected(inequality.cosine), bounds=(-1.0, 1.0), signed=True),
    )  # fmt: skip


def reducers(fractions: Sequence[float] = (0.1, 0.2)) -> tuple[Reducer, ...]:
    """Return every reducer of a plain vector, in the order of tables.

    >>> [r.name for r in reducers(fractions=[0.2])][:4]
    ['average_by_client', 'worst', 'best', 'minimum']
    """
    tails_of = tuple(reducer for fraction in fractions for reducer in _of_fraction(fraction))
    return (*_levels(), *tails_of, *_spreads(), *_shares())


def _by_sample(values: Values, higher_is_better: bool) -> Reduced:
    raise TypeError("average_by_sample needs sizes: call average_by_sample(values, sizes).")


BY_SAMPLE = Reducer(
    "average_by_sample",
    "mean over samples: large clients count more",
    Direction.AS_VALUES,
    _by_sample,
    signed=True,
)
"""The one reducer that needs the clients' sizes as well; in :func:`summary` when they are given."""


def describe(name: str) -> Reducer:
    """Return the reducer of a name that :func:`summary` uses, for any fraction.

    >>> describe("worst_12_5_percent").meaning
    'mean over the worst-served 12.5 % of clients, rounded up'
    """
    stem, _, rest = name.partition("_")
    fractions: tuple[float, ...] = ()
    if stem in ("worst", "best", "cvar") and rest.endswith("_percent"):
        try:
            fractions = (float(rest.removesuffix("_percent").replace("_", ".")) / 100,)
        except ValueError:
            fractions = ()
    known = {reducer.name: reducer for reducer in (*reducers(fractions), BY_SAMPLE)}
    if name not in known:
        raise ValueError(f"no reducer is called {name!r}; expected one of {', '.join(known)}.")
    return known[name]


def find_present(
    values: ArrayLike, missing: Literal["refuse", "drop"]
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which clients have a value; with ``"refuse"``, raise when one has none (NaN)."""
    array = np.asarray(values, dtype=np.float64)
    if missing not in ("refuse", "drop"):
        raise ValueError(f"missing must be 'refuse' or 'drop', got {missing!r}.")
    if array.ndim != 1:
        raise ValueError(f"values must hold one number per client, shape (n,), got {array.shape}.")
    absent = np.isnan(array)
    if absent.any() and missing == "refuse":
        raise ValueError(
            f"clients at positions {name_positions(absent)} have no value (NaN); "
            "pass missing='drop' to summarise the others only."
        )
    if absent.all():
        raise ValueError("no client has a value: there is nothing to summarise.")
    return ~absent


def summary(
    values: ArrayLike,
    sizes: ArrayLike | None = None,
    *,
    higher_is_better: bool,
    fractions: Sequence[float] = (0.1, 0.2),
    missing: Literal["refuse", "drop"] = "refuse",
) -> dict[str, float]:
    """Return every reducer of one vector, by name.

    Parameters
    ----------
    values
        One number per client, shape (n,).
    sizes
        Sample counts; with them ``average_by_sample`` is added.
    higher_is_better
        True for accuracies, False for losses.
    fractions
        The k of worst-k, best-k and CVaR.
    missing
        What to do about clients without a value (NaN): ``"refuse"`` names them in an error,
        ``"drop"`` summarises the others, whose number is in ``clients``. Infinite values are
        refused either way.

    Returns
    -------
    dict
        ``clients`` (how many were summarised), then the names of :func:`reducers`. Reducers that
        are not defined for negative values are NaN when there are any: a table keeps its rows.

    >>> row = summary([0.9, 0.5, 0.7], higher_is_better=True)
    >>> row["worst"], round(row["average_by_client"], 6), round(row["spread"], 6)
    (0.5, 0.7, 0.4)
    """
    kept = find_present(values, missing)
    array = check_finite(np.asarray(values, dtype=np.float64)[kept])
    negative = bool((array < 0).any())
    result = {"clients": float(array.size)}
    with np.errstate(over="ignore", invalid="ignore"):  # a loss of 1e300 has an infinite variance
        for reducer in reducers(fractions):
            undefined = negative and not reducer.signed
            result[reducer.name] = (
                math.nan if undefined else reducer.compute(array, higher_is_better)
            )
        if sizes is not None:
            counts = np.asarray(sizes, dtype=np.float64)
            if counts.shape != kept.shape:
                raise ValueError(
                    f"sizes must have shape {kept.shape} like values, got {counts.shape}."
                )
            result[BY_SAMPLE.name] = levels.average_by_sample(array, counts[kept])
    return result
