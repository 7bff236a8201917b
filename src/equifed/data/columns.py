"""Bring your own table: CSV, Parquet, data frames or mappings, one column telling the client.

A table is read into named columns of Python values, and these into the samples of each client.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equifed.data.split import Array, DataError

Columns = dict[str, list[Any]]
"""Column name to values; a missing value is None."""

MISSING = frozenset({"", "?", "na", "n/a", "nan", "null", "none"})


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
    dtype: str,
) -> dict[str, Any]:
    """Return what a table gives to ``Federation.from_clients``; see ``Federation.from_table``."""
    columns = read_columns(table)
    special = [client, target, *([split] if split else [])]
    wanted = list(features) if features is not None else [c for c in columns if c not in special]
    absent = [c for c in [*special, *wanted, *categorical] if c not in columns]
    if absent:
        raise DataError(f"The table has no column {absent[0]!r}; it has {', '.join(columns)}.")
    if not wanted:
        raise DataError("The table has no feature columns besides client, target and split.")
    columns = _keep_complete(columns, [*special, *wanted], client, missing)
    inputs = _encode_features(columns, wanted, categorical, dtype)
    targets, titles = _number_labels(columns[target], task, classes)
    owners = group_rows(columns[client])
    part = np.array([str(v) for v in columns[split]] if split else ["train"] * len(inputs))
    illegal = sorted(set(part.tolist()) - {"train", "validation", "test"})
    if illegal:
        raise DataError(f"Column {split!r} must say train, validation or test, got {illegal[0]!r}.")

    def rows(label: str) -> dict[str, tuple[Array, Array]] | None:
        here = {c: r[part[r] == label] for c, r in owners.items()}
        if label != "train" and not any(len(r) for r in here.values()):
            return None
        return {c: (inputs[r], targets[r]) for c, r in here.items()}

    return {
        "clients": rows("train") or {},
        "validation": rows("validation"),
        "test": rows("test"),
        "classes": len(titles) if titles else classes,
        "class_names": titles,
    }


def read_columns(table: Any | str | Path) -> Columns:
    """Return the columns of a CSV or Parquet file, a data frame, an Arrow table or a mapping.

    >>> read_columns({"a": [1, float("nan")], "b": ["x", " ?"]})
    {'a': [1, None], 'b': ['x', None]}
    """
    if isinstance(table, str | Path):
        path = Path(table)
        raw = _read_parquet(path) if path.suffix == ".parquet" else read_csv(path)
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
    return {name: [_clean(v) for v in values] for name, values in raw.items()}


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


def group_rows(values: Sequence[Any]) -> dict[str, NDArray[np.int64]]:
    """Return the rows of each distinct value, as text, in order of first appearance.

    >>> group_rows(["b", "a", "b"])
    {'b': array([0, 2]), 'a': array([1])}
    """
    names, first, codes = np.unique(
        np.array([str(v) for v in values]), return_index=True, return_inverse=True
    )
    order = np.argsort(codes, kind="stable")
    rows = np.split(order, np.cumsum(np.bincount(codes, minlength=len(names)))[:-1])
    return {str(names[k]): rows[k] for k in np.argsort(first)}


def _keep_complete(columns: Columns, used: list[str], client: str, missing: str) -> Columns:
    """Drop the rows that lack a value, or name the first client and column that lack one."""
    if missing not in ("error", "drop"):
        raise DataError(f"missing must be 'error' or 'drop', got {missing!r}.")
    lacking = {c: np.array([v is None for v in columns[c]], dtype=bool) for c in used}
    for column, gaps in lacking.items():
        if missing == "error" and gaps.any():
            owner = columns[client][int(np.flatnonzero(gaps)[0])]
            count = sum(g and o == owner for g, o in zip(gaps, columns[client], strict=True))
            raise DataError(
                f"Client {str(owner)!r}: column {column!r} lacks a value in {count} row(s); "
                "impute them or give missing='drop'."
            )
    keep = np.flatnonzero(~np.any(list(lacking.values()), axis=0))
    return {c: [columns[c][i] for i in keep] for c in used}


def _encode_features(
    columns: Columns, wanted: list[str], categorical: Sequence[str], dtype: str
) -> Array:
    blocks = []
    for column in wanted:
        if column in categorical:
            blocks.append(one_hot(columns[column]))
            continue
        numbers = to_numbers(columns[column])
        if numbers is None:
            text = next(v for v in columns[column] if to_numbers([v]) is None)
            raise DataError(
                f"Column {column!r} is not numeric (it has {str(text)!r}); list it in categorical, "
                "or leave it out of features."
            )
        blocks.append(numbers[:, None])
    return np.hstack(blocks).astype(dtype)


def _number_labels(
    values: Sequence[Any], task: str | None, classes: int | None
) -> tuple[Array, tuple[str, ...]]:
    """Return targets, and the class names when labels were numbered here."""
    numbers = to_numbers(values)
    whole = numbers is not None and all(v.is_integer() for v in numbers.tolist())
    if numbers is not None and (task == "regression" or (task is None and not whole)):
        return numbers, ()
    if task == "regression":
        raise DataError("The target column is not numeric, so it cannot be a regression target.")
    if classes is not None:
        if numbers is None:
            raise DataError(
                f"With classes={classes} the target column must hold labels 0..{classes - 1}, got "
                "text; leave classes out to have the labels numbered."
            )
        return numbers, ()
    keys = [str(v) for v in (values if numbers is None or not whole else map(int, numbers))]
    titles = sorted(set(keys), key=int if whole else str)
    code = {title: k for k, title in enumerate(titles)}
    return np.array([code[key] for key in keys], dtype=np.int64), tuple(titles)


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        value = value.strip()
        return None if value.lower() in MISSING else value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    return None if type(value).__name__ in ("NAType", "NaTType") else value


def _read_parquet(path: Path) -> Columns:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError(f"Reading {path} needs pyarrow: pip install 'equifed[data]'.") from None
    return dict(parquet.read_table(path).to_pydict())
