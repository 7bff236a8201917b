"""Your arrays: those of all clients become of one kind, or it is said whose are different.

Clients come as ``{name: (X, y)}``, or as the partitions of a partitioner; X and y as lists, arrays,
tensors or data frames. What cannot be taken over without changing it is refused: a mask that would
be lost, numbers that would become text, a gap that would become a class called "None".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from equifed.data.columns import name_key, name_values
from equifed.data.split import (
    FLOATS,
    Array,
    DataError,
    Split,
    name_groups,
    refuse,
    refuse_twice,
)
from equifed.data.targets import check_task, number_targets

Clients = Mapping[Any, tuple[Any, ...]]
"""Client name to its features and targets, ``(X, y)``, and its samples' groups if there are any."""


class Aligned(NamedTuple):
    """Client names, splits of one kind, the number of classes and, if made here, their names."""

    names: tuple[str, ...]
    splits: dict[str, Split]
    classes: int | None
    class_names: tuple[str, ...]


class Samples(NamedTuple):
    """What one client has in one split."""

    client: str
    split: str
    inputs: Array
    targets: Array
    groups: Array | None
    titles: list[Any] | None

    @property
    def who(self) -> str:
        """Whose they are, for messages."""
        return f"Client {self.client!r}: {self.split}"


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
    titles, chosen = _check_class_names(class_names), _check_dtype(dtype)
    held = {"train": clients, "validation": validation, "test": test}
    given = {label: part for label, part in held.items() if part is not None}
    names, parts = _read_clients(given)
    _refuse_unlike(parts)
    inputs = _align_inputs({f"{p.who} X": p.inputs for p in parts}, tokens, chosen)
    labels = {f"{p.who} y": p.targets for p in parts}
    targets, classes, made = number_targets(labels, classes, task)
    if classes is None:
        kind = np.dtype(np.float32) if tokens else next(iter(inputs.values())).dtype
        targets = _align_shapes(targets, "targets", kind)
    done = [p._replace(inputs=inputs[f"{p.who} X"], targets=targets[f"{p.who} y"]) for p in parts]
    splits = {label: _join_clients(names, done, label) for label in given}
    return Aligned(names, splits, classes, titles or made)


def _check_dtype(dtype: Any) -> np.dtype[Any] | None:
    if dtype is None:
        return None
    try:
        chosen: np.dtype[Any] = np.dtype(dtype)
    except TypeError:
        chosen = np.dtype(object)
    if chosen not in FLOATS:
        raise DataError(f"dtype must be 'float32' or 'float64', got {dtype!r}.")
    return chosen


def _check_class_names(names: Any) -> tuple[str, ...]:
    titles = tuple(names) if isinstance(names, Iterable) and not isinstance(names, str) else (None,)
    if not all(isinstance(title, str) for title in titles):
        raise DataError(f"class_names must be a sequence of texts, got {names!r:.200}.")
    return tuple(map(str, titles))


# -- one client -----------------------------------------------------------------------------------


def _read_clients(given: Mapping[str, Clients]) -> tuple[tuple[str, ...], list[Samples]]:
    """Return the clients' names, and what each has in each split."""
    for label, part in given.items():
        if not isinstance(part, Mapping) or (label == "train" and not part):
            what = "clients" if label == "train" else label
            raise DataError(
                f"{what} must be a non-empty mapping {{name: (X, y)}}, got {type(part).__name__}."
            )
    refuse(
        (c for c in given["train"] if c is None or c != c or c == ""),
        lambda c: f"Client names must be non-empty texts or numbers, got {c!r}; name the client.",
    )
    names = name_values(given["train"], "Client names")
    samples = []
    for label, part in given.items():
        for client, pair in part.items():
            if name_key(client) not in names:
                raise DataError(f"Client {client!r} has {label} samples but no training samples.")
            samples.append(_read_samples(names[name_key(client)], label, pair))
    return tuple(names.values()), samples


def _read_samples(client: str, label: str, pair: Any) -> Samples:
    """Return a client's X and y as arrays with the same number of rows."""
    who = f"Client {client!r}: {label}"
    wrong = not isinstance(pair, Sequence) or isinstance(pair, str | bytes)
    if wrong or len(pair) not in (2, 3):
        raise DataError(f"{who}: expected a pair (X, y), got {type(pair).__name__}.")
    inputs, targets = as_array(pair[0], f"{who} X"), as_array(pair[1], f"{who} y")
    if len(inputs) != len(targets):
        raise DataError(
            f"{who} has X of shape {inputs.shape} and y of shape {targets.shape}; they need the "
            "same number of rows."
        )
    if label == "train" and len(inputs) == 0:
        raise DataError(f"Client {client!r} has no training samples; remove it or give it samples.")
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
    try:
        groups = name_groups(pair[2], len(inputs)) if len(pair) > 2 else None
    except DataError as error:
        raise DataError(f"{who}: {error}") from None
    titles = list(pair[0].columns) if is_frame(pair[0]) and len(inputs) else None
    return Samples(client, label, inputs, targets, groups, titles)


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
    refuse(
        (c for c in [target, *wanted] if c not in available),
        lambda c: f"{client} has no column {c!r}; it has {', '.join(available)}.",
    )
    arrays = [np.asarray(named[c]) for c in wanted]
    inputs = arrays[0] if len(arrays) == 1 else np.column_stack(arrays)
    return inputs, np.asarray(named[target])


# -- all clients ----------------------------------------------------------------------------------


def _refuse_unlike(parts: Sequence[Samples]) -> None:
    """Refuse data frames with other columns than the first, and groups of some clients only."""
    framed = [p for p in parts if p.titles is not None]
    refuse(
        (p for p in framed if p.titles != framed[0].titles),
        lambda p: (
            f"{p.who} X has the columns {p.titles}, {framed[0].who} X has "
            f"{framed[0].titles}; give all clients the same columns in the same order."
        ),
    )
    told = {p.split for p in parts if p.groups is not None}
    refuse(
        (p for p in parts if p.split in told and p.groups is None and len(p.inputs)),
        lambda p: f"{p.who} has no groups, others have; give all (X, y, groups).",
    )


def _align_inputs(
    arrays: dict[str, Array], tokens: bool, dtype: np.dtype[Any] | None
) -> dict[str, Array]:
    """Bring features to one dtype, or say which client is unlike the first."""
    for where, x in arrays.items():
        if x.dtype.kind not in ("iu" if tokens else "biuf") and len(x):
            kind = "whole numbers (tokens)" if tokens else "numbers"
            seen = "text" if x.dtype == object else x.dtype
            raise DataError(
                f"{where}: features must be {kind}, got {seen}, e.g. {x.ravel()[0]!r}; convert "
                "them."
            )
        if tokens and len(x) and x.dtype.kind == "u" and int(x.max()) >= 2**63:
            raise DataError(f"{where} holds the token {x.max()}; tokens must be below 2**63.")
    chosen = np.dtype(np.int64) if tokens else dtype or _common_float(arrays)
    return _align_shapes(arrays, "features", chosen)


def _common_float(arrays: dict[str, Array]) -> np.dtype[Any]:
    """Return the precision that all clients' features have; whole numbers fit into any."""
    floats = {x.dtype: where for where, x in arrays.items() if x.dtype.kind == "f" and len(x)}
    if len(floats) > 1:
        (one, here), (two, there), *_ = floats.items()
        raise DataError(
            f"{here} is {one}, {there} is {two}; give dtype='float32' or dtype='float64' to "
            "convert all."
        )
    held = next(iter(floats), np.dtype(np.float32))
    # A model computes in single or double precision: half becomes single, extended double.
    return held if held in FLOATS else np.dtype(np.float32 if held.itemsize < 4 else np.float64)


def _align_shapes(arrays: dict[str, Array], what: str, dtype: np.dtype[Any]) -> dict[str, Array]:
    """Bring features or targets to one precision, or say whose shape is unlike the first's."""
    first, reference = next((where, a) for where, a in arrays.items() if len(a))
    shape = reference.shape[1:]
    refuse(
        (where for where, a in arrays.items() if a.shape[1:] != shape and len(a)),
        lambda where: (
            f"{where} has shape {arrays[where].shape[1:]} per sample, {first} has "
            f"{shape}; all clients need the same {what}."
        ),
    )
    return {where: _cast(where, a, dtype).reshape(len(a), *shape) for where, a in arrays.items()}


def _cast(where: str, values: Array, dtype: np.dtype[Any]) -> Array:
    """Return the values in that precision, or say which of them does not fit."""
    with np.errstate(over="ignore"):
        cast = values.astype(dtype)
    more = ", or give dtype='float64'" if dtype == np.float32 else ""
    refuse(
        values[np.isinf(cast) & np.isfinite(values)],
        lambda lost: f"{where} holds {lost}, which {dtype} cannot hold; rescale it{more}.",
    )
    return cast


def _join_clients(names: Sequence[str], parts: Sequence[Samples], label: str) -> Split:
    """Return a split of all clients; those without samples there have none."""
    held = {p.client: p for p in parts if p.split == label}
    none = parts[0]._replace(inputs=parts[0].inputs[:0], targets=parts[0].targets[:0], groups=None)
    rows = [held.get(name, none) for name in names]
    told = [p.groups for p in rows if p.groups is not None]
    groups = np.concatenate(told) if told else None
    return replace(Split.from_clients([(p.inputs, p.targets) for p in rows]), groups=groups)


# -- one array ------------------------------------------------------------------------------------


def as_array(value: Any, where: str) -> Array:
    """Return what a user calls an array as numbers (b, i, u, f), or text as an array of objects.

    ``where`` says whose it is, for messages: ``"Client 'a': train X"``.

    >>> as_array([True, False], "y"), as_array(["no", "yes"], "y")
    (array([ True, False]), array(['no', 'yes'], dtype=object))
    """
    _refuse_mask(value, where)
    if is_frame(value):
        return _join_columns(value, where)
    if hasattr(value, "toarray"):
        raise DataError(f"{where} is sparse ({type(value).__name__}); give {where[-1]}.toarray().")
    try:
        array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
        if array.dtype.kind in "USO" and not isinstance(value, np.ndarray):
            array = np.asarray(value, dtype=object)  # 1 and "1" in one list stay what they are
    except Exception as error:  # whatever a foreign __array__ raises
        raise DataError(
            f"{where} is no array ({type(value).__name__}; {str(error)[:120]}); rows of unequal "
            "length must be padded or cut to one length."
        ) from None
    if array.ndim == 0:
        raise DataError(
            f"{where} is a single {type(value).__name__}; give an array with one row per sample."
        )
    if array.dtype.kind in "ST":
        texts = [
            v.decode("utf-8", "backslashreplace") if isinstance(v, bytes) else v
            for v in array.ravel().tolist()
        ]
        array = np.array(texts, object).reshape(array.shape)
    if array.dtype.kind == "U":
        return array.astype(object)
    if array.dtype.kind == "O":
        return _unpack(array, where)
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"{where} has the dtype {array.dtype}, e.g. {array.ravel()[:1]}; numbers are needed: "
            "convert it, dates to days since a first one for instance."
        )
    return array


def is_frame(value: Any) -> bool:
    """Tell whether a value has named columns of a type each, as pandas' and polars' frames do."""
    return hasattr(value, "columns") and hasattr(value, "dtypes")


def _refuse_mask(value: Any, where: str) -> None:
    """Refuse hidden entries: as a plain array they would count with whatever lies below."""
    rows = value if isinstance(value, list | tuple) else [value]
    for k, row in enumerate(rows):
        if isinstance(row, np.ma.MaskedArray) and np.ma.getmaskarray(row).any():
            place = [int(i) for i in np.argwhere(np.ma.getmaskarray(row))[0]]
            place = place if row is value else [k, *place]
            raise DataError(
                f"{where} has masked values, the first at {place}; fill them (.filled(value)) or "
                "leave these rows out."
            )


def _join_columns(frame: Any, where: str) -> Array:
    """Return a data frame as one array, or say which column has no numbers."""
    columns = list(frame.columns)
    refuse_twice(columns, f"{where} has the column {{!r}} twice; rename or drop one of them.")
    if not columns:
        return np.empty((len(frame), 0))
    parts: list[Array] = []
    for column in columns:
        odd = "is of type category" * (str(getattr(frame[column], "dtype", "")) == "category")
        if not odd or len(columns) == 1:
            parts.append(as_array(frame[column], f"{where}, column {column!r}"))
        if not odd and parts[-1].dtype == object:
            odd = f"holds text (e.g. {parts[-1][:1].tolist()})"
        if odd and len(columns) > 1:
            raise DataError(
                f"{where}: column {column!r} {odd}; turn it into 0/1 columns (pandas.get_dummies), "
                "or use Federation.from_table(..., categorical=[...])."
            )
    return np.column_stack(parts)


def _unpack(array: Array, where: str) -> Array:
    """Return an array of Python objects as numbers or as text, or name the one that is neither."""
    values: Sequence[Any] = array.ravel().tolist()
    odd = next((k for k, v in enumerate(values) if not isinstance(v, str | Real | np.bool_)), None)
    if odd is None and (all(isinstance(v, str) for v in values) and values):
        return array
    if odd is None:
        odd = next((k for k, v in enumerate(values) if isinstance(v, str) or v != v), None)
    if odd is not None:
        place = [int(i) for i in np.unravel_index(odd, array.shape)]
        value = values[odd]
        raise DataError(
            f"{where} holds {value!r:.60} ({type(value).__name__}) at {place}, among others; give "
            "all numbers or all text, without gaps."
        )
    whole = all(isinstance(v, Integral | np.bool_) for v in values)
    try:
        return np.array(values, np.int64 if whole else np.float64).reshape(array.shape)
    except OverflowError:
        large = max(values, key=abs)
        raise DataError(f"{where} holds {large!r:.60}, too large a number; rescale it.") from None
