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
    Gaps,
    are_whole,
    blank,
    count_mixture,
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
KINDS = ("numbers", "texts", "words", "dates", "different", "mixed", "many")
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
    return {
        "stage": "kinds",
        "columns": list(features),
        "coded": [name for name in features if name in coded],
        "prepare": json.loads(json.dumps(asdict(prepare))),
        "wordy": [],
        "target": asdict(target),
        "scaled": target.name if values and prepare.target_scale is not None else None,
        "client": client,
        "choosy": choosy,
        "left_out": list(map(list, (left_out or {}).items())),
    }  # fmt: skip


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
    """Count what a column holds; ``different`` texts tell an identifier."""
    forced = name in asked["prepare"]["numeric"]
    present = [v for v in blank(values, _gaps(name, asked)) if v is not None]
    counts = dict.fromkeys(KINDS, 0)
    if name in asked["coded"]:
        return {**counts, "texts": len(present)}
    if (to_numbers if forced else to_amounts)(present) is not None:
        many = len(set(present)) > MOST_CODES
        return {**counts, "numbers": len(present), "many": int(many)}
    look = look_at(values)
    refuse(
        (v for v in present if not isinstance(v, CELLS)),
        lambda v: (
            f"Column {name!r} is not numeric: it holds a {type(v).__name__} ({v!r:.60}), neither "
            "number nor text; convert it or leave the column out."
        ),
    )
    if forced:
        read_numbers(name, values)  # says which one it is, and what to do
    _refuse_commas(name, present)
    if look.kind == "mixed":
        refuse(
            filter(is_date, present),
            lambda date: (
                f"Column {name!r} holds numbers and dates, e.g. {look.examples[0]!r} and "
                f"{str(date)!r:.60}; correct the odd ones (leave them empty if not known), or list "
                "it in categorical."
            ),
        )
        return {**counts, **count_mixture(present), "mixed": 1}
    kind = "dates" if look.kind == "dates" else "texts"
    return {**counts, kind: len(present), "different": look.different}


def _tell_sums(name: str, values: Sequence[Any], asked: Question) -> dict[str, Any]:
    if name in asked["coded"]:
        counts = Counter(name_categories(values))
        gaps = counts.pop(None, 0)
        return {"counts": {str(text): counts[text] for text in counts}, "gaps": gaps}
    there = _present(name, values, asked)
    return {"count": len(there), "sum": _add(name, there), "gaps": len(values) - len(there)}


def _tell_squares(name: str, values: Sequence[Any], asked: Question) -> dict[str, Any]:
    there = _present(name, values, asked)
    apart = there - asked["centres"][name]
    with np.errstate(over="ignore"):
        told: dict[str, Any] = {"apart": _add(name, apart), "squares": _add(name, apart**2)}
    if asked["prepare"]["per_client"] and len(there) and name != asked["scaled"]:
        told["alone"] = [float(there.mean()), _not_tiny(float(there.std()), float(there.mean()))]
    return told


def _present(name: str, values: Sequence[Any], asked: Question) -> Numbers:
    numbers = read_numbers(name, blank(values, _gaps(name, asked)))
    return numbers[~np.isnan(numbers)]


def _gaps(name: str, asked: Question) -> Gaps:
    """Return what is a gap in a column of numbers."""
    if name in asked["prepare"]["numeric"]:
        return "texts"
    return "words" if name in asked["wordy"] else "empty"


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
    stages = {"kinds": _after_kinds, "sums": _after_sums, "squares": _after_squares}
    return stages[asked["stage"]](asked, answers)


def _after_kinds(asked: Question, answers: Answers) -> Question:
    coded, wordy, reasons = list(asked["coded"]), list[str](), dict[str, str]()
    for name in asked["columns"]:
        told = {key: _total(answers, name, key) for key in KINDS}
        present = told["numbers"] + told["texts"] + told["words"] + told["dates"]
        if not present:
            reasons[name] = "no training row has a value"
        elif name in asked["coded"] or told["numbers"] == present:
            continue
        elif told["mixed"] and not told["dates"]:
            (wordy if _judge(name, told, asked) == "numbers" else coded).append(name)
        elif told["numbers"]:
            numeric = {c: bool(answer[name]["numbers"]) for c, answer in answers.items()}
            one, other = _find_two(numeric)
            raise DataError(
                f"Column {name!r} holds numbers at client {one!r} and text or dates at client "
                f"{other!r}; make them alike, or list it in categorical, or in numeric to make "
                "gaps of the text."
            )
        elif told["dates"] == present:
            reasons[name] = DATES
        else:
            several = {c: told for c, told in answers.items() if told[name]["texts"] > 1}
            rows, different = (_total(several, name, key) for key in ("texts", "different"))
            if rows >= FEW and different == rows:
                reasons[name] = f"{present} different texts in as many rows, an identifier"
            coded.append(name)
    following = _leave_out(reasons, asked)
    coded = [name for name in following["columns"] if name in coded]
    order, target = following["columns"], asked["scaled"]
    columns = order if target is None else [*order, target]
    wordy = [name for name in order if name in wordy]
    more = {"columns": columns, "order": order, "listed": asked["coded"], "coded": coded,
            "wordy": wordy}  # fmt: skip
    return {**following, **more, "stage": "sums"}


def _judge(name: str, told: Mapping[str, int], asked: Question) -> str:
    """Return what a column with numbers and text is, or ask which."""
    kind = judge_mixture(told)
    filled = asked["prepare"]["missing"] in ("mean", "indicator")
    if kind is None or (kind == "numbers" and not filled):
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
    if reasons and (not asked["choosy"] or len(reasons) == len(asked["columns"])):
        name, reason = next(iter(reasons.items()))
        listed = ", or list it in categorical" if "texts" in reason else ""
        raise DataError(
            f"Column {name!r} is not a feature ({reason}); leave it out of features{listed}."
        )
    columns = [name for name in asked["columns"] if name not in reasons]
    left_out = [*asked["left_out"], *map(list, reasons.items())]
    return {**asked, "columns": columns, "left_out": left_out}


def _after_sums(asked: Question, answers: Answers) -> Question | Preparation:
    built: dict[str, Any] = {}
    rule, coded = asked["prepare"], asked["coded"]
    for name in asked["columns"]:
        built[name] = {"gaps": _total(answers, name, "gaps")}
        if name in coded:
            counts: Counter[str] = Counter()
            for told in answers.values():
                counts.update(told[name]["counts"])
            built[name]["counts"] = dict(counts)
        else:
            count = _total(answers, name, "count")
            built[name] |= {"count": count, "mean": _total(answers, name, "sum") / count}
    least = rule["min_count"] if rule["unknown"] == "other" else 0
    rare = {
        name: f"texts of which none has min_count={least} training rows"
        for name in coded
        if name not in asked["listed"] and max(built[name]["counts"].values()) < least
    }
    following = _leave_out(rare, {**asked, "columns": asked["order"]})
    order, target = following["columns"], asked["scaled"]
    plain = rule["scale"] is None and rule["missing"] in ("drop", "error")
    numbers = [] if plain else [name for name in order if name not in coded]
    numbers += [] if target is None else [target]
    following |= {"order": order, "built": built, "columns": numbers}
    if not numbers:
        return _finish(following)
    centres = {name: built[name]["mean"] for name in numbers}
    return {**following, "stage": "squares", "centres": centres}


def _after_squares(asked: Question, answers: Answers) -> Preparation:
    built = {name: dict(told) for name, told in asked["built"].items()}
    for name in asked["columns"]:
        told = built[name]
        count, apart = told["count"], _total(answers, name, "apart")
        told["mean"] += apart / count  # what rounding took from the first sum
        spread = _total(answers, name, "squares") - apart**2 / count
        told["deviation"] = _not_tiny(math.sqrt(max(spread, 0.0) / count), told["mean"])
        if asked["prepare"]["per_client"] and name != asked["scaled"]:
            told["alone"] = {c: answer[name].get("alone") for c, answer in answers.items()}
    return _finish({**asked, "built": built})


def _total(answers: Answers, name: str, key: str) -> Any:
    values = [told[name][key] for told in answers.values()]
    return math.fsum(values) if any(isinstance(v, float) for v in values) else sum(values)


def _finish(asked: Question) -> Preparation:
    columns = [
        _make_categories(name, asked) if name in asked["coded"] else _make_number(name, asked)
        for name in asked["order"]
    ]
    target, rule = dict(asked["target"]), asked["prepare"]
    if target["classes"] is not None:
        target["classes"] = tuple(target["classes"])
    if asked["scaled"] is not None:
        told = asked["built"][target["name"]]
        target |= {"centre": told["mean"], "scale": told["deviation"] or 1.0}
    left_out = tuple((name, reason) for name, reason in asked["left_out"])
    rules = rule["scale"], rule["missing"]
    return Preparation(tuple(columns), Target(**target), asked["client"], *rules, left_out)


def _make_number(name: str, asked: Question) -> NumberColumn:
    told, rule = asked["built"][name], asked["prepare"]
    fill = told["mean"] if rule["missing"] in ("mean", "indicator") else None
    scaled = rule["scale"] is not None
    centre, scale = (told["mean"], told["deviation"] or 1.0) if scaled else (0.0, 1.0)
    scales = tuple(
        (client, mine[0], mine[1] or scale, None if fill is None else mine[0])
        if mine
        else (client, centre, scale, fill)
        for client, mine in told.get("alone", {}).items()
    )
    marked = rule["missing"] == "indicator" and told["gaps"] > 0
    return NumberColumn(name, fill, centre, scale, marked, scales, _gaps(name, asked))


def _make_categories(name: str, asked: Question) -> CategoryColumn:
    told, rule = asked["built"][name], asked["prepare"]
    strict = rule["unknown"] == "error"
    least = 1 if strict else rule["min_count"]
    kept = sorted(t for t, n in told["counts"].items() if n >= least and (strict or t != OTHER))
    pooled = len(kept) < len(told["counts"])
    marked = rule["missing"] in ("mean", "indicator") and told["gaps"] > 0
    return CategoryColumn(name, tuple(kept), pooled, rule["unknown"], marked)


# -- the target -----------------------------------------------------------------------------------


def describe_target(name: str, values: Sequence[Any], task: str | None = None) -> dict[str, Any]:
    """Return what one client tells of its targets: of which kind they are, and which labels."""
    where = f"Column {name!r}"
    try:
        values = list({(type(v), v): v for v in values}.values())
    except TypeError:
        raise DataError(f"{where} must hold text or numbers, one in a row.") from None
    numbers = to_numbers(values) if task == "regression" else to_amounts(values)
    if task == "regression" and numbers is None:
        odd = next(v for v in values if to_numbers([v]) is None)
        raise DataError(f"{where} is not numeric (it has {str(odd)!r}): cannot be a regression.")
    whole = numbers is not None and are_whole(numbers)
    if task == "regression" or (numbers is not None and not whole and task is None):
        read_numbers(name, values)  # refuses infinities
        return {"numeric": True, "whole": False, "labels": []}
    if numbers is not None and whole:
        labels = [str(v) for v in sorted({int(v) for v in numbers.tolist()})]
    else:
        if numbers is None and task is None:
            _refuse_commas(name, values)
            look = look_at(values)
            if look.kind == "mixed":
                number, odd = look.examples
                raise DataError(
                    f"{where} holds numbers and {'dates' if is_date(odd) else 'text'}, e.g. "
                    f"{number!r} and {odd!r:.60}; correct the odd ones (leave them empty if not "
                    "known), or set task='classification' if all of them are classes."
                )
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
