"""Items of a data set, read as they are: ``(x, y)`` or a mapping of named columns.

What is x may be one array, or a mapping or tuple of several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from equifed.data.fields import Packed, pack, refuse_mask
from equifed.data.split import TOKENS, Array, DataError

BATCH = 256
"""Items read at a time."""
TARGETS = ("label", "labels", "target", "y")
"""Columns that are the target unless another one is named."""
TOKENIZED = ("input_ids", "attention_mask", "token_type_ids")
"""Columns that are the features, where there are ``input_ids``, unless others are named."""

Advance = Callable[[int], None]


class Named(NamedTuple):
    """Which columns of the items are what."""

    client: str | None = None
    features: str | Sequence[str] | None = None
    target: str | None = None


@dataclass(frozen=True)
class Items:
    """Items of one client in one split, not read yet."""

    who: str
    data: Any
    rows: Sequence[int]
    named: Named
    collate: Callable[[Any], Any] | None = None
    loose: bool = False
    """Whether sequences are filled up later: values stay as they are, in lists."""

    def read(
        self, advance: Advance, onto: Array | None = None, dtype: Any = None
    ) -> tuple[Any, Any]:
        """Return features and targets; features lie in ``onto`` if it is given."""
        parts: list[tuple[Any, Array]] = []
        for start in range(0, len(self.rows), BATCH):
            x, y = self._read_rows(start, start + BATCH)
            if not self.loose:
                x = self._join(x, start, parts[0][0] if parts else None)
            if onto is not None:
                _store(onto[start : start + len(y)], x.rows, self.who, dtype)
                x = Packed(x.rows[:0], x.layout)
            parts.append((x, y))
            advance(len(y))
        if not parts:
            return np.empty((2, 0))[0], np.empty(0)
        xs, ys = zip(*parts, strict=True)
        if self.loose:
            return _chain(xs), np.concatenate(ys)
        rows = np.concatenate([x.rows for x in xs]) if onto is None else onto
        layout = xs[0].layout
        return (rows if layout is None else Packed(rows, layout)), np.concatenate(ys)

    def first(self) -> Packed:
        """Return the features of the first item, with an axis of one row."""
        return self._join(self._read_rows(0, 1)[0], 0, None)

    def titles(self) -> tuple[str, ...]:
        """Return the names of the classes that a Hugging Face data set has for its target."""
        known = getattr(self.data, "features", None)
        if not isinstance(known, Mapping):
            return ()
        target = self.named.target or next((t for t in TARGETS if t in known), None)
        return tuple(map(str, getattr(known.get(target), "names", None) or ()))

    def _read_rows(self, start: int, stop: int) -> tuple[Any, Array]:
        """Return the columns of features, and the targets, of some items."""
        index = [int(row) for row in self.rows[start:stop]]
        try:
            several = getattr(self.data, "__getitems__", None)
            items = list(several(index)) if several else [self.data[row] for row in index]
            batch = items if self.collate is None else self.collate(items)
        except Exception as error:  # whatever a foreign data set raises
            raise DataError(
                f"{self.who}: items {index[0]} to {index[-1]} of the {type(self.data).__name__} "
                f"cannot be read ({type(error).__name__}: {str(error)[:200]})."
            ) from error
        if self.collate is None:
            x, y = self._pick(batch[0], lambda key: self._list(batch, key, start))
            if isinstance(x, dict):
                pass  # columns by name
            elif isinstance(x[0], Mapping):
                x = {str(k): self._list(x, k, start) for k in x[0]}
            elif isinstance(x[0], tuple | list) and any(getattr(p, "ndim", 0) for p in x[0]):
                x = tuple(self._list(x, k, start) for k in range(len(x[0])))
        else:
            x, y = self._pick(batch, lambda key: batch[key])
        y = self._stack(y, f"{self.who} y", start)
        columns = x.values() if isinstance(x, Mapping) else x if isinstance(x, tuple) else [x]
        if odd := [len(column) for column in (*columns, y) if len(column) != len(index)]:
            raise DataError(
                f"{self.who}: {len(index)} items became {odd[0]} rows of X and {len(y)} of y; the "
                "collate_fn must keep one row per item."
            )
        return x, y

    def _list(self, items: Any, key: Any, start: int) -> list[Any]:
        """Return one column of several items."""
        for k, item in enumerate(items):
            if not (key in item if isinstance(item, Mapping) else key < len(item)):
                raise DataError(f"{self.who}: item {start + k} has no {key!r}, earlier ones have.")
        return [item[key] for item in items]

    def _join(self, x: Any, start: int, earlier: Packed | None) -> Packed:
        """Return the features of several items as one array, like those of earlier ones."""
        if not isinstance(x, Mapping | tuple):
            found = Packed(self._stack(x, f"{self.who} X", start), None)
        else:
            columns = x if isinstance(x, Mapping) else {str(k): v for k, v in enumerate(x)}
            parts = {k: self._stack(v, f"{self.who} X[{k!r}]", start) for k, v in columns.items()}
            given = parts if isinstance(x, Mapping) else tuple(parts.values())
            if any(self.named) and all(part.ndim == 1 for part in parts.values()):
                found = Packed(np.column_stack(list(parts.values())), None)
            else:
                found = pack(given, f"{self.who} X")
        if earlier is not None:
            if found.layout is not None and earlier.layout is not None:
                earlier.layout.compare(found.layout, f"{self.who} X from item {start}", "earlier X")
            if found.rows.shape[1:] != earlier.rows.shape[1:]:
                raise self._unequal(start, found.rows.shape[1:], earlier.rows.shape[1:])
        return found

    def _pick(self, example: Any, column: Callable[[Any], Any]) -> tuple[Any, Any]:
        """Return the columns of features and of targets of several items."""
        if isinstance(example, Mapping):
            features, target = self._name_columns(list(map(str, example)))
            if isinstance(features, str):
                return column(features), column(target)
            return {name: column(name) for name in features}, column(target)
        if any(self.named):
            given = next(n for n, v in zip(Named._fields, self.named, strict=True) if v)
            raise DataError(
                f"{self.who}: {given}= names a column, but the items are "
                f"{type(example).__name__}s without names; leave it out."
            )
        if not isinstance(example, tuple | list) or len(example) != 2:
            held = f" of {len(example)}" if isinstance(example, tuple | list) else ""
            raise DataError(
                f"{self.who}: an item is a {type(example).__name__}{held}; it must be a pair "
                "(x, y) or a mapping of columns."
            )
        return column(0), column(1)

    def _name_columns(self, known: Sequence[str]) -> tuple[str | Sequence[str], str]:
        _, features, target = self.named
        usual = [name for name in TARGETS if name in known]
        if target is None and len(usual) != 1:
            raise DataError(
                f"{self.who}: which column is the target? There are {', '.join(known)}; give "
                "target=."
            )
        target = target or usual[0]
        rest = [name for name in known if name not in (target, self.named.client)]
        if features is None and TOKENIZED[0] in rest:
            features = [name for name in TOKENIZED if name in rest]
        if features is None and len(rest) != 1:
            raise DataError(
                f"{self.who}: which columns are the features? Besides the target {target!r} there "
                f"are {', '.join(rest) or 'none'}; give features=."
            )
        chosen = rest[0] if features is None else features
        wanted = [target, *([chosen] if isinstance(chosen, str) else chosen)]
        if odd := [name for name in wanted if name not in known]:
            text = f"{self.who}: there is no column {odd[0]!r}; there are {', '.join(known)}."
            raise DataError(text, text)
        return chosen, target

    def _stack(self, values: Any, where: str, start: int) -> Array:
        """Return one array of the values of several items, or say which one does not fit."""
        if hasattr(values, "shape"):
            return _as_numbers(values, where)
        if all(isinstance(value, str) for value in values):
            return np.array(values, dtype=object)
        arrays = [
            _as_numbers(value, f"{where}, item {start + k}") for k, value in enumerate(values)
        ]
        for k, array in enumerate(arrays):
            if array.shape != arrays[0].shape:
                raise self._unequal(start + k, array.shape, arrays[0].shape)
        return np.stack(arrays)

    def _unequal(self, item: int, shape: tuple[int, ...], first: tuple[int, ...]) -> DataError:
        return DataError(
            f"{self.who}: item {item} has the shape {shape}, earlier ones {first}; pad (pad=0 "
            "fills up sequences), cut or resize all items to one shape."
        )


def _as_numbers(value: Any, where: str) -> Array:
    """Return a value of an item as an array."""
    if type(value).__module__.partition(".")[0] == "PIL":
        raise DataError(
            f"{where} is a picture ({type(value).__name__}); give the data set a transform that "
            "makes it an array, such as torchvision's ToTensor (Hugging Face: with_transform)."
        )
    if isinstance(value, Mapping):
        held = ", ".join(map(str, value))
        raise DataError(f"{where} is a {type(value).__name__} of {held}; give arrays of numbers.")
    refuse_mask(value, where)
    try:
        return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{where} is not an array ({type(value).__name__}; {str(error)[:120]}); convert it, "
            "sequences of unequal length to one length."
        ) from None


def _chain(parts: Sequence[Any]) -> Any:
    """Return columns of values whose batches follow each other."""
    if isinstance(parts[0], Mapping):
        return {k: [v for part in parts for v in part[k]] for k in parts[0]}
    if isinstance(parts[0], tuple):
        return tuple([v for part in parts for v in part[k]] for k in range(len(parts[0])))
    return [v for part in parts for v in part]


def _store(onto: Array, x: Array, who: str, dtype: Any) -> None:
    """Write features to a file in its precision, as they would be converted in memory."""
    kinds = "iu" if onto.dtype == TOKENS else "biuf"
    wider = x.dtype.kind == "f" and x.itemsize > onto.itemsize and dtype is None
    if x.dtype.kind not in kinds or x.shape != onto.shape or wider:
        raise DataError(
            f"{who} X is {x.dtype} of shape {x.shape[1:]} per sample, that of the first client "
            f"{onto.dtype} of shape {onto.shape[1:]}; make them alike, or give dtype=."
        )
    onto[...] = x
