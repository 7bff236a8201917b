"""Bring the arrays of different clients to one kind, or say which client is unlike the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equifed.data.checks import FLOATS, DataError

Array = NDArray[Any]


def as_pair(client: str, label: str, pair: Any) -> tuple[Array, Array]:
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


def one_kind(arrays: dict[str, Array], tokens: bool, dtype: str | None) -> dict[str, Array]:
    """Bring features to one dtype, or say which client is unlike the first."""
    (first, reference), *_ = arrays.items()
    for key, x in arrays.items():
        if x.dtype.kind not in ("iu" if tokens else "biuf"):
            kind = "whole numbers (tokens)" if tokens else "numbers"
            raise DataError(f"Features must be {kind}, got {x.dtype} in {key}.")
        if x.shape[1:] != reference.shape[1:] and len(x):
            raise DataError(
                f"Mismatched features: {key} has shape {x.shape[1:]} per sample, {first} has "
                f"{reference.shape[1:]}; all clients need the same features."
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
    shape = reference.shape[1:]
    return {key: x.reshape(len(x), *shape).astype(chosen) for key, x in arrays.items()}


def as_targets(
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
        if y.dtype.kind == "f" and not (np.isfinite(y) & (y == np.round(y))).all():
            raise DataError(f"Labels must be whole numbers, got {y[y != np.round(y)][0]} in {key}.")
    labels = {key: _column(y.astype(np.int64)) for key, y in arrays.items()}
    top = max(int(y.max()) for key, y in labels.items() if key in filled)
    return labels, classes if classes is not None else max(top + 1, 2), ()


def _column(labels: Array) -> Array:
    """Return labels of shape (m, 1) as (m,)."""
    return labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
