"""What a person should look at in a table before anything is trained on it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from equifed.data.columns import to_numbers
from equifed.data.prepared_columns import name_categories
from equifed.data.split import DataError

FEW_ROWS = 10
"""Fewer rows tell nothing about what a column is."""
NUMBER_AS_TEXT = re.compile(r"[<>≤≥~±+-]*\s*\d[\d.,'\s]*\s*(%|[^\W\d]{0,4})")
"""A number with a sign, thousands or a unit around it."""


def describe_numbers_as_text(values: Sequence[Any]) -> str | None:
    """Say that texts are numbers in disguise, if they are.

    >>> describe_numbers_as_text(["12 %", "9 %"])
    "numbers written as text, such as '12 %': write them plainly (12) to use them"
    """
    texts = [v for v in values if isinstance(v, str)]
    if not texts or not all(NUMBER_AS_TEXT.fullmatch(t) for t in texts):
        return None
    found = re.search(r"\d[\d.,'\s]*", texts[0])
    plain = re.sub(r"[,'\s]", "", found[0] if found else "")
    return (
        f"numbers written as text, such as {texts[0]!r}: write them plainly ({plain}) to use them"
    )


def find_spellings(name: str, values: Sequence[Any]) -> list[str]:
    """Name texts that differ in capitals or spaces alone: each is a category of its own.

    >>> find_spellings("sex", ["f", "F", "m"])
    ["sex: 'f' and 'F' differ in capitals or spaces alone, and count as different"]
    """
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
    """Name features that alone tell the class of every row, as a code of the outcome does.

    >>> table = {"code": ["a", "b"] * 10, "age": [*range(20)], "ill": ["no", "yes"] * 10}
    >>> find_leaks(table, ["code", "age"], "ill")
    ['code: tells ill of every row by itself; if it is known only afterwards, leave it out']
    """
    classes = name_categories(columns[target])
    return [
        f"{name}: tells {target} of every row by itself; if it is known only afterwards, leave it "
        "out"
        for name in used
        if _tells(columns[name], classes)
    ]


def _tells(values: Sequence[Any], classes: Sequence[str | None]) -> bool:
    rows = [(v, c) for v, c in zip(values, classes, strict=True) if None not in (v, c)]
    kinds = sorted({c for _, c in rows if c is not None})
    if len(rows) < FEW_ROWS or len(kinds) < 2:
        return False
    numbers = to_numbers([v for v, _ in rows])
    if numbers is not None:  # in the order of the numbers, every class has one stretch
        order = np.argsort(numbers, kind="stable")
        found = [kinds.index(str(rows[k][1])) for k in order]
        changes = [k for k in range(1, len(found)) if found[k] != found[k - 1]]
        apart = all(numbers[order[k]] > numbers[order[k - 1]] for k in changes)
        return len(changes) == len(kinds) - 1 and apart
    texts = name_categories([v for v, _ in rows])
    told = {(text, c) for text, (_, c) in zip(texts, rows, strict=True)}
    few = len(set(texts)) <= len(rows) // 4  # many texts tell their rows, not the class
    return few and len(told) == len(set(texts))


def refuse_single_rows(name: str, values: Sequence[Any]) -> None:
    """Refuse a column of texts as a target when no two rows agree: there is nothing to learn."""
    texts = [t for t in name_categories(values) if t is not None]
    if len(texts) >= FEW_ROWS and len(set(texts)) == len(texts):
        raise DataError(
            f"Column {name!r} has {len(texts)} different values in {len(texts)} rows (such as "
            f"{texts[0]!r}), so no class is there twice: name another target, or turn it into a "
            "number or a few classes."
        )


def refuse_numbered_clients(name: str, values: Sequence[Any]) -> None:
    """Refuse a column as the clients' when every row would be a client."""
    texts = [t for t in name_categories(values) if t is not None]
    if len(texts) >= FEW_ROWS and len(set(texts)) == len(texts):
        raise DataError(
            f"Column {name!r} has a value of its own in each of {len(texts)} rows: it tells rows, "
            "not clients; name the column that says whose row it is."
        )
