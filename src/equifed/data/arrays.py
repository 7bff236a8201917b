"""Your arrays: those of all clients become of one kind, or it is said whose are different."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from equifed.data.columns import name_key, name_values
from equifed.data.fields import (
    Layout,
    Packed,
    as_array,
    compare_layouts,
    find_fields,
    is_frame,
    pack,
)
from equifed.data.split import (
    FLOATS,
    MANY,
    TOKENS,
    Array,
    DataError,
    Split,
    ask_task,
    check_task,
    name_groups,
    refuse,
    refuse_any,
)

Clients: TypeAlias = Mapping[Any, Any]  # client to (X, y), (X, y, groups) or a data set

Numbered: TypeAlias = tuple[dict[str, Array], int | None, tuple[str, ...]]


class Samples(NamedTuple):
    """What one client has in one split."""

    client: str
    split: str
    inputs: Array
    targets: Array
    groups: Array | None
    titles: list[Any] | None
    layout: Layout | None = None

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
    refuse_any(
        (not listed or not all(isinstance(title, str) for title in class_names),
         f"class_names must be a sequence of texts, got {class_names!r:.200}."),
        (getattr(dtype, "__name__", str(dtype)) not in ("None", "float32", "float64"),
         f"dtype must be 'float32' or 'float64', got {dtype!r}."),
    )  # fmt: skip
    given = {label: part for label, part in held.items() if part is not None}
    names, parts = _read_clients(given)
    layout = _refuse_unlike(parts)
    tokens = tokens or (layout is not None and layout.whole)
    inputs = _align_inputs({f"{p.who} X": p.inputs for p in parts}, tokens, dtype)
    labels = {f"{p.who} y": p.targets for p in parts}
    targets, classes, made = number_targets(labels, classes, task)
    if classes is None:
        kind = np.dtype(np.float32) if tokens else next(iter(inputs.values())).dtype
        targets = _align_shapes(targets, "targets", kind)
    done = [p._replace(inputs=inputs[f"{p.who} X"], targets=targets[f"{p.who} y"]) for p in parts]
    splits = {label: _join_clients(names, done, label) for label in given}
    found = {"classes": classes, "class_names": tuple(class_names) or made, "layout": layout}
    return {"names": names, **found, **splits}


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
                raise DataError(
                    f"Client {client!r} has {label} samples but no training samples; remove it, "
                    "give it samples, or hold out less."
                )
            samples.append(_read_samples(names[name_key(client)], label, pair))
    return tuple(names.values()), samples


def _read_samples(client: str, label: str, pair: Any) -> Samples:
    """Return a client's X and y as arrays with the same number of rows."""
    who = f"Client {client!r}: {label}"
    if not isinstance(pair, Sequence) or isinstance(pair, str | bytes) or len(pair) not in (2, 3):
        raise DataError(f"{who}: expected a pair (X, y), got {type(pair).__name__}.")
    y, given = as_array(pair[1], f"{who} y"), pair[0]
    if not isinstance(given, Packed):
        fields = find_fields(given, len(y), f"{who} X")
        if fields is None:
            given = Packed(as_array(given, f"{who} X"), None)
        else:
            given = pack(fields, f"{who} X", len(y))
    x, layout = given
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
    return Samples(client, label, x, y, groups, titles, layout if filled else None)


# -- all clients ----------------------------------------------------------------------------------


def _refuse_unlike(parts: Sequence[Samples]) -> Layout | None:
    """Refuse other columns or arrays than the first, and groups of some; return the arrays."""
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
    filled = [p for p in parts if len(p.inputs)]
    for p in filled:
        compare_layouts(filled[0].layout, p.layout, f"{p.who} X", f"{filled[0].who} X")
    return filled[0].layout if filled else None


def _align_inputs(arrays: dict[str, Array], tokens: bool, dtype: Any) -> dict[str, Array]:
    """Bring features to one dtype, or say which client is unlike the first."""
    filled = {where: x for where, x in arrays.items() if len(x)}
    refuse(
        (where for where, x in filled.items() if x.dtype.kind not in ("iu" if tokens else "biuf")),
        lambda where: (
            f"{where}: features must be {'whole numbers (tokens)' if tokens else 'numbers'}, got "
            f"{'text' if filled[where].dtype == object else filled[where].dtype}, e.g. "
            f"{filled[where].ravel()[0]!r}; convert them."
        ),
    )
    floats = {x.dtype: where for where, x in filled.items() if x.dtype.kind == "f"}
    if len(floats) > 1 and dtype is None:
        (one, here), (two, there), *_ = floats.items()
        raise DataError(
            f"{here} is {one}, {there} is {two}; give dtype='float32' or dtype='float64' to "
            "convert all."
        )
    held = np.dtype(dtype or next(iter(floats), np.float32))  # whole numbers fit into any precision
    usual = held if held in FLOATS else FLOATS[held.itemsize > 4]  # in which a model computes
    return _align_shapes(arrays, "features", TOKENS if tokens else usual)


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
        (texts and task == "regression", f"{(texts or '?')[0]} is text, which is not a value to "
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
        np.flatnonzero(~((np.abs(numbers) < 2**53) & (numbers == np.round(numbers)))),
        lambda k: (
            f"{where}: labels must be whole numbers, got {y[k]} in row {k}, which is not a label; "
            "correct it, relabel the classes 0..K - 1, or leave classes out for a regression."
        ),
    )
    return y.astype(np.int64)
