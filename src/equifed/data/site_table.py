"""One site's table in a fit across sites: a file, its columns renamed, and its answers.

What :func:`equifed.data.table.read_table` does with all rows is done with those of one site, in
the same order and with the same draws. Nothing but answers to questions leaves a site.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from equifed.data.columns import Columns, find_categories, group_rows, naming, read_columns
from equifed.data.federation import Federation
from equifed.data.fit import Question, ask_kinds, describe_rows, describe_target
from equifed.data.preparation import NumberColumn, Preparation, Prepare, Target
from equifed.data.split import MANY, DataError, refuse, refuse_any, refuse_twice
from equifed.data.table import TableRequest, TableRows, blank_texts, choose_features

KINDS = ("numbers", "texts", "dates")

STRETCH = 50.0  # deviations of all rows that a site's rows lie from the mean (root of mean square)


@dataclass(frozen=True, kw_only=True)
class TableSettings(TableRequest):
    """What all sites agreed on: ``[data]`` of an app whose sites give tables.

    Settings without a remark are those of :meth:`equifed.Federation.from_table`. The preparation
    is fitted on the training rows of all sites, by sums.
    """

    client: str = "client"  # files need not have this column
    class_names: tuple[str, ...] | None = None  # all classes in order; other labels are refused
    units: dict[str, str] | None = None  # of columns; a site whose file says another is refused
    dtype: Literal["float32", "float64"] = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self.class_names
        odd = [c for c, unit in (self.units or {}).items() if not isinstance(unit, str)]
        values = self.task == "regression" or self.classes is not None
        refuse_any(
            (self.prepare.per_client, "prepare.per_client reveals every single site's scales to "
             "all; leave it out."),
            (names is not None and (values or len(names) < 2), "class_names are two or more, and "
             "go with neither classes nor a regression."),
            (odd, f"units: the unit of {', '.join(map(repr, odd))} must be text.")
        )  # fmt: skip


@dataclass(frozen=True)
class SiteTable(TableRows):
    """The usable rows of one client's table, by the column names that all clients agreed on."""

    @property
    def name(self) -> str:
        """The client."""
        return next(iter(self.owners))

    @classmethod
    def read(
        cls,
        table: Any | str | Path,
        name: str,
        request: TableRequest,
        titles: Mapping[str, str] | None = None,
    ) -> Self:
        """Read a table as :meth:`equifed.Federation.from_table` takes it.

        A column with the client's name is not needed, and refused if it names others; ``titles``
        maps agreed column names to the titles in this table, where they differ.
        """
        with naming(name):
            columns = _rename(_read_file(table), titles or {})
            _refuse_absent(columns, request)
            columns = blank_texts(_name_owner(columns, name, request.client), request)
            made = cls.keep(columns, choose_features(columns, request), request)
        if "train" not in made.part:
            no_rows = "has no training rows; give it some."
            raise DataError(f"Client {name!r} {no_rows}", f"it {no_rows}")
        agreed = {*request.prepare.listed, *request.prepare.numeric}
        refuse(
            (c for c in find_categories(table) if c in made.features and c not in agreed),
            lambda c: (
                f"Client {name!r}: the data frame says that {c!r} is a category, which other sites "
                "do not know; list such columns in prepare.categorical, for all."
            ),
        )
        return replace(made, told=(*made.told, *made.find_remarks()))

    @property
    def sizes(self) -> dict[str, int]:
        """Rows of every split there is."""
        counted = {k: int((self.part == k).sum()) for k in ("train", "validation", "test")}
        return {label: count for label, count in counted.items() if count}

    @property
    def rest(self) -> list[str]:
        """Columns that tell how rows are divided, in the table's order."""
        return [c for c in self.columns if c in self.request.dividing]

    def describe_kinds(self) -> list[list[str]]:
        """Return every feature column with its kind: numbers, texts, dates or empty."""
        asked = ask_kinds(self.features, Target(self.request.target), self.request.prepare)
        found = describe_rows(self.take(self.features, "train"), asked, self.name)
        return [[c, next((k for k in KINDS if told[k]), "empty")] for c, told in found.items()]

    def describe_target(self) -> dict[str, Any]:
        """Return of which kind the targets are, and which labels there are.

        Of whole numbers that may be values, no more are told than are needed to ask what they are.
        """
        request = self.request
        with naming(self.name):
            told = describe_target(request.target, self.columns[request.target], request.task)
        if told["whole"] and request.task is None and request.classes is None:
            told["labels"] = told["labels"][: MANY + 1]
        return told

    def answer(self, asked: Question) -> dict[str, Any]:
        """Answer a question of a fit from the training rows, about agreed columns alone."""
        agreed = [*self.features]
        if asked["stage"] in ("sums", "squares") and self.request.prepare.target_scale is not None:
            agreed.append(self.request.target)
        refuse(
            (c for c in asked["columns"] if c not in agreed),
            lambda c: f"Client {self.name!r}: {c!r} is not a feature that was agreed.",
        )
        return describe_rows(self.take(asked["columns"], "train"), asked, self.name)

    def take(self, names: Iterable[str], split: str) -> Columns:
        """Return columns of the rows of one split."""
        return self.take_split(names, split)[self.name]

    def prepare(self, fitted: Preparation, dtype: str = "float32") -> Federation:
        """Return the federation of this client alone, its rows prepared."""
        about = {"preparation": fitted.describe()}
        made = Federation.from_clients(**self.make_clients(fitted), dtype=dtype, source=about)
        return replace(made, preparation=fitted)


def find_stretched(made: Federation, fitted: Preparation, agreed: Prepare) -> str:
    """Name the column that a preparation stretches as none does that was fitted to such rows.

    Whoever runs the server says what the preparation is: stretched rows would make a long model of
    a short one, and a stretched target large losses of small ones, which rounding hides no more.
    """
    train = made.train
    for name, values in zip(fitted.feature_names, train.inputs.T, strict=True):
        if agreed.scale is not None and not np.sqrt(np.mean(np.square(values))) <= STRETCH:
            return name
    plain = [c for c in fitted.columns if isinstance(c, NumberColumn) and agreed.scale is None]
    moved = [c.name for c in plain if (c.centre, c.scale) != (0.0, 1.0)]
    target = fitted.target
    if target.classes is None and agreed.target_scale is None and target.is_scaled:
        moved.append(target.name)
    elif target.classes is None and agreed.target_scale is not None:
        moved += [target.name] * (not np.sqrt(np.mean(np.square(train.targets))) <= STRETCH)
    return moved[0] if moved else ""


def _read_file(table: Any) -> Columns:
    try:
        return read_columns(table)
    except DataError as error:
        told = "its file is not a table that begins with a line of column names"
        raise DataError(
            f"{error} Every column needs a name of its own in the first line.", told
        ) from error


def _refuse_absent(columns: Columns, request: TableRequest) -> None:
    """Refuse a table without a column that was agreed on."""
    agreed = [request.target, *request.dividing, *(request.features or ())]
    absent = [c for c in agreed if c not in columns]
    cure = (
        "does the file begin with a line of column names?"
        if len(absent) == len(agreed)
        else "[columns] in site.toml says what agreed columns are called in the file"
    )
    for column in absent:
        there = f"it has {', '.join(columns)}"
        what = f"no column {column!r:.60}"
        raise DataError(f"the table has {what}; {there}; {cure}", f"its table has {what}; {cure}")


def _rename(columns: Columns, titles: Mapping[str, str]) -> Columns:
    """Return the columns under their agreed names, in the order of the table."""
    for agreed, title in titles.items():
        refuse_any(
            (title not in columns, f"The table has no column {title!r}, which the mapping says is "
             f"{agreed!r}; it has {', '.join(columns)}."),
            (agreed in columns and agreed not in titles.values(), f"The table has a column "
             f"{agreed!r}, and the mapping says that {title!r} is it; drop one of the two."),
        )  # fmt: skip
    refuse_twice([*titles.values()], "The mapping names the column {!r} twice; use it once.")
    agreed_of = {title: agreed for agreed, title in titles.items()}
    return Columns({agreed_of.get(title, title): values for title, values in columns.items()})


def _name_owner(columns: Columns, name: str, client: str) -> Columns:
    """Return the columns with one that names the client, whether or not the table has it."""
    if client not in columns:
        return Columns({client: [name] * columns.rows, **columns})
    given = [value for value in columns[client] if value is not None]
    refuse(
        (who for who in group_rows(given, f"Column {client!r}") if who != name),
        lambda who: (
            f"Column {client!r} says {who!r}, but this site is {name!r}; give the site's own rows "
            "alone, or set its name."
        ),
    )
    return Columns({**columns, client: [None if v is None else name for v in columns[client]]})
