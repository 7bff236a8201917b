"""Bring your own table: one column tells the client, one the target, others the features."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from equifed.data.columns import Columns, group_rows, one_hot, read_columns, to_numbers
from equifed.data.foreign import name_key, name_values
from equifed.data.split import Array, DataError
from equifed.data.targets import (
    DECIMAL_COMMA,
    MANY,
    ask_task,
    check_task,
    explain_comma,
    refuse_numbers_in_text,
)


def read_table(
    table: Any | str | Path,
    client: str,
    target: str,
    features: Sequence[str] | None,
    categorical: Sequence[str],
    split: str | None,
    task: str | None,
    missing: str,
    classes: int | None,
) -> dict[str, Any]:
    """Return what a table gives to ``Federation.from_clients``; see ``Federation.from_table``."""
    check_task(task, classes)
    columns = read_columns(table)
    special = [str(c) for c in (client, target, *([split] if split is not None else []))]
    wanted, coded = _choose_features(columns, special, features, categorical)
    client, target = special[:2]
    columns = _keep_complete(columns, [*special, *wanted], client, missing)
    inputs = _encode_features(columns, wanted, coded, client)
    targets, titles = _number_labels(columns[target], f"Column {target!r}", task, classes)
    owners = group_rows(columns[client], f"Column {client!r}")
    part = _read_split(columns, special[2:], len(inputs))

    def rows(label: str) -> dict[str, tuple[Array, Array]] | None:
        here = {c: r[part[r] == label] for c, r in owners.items()}
        if label != "train" and not any(len(r) for r in here.values()):
            return None
        return {c: (inputs[r], targets[r]) for c, r in here.items()}

    numbered = bool(titles) or classes is not None
    return {
        "clients": rows("train") or {},
        "validation": rows("validation"),
        "test": rows("test"),
        "task": "classification" if numbered else "regression",
        "classes": len(titles) if titles else classes,
        "class_names": titles,
    }


def _read_split(columns: Columns, named: list[str], rows: int) -> Array:
    """Return the split that each row belongs to, as text."""
    part = np.array([str(v) for v in columns[named[0]]] if named else ["train"] * rows)
    illegal = sorted(set(part.tolist()) - {"train", "validation", "test"})
    if illegal:
        raise DataError(
            f"Column {named[0]!r} must say train, validation or test, got {illegal[0]!r}."
        )
    return part


def _choose_features(
    columns: Columns,
    special: list[str],
    features: Sequence[str] | None,
    categorical: Sequence[str],
) -> tuple[list[str], list[str]]:
    """Return the feature columns, and which of them are categories."""
    coded = [categorical] if isinstance(categorical, str) else [str(c) for c in categorical]
    if features is None:
        wanted = [c for c in columns if c not in special]
    else:
        wanted = [features] if isinstance(features, str) else [str(c) for c in features]
    absent = [c for c in [*special, *wanted, *coded] if c not in columns]
    if absent:
        raise DataError(f"The table has no column {absent[0]!r}; it has {', '.join(columns)}.")
    if not wanted:
        raise DataError("The table has no feature columns besides client, target and split.")
    used = [*special, *wanted]
    twice = [c for k, c in enumerate(used) if c in used[:k] and c != special[0]]
    if twice or special[0] in special[1:]:
        name = twice[0] if twice else special[0]
        raise DataError(
            f"Column {name!r} is used twice, as client, target, split or feature; use it once."
        )
    stray = [c for c in coded if c not in wanted]
    if stray:
        raise DataError(f"Column {stray[0]!r} is in categorical but not in features; add it there.")
    return wanted, coded


def _keep_complete(columns: Columns, used: list[str], client: str, missing: str) -> Columns:
    """Drop the rows that lack a value, or name the first client and column that lack one."""
    if missing not in ("error", "drop"):
        raise DataError(f"missing must be 'error' or 'drop', got {missing!r}.")
    lacking = {c: np.array([v is None for v in columns[c]], dtype=bool) for c in used}
    for column, gaps in lacking.items():
        if missing == "error" and gaps.any():
            first = int(np.flatnonzero(gaps)[0])
            owner = columns[client][first]
            count = sum(
                bool(g) and type(o) is type(owner) and o == owner
                for g, o in zip(gaps, columns[client], strict=True)
            )
            raise DataError(
                f"Client {str(owner)!r}: column {column!r} lacks a value in {count} row(s), the "
                f"first is row {first + 1} (NA, none, null, ? and nan mean that, too); impute "
                "them or give missing='drop'."
            )
    keep = np.flatnonzero(~np.any(list(lacking.values()), axis=0))
    if not len(keep):
        raise DataError("No row of the table has all values; leave out columns that lack them.")
    return {c: [columns[c][i] for i in keep] for c in used}


def _encode_features(
    columns: Columns, wanted: list[str], categorical: Sequence[str], client: str
) -> Array:
    blocks = []
    for column in wanted:
        values = columns[column]
        if column in categorical:
            names = name_values(values, f"Column {column!r}")
            blocks.append(one_hot([names[name_key(v)] for v in values]))
            continue
        numbers = to_numbers(values)
        if numbers is None:
            odd = next(v for v in values if to_numbers([v]) is None)
            comma = isinstance(odd, str) and DECIMAL_COMMA.fullmatch(odd)
            cure = "list it in categorical, or leave it out of features."
            raise DataError(
                f"Column {column!r} is not numeric (it has {str(odd)!r}); "
                f"{explain_comma(str(odd)) if comma else cure}"
            )
        infinite = np.flatnonzero(~np.isfinite(numbers))
        if len(infinite):
            owner = columns[client][int(infinite[0])]
            raise DataError(
                f"Client {str(owner)!r}: column {column!r} holds {numbers[infinite[0]]} in "
                f"{len(infinite)} row(s); correct or remove them."
            )
        blocks.append(numbers[:, None])
    return np.hstack(blocks)


def _number_labels(
    values: Sequence[Any], where: str, task: str | None, classes: int | None
) -> tuple[Array, tuple[str, ...]]:
    """Return targets, and the class names when labels were numbered here."""
    numbers = to_numbers(values)
    whole = numbers is not None and all(v.is_integer() for v in numbers.tolist())
    if numbers is not None and (task == "regression" or (task is None and not whole)):
        return numbers, ()
    if task == "regression":
        odd = next(v for v in values if to_numbers([v]) is None)
        raise DataError(f"{where} is not numeric (it has {str(odd)!r}): cannot be a regression.")
    if classes is not None:
        if numbers is None:
            raise DataError(
                f"With classes={classes} the target column must hold labels 0..{classes - 1}, got "
                "text; leave classes out to have the labels numbered."
            )
        return numbers, ()
    if whole and numbers is not None:
        distinct = sorted({int(v) for v in numbers.tolist()})
        gaps = len(distinct) > 2 and distinct[-1] - distinct[0] >= len(distinct)
        if task is None and (len(distinct) > MANY or gaps):
            ask_task(where, distinct)
        code: dict[Any, int] = {label: k for k, label in enumerate(distinct)}
        return np.array([code[int(v)] for v in numbers.tolist()]), tuple(map(str, distinct))
    if task is None:
        numeric = [to_numbers([v]) is not None for v in values]
        refuse_numbers_in_text(where, [str(v) for v in values], numeric)
    names = name_values(values, where)
    titles = sorted(names.values())
    code = {title: k for k, title in enumerate(titles)}
    return np.array([code[names[name_key(v)]] for v in values]), tuple(titles)
