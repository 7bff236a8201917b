"""Columns of a table: cells cleaned once, and what they hold: numbers, categories, names."""

from __future__ import annotations

import datetime
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from equifed.data.split import DataError, Rows, refuse, refuse_any, refuse_twice

BOOLS = (bool, np.bool_)
NUMERIC = (str, Real, Decimal, np.bool_)  # what float() may be asked to read: no dates
CELLS = (*NUMERIC, datetime.date, np.datetime64)  # what a cell may be
CATEGORICAL = ("category", "categorical", "enum", "dictionary")  # types of columns of data frames
MISSING = frozenset({"", "?", "na", "n/a", "nan", "null", "none"})
LONGEST = max(map(len, MISSING))
GAP_WORDS = frozenset({
    *("unknown", "unk", "missing", "not known", "not measured", "not available", "not done", "nd"),
    *("not recorded", "not reported", "no data", "n.a.", "n.d.", "-", "--", ".", "x"),
})  # fmt: skip
"""Words that mean a gap among numbers; in a column of text each of them is a category."""
FEW_WORDS = 0.05  # of the cells with a value, that gap words may be in a column of numbers
MOST_CODES = 20  # different values of numbers and text together that can be categories
EXACT = 2.0**53  # whole numbers below are told apart as float64
MIXED = ("numbers", "words", "texts")  # what a column with numbers and text holds
SHOWN = 100  # first cells, from which examples are taken
DATE = re.compile(r"\d{4}-\d\d?-\d\d?([ T].*)?|\d\d?([./-])\d\d?\2\d{2,4}( .*)?")
DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
WHOLE = re.compile(r"([+-]?\d+)\.0+")


class Columns(dict[str, list[Any]]):
    """Named columns of one length with clean cells: a missing value is None."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(next(iter(self.values())))

    def take(self, rows: Rows, names: Iterable[str] | None = None) -> Columns:
        """Return some rows, of all columns or of those named."""
        index = rows.tolist()
        wanted = self if names is None else names
        return Columns({name: [self[name][r] for r in index] for name in wanted})


# -- reading --------------------------------------------------------------------------------------


def read_columns(table: Any | str | Path) -> Columns:
    """Return the columns of a CSV or Parquet file, a data frame, an Arrow table or a mapping.

    >>> read_columns({"a": [1, float("nan")], "b": ["x", " ?"]})
    {'a': [1, None], 'b': ['x', None]}
    """
    if isinstance(table, Columns):
        return table
    where = "The table"
    if isinstance(table, str | Path):
        from equifed.data.files import read_file  # nothing else needs a reader of files

        where, table = f"The table {table}", read_file(Path(table))
    pairs = [(str(name), values) for name, values in _list_columns(table)]
    names = [name for name, _ in pairs]
    refuse_twice(names, f"{where} has the column {{!r}} twice; rename or drop one of them.")
    lengths = {name: len(values) for name, values in pairs}
    refuse_any(
        (not lengths or 0 in lengths.values(),
         f"{where} needs rows, it has {len(lengths)} column(s) and none."),
        (len(set(lengths.values())) > 1,
         f"{where} needs columns of the same length, got {lengths}."),
    )  # fmt: skip
    return Columns({name: clean_column(values) for name, values in pairs})


def refuse_absent(names: Iterable[str], columns: Mapping[str, Any]) -> None:
    """Refuse names of columns that there are not."""
    refuse(
        (name for name in names if name not in columns),
        lambda name: f"The table has no column {name!r}; it has {', '.join(columns)}.",
    )


def find_categories(table: Any) -> list[str]:
    """Return the columns that a data frame says are categories, whatever they hold."""
    if isinstance(table, Mapping | str | Path):
        return []
    names = getattr(table, "column_names", getattr(table, "columns", ()))
    kinds = getattr(getattr(table, "schema", None), "types", getattr(table, "dtypes", ()))
    pairs = zip(names, kinds, strict=False)
    return [str(name) for name, kind in pairs if str(kind).lower().startswith(CATEGORICAL)]


def _list_columns(table: Any) -> list[tuple[Any, list[Any]]]:
    """Return names and values of the columns, also of those whose names are the same."""
    try:
        if isinstance(table, Mapping) or hasattr(table, "iloc"):
            pairs = list(table.items())
        elif hasattr(table, "column_names") or hasattr(table, "columns"):
            names = table.column_names if hasattr(table, "column_names") else table.columns
            pairs = [(n, table[n]) for n in names]  # pyarrow's columns are values, polars' names
        else:
            raise DataError(
                "A table is a path, a data frame, a pyarrow Table or a mapping of columns, "
                f"got {type(table).__name__}."
            )
        return [(name, _as_list(name, values)) for name, values in pairs]
    except (TypeError, AttributeError, KeyError) as error:
        raise DataError(f"Cannot read a {type(table).__name__} as a table: {error}.") from None


def _as_list(name: Any, values: Any) -> list[Any]:
    if isinstance(values, str | bytes | Mapping):
        raise DataError(f"Column {str(name)!r} must be a list or an array, got {values!r:.60}.")
    if hasattr(values, "to_pylist"):  # pyarrow
        return list(values.to_pylist())
    return list(values.tolist() if hasattr(values, "detach") else values)


def clean_column(values: Sequence[Any]) -> list[Any]:
    """Return cells as they are, text without blanks around it, and None for nothing."""
    kinds = set(map(type, values)) - {type(None)}
    if kinds <= {int, bool, float}:
        return [None if v != v else v for v in values]
    if kinds == {str}:
        texts = [None if v is None else v.strip() for v in values]
        return [
            None if t is None or (len(t) <= LONGEST and t.lower() in MISSING) else t for t in texts
        ]
    return [_clean(v) for v in values]


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        value = value.strip()
        return None if value.lower() in MISSING else value
    if value is None or value is np.ma.masked or type(value).__name__ in ("NAType", "NaTType"):
        return None
    try:
        return None if bool(value != value) else value  # NaN and NaT
    except Exception:  # of arrays in cells, say; whoever uses the column refuses them
        return value


# -- numbers --------------------------------------------------------------------------------------


def to_numbers(values: Sequence[Any]) -> NDArray[np.float64] | None:
    """Return cells as float64, NaN for None; or None when one of them is not a number."""
    kinds = set(map(type, values)) - {type(None)}
    if not all(issubclass(kind, NUMERIC) for kind in kinds):
        return None
    try:
        return np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return None


def to_amounts(values: Sequence[Any]) -> NDArray[np.float64] | None:
    """Return the values as numbers, as :func:`to_numbers` does; a boolean is none."""
    return None if {*BOOLS} & set(map(type, values)) else to_numbers(values)


def are_whole(numbers: NDArray[np.float64]) -> bool:
    """Tell whether all numbers are finite and whole."""
    return bool(np.all(np.isfinite(numbers) & (numbers == np.round(numbers))))


def read_numbers(
    name: str, values: Sequence[Any], *, numbered: bool = False
) -> NDArray[np.float64]:
    """Return cleaned values as numbers, NaN for gaps; or name the one that is not a number."""
    numbers = to_numbers(values)
    if numbers is None:
        row = next(k for k, v in enumerate(values) if to_numbers([v]) is None)
        text, place = str(values[row]), f" in row {row + 1}" if numbered else ""
        cure = "correct it, leave it empty if not known, or list the column in categorical."
        raise DataError(
            f"Column {name!r} is not numeric (it has {text!r:.60}{place}); "
            f"{explain_comma(text) if DECIMAL_COMMA.fullmatch(text) else cure}",
            f"its column {name!r:.60} is not numeric",
        )
    infinite = np.flatnonzero(np.isinf(numbers))
    if len(infinite):
        place = f", the first is row {infinite[0] + 1}" if numbered else ""
        raise DataError(
            f"Column {name!r} holds {numbers[infinite[0]]} in {len(infinite)} row(s){place}; "
            "correct or remove them."
        )
    return numbers


def explain_comma(text: str) -> str:
    """Return what to do about a number with a decimal comma."""
    return (
        "numbers need a decimal point; replace the comma, or pass "
        f"pandas.read_csv(path, sep=';', decimal=',') if {text} is {text.replace(',', '.')}."
    )


def read_moments(name: str, values: Sequence[Any]) -> NDArray[np.float64]:
    """Return numbers, dates or ISO texts, none of them missing, as numbers that rise with time."""
    numbers = to_numbers(values)
    if numbers is not None:
        return numbers
    moments = []
    for value in map(str, values):
        try:
            moment = datetime.datetime.fromisoformat(value)
        except ValueError:
            raise DataError(
                f"Column {name!r} holds {value!r:.60}, which is neither a number nor a date like "
                "2024-05-31; convert it (pandas.to_datetime)."
            ) from None
        moments.append(moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC))
    return np.array([moment.timestamp() for moment in moments])


def is_date(value: Any) -> bool:
    """Tell whether a value is a date, or a text that looks like one."""
    if isinstance(value, str):
        return DATE.fullmatch(value) is not None
    return isinstance(value, datetime.date | np.datetime64)


Gaps = Literal["empty", "words", "texts"]  # what is a gap among numbers, beside empty cells


def blank(values: Sequence[Any], gaps: Gaps) -> list[Any]:
    """Return cleaned cells of numbers with None for what is a gap.

    >>> blank([1, "2", "unknown", "3 or more"], "words"), blank(["1", "3 or more"], "texts")
    ([1, '2', None, '3 or more'], ['1', None])
    """
    texts = {v for v in values if isinstance(v, str)} if gaps != "empty" else ()
    if gaps == "words":
        empty = {text for text in texts if text.lower() in GAP_WORDS}
    else:
        empty = {text for text in texts if to_numbers([text]) is None}
    return [None if isinstance(v, str) and v in empty else v for v in values]


# -- categories -----------------------------------------------------------------------------------


def name_category(value: Any) -> str:
    """Return the text that tells a category, the same for a CSV file and a data frame."""
    if isinstance(value, float | np.floating) and float(value).is_integer():
        value = int(value)
    text = str(value).strip()
    if ".0" in text and (whole := WHOLE.fullmatch(text)):
        return whole[1]
    return text.capitalize() if text.lower() in ("true", "false") else text


def name_categories(values: Sequence[Any]) -> list[str | None]:
    """Return the text of every category, None where it is missing; each is looked at once."""
    kinds = set(map(type, values)) - {type(None)}
    if len(kinds) > 1 or not kinds <= {str, int, float, bool}:  # 1 and True are one key
        return [None if v is None else name_category(v) for v in values]
    known = {v: name_category(v) for v in set(values) if v is not None}
    return [known.get(v) for v in values]


def one_hot(values: Sequence[Any], categories: Sequence[str]) -> NDArray[np.float64]:
    """Return one 0/1 column per category; a value that is none of them gives a row of zeros."""
    column = {name: k for k, name in enumerate(categories)}
    codes = np.array([column.get(str(v), -1) for v in values], dtype=np.int64)
    return np.array(codes[:, None] == np.arange(len(column)), dtype=np.float64)


# -- what a column holds --------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """What one column holds: kind, rows with and without a value, different values and examples."""

    kind: Literal["numbers", "whole", "texts", "dates", "mixed", "empty", "other"]
    count: int
    gaps: int
    different: int
    most: int  # rows of the most frequent value
    examples: tuple[str, ...]
    span: float = 0.0  # of numbers, from the least to the greatest
    mixture: Mapping[str, int] = field(default_factory=dict)
    """Of a mixed column: cells that are ``numbers``, gap ``words``, other ``texts``; if ``many``
    are different."""


def look_at(values: Sequence[Any]) -> Look:
    """Return what a column of cleaned cells holds."""
    present = [v for v in values if v is not None]
    rows = (len(present), len(values) - len(present))
    if not present:
        return Look("empty", *rows, 0, 0, ())
    numbers = to_amounts(present)
    if numbers is not None and np.abs(numbers).max() < EXACT:
        counts = np.unique(numbers, return_counts=True)[1]
        named = Counter(map(str, name_categories(present[:SHOWN])))
    else:
        named = Counter(map(str, name_categories(present)))
        counts = np.array(list(named.values()))
    told = (*rows, len(counts), int(counts.max()), tuple(named)[:3])
    if numbers is not None:
        finite = numbers[np.isfinite(numbers)]
        span = float(np.ptp(finite)) if len(finite) else 0.0
        return Look("whole" if are_whole(numbers) else "numbers", *told, span)
    if all(map(is_date, present)):
        return Look("dates", *told)
    if not all(issubclass(kind, CELLS) for kind in set(map(type, present))):
        return Look("other", *told)
    kinds = {text: _tell_kind(text) for text in named}
    numeric = [text for text in named if kinds[text] == "numbers"]
    if not numeric:
        return Look("texts", *told)
    mixture = {kind: sum(n for text, n in named.items() if kinds[text] == kind) for kind in MIXED}
    mixture["many"] = int(len(named) > MOST_CODES)
    odd = next(text for text in named if text not in numeric)
    return Look("mixed", *told[:4], (numeric[0], odd), mixture=mixture)


def _tell_kind(text: str) -> str:
    """Return what a text would be in a column of numbers."""
    if to_numbers([text]) is not None:
        return "numbers"
    return "words" if text.lower() in GAP_WORDS else "texts"


def judge_mixture(found: Mapping[str, int]) -> Literal["numbers", "category"] | None:
    """Return what a column with numbers and text is; None if a person must say it.

    Numbers with gaps, if all its text is gap words in at most 5 % of the cells; else a category
    if it has at most 20 different values.
    """
    if not found["texts"] and found["words"] <= FEW_WORDS * (found["numbers"] + found["words"]):
        return "numbers"
    return None if found["many"] else "category"


# -- clients --------------------------------------------------------------------------------------


def name_values(values: Iterable[Hashable], what: str) -> dict[Hashable, str]:
    """Return a name for each distinct value: of 1 and "1", which print alike, 1 and '1'."""
    names: dict[Hashable, str] = {}
    taken: set[str] = set()
    for value in values:
        try:
            if name_key(value) in names:
                continue
        except TypeError:
            raise DataError(
                f"{what} must be text or numbers, got a {type(value).__name__} ({value!r:.60})."
            ) from None
        candidates = (str(value), repr(value), f"{value!r} ({type(value).__name__})")
        free = [name for name in candidates if name not in taken]
        if not free:
            raise DataError(f"{what}: {value!r:.60} prints like another value; rename it.")
        names[name_key(value)] = free[0]
        taken.add(free[0])
    return names


def name_key(value: Hashable) -> Hashable:
    """Return the key of a value in :func:`name_values`."""
    return isinstance(value, BOOLS), value


def group_rows(values: Sequence[Any], what: str = "Clients") -> dict[str, Rows]:
    """Return the rows of each distinct value, by its name, in order of first appearance."""
    names = name_values(values, what)
    rows: dict[str, list[int]] = {name: [] for name in names.values()}
    for k, value in enumerate(values):
        rows[names[name_key(value)]].append(k)
    return {name: np.array(mine, dtype=np.int64) for name, mine in rows.items()}


@contextmanager
def naming(client: str) -> Iterator[None]:
    """Say in a refusal whose rows it is about."""
    try:
        yield
    except DataError as error:
        text = str(error)
        told = f"Client {client!r}: {text[0].lower()}{text[1:]}" if client else text
        raise DataError(told, error.told) from None
