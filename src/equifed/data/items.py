"""Data sets of items: torch's, DataLoaders, Hugging Face's, partitioners of flwr-datasets.

All items are read once, in order. An item is ``(x, y)`` or a mapping of named columns; what is x
may be one array, or a mapping or tuple of several.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from equifed.data.columns import group_rows, name_key, name_values
from equifed.data.fields import Layout, Packed, as_array, is_frame, pack
from equifed.data.split import (
    FLOATS,
    TOKENS,
    Array,
    DataError,
    Holdout,
    divide_at_random,
    refuse,
)

MEMORY = 2 * 2**30  # bytes of features above which they go to a file that is memory-mapped
BATCH = 256  # items read at a time
TARGETS = ("label", "labels", "target", "y")  # columns that are the target unless one is named
TOKENIZED = ("input_ids", "attention_mask", "token_type_ids")
"""Columns that are the features, where there are ``input_ids``, unless others are named."""

Values = dict[Any, list[Any]]  # values of arrays by name, by place, or by None where there is one
Key = tuple[str, Any]  # split and client


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

    def read(
        self, advance: Callable[[int], None], loose: bool, onto: Array | None, dtype: Any
    ) -> tuple[Any, Array]:
        """Return features and targets; features lie in ``onto`` if it is given.

        With ``loose`` features stay lists of values: sequences are filled up later.
        """
        columns, targets, features = Values(), list[Any](), Packed(np.empty(0), None)
        for start in range(0, len(self.rows), BATCH):
            x, y = self._read_rows(start)
            if onto is not None:
                features = Packed(onto, self._store(x, onto[start : start + len(y)], dtype))
            else:
                for key, values in x.items():
                    columns.setdefault(key, []).extend(values)
            targets += y
            advance(len(y))
        if columns and not loose:
            features = self._join(columns)
        given = _by_form(columns) if columns and loose else features
        return given, as_array(targets, f"{self.who} y")

    def first(self) -> Packed:
        """Return the features of the first item, with an axis of one row."""
        return self._join(replace(self, rows=self.rows[:1])._read_rows(0)[0])

    def titles(self) -> tuple[str, ...]:
        """Return the names of the classes that a Hugging Face data set has for its target."""
        known = getattr(self.data, "features", None)
        if not isinstance(known, Mapping):
            return ()
        target = self.named.target or next((t for t in TARGETS if t in known), None)
        return tuple(map(str, getattr(known.get(target), "names", None) or ()))

    def _read_rows(self, start: int) -> tuple[Values, list[Any]]:
        """Return features and targets of some items."""
        items = self._fetch(start)
        features, target = self._choose_keys(items[0])
        take = partial(self._list, start=start)
        y = take(items, target)
        if isinstance(features, str | int):
            columns: Values = {None: take(items, features)}
            example = columns[None][0]
            if isinstance(example, Mapping):
                columns = {str(key): take(columns[None], key) for key in example}
            elif isinstance(example, tuple | list) and any(getattr(p, "ndim", 0) for p in example):
                columns = {key: take(columns[None], key) for key in range(len(example))}
        else:
            columns = {name: take(items, name) for name in features}
        refuse(
            (v[0] for v in columns.values() if type(v[0]).__module__.startswith("PIL.")),
            lambda picture: (
                f"{self.who} X, item {start} is a picture ({type(picture).__name__}); give the "
                "data set a transform that makes it an array, such as torchvision's ToTensor "
                "(Hugging Face: with_transform)."
            ),
        )
        return columns, y

    def _fetch(self, start: int) -> list[Any]:
        """Return some items; those of a batch that was collated are taken apart again."""
        index = [int(row) for row in self.rows[start : start + BATCH]]
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
            return items
        try:
            pairs = _take_apart(tuple(batch) if isinstance(batch, list) else batch)
            return [pair for _, pair in zip(index, pairs, strict=True)]
        except (TypeError, ValueError):
            raise DataError(
                f"{self.who}: {len(index)} items did not become {len(index)} rows of X and of y; "
                "the collate_fn must keep one row per item."
            ) from None

    def _list(self, items: Sequence[Any], key: Any, start: int) -> list[Any]:
        """Return one column of several items."""
        refuse(
            (start + k for k, item in enumerate(items)
             if not (key in item if isinstance(item, Mapping) else key < len(item))),
            lambda k: f"{self.who}: item {k} has no {key!r}, earlier ones have.",
        )  # fmt: skip
        return [item[key] for item in items]

    def _choose_keys(self, example: Any) -> tuple[Any, Any]:
        """Return which columns of items are the features, and which one the target."""
        if isinstance(example, Mapping):
            return self._choose_columns(list(map(str, example)))
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
        return 0, 1

    def _choose_columns(self, known: Sequence[str]) -> tuple[str | Sequence[str], str]:
        usual = [name for name in TARGETS if name in known]
        target = self.named.target or (usual[0] if len(usual) == 1 else None)
        rest = [name for name in known if name not in (target, self.named.client)]
        tokens = [name for name in TOKENIZED if name in rest] if TOKENIZED[0] in rest else None
        features = self.named.features or tokens or (rest[0] if len(rest) == 1 else None)
        if target is None or features is None:
            which = "column is the target" if target is None else "columns are the features"
            raise DataError(
                f"{self.who}: which {which}? There are {', '.join(known)}; give "
                f"{which.split()[-1]}=."
            )
        wanted = [target, *([features] if isinstance(features, str) else features)]
        if odd := [name for name in wanted if name not in known]:
            text = f"{self.who}: there is no column {odd[0]!r}; there are {', '.join(known)}."
            raise DataError(text, text)
        return features, target

    def _join(self, columns: Values) -> Packed:
        """Return the features of several items as rows."""
        where = f"{self.who} X"
        if None in columns:
            return Packed(as_array(columns[None], where), None)
        if any(self.named):
            arrays = [as_array(values, f"{where}[{key!r}]") for key, values in columns.items()]
            if all(array.ndim == 1 for array in arrays):
                return Packed(np.column_stack(arrays), None)
        return pack(_by_form(columns), where)

    def _store(self, columns: Values, onto: Array, dtype: Any) -> Layout | None:
        """Write features to a file in its precision, as they would be converted in memory."""
        x, layout = self._join(columns)
        kinds = "iu" if onto.dtype == TOKENS else "biuf"
        wider = x.dtype.kind == "f" and x.itemsize > onto.itemsize and dtype is None
        if x.dtype.kind not in kinds or x.shape != onto.shape or wider:
            raise DataError(
                f"{self.who} X is {x.dtype} of shape {x.shape[1:]} per sample, that of the first "
                f"client {onto.dtype} of shape {onto.shape[1:]}; make them alike, or give dtype=."
            )
        onto[...] = x
        return layout


def _by_form(columns: Values) -> Any:
    """Return columns as users give them: one, a tuple, or a mapping."""
    return (
        columns[None] if None in columns else tuple(columns.values()) if 0 in columns else columns
    )


def _take_apart(batch: Any) -> list[Any]:
    """Return the items of a batch."""
    if isinstance(batch, Mapping):
        rows = zip(*map(_take_apart, batch.values()), strict=True)
        return [dict(zip(batch, row, strict=True)) for row in rows]
    if isinstance(batch, tuple):
        return list(zip(*map(_take_apart, batch), strict=True))
    return list(batch)


# -- which data sets ------------------------------------------------------------------------------


def take_items(
    held: Mapping[str, Any], named: Named, holdout: Holdout, tokens: bool, dtype: Any,
    loose: bool = False,
) -> tuple[dict[str, Any], Holdout, tuple[str, ...]]:  # fmt: skip
    """Read data sets, by split; return pairs, what is still to be held out, and class names."""
    found = {label: _list_clients(part, label, named) for label, part in held.items()}
    out = {label: dict(p) if isinstance(p, Mapping) else p for label, p in found.items()}
    items = {
        (label, client): value if isinstance(value, Items) else _open(value, client, label, named)
        for label, part in out.items() if isinstance(part, dict)
        for client, value in part.items() if isinstance(value, Items) or _is_data_set(value)
    }  # fmt: skip
    if not items:
        if any(named):
            raise DataError(
                "client=, features= and target= name columns of data sets, and there is none; "
                "leave them out (Federation.from_table takes tables)."
            )
        return out, holdout, ()
    titles = _list_titles(list(items.values()))
    if holdout.wanted and all(("train", client) in items for client in out["train"]):
        items, holdout = _divide_items(items, holdout), Holdout()
    for (label, client), pair in _read_items(items, tokens, dtype, loose):
        out.setdefault(label, {})[client] = pair
    return out, holdout, titles


def _list_titles(every: Sequence[Items]) -> tuple[str, ...]:
    """Return the class names that data sets agree on."""
    first = every[0].titles()
    refuse(
        (items for items in every if items.titles() != first),
        lambda items: (
            f"{items.who} has the classes {', '.join(items.titles()) or 'without names'}, "
            f"{every[0].who} {', '.join(first) or 'without names'}; number all classes alike "
            "(Hugging Face: cast_column with one ClassLabel)."
        ),
    )
    return first


def _list_clients(part: Any, label: str, named: Named) -> Any:
    """Return a mapping of clients, from one data set or partitioner if it is one."""
    if hasattr(part, "load_partition"):
        return _list_partitions(part, label, named)
    if isinstance(part, Mapping) and hasattr(part, "column_names"):
        splits = ", ".join(map(str, part))
        raise DataError(
            f"{label} is a {type(part).__name__}, whose entries ({splits}) are splits and not "
            "clients; give one of them, and client= for the column with the client."
        )
    if isinstance(part, Mapping) and named.client is not None:
        raise DataError("client= is for one data set with all clients; leave it out.")
    return _divide_by_column(part, label, named) if _is_data_set(part) else part


def _divide_by_column(data: Any, label: str, named: Named) -> dict[str, Items]:
    """Return the items of each client, of one data set of Hugging Face that names them."""
    names = getattr(data, "column_names", None)
    if named.client is None or not names or named.client not in names:
        more = f", or client= with the column of the client: one of {', '.join(names or ())}"
        raise DataError(
            f"{label} is one {type(data).__name__}; give {{name: data set}}{more if names else ''}."
        )
    _count(data, label)
    name = getattr(data.features[named.client], "int2str", lambda owner: owner)
    parts = group_rows([name(owner) for owner in data[named.client]])
    return {c: Items(_who(c, label), data, rows.tolist(), named) for c, rows in parts.items()}


def _list_partitions(partitioner: Any, label: str, named: Named) -> dict[Any, Any]:
    """Return the partitions of a partitioner of flwr-datasets by their natural names or numbers."""
    if named.client is not None:
        raise DataError(f"{label}: a partitioner already assigns items to clients; omit client=.")
    try:
        parts = [partitioner.load_partition(k) for k in range(int(partitioner.num_partitions))]
    except Exception as error:  # whatever a foreign partitioner raises
        raise DataError(
            f"{label}: the {type(partitioner).__name__} gives no partitions ({error}); give one of "
            "flwr-datasets, with a data set assigned (partitioner.dataset = ...)."
        ) from error
    natural = getattr(partitioner, "partition_id_to_natural_id", None) or {}
    return {natural.get(k, k): part for k, part in enumerate(parts)}


def _is_data_set(value: Any) -> bool:
    """Tell whether a value is a data set of items, and no array, frame, text or container."""
    if hasattr(value, "column_names") and hasattr(value, "features"):
        return True  # Hugging Face's
    known = isinstance(value, Sequence | Mapping | Items) or hasattr(value, "shape")
    iterable = hasattr(value, "__getitem__") or hasattr(value, "__iter__")
    return iterable and not known and not is_frame(value)


def _who(client: Any, label: str) -> str:
    return f"Client {str(client)!r}: {label}"


def _open(value: Any, client: Any, label: str, named: Named) -> Items:
    """Return the items of a data set."""
    who, collate, rows = _who(client, label), None, None
    if hasattr(value, "collate_fn") and hasattr(value, "dataset"):
        rows, collate = _open_loader(value, who)
        value = value.dataset
    count = _count(value, who)
    return Items(who, value, range(count) if rows is None else rows, named, collate)


def _count(data: Any, who: str) -> int:
    """Return how many items a data set has; refuse a streamed one."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        raise DataError(
            f"{who} is a {type(data).__name__}, which has no length; give a data set with "
            "__len__ and __getitem__ (a streamed one: save its items first)."
        ) from None


def _open_loader(loader: Any, who: str) -> tuple[Sequence[int] | None, Any]:
    """Return the rows that a DataLoader draws from (None: all), and its own ``collate_fn``."""
    from torch.utils import data as known

    sampler, batches, data = loader.sampler, loader.batch_sampler, loader.dataset
    plain = loader.collate_fn in (known.default_collate, known.default_convert)
    collate = None if plain else loader.collate_fn
    if not hasattr(data, "__len__"):
        return None, collate  # refused with the data set
    if type(batches) is not known.BatchSampler:
        what = "batch_size=None" if batches is None else f"the {type(batches).__name__}"
        raise DataError(
            f"{who}: a DataLoader with {what} does not say what one sample is; give its data set."
        )
    if isinstance(sampler, known.SubsetRandomSampler):
        return [int(k) for k in sampler.indices], collate
    drawn = isinstance(sampler, known.RandomSampler) and not sampler.replacement
    if (drawn and sampler.num_samples == len(data)) or type(sampler) is known.SequentialSampler:
        return None, collate
    raise DataError(
        f"{who}: the DataLoader's {type(sampler).__name__} may draw some items more often than "
        "others; give its data set, or a Subset of it."
    )


# -- dividing and reading -------------------------------------------------------------------------


def _divide_items(items: Mapping[Key, Items], holdout: Holdout) -> dict[Key, Items]:
    """Hold out items of every client before they are read, the same as :meth:`Federation.split`."""
    out = dict(items)
    names = name_values([client for label, client in items if label == "train"], "Client names")
    shares = {"train": 1.0, "validation": holdout.validation, "test": holdout.test}
    for (_, client), one in [(key, one) for key, one in items.items() if key[0] == "train"]:
        part = divide_at_random({names[name_key(client)]: np.arange(len(one.rows))}, holdout)
        for label in (label for label, share in shares.items() if share > 0):
            rows = [one.rows[k] for k in np.flatnonzero(part == label).tolist()]
            out[label, client] = replace(one, rows=rows, who=_who(client, label))
    return out


def _read_items(
    items: Mapping[Key, Items], tokens: bool, dtype: Any, loose: bool
) -> Iterator[tuple[Key, tuple[Any, Array]]]:
    """Yield pairs of arrays, large ones in a file per split that is memory-mapped."""
    from rich.console import Console
    from rich.progress import Progress

    counts = Counter[str]()
    for (label, _), one in items.items():
        counts[label] += len(one.rows)
    first = next((one for one in items.values() if len(one.rows)), None)
    place = None if loose or first is None else _find_place(first, counts.total(), tokens, dtype)
    files = {label: place(count) for label, count in counts.items() if place and count}
    read, shown = Counter[str](), sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=not shown) as bar:
        advance = partial(bar.advance, bar.add_task("reading", total=counts.total()))
        for (label, client), one in items.items():
            start = read[label]
            read[label] += len(one.rows)
            there = files[label][start : read[label]] if label in files else None
            yield (label, client), one.read(advance, loose, there, dtype)


def _find_place(
    first: Items, count: int, tokens: bool, dtype: Any
) -> Callable[[int], Array] | None:
    """Return how to make room in files for the features of some items; None: they fit in memory."""
    example, layout = first.first()
    tokens = tokens or (layout is not None and layout.whole)
    if example.dtype.kind not in "biuf" or example.ndim < 2:
        return None  # refused later, by name
    usual = FLOATS[int(example.dtype == np.float64)]
    kind = TOKENS if tokens else np.dtype(dtype) if dtype else usual
    wanted, folder = count * prod(example.shape[1:]) * kind.itemsize, tempfile.gettempdir()
    if wanted <= MEMORY:
        return None
    if (free := shutil.disk_usage(folder).free) < wanted:
        raise DataError(
            f"The samples need {wanted / 2**30:.1f} GB as {kind}, more than is kept in memory "
            f"({MEMORY / 2**30:g} GB), and {folder} has {free / 2**30:.1f} GB free; set TMPDIR to "
            "a folder on a larger disk."
        )

    def place(rows: int) -> Array:
        with tempfile.TemporaryFile() as file:  # the map keeps it open; it has no name
            return np.memmap(file, kind, "w+", shape=(rows, *example.shape[1:]))

    return place
