"""What data must look like before training: every refusal names the client and the cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from equifed.data.federation import Federation, Split

FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
TOKENS = np.dtype(np.int64)


class DataError(ValueError):
    """Data that cannot be trained on: says which client, what is wrong and what to change."""


def layout(inputs: Any, targets: Any, offsets: Any) -> None:
    """Check shapes and dtypes of a split, without looking at values."""
    for what, array in (("inputs", inputs), ("targets", targets), ("offsets", offsets)):
        if not isinstance(array, np.ndarray):
            raise DataError(f"Split {what} must be a NumPy array, got {type(array).__name__}.")
    for what, array in (("inputs", inputs), ("targets", targets)):
        if array.ndim == 0 or array.dtype not in (*FLOATS, TOKENS):
            raise DataError(
                f"Split {what} must be an array of float32, float64 or int64 with one row per "
                f"sample, got {array.dtype} of shape {array.shape}; convert with astype."
            )
    if len(inputs) != len(targets):
        raise DataError(f"Split has {len(inputs)} rows of inputs but {len(targets)} targets.")
    if targets.ndim > 2 or (targets.dtype == TOKENS and targets.ndim != 1):
        raise DataError(
            "Split targets must have shape (samples,), or (samples, k) for regression, "
            f"got {targets.dtype} of shape {targets.shape}."
        )
    if offsets.dtype != TOKENS or offsets.ndim != 1 or len(offsets) < 2:
        raise DataError(
            "Split offsets must be int64 of shape (clients + 1,), "
            f"got {offsets.dtype} of shape {offsets.shape}."
        )
    if offsets[0] != 0 or offsets[-1] != len(inputs) or (np.diff(offsets) < 0).any():
        raise DataError(
            f"Split offsets must rise from 0 to the {len(inputs)} rows, "
            f"got {offsets[0]}..{offsets[-1]}."
        )


def client_names(names: Any) -> None:
    """Check that client names are a tuple of different, non-empty texts."""
    if (
        not isinstance(names, tuple)
        or not names
        or not all(isinstance(n, str) and n for n in names)
    ):
        raise DataError(f"Client names must be a non-empty tuple of texts, got {names!r:.200}.")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f"Client names must differ, got {twice[0]!r} more than once.")


def class_names(classes: int | None, titles: tuple[str, ...]) -> None:
    """Check the number of classes and their names."""
    if classes is not None and (not isinstance(classes, int | np.integer) or classes < 1):
        raise DataError(f"classes must be a whole number of at least 1 or None, got {classes!r}.")
    if titles and len(titles) != (classes or 0):
        raise DataError(f"There are {classes} classes but {len(titles)} class names.")


def content(label: str, split: Split, names: Sequence[str], classes: int | None) -> None:
    """Check the values of one split: sizes, finite features, legal targets."""
    if len(split.offsets) - 1 != len(names):
        raise DataError(
            f"The {label} split has {len(split.offsets) - 1} clients, but there are "
            f"{len(names)} client names."
        )
    empty = np.flatnonzero(split.sizes == 0)
    if label == "train" and len(empty):
        raise DataError(
            f"Client {names[empty[0]]!r} has no training samples{_others(len(empty) - 1)}; "
            "remove it or give it samples."
        )
    _finite(f"{label} features", split.inputs, split, names)
    if split.inputs.dtype == TOKENS:
        _tokens(label, split, names)
    if classes is None:
        _values(label, split, names)
    else:
        _labels(label, split, names, classes)


def same_kind(label: str, split: Split, train: Split) -> None:
    """Check that a held-out split has the shape and dtype of the training split."""
    for what in ("inputs", "targets"):
        here, there = getattr(split, what), getattr(train, what)
        if here.shape[1:] != there.shape[1:] or here.dtype != there.dtype:
            raise DataError(
                f"The {label} {what} are {here.dtype} of shape {here.shape[1:]} per sample, "
                f"those of training {there.dtype} of shape {there.shape[1:]}; make them alike."
            )


def fractions(federation: Federation, **wanted: float) -> None:
    """Check the fractions to hold out, and that they would not replace what is already there."""
    for label, fraction in wanted.items():
        if not 0 <= fraction < 1:
            raise DataError(f"The {label} fraction must lie in [0, 1), got {fraction}.")
        if fraction > 0 and getattr(federation, label) is not None:
            raise DataError(
                f"{federation.name} already has a {label} split; ask for {label}=0 to keep it."
            )
    if sum(wanted.values()) >= 1:
        raise DataError(f"The held-out fractions must sum to less than 1, got {wanted}.")


def positions(clients: Iterable[str | int], names: Sequence[str]) -> list[int]:
    """Return the positions of clients given by name or position."""
    known = {name: i for i, name in enumerate(names)}
    index = []
    for client in clients:
        if isinstance(client, str):
            if client not in known:
                raise DataError(
                    f"There is no client {client!r}; there are {', '.join(names[:12])}."
                )
            index.append(known[client])
        elif 0 <= client < len(names):
            index.append(int(client))
        else:
            raise DataError(f"Client positions must lie in 0..{len(names) - 1}, got {client}.")
    if not index or len(set(index)) != len(index):
        raise DataError(f"A subset needs at least one client and no repeats, got {index}.")
    return index


def _finite(what: str, array: NDArray[Any], split: Split, names: Sequence[str]) -> None:
    """Refuse NaN and infinities, naming the first client that has any, and its column."""
    with np.errstate(all="ignore"):
        if array.dtype not in FLOATS or np.isfinite(array.sum(dtype=np.float64)):
            return  # a finite sum has finite terms; the costly search runs only when it is not
    bad = ~np.isfinite(array.reshape(len(array), int(np.prod(array.shape[1:]))))
    rows = np.flatnonzero(bad.any(1))
    if not len(rows):
        return  # the sum overflowed, the terms are finite
    owners = np.unique(split.owners()[rows])
    first = slice(split.offsets[owners[0]], split.offsets[owners[0] + 1])
    column = int(np.flatnonzero(bad[first].any(0))[0])
    count = int(bad[first].any(1).sum())
    kind = "NaN" if np.isnan(array.reshape(len(array), -1)[first, column]).any() else "infinity"
    place = np.unravel_index(column, array.shape[1:]) if array.ndim > 2 else (column,)
    where = ", ".join(str(k) for k in place)
    raise DataError(
        f"Client {names[owners[0]]!r}: {what} contain {kind} in column {where} "
        f"({count} row(s) affected){_others(len(owners) - 1)}; remove or impute these rows."
    )


def _tokens(label: str, split: Split, names: Sequence[str]) -> None:
    bad = np.flatnonzero((split.inputs.reshape(len(split.inputs), -1) < 0).any(1))
    if len(bad):
        raise DataError(
            f"Client {names[split.owners()[bad[0]]]!r}: {label} tokens must be at least 0, "
            f"got {split.inputs[bad[0]].min()}."
        )


def _values(label: str, split: Split, names: Sequence[str]) -> None:
    if split.targets.dtype not in FLOATS:
        raise DataError(
            f"The {label} targets are integers but classes is None; give classes=K for "
            "classification, or convert the targets to float for regression."
        )
    _finite(f"{label} targets", split.targets, split, names)


def _labels(label: str, split: Split, names: Sequence[str], classes: int) -> None:
    if split.targets.dtype != TOKENS:
        raise DataError(
            f"The {label} targets must be int64 labels 0..{classes - 1}, got "
            f"{split.targets.dtype}; convert them, or give classes=None for regression."
        )
    bad = np.flatnonzero((split.targets < 0) | (split.targets >= classes))
    if len(bad):
        owner = split.owners()[bad]
        raise DataError(
            f"Client {names[owner[0]]!r}: {label} labels must lie in 0..{classes - 1}, got "
            f"{split.targets[bad[0]]} ({int((owner == owner[0]).sum())} row(s))"
            f"{_others(len(np.unique(owner)) - 1)}; relabel them or raise classes."
        )


def _others(count: int) -> str:
    return f" (and {count} other client(s) likewise)" if count else ""
