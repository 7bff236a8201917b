"""Bring your own arrays: all clients' become of one kind, or it is said whose are different.

Clients come as ``{name: (X, y)}``, or as the partitions of a partitioner.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from equifed.data.foreign import as_array, is_frame, name_key, name_values
from equifed.data.split import FLOATS, Array, DataError, Split, check_class_names, name_groups
from equifed.data.targets import check_task, number_targets

Clients = Mapping[Any, tuple[Any, ...]]
"""Client name to its features and targets, ``(X, y)``, and its samples' groups if there are any."""


class Aligned(NamedTuple):
    """Client names, splits of one kind, the number of classes and, if made here, their names."""

    names: tuple[str, ...]
    splits: dict[str, Split]
    classes: int | None
    class_names: tuple[str, ...]


def align_clients(
    clients: Clients,
    validation: Clients | None = None,
    test: Clients | None = None,
    classes: int | None = None,
    class_names: Sequence[str] = (),
    task: str | None = None,
    tokens: bool = False,
    dtype: str | None = None,
) -> Aligned:
    """Bring the arrays of all clients to one shape and dtype; see ``Federation.from_clients``."""
    check_task(task, classes)
    titles = check_class_names(class_names)
    chosen = check_dtype(dtype)
    held = {"train": clients, "validation": validation, "test": test}
    given = {label: part for label, part in held.items() if part is not None}
    for label, part in given.items():
        if not isinstance(part, Mapping) or (label == "train" and not part):
            what = "clients" if label == "train" else label
            raise DataError(
                f"{what} must be a non-empty mapping {{name: (X, y)}}, got {type(part).__name__}."
            )
    names = _name_clients(clients)
    pairs: dict[str, tuple[Array, Array]] = {}
    columns: dict[str, list[Any]] = {}
    groups: dict[str, Array] = {}
    for label, part in given.items():
        for client, pair in part.items():
            if name_key(client) not in names:
                raise DataError(f"Client {client!r} has {label} samples but no training samples.")
            who = f"Client {names[name_key(client)]!r}: {label}"
            pairs[who] = _as_pair(who, pair, label == "train")
            if len(pair) > 2:
                groups[who] = _as_groups(who, pair[2], len(pairs[who][0]))
            if is_frame(pair[0]) and len(pairs[who][0]):
                columns[who] = list(pair[0].columns)
    _refuse_other_columns(columns)
    inputs = _align_inputs({who: x for who, (x, _) in pairs.items()}, tokens, chosen)
    numbered = number_targets({f"{who} y": y for who, (_, y) in pairs.items()}, classes, task)
    targets, classes, made = numbered
    kind = next(iter(inputs.values())).dtype
    if classes is None:
        targets = _align_values(targets, np.dtype(np.float32) if tokens else kind)
    _refuse_half_groups(groups, inputs)
    parts = list(names.values()), inputs, targets, groups
    splits = {label: _join_clients(label, *parts) for label in given}
    return Aligned(tuple(names.values()), splits, classes, titles or made)


def check_dtype(dtype: Any) -> np.dtype[Any] | None:
    """Return the precision that was asked for."""
    if dtype is None:
        return None
    try:
        chosen: np.dtype[Any] = np.dtype(dtype)
    except TypeError:
        chosen = np.dtype(object)
    if chosen not in FLOATS:
        raise DataError(f"dtype must be 'float32' or 'float64', got {dtype!r}.")
    return chosen


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


def _name_clients(clients: Clients) -> dict[Hashable, str]:
    for client in clients:
        if client is None or client != client or client == "":
            raise DataError(
                f"Client names must be non-empty texts or numbers, got {client!r}; name the client."
            )
    return name_values(clients, "Client names")


def _as_pair(who: str, pair: Any, training: bool) -> tuple[Array, Array]:
    """Return a client's X and y as arrays with the same number of rows."""
    wrong = not isinstance(pair, Sequence) or isinstance(pair, str | bytes)
    if wrong or len(pair) not in (2, 3):
        raise DataError(f"{who}: expected a pair (X, y), got {type(pair).__name__}.")
    inputs, targets = as_array(pair[0], f"{who} X"), as_array(pair[1], f"{who} y")
    if len(inputs) != len(targets):
        raise DataError(
            f"{who} has X of shape {inputs.shape} and y of shape {targets.shape}; they need the "
            "same number of rows."
        )
    if training and len(inputs) == 0:
        raise DataError(
            f"{who.rpartition(':')[0]} has no training samples; remove it or give it samples."
        )
    if len(inputs) and inputs.ndim == 1:
        raise DataError(
            f"{who} X has the shape {inputs.shape}, one axis; give one row per sample: "
            "X.reshape(-1, 1) if every sample is one number, X.reshape(1, -1) if X is one sample."
        )
    if len(inputs) and 0 in inputs.shape:
        raise DataError(f"{who} X has the shape {inputs.shape}: no features; give at least one.")
    if len(targets) and (targets.ndim > 2 or 0 in targets.shape):
        raise DataError(
            f"{who} y has the shape {targets.shape}; give one target, or one row of them, per "
            "sample."
        )
    return inputs, targets


def _as_groups(who: str, groups: Any, rows: int) -> Array:
    try:
        return name_groups(groups, rows)
    except DataError as error:
        raise DataError(f"{who}: {error}") from None


def _refuse_half_groups(groups: dict[str, Array], inputs: dict[str, Array]) -> None:
    """Refuse groups of some clients' samples of a split and not of others'."""
    told = {who.rpartition(": ")[2] for who in groups}
    without = [
        who for who, x in inputs.items()
        if len(x) and who not in groups and who.rpartition(": ")[2] in told
    ]  # fmt: skip
    if without:
        raise DataError(f"{without[0]} has no groups, others have; give all (X, y, groups).")


def _refuse_other_columns(columns: dict[str, list[Any]]) -> None:
    """Refuse data frames whose columns have other names, or another order, than the first's."""
    for who, titles in columns.items():
        first, expected = next(iter(columns.items()))
        if titles != expected:
            raise DataError(
                f"{who} X has the columns {titles}, {first} X has {expected}; give all clients the "
                "same columns in the same order."
            )


def _align_inputs(
    arrays: dict[str, Array], tokens: bool, dtype: np.dtype[Any] | None
) -> dict[str, Array]:
    """Bring features to one dtype, or say which client is unlike the first."""
    first, reference = next((who, x) for who, x in arrays.items() if len(x))
    shape = reference.shape[1:]
    for who, x in arrays.items():
        if x.dtype.kind not in ("iu" if tokens else "biuf") and len(x):
            kind = "whole numbers (tokens)" if tokens else "numbers"
            seen = "text" if x.dtype == object else x.dtype
            raise DataError(
                f"{who} X: features must be {kind}, got {seen}, e.g. {x.ravel()[0]!r}; convert "
                "them."
            )
        if x.shape[1:] != shape and len(x):
            raise DataError(
                f"{who} X has shape {x.shape[1:]} per sample, {first} X has {shape}; all clients "
                "need the same features."
            )
    if tokens:
        return {who: _as_tokens(who, x).reshape(len(x), *shape) for who, x in arrays.items()}
    chosen = dtype or _common_float(arrays)
    return {who: _cast(f"{who} X", x, chosen).reshape(len(x), *shape) for who, x in arrays.items()}


def _common_float(arrays: dict[str, Array]) -> np.dtype[Any]:
    """Return the precision that all clients' features have; whole numbers fit into any."""
    floats = {x.dtype: who for who, x in arrays.items() if x.dtype.kind == "f" and len(x)}
    if len(floats) > 1:
        (one, here), (two, there), *_ = floats.items()
        raise DataError(
            f"{here} X is {one}, {there} X is {two}; give dtype='float32' or dtype='float64' to "
            "convert all."
        )
    held = next(iter(floats), np.dtype(np.float32))
    # A model computes in single or double precision: half becomes single, extended double.
    return held if held in FLOATS else np.dtype(np.float32 if held.itemsize < 4 else np.float64)


def _align_values(targets: dict[str, Array], dtype: np.dtype[Any]) -> dict[str, Array]:
    """Bring regression targets to one shape and precision."""
    first, reference = next((who, y) for who, y in targets.items() if len(y))
    shape = reference.shape[1:]
    for who, y in targets.items():
        if y.shape[1:] != shape and len(y):
            raise DataError(
                f"{who} has shape {y.shape[1:]} per sample, {first} has {shape}; all clients need "
                "the same targets."
            )
    return {who: _cast(who, y, dtype).reshape(len(y), *shape) for who, y in targets.items()}


def _cast(where: str, values: Array, dtype: np.dtype[Any]) -> Array:
    """Return the values in that precision, or say which of them does not fit."""
    with np.errstate(over="ignore"):
        cast = values.astype(dtype)
    lost = np.isinf(cast) & np.isfinite(values)
    if lost.any():
        raise DataError(
            f"{where} holds {values[lost][0]}, which {dtype} cannot hold; rescale it"
            f"{', or give dtype=' + repr('float64') if dtype == np.float32 else ''}."
        )
    return cast


def _as_tokens(who: str, tokens: Array) -> Array:
    if len(tokens) and tokens.dtype.kind == "u" and int(tokens.max()) >= 2**63:
        raise DataError(f"{who} X holds the token {tokens.max()}; tokens must be below 2**63.")
    return tokens.astype(np.int64)


def _join_clients(
    label: str,
    names: list[str],
    inputs: dict[str, Array],
    targets: dict[str, Array],
    groups: dict[str, Array],
) -> Split:
    """Return a split of all clients; those without samples there have none."""
    x, y = next(iter(inputs.values())), next(iter(targets.values()))
    nothing = x[:0], y[:0]
    keys = [f"Client {name!r}: {label}" for name in names]
    joined = Split.from_clients(
        [(inputs[k], targets[f"{k} y"]) if k in inputs else nothing for k in keys]
    )
    told = [groups[k] for k in keys if k in groups]
    return replace(joined, groups=np.concatenate(told)) if told else joined
