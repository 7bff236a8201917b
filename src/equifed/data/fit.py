"""Fit a preparation by adding numbers that every client computes from its own rows.

Nothing here sees the rows of two clients. A fit is a few questions; each of them goes to all
clients, :func:`describe_rows` answers it from the rows of one, and :func:`combine` makes the next
question of the answers or, at the end, the :class:`~equifed.data.preparation.Preparation`::

    asked = ask_kinds(features, target, prepare)
    while not isinstance(asked, Preparation):
        asked = combine(asked, {name: describe_rows(rows[name], asked) for name in clients})

Questions and answers are plain values that JSON can hold: ``kinds`` (how many numbers, texts, gap
words and dates a column has; whether it is ``mixed`` and has ``many`` values), ``sums`` (of its
numbers; counts of its categories), ``squares`` (of differences from the common mean, so that large
offsets cost no digits). The last two ask for the values of a regression, too. Everything is added
up, so that hidden sums do (:mod:`equifed.data.fit_by_sums`).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equifed.data.columns import (
    CELLS,
    DECIMAL_COMMA,
    MOST_CODES,
    Columns,
    are_whole,
    blank,
    explain_comma,
    is_date,
    judge_mixture,
    look_at,
    name_categories,
    name_category,
    naming,
    read_numbers,
    to_amounts,
    to_numbers,
)
from equifed.data.preparation import (
    OTHER,
    CategoryColumn,
    NumberColumn,
    Preparation,
    Prepare,
    Target,
)
from equifed.data.split import MANY, DataError, ask_task, refuse

Numbers = NDArray[np.float64]
Question = dict[str, Any]
Answers = Mapping[str, Mapping[str, Any]]  # client name to what describe_rows returned

DATES = "dates; a model needs numbers: turn them into days since a first day, years, months"
FEW = 20  # texts that are all different are an identifier from this many on
NOT_ASKED = "not among the chosen features"
KINDS = ("numbers", "texts", "words", "dates", "several", "different", "mixed", "many")
FILLED = ("mean", "indicator")
EPS = float(np.finfo(float).eps)


def ask_kinds(
    features: Sequence[str],
    target: Target,
    prepare: Prepare,
    *,
    client: str | None = None,
    categories: Sequence[str] = (),
    choosy: bool = False,  # leave out what is not a feature (identifiers, dates); else refuse it
    left_out: Mapping[str, str] | None = None,  # columns that are no features, and why
) -> Question:
    """Return the first question of a fit."""
    coded, values = {*categories, *prepare.listed} - {*prepare.numeric}, target.classes is None
    listed = [name for name in features if name in coded]
    return {
        "stage": "kinds",
        "columns": list(features),  # that the question is about
        "features": list(features),
        "listed": listed,
        "coded": listed,
        "gaps": dict.fromkeys(prepare.numeric, "texts"),  # in columns of numbers; else empty cells
        "prepare": json.loads(json.dumps(asdict(prepare))),
        "target": asdict(target),
        "scaled": target.name if values and prepare.target_scale is not None else None,
        "client": client,
        "choosy": choosy,
        "left_out": list(map(list, (left_out or {}).items())),
    }


def fit_preparation(rows: Mapping[str, Columns], asked: Question) -> Preparation:
    """Ask the clients, whose rows are given by name, until the preparation is known."""
    told: Question | Preparation = asked
    while not isinstance(told, Preparation):
        told = combine(told, {name: describe_rows(mine, told, name) for name, mine in rows.items()})
    return told


# -- answers of one client ------------------------------------------------------------------------


def describe_rows(columns: Columns, asked: Question, client: str = "") -> dict[str, Any]:
    """Answer a question of :func:`ask_kinds` or :func:`combine` from one client's training rows."""
    tell = {"kinds": _tell_kind, "sums": _tell_sums, "squares": _tell_squares}[asked["stage"]]
    with naming(client):
        return {name: tell(name, columns[name], asked) for name in asked["columns"]}


def _tell_kind(name: str, values: Sequence[Any], asked: Question) -> dict[str, Any]:
    """Count what a column holds; ``different`` of ``several`` texts tell an identifier."""
    counts = dict.fromkeys(KINDS, 0)
    if name in asked["coded"]:
        return {**counts, "texts": len(values) - values.count(None)}
    if name in asked["gaps"]:
        return {**counts, "numbers": len(_read_present(name, values, asked))}
    look = look_at(values)
    if look.kind in ("numbers", "whole", "empty"):
        return {**counts, "numbers": look.count, "many": int(look.different > MOST_CODES)}
    refuse(
        (v for v in values if v is not None and not isinstance(v, CELLS)),
        lambda v: (
            f"Column {name!r} is not numeric: it holds a {type(v).__name__} ({v!r:.60}), neither "
            "number nor text; convert it or leave the column out."
        ),
    )
    _refuse_commas(name, values)
    if look.kind == "mixed":
        refuse(
            filter(is_date, values),
            lambda date: (
                f"Column {name!r} holds numbers and dates, e.g. {look.examples[0]!r} and "
                f"{str(date)!r:.60}; correct the odd ones (leave them empty if not known), or list "
                "it in categorical."
            ),
        )
        return {**counts, **look.mixture, "mixed": 1}
    if look.kind == "dates":
        return {**counts, "dates": look.count}
    told = {"several": look.count, "different": look.different} if look.count > 1 else {}
    return {**counts, "texts": look.count, **told}


def _tell_sums(name: str, values: Sequence[Any], asked: Question) -> dict[str, Any]:
    if name in asked["coded"]:
        counts = Counter(name_categories(values))
        gaps = counts.pop(None, 0)
        return {"counts": {str(text): counts[text] for text in counts}, "gaps": gaps}
    there = _read_present(name, values, asked)
    return {"count": len(there), "sum": _add(name, there), "gaps": len(values) - len(there)}


def _tell_squares(name: str, values: Sequence[Any], asked: Question) -> dict[str, Any]:
    there = _read_present(name, values, asked)
    apart = there - asked["built"][name]["mean"]
    with np.errstate(over="ignore"):
        told: dict[str, Any] = {"apart": _add(name, apart), "squares": _add(name, apart**2)}
    if asked["prepare"]["per_client"] and len(there) and name != asked["scaled"]:
        told["alone"] = [float(there.mean()), _not_tiny(float(there.std()), float(there.mean()))]
    return told


def _read_present(name: str, values: Sequence[Any], asked: Question) -> Numbers:
    numbers = read_numbers(name, blank(values, asked["gaps"].get(name, "empty")))
    return numbers[~np.isnan(numbers)]


def _not_tiny(deviation: float, mean: float) -> float:
    """Return 0 for a deviation that is rounding alone: of a constant column."""
    return deviation if deviation > 4 * EPS * abs(mean) else 0.0


def _add(name: str, numbers: Numbers) -> float:
    with np.errstate(over="ignore"):
        total = float(numbers.sum())
    if not np.isfinite(total):
        raise DataError(
            f"Column {name!r} holds numbers up to {np.abs(numbers).max():.3g}, too large to be "
            "added or squared; rescale it, or give scale=None and missing='error' (for a target "
            "target_scale=None)."
        )
    return total


# -- the next question, from all answers ----------------------------------------------------------


def combine(asked: Question, answers: Answers) -> Question | Preparation:
    """Return the next question, or the preparation when nothing is left to ask."""
    if not answers:
        raise DataError("A preparation is fitted on the rows of clients; there are none.")
    totals = {name: _add_up([a[name] for a in answers.values()]) for name in asked["columns"]}
    stages = {"kinds": _after_kinds, "sums": _after_sums, "squares": _after_squares}
    return stages[asked["stage"]](asked, totals, answers)


def _add_up(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of what the clients told of a column."""
    total: dict[str, Any] = {}
    for key in told[0].keys() - {"alone"}:
        values = [one[key] for one in told]
        if key == "counts":
            total[key] = Counter()
            for counts in values:
                total[key].update(counts)
        else:
            total[key] = math.fsum(values) if float in map(type, values) else sum(values)
    return total


def _after_kinds(
    asked: Question, totals: Mapping[str, Mapping[str, int]], answers: Answers
) -> Question:
    coded, gaps, reasons = {*asked["coded"]}, {**asked["gaps"]}, dict[str, str]()
    for name, told in totals.items():
        present = told["numbers"] + told["texts"] + told["words"] + told["dates"]
        if not present:
            reasons[name] = "no training row has a value"
        elif name in coded or told["numbers"] == present:
            continue
        elif told["mixed"] and not told["dates"]:
            if _judge(name, told, asked) == "numbers":
                gaps[name] = "words"
            else:
                coded.add(name)
        elif told["numbers"]:
            one, other = _find_two({c: bool(a[name]["numbers"]) for c, a in answers.items()})
            raise DataError(
                f"Column {name!r} holds numbers at client {one!r} and text or dates at client "
                f"{other!r}; make them alike, or list it in categorical, or in numeric to make "
                "gaps of the text."
            )
        elif told["dates"] == present:
            reasons[name] = DATES
        elif told["different"] == told["several"] >= FEW:
            reasons[name] = f"{present} different texts in as many rows, an identifier"
        else:
            coded.add(name)
    following = _leave_out(reasons, asked)
    features, target = following["features"], asked["scaled"]
    columns = features if target is None else [*features, target]
    coded_there = [name for name in features if name in coded]
    return {**following, "stage": "sums", "columns": columns, "coded": coded_there, "gaps": gaps}


def _judge(name: str, told: Mapping[str, int], asked: Question) -> str:
    """Return what a column with numbers and text is, or ask which."""
    kind = judge_mixture(told)
    if kind is None or (kind == "numbers" and asked["prepare"]["missing"] not in FILLED):
        raise DataError(
            f"Column {name!r} holds {told['numbers']} numbers and {told['texts'] + told['words']} "
            "texts; list it in numeric to make gaps of the text, or in categorical to make each "
            "value a category, or correct it."
        )
    return kind


def _find_two(kinds: Mapping[str, bool]) -> tuple[str, str]:
    """Return the first client of which it is true, and the first of which it is not."""
    names, found = list(kinds), list(kinds.values())
    return names[found.index(True)], names[found.index(False)]


def _leave_out(reasons: Mapping[str, str], asked: Question) -> Question:
    """Return the question without these; refuse one that was named, and to leave out all."""
    if reasons and (not asked["choosy"] or len(reasons) == len(asked["features"])):
        name, reason = next(iter(reasons.items()))
        listed = ", or list it in categorical" if "texts" in reason else ""
        raise DataError(
            f"Column {name!r} is not a feature ({reason}); leave it out of features{listed}."
        )
    features = [name for name in asked["features"] if name not in reasons]
    left_out = [*asked["left_out"], *map(list, reasons.items())]
    return {**asked, "features": features, "left_out": left_out}


def _after_sums(
    asked: Question, totals: dict[str, dict[str, Any]], answers: Answers
) -> Question | Preparation:
    rule, coded, target = asked["prepare"], asked["coded"], asked["scaled"]
    least = rule["min_count"] if rule["unknown"] == "other" else 0
    rare = {
        name: f"texts of which none has min_count={least} training rows"
        for name in coded
        if name not in asked["listed"] and max(totals[name]["counts"].values()) < least
    }
    for name in totals.keys() - coded:
        totals[name]["mean"] = totals[name]["sum"] / totals[name]["count"]
    following = {**_leave_out(rare, asked), "stage": "squares", "built": totals}
    plain = rule["scale"] is None and rule["missing"] not in FILLED
    numbers = [] if plain else [name for name in following["features"] if name not in coded]
    following["columns"] = numbers if target is None else [*numbers, target]
    return following if following["columns"] else _finish(following)


def _after_squares(
    asked: Question, totals: Mapping[str, Mapping[str, float]], answers: Answers
) -> Preparation:
    built = {name: dict(told) for name, told in asked["built"].items()}
    for name, told in totals.items():
        found, count = built[name], built[name]["count"]
        found["mean"] += told["apart"] / count  # what rounding took from the first sum
        spread = told["squares"] - told["apart"] ** 2 / count
        found["deviation"] = _not_tiny(math.sqrt(max(spread, 0.0) / count), found["mean"])
        if asked["prepare"]["per_client"]:
            found["alone"] = {client: a[name].get("alone") for client, a in answers.items()}
    return _finish({**asked, "built": built})


def _finish(asked: Question) -> Preparation:
    columns = [
        _make_categories(name, asked) if name in asked["coded"] else _make_number(name, asked)
        for name in asked["features"]
    ]
    target, rule, classes = dict(asked["target"]), asked["prepare"], asked["target"]["classes"]
    target["classes"] = None if classes is None else tuple(classes)
    if asked["scaled"] is not None:
        told = asked["built"][target["name"]]
        target |= {"centre": told["mean"], "scale": told["deviation"] or 1.0}
    left_out = tuple((name, reason) for name, reason in asked["left_out"])
    rules = rule["scale"], rule["missing"]
    return Preparation(tuple(columns), Target(**target), asked["client"], *rules, left_out)


def _make_number(name: str, asked: Question) -> NumberColumn:
    told, rule = asked["built"][name], asked["prepare"]
    fill = told["mean"] if rule["missing"] in FILLED else None
    scaled = rule["scale"] is not None
    centre, scale = (told["mean"], told["deviation"] or 1.0) if scaled else (0.0, 1.0)
    scales = tuple(
        (client, mine[0], mine[1] or scale, None if fill is None else mine[0])
        if mine
        else (client, centre, scale, fill)
        for client, mine in told.get("alone", {}).items()
    )
    marked, gaps = rule["missing"] == "indicator" and told["gaps"] > 0, asked["gaps"].get(name)
    return NumberColumn(name, fill, centre, scale, marked, scales, gaps or "empty")


def _make_categories(name: str, asked: Question) -> CategoryColumn:
    told, rule = asked["built"][name], asked["prepare"]
    strict = rule["unknown"] == "error"
    least = 1 if strict else rule["min_count"]
    kept = sorted(t for t, n in told["counts"].items() if n >= least and (strict or t != OTHER))
    pooled = len(kept) < len(told["counts"])
    marked = rule["missing"] in FILLED and told["gaps"] > 0
    return CategoryColumn(name, tuple(kept), pooled, rule["unknown"], marked)


# -- the target -----------------------------------------------------------------------------------


def describe_target(name: str, values: Sequence[Any], task: str | None = None) -> dict[str, Any]:
    """Return what one client tells of its targets: of which kind they are, and which labels."""
    where, look = f"Column {name!r}", look_at(values)
    if look.kind == "other":
        raise DataError(f"{where} must hold text or numbers, one in a row.")
    numbers = to_numbers(values) if task == "regression" else to_amounts(values)
    if task == "regression" and numbers is None:
        odd = next(v for v in values if to_numbers([v]) is None)
        raise DataError(f"{where} is not numeric (it has {str(odd)!r}): cannot be a regression.")
    whole = numbers is not None and are_whole(numbers)
    if task == "regression" or (numbers is not None and not whole and task is None):
        read_numbers(name, values)  # refuses infinities
        return {"numeric": True, "whole": False, "labels": []}
    if numbers is None and task is None:
        _refuse_commas(name, values)
        if look.kind == "mixed":
            number, odd = look.examples
            raise DataError(
                f"{where} holds numbers and {'dates' if is_date(odd) else 'text'}, e.g. "
                f"{number!r} and {odd!r:.60}; correct the odd ones (leave them empty if not "
                "known), or set task='classification' if all of them are classes."
            )
    if numbers is not None and whole:
        labels = [str(int(v)) for v in np.unique(numbers).tolist()]
    else:
        labels = sorted({name_category(v) for v in values})
    return {"numeric": numbers is not None, "whole": whole, "labels": labels}


def _refuse_commas(name: str, values: Sequence[Any]) -> None:
    """Refuse numbers with a decimal comma, before each of them becomes a category."""
    refuse(
        (text for text in values if isinstance(text, str) and DECIMAL_COMMA.fullmatch(text)),
        lambda text: f"Column {name!r} holds {text!r}: {explain_comma(text)}",
    )


def combine_targets(
    name: str, answers: Answers, task: str | None = None, classes: int | None = None
) -> Target:
    """Return the target of all clients, from what :func:`describe_target` gave for each."""
    where = f"Column {name!r}"
    numeric = {client: told["numeric"] for client, told in answers.items()}
    if task is None and len(set(numeric.values())) > 1:
        one, other = _find_two(numeric)
        raise DataError(
            f"{where} holds numbers at client {one!r} and text at client {other!r}; make them "
            "alike, or set task='classification' if all of them are classes."
        )
    whole = all(told["whole"] for told in answers.values())
    if task == "regression" or (task is None and all(numeric.values()) and not whole):
        return Target(name)
    if classes is not None and not whole:
        raise DataError(
            f"With classes={classes} the target column must hold labels 0..{classes - 1}, got "
            "text; leave classes out to have the labels numbered."
        )
    labels = {label for told in answers.values() for label in told["labels"]}
    if not whole:
        return Target(name, tuple(sorted(labels)))
    distinct = sorted(map(int, labels))
    gaps = len(distinct) > 2 and distinct[-1] - distinct[0] >= len(distinct)
    if task is None and classes is None and (len(distinct) > MANY or gaps):
        ask_task(where, distinct)
    return Target(name, tuple(map(str, distinct if classes is None else range(classes))))
