"""Data sets of items: torch's, DataLoaders, Hugging Face's, partitioners of flwr-datasets.

An item is ``(x, y)`` or a mapping of named columns. All items are read once, in order.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from equifed.data.columns import group_rows, name_key, name_values
from equifed.data.split import FLOATS, TOKENS, Array, DataError, Holdout, divide_at_random
from equifed.data.values import is_frame, refuse_mask

MEMORY = 2 * 2**30
"""Bytes of features above which they go to an unnamed temporary file that is memory-mapped."""
BATCH = 256
"""Items read at a time."""
TARGETS = ("label", "labels", "target", "y")
"""Columns that are the target unless another one is named."""

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

    def read(
        self, advance: Advance, onto: Array | None = None, dtype: Any = None
    ) -> tuple[Any, Any]:
        """Return features and targets; features lie in ``onto`` if it is given."""
        parts: list[tuple[Array, Array]] = []
        for start in range(0, len(self.rows), BATCH):
            x, y = self._read_rows(start, start + BATCH)
            if parts and x.shape[1:] != parts[0][0].shape[1:]:
                raise self._unequal(start, x.shape[1:], parts[0][0].shape[1:])
            if onto is not None:
                _store(onto[start : start + len(x)], x, self.who, dtype)
                x = x[:0]
            parts.append((x, y))
            advance(len(y))
        x, y = map(np.concatenate, zip(*parts, strict=True)) if parts else np.empty((2, 0))
        return (x if onto is None else onto), y

    def first(self) -> Array:
        """Return the features of the first item, with an axis of one row."""
        return self._read_rows(0, 1)[0]

    def titles(self) -> tuple[str, ...]:
        """Return the names of the classes that a Hugging Face data set has for its target."""
        known = getattr(self.data, "features", None)
        if not isinstance(known, Mapping):
            return ()
        target = self.named.target or next((t for t in TARGETS if t in known), None)
        return tuple(map(str, getattr(known.get(target), "names", None) or ()))

    def _read_rows(self, start: int, stop: int) -> tuple[Array, Array]:
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
            x, y = self._pick(batch[0], lambda key: [item[key] for item in batch])
        else:
            x, y = self._pick(batch, lambda key: batch[key])
        x, y = (
            self._stack(values, f"{self.who} {what}", start)
            for values, what in ((x, "X"), (y, "y"))
        )
        if len(x) != len(index) or len(y) != len(index):
            raise DataError(
                f"{self.who}: {len(index)} items became {len(x)} rows of X and {len(y)} of y; the "
                "collate_fn must keep one row per item."
            )
        return x, y

    def _pick(self, example: Any, column: Callable[[Any], Any]) -> tuple[Any, Any]:
        """Return the columns of features and of targets of several items."""
        if isinstance(example, Mapping):
            features, target = self._name_columns(list(map(str, example)))
            if isinstance(features, str):
                return column(features), column(target)
            parts = [self._stack(column(name), f"{self.who} {name!r}", 0) for name in features]
            if odd := next((n for n, p in zip(features, parts, strict=True) if p.ndim != 1), None):
                raise DataError(
                    f"{self.who}: the column {odd!r} is no single number per item, so it cannot be "
                    f"joined with others; give features={odd!r} alone."
                )
            return np.column_stack(parts), column(target)
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
        if features is None and len(rest) != 1:
            raise DataError(
                f"{self.who}: which columns are the features? Besides the target {target!r} there "
                f"are {', '.join(rest) or 'none'}; give features=."
            )
        chosen = rest[0] if features is None else features
        wanted = [target, *([chosen] if isinstance(chosen, str) else chosen)]
        if odd := [name for name in wanted if name not in known]:
            raise DataError(
                f"{self.who}: there is no column {odd[0]!r}; there are {', '.join(known)}."
            )
        return chosen, target

    def _stack(self, values: Any, where: str, start: int) -> Array:
        """Return one array of the values of several items, or say which one does not fit."""
        if hasattr(values, "shape"):
            return _as_numbers(values, where)
        if isinstance(values, Mapping):
            raise DataError(_several(where, values))
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
            f"{self.who}: item {item} has the shape {shape}, earlier ones {first}; pad, cut or "
            "resize all items to one shape (a tokenizer's padding='max_length', a transform)."
        )


def _as_numbers(value: Any, where: str) -> Array:
    """Return a value of an item as an array."""
    if type(value).__module__.partition(".")[0] == "PIL":
        raise DataError(
            f"{where} is a picture ({type(value).__name__}); give the data set a transform that "
            "makes it an array, such as torchvision's ToTensor (Hugging Face: with_transform)."
        )
    parts = value if isinstance(value, tuple | list) else ()
    if isinstance(value, Mapping) or any(getattr(part, "ndim", 0) for part in parts):
        raise DataError(_several(where, value))
    refuse_mask(value, where)
    try:
        return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{where} is no array ({type(value).__name__}; {str(error)[:120]}); convert it, "
            "sequences of unequal length to one length."
        ) from None


def _several(where: str, value: Any) -> str:
    """Say that inputs of several arrays are not taken."""
    held = ", ".join(map(str, value)) if isinstance(value, Mapping) else f"{len(value)} arrays"
    return (
        f"{where} is a {type(value).__name__} of {held}; a sample has one array of features: join "
        "them into one, and let the model take it apart."
    )


# -- which data sets ------------------------------------------------------------------------------


def take_items(
    held: Mapping[str, Any], named: Named, holdout: Holdout, tokens: bool, dtype: Any
) -> tuple[dict[str, Any], Holdout, tuple[str, ...]]:
    """Read data sets, by split; return pairs, what is still to be held out, and class names."""
    found = {label: _find_items(part, label, named) for label, part in held.items()}
    values = [v for part in found.values() if isinstance(part, Mapping) for v in part.values()]
    every = [items for items in values if isinstance(items, Items)]
    if not every:
        if any(named):
            raise DataError(
                "client=, features= and target= name columns of data sets, and there is none; "
                "leave them out (Federation.from_table takes tables)."
            )
        return found, holdout, ()
    if holdout.wanted and all(isinstance(value, Items) for value in found["train"].values()):
        found, holdout = _divide_items(found, holdout), Holdout()
    return _read_items(found, tokens, dtype), holdout, _list_titles(every)


def _list_titles(every: Sequence[Items]) -> tuple[str, ...]:
    """Return the class names that data sets agree on."""
    first = every[0].titles()
    for items in every:
        if (other := items.titles()) != first:
            raise DataError(
                f"{items.who} has the classes {', '.join(other) or 'without names'}, "
                f"{every[0].who} {', '.join(first) or 'without names'}; number all classes alike "
                "(Hugging Face: cast_column with one ClassLabel)."
            )
    return first


def _find_items(part: Any, label: str, named: Named) -> Any:
    """Replace the data sets of a split by the :class:`Items` of each client."""
    found = _list_clients(part, label, named)
    if not isinstance(found, Mapping):
        return found
    return {client: _open(value, client, label, named) for client, value in found.items()}


def _list_clients(part: Any, label: str, named: Named) -> Any:
    """Return a mapping of clients, from one data set or partitioner if it is one."""
    if isinstance(part, Mapping):
        if hasattr(part, "column_names"):
            splits = ", ".join(map(str, part))
            raise DataError(
                f"{label} is a {type(part).__name__}, whose entries ({splits}) are splits and not "
                "clients; give one of them, and client= for the column with the client."
            )
        if named.client is not None:
            raise DataError("client= is for one data set with all clients; leave it out.")
        return part
    if hasattr(part, "load_partition"):
        return _list_partitions(part, label, named)
    if not _is_data_set(part):
        return part
    names = getattr(part, "column_names", None)
    if named.client is None or not names or named.client not in names:
        raise DataError(
            f"{label} is one {type(part).__name__}; give {{name: data set}}, or client= with the "
            f"column of the client: one of {', '.join(names) if names else 'named columns only'}."
        )
    feature = part.features[named.client]
    owners = list(part[named.client])
    if hasattr(feature, "int2str"):
        owners = [feature.int2str(owner) for owner in owners]
    parts = group_rows(owners)
    return {c: Items(_who(c, label), part, rows.tolist(), named) for c, rows in parts.items()}


def _list_partitions(partitioner: Any, label: str, named: Named) -> dict[Any, Any]:
    """Return the partitions of a partitioner of flwr-datasets by their natural names or numbers."""
    if named.client is not None:
        raise DataError(f"{label}: a partitioner says whose items are whose; leave client= out.")
    if not hasattr(partitioner, "num_partitions"):
        raise DataError(
            f"{label} is a {type(partitioner).__name__} without num_partitions; give one of its "
            "partitioners, with a data set assigned (partitioner.dataset = ...)."
        )
    try:
        count = int(partitioner.num_partitions)
        parts = [partitioner.load_partition(k) for k in range(count)]
    except Exception as error:  # whatever a foreign partitioner raises
        raise DataError(
            f"{label}: the {type(partitioner).__name__} gives no partitions ({error})."
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


def _open(value: Any, client: Any, label: str, named: Named) -> Any:
    """Return the items of a data set; anything else as it is."""
    if not _is_data_set(value):
        return value
    who, collate, rows = _who(client, label), None, None
    if hasattr(value, "collate_fn") and hasattr(value, "dataset"):
        rows, collate = _open_loader(value, who)
        value = value.dataset
    try:
        count = len(value)
    except (TypeError, NotImplementedError):
        raise DataError(
            f"{who} is a {type(value).__name__}, which has no length; give a data set with "
            "__len__ and __getitem__ (a streamed one: save its items first)."
        ) from None
    return Items(who, value, range(count) if rows is None else rows, named, collate)


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
        f"{who}: the DataLoader's {type(sampler).__name__} draws some items more often than "
        "others; give its data set, or a Subset of it."
    )


# -- dividing and reading -------------------------------------------------------------------------


def _divide_items(held: Mapping[str, Any], holdout: Holdout) -> dict[str, Any]:
    """Hold out items of every client before they are read, the same as :meth:`Federation.split`."""
    names = name_values(held["train"], "Client names")
    shares = {"validation": holdout.validation, "test": holdout.test}
    labels = ["train", *(label for label, share in shares.items() if share > 0)]
    out: dict[str, Any] = {**held, **{label: {} for label in labels}}
    for client, items in held["train"].items():
        count = len(items.rows)
        part = divide_at_random({names[name_key(client)]: np.arange(count)}, holdout)
        for label in labels:
            rows = [items.rows[k] for k in np.flatnonzero(part == label).tolist()]
            out[label][client] = replace(items, rows=rows, who=_who(client, label))
    return out


def _read_items(held: Mapping[str, Any], tokens: bool, dtype: Any) -> dict[str, Any]:
    """Replace :class:`Items` by pairs of arrays, large ones in a file that is memory-mapped."""
    parts = {label: part for label, part in held.items() if isinstance(part, Mapping)}
    mine = {k: [i for i in part.values() if isinstance(i, Items)] for k, part in parts.items()}
    filled = [items for listed in mine.values() for items in listed if len(items.rows)]
    count, out = sum(len(items.rows) for items in filled), {**held}
    place = _find_place(filled, count, tokens, dtype)
    with _draw_bar(count) as advance:
        for label, part in parts.items():
            rows, at = sum(len(items.rows) for items in mine[label]), 0
            onto = place(rows) if place and rows else None
            out[label] = read = dict[Any, Any]()
            for client, value in part.items():
                read[client] = value
                if isinstance(value, Items):
                    end = at + len(value.rows)
                    there = None if onto is None else onto[at:end]
                    read[client], at = value.read(advance, there, dtype), end
    return out


def _find_place(
    every: Sequence[Items], count: int, tokens: bool, dtype: Any
) -> Callable[[int], Array] | None:
    """Return how to make room in files for the features of some items; None: they fit in memory."""
    example = every[0].first() if every else np.empty((0,))
    if example.dtype.kind not in "biuf" or example.ndim < 2:
        return None  # refused later, by name
    single = example.dtype != np.float64
    kind = TOKENS if tokens else np.dtype(dtype) if dtype else FLOATS[0 if single else 1]
    wanted = count * int(np.prod(example.shape[1:])) * kind.itemsize
    if wanted <= MEMORY:
        return None
    folder = tempfile.gettempdir()
    if (free := shutil.disk_usage(folder).free) < wanted:
        raise DataError(
            f"The samples need {wanted / 2**30:.1f} GB as {kind}, more than stays in memory "
            f"({MEMORY / 2**30:g} GB), and {folder} has {free / 2**30:.1f} GB free; set TMPDIR to "
            "a folder on a larger disk."
        )

    def place(rows: int) -> Array:
        with tempfile.TemporaryFile() as file:  # the map keeps it open; it has no name
            return np.memmap(file, kind, "w+", shape=(rows, *example.shape[1:]))

    return place


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


@contextmanager
def _draw_bar(total: int) -> Iterator[Advance]:
    """Show a bar over items where a person looks on."""
    if not total or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=total)
        yield lambda items: bar.advance(task, items)
