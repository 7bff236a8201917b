"""Your arrays: those of all clients become of one kind, or it is said whose are different."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from equifed.data.columns import name_key, name_values
from equifed.data.split import (
    FLOATS,
    MANY,
    Array,
    DataError,
    Split,
    ask_task,
    check_task,
    name_groups,
    refuse,
    refuse_any,
    refuse_twice,
)

Clients: TypeAlias = Mapping[Any, Any]
"""Client name to its features and targets, ``(X, y)`` or ``(X, y, groups)``, or to a data set."""

Numbered: TypeAlias = tuple[dict[str, Array], int | None, tuple[str, ...]]


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
    held: Mapping[str, Clients | None], classes: int | None, class_names: Any, task: str | None,
    tokens: bool, dtype: Any,
) -> dict[str, Any]:  # fmt: skip
    """Bring the arrays of all clients, by split, to one shape and dtype."""
    check_task(task, classes)
    listed = isinstance(class_names, Iterable) and not isinstance(class_names, str)
    if not listed or not all(isinstance(title, str) for title in class_names):
        raise DataError(f"class_names must be a sequence of texts, got {class_names!r:.200}.")
    if dtype is not None and getattr(dtype, "__name__", str(dtype)) not in ("float32", "float64"):
        raise DataError(f"dtype must be 'float32' or 'float64', got {dtype!r}.")
    given = {label: part for label, part in held.items() if part is not None}
    names, parts = _read_clients(given)
    _refuse_unlike(parts)
    inputs = _align_inputs({f"{p.who} X": p.inputs for p in parts}, tokens, dtype)
    labels = {f"{p.who} y": p.targets for p in parts}
    targets, classes, made = number_targets(labels, classes, task)
    if classes is None:
        kind = np.dtype(np.float32) if tokens else next(iter(inputs.values())).dtype
        targets = _align_shapes(targets, "targets", kind)
    done = [p._replace(inputs=inputs[f"{p.who} X"], targets=targets[f"{p.who} y"]) for p in parts]
    splits = {label: _join_clients(names, done, label) for label in given}
    return {"names": names, "classes": classes, "class_names": tuple(class_names) or made, **splits}


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
    if not isinstance(pair, Sequence) or isinstance(pair, str | bytes) or len(pair) not in (2, 3):
        raise DataError(f"{who}: expected a pair (X, y), got {type(pair).__name__}.")
    x, y = as_array(pair[0], f"{who} X"), as_array(pair[1], f"{who} y")
    filled = len(x) > 0
    refuse_any(
        (len(x) != len(y), f"{who} has X of shape {x.shape} and y of shape {y.shape}; they need "
         "the same number of rows."),
        (label == "train" and not filled, f"Client {client!r} has no training samples; remove it "
         "or give it samples."),
        (filled and x.ndim == 1, f"{who} X has the shape {x.shape}, one axis; give one row per "
         "sample: X.reshape(-1, 1) if every sample is one number, X.reshape(1, -1) if X is one."),
        (filled and 0 in x.shape, f"{who} X has the shape {x.shape}: no features; give some."),
        (filled and (y.ndim > 2 or 0 in y.shape), f"{who} y has the shape {y.shape}; give one "
         "target, or one row of them, per sample."),
    )  # fmt: skip
    try:
        groups = name_groups(pair[2], len(x)) if len(pair) > 2 else None
    except DataError as error:
        raise DataError(f"{who}: {error}") from None
    titles = list(pair[0].columns) if is_frame(pair[0]) and filled else None
    return Samples(client, label, x, y, groups, titles)


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


def _align_inputs(arrays: dict[str, Array], tokens: bool, dtype: Any) -> dict[str, Array]:
    """Bring features to one dtype, or say which client is unlike the first."""
    for where, x in arrays.items():
        if x.dtype.kind not in ("iu" if tokens else "biuf") and len(x):
            kind = "whole numbers (tokens)" if tokens else "numbers"
            seen = "text" if x.dtype == object else x.dtype
            raise DataError(
                f"{where}: features must be {kind}, got {seen}, e.g. {x.ravel()[0]!r}; convert "
                "them."
            )
    if tokens or dtype:
        return _align_shapes(arrays, "features", np.dtype(np.int64 if tokens else dtype))
    floats = {x.dtype: where for where, x in arrays.items() if x.dtype.kind == "f" and len(x)}
    if len(floats) > 1:
        (one, here), (two, there), *_ = floats.items()
        raise DataError(
            f"{here} is {one}, {there} is {two}; give dtype='float32' or dtype='float64' to "
            "convert all."
        )
    held = next(iter(floats), np.dtype(np.float32))  # whole numbers fit into any precision
    if held not in FLOATS:  # a model computes in single or double precision
        held = np.dtype(np.float32 if held.itemsize < 4 else np.float64)
    return _align_shapes(arrays, "features", held)


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
    more, cast = ", or give dtype='float64'" if dtype == np.float32 else "", dict[str, Array]()
    for where, values in arrays.items():
        with np.errstate(over="ignore"):
            cast[where] = values.astype(dtype, copy=False).reshape(len(values), *shape)
        lost = values[np.isinf(cast[where].reshape(values.shape)) & np.isfinite(values)]
        if len(lost):
            raise DataError(
                f"{where} holds {lost[0]}, which {dtype} cannot hold; rescale it{more}."
            )
    return cast


def _join_clients(names: Sequence[str], parts: Sequence[Samples], label: str) -> Split:
    """Return a split of all clients; those without samples there have none."""
    held = {p.client: p for p in parts if p.split == label}
    none = parts[0]._replace(inputs=parts[0].inputs[:0], targets=parts[0].targets[:0], groups=None)
    rows = [held.get(name, none) for name in names]
    told = [p.groups for p in rows if p.groups is not None]
    groups = np.concatenate(told) if told else None
    return Split.from_clients([(p.inputs, p.targets) for p in rows], groups)


# -- classes or values ----------------------------------------------------------------------------


def number_targets(arrays: Mapping[str, Array], classes: int | None, task: str | None) -> Numbered:
    """Return the targets as int64 or float64, the number of classes, and names given to classes."""
    filled = {where: y for where, y in arrays.items() if len(y)}
    texts = [where for where, y in filled.items() if y.dtype == object]
    numbers = [where for where in filled if where not in texts]
    fractions = any(y.dtype.kind == "f" for y in filled.values())
    refuse_any(
        (texts and numbers, f"{(texts or '?')[0]} is text, {(numbers or '?')[0]} numbers; give all "
         "text or all numbers."),
        (texts and task == "regression", f"{(texts or '?')[0]} is text, which is no value to "
         "regress on; give numbers."),
    )  # fmt: skip
    if task == "regression" or (task is None and classes is None and fractions and not texts):
        return {where: y.astype(np.float64) for where, y in arrays.items()}, None, ()
    labels = {where: _as_labels(y, where) for where, y in arrays.items()}
    distinct = np.unique(np.concatenate([labels[where] for where in filled]))
    if classes is not None and texts and classes != len(distinct):
        raise DataError(
            f"{texts[0]}: there are {len(distinct)} different texts ({', '.join(distinct[:5])}) "
            f"but classes={classes}; give labels 0..{classes - 1}, or leave classes out."
        )
    if classes is not None and not texts:
        return labels, classes, ()
    natural = not texts and len(distinct) == distinct[-1] + 1 and distinct[0] == 0  # 0..K - 1
    if task is None and not texts and (not natural or len(distinct) > MANY):
        odd = distinct[0] if distinct[0] < 0 else distinct[-1]
        where = next(where for where, y in labels.items() if odd in y)
        ask_task(where, distinct.tolist(), ", or classes=K if they are labels 0..K - 1")
    if natural:
        return labels, max(len(distinct), 2), ()
    coded = {where: np.searchsorted(distinct, y) for where, y in labels.items()}
    return coded, len(distinct), tuple(str(v) for v in distinct)


def _as_labels(y: Array, where: str) -> Array:
    """Return texts, or whole numbers as int64, of shape (m,)."""
    if len(y) and y.ndim > 1 and y.shape[1:] != (1,):
        raise DataError(
            f"{where} has shape {y.shape}; give one label per sample (one-hot rows: "
            ".argmax(1)), or floats for a regression."
        )
    y = y.ravel()
    if y.dtype == object:
        return y
    numbers = y.astype(np.float64)
    refuse(
        np.flatnonzero(~(np.isfinite(numbers) & (numbers == np.round(numbers)))),
        lambda k: (
            f"{where}: labels must be whole numbers, got {y[k]} in row {k}; correct "
            "them, or leave classes out for a regression."
        ),
    )
    refuse(
        y[np.abs(numbers) >= 2**53],
        lambda large: f"{where}: {large} is no label; relabel the classes 0..K - 1.",
    )
    return y.astype(np.int64)


# -- one array ------------------------------------------------------------------------------------


def as_array(value: Any, where: str) -> Array:
    """Return what a user calls an array as numbers (b, i, u, f), or text as an array of objects."""
    refuse_mask(value, where)
    if is_frame(value):
        return _join_columns(value, where)
    if hasattr(value, "toarray"):
        raise DataError(f"{where} is sparse ({type(value).__name__}); give {where[-1]}.toarray().")
    try:
        array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
        if array.dtype.kind in "USTO" and not isinstance(value, np.ndarray):
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
    if array.dtype.kind in "USTO":
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


def refuse_mask(value: Any, where: str) -> None:
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
    parts = {c: as_array(frame[c], f"{where}, column {c!r}") for c in columns}
    several = len(columns) > 1
    coded = [c for c in columns if str(getattr(frame[c], "dtype", "")) == "category"]
    odd = {c: f"holds text (e.g. {x[:1].tolist()})" for c, x in parts.items() if x.dtype == object}
    refuse(
        ((odd | dict.fromkeys(coded, "is of type category")).items() if several else ()),
        lambda one: (
            f"{where}: column {one[0]!r} {one[1]}; turn it into 0/1 columns (pandas.get_dummies), "
            "or use Federation.from_table(..., categorical=[...])."
        ),
    )
    return np.column_stack(list(parts.values()))


def _unpack(array: Array, where: str) -> Array:
    """Return Python objects as numbers or as text, or name the one that is neither."""
    values: list[Any] = [
        v.decode("utf-8", "backslashreplace") if isinstance(v, bytes) else v
        for v in array.ravel().tolist()
    ]
    if values and all(isinstance(v, str) for v in values):
        return np.array(values, object).reshape(array.shape)
    odd = [k for k, v in enumerate(values) if not isinstance(v, Real | np.bool_) or v != v]
    strange = [k for k in odd if not isinstance(values[k], str | Real)] or odd
    if strange:
        place = [int(i) for i in np.unravel_index(strange[0], array.shape)]
        value = values[strange[0]]
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
