"""Fit a preparation by adding numbers that every client computes from its own rows.

Nothing here sees the rows of two clients. A fit is a few questions; each of them goes to all
clients, :func:`describe_rows` answers it from the rows of one, and :func:`combine` makes the next
question of the answers or, at the end, the :class:`~equifed.data.preparation.Preparation`::

    asked = ask_kinds(features, target, prepare)
    while not isinstance(asked, Preparation):
        asked = combine(asked, {name: describe_rows(rows[name], asked) for name in clients})

Questions and answers are plain values that JSON can hold. What a client tells of its training rows:

1. ``kinds``: how many numbers, texts, dates and gaps a column has;
2. ``sums``: the sum of its numbers, the counts of its categories, and the smallest and largest
   number where medians are wanted;
3. ``squares``: sums of differences from the common mean and of their squares, so that large offsets
   cost no digits;
4. ``grid``, four times: how many numbers lie in each cell of a common grid around every quartile.

Everything but the smallest and the largest number is added up, so that hidden sums would do: a
federation of sites adds what :mod:`equifed.data.sum_answers` makes of the answers, and does without
those two.
"""

from __future__ import annotations

import datetime
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from equifed.data.columns import clean_all, to_numbers
from equifed.data.combine_preparation import Answers, Question, combine
from equifed.data.grid import count_cells
from equifed.data.preparation import Preparation, Target
from equifed.data.prepare import Prepare
from equifed.data.prepared_columns import name_categories, name_client, read_numbers
from equifed.data.split import DataError
from equifed.data.targets import DECIMAL_COMMA, explain_comma

__all__ = [
    "Prepare",
    "ask_kinds",
    "combine",
    "describe_rows",
    "fit_preparation",
    "is_date",
    "tell_kinds",
]

DATE = re.compile(r"\d{4}-\d\d?-\d\d?([ T].*)?|\d\d?([./-])\d\d?\2\d{2,4}( .*)?")


def ask_kinds(
    features: Sequence[str],
    target: Target,
    prepare: Prepare,
    *,
    client: str | None = None,
    categories: Sequence[str] = (),
    choosy: bool = False,
    left_out: Sequence[str] = (),
) -> Question:
    """Return the first question of a fit.

    Parameters
    ----------
    features : sequence of str
        Columns that features come from, in order.
    target : Target
        What is predicted; it goes into the preparation as it is.
    prepare : Prepare
        How columns become features.
    client : str, optional
        Title of the column with the client's name.
    categories : sequence of str
        Columns that a data frame says are categories, for ``categorical="auto"``.
    choosy : bool
        Leave out columns that are no features (identifiers, dates, all gaps), and list them with
        the reason in the preparation's ``left_out``; otherwise they are refused.
    left_out : sequence of str
        Columns of the table that are not asked for.
    """
    coded = categories if prepare.categorical == "auto" else prepare.categorical
    return {
        "stage": "kinds",
        "columns": list(features),
        "coded": [name for name in features if name in coded],
        "prepare": {**asdict(prepare), "categorical": _as_list(prepare.categorical)},
        "target": asdict(target),
        "client": client,
        "choosy": choosy,
        "left_out": [[name, "not asked for"] for name in left_out],
    }


def describe_rows(
    columns: Mapping[str, Sequence[Any]], asked: Question, client: str = ""
) -> dict[str, Any]:
    """Answer a question from the training rows of one client.

    Parameters
    ----------
    columns : mapping of str to values
        The client's training rows by column: a data frame, or a mapping such as
        :func:`equifed.data.read_columns` gives. None, NaN and marks such as ``NA`` are gaps.
    asked : dict
        What :func:`ask_kinds` or :func:`combine` returned.
    client : str
        Its name, for messages.
    """
    stages = {"kinds": _tell_kind, "sums": _tell_sums, "squares": _tell_squares, "grid": _tell_grid}
    tell = stages[asked["stage"]]
    try:
        names = asked["columns"]
        return {name: tell(name, clean_all(list(columns[name])), asked) for name in names}
    except DataError as error:
        raise DataError(name_client(client, str(error))) from None
    except KeyError as error:
        absent = f"There is no column {error}; add it, with gaps if need be."
        raise DataError(name_client(client, absent)) from None


def tell_kinds(columns: Mapping[str, Sequence[Any]], asked: Question) -> dict[str, str]:
    """Return what each column of one client holds: numbers, texts, dates, or nothing (empty).

    >>> asked = ask_kinds(["age", "arm"], Target("ill"), Prepare())
    >>> tell_kinds({"age": [40, None], "arm": ["a", "b"]}, asked)
    {'age': 'numbers', 'arm': 'texts'}
    """
    told = {n: _tell_kind(n, clean_all(list(columns[n])), asked) for n in asked["columns"]}
    words = ("numbers", "texts", "dates")
    return {n: next((w for w in words if counts[w]), "empty") for n, counts in told.items()}


def fit_preparation(
    rows: Mapping[str, Mapping[str, Sequence[Any]]], asked: Question
) -> Preparation:
    """Ask the clients, whose rows are given by name, until the preparation is known.

    >>> rows = {"n": {"age": [40, 60]}, "s": {"age": [None, 50]}}
    >>> fitted = fit_preparation(rows, ask_kinds(["age"], Target("ill"), Prepare()))
    >>> fitted.columns[0].fill, round(fitted.columns[0].scale, 3), fitted.feature_names
    (50.0, 8.165, ('age', 'age missing'))
    """
    told: Question | Preparation = asked
    while not isinstance(told, Preparation):
        answers: Answers = {name: describe_rows(mine, told, name) for name, mine in rows.items()}
        told = combine(told, answers)
    return told


# -- answers of one client ------------------------------------------------------------------------


def _tell_kind(name: str, values: Sequence[Any], asked: Question) -> dict[str, Any]:
    """Count what a column holds; ``different`` texts tell an identifier."""
    present = [v for v in values if v is not None]
    counts = {"numbers": 0, "texts": 0, "dates": 0, "different": 0}
    auto = asked["prepare"]["categorical"] == "auto"
    if name in asked["coded"]:
        return {**counts, "texts": len(present)}
    if not (auto and {bool, np.bool_} & set(map(type, present))):
        numbers = to_numbers(present)
        if numbers is not None:
            return {**counts, "numbers": len(present)}
    seen = _count_different(name, present)
    kinds = [_tell_cell(name, value) for _, value in seen]
    for kind, count in zip(kinds, seen.values(), strict=True):
        counts[kind] += count
    if counts["texts"] and not auto:
        read_numbers(name, values)  # says which one it is, and what to do
    if counts["numbers"] and counts["texts"]:
        values = [value for _, value in seen]
        number, word = (str(values[kinds.index(kind)]) for kind in ("numbers", "texts"))
        raise DataError(
            f"Column {name!r} holds numbers and text, e.g. {number!r} and {word!r:.60}; correct "
            "the odd ones (leave them empty if not known), or list it in categorical."
        )
    return {**counts, "different": len(seen)}


def _count_different(name: str, values: Sequence[Any]) -> Counter[tuple[type, Any]]:
    try:
        return Counter((type(v), v) for v in values)  # 1 and True are equal, but not the same
    except TypeError:
        odd = next(v for v in values if getattr(type(v), "__hash__", None) is None)
        kind = type(odd).__name__
        raise DataError(
            f"Column {name!r} is not numeric: it holds a {kind} ({odd!r:.60}), neither number nor "
            "text; convert it or leave the column out."
        ) from None


def _tell_cell(name: str, value: Any) -> Literal["numbers", "texts", "dates"]:
    if isinstance(value, bool | np.bool_):
        return "texts"
    if to_numbers([value]) is not None:
        return "numbers"
    if is_date(value):
        return "dates"
    if not isinstance(value, str):
        raise DataError(
            f"Column {name!r} is not numeric: it holds a {type(value).__name__} ({value!r:.60}), "
            "neither number nor text; convert it or leave the column out."
        )
    if DECIMAL_COMMA.fullmatch(value):
        raise DataError(
            f"Column {name!r} is not numeric (it has {value!r}); {explain_comma(value)}"
        )
    return "texts"


def is_date(value: Any) -> bool:
    """Tell whether a value is a date, or a text that looks like one.

    >>> is_date("2024-05-31"), is_date("31.5.2024"), is_date("5-31")
    (True, True, False)
    """
    if isinstance(value, str):
        return DATE.fullmatch(value) is not None
    return isinstance(value, datetime.date | np.datetime64)


def _tell_sums(name: str, values: Sequence[Any], asked: Question) -> dict[str, Any]:
    if name in asked["coded"]:
        counts = Counter(name_categories(values))
        gaps = counts.pop(None, 0)
        return {"counts": {str(text): counts[text] for text in counts}, "gaps": gaps}
    numbers = read_numbers(name, values)
    there = numbers[~np.isnan(numbers)]
    told = {"count": len(there), "sum": _add(name, there), "gaps": len(values) - len(there)}
    if asked["quartiles"] and len(there):
        told |= {"low": float(there.min()), "high": float(there.max())}
    return told


def _tell_squares(name: str, values: Sequence[Any], asked: Question) -> dict[str, Any]:
    numbers = read_numbers(name, values)
    there = numbers[~np.isnan(numbers)]
    apart = there - asked["centres"][name]
    with np.errstate(over="ignore"):
        told: dict[str, Any] = {"apart": _add(name, apart), "squares": _add(name, apart**2)}
    if asked["prepare"]["per_client"] and len(there):
        told["own"] = _scale_alone(there, **asked["prepare"])
    return told


def _tell_grid(name: str, values: Sequence[Any], asked: Question) -> dict[str, Any]:
    numbers = read_numbers(name, values)
    there = np.sort(numbers[~np.isnan(numbers)])
    return {"cells": [count_cells(there, low, high) for low, high in asked["cells"][name]]}


def _scale_alone(numbers: NDArray[np.float64], scale: str, missing: str, **_: Any) -> list[float]:
    """Return centre, scale and fill value of one client's own numbers; scale 0: it has none."""
    low, median, high = (float(q) for q in np.percentile(numbers, [25, 50, 75]))
    mean, deviation = float(numbers.mean()), float(numbers.std())
    centre, spread = (mean, deviation) if scale == "standard" else (median, high - low)
    spread = spread if spread > 4 * np.finfo(float).eps * abs(centre) else 0.0
    return [centre, spread, median if missing == "median" else mean]


def _add(name: str, numbers: NDArray[np.float64]) -> float:
    with np.errstate(over="ignore"):
        total = float(numbers.sum())
    if not np.isfinite(total):
        raise DataError(
            f"Column {name!r} holds numbers up to {np.abs(numbers).max():.3g}, too large to be "
            "added or squared; rescale it, or give scale=None and missing='error'."
        )
    return total


def _as_list(coded: tuple[str, ...] | str) -> list[str] | str:
    return coded if isinstance(coded, str) else list(coded)
