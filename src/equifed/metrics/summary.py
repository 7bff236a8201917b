"""Every reducer under a stable name, with its meaning and direction, for tables and comparisons."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equifed.metrics import inequality, levels
from equifed.metrics.levels import Reduced, Values, check_finite, name_positions

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


def _undirected(name: str, meaning: str, function: Callable[..., Reduced], **more: Any) -> Reducer:
    """Describe a function that does not ask which way is better; lower is fairer by default."""
    settings = {"direction": Direction.LOWER, **more}
    return Reducer(name, meaning, compute=lambda values, higher: function(values), **settings)


def _directed(name: str, meaning: str, function: Callable[..., Reduced], **more: Any) -> Reducer:
    """Describe a level of service."""
    return Reducer(
        name, meaning, Direction.AS_VALUES, signed=True,
        compute=lambda values, higher: function(values, higher_is_better=higher), **more,
    )  # fmt: skip


def percent_name(stem: str, fraction: float) -> str:
    """Return the name of a reducer over a fraction of the clients.

    >>> percent_name("worst", 0.2), percent_name("best", 0.125)
    ('worst_20_percent', 'best_12_5_percent')
    """
    return f"{stem}_{100 * fraction:.10g}_percent".replace(".", "_")


def _of_fraction(fraction: float) -> tuple[Reducer, ...]:
    percent = f"{100 * fraction:.10g} %"
    worst, best, cvar = (percent_name(stem, fraction) for stem in ("worst", "best", "cvar"))
    return (
        _directed(worst, f"mean over the worst-served {percent} of clients, rounded up",
                  partial(levels.worst_fraction, fraction=fraction)),
        _directed(best, f"mean over the best-served {percent} of clients, rounded up",
                  partial(levels.best_fraction, fraction=fraction)),
        _directed(cvar, f"mean over exactly the worst-served {percent} (CVaR)",
                  partial(levels.cvar, tail=fraction)),
    )  # fmt: skip


_LEVEL: dict[str, Any] = {"direction": Direction.AS_VALUES, "signed": True}
_GAP: dict[str, Any] = {"bounds": (0.0, math.inf), "signed": True}
_EVEN: dict[str, Any] = {"direction": Direction.HIGHER}
_UNIT, _RATIO, _OPEN = (0.0, 1.0), (1.0, math.inf), (0.0, math.inf)
_LEVELS = (
    _undirected("average_by_client", "mean over clients, each counted once",
                levels.average_by_client, **_LEVEL),
    _directed("worst", "value of the worst-served client", levels.worst, extreme=True),
    _directed("best", "value of the best-served client", levels.best, extreme=True),
    _undirected("minimum", "smallest value", levels.minimum, extreme=True, **_LEVEL),
    _undirected("maximum", "largest value", levels.maximum, extreme=True, **_LEVEL),
)  # fmt: skip
_SPREADS = (
    _undirected("spread", "range: largest minus smallest value", levels.spread, extreme=True,
                **_GAP),
    _undirected("variance", "variance over clients (divided by n)", levels.variance, **_GAP),
    _undirected("standard_deviation", "standard deviation over clients (divided by n)",
                levels.standard_deviation, **_GAP),
)  # fmt: skip
_SHARES = (
    _undirected("twenty_twenty", "mean of the largest 20 % over mean of the smallest 20 %",
                inequality.twenty_twenty, bounds=_RATIO),
    _undirected("palma", "mean of the largest 10 % over mean of the smallest 40 %",
                inequality.palma, bounds=_RATIO),
    _undirected("gini", "Gini coefficient: 0 is equality", inequality.gini, bounds=_UNIT),
    _undirected("theil", "Theil's T: 0 is equality", inequality.theil, bounds=_OPEN),
    _undirected("atkinson_1", "Atkinson index with aversion 1, looks at small values",
                partial(inequality.atkinson, aversion=1.0), bounds=_UNIT),
    _undirected("atkinson_infinite", "1 - minimum / mean",
                partial(inequality.atkinson, aversion=math.inf), bounds=_UNIT, extreme=True),
    _undirected("burden_1", "root mean square over mean, minus 1; looks at large values",
                partial(inequality.burden, aversion=1.0), bounds=_OPEN),
    _undirected("burden_infinite", "maximum / mean - 1",
                partial(inequality.burden, aversion=math.inf), bounds=_OPEN, extreme=True),
    _undirected("jain", "Jain's index: 1 is equality", inequality.jain, bounds=_UNIT, **_EVEN),
    _undirected("entropy", "entropy of the shares in nats: log n is equality",
                inequality.entropy, bounds=_OPEN, **_EVEN),
    _undirected("cosine", "cosine to the equal vector: 1 is equality", inequality.cosine,
                bounds=(-1.0, 1.0), signed=True, **_EVEN),
)  # fmt: skip


def reducers(fractions: Sequence[float] = (0.1, 0.2)) -> tuple[Reducer, ...]:
    """Return every reducer of a plain vector, in the order of tables.

    >>> [r.name for r in reducers(fractions=[0.2])][:4]
    ['average_by_client', 'worst', 'best', 'minimum']
    """
    tails = (reducer for fraction in fractions for reducer in _of_fraction(fraction))
    return (*_LEVELS, *tails, *_SPREADS, *_SHARES)


def _by_sample(values: Values) -> Reduced:
    raise TypeError("average_by_sample needs sizes: call average_by_sample(values, sizes).")


BY_SAMPLE = _undirected(
    "average_by_sample", "mean over samples: large clients count more", _by_sample, **_LEVEL
)
"""The one reducer that needs the clients' sizes as well; in :func:`summary` when they are given."""


def describe(name: str) -> Reducer:
    """Return the reducer of a name that :func:`summary` uses, for any fraction.

    >>> describe("worst_12_5_percent").meaning
    'mean over the worst-served 12.5 % of clients, rounded up'
    """
    found = re.fullmatch(r"(?:worst|best|cvar)_([0-9]+(?:_[0-9]+)?)_percent", name)
    fractions = [float(found[1].replace("_", ".")) / 100] if found else []
    known = {reducer.name: reducer for reducer in (*reducers(fractions), BY_SAMPLE)}
    if name not in known:
        raise ValueError(f"no reducer is called {name!r}; expected one of {', '.join(known)}.")
    return known[name]


def summary(
    values: ArrayLike,
    sizes: ArrayLike | None = None,
    *,
    higher_is_better: bool,
    fractions: Sequence[float] = (0.1, 0.2),
    missing: Literal["refuse", "drop"] = "refuse",
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
    fractions
        The k of worst-k, best-k and CVaR.
    missing
        Clients without a value (NaN): ``"refuse"`` names them in an error, ``"drop"`` summarises
        the others. Infinite values are refused either way.

    >>> row = summary([0.9, 0.5, 0.7], higher_is_better=True)
    >>> row["worst"], round(row["average_by_client"], 6), round(row["spread"], 6)
    (0.5, 0.7, 0.4)
    """
    raw = np.asarray(values, dtype=np.float64)
    kept = _find_present(raw, missing)
    array = check_finite(raw[kept])
    negative = bool((array < 0).any())
    result = {"clients": float(array.size)}
    with np.errstate(over="ignore", invalid="ignore"):  # a loss of 1e300 has an infinite variance
        for r in reducers(fractions):
            defined = r.signed or not negative
            result[r.name] = r.compute(array, higher_is_better) if defined else math.nan
        if sizes is not None:
            counts = np.asarray(sizes, dtype=np.float64)
            if counts.shape != kept.shape:
                raise ValueError(f"sizes must have shape {kept.shape}, got {counts.shape}.")
            result[BY_SAMPLE.name] = levels.average_by_sample(array, counts[kept])
    return result


def _find_present(array: Values, missing: str) -> NDArray[np.bool_]:
    """Return which clients have a value; with ``"refuse"``, raise when one has none (NaN)."""
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
