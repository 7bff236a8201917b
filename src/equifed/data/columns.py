"""Tables as named columns of Python values, from CSV, Parquet, data frames or mappings."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equifed.data.checks import DataError

Columns = dict[str, list[Any]]
"""Column name to values; a missing value is None."""

MISSING = frozenset({"", "?", "na", "n/a", "nan", "null", "none"})


def read_columns(table: Any | str | Path) -> Columns:
    """Return the columns of a CSV or Parquet file, a data frame, an Arrow table or a mapping.

    >>> read_columns({"a": [1, float("nan")], "b": ["x", " ?"]})
    {'a': [1, None], 'b': ['x', None]}
    """
    if isinstance(table, str | Path):
        raw = _parquet(Path(table)) if str(table).endswith(".parquet") else read_csv(Path(table))
    elif isinstance(table, Mapping):
        raw = {str(name): list(values) for name, values in table.items()}
    elif hasattr(table, "column_names"):  # pyarrow.Table
        raw = {str(name): table.column(name).to_pylist() for name in table.column_names}
    elif hasattr(table, "columns"):  # pandas.DataFrame, polars.DataFrame
        raw = {str(name): table[name].to_list() for name in table.columns}
    else:
        raise DataError(
            "A table is a path, a data frame, a pyarrow Table or a mapping of columns, "
            f"got {type(table).__name__}."
        )
    lengths = {len(values) for values in raw.values()}
    if len(lengths) != 1 or 0 in lengths:
        raise DataError(f"A table needs rows, the same number in each column, got {lengths}.")
    return {name: [_cleaned(v) for v in values] for name, values in raw.items()}


def read_csv(path: Path, *, header: Sequence[str] | None = None) -> Columns:
    """Read a CSV file; its first line names the columns unless ``header`` does."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [line for line in csv.reader(file, skipinitialspace=True) if any(line)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"Cannot read the table {path}: {error}.") from None
    if header is None:
        if not lines:
            raise DataError(f"{path} is empty; expected a header line and rows.")
        header, *lines = lines
    if len(set(header)) != len(header):
        raise DataError(f"{path}: column names must differ, got {', '.join(header)}.")
    for number, line in enumerate(lines, start=1):
        if len(line) != len(header):
            raise DataError(f"{path}: row {number} has {len(line)} cells, expected {len(header)}.")
    return {name: [line[k] for line in lines] for k, name in enumerate(header)}


def to_numbers(values: Sequence[Any]) -> NDArray[np.float64] | None:
    """Return the values as float64, or None when one of them is not a number.

    >>> to_numbers(["1", "2.5"]), to_numbers(["1", "one"])
    (array([1. , 2.5]), None)
    """
    try:
        return np.array([float(v) for v in values], dtype=np.float64)
    except (TypeError, ValueError):
        return None


def one_hot(values: Sequence[Any], categories: Sequence[str] | None = None) -> NDArray[np.float64]:
    """Return one 0/1 column per category (by default the distinct values in sorted order).

    A value outside ``categories`` gives a row of zeros.

    >>> one_hot(["b", "a"])
    array([[0., 1.],
           [1., 0.]])
    """
    texts = [str(v) for v in values]
    column = {name: k for k, name in enumerate(categories or sorted(set(texts)))}
    codes = np.array([column.get(text, -1) for text in texts], dtype=np.int64)
    table = np.zeros((len(texts), len(column)))
    known = np.flatnonzero(codes >= 0)
    table[known, codes[known]] = 1.0
    return table


def grouped(values: Sequence[Any]) -> dict[str, NDArray[np.int64]]:
    """Return the rows of each distinct value, as text, in order of first appearance.

    >>> grouped(["b", "a", "b"])
    {'b': array([0, 2]), 'a': array([1])}
    """
    names, first, codes = np.unique(
        np.array([str(v) for v in values]), return_index=True, return_inverse=True
    )
    order = np.argsort(codes, kind="stable")
    rows = np.split(order, np.cumsum(np.bincount(codes, minlength=len(names)))[:-1])
    return {str(names[k]): rows[k] for k in np.argsort(first)}


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        value = value.strip()
        return None if value.lower() in MISSING else value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    return None if type(value).__name__ in ("NAType", "NaTType") else value


def _parquet(path: Path) -> Columns:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError(f"Reading {path} needs pyarrow: pip install 'equifed[data]'.") from None
    return {name: column.to_pylist() for name, column in _items(parquet.read_table(path))}


def _items(table: Any) -> list[tuple[str, Any]]:
    return list(zip(table.column_names, table.columns, strict=True))
