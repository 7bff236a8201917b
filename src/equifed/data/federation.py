"""The data of all clients: flat arrays, who owns which rows, and what every client is called.

A :class:`Split` holds the samples of all clients one after the other, without padding; a
:class:`Federation` holds a training split and, where there are any, validation and test splits.
Everything is checked when it is built, so that an engine never meets a NaN, an empty client or a
label that the model has no output for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from equifed.contract.streams import Stream
from equifed.data import checks
from equifed.data.tables import Table

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Split:
    """Samples of all clients, flat and ragged: client i has rows ``offsets[i]:offsets[i + 1]``.

    Parameters
    ----------
    inputs : array, shape (total, ...)
        float32 or float64 features, or int64 tokens.
    targets : array, shape (total,) or (total, k)
        int64 classes, or float32 or float64 values for regression.
    offsets : array of int64, shape (n + 1,)
        Where each client's rows begin; the last entry is the total.

    Examples
    --------
    >>> split = Split.from_clients([(np.ones((2, 3)), np.array([0, 1])), (np.zeros((1, 3)), [1])])
    >>> split.sizes
    array([2, 1])
    >>> split.client(1)[1]
    array([1])
    """

    inputs: Array
    targets: Array
    offsets: NDArray[np.int64]

    def __post_init__(self) -> None:
        checks.layout(self.inputs, self.targets, self.offsets)

    @classmethod
    def from_clients(cls, clients: Sequence[tuple[Any, Any]]) -> Self:
        """Join one ``(inputs, targets)`` pair per client, all of the same shape and dtype."""
        inputs = [np.asarray(x) for x, _ in clients]
        targets = [np.asarray(y) for _, y in clients]
        offsets = np.zeros(len(clients) + 1, dtype=np.int64)
        np.cumsum([len(x) for x in inputs], out=offsets[1:])
        return cls(np.concatenate(inputs), np.concatenate(targets), offsets)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Number of samples of each client, shape (n,)."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.inputs)

    def client(self, i: int) -> tuple[Array, Array]:
        """Return the inputs and targets of client ``i``, as views."""
        rows = slice(self.offsets[i], self.offsets[i + 1])
        return self.inputs[rows], self.targets[rows]

    def owners(self) -> NDArray[np.int64]:
        """Return the client of every row, shape (total,)."""
        return np.repeat(np.arange(len(self.offsets) - 1), self.sizes)

    def take(self, rows: Sequence[NDArray[np.int64]]) -> Split:
        """Return a split in which client i holds the rows ``rows[i]`` of this one."""
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(r) for r in rows], out=offsets[1:])
        index = np.concatenate(rows).astype(np.int64) if rows else np.empty(0, dtype=np.int64)
        return Split(self.inputs[index], self.targets[index], offsets)

    def class_counts(self, classes: int) -> NDArray[np.int64]:
        """Return how many samples of each class every client has, shape (n, classes)."""
        n = len(self.offsets) - 1
        cells = self.owners() * classes + self.targets
        return np.bincount(cells, minlength=n * classes).reshape(n, classes)


@dataclass(frozen=True, eq=False)
class Federation:
    """Named clients with their training samples and, where given, validation and test samples.

    Building one checks it: unique names; finite features; every client with at least one training
    sample; one feature shape and dtype for all; labels in ``0..classes - 1``, or floats when
    ``classes`` is None. A client may lack validation or test samples; its metrics are then
    undefined.

    Parameters
    ----------
    name : str
        Name of the data set.
    names : tuple of str
        Client names, in the order of the splits.
    train : Split
        Training samples.
    validation, test : Split, optional
        Held-out samples.
    classes : int, optional
        Number of classes; None for regression.
    class_names : tuple of str
        Names of the classes; empty, or one each.
    source : dict
        Provenance, for the report: publisher, licence, checksums, how it was prepared.

    Examples
    --------
    >>> X = np.arange(6.0).reshape(3, 2)
    >>> fed = Federation.from_clients({"north": (X, [0, 1, 1]), "south": (X + 1, [1, 0, 1])})
    >>> fed.names, fed.classes, fed.train.sizes
    (('north', 'south'), 2, array([3, 3]))
    >>> print(fed.table())
    own data: 2 clients
    client  train  class 0  class 1
    north       3        1        2
    south       3        1        2
    all         6        2        4
    """

    name: str
    names: tuple[str, ...]
    train: Split
    validation: Split | None = None
    test: Split | None = None
    classes: int | None = None
    class_names: tuple[str, ...] = ()
    source: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.client_names(self.names)
        checks.class_names(self.classes, self.class_names)
        for label, split in self.splits().items():
            checks.content(label, split, self.names, self.classes)
            checks.same_kind(label, split, self.train)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{label} {len(split)}" for label, split in self.splits().items())
        return f"<Federation {self.name!r}: {len(self)} clients; samples: {sizes}>"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample's features; () for a single number."""
        return self.train.inputs.shape[1:]

    def splits(self) -> dict[str, Split]:
        """Return the splits there are, by name: train, then validation and test."""
        held = {"train": self.train, "validation": self.validation, "test": self.test}
        return {label: split for label, split in held.items() if split is not None}

    # -- bring your own -------------------------------------------------------------------------

    @classmethod
    def from_clients(cls, clients: Mapping[str, tuple[Any, Any]], **options: Any) -> Federation:
        """Build from ``{name: (X, y)}``; see :func:`equifed.data.own.from_clients`."""
        from equifed.data import own

        return own.from_clients(clients, **options)

    @classmethod
    def from_table(cls, table: Any | str | Path, **options: Any) -> Federation:
        """Build from a table with a client column; see :func:`equifed.data.own.from_table`."""
        from equifed.data import own

        return own.from_table(table, **options)

    @classmethod
    def from_partitions(cls, partitioner: Any, **options: Any) -> Federation:
        """Build from ``load_partition(i)``; see :func:`equifed.data.own.from_partitions`."""
        from equifed.data import own

        return own.from_partitions(partitioner, **options)

    # -- derived federations --------------------------------------------------------------------

    def subset(self, clients: Iterable[str | int]) -> Federation:
        """Return the federation of some clients, by name or position, in the order given."""
        index = checks.positions(clients, self.names)
        held: dict[str, Any] = {
            label: split.take([np.arange(split.offsets[i], split.offsets[i + 1]) for i in index])
            for label, split in self.splits().items()
        }
        return replace(self, names=tuple(self.names[i] for i in index), **held)

    def split(self, validation: float = 0.0, test: float = 0.0, seed: int = 0) -> Federation:
        """Hold out a fraction of every client's training samples.

        A client with m samples gives ``round(test * m)`` of them to the test split and
        ``round(validation * m)`` to the validation split, drawn without replacement from the
        address ``("split", client name)``: the same samples whatever other clients there are. At
        least one sample stays in training.
        """
        checks.fractions(self, validation=validation, test=test)
        rows: dict[str, list[NDArray[np.int64]]] = {"train": [], "validation": [], "test": []}
        for i, name in enumerate(self.names):
            start, stop = self.train.offsets[i : i + 2]
            order = start + Stream(seed).at("split", name).generator().permutation(stop - start)
            tested = min(round(test * len(order)), len(order) - 1)
            held = tested + min(round(validation * len(order)), len(order) - 1 - tested)
            rows["test"].append(np.sort(order[:tested]))
            rows["validation"].append(np.sort(order[tested:held]))
            rows["train"].append(np.sort(order[held:]))
        wanted = ["train"] + ["validation"] * (validation > 0) + ["test"] * (test > 0)
        parts: dict[str, Any] = {label: self.train.take(rows[label]) for label in wanted}
        return replace(self, **parts)

    # -- description ----------------------------------------------------------------------------

    def checksum(self) -> str:
        """Return the SHA-256 of names, classes, arrays, dtypes and offsets."""
        digest = hashlib.sha256(repr((self.names, self.classes, self.class_names)).encode())
        for label, split in self.splits().items():
            for array in (split.inputs, split.targets, split.offsets):
                little = array.astype(array.dtype.newbyteorder("<"), copy=False)
                digest.update(f"{label} {little.dtype.str} {array.shape}".encode())
                digest.update(np.ascontiguousarray(little).data)
        return digest.hexdigest()

    def table(self) -> Table:
        """Return the clients as rows: sizes of the splits and class counts of the training split.

        With more than twelve classes, the number of classes present stands for the counts.
        """
        splits = self.splits()
        columns = {label: split.sizes for label, split in splits.items()}
        if self.classes is not None:
            counts = self.train.class_counts(self.classes)
            if self.classes <= 12:
                titles = self.class_names or [f"class {k}" for k in range(self.classes)]
                columns |= {str(title): counts[:, k] for k, title in enumerate(titles)}
        rows = [[str(v) for v in row] for row in zip(*columns.values(), strict=True)]
        totals = [str(int(values.sum())) for values in columns.values()]
        header = ["client", *columns]
        if self.classes is not None and self.classes > 12:
            header.append("classes")
            rows = [[*row, str(np.count_nonzero(counts[i]))] for i, row in enumerate(rows)]
            totals.append(str(np.count_nonzero(counts.sum(0))))
        named = [(name, *row) for name, row in zip(self.names, rows, strict=True)]
        return Table(f"{self.name}: {len(self)} clients", tuple(header), named, ("all", *totals))
