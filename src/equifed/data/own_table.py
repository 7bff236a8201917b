"""Bring your own table: one column tells the client, one the target, others the features.

The order matters: rows are divided first, and the preparation is fitted on training rows alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equifed.data.columns import Columns, find_categories, group_rows, read_columns
from equifed.data.combine_preparation import Question
from equifed.data.fit_preparation import ask_kinds, fit_preparation
from equifed.data.fit_target import combine_targets, describe_target
from equifed.data.guess import find_misused_groups, find_numbered_rows
from equifed.data.holdout import (
    Holdout,
    Labels,
    divide_at_random,
    divide_by_time,
    divide_groups,
    find_duplicates,
    read_moments,
)
from equifed.data.preparation import Preparation, Target
from equifed.data.prepare import Prepare
from equifed.data.prepared_columns import name_client
from equifed.data.remarks import refuse_single_rows
from equifed.data.split import DataError, DataWarning, Rows
from equifed.data.targets import check_task

UNKNOWN = "unknown"
"""The group of rows that do not say theirs."""


@dataclass(frozen=True)
class TableRequest:
    """Which columns of a table are what, and how its rows are divided; see ``from_table``."""

    client: str
    target: str
    features: tuple[str, ...] | None = None
    split: str | None = None
    group: str | None = None
    time: str | None = None
    task: str | None = None
    classes: int | None = None
    unit: str | None = None
    holdout: Holdout = field(default_factory=Holdout)
    prepare: Prepare = field(default_factory=Prepare)
    groups: str | None = None

    def __post_init__(self) -> None:
        check_task(self.task, self.classes)
        if self.split is not None and (self.holdout.wanted or self.time is not None):
            raise DataError(
                f"Column {self.split!r} says which split a row is in; leave out the test and "
                "validation fractions and time, or that column."
            )
        if self.group is not None and self.time is not None:
            raise DataError(
                "group= keeps groups whole and time= holds out the latest rows: both at once "
                "cannot be kept; give one of them, or the splits in a column (split=)."
            )
        if (self.group or self.time) and self.split is None and not self.holdout.wanted:
            raise DataError("group= and time= tell how to hold out rows; give test= a fraction.")

    @property
    def special(self) -> list[str]:
        """Columns that are no features, unless a feature is asked for by the client's name."""
        more = (self.split, self.group, self.time)
        return [str(c) for c in (self.client, self.target, *more) if c is not None]


def read_table(table: Any | str | Path, request: TableRequest) -> dict[str, Any]:
    """Return what a table gives to ``Federation.from_clients``, and its preparation."""
    columns = read_columns(table)
    wanted = choose_features(columns, request)
    columns, numbers, told = keep_rows(columns, wanted, request)
    client, target = request.special[:2]
    owners = group_rows(columns[client], f"Column {client!r}")
    part = divide_rows(columns, owners, request)
    aim = _fit_target(columns[target], owners, request)
    rest = [c for c in columns if c not in {*wanted, client, target}]
    asked = ask_kinds(
        wanted,
        aim,
        request.prepare,
        client=client,
        categories=find_categories(table),
        choosy=request.features is None,
        left_out=rest,
    )
    fitted = _fit(columns, owners, part, asked)
    left = [(name, reason) for name, reason in fitted.left_out if name not in rest]
    told += [f"column {name!r} is left out: {reason}" for name, reason in left]
    same = find_duplicates(
        part, owners, [columns[c] for c in [*(x.name for x in fitted.columns), target]], numbers
    )
    told += [same] if same else []
    if request.features is None:
        told += find_numbered_rows(columns, [x.name for x in fitted.columns])
    told += find_untested(owners, part, request.holdout)
    told += find_misused_groups(columns, request.groups, request.group)
    for sentence in told:
        if request.prepare.missing != "drop" or "lack a value" not in sentence:  # as asked for
            warnings.warn(sentence[0].upper() + sentence[1:], DataWarning, stacklevel=3)
    clients = prepare_clients(columns, owners, part, fitted, request.groups)
    return {**clients, "preparation": fitted, "told": told}


def choose_features(columns: Columns, request: TableRequest) -> list[str]:
    """Return the feature columns, or say which columns are not there or used twice."""
    special, coded = request.special, request.prepare.categorical
    listed = [] if coded == "auto" else list(coded)
    if request.features is None:
        wanted = [c for c in columns if c not in special]
    else:
        wanted = [str(c) for c in request.features]
    told_by = [] if request.groups is None else [request.groups]
    absent = [c for c in [*special, *wanted, *listed, *told_by] if c not in columns]
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
    stray = [c for c in listed if c not in wanted]
    if stray:
        raise DataError(f"Column {stray[0]!r} is in categorical but not in features; add it there.")
    return wanted


def keep_rows(
    columns: Columns, wanted: list[str], request: TableRequest
) -> tuple[Columns, NDArray[np.int64], list[str]]:
    """Return the rows that can be used, their numbers in the table, and what was left out."""
    rule, told = request.prepare.missing, []
    lacking = {c: np.array([v is None for v in columns[c]], dtype=bool) for c in columns}
    for name in request.special[2:]:
        if lacking[name].any():
            first = int(np.flatnonzero(lacking[name])[0]) + 1
            raise DataError(
                f"Column {name!r} lacks a value in {lacking[name].sum()} row(s), the first is row "
                f"{first}; it tells how rows are divided: fill it in or leave these rows out."
            )
    needed = [*request.special[:2], *(wanted if rule in ("error", "drop") else [])]
    if rule == "error":
        _refuse_gaps(columns, needed, lacking)
    for name in request.special[:2]:
        if lacking[name].any():
            told.append(f"{lacking[name].sum()} row(s) without a value in {name!r} are left out")
    gaps = np.any([lacking[c] for c in needed], axis=0)
    if rule == "drop" and gaps.any():
        told = [f"{gaps.sum()} of {len(gaps)} rows lack a value and are left out"]
    keep = np.flatnonzero(~gaps)
    if not len(keep):
        raise DataError("No row of the table has all values; leave out columns that lack them.")
    client = columns[request.special[0]]
    lost = {str(v) for v in client if v is not None} - {str(client[i]) for i in keep}
    if lost:
        told.append(f"client(s) {', '.join(sorted(lost)[:5])} have no row left")
    return {c: [columns[c][i] for i in keep] for c in columns}, keep + 1, told


def _refuse_gaps(columns: Columns, needed: list[str], lacking: Mapping[str, Any]) -> None:
    for column in needed:
        gaps, client = lacking[column], columns[needed[0]]
        if gaps.any():
            first = int(np.flatnonzero(gaps)[0])
            owner = client[first]
            count = sum(
                bool(g) and type(o) is type(owner) and o == owner
                for g, o in zip(gaps, client, strict=True)
            )
            raise DataError(
                f"Client {str(owner)!r}: column {column!r} lacks a value in {count} row(s), the "
                f"first is row {first + 1} (NA, none, null, ? and nan mean that, too); impute "
                "them or give missing='indicator', 'mean', 'median' or 'drop'."
            )


def divide_rows(columns: Columns, owners: Mapping[str, Rows], request: TableRequest) -> Labels:
    """Return the split that each row belongs to."""
    rows, holdout = len(columns[request.special[0]]), request.holdout
    if request.split is not None:
        part = np.array([str(v) for v in columns[str(request.split)]])
        illegal = sorted(set(part.tolist()) - {"train", "validation", "test"})
        if illegal:
            raise DataError(
                f"Column {request.split!r} must say train, validation or test, got {illegal[0]!r}."
            )
        if request.group is not None:
            _refuse_divided_groups(columns[str(request.group)], part, str(request.group))
        return part
    if request.group is not None:
        return divide_groups(owners, columns[str(request.group)], holdout)
    if request.time is not None:
        moments = read_moments(str(request.time), columns[str(request.time)])
        return divide_by_time(owners, moments, holdout)
    return divide_at_random(owners, holdout) if holdout.wanted else np.full(rows, "train")


def find_untested(owners: Mapping[str, Rows], part: Labels, holdout: Holdout) -> list[str]:
    """Name the clients with rows enough, but none held out: groups or times that are too large."""
    told = []
    for k, label in enumerate(("validation", "test")):
        lacking = [
            name
            for name, rows in owners.items()
            if holdout.counts(len(rows))[k] and label not in part[rows]
        ]
        if lacking:
            named = ", ".join(lacking[:5]) + (", ..." if len(lacking) > 5 else "")
            told.append(
                f"client(s) {named} have no {label} rows: their rows of one group or one time are "
                "too many to hold some out"
            )
    return told


def _refuse_divided_groups(groups: Sequence[Any], part: Labels, name: str) -> None:
    for group, rows in group_rows(groups).items():
        if len(set(part[rows].tolist())) > 1:
            raise DataError(
                f"Group {group!r} of column {name!r} has rows in several splits; put all of them "
                "into one, or leave group out."
            )


def _fit_target(values: list[Any], owners: Mapping[str, Rows], request: TableRequest) -> Target:
    name, answers = request.special[1], {}
    for client, rows in owners.items():
        mine = [values[r] for r in rows]
        try:
            answers[client] = describe_target(name, mine, request.task)
        except DataError as error:
            raise DataError(name_client(client, str(error))) from None
    found = combine_targets(name, answers, request.task, request.classes, request.unit)
    if found.classes is not None:
        refuse_single_rows(name, values)
    return found


def _fit(
    columns: Columns, owners: Mapping[str, Rows], part: Labels, asked: Question
) -> Preparation:
    """Return the preparation, fitted on training rows."""
    rows = {}
    for client, mine in owners.items():
        train = mine[part[mine] == "train"].tolist()
        rows[client] = {name: [columns[name][r] for r in train] for name in asked["columns"]}
    return fit_preparation(rows, asked)


def prepare_clients(
    columns: Columns,
    owners: Mapping[str, Rows],
    part: Labels,
    fitted: Preparation,
    groups: str | None,
) -> dict[str, Any]:
    """Return the samples of all clients, for ``Federation.from_clients``."""
    names = [column.name for column in fitted.columns]

    def prepare(label: str) -> dict[str, tuple[Any, ...]]:
        out: dict[str, tuple[Any, ...]] = {}
        for client, mine in owners.items():
            rows = mine[part[mine] == label].tolist()
            if not rows:
                continue
            table = {c: [columns[c][r] for r in rows] for c in names}
            targets = [columns[fitted.target.name][r] for r in rows]
            try:
                out[client] = (fitted.apply(table, client), fitted.encode_target(targets))
                if groups is not None:  # a gap is a group of its own
                    told = (columns[groups][r] for r in rows)
                    out[client] += ([UNKNOWN if g is None else g for g in told],)
            except DataError as error:
                raise DataError(name_client(client, str(error))) from None
        return out

    train = prepare("train")
    absent = [client for client in owners if client not in train]
    if absent:
        raise DataError(
            f"Client {absent[0]!r} has no training samples; remove it, give it samples, or hold "
            "out less."
        )
    classes = fitted.target.classes
    return {
        "clients": train,
        "validation": prepare("validation") or None,
        "test": prepare("test") or None,
        "task": "regression" if classes is None else "classification",
        "classes": None if classes is None else len(classes),
        "class_names": classes or (),
    }
