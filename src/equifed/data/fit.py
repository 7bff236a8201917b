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
federation of sites (:mod:`equifed.flower.hidden_fit`) adds vectors, and does without those two.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

import numpy as np

from equifed.data.columns import (
    DECIMAL_COMMA,
    Columns,
    clean_column,
    explain_comma,
    is_date,
    name_categories,
    naming,
    read_numbers,
    to_amounts,
    to_numbers,
)
from equifed.data.preparation import OTHER, CategoryColumn, NumberColumn, Preparation, Prepare
from equifed.data.quantiles import (
    PASSES,
    Numbers,
    count_cells,
    find_cell,
    find_ranks,
    read_quartiles,
)
from equifed.data.split import DataError, refuse
from equifed.data.targets import Target

Question = dict[str, Any]
Answers = Mapping[str, Mapping[str, Any]]
"""Client name to what :func:`describe_rows` returned."""

DATES = "dates; a model needs numbers: turn them into days since a first day, years, months"
FEW = 20
"""Texts that are all different are an identifier from this many on."""
EPS = float(np.finfo(float).eps)


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
    rule = prepare.categorical
    coded = categories if rule == "auto" else rule
    return {
        "stage": "kinds",
        "columns": list(features),
        "coded": [name for name in features if name in coded],
        "prepare": {**asdict(prepare), "categorical": rule if rule == "auto" else list(rule)},
        "target": asdict(target),
        "client": client,
        "choosy": choosy,
        "left_out": [[name, "not asked for"] for name in left_out],
    }


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
        told = combine(told, {name: describe_rows(mine, told, name) for name, mine in rows.items()})
    return told


# -- answers of one client ------------------------------------------------------------------------


def describe_rows(
    columns: Mapping[str, Sequence[Any]], asked: Question, client: str = ""
) -> dict[str, Any]:
    """Answer a question of :func:`ask_kinds` or :func:`combine` from one client's training rows.

    ``columns`` is a data frame or a mapping; None, NaN and marks such as ``NA`` are gaps.
    """
    stages = {"kinds": _tell_kind, "sums": _tell_sums, "squares": _tell_squares, "grid": _tell_grid}
    tell, wanted = stages[asked["stage"]], asked["columns"]
    with naming(client):
        refuse(
            (name for name in wanted if name not in columns),
            lambda name: f"There is no column {name!r}; add it, with gaps if need be.",
        )
        clean = isinstance(columns, Columns)
        cells = {c: columns[c] if clean else clean_column(list(columns[c])) for c in wanted}
        return {name: tell(name, values, asked) for name, values in cells.items()}


def _tell_kind(name: str, values: Sequence[Any], asked: Question) -> dict[str, Any]:
    """Count what a column holds; ``different`` texts tell an identifier."""
    present = [v for v in values if v is not None]
    counts = {"numbers": 0, "texts": 0, "dates": 0, "different": 0}
    auto = asked["prepare"]["categorical"] == "auto"
    if name in asked["coded"]:
        return {**counts, "texts": len(present)}
    if (to_amounts if auto else to_numbers)(present) is not None:
        return {**counts, "numbers": len(present)}
    try:
        seen = Counter((type(v), v) for v in present)  # 1 and True are equal, but not the same
    except TypeError:
        _refuse_cell(name, next(v for v in present if getattr(type(v), "__hash__", None) is None))
    kinds = {key: _tell_cell(name, key[1]) for key in seen}
    for key, kind in kinds.items():
        counts[kind] += seen[key]
    if counts["texts"] and not auto:
        read_numbers(name, values)  # says which one it is, and what to do
    first: dict[str, str] = {k: str(value) for (_, value), k in reversed(kinds.items())}
    if "numbers" in first and len(first) > 1:
        other = "texts" if "texts" in first else "dates"
        raise DataError(
            f"Column {name!r} holds numbers and {'text' if other == 'texts' else other}, e.g. "
            f"{first['numbers']!r} and {first[other]!r:.60}; correct the odd ones (leave them "
            "empty if not known), or list it in categorical."
        )
    return {**counts, "different": len(seen)}


def _tell_cell(name: str, value: Any) -> Literal["numbers", "texts", "dates"]:
    if to_amounts([value]) is not None:
        return "numbers"
    if is_date(value):
        return "dates"
    if not isinstance(value, str | bool | np.bool_):
        _refuse_cell(name, value)
    if isinstance(value, str) and DECIMAL_COMMA.fullmatch(value):
        raise DataError(
            f"Column {name!r} is not numeric (it has {value!r}); {explain_comma(value)}"
        )
    return "texts"


def _refuse_cell(name: str, value: Any) -> None:
    raise DataError(
        f"Column {name!r} is not numeric: it holds a {type(value).__name__} ({value!r:.60}), "
        "neither number nor text; convert it or leave the column out."
    )


def _tell_sums(name: str, values: Sequence[Any], asked: Question) -> dict[str, Any]:
    if name in asked["coded"]:
        counts = Counter(name_categories(values))
        gaps = counts.pop(None, 0)
        return {"counts": {str(text): counts[text] for text in counts}, "gaps": gaps}
    there = _present(name, values)
    told = {"count": len(there), "sum": _add(name, there), "gaps": len(values) - len(there)}
    if asked["quartiles"] and len(there):
        told |= {"low": float(there.min()), "high": float(there.max())}
    return told


def _tell_squares(name: str, values: Sequence[Any], asked: Question) -> dict[str, Any]:
    there = _present(name, values)
    apart = there - asked["centres"][name]
    with np.errstate(over="ignore"):
        told: dict[str, Any] = {"apart": _add(name, apart), "squares": _add(name, apart**2)}
    if asked["prepare"]["per_client"] and len(there):
        told["alone"] = _scale_alone(there, **asked["prepare"])
    return told


def _tell_grid(name: str, values: Sequence[Any], asked: Question) -> dict[str, Any]:
    there = np.sort(_present(name, values))
    return {"cells": [count_cells(there, low, high) for low, high in asked["cells"][name]]}


def _present(name: str, values: Sequence[Any]) -> Numbers:
    numbers = read_numbers(name, values)
    return numbers[~np.isnan(numbers)]


def _scale_alone(numbers: Numbers, scale: str, missing: str, **_: Any) -> list[float]:
    """Return centre, scale and fill value of one client's numbers alone; scale 0: it has none."""
    low, median, high = (float(q) for q in np.percentile(numbers, [25, 50, 75]))
    mean, deviation = float(numbers.mean()), float(numbers.std())
    centre, spread = (mean, deviation) if scale == "standard" else (median, high - low)
    spread = spread if spread > 4 * EPS * abs(centre) else 0.0
    return [centre, spread, median if missing == "median" else mean]


def _add(name: str, numbers: Numbers) -> float:
    with np.errstate(over="ignore"):
        total = float(numbers.sum())
    if not np.isfinite(total):
        raise DataError(
            f"Column {name!r} holds numbers up to {np.abs(numbers).max():.3g}, too large to be "
            "added or squared; rescale it, or give scale=None and missing='error'."
        )
    return total


# -- the next question, from all answers ----------------------------------------------------------


def combine(asked: Question, answers: Answers) -> Question | Preparation:
    """Return the next question, or the preparation when nothing is left to ask."""
    if not answers:
        raise DataError("A preparation is fitted on the rows of clients; there are none.")
    stages = {"kinds": _after_kinds, "sums": _after_sums, "squares": _after_squares}
    return stages.get(asked["stage"], _after_grid)(asked, answers)


def _after_kinds(asked: Question, answers: Answers) -> Question:
    coded, reasons = list(asked["coded"]), {}
    for name in asked["columns"]:
        told = {key: _total(answers, name, key) for key in ("numbers", "texts", "dates")}
        present = sum(told.values())
        if not present:
            reasons[name] = "no training row has a value"
        elif name in asked["coded"]:
            pass
        elif told["numbers"] and present > told["numbers"]:
            _refuse_mixture(name, answers)
        elif told["dates"] == present:
            reasons[name] = DATES
        elif not told["numbers"]:
            several = {c: told for c, told in answers.items() if told[name]["texts"] > 1}
            rows, different = (_total(several, name, key) for key in ("texts", "different"))
            if rows >= FEW and different == rows:
                reasons[name] = f"{present} different texts in as many rows, an identifier"
            coded.append(name)
    following = _leave_out(reasons, asked)
    rule = asked["prepare"]
    return {
        **following,
        "stage": "sums",
        "listed": asked["coded"],
        "coded": [name for name in following["columns"] if name in coded],
        "quartiles": rule["scale"] == "robust" or rule["missing"] == "median",
    }


def _refuse_mixture(name: str, answers: Answers) -> None:
    one = next(c for c, told in answers.items() if told[name]["numbers"])
    other = next(c for c, told in answers.items() if not told[name]["numbers"])
    raise DataError(
        f"Column {name!r} holds numbers at client {one!r} and text or dates at client {other!r}; "
        "make them alike, or list it in categorical."
    )


def _leave_out(reasons: Mapping[str, str], asked: Question) -> Question:
    """Return the question without these; refuse one that was named, and to leave out all."""
    if reasons and (not asked["choosy"] or len(reasons) == len(asked["columns"])):
        name, reason = next(iter(reasons.items()))
        listed = ", or list it in categorical" if "texts" in reason else ""
        raise DataError(
            f"Column {name!r} is no feature ({reason}); leave it out of features{listed}."
        )
    columns = [name for name in asked["columns"] if name not in reasons]
    left_out = [*asked["left_out"], *map(list, reasons.items())]
    return {**asked, "columns": columns, "left_out": left_out}


def _after_sums(asked: Question, answers: Answers) -> Question | Preparation:
    built: dict[str, Any] = {}
    for name in asked["columns"]:
        built[name] = {"gaps": _total(answers, name, "gaps")}
        if name in asked["coded"]:
            counts: Counter[str] = Counter()
            for told in answers.values():
                counts.update(told[name]["counts"])
            built[name]["counts"] = dict(counts)
            continue
        count = _total(answers, name, "count")
        built[name] |= {"count": count, "mean": _total(answers, name, "sum") / count}
        ends = [a[name] for a in answers.values() if "low" in a[name]] if asked["quartiles"] else []
        if ends:
            low, high = min(e["low"] for e in ends), max(e["high"] for e in ends)
            built[name]["cells"] = [[low, high]] * 6
    following = _leave_out(_find_rare(asked, built), asked)
    numbers = [name for name in asked["columns"] if name not in asked["coded"]]
    following |= {"order": following["columns"], "built": built, "columns": numbers}
    rule = asked["prepare"]
    if not numbers or (rule["scale"] is None and rule["missing"] in ("drop", "error")):
        return _finish(following)
    centres = {name: built[name]["mean"] for name in numbers}
    return {**following, "stage": "squares", "centres": centres}


def _find_rare(asked: Question, built: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns, unless listed as categories, none of whose texts is frequent enough."""
    rule = asked["prepare"]
    least = rule["min_count"] if rule["unknown"] == "other" else 0
    return {
        name: f"texts of which none has min_count={least} training rows"
        for name in asked["coded"]
        if name not in asked["listed"] and max(built[name]["counts"].values()) < least
    }


def _after_squares(asked: Question, answers: Answers) -> Question | Preparation:
    built = {name: dict(told) for name, told in asked["built"].items()}
    for name in asked["columns"]:
        told = built[name]
        count, apart = told["count"], _total(answers, name, "apart")
        told["mean"] += apart / count  # what rounding took from the first sum
        spread = _total(answers, name, "squares") - apart**2 / count
        deviation = math.sqrt(max(spread, 0.0) / count)
        told["deviation"] = deviation if deviation > 4 * EPS * abs(told["mean"]) else 0.0
        if asked["quartiles"] and "cells" not in told:  # where nobody told the extremes
            reach = deviation * math.sqrt(count) * (1 + 1e-9)  # no number is farther from the mean
            told["cells"] = [[told["mean"] - reach, told["mean"] + reach]] * 6
        if asked["prepare"]["per_client"]:
            told["alone"] = {
                client: answer[name].get("alone") for client, answer in answers.items()
            }
    following = {**asked, "built": built}
    return _ask_cells(following, 1) if asked["quartiles"] else _finish(following)


def _ask_cells(asked: Question, number: int) -> Question:
    cells = {name: asked["built"][name]["cells"] for name in asked["columns"]}
    return {**asked, "stage": "grid", "pass": number, "cells": cells}


def _after_grid(asked: Question, answers: Answers) -> Question | Preparation:
    built = {name: dict(told) for name, told in asked["built"].items()}
    for name in asked["columns"]:
        counts = np.sum([told[name]["cells"] for told in answers.values()], axis=0)
        ranks = find_ranks(built[name]["count"])
        built[name]["cells"] = [
            list(find_cell(row.tolist(), rank, *cell))
            for row, rank, cell in zip(counts, ranks, asked["cells"][name], strict=True)
        ]
    following = {**asked, "built": built}
    number = asked["pass"] + 1
    return _ask_cells(following, number) if number <= PASSES else _finish(following)


def _total(answers: Answers, name: str, key: str) -> Any:
    values = [told[name][key] for told in answers.values()]
    return math.fsum(values) if any(isinstance(v, float) for v in values) else sum(values)


# -- the end --------------------------------------------------------------------------------------


def _finish(asked: Question) -> Preparation:
    columns = [
        _make_categories(name, asked) if name in asked["coded"] else _make_number(name, asked)
        for name in asked["order"]
    ]
    target, rule = dict(asked["target"]), asked["prepare"]
    if target["classes"] is not None:
        target["classes"] = tuple(target["classes"])
    return Preparation(
        columns=tuple(columns),
        target=Target(**target),
        client=asked["client"],
        scale=rule["scale"],
        missing=rule["missing"],
        left_out=tuple((name, reason) for name, reason in asked["left_out"]),
    )


def _make_number(name: str, asked: Question) -> NumberColumn:
    told, rule = asked["built"][name], asked["prepare"]
    mean, deviation = told["mean"], told.get("deviation", 0.0)
    quartiles, error = [mean, mean, mean], 0.0
    if asked["quartiles"]:
        quartiles, error = read_quartiles(told["cells"], told["count"])
    fill = {"mean": mean, "indicator": mean, "median": quartiles[1]}.get(rule["missing"])
    centre, scale = 0.0, 1.0
    if rule["scale"] == "standard":
        centre, scale = mean, deviation or 1.0
    elif rule["scale"] == "robust":
        distance = quartiles[2] - quartiles[0]
        centre, scale = quartiles[1], distance if distance > 4 * error else deviation or 1.0
    scales = tuple(
        (client, mine[0], mine[1] or scale, None if fill is None else mine[2])
        if mine
        else (client, centre, scale, fill)
        for client, mine in told.get("alone", {}).items()
    )
    marked = rule["missing"] == "indicator" and told["gaps"] > 0
    return NumberColumn(name, fill, centre, scale, marked, error, scales)


def _make_categories(name: str, asked: Question) -> CategoryColumn:
    told, rule = asked["built"][name], asked["prepare"]
    strict = rule["unknown"] == "error"
    least = 1 if strict else rule["min_count"]
    kept = sorted(t for t, n in told["counts"].items() if n >= least and (strict or t != OTHER))
    pooled = len(kept) < len(told["counts"])
    marked = rule["missing"] in ("mean", "median", "indicator") and told["gaps"] > 0
    return CategoryColumn(name, tuple(kept), pooled, rule["unknown"], marked)
