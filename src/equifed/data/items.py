"""Data sets of items: torch's, DataLoaders, Hugging Face's, partitioners of flwr-datasets.

All items are read once, in order.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from equifed.data.columns import group_rows, name_key, name_values
from equifed.data.fields import is_frame
from equifed.data.reading import Advance, Items, Named
from equifed.data.split import FLOATS, TOKENS, Array, DataError, Holdout, divide_at_random

MEMORY = 2 * 2**30
"""Bytes of features above which they go to an unnamed temporary file that is memory-mapped."""


# -- which data sets ------------------------------------------------------------------------------


def take_items(
    held: Mapping[str, Any], named: Named, holdout: Holdout, tokens: bool, dtype: Any,
    loose: bool = False,
) -> tuple[dict[str, Any], Holdout, tuple[str, ...]]:  # fmt: skip
    """Read data sets, by split; return pairs, what is still to be held out, and class names."""
    found = {label: _find_items(part, label, named, loose) for label, part in held.items()}
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


def _find_items(part: Any, label: str, named: Named, loose: bool) -> Any:
    """Replace the data sets of a split by the :class:`Items` of each client."""
    found = _list_clients(part, label, named)
    if not isinstance(found, Mapping):
        return found
    opened = {client: _open(value, client, label, named) for client, value in found.items()}
    return {c: replace(v, loose=loose) if isinstance(v, Items) else v for c, v in opened.items()}


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
        more = f", or client= with the column of the client: one of {', '.join(names or ())}"
        raise DataError(
            f"{label} is one {type(part).__name__}; give {{name: data set}}{more if names else ''}."
        )
    _count(part, label)
    feature = part.features[named.client]
    owners = list(part[named.client])
    if hasattr(feature, "int2str"):
        owners = [feature.int2str(owner) for owner in owners]
    parts = group_rows(owners)
    return {c: Items(_who(c, label), part, rows.tolist(), named) for c, rows in parts.items()}


def _list_partitions(partitioner: Any, label: str, named: Named) -> dict[Any, Any]:
    """Return the partitions of a partitioner of flwr-datasets by their natural names or numbers."""
    if named.client is not None:
        raise DataError(f"{label}: a partitioner already assigns items to clients; omit client=.")
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
    if every and every[0].loose:
        return None
    example, layout = every[0].first() if every else (np.empty((0,)), None)
    tokens = tokens or (layout is not None and layout.whole)
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
            f"The samples need {wanted / 2**30:.1f} GB as {kind}, more than is kept in memory "
            f"({MEMORY / 2**30:g} GB), and {folder} has {free / 2**30:.1f} GB free; set TMPDIR to "
            "a folder on a larger disk."
        )

    def place(rows: int) -> Array:
        with tempfile.TemporaryFile() as file:  # the map keeps it open; it has no name
            return np.memmap(file, kind, "w+", shape=(rows, *example.shape[1:]))

    return place


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
