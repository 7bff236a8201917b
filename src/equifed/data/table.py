"""Your table: one column tells the client, one the target, others the features.

The order matters: rows are divided first, and the preparation is fitted on training rows alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from equifed.data.columns import (
    Columns,
    blank,
    find_categories,
    group_rows,
    look_at,
    naming,
    read_columns,
    read_moments,
    refuse_absent,
)
from equifed.data.fit import NOT_ASKED, ask_kinds, combine_targets, describe_target, fit_preparation
from equifed.data.infer import find_identifiers, find_misused_groups, refuse_single_rows
from equifed.data.preparation import NumberColumn, Preparation, Prepare, Target
from equifed.data.split import (
    DataError,
    DataWarning,
    Holdout,
    Labels,
    Rows,
    Task,
    check_task,
    divide_at_random,
    divide_by_time,
    divide_groups,
    list_owners,
    refuse,
    refuse_any,
    refuse_twice,
)

MOST_CHANCE = 0.5  # rows that are alike are no copies where chance explains more of them
UNKNOWN = "unknown"  # the group of rows that do not say theirs


@dataclass(frozen=True)
class TableRequest:
    """Which columns of a table are what, and how its rows are divided; see ``from_table``."""

    client: str
    target: str
    features: tuple[str, ...] | None = None
    split: str | None = None
    keep_together: str | None = None
    time: str | None = None
    task: Task | None = None
    classes: int | None = None
    holdout: Holdout = field(default_factory=Holdout)
    prepare: Prepare = field(default_factory=Prepare)
    report_by: str | None = None

    def __post_init__(self) -> None:
        check_task(self.task, self.classes)
        split, held = self.split is not None, self.holdout.wanted
        refuse_any(
            (split and (held or self.time), f"Column {self.split!r} says which split a row is in; "
             "leave out the test and validation fractions and time, or that column."),
            (self.keep_together and self.time, "keep_together= keeps the rows of one value in one "
             "split and time= holds out the latest rows: both at once cannot be kept; give one of "
             "them, or a column with the splits."),
            ((self.keep_together or self.time) and not (split or held), "keep_together= and time= "
             "tell how to hold out rows; give test= a fraction."),
        )  # fmt: skip

    @property
    def dividing(self) -> list[str]:
        """Columns that tell how rows are divided."""
        return [c for c in (self.split, self.keep_together, self.time) if c is not None]


@dataclass(frozen=True)
class TableRows:
    """The usable rows of a table, with client and split of each.

    ``features`` are the columns that features come from, ``numbers`` those of the rows in the
    table, and ``told`` says what became of rows that could not be used.
    """

    columns: Columns
    owners: Mapping[str, Rows]
    part: Labels
    request: TableRequest
    features: tuple[str, ...]
    numbers: Rows
    told: tuple[str, ...] = ()

    @classmethod
    def keep(cls, columns: Columns, features: Sequence[str], request: TableRequest) -> Self:
        """Return the rows that can be used, divided."""
        kept, numbers, told = keep_rows(columns, features, request)
        owners = group_rows(kept[request.client], f"Column {request.client!r}")
        part = divide_rows(kept, owners, request)
        return cls(kept, owners, part, request, tuple(features), numbers, tuple(told))

    def take_split(self, names: Iterable[str], split: str) -> dict[str, Columns]:
        """Return columns of every client's rows of one split."""
        used = {who: rows[self.part[rows] == split] for who, rows in self.owners.items()}
        return {who: self.columns.take(rows, list(names)) for who, rows in used.items()}

    def make_clients(self, fitted: Preparation) -> dict[str, Any]:
        """Return the samples of all clients, for ``Federation.from_clients``."""
        target, groups = fitted.target, self.request.report_by
        names = {*(column.name for column in fitted.columns), target.name, groups or target.name}
        held: dict[str, dict[str, Any]] = {"train": {}, "validation": {}, "test": {}}
        for label, made in held.items():
            for client, cells in self.take_split(names, label).items():
                if not cells.rows:
                    continue
                with naming(client):
                    made[client] = fitted.apply(cells, client), target.encode(cells[target.name])
                if groups is not None:
                    told = [UNKNOWN if group is None else group for group in cells[groups]]
                    made[client] = (*made[client], told)
        classes = target.classes
        return {
            "clients": held["train"],
            "validation": held["validation"] or None,
            "test": held["test"] or None,
            "task": "regression" if classes is None else "classification",
            "classes": None if classes is None else len(classes),
            "class_names": classes or (),
        }

    def find_remarks(self) -> list[str]:
        """Name clients with rows enough but none held out, and a misused ``report_by``."""
        found, holdout = [], self.request.holdout
        for k, label in enumerate(("validation", "test")):
            lacking = [
                name
                for name, rows in self.owners.items()
                if holdout.counts(len(rows))[k] and label not in self.part[rows]
            ]
            if lacking:
                found.append(
                    f"client(s) {_shorten(lacking)} have no {label} rows: their rows of one group "
                    "or one time are too many to hold some out"
                )
        request = self.request
        return found + find_misused_groups(self.columns, request.report_by, request.keep_together)

    def find_duplicates(self, fitted: Preparation) -> list[str]:
        """Say how many held-out rows equal a training row in all features and the target."""
        train = self.part == "train"
        cells = [self.columns[c.name] for c in (*fitted.columns, fitted.target)]
        keys: list[Hashable] = list(zip(*cells, strict=True))
        try:
            trained = {keys[row]: row for row in np.flatnonzero(train)[::-1].tolist()}
            held = [r for r in np.flatnonzero(~train).tolist() if keys[r] in trained]
        except TypeError:  # a list in a cell, say: preparing the rows says whose
            return []
        chance = count_chances(cells, train) if held else 0.0
        if chance > MOST_CHANCE or not held:
            return []
        whose = _shorten(list(dict.fromkeys(list_owners(self.owners)[held])))
        pairs = ((self.numbers[r], self.numbers[trained[keys[r]]]) for r in held[:3])
        shown = ", ".join(f"row {here} as row {there}" for here, there in pairs)
        return [
            f"{len(held)} held-out row(s) are duplicates of a training row in all features and the "
            f"target ({shown}{', ...' if len(held) > 3 else ''}; client(s) {whose}); if they are "
            "the same cases, drop one of each, or give keep_together= the column that identifies "
            "cases"
            + (f" (about {round(chance * len(held))} would be alike by chance)." if chance else ".")
        ]


def read_table(
    table: Any | str | Path, request: TableRequest
) -> tuple[dict[str, Any], Preparation, list[str], str]:
    """Return what a table gives to ``Federation.from_clients``, how, what is odd, and the split."""
    client, target = request.client, request.target
    columns = blank_texts(read_columns(table), request)
    total = columns.rows
    if request.split is not None and request.split not in columns:
        columns = Columns({**columns, request.split: read_split(request.split, total)})
    wanted = choose_features(columns, request)
    ids = {} if request.features is not None else find_identifiers(columns, wanted)
    wanted = [name for name in wanted if name not in ids]
    if not wanted:
        raise DataError(f"No column is left to predict from ({_list_reasons(ids)}).")
    rows = TableRows.keep(columns, wanted, request)
    rest = [c for c in columns if c not in {*wanted, client, target, *ids}]
    coded = {*find_categories(table), *request.prepare.listed}
    asked = ask_kinds(
        wanted,
        _fit_target(rows),
        request.prepare,
        client=client,
        categories=list(coded),
        choosy=request.features is None,
        left_out={**dict.fromkeys(rest, NOT_ASKED), **ids},
    )
    fitted = fit_preparation(rows.take_split([*wanted, target], "train"), asked)
    told = [*rows.told, *_tell_columns(fitted, rows.columns, ids, coded)]
    told += [*rows.find_duplicates(fitted), *rows.find_remarks()]
    for sentence in told:
        if request.prepare.missing != "drop" or "lack a value" not in sentence:  # as asked for
            warnings.warn(sentence[0].upper() + sentence[1:], DataWarning, stacklevel=3)
    divided = np.full(total, "", dtype=rows.part.dtype)
    divided[rows.numbers - 1] = rows.part
    return rows.make_clients(fitted), fitted, told, write_split(divided)


def write_split(divided: Labels) -> str:
    """Return the text of a file that says which split each row of a table is in, if in any.

    >>> print(write_split(np.array(["train", "", "test"])), end="")
    row,split
    1,train
    2,
    3,test
    """
    return "row,split\n" + "".join(f"{k},{label}\n" for k, label in enumerate(divided, start=1))


def read_split(path: str, rows: int) -> list[str]:
    """Return the split of every row from such a file; rows left out count as training rows."""
    refuse_any((not Path(path).is_file(), f"split={path!r} is neither a column of the table nor a "
                "file that a run has written."))  # fmt: skip
    columns = read_columns(Path(path))
    refuse_absent(["split"], columns)
    if columns.rows != rows:
        raise DataError(
            f"{path} divides a table of {columns.rows} rows, this one has {rows}; give the table "
            "that it was written for."
        )
    return ["train" if label is None else str(label) for label in columns["split"]]


def blank_texts(columns: Columns, request: TableRequest) -> Columns:
    """Return the columns with gaps for text where only numbers are wanted."""
    refuse_absent(request.prepare.numeric, columns)
    numeric = {name: blank(columns[name], "texts") for name in request.prepare.numeric}
    return Columns({**columns, **numeric})


def _list_reasons(reasons: Mapping[str, str]) -> str:
    return ", ".join(f"{name!r} ({reason})" for name, reason in reasons.items())


def _tell_columns(
    fitted: Preparation, columns: Columns, ids: Mapping[str, str], named: Container[str]
) -> list[str]:
    """Say which columns are left out, and what columns with numbers and text are taken for."""
    told = [
        f"column {name!r} is left out: {reason}"
        + (" (list it in categorical to use it)" if "identifier" in reason else "")
        for name, reason in fitted.left_out
        if reason != NOT_ASKED and name not in ids
    ]
    if ids:
        told.append(f"left out: {_list_reasons(ids)}; name them in features=[...] to use them")
    for column in fitted.columns:
        if isinstance(column, NumberColumn):
            if column.gaps == "words":
                count = look_at(columns[column.name]).mixture["words"]
                told.append(
                    f"column {column.name!r} is taken as numbers, {count} cell(s) with words such "
                    "as 'unknown' as gaps; list it in categorical to make each value a category"
                )
        elif column.name not in named and column.is_mixed:
            told.append(
                f"column {column.name!r} holds numbers and text, e.g. "
                f"{' and '.join(map(repr, column.categories[:3]))}, and is taken as a category; "
                "list it in numeric to make gaps of the text, or in categorical to say so"
            )
    return told


def choose_features(columns: Columns, request: TableRequest) -> list[str]:
    """Return the feature columns, or say which columns are not there or used twice."""
    client, prepare = request.client, request.prepare
    special = [client, request.target, *request.dividing]
    rest = [c for c in columns if c not in special]
    wanted = rest if request.features is None else [str(c) for c in request.features]
    listed = [*prepare.listed, *prepare.numeric]
    refuse_absent([*special, *wanted, *listed, request.report_by or client], columns)
    if not wanted:
        raise DataError("The table has no feature columns besides client, target and split.")
    used = [*special, *(c for c in wanted if c != client)]  # the client's name may be a feature
    message = "Column {!r} is used twice, as client, target, split or feature; use it once."
    refuse_twice(used, message)
    refuse(
        (c for c in listed if c not in wanted),
        lambda c: (
            f"Column {c!r} is in {'numeric' if c in prepare.numeric else 'categorical'} but not in "
            "features; add it there."
        ),
    )
    return wanted


def keep_rows(
    columns: Columns, wanted: Sequence[str], request: TableRequest
) -> tuple[Columns, Rows, list[str]]:
    """Return the rows that can be used, their numbers in the table, and what was left out."""
    rule, client = request.prepare.missing, request.client
    needed = [client, request.target, *(wanted if rule in ("error", "drop") else [])]
    gaps = {
        name: np.flatnonzero([v is None for v in columns[name]])
        for name in (*request.dividing, *needed)
    }
    refuse(
        (name for name in request.dividing if len(gaps[name])),
        lambda name: (
            f"Column {name!r} lacks a value in {len(gaps[name])} row(s), the first is row "
            f"{gaps[name][0] + 1}; it defines how rows are divided: fill it in or leave these rows "
            "out."
        ),
    )
    for column in needed if rule == "error" else ():
        whose = [columns[client][r] for r in gaps[column]]
        if whose:
            raise DataError(
                f"Client {str(whose[0])!r}: column {column!r} lacks a value in "
                f"{whose.count(whose[0])} row(s), the first is row {gaps[column][0] + 1} (NA, "
                "none, null, ? and nan mean that, too); impute them or give missing='indicator', "
                "'mean' or 'drop'.",
                f"its column {column!r:.60} lacks values",
            )
    lacking = np.unique(np.concatenate([gaps[c] for c in needed]))
    told = [
        f"{len(gaps[name])} row(s) without a value in {name!r} are left out"
        for name in needed[:2]
        if len(gaps[name])
    ]
    if rule == "drop" and len(lacking):
        told = [f"{len(lacking)} of {columns.rows} rows lack a value and are left out"]
    keep = np.setdiff1d(np.arange(columns.rows), lacking)
    if not len(keep):
        raise DataError("No row of the table has all values; leave out columns that lack them.")
    kept = columns.take(keep)
    lost = {str(v) for v in columns[client] if v is not None} - {str(v) for v in kept[client]}
    if lost:
        told.append(f"client(s) {', '.join(sorted(lost)[:5])} have no row left")
    return kept, keep + 1, told


def divide_rows(columns: Columns, owners: Mapping[str, Rows], request: TableRequest) -> Labels:
    """Return the split that each row belongs to."""
    whole, split = request.keep_together, request.split
    groups = {} if whole is None else group_rows(columns[whole], f"Column {whole!r}")
    if split is None and whole is not None:
        return divide_groups(owners, groups, request.holdout)
    if request.time is not None:
        moments = read_moments(request.time, columns[request.time])
        return divide_by_time(owners, moments, request.holdout)
    if split is None:
        return divide_at_random(owners, request.holdout)
    part = np.array([str(v) for v in columns[split]])
    refuse(
        sorted(set(part.tolist()) - {"train", "validation", "test"}),
        lambda word: f"Column {split!r} must say train, validation or test, got {word!r}.",
    )
    refuse(
        (name for name, rows in groups.items() if len(set(part[rows].tolist())) > 1),
        lambda name: (
            f"Rows of {name!r} in column {whole!r} are in several splits; put all of them into "
            "one, or leave keep_together out."
        ),
    )
    return part


def count_chances(cells: Sequence[Sequence[Any]], trained: NDArray[np.bool_]) -> float:
    """Return which share of the equal pairs of held-out and training rows is there by chance.

    Of independent rows that are alike in all columns but one, a share is alike in that, too: at
    least that of any two rows. Copies are alike in it always.

    >>> rng = np.random.default_rng(0)
    >>> trained, copies = np.arange(400) < 300, np.tile(rng.random((2, 100)), 4)
    >>> count_chances(rng.integers(0, 3, (3, 400)).tolist(), trained) > 0.8
    True
    >>> count_chances(copies.tolist(), trained)
    0.0
    """
    draw, marks, alike = np.random.default_rng(0), [], []
    for column in cells:
        numbers: dict[Any, int] = {}
        codes = np.array([numbers.setdefault(v, len(numbers)) for v in column])
        count = np.bincount(codes)
        alike.append(float(count @ (count - 1)) / (len(codes) * (len(codes) - 1)))  # any two rows
        marks.append(draw.integers(0, 2**63, len(codes), dtype=np.uint64)[codes])
    whole = np.asarray(np.sum(marks, axis=0, dtype=np.uint64))
    equal = _count_pairs(whole, trained)
    unlike = [_count_pairs(whole - mark, trained) - equal for mark in marks]
    found = [pairs * p / (1 - p) for pairs, p in zip(unlike, alike, strict=True) if p < 1]
    return min(1.0, max(found, default=0.0) / max(equal, 1.0))


def _count_pairs(marks: NDArray[np.uint64], trained: NDArray[np.bool_]) -> float:
    """Return how many pairs of a training row and another one have the same mark."""
    _, place = np.unique(marks, return_inverse=True)
    size = int(place.max()) + 1
    return float(
        np.bincount(place[trained], minlength=size) @ np.bincount(place[~trained], minlength=size)
    )


def _shorten(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _fit_target(rows: TableRows) -> Target:
    name, task = rows.request.target, rows.request.task
    values, answers = rows.columns[name], {}
    for client, mine in rows.owners.items():
        with naming(client):
            answers[client] = describe_target(name, [values[r] for r in mine], task)
    found = combine_targets(name, answers, task, rows.request.classes)
    if found.classes is not None:
        refuse_single_rows(name, look_at(values))
    return found
