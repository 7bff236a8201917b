"""Tables as named columns of Python values, from CSV, Parquet, data frames or mappings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equifed.data.csv_files import read_csv
from equifed.data.foreign import name_key, name_values
from equifed.data.split import DataError

Columns = dict[str, list[Any]]
"""Column name to values; a missing value is None."""

MISSING = frozenset({"", "?", "na", "n/a", "nan", "null", "none"})


def read_columns(table: Any | str | Path) -> Columns:
    """Return the columns of a CSV or Parquet file, a data frame, an Arrow table or a mapping.

    >>> read_columns({"a": [1, float("nan")], "b": ["x", " ?"]})
    {'a': [1, None], 'b': ['x', None]}
    """
    where = f"The table {table}" if isinstance(table, str | Path) else "The table"
    raw = _read_raw(table)
    lengths = {str(name): len(values) for name, values in raw}
    if len(lengths) != len(raw):
        names = [str(name) for name, _ in raw]
        twice = next(name for k, name in enumerate(names) if name in names[:k])
        raise DataError(f"{where} has the column {twice!r} twice; rename or drop one of them.")
    if not lengths or 0 in lengths.values():
        raise DataError(f"{where} needs rows, it has {len(lengths)} column(s) and none.")
    if len(set(lengths.values())) > 1:
        raise DataError(f"{where} needs columns of the same length, got {lengths}.")
    return {str(name): clean_all(values) for name, values in raw}


def find_categories(table: Any) -> list[str]:
    """Return the columns that a data frame says are categories, whatever they hold.

    >>> find_categories({"a": [1]})
    []
    """
    if isinstance(table, Mapping | str | Path):
        return []
    names = getattr(table, "column_names", getattr(table, "columns", ()))
    kinds = getattr(getattr(table, "schema", None), "types", getattr(table, "dtypes", ()))
    marks = ("category", "categorical", "enum", "dictionary")
    pairs = zip(names, kinds, strict=False)
    return [str(name) for name, kind in pairs if str(kind).lower().startswith(marks)]


def to_numbers(values: Sequence[Any]) -> NDArray[np.float64] | None:
    """Return the values as float64, or None when one of them is not a number.

    >>> to_numbers(["1", "2.5"]), to_numbers(["1", "one"])
    (array([1. , 2.5]), None)
    """
    kinds = set(map(type, values))
    if not all(issubclass(kind, str | Real | Decimal | np.bool_) for kind in kinds):
        return None  # a date, say, which float() might take for nanoseconds
    try:
        if kinds <= {int, float, bool}:
            return np.array(values, dtype=np.float64)
        return np.array([float(v) for v in values], dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return None


def one_hot(values: Sequence[Any], categories: Sequence[str] | None = None) -> NDArray[np.float64]:
    """Return one 0/1 column per category (by default the distinct values in sorted order).

    A value outside ``categories`` gives a row of zeros.

    >>> one_hot(["b", "a"])
    array([[0., 1.],
           [1., 0.]])
    """
    texts = [str(v) for v in values]
    known = sorted(set(texts)) if categories is None else categories
    column = {name: k for k, name in enumerate(known)}
    codes = np.array([column.get(text, -1) for text in texts], dtype=np.int64)
    table = np.zeros((len(texts), len(column)))
    there = np.flatnonzero(codes >= 0)
    table[there, codes[there]] = 1.0
    return table


def group_rows(values: Sequence[Any], what: str = "Clients") -> dict[str, NDArray[np.int64]]:
    """Return the rows of each distinct value, by its name, in order of first appearance.

    >>> group_rows(["b", "a", "b"])
    {'b': array([0, 2]), 'a': array([1])}
    >>> list(group_rows([1, "1"]))
    ['1', "'1'"]
    """
    names = name_values(values, what)
    place = {key: k for k, key in enumerate(names)}
    codes = np.array([place[name_key(v)] for v in values], dtype=np.int64)
    order = np.argsort(codes, kind="stable")
    rows = np.split(order, np.cumsum(np.bincount(codes, minlength=len(names)))[:-1])
    return dict(zip(names.values(), rows, strict=True))


def clean_all(values: Sequence[Any]) -> list[Any]:
    """Return a column's cells as :func:`clean` does; numbers of Python at once."""
    kinds = set(map(type, values))
    if kinds <= {int, bool, type(None)}:
        return list(values)
    if kinds <= {int, bool, type(None), float}:
        return [None if v != v else v for v in values]
    return [clean(v) for v in values]


def clean(value: Any) -> Any:
    """Return a cell as it is, text without blanks around it, and None for all kinds of nothing."""
    if isinstance(value, str):
        value = value.strip()
        return None if value.lower() in MISSING else value
    if value is None or value is np.ma.masked or type(value).__name__ in ("NAType", "NaTType"):
        return None
    try:
        return None if bool(value != value) else value  # NaN and NaT
    except Exception:  # of arrays in cells, say; whoever uses the column refuses them
        return value


def _read_raw(table: Any) -> list[tuple[Any, list[Any]]]:
    """Return names and values of the columns, also of those whose names are the same."""
    if isinstance(table, str | Path):
        path = Path(table)
        if path.suffix == ".parquet" or _is_parquet(path):
            return _read_raw(_read_parquet(path))
        return list(read_csv(path).items())
    try:
        if isinstance(table, Mapping):
            return [(name, _as_list(name, values)) for name, values in table.items()]
        if hasattr(table, "column_names"):  # pyarrow.Table, datasets.Dataset
            if hasattr(table, "columns"):
                names, parts = table.column_names, table.columns
                return [(n, p.to_pylist()) for n, p in zip(names, parts, strict=True)]
            return [(name, list(table[name])) for name in table.column_names]
        if hasattr(table, "iloc"):  # pandas.DataFrame, by position: names may be the same
            return [(n, table.iloc[:, k].to_list()) for k, n in enumerate(table.columns)]
        if hasattr(table, "columns"):  # polars.DataFrame
            return [(name, table[name].to_list()) for name in table.columns]
    except (TypeError, AttributeError, KeyError) as error:
        raise DataError(f"Cannot read a {type(table).__name__} as a table: {error}.") from None
    raise DataError(
        "A table is a path, a data frame, a pyarrow Table or a mapping of columns, "
        f"got {type(table).__name__}."
    )


def _as_list(name: Any, values: Any) -> list[Any]:
    if isinstance(values, str | bytes | Mapping):
        raise DataError(f"Column {str(name)!r} must be a list or an array, got {values!r:.60}.")
    return list(values.tolist() if hasattr(values, "detach") else values)


def _is_parquet(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"PAR1"
    except (OSError, ValueError):
        return False  # reading it as CSV says what is wrong


def _read_parquet(path: Path) -> Any:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError(
            f"Reading {path} needs pyarrow: pip install 'equifed[data]', or save it as CSV."
        ) from None
    try:
        return parquet.read_table(path)
    except (OSError, ValueError) as error:
        raise DataError(f"Cannot read {path} as Parquet: {str(error)[:200]}.") from None
