"""Bring your own arrays: all clients' become of one kind, or it is said whose are different.

Clients come as ``{name: (X, y)}``, or as the partitions of a partitioner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from equifed.data.split import FLOATS, Array, DataError, Split

Clients = Mapping[str, tuple[Any, Any]]
"""Client name to its features and targets, ``(X, y)``."""


class Aligned(NamedTuple):
    """Splits of one kind, the number of classes, and class names where the targets were text."""

    splits: dict[str, Split]
    classes: int | None
    class_names: tuple[str, ...]


def align_clients(
    clients: Clients,
    validation: Clients | None = None,
    test: Clients | None = None,
    classes: int | None = None,
    tokens: bool = False,
    dtype: str | None = None,
) -> Aligned:
    """Bring the arrays of all clients to one shape and dtype; see ``Federation.from_clients``."""
    if not isinstance(clients, Mapping) or not clients:
        raise DataError("clients must be a non-empty mapping {name: (X, y)}.")
    held = {"train": clients, "validation": validation, "test": test}
    given = {label: part for label, part in held.items() if part is not None}
    pairs = {
        f"{label} of {client}": _as_pair(client, label, pair)
        for label, part in given.items()
        for client, pair in part.items()
    }
    for label, part in given.items():
        strangers = sorted(set(part) - set(clients))
        if strangers:
            raise DataError(f"Client {strangers[0]!r} has {label} samples but no training samples.")
    inputs = _align_inputs({key: x for key, (x, _) in pairs.items()}, tokens, dtype)
    targets, classes, titles = _align_targets({key: y for key, (_, y) in pairs.items()}, classes)
    first = f"train of {next(iter(clients))}"
    if classes is None and not tokens:
        targets = {key: y.astype(inputs[first].dtype) for key, y in targets.items()}
    nothing = inputs[first][:0], targets[first][:0]  # of a client without held-out samples
    splits = {}
    for label in given:
        keys = [f"{label} of {client}" for client in clients]
        parts = [(inputs[k], targets[k]) if k in inputs else nothing for k in keys]
        splits[label] = Split.from_clients(parts)
    return Aligned(splits, classes, titles)


def read_partitions(
    partitioner: Any, features: str | Sequence[str] | None, target: str
) -> dict[str, tuple[Any, Any]]:
    """Return ``{client name: (X, y)}`` of a partitioner; see ``Federation.from_partitions``."""
    count = partitioner.num_partitions
    count = int(count() if callable(count) else count)
    if count < 1:
        raise DataError(f"num_partitions must be at least 1, got {count}.")
    return {
        f"client {i}": _take_columns(f"client {i}", partitioner.load_partition(i), features, target)
        for i in range(count)
    }


def _take_columns(
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


def _as_pair(client: str, label: str, pair: Any) -> tuple[Array, Array]:
    """Return a client's X and y as arrays with the same number of rows."""
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise DataError(f"Client {client!r}: expected a pair (X, y), got {type(pair).__name__}.")
    try:
        inputs, targets = np.asarray(pair[0]), np.asarray(pair[1])
    except ValueError as error:
        raise DataError(f"Client {client!r}: rows of unequal length in {label}: {error}.") from None
    if inputs.ndim == 0 or len(inputs) != len(np.atleast_1d(targets)):
        raise DataError(
            f"Client {client!r}: {label} has X of shape {inputs.shape} and y of shape "
            f"{targets.shape}; they need the same number of rows."
        )
    if label == "train" and len(inputs) == 0:
        raise DataError(f"Client {client!r} has no training samples; remove it or give it samples.")
    return inputs, targets


def _align_inputs(arrays: dict[str, Array], tokens: bool, dtype: str | None) -> dict[str, Array]:
    """Bring features to one dtype, or say which client is unlike the first."""
    (first, reference), *_ = arrays.items()
    shape = reference.shape[1:]
    for key, x in arrays.items():
        if x.dtype.kind not in ("iu" if tokens else "biuf"):
            kind = "whole numbers (tokens)" if tokens else "numbers"
            raise DataError(f"Features must be {kind}, got {x.dtype} in {key}; convert them.")
        if x.shape[1:] != shape and len(x):
            raise DataError(
                f"Mismatched features: {key} has shape {x.shape[1:]} per sample, {first} has "
                f"{shape}; all clients need the same features."
            )
    if tokens:
        return {key: x.astype(np.int64) for key, x in arrays.items()}
    floats = {x.dtype: key for key, x in arrays.items() if x.dtype.kind == "f"}
    if dtype is None and len(floats) > 1:
        (one, here), (two, there), *_ = floats.items()
        raise DataError(
            f"Mismatched features: {here} is {one}, {there} is {two}; give dtype='float32' or "
            "dtype='float64' to convert all."
        )
    chosen = np.dtype(dtype) if dtype else next(iter(floats), np.dtype(np.float32))
    if chosen not in FLOATS:
        chosen = np.dtype(np.float32)  # half precision becomes single, a model cannot use less
    return {key: x.reshape(len(x), *shape).astype(chosen) for key, x in arrays.items()}


def _align_targets(
    arrays: dict[str, Array], classes: int | None
) -> tuple[dict[str, Array], int | None, tuple[str, ...]]:
    """Return the targets as int64 or float, the number of classes, and class names from text."""
    filled = {key: y for key, y in arrays.items() if len(y)}
    kinds = {"text" if y.dtype.kind in "USO" else y.dtype.kind for y in filled.values()}
    if kinds == {"text"}:
        titles = tuple(sorted({str(v) for y in filled.values() for v in y}))
        code = {title: k for k, title in enumerate(titles)}
        coded = {key: np.array([code[str(v)] for v in y], np.int64) for key, y in arrays.items()}
        return coded, classes or len(titles), titles
    if not kinds <= {"b", "i", "u", "f"}:
        raise DataError(f"Targets must be all numbers or all text, got kinds {sorted(kinds)}.")
    if classes is None and "f" in kinds:
        return {key: y.astype(np.float64) for key, y in arrays.items()}, None, ()
    for key, y in filled.items():
        strange = ~(np.isfinite(y) & (y == np.round(y)))
        if strange.any():
            raise DataError(f"Labels must be whole numbers, got {y[strange][0]} in {key}.")
    labels = {key: _as_vector(y.astype(np.int64)) for key, y in arrays.items()}
    top = max(int(y.max()) for key, y in labels.items() if key in filled)
    return labels, classes if classes is not None else max(top + 1, 2), ()


def _as_vector(labels: Array) -> Array:
    """Return labels of shape (m, 1) as (m,)."""
    return labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
