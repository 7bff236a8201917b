"""What is done to the columns of a table before a model sees them, as one value."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from equifed.data.columns import (
    Columns,
    Gaps,
    are_whole,
    blank,
    clean_column,
    group_rows,
    name_categories,
    name_category,
    one_hot,
    read_columns,
    read_numbers,
    to_numbers,
)
from equifed.data.split import Array, DataError, list_owners, refuse, refuse_any, refuse_twice

Scale: TypeAlias = Literal["standard"]
Missing: TypeAlias = Literal["mean", "indicator", "drop", "error"]
Unknown: TypeAlias = Literal["other", "error"]

READABLE = (1, 2, 3)  # 1: targets not scaled; 2: no knots
OTHER, WHOLE = "other", re.compile(r"-?\d+")


@dataclass(frozen=True)
class Prepare:
    """How columns become features; ``[data.prepare]`` in a configuration.

    Parameters
    ----------
    scale : {"standard", None}
        Subtract the mean and divide by the standard deviation of the training values there are, or
        not. Constant columns are only shifted.
    missing : {"indicator", "mean", "drop", "error"}
        Gaps take the mean, with a 0/1 column beside every column that has gaps in training rows
        (in a column of categories, a gap is a category); the mean alone; or rows with gaps are
        left out, or refused.
    categorical : "auto" or sequence of str
        Columns of numbers that are categories, beside those that always are: text, booleans, and
        pandas' ``category``. A column with numbers *and* text is numbers with gaps if all its text
        is words such as ``unknown`` or ``not measured`` in at most 5 % of its cells (and gaps are
        filled: ``missing`` is ``"indicator"`` or ``"mean"``); else a category if no client has more
        than 20 different values; else it is refused until it is in this list or in ``numeric``.
    numeric : sequence of str
        Columns of numbers in which any text is a gap; booleans are 0 and 1 there.
    unknown : {"other", "error"}
        What to do with categories that no training row has.
    min_count : int
        Categories with fewer training rows in the whole federation go to ``other``; with
        ``unknown="error"`` all are kept.
    per_client : bool
        Scale every client by its own numbers. Differences of level between clients are lost then.
    target_scale : {"standard", None}
        Train a regression on ``(target - mean) / deviation`` of all training rows, or on the target
        as it is. Predictions and errors are in the target's own unit either way.

    Examples
    --------
    >>> import equifed as ef
    >>> table = {"site": ["n", "n", "s", "s"], "age": [40, 60, None, 50], "ill": [0, 1, 1, 0]}
    >>> raw = {"scale": None, "missing": "mean"}  # the settings of Prepare
    >>> fed = ef.Federation.from_table(table, client="site", target="ill", **raw)
    >>> fed.train.inputs.ravel().tolist()
    [40.0, 60.0, 50.0, 50.0]
    """

    scale: Scale | None = "standard"
    missing: Missing = "indicator"
    categorical: tuple[str, ...] | Literal["auto"] = "auto"
    unknown: Unknown = "other"
    min_count: int = 5
    per_client: bool = False
    target_scale: Scale | None = "standard"
    numeric: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        count: Any = self.min_count
        allowed: dict[str, tuple[Any, ...]] = {
            "scale": (*get_args(Scale), None),
            "missing": get_args(Missing),
            "unknown": get_args(Unknown),
            "target_scale": (*get_args(Scale), None),
        }
        refuse(
            (key for key, values in allowed.items() if getattr(self, key) not in values),
            lambda key: (
                f"{key} must be one of {', '.join(map(repr, allowed[key]))}, got "
                f"{getattr(self, key)!r}."
            ),
        )
        refuse_any(
            (isinstance(count, bool) or not isinstance(count, int) or count < 1,
             f"min_count must be a whole number of at least 1, got {count!r}."),
            (self.per_client and self.scale is None,
             "per_client=True scales every client by itself; give a scale with it."),
        )  # fmt: skip
        for key in ("categorical", "numeric"):
            given: Any = getattr(self, key)
            if (key, given) != ("categorical", "auto"):
                listed = (given,) if isinstance(given, str) else tuple(map(str, given))
                object.__setattr__(self, key, listed)
        refuse(
            (name for name in self.numeric if name in self.listed),
            lambda name: f"Column {name!r} is in categorical and in numeric; take it out of one.",
        )

    @property
    def listed(self) -> tuple[str, ...]:
        """Columns that are named as categories."""
        return () if self.categorical == "auto" else self.categorical


@dataclass(frozen=True)
class Target:
    """The column to predict: its classes in order, or None for a regression.

    A model of a regression answers with ``(value - centre) / scale``.

    >>> weight = Target("weight", centre=70.0, scale=10.0)
    >>> weight.encode(["60", "85"]), weight.decode(weight.encode(["60", "85"]))
    (array([-1. ,  1.5]), array([60., 85.]))
    """

    name: str
    classes: tuple[str, ...] | None = None
    centre: float = 0.0
    scale: float = 1.0

    def name_labels(self, values: Sequence[Any]) -> list[str]:
        """Return labels as class names are written: numbers alike, however they were typed."""
        whole = all(WHOLE.fullmatch(name) for name in self.classes or ())
        numbers = to_numbers(values) if whole else None
        if numbers is None or not are_whole(numbers):
            return [name_category(v) for v in values]
        return [str(int(number)) for number in numbers.tolist()]

    def encode(self, cells: Sequence[Any]) -> Array:
        """Return labels 0..K - 1 (int64) of cleaned class names, or scaled values (float64)."""
        where = f"Column {self.name!r}"
        refuse(
            (k for k, cell in enumerate(cells) if cell is None),
            lambda k: f"{where} lacks a value in row {k + 1}; leave such rows out.",
        )
        if self.classes is None:
            return (read_numbers(self.name, cells, numbered=True) - self.centre) / self.scale
        code = {name: k for k, name in enumerate(self.classes)}
        texts = self.name_labels(cells)
        refuse(
            (k for k, text in enumerate(texts) if text not in code),
            lambda k: (
                f"{where}: row {k + 1} holds {texts[k]!r}, which is none of the classes "
                f"{', '.join(list(code)[:12])}; correct it or leave the row out."
            ),
        )
        return np.array([code[t] for t in texts], dtype=np.int64)

    @property
    def is_scaled(self) -> bool:
        """Whether a model is trained on other numbers than the column holds."""
        return (self.centre, self.scale) != (0.0, 1.0)

    def decode(self, values: Any) -> Any:
        """Return scaled values (an array or a tensor) in the column's unit."""
        return values * self.scale + self.centre if self.is_scaled else values


@dataclass(frozen=True)
class NumberColumn:
    """A column of numbers: gaps are filled, then ``(value - centre) / scale``, then bends."""

    name: str
    fill: float | None = None  # of a missing value, unscaled; None: a gap is refused
    centre: float = 0.0
    scale: float = 1.0
    indicator: bool = False  # a 0/1 column follows that says where values were missing
    by_client: tuple[tuple[str, float, float, float | None], ...] = ()  # centre, scale, fill
    gaps: Gaps = "empty"  # what is a missing value
    knots: tuple[float, ...] = ()  # of scaled values: where the slope may change

    @property
    def titles(self) -> tuple[str, ...]:
        """Names of the features that the column becomes."""
        centre, scale = (0.0, 1.0) if self.by_client else (self.centre, self.scale)
        told = [[f"{centre + scale * k:.{d}g}" for k in self.knots] for d in (4, 8, 17)]
        short = next((texts for texts in told if len({*texts}) == len(texts)), told[-1])
        bends = [f"{self.name} above {text}" for text in short]
        return (self.name, *bends, *([f"{self.name} missing"] if self.indicator else []))

    def encode(self, values: Sequence[Any], owners: Sequence[str | None]) -> NDArray[np.float64]:
        """Return the features of cleaned values (None: missing), one row each."""
        numbers = read_numbers(self.name, values, numbered=True)
        gaps = np.isnan(numbers)
        scales: Any = [self.centre, self.scale, self.fill]
        if self.by_client:
            own = {name: mine for name, *mine in self.by_client}
            scales = [own.get(str(owner), scales) for owner in owners]
        centre, scale, fill = np.array(scales, dtype=np.float64).T
        block = (np.where(gaps, fill, numbers) - centre) / scale
        return self.bend(np.column_stack([block, *([gaps] if self.indicator else [])]))

    def bend(self, block: Array) -> Array:
        """Return scaled values, and their excess over every knot, before what follows them."""
        over = np.maximum(block[:, :1] - np.array(self.knots, dtype=block.dtype), 0)
        return np.hstack([block[:, :1], over, block[:, 1:]])


@dataclass(frozen=True)
class CategoryColumn:
    """A column of categories: one 0/1 column each."""

    name: str
    categories: tuple[str, ...]  # each has a column; one never seen is a row of zeros
    other: bool = False  # ... or in a column NAME=other, with the rare ones
    unknown: Unknown = "other"  # or "error": one never seen is refused
    indicator: bool = False  # a 0/1 column for gaps; without it a gap is a category never seen

    @property
    def titles(self) -> tuple[str, ...]:
        """Names of the features that the column becomes."""
        names = [f"{self.name}={c}" for c in (*self.categories, *([OTHER] if self.other else []))]
        return (*names, *([f"{self.name} missing"] if self.indicator else []))

    @property
    def is_mixed(self) -> bool:
        """Whether some of the categories are numbers, and some are not."""
        return len({to_numbers([name]) is None for name in self.categories}) == 2

    def encode(self, values: Sequence[Any], owners: Sequence[str | None]) -> NDArray[np.float64]:
        """Return the features of cleaned values (None: missing), one row each."""
        texts = name_categories(values)
        known = set(self.categories)
        gaps = np.array([t is None for t in texts])
        new = np.array([t not in known for t in texts]) & ~(gaps & self.indicator)
        if self.unknown == "error":
            for k in np.flatnonzero(new):
                raise DataError(
                    f"Column {self.name!r}: row {k + 1} holds "
                    f"{'nothing' if texts[k] is None else repr(texts[k])}, which is none of the "
                    f"categories {', '.join(self.categories[:12])}; correct it, or fit with "
                    "unknown='other'.",
                    f"its column {self.name!r:.60} has a category that no training row has; "
                    "correct it there, or agree on unknown = 'other' in prepare",
                )
        marks = [*([new] if self.other else []), *([gaps] if self.indicator else [])]
        hot = one_hot([t if t in known else "" for t in texts], self.categories)
        return np.column_stack([hot, *marks])


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
    scale : {"standard", None}
        Whether centres and scales are means and standard deviations, or 0 and 1.
    missing : {"mean", "indicator", "drop", "error"}
        The rule for gaps: filled with the mean (``indicator``: and marked by a 0/1 column where
        training rows had gaps). With the last two, a gap in a new row is refused.
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
    scale: Scale | None = None
    missing: Missing = "error"
    left_out: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        refuse_twice(self.feature_names, "Two features would be called {!r}; rename a column.")

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
        return self.scale is not None or self.missing not in ("drop", "error")

    def apply(self, table: Any, client: str | None = None) -> NDArray[np.float64]:
        """Return the features of a table's rows, in order, shape (rows, features).

        Parameters
        ----------
        table : DataFrame, mapping of columns, path or pyarrow.Table
            Columns are matched by name, in any order; others than the features are ignored.
        client : str, optional
            Whose rows they are, where clients have scales of their own; by default the table's
            client column says it.
        """
        columns, wanted = read_columns(table), [column.name for column in self.columns]
        refuse(
            (name for name in wanted if name not in columns),
            lambda name: (
                f"The table has no column {name!r}; it has {', '.join(list(columns)[:20])}. "
                f"The model was trained on {', '.join(wanted[:20])}: add or rename it."
            ),
        )
        cells = {
            c.name: blank(columns[c.name], c.gaps if isinstance(c, NumberColumn) else "empty")
            for c in self.columns
        }
        if self.missing in ("drop", "error"):
            refuse(
                ((name, k) for name in wanted for k, v in enumerate(cells[name]) if v is None),
                lambda gap: (
                    f"Column {gap[0]!r} lacks a value in row {gap[1] + 1}, and the model was "
                    f"trained with missing={self.missing!r}; fill it in, leave the row out, or "
                    "train with missing='indicator'."
                ),
            )
        owners = self._find_owners(columns, client)
        return np.hstack([column.encode(cells[column.name], owners) for column in self.columns])

    def encode_target(self, values: Any) -> NDArray[Any]:
        """Return labels 0..K - 1 (int64) of class names, or scaled values of a regression."""
        cells = values.tolist() if hasattr(values, "tolist") else list(values)
        return self.target.encode(clean_column(cells))

    def describe(self) -> str:
        """Return what was done, in one line.

        >>> Preparation((NumberColumn("age", 1.0),), Target("ill"), missing="mean").describe()
        '1 column became 1 feature; numbers not scaled; gaps filled with the mean'
        """
        marked = sum(column.indicator for column in self.columns)
        marks = f" and marked by a 0/1 column ({marked} columns had gaps)" if marked else ""
        value = "mean" if self.missing == "indicator" else self.missing
        rules = {"drop": "rows with gaps left out", "error": "no gaps"}
        filled = rules.get(self.missing, f"gaps filled with the {value}{marks}")
        scales = {None: "not scaled", "standard": "scaled to mean 0 and deviation 1"}
        scaled = scales.get(self.scale, f"scaled ({self.scale})")  # as versions before 0.3 could
        whose = " of each client" if self.by_client else " over all clients" if self.scale else ""
        bent = sum(len(getattr(column, "knots", ())) for column in self.columns)
        wide, now = len(self.columns), len(self.feature_names)
        told = [
            f"{wide} column{'s' * (wide > 1)} became {now} feature{'s' * (now > 1)}",
            f"numbers {scaled}{whose}",
            filled,
            "target scaled to mean 0 and deviation 1" * self.target.is_scaled,
            f"{bent} bends" * (bent > 0),
        ]
        return "; ".join(filter(None, told))

    # -- as JSON --------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the value as JSON has it; :meth:`from_json` reads it back, equal to the bit."""
        kinds = {NumberColumn: "number", CategoryColumn: "category"}
        columns = [{"kind": kinds[type(c)], **asdict(c)} for c in self.columns]
        if not (bent := any(c.get("knots") for c in columns)):  # as before knots, to the digest
            columns = [{k: v for k, v in c.items() if k != "knots"} for c in columns]
        told = {"format": 3 if bent else 2, **asdict(self), "columns": columns}
        return dict(json.loads(json.dumps(told, allow_nan=False)))

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Preparation:
        """Return the value that :meth:`to_json` gave."""
        kinds: dict[str, Any] = {"number": NumberColumn, "category": CategoryColumn}
        try:
            if told["format"] not in READABLE:
                raise DataError(
                    f"This preparation has the format {told['format']}, this version of equifed "
                    f"reads {' and '.join(map(str, READABLE))}; install the version that wrote it."
                )
            given = {f.name: _freeze(told[f.name]) for f in fields(cls)}
            given["columns"] = tuple(_build(kinds[c["kind"]], c) for c in told["columns"])
            given["target"] = _build(Target, told["target"])
            return cls(**given)
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"This is not a preparation ({type(error).__name__}: {error}); give what to_json() "
                "returned."
            ) from None

    def digest(self) -> str:
        """Return the SHA-256 of the canonical JSON."""
        return digest_json(self.to_json())

    def _find_owners(self, columns: Columns, client: str | None) -> list[Any]:
        """Return whose row each is, if that makes a difference."""
        owners: list[Any] = [client] * columns.rows
        if not self.by_client:
            return owners
        if client is None and self.client is not None and self.client in columns:
            owners = list_owners(group_rows(columns[self.client])).tolist()
        scaled = (c.by_client for c in self.columns if isinstance(c, NumberColumn))
        known = {name for clients in scaled for name, *_ in clients}
        refuse(
            (who for who in owners if who not in known),
            lambda who: (
                f"Every client has scales of its own here, and there is no client {who!r}; "
                f"pass client=NAME, one of {', '.join(sorted(known)[:12])}."
            ),
        )
        return owners


def digest_json(told: Any) -> str:
    """Return the SHA-256 of a value's canonical JSON."""
    text = json.dumps(told, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _build(kind: Any, told: Mapping[str, Any]) -> Any:
    """Return a value from JSON; fields that it no longer has are passed over."""
    return kind(**{f.name: _freeze(told[f.name]) for f in fields(kind) if f.name in told})


def _freeze(value: Any) -> Any:
    return tuple(_freeze(v) for v in value) if isinstance(value, list) else value
