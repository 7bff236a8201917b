"""What the server of a fit does: from the answers of all clients to the next question.

See :mod:`equifed.data.fit_preparation`. It adds, and never sees a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from equifed.data.grid import PASSES, find_cell, find_ranks, read_quartiles
from equifed.data.preparation import Preparation, Target
from equifed.data.prepared_columns import OTHER, CategoryColumn, NumberColumn
from equifed.data.split import DataError

Question = dict[str, Any]
Answers = Mapping[str, Mapping[str, Any]]
"""Client name to what :func:`describe_rows` returned."""

DATES = "dates; a model needs numbers: turn them into days since a first day, years, months"
FEW = 20
"""Texts that are all different are an identifier from this many on."""


def combine(asked: Question, answers: Answers) -> Question | Preparation:
    """Return the next question, or the preparation when nothing is left to ask.

    Parameters
    ----------
    asked : dict
        The question.
    answers : mapping of str to dict
        What every client answered, by its name.
    """
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
    columns = _leave_out(reasons, asked)
    rule = asked["prepare"]
    return {
        **asked,
        "stage": "sums",
        "columns": columns,
        "listed": asked["coded"],
        "coded": [name for name in columns if name in coded],
        "left_out": [*asked["left_out"], *map(list, reasons.items())],
        "quartiles": rule["scale"] == "robust" or rule["missing"] == "median",
    }


def _refuse_mixture(name: str, answers: Answers) -> None:
    one = next(c for c, told in answers.items() if told[name]["numbers"])
    other = next(c for c, told in answers.items() if not told[name]["numbers"])
    raise DataError(
        f"Column {name!r} holds numbers at client {one!r} and text or dates at client {other!r}; "
        "make them alike, or list it in categorical."
    )


def _leave_out(reasons: Mapping[str, str], asked: Question) -> list[str]:
    """Return the other columns; refuse one that was named as a feature, and to leave out all."""
    if reasons and (not asked["choosy"] or len(reasons) == len(asked["columns"])):
        name, reason = next(iter(reasons.items()))
        listed = ", or list it in categorical" if "texts" in reason else ""
        raise DataError(
            f"Column {name!r} is no feature ({reason}); leave it out of features{listed}."
        )
    return [name for name in asked["columns"] if name not in reasons]


def _after_sums(asked: Question, answers: Answers) -> Question | Preparation:
    built: dict[str, Any] = {}
    for name in asked["coded"]:
        counts: dict[str, int] = {}
        for told in answers.values():
            for text, count in told[name]["counts"].items():
                counts[text] = counts.get(text, 0) + count
        built[name] = {"counts": counts, "gaps": _total(answers, name, "gaps")}
    rare = _find_rare(asked, built)
    columns = _leave_out(rare, asked)
    numbers = [name for name in asked["columns"] if name not in asked["coded"]]
    for name in numbers:
        count = _total(answers, name, "count")
        built[name] = {"count": count, "gaps": _total(answers, name, "gaps")}
        built[name]["mean"] = _total(answers, name, "sum") / count
        if asked["quartiles"]:
            lows, highs = ([a[name][k] for a in answers.values() if k in a[name]] for k in
                           ("low", "high"))  # fmt: skip
            if lows:
                built[name]["cells"] = [[min(lows), max(highs)]] * 6
    rule = asked["prepare"]
    left_out = [*asked["left_out"], *map(list, rare.items())]
    following = {**asked, "order": columns, "built": built, "columns": numbers,
                 "left_out": left_out}  # fmt: skip
    if not numbers or (rule["scale"] is None and rule["missing"] in ("drop", "error")):
        return _finish(following)
    centres = {name: built[name]["mean"] for name in numbers}
    return {**following, "stage": "squares", "centres": centres}


def _find_rare(asked: Question, built: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns, unless listed as categories, none of whose texts is frequent enough."""
    rule, found = asked["prepare"], {}
    for name in asked["coded"]:
        most = max(built[name]["counts"].values())
        if name not in asked["listed"] and rule["unknown"] == "other" and most < rule["min_count"]:
            found[name] = f"texts of which none has min_count={rule['min_count']} training rows"
    return found


def _after_squares(asked: Question, answers: Answers) -> Question | Preparation:
    built = {name: dict(told) for name, told in asked["built"].items()}
    eps = float(np.finfo(float).eps)
    for name in asked["columns"]:
        told = built[name]
        count, apart = told["count"], _total(answers, name, "apart")
        told["mean"] += apart / count  # what rounding took from the first sum
        spread = _total(answers, name, "squares") - apart**2 / count
        deviation = math.sqrt(max(spread, 0.0) / count)
        told["deviation"] = deviation if deviation > 4 * eps * abs(told["mean"]) else 0.0
        if asked["quartiles"] and "cells" not in told:  # where nobody told the extremes
            reach = deviation * math.sqrt(count) * (1 + 1e-9)  # no number is farther from the mean
            told["cells"] = [[told["mean"] - reach, told["mean"] + reach]] * 6
        own = {c: a[name]["own"] for c, a in answers.items() if "own" in a[name]}
        told["own"] = {c: own.get(c) for c in answers} if asked["prepare"]["per_client"] else {}
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


# -- the end ----------------------------------------------------------------------------------


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
    quartiles, error = read_quartiles(told["cells"], told["count"]) if asked["quartiles"] else (
        [mean, mean, mean], 0.0)  # fmt: skip
    fill = {"mean": mean, "indicator": mean, "median": quartiles[1]}.get(rule["missing"])
    centre, scale = 0.0, 1.0
    if rule["scale"] == "standard":
        centre, scale = mean, deviation or 1.0
    elif rule["scale"] == "robust":
        distance = quartiles[2] - quartiles[0]
        centre, scale = quartiles[1], distance if distance > 4 * error else deviation or 1.0
    own = tuple(
        (client, mine[0], mine[1] or scale, None if fill is None else mine[2])
        if mine
        else (client, centre, scale, fill)
        for client, mine in told.get("own", {}).items()
    )
    marked = rule["missing"] == "indicator" and told["gaps"] > 0
    return NumberColumn(name, fill, centre, scale, marked, error, own)


def _make_categories(name: str, asked: Question) -> CategoryColumn:
    told, rule = asked["built"][name], asked["prepare"]
    strict = rule["unknown"] == "error"
    least = 1 if strict else rule["min_count"]
    kept = sorted(t for t, n in told["counts"].items() if n >= least and (strict or t != OTHER))
    pooled = len(kept) < len(told["counts"])
    marked = rule["missing"] in ("mean", "median", "indicator") and told["gaps"] > 0
    return CategoryColumn(name, tuple(kept), pooled, rule["unknown"], marked)


def _total(answers: Answers, name: str, key: str) -> Any:
    values = [told[name][key] for told in answers.values()]
    return math.fsum(values) if any(isinstance(v, float) for v in values) else sum(values)
