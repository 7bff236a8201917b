"""Look at a table and infer what its columns are; every guess says why, and what to look at."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from equifed.data.columns import (
    Columns,
    Look,
    blank,
    judge_mixture,
    look_at,
    name_categories,
    refuse_absent,
    to_numbers,
)
from equifed.data.fit import combine_targets, describe_target
from equifed.data.split import DataError, Task, refuse, refuse_any

CLIENTS = (  # words in the name of the column that tells the clients, likeliest first
    *("client", "site", "hospital", "clinic", "centre", "center", "institution", "institute"),
    *("organisation", "organization", "participant", "silo", "party", "node", "bank", "branch"),
    *("school", "store", "shop", "factory", "plant", "country", "region", "state", "district"),
    *("city", "station", "device", "writer", "user", "owner", "source", "cohort", "group"),
)

TARGETS = (  # words in the name of the column to predict, likeliest first
    *("target", "label", "class", "outcome", "y", "result", "response", "diagnosis", "disease"),
    *("ill", "died", "death", "dead", "mortality", "survived", "survival", "readmitted", "event"),
    *("churn", "default", "fraud", "income", "price", "score", "status"),
)

PEOPLE = ("patient", "subject", "person", "individual", "case", "customer", "user", "animal")
IDENTIFIERS = (
    *("id", "uuid", "guid", "key", "nr", "no", "number", "index", "record", "row", "mrn", "ssn"),
    *("account", "serial", *PEOPLE),
)
MOST_CLIENTS, MOST_NUMBERS = 2000, 10
MOST_GROUPS = 20  # values of a column by which metrics can reasonably be reported
PAIRS = 5  # more equal pairs must be expected than there are before that tells an identifier
SHOWN = 1000  # rows that show of nearly every column that it does not tell the class
FEW = 10  # fewer rows tell nothing about a column; texts with fewer may be too few for a category
NUMBER_AS_TEXT = re.compile(r"[<>≤≥~±+-]*\s*(\d[\d.,'\s]*)\s*(%|[^\W\d]{0,4})")
"""A number with a sign, thousands or a unit around it."""


@dataclass(frozen=True)
class Guess:
    """Which column is what, and why: ``left_out`` and ``remarks`` are for the user to read."""

    client: str
    target: str
    features: tuple[str, ...]
    task: Task
    left_out: Mapping[str, str]
    remarks: tuple[str, ...]
    categorical: tuple[str, ...] | Literal["auto"] = "auto"
    numeric: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()


def guess_client(looks: Mapping[str, Look], rows: int) -> list[str]:
    """Return the columns that may tell the clients, the likeliest first."""
    fit = [
        name
        for name, look in looks.items()
        if look.kind in ("texts", "whole") and 2 <= look.different <= min(MOST_CLIENTS, rows // 2)
    ]
    texts = [name for name in fit if looks[name].kind == "texts" and looks[name].different > 2]
    return list(dict.fromkeys([*_find_named(fit, CLIENTS), *texts]))


def guess_target(looks: Mapping[str, Look], client: str) -> list[str]:
    """Return the columns that may be the target, the likeliest first."""
    kinds = ("texts", "whole", "numbers")
    able = {n: v for n, v in looks.items() if n != client and v.kind in kinds and v.different >= 2}
    fit = [name for name, look in able.items() if not is_identifier(name, look)]
    return list(dict.fromkeys([*_find_named(fit, TARGETS), *reversed(fit)]))


def _find_named(names: Sequence[str], words: Sequence[str]) -> list[str]:
    return [name for word in words for name in names if word in _words(name)]


def guess_columns(
    columns: Columns, client: str, target: str, coded: Sequence[str] = (),
    numeric: Sequence[str] = (), looks: Mapping[str, Look] | None = None,
) -> Guess:  # fmt: skip
    """Return what the other columns are; ``coded`` are categories, ``numeric`` are numbers."""
    refuse_absent((client, target, *coded, *numeric), columns)
    columns = Columns({**columns, **{name: blank(columns[name], "texts") for name in numeric}})
    known = {} if looks is None else {n: look for n, look in looks.items() if n not in numeric}
    looks = {name: known.get(name) or look_at(values) for name, values in columns.items()}
    refuse_any(
        (looks[target].different < 2,
         f"Column {target!r} has fewer than two different values: nothing to learn."),
        (looks[client].different == looks[client].count >= FEW,
         f"Column {client!r} has a value of its own in each of {looks[client].count} rows: it "
         "tells rows, not clients; name the column that says whose row it is."),
    )  # fmt: skip
    task = guess_task(target, columns[target])
    if task == "classification":
        refuse_single_rows(target, looks[target])
    others = {name: look for name, look in looks.items() if name not in (client, target)}
    reasons = {
        name: None if name in (*coded, *numeric) else _reason(name, look, columns[name])
        for name, look in others.items()
    }
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    kept = tuple(name for name in others if name not in left_out)
    if not kept:
        told = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise DataError(f"No column is left to predict from ({told}).")
    refuse(
        (name for name in coded if name not in kept),
        lambda name: f"There is no feature {name!r}; there are {', '.join(kept)}.",
    )
    refuse(
        (name for name in numeric if looks[name].kind not in ("numbers", "whole")),
        lambda name: f"Column {name!r} is named as numeric and holds no numbers; leave it out.",
    )
    mixed = [n for n in kept if looks[n].kind == "mixed" and n not in coded]
    taken = {name: judge_mixture(looks[name].mixture) for name in mixed}
    coded = [*coded, *(n for n, kind in taken.items() if kind == "category")]
    numeric = [*numeric, *(n for n, kind in taken.items() if kind == "numbers")]
    amounts = [n for n in kept if n not in (*coded, *numeric)]
    remarks = [_describe_mixture(name, looks[name], name in coded) for name in mixed]
    remarks += _find_remarks(columns, looks, (client, *kept, target), amounts)
    if task == "classification":
        remarks += find_leaks(columns, kept, target)
    return Guess(
        client, target, kept, task, left_out, tuple(remarks), tuple(coded) or "auto",
        numeric=tuple(numeric),
        groups=tuple(n for n, look in others.items() if reasons[n] == _describe_group(look)),
    )  # fmt: skip


def _find_remarks(
    columns: Columns, looks: Mapping[str, Look], names: Sequence[str], amounts: Sequence[str]
) -> Iterator[str]:
    """Say what a person should know about the client, the features and the target."""
    client, *features, target = names
    for name in amounts:
        if looks[name].kind == "whole" and 3 <= looks[name].different <= MOST_NUMBERS:
            yield (
                f"{name}: {looks[name].different} different whole numbers, taken as amounts; if "
                "they are codes, list the column in categorical"
            )
    for name in features:
        if looks[name].gaps:
            yield f"{name}: {looks[name].gaps} gaps ({looks[name].gaps / len(columns[name]):.0%})"
    if looks[client].different == 1:
        yield f"{client}: there is only one client, {looks[client].examples[0]}"
    for name in (client, target):
        if looks[name].gaps:
            yield f"{looks[name].gaps} rows have no {name} and are left out"
    for name in names:
        if looks[name].kind not in ("numbers", "whole"):
            yield from find_spellings(name, columns[name])


def guess_task(target: str, values: list[Any]) -> Task:
    """Return the task; whole numbers that could be either are taken as values."""
    told = describe_target(target, [v for v in values if v is not None])
    try:
        values_told = combine_targets(target, {"": told}).classes is None
    except DataError:
        values_told = True  # more than 20 whole numbers, or with gaps between them
    return "regression" if values_told else "classification"


def _reason(name: str, look: Look, values: Sequence[Any]) -> str | None:
    """Say why a column is not a feature, if it is none."""
    texts = look.kind == "texts"
    many = texts and look.different > MOST_NUMBERS
    disguised = describe_numbers_as_text(values) if many else None
    rows = f"{look.different} different values in {look.count} rows"
    cases = (
        (disguised is not None, disguised),
        (look.kind == "empty", "no value at all"),
        (look.different == 1, f"constant: always {''.join(look.examples[:1])!r}"),
        (look.kind == "dates", "dates: turn them into days since a first day, a year or a month to "
         "use them"),
        (look.kind == "other", "neither numbers nor text"),
        (look.kind == "mixed" and judge_mixture(look.mixture) is None,
         f"numbers and text, such as {' and '.join(map(repr, look.examples))}: correct it, or use "
         f"--numeric {name} (text is gaps) or --categorical {name}, to use it"),
        (is_identifier(name, look), f"an identifier: {rows}"),
        (_is_group(name, look), _describe_group(look)),
        (texts and look.different > max(20, look.count // 5), f"free text: {rows}"),
        (texts and look.most < FEW, f"rare texts: the most frequent one has {look.most} rows"),
    )  # fmt: skip
    return next((told for holds, told in cases if holds), None)


def _describe_mixture(name: str, look: Look, coded: bool) -> str:
    """Say what a column with numbers and text is taken for, and how to have it otherwise."""
    taken, other = ("a category", "numeric") if coded else ("numbers with gaps", "categorical")
    examples = " and ".join(map(repr, look.examples))
    return f"{name}: holds {examples}, taken as {taken}; list it in {other} to treat it otherwise"


def _describe_group(look: Look) -> str:
    return f"identifies {look.different} cases with several rows each"


def is_identifier(name: str, look: Look) -> bool:
    """Tell whether every row has a value of its own that means nothing, but for copies of rows."""
    twice = look.count - look.different
    if look.count < 10 or twice > look.count // 10 or (twice and look.kind != "whole"):
        return False
    # of n amounts within a span n^2 / (2 span) pairs would be equal; of identifiers hardly any is
    expected = look.count**2 / (2 * look.span) if look.span else 0.0
    crowded = expected > PAIRS * max(1, twice)
    named = bool(_words(name) & {*IDENTIFIERS})
    return look.kind == "texts" or (look.kind == "whole" and (named or crowded))


def find_identifiers(columns: Columns, names: Sequence[str]) -> dict[str, str]:
    """Return columns of whole numbers that count rows, and measure nothing, and why."""
    looks = {name: look_at(columns[name]) for name in names}
    return {
        name: f"an identifier: {look.different} different whole numbers in {look.count} rows"
        for name, look in looks.items()
        if look.kind == "whole" and is_identifier(name, look)
    }


def find_misused_groups(
    columns: Columns, report_by: str | None, keep_together: str | None
) -> list[str]:
    """Warn of a column in ``report_by`` that seems to tell people apart, not kinds of people."""
    if report_by is None or report_by == keep_together:
        return []
    look = look_at(columns[report_by])
    person = is_identifier(report_by, look) or _is_group(report_by, look)
    if look.different <= MOST_GROUPS and not person:
        return []
    return [
        f"column {report_by!r}, named in report_by, has {look.different} different values: "
        "report_by only reports metrics by value (by sex, by age band), and rows of one value may "
        "be both in training and in test data; to keep the rows of one person (or device) in one "
        f"split, use keep_together={report_by!r}"
    ]


def _is_group(name: str, look: Look) -> bool:
    several = look.different < look.count and look.different > look.count // 20
    return several and look.kind in ("texts", "whole") and bool(_words(name) & {*PEOPLE})


def _words(name: str) -> set[str]:
    """Return the words of a column's name."""
    apart = re.sub(r"([a-z])([A-Z])", r"\1 \2", name)
    return {word.lower() for word in re.split(r"[^A-Za-z0-9]+", apart) if word}


def describe_numbers_as_text(values: Sequence[Any]) -> str | None:
    """Say that texts are numbers in disguise, if they are."""
    found = [NUMBER_AS_TEXT.fullmatch(v) for v in values if isinstance(v, str)]
    first = found[0] if found else None
    if first is None or not all(found):
        return None
    plain = re.sub(r"[,'\s]", "", first[1])
    return (
        f"numbers written as text, such as {first[0]!r}: write them plainly ({plain}) to use them"
    )


def find_spellings(name: str, values: Sequence[Any]) -> list[str]:
    """Name texts that differ in capitals or spaces alone: each is a category of its own."""
    alike: dict[str, list[str]] = {}
    for text in dict.fromkeys(v for v in values if isinstance(v, str)):
        alike.setdefault("".join(text.casefold().split()), []).append(text)
    return [
        f"{name}: {' and '.join(map(repr, same[:3]))} differ in capitals or spaces alone, and "
        "count as different"
        for same in alike.values()
        if len(same) > 1
    ]


def find_leaks(columns: Mapping[str, list[Any]], used: Sequence[str], target: str) -> list[str]:
    """Name features that alone tell the class of every row, as a code of the outcome does."""
    classes = name_categories(columns[target])
    return [
        f"{name}: predicts {target} of every row by itself; if it is known only afterwards, leave "
        "it out"
        for name in used
        if _tells(columns[name], classes)
    ]


def _tells(values: Sequence[Any], classes: Sequence[str | None]) -> bool:
    """Tell whether values determine the class of their rows; None is no class."""
    if not _separates(values[:SHOWN], classes[:SHOWN]):
        return False  # nor do all rows
    rows = zip(values, classes, strict=True)
    known = [c for v, c in rows if v is not None and c is not None]
    several = len(set(known)) > 1 and len(known) >= FEW
    return several and _separates(values, classes, most=len(known) // 4)


def _separates(values: Sequence[Any], classes: Sequence[str | None], *, most: int = SHOWN) -> bool:
    """Tell whether no value has two classes, and numbers have every class in one stretch."""
    rows = zip(values, classes, strict=True)
    pairs = [(v, c) for v, c in rows if v is not None and c is not None]
    cells, known = [v for v, _ in pairs], np.array([c for _, c in pairs])
    numbers = to_numbers(cells)
    if numbers is None:
        texts = name_categories(cells)
        different = len(set(texts))  # many texts tell their rows, not the class
        return len({*zip(texts, known.tolist(), strict=True)}) == different <= most
    order = np.argsort(numbers, kind="stable")
    numbers, known = numbers[order], known[order]
    ends = np.flatnonzero(known[1:] != known[:-1])
    apart = bool((numbers[ends] < numbers[ends + 1]).all())
    return apart and len(ends) == max(len(np.unique(known)), 1) - 1


def refuse_single_rows(name: str, look: Look) -> None:
    """Refuse a column of texts as a target when no two rows agree: there is nothing to learn."""
    if look.different == look.count >= FEW:
        raise DataError(
            f"Column {name!r} has {look.count} different values in {look.count} rows (such as "
            f"{look.examples[0]!r}), so no class is there twice: name another target, or turn it "
            "into a number or a few classes."
        )
