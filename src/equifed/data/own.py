"""Bring your own data: arrays by client, a table with a client column, or ready-made partitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from equifed.data.checks import DataError
from equifed.data.columns import Columns, grouped, one_hot, read_columns, to_numbers
from equifed.data.federation import Federation, Split
from equifed.data.tidy import as_pair, as_targets, one_kind

Array = NDArray[Any]
Clients = Mapping[str, tuple[Any, Any]]


def from_clients(
    clients: Clients,
    *,
    validation: Clients | None = None,
    test: Clients | None = None,
    name: str = "own data",
    classes: int | None = None,
    class_names: Sequence[str] = (),
    tokens: bool = False,
    dtype: str | None = None,
    source: Mapping[str, str] | None = None,
) -> Federation:
    """Build a federation from ``{client name: (X, y)}``.

    Integer, boolean or text targets are classes (text is numbered in sorted order and becomes
    ``class_names``); float targets are regression values, unless ``classes`` says otherwise.

    Parameters
    ----------
    clients, validation, test : mapping of str to (X, y)
        Samples by client. Held-out mappings may lack clients.
    name : str
        Name of the data set.
    classes : int, optional
        Number of classes; by default one more than the largest label.
    class_names : sequence of str
        Names of the classes.
    tokens : bool
        The features are indices of tokens (kept as int64), not numbers.
    dtype : {"float32", "float64"}, optional
        Convert the features; by default they keep their precision, and whole numbers become
        floats like those of the other clients, or float32.
    source : mapping, optional
        Provenance, for the report.

    Examples
    --------
    >>> fed = from_clients({"a": ([[0.5], [1.5]], ["no", "yes"]), "b": ([[2.5]], ["yes"])})
    >>> fed.class_names, fed.train.targets
    (('no', 'yes'), array([0, 1, 1]))
    """
    if not isinstance(clients, Mapping) or not clients:
        raise DataError("clients must be a non-empty mapping {name: (X, y)}.")
    names = tuple(clients)
    parts = {
        f"{label} of {client}": as_pair(client, label, pair)
        for label, given in (("train", clients), ("validation", validation), ("test", test))
        for client, pair in (given or {}).items()
    }
    for label, given in (("validation", validation), ("test", test)):
        strangers = sorted(set(given or {}) - set(names))
        if strangers:
            raise DataError(f"Client {strangers[0]!r} has {label} samples but no training samples.")
    inputs = one_kind({key: x for key, (x, _) in parts.items()}, tokens, dtype)
    targets, classes, found = as_targets({key: y for key, (_, y) in parts.items()}, classes)
    if classes is None and not tokens:
        targets = {key: y.astype(next(iter(inputs.values())).dtype) for key, y in targets.items()}

    def joined(label: str, given: Clients | None) -> Split | None:
        if given is None:
            return None
        first = f"train of {names[0]}"
        keys = [f"{label} of {client}" for client in names]
        return Split.from_clients(
            [(inputs.get(k, inputs[first][:0]), targets.get(k, targets[first][:0])) for k in keys]
        )

    train = joined("train", clients)
    assert train is not None
    return Federation(
        name=name,
        names=names,
        train=train,
        validation=joined("validation", validation),
        test=joined("test", test),
        classes=classes,
        class_names=tuple(class_names) or found,
        source=dict(source or {}),
    )


def from_table(
    table: Any | str | Path,
    *,
    client: str,
    target: str,
    features: Sequence[str] | None = None,
    categorical: Sequence[str] = (),
    split: str | None = None,
    task: Literal["classification", "regression"] | None = None,
    missing: Literal["error", "drop"] = "error",
    classes: int | None = None,
    name: str | None = None,
    dtype: str = "float32",
    source: Mapping[str, str] | None = None,
) -> Federation:
    """Build a federation from a table in which one column says whose row it is.

    Parameters
    ----------
    table : path, DataFrame, pyarrow.Table or mapping of columns
        A CSV file with a header line (the standard library reads it), a Parquet file (needs
        pyarrow), or an object with named columns.
    client, target : str
        Columns with the client's name and with what is to be predicted.
    features : sequence of str, optional
        Columns to predict from; by default all others.
    categorical : sequence of str
        Feature columns that are categories: each becomes one 0/1 column per value in the table.
    split : str, optional
        Column with ``train``, ``validation`` or ``test``; by default all rows are for training.
    task : {"classification", "regression"}, optional
        By default, targets that are not all whole numbers are regression values, text is classes.
    missing : {"error", "drop"}
        What to do with rows that lack a value (empty, ``NA``, ``NaN``, ``?``).
    classes : int, optional
        Number of classes, when labels are already 0..classes - 1; by default the distinct labels
        are numbered in sorted order.
    name, dtype, source
        As for :func:`from_clients`.

    Examples
    --------
    >>> table = {"site": ["n", "n", "s"], "age": [50, 61, 47], "ill": ["no", "yes", "no"]}
    >>> fed = from_table(table, client="site", target="ill")
    >>> fed.names, fed.train.inputs.ravel().tolist(), fed.class_names
    (('n', 's'), [50.0, 61.0, 47.0], ('no', 'yes'))
    """
    columns = read_columns(table)
    special = [client, target, *([split] if split else [])]
    wanted = list(features) if features is not None else [c for c in columns if c not in special]
    absent = [c for c in [*special, *wanted, *categorical] if c not in columns]
    if absent:
        raise DataError(f"The table has no column {absent[0]!r}; it has {', '.join(columns)}.")
    if not wanted:
        raise DataError("The table has no feature columns besides client, target and split.")
    columns = _complete(columns, [*special, *wanted], client, missing)
    inputs = _features(columns, wanted, categorical, dtype)
    targets, titles = _labels(columns[target], task, classes)
    owners = grouped(columns[client])
    part = np.array([str(v) for v in columns[split]] if split else ["train"] * len(inputs))
    illegal = sorted(set(part.tolist()) - {"train", "validation", "test"})
    if illegal:
        raise DataError(f"Column {split!r} must say train, validation or test, got {illegal[0]!r}.")

    def rows(label: str) -> dict[str, tuple[Array, Array]] | None:
        here = {c: r[part[r] == label] for c, r in owners.items()}
        if label != "train" and not any(len(r) for r in here.values()):
            return None
        return {c: (inputs[r], targets[r]) for c, r in here.items()}

    return from_clients(
        rows("train") or {},
        validation=rows("validation"),
        test=rows("test"),
        name=name or (Path(table).stem if isinstance(table, str | Path) else "own data"),
        classes=len(titles) if titles else classes,
        class_names=titles,
        dtype=dtype,
        source=source,
    )


def from_partitions(
    partitioner: Any,
    *,
    features: str | Sequence[str] | None = None,
    target: str = "label",
    **options: Any,
) -> Federation:
    """Build a federation from any object with ``load_partition(i)`` and ``num_partitions``.

    The partitioners of flwr-datasets are such objects. A partition is a pair ``(X, y)``, or has
    named columns (a mapping, a data frame, a Hugging Face data set): then ``target`` names the
    target and ``features`` the inputs, by default all other columns side by side.
    Further options go to :func:`from_clients`. Client i is called ``client i``.
    """
    count = partitioner.num_partitions
    count = int(count() if callable(count) else count)
    if count < 1:
        raise DataError(f"num_partitions must be at least 1, got {count}.")
    clients = {
        f"client {i}": _columns_pair(f"client {i}", partitioner.load_partition(i), features, target)
        for i in range(count)
    }
    return from_clients(clients, **options)


def _complete(columns: Columns, used: list[str], client: str, missing: str) -> Columns:
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


def _features(columns: Columns, wanted: list[str], categorical: Sequence[str], dtype: str) -> Array:
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


def _labels(
    values: Sequence[Any], task: str | None, classes: int | None
) -> tuple[Array, tuple[str, ...]]:
    """Return targets, and the class names when labels were numbered here."""
    numbers = to_numbers(values)
    whole = numbers is not None and bool((numbers == np.round(numbers)).all())
    if numbers is not None and (task == "regression" or (task is None and not whole)):
        return numbers, ()
    if task == "regression":
        raise DataError("The target column is not numeric, so it cannot be a regression target.")
    if classes is not None:
        if numbers is None:
            raise DataError("With classes given, the target column must hold labels 0..classes-1.")
        return numbers, ()
    keys = [str(v) for v in values] if numbers is None or not whole else _whole(numbers)
    titles = sorted(set(keys), key=int if whole else str)
    code = {title: k for k, title in enumerate(titles)}
    return np.array([code[key] for key in keys], dtype=np.int64), tuple(titles)


def _whole(numbers: Array) -> list[str]:
    return [str(int(v)) for v in numbers]


def _columns_pair(
    client: str, part: Any, features: str | Sequence[str] | None, target: str
) -> tuple[Any, Any]:
    if isinstance(part, Sequence) and len(part) == 2 and not hasattr(part, "column_names"):
        return part[0], part[1]
    named = part.with_format("numpy") if hasattr(part, "with_format") else part
    listed = (getattr(named, attribute, None) for attribute in ("column_names", "columns"))
    available = list(next((titles for titles in listed if titles is not None), named))
    wanted = [features] if isinstance(features, str) else list(features or ())
    wanted = wanted or [c for c in available if c != target]
    absent = [c for c in [target, *wanted] if c not in available]
    if absent:
        raise DataError(f"{client} has no column {absent[0]!r}; it has {', '.join(available)}.")
    arrays = [np.asarray(named[c]) for c in wanted]
    inputs = arrays[0] if len(arrays) == 1 else np.column_stack(arrays)
    return inputs, np.asarray(named[target])
