"""What is done to the columns of a table before a model sees them, as one value.

A :class:`Preparation` belongs to the data and to the model: it is fitted on training rows
(:mod:`equifed.data.fit_preparation`), travels with the federation, lies in the run folder, and
prepares new rows in the same way.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from equifed.data.columns import clean, group_rows, read_columns, to_numbers
from equifed.data.prepared_columns import (
    CategoryColumn,
    NumberColumn,
    name_category,
    read_numbers,
)
from equifed.data.split import DataError

Scale: TypeAlias = Literal["standard", "robust"] | None
Missing: TypeAlias = Literal["mean", "median", "indicator", "drop", "error"]

FORMAT = 1
NUMBER = re.compile(r"-?\d+")


@dataclass(frozen=True)
class Target:
    """The column to predict: its classes in order, or None for a regression, and its unit."""

    name: str
    classes: tuple[str, ...] | None = None
    unit: str | None = None

    def name_labels(self, values: Sequence[Any]) -> list[str]:
        """Return labels as class names are written: numbers alike, however they were typed.

        >>> Target("y", ("-1", "1")).name_labels(["+1", 1.0, "01", "x"])
        ['1', '1', '1', 'x']
        """
        if not all(NUMBER.fullmatch(name) for name in self.classes or ()):
            return [name_category(v) for v in values]
        numbers = [to_numbers([v]) for v in values]
        return [
            str(int(n[0])) if n is not None and float(n[0]).is_integer() else name_category(v)
            for v, n in zip(values, numbers, strict=True)
        ]


@dataclass(frozen=True)
class Preparation:
    """How a table becomes features and targets; fitted on training rows, the same for new ones.

    Parameters
    ----------
    columns : tuple of NumberColumn or CategoryColumn
        In the order of the features.
    target : Target
        What is predicted.
    client : str, optional
        Title of the column that says whose row it is.
    scale : {"standard", "robust", None}
        The rule that gave centres and scales: mean and standard deviation, or median and distance
        of the quartiles.
    missing : {"mean", "median", "indicator", "drop", "error"}
        The rule for gaps: filled with the mean (``indicator``: and marked by a 0/1 column where
        training rows had gaps) or the median. With the last two, a gap in a new row is refused.
    left_out : tuple of (str, str)
        Columns that the training table had and no feature comes from, and why.

    Examples
    --------
    >>> age = NumberColumn("age", fill=50.0, centre=50.0, scale=10.0)
    >>> arm = CategoryColumn("arm", ("a", "b"))
    >>> prepared = Preparation((age, arm), Target("ill", ("no", "yes")), missing="mean")
    >>> prepared.feature_names
    ('age', 'arm=a', 'arm=b')
    >>> prepared.apply({"arm": ["b", "c"], "age": [60, None]})
    array([[1., 0., 1.],
           [0., 0., 0.]])
    >>> Preparation.from_json(prepared.to_json()) == prepared
    True
    """

    columns: tuple[NumberColumn | CategoryColumn, ...]
    target: Target
    client: str | None = None
    scale: Scale = None
    missing: Missing = "error"
    left_out: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        names = self.feature_names
        twice = next((name for k, name in enumerate(names) if name in names[:k]), None)
        if twice is not None:
            raise DataError(f"Two features would be called {twice!r}; rename a column.")

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features, in order."""
        return tuple(title for column in self.columns for title in column.titles)

    @property
    def by_client(self) -> bool:
        """Whether clients have centres and scales of their own."""
        return any(isinstance(c, NumberColumn) and c.by_client for c in self.columns)

    @property
    def is_fitted(self) -> bool:
        """Whether numbers of the training rows are in it: a fill value, a centre, a scale."""
        return self.scale is not None or self.missing in ("mean", "median", "indicator")

    def apply(
        self,
        table: Any,
        client: str | None = None,
        *,
        extra: Literal["error", "ignore"] = "error",
    ) -> NDArray[np.float64]:
        """Return the features of a table's rows, in order, shape (rows, features).

        Parameters
        ----------
        table : DataFrame, mapping of columns, path or pyarrow.Table
            Columns are matched by name, in any order. Beside the features it may hold the target,
            the client, and what was left out in training.
        client : str, optional
            Whose rows they are, where clients have scales of their own; by default the table's
            client column says it.
        extra : {"error", "ignore"}
            What to do with columns that the training table did not have.
        """
        columns = read_columns(table)
        self._check_columns(columns, extra)
        owners = self._find_owners(columns, client)
        if self.missing in ("drop", "error"):
            self._refuse_gaps(columns)
        return np.hstack([column.encode(columns[column.name], owners) for column in self.columns])

    def encode_target(self, values: Any) -> NDArray[Any]:
        """Return labels 0..K - 1 (int64) of class names, or values (float64) of a regression."""
        cells = [clean(v) for v in (values.tolist() if hasattr(values, "tolist") else values)]
        where = f"Column {self.target.name!r}"
        gap = next((k for k, v in enumerate(cells) if v is None), None)
        if gap is not None:
            raise DataError(f"{where} lacks a value in row {gap + 1}; leave such rows out.")
        if self.target.classes is None:
            return read_numbers(self.target.name, cells, numbered=True)
        code = {name: k for k, name in enumerate(self.target.classes)}
        texts = self.target.name_labels(cells)
        odd = next((k for k, t in enumerate(texts) if t not in code), None)
        if odd is not None:
            raise DataError(
                f"{where}: row {odd + 1} holds {texts[odd]!r}, which is none of the classes "
                f"{', '.join(self.target.classes[:12])}; correct it or leave the row out."
            )
        return np.array([code[t] for t in texts], dtype=np.int64)

    def describe(self) -> str:
        """Return what was done, in one line.

        >>> Preparation((NumberColumn("age", 1.0),), Target("ill"), missing="mean").describe()
        '1 column became 1 feature; numbers not scaled; gaps filled with the mean'
        """
        scaled = {
            None: "numbers not scaled",
            "standard": "numbers scaled to mean 0 and deviation 1",
            "robust": "numbers scaled to median 0 and quartile distance 1",
        }[self.scale]
        whose = " of each client" if self.by_client else " over all clients" if self.scale else ""
        marked = sum(column.indicator for column in self.columns)
        filled = {
            "mean": "gaps filled with the mean",
            "median": "gaps filled with the median",
            "indicator": "gaps filled with the mean"
            + (f" and marked by a 0/1 column ({marked} columns had gaps)" if marked else ""),
            "drop": "rows with gaps left out",
            "error": "no gaps",
        }[self.missing]
        errors = [c.error / c.scale for c in self.columns if isinstance(c, NumberColumn)]
        if self.scale == "robust" or self.missing == "median":
            filled += (
                f"; medians and quartiles counted on a grid, off by at most {max(errors):.1g} of a "
                "column's scale"
            ) * bool(errors)
        wide, now = len(self.columns), len(self.feature_names)
        shape = f"{wide} column{'s' * (wide > 1)} became {now} feature{'s' * (now > 1)}"
        return f"{shape}; {scaled}{whose}; {filled}"

    # -- as JSON --------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the value as JSON has it; :meth:`from_json` reads it back, equal to the bit."""
        kinds = {NumberColumn: "number", CategoryColumn: "category"}
        columns = [{"kind": kinds[type(c)], **asdict(c)} for c in self.columns]
        told = {"format": FORMAT, **asdict(self), "columns": columns}
        plain: dict[str, Any] = json.loads(json.dumps(told, allow_nan=False))
        return plain

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Preparation:
        """Return the value that :meth:`to_json` gave."""
        kinds: dict[str, Any] = {"number": NumberColumn, "category": CategoryColumn}
        try:
            if told["format"] != FORMAT:
                raise DataError(
                    f"This preparation has the format {told['format']}, this version of equifed "
                    f"reads {FORMAT}; install the version that wrote it."
                )
            given = {f.name: _freeze(told[f.name]) for f in fields(cls)}
            columns = [(kinds[c["kind"]], {**c}) for c in told["columns"]]
            for _, column in columns:
                del column["kind"]
            given["columns"] = tuple(
                kind(**{key: _freeze(value) for key, value in column.items()})
                for kind, column in columns
            )
            target = {key: _freeze(value) for key, value in told["target"].items()}
            return cls(**{**given, "target": Target(**target)})
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"This is no preparation ({type(error).__name__}: {error}); give what to_json() "
                "returned."
            ) from None

    def digest(self) -> str:
        """Return the SHA-256 of the canonical JSON."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    # -- checks ---------------------------------------------------------------------------------

    def _check_columns(self, columns: Mapping[str, Any], extra: str) -> None:
        wanted = [column.name for column in self.columns]
        absent = [name for name in wanted if name not in columns]
        if absent:
            raise DataError(
                f"The table has no column {absent[0]!r}; it has {', '.join(list(columns)[:20])}. "
                f"The model was trained on {', '.join(wanted[:20])}: add or rename it."
            )
        allowed = {*wanted, self.target.name, self.client, *dict(self.left_out)}
        strange = [name for name in columns if name not in allowed]
        if strange and extra != "ignore":
            raise DataError(
                f"The table has the column {strange[0]!r}, which the training table had not; drop "
                "it, or give extra='ignore'."
            )

    def _find_owners(self, columns: Mapping[str, list[Any]], client: str | None) -> list[Any]:
        """Return whose row each is, if that makes a difference."""
        rows = len(next(iter(columns.values())))
        if not self.by_client:
            return [client] * rows
        known = {
            name
            for column in self.columns
            if isinstance(column, NumberColumn)
            for name, *_ in column.by_client
        }
        owners: list[Any] = [client] * rows
        if client is None and self.client is not None and self.client in columns:
            for name, mine in group_rows(columns[self.client]).items():
                for row in mine:
                    owners[row] = name
        strange = next((w for w in owners if w not in known), None)
        if strange is not None or None in owners:
            raise DataError(
                f"Every client has scales of its own here, and there is no client {strange!r}; say "
                f"client=NAME, one of {', '.join(sorted(known)[:12])}."
            )
        return owners

    def _refuse_gaps(self, columns: Mapping[str, list[Any]]) -> None:
        for column in self.columns:
            gap = next((k for k, v in enumerate(columns[column.name]) if v is None), None)
            if gap is not None:
                raise DataError(
                    f"Column {column.name!r} lacks a value in row {gap + 1}, and the model was "
                    f"trained with missing={self.missing!r}; fill it in, leave the row out, or "
                    "train with missing='indicator'."
                )


def _freeze(value: Any) -> Any:
    return tuple(_freeze(v) for v in value) if isinstance(value, list) else value
