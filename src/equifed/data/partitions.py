"""Ways to divide a pool of samples among clients.

A partition is a frozen value; :meth:`assign` maps the labels of a pool to one array of row numbers
per client, drawn from a stream. Held-out samples follow the training samples: see :func:`follow`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from equifed.contract.streams import Stream
from equifed.data.checks import DataError
from equifed.data.columns import grouped
from equifed.data.shares import cuts, dirichlet, follow, limited_counts, topped_up
from equifed.data.tables import Table

__all__ = [
    "PARTITIONS",
    "ByColumn",
    "Dirichlet",
    "Iid",
    "Imbalance",
    "OneClass",
    "Partition",
    "Shards",
    "follow",
    "partition_from",
    "table",
]

Rows = NDArray[np.int64]
Labels = NDArray[np.int64]


@runtime_checkable
class Partition(Protocol):
    """What divides a pool of samples among clients."""

    def assign(self, labels: Labels, stream: Stream) -> list[Rows]:
        """Return the rows of each client, sorted, without overlap."""
        ...


@dataclass(frozen=True)
class Iid:
    """Shuffle the pool and deal it out evenly; sizes differ by at most one.

    >>> [len(rows) for rows in Iid(clients=3).assign(np.zeros(10, dtype=np.int64), Stream(0))]
    [4, 3, 3]
    """

    clients: int

    def assign(self, labels: Labels, stream: Stream) -> list[Rows]:
        """Return the rows of each client."""
        _enough(self, labels, self.clients)
        order = stream.at("iid").generator().permutation(len(labels))
        return [np.sort(part) for part in np.array_split(order, self.clients)]


@dataclass(frozen=True)
class Dirichlet:
    r"""Skew the labels: every class is divided in proportions drawn from a Dirichlet law.

    .. math:: p_k \sim \mathrm{Dir}(\alpha \mathbf 1_N), \quad
       \text{client } i \text{ receives a share } p_{k,i} \text{ of class } k

    as in the studies that SCAFF-PD follows (Li et al. 2022). With ``equal_sizes`` every client
    instead draws its own class mixture from :math:`\mathrm{Dir}(\alpha \mathbf 1_K)` and takes
    the same number of samples, while its classes last (Hsu et al. 2019).

    Small :math:`\alpha` leaves clients without samples. A client below ``min_samples`` is then
    topped up with random samples of whoever has most at that moment; every other sample stays
    where the draw put it.
    """

    clients: int
    alpha: float
    min_samples: int = 10
    equal_sizes: bool = False

    def __post_init__(self) -> None:
        if not (self.alpha > 0 and np.isfinite(self.alpha)):
            raise DataError(f"Dirichlet alpha must be a positive number, got {self.alpha}.")
        if self.min_samples < 1:
            raise DataError(f"Dirichlet min_samples must be at least 1, got {self.min_samples}.")

    def assign(self, labels: Labels, stream: Stream) -> list[Rows]:
        """Return the rows of each client."""
        _enough(self, labels, self.clients * self.min_samples)
        draw = stream.at("dirichlet").generator()
        parts = self._equal(labels, draw) if self.equal_sizes else self._by_class(labels, draw)
        return [np.sort(part) for part in topped_up(parts, self.min_samples, draw)]

    def _by_class(self, labels: Labels, draw: np.random.Generator) -> list[Rows]:
        pieces: list[list[Rows]] = [[] for _ in range(self.clients)]
        for label in np.unique(labels):
            rows = draw.permutation(np.flatnonzero(labels == label))
            shares = dirichlet(draw, self.alpha, self.clients)
            for i, piece in enumerate(np.split(rows, cuts(shares, len(rows)))):
                pieces[i].append(piece)
        return [np.concatenate(piece) for piece in pieces]

    def _equal(self, labels: Labels, draw: np.random.Generator) -> list[Rows]:
        kinds = np.unique(labels)
        stock = [draw.permutation(np.flatnonzero(labels == label)) for label in kinds]
        used = np.zeros(len(kinds), dtype=np.int64)
        left = np.array([len(rows) for rows in stock])
        parts = []
        for i in range(self.clients):
            mixture = dirichlet(draw, self.alpha, len(kinds))
            size = len(labels) // self.clients + (i < len(labels) % self.clients)
            counts = limited_counts(mixture, size, left, draw)
            parts.append(
                np.concatenate([r[u : u + c] for r, u, c in zip(stock, used, counts, strict=True)])
            )
            used, left = used + counts, left - counts
        return parts


@dataclass(frozen=True)
class OneClass:
    """Give every client samples of one class: client i has class ``i % classes``.

    Without ``clients`` there is one per class; otherwise clients of the same class share it
    evenly, and there must be at least as many clients as classes.

    >>> parts = OneClass().assign(np.array([1, 0, 1, 2]), Stream(0))
    >>> [rows.tolist() for rows in parts]
    [[1], [0, 2], [3]]
    """

    clients: int | None = None

    def assign(self, labels: Labels, stream: Stream) -> list[Rows]:
        """Return the rows of each client."""
        kinds = np.unique(labels)
        count = self.clients if self.clients is not None else len(kinds)
        if count < len(kinds):
            raise DataError(f"OneClass needs at least {len(kinds)} clients, one per class.")
        draw = stream.at("one-class").generator()
        parts: list[Rows] = [np.empty(0, dtype=np.int64)] * count
        for k, label in enumerate(kinds):
            owners = range(k, count, len(kinds))
            rows = draw.permutation(np.flatnonzero(labels == label))
            for i, piece in zip(owners, np.array_split(rows, len(owners)), strict=True):
                parts[i] = np.sort(piece)
        return parts


@dataclass(frozen=True)
class Shards:
    """Sort by label, cut into equal shards, and deal every client a few (McMahan et al. 2017)."""

    clients: int
    shards: int = 2

    def assign(self, labels: Labels, stream: Stream) -> list[Rows]:
        """Return the rows of each client."""
        if self.shards < 1:
            raise DataError(f"Shards: a client needs at least 1 shard, got {self.shards}.")
        total = self.clients * self.shards
        _enough(self, labels, total)
        draw = stream.at("shards").generator()
        shuffled = draw.permutation(len(labels))  # so that equal labels are cut at random
        ordered = shuffled[np.argsort(labels[shuffled], kind="stable")]
        pieces = np.array_split(ordered, total)
        dealt = draw.permutation(total).reshape(self.clients, self.shards)
        return [np.sort(np.concatenate([pieces[s] for s in hand])) for hand in dealt]


@dataclass(frozen=True)
class Imbalance:
    """Thin out some clients of another partition (SCAFF-PD, Section 6.2).

    ``round(clients * N)`` clients, drawn at random, lose ``round(samples * m)`` of their m
    training samples, at least one sample stays. SCAFF-PD: 30 % of the clients lose 70 %.

    >>> parts = Imbalance(Iid(clients=10)).assign(np.zeros(1000, dtype=np.int64), Stream(0))
    >>> sorted(len(rows) for rows in parts)
    [30, 30, 30, 100, 100, 100, 100, 100, 100, 100]
    """

    base: Partition
    clients: float = 0.3
    samples: float = 0.7

    def __post_init__(self) -> None:
        for name in ("clients", "samples"):
            if not 0 <= getattr(self, name) <= 1:
                raise DataError(f"Imbalance {name} must lie in [0, 1], got {getattr(self, name)}.")

    def assign(self, labels: Labels, stream: Stream) -> list[Rows]:
        """Return the rows of each client after thinning."""
        parts = self.base.assign(labels, stream)
        draw = stream.at("imbalance").generator()
        for i in draw.choice(len(parts), size=round(self.clients * len(parts)), replace=False):
            keep = max(1, len(parts[i]) - round(self.samples * len(parts[i])))
            parts[i] = np.sort(draw.permutation(parts[i])[:keep])
        return parts


@dataclass(frozen=True)
class ByColumn:
    """Give every distinct value of a column its own client, in order of first appearance.

    >>> column = ByColumn(("b", "a", "b"))
    >>> column.names, [rows.tolist() for rows in column.assign(np.zeros(3, int), Stream(0))]
    (('b', 'a'), [[0, 2], [1]])
    """

    values: tuple[Any, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the clients: the distinct values."""
        return tuple(dict.fromkeys(str(v) for v in self.values))

    def assign(self, labels: Labels, stream: Stream) -> list[Rows]:
        """Return the rows of each client; nothing is drawn."""
        if len(self.values) != len(labels):
            raise DataError(f"ByColumn has {len(self.values)} values for {len(labels)} samples.")
        return list(grouped(self.values).values())


PARTITIONS: dict[str, type] = {
    "iid": Iid,
    "dirichlet": Dirichlet,
    "one-class": OneClass,
    "shards": Shards,
}


def partition_from(spec: Partition | str | Mapping[str, Any]) -> Partition:
    """Build a partition from its name, or from ``{"name": ..., parameter: value, ...}``.

    ``imbalance`` thins the result: ``True`` for SCAFF-PD's numbers, or
    ``{"clients": 0.3, "samples": 0.7}``.

    >>> partition_from({"name": "dirichlet", "clients": 20, "alpha": 0.05, "imbalance": True})
    Imbalance(base=Dirichlet(clients=20, alpha=0.05, min_samples=10, equal_sizes=False), ...)
    """
    if not isinstance(spec, str | Mapping):
        return spec
    given = {"name": spec} if isinstance(spec, str) else dict(spec)
    name, imbalance = given.pop("name", None), given.pop("imbalance", False)
    if name not in PARTITIONS:
        raise DataError(f"There is no partition {name!r}; there are {', '.join(PARTITIONS)}.")
    kind = PARTITIONS[name]
    allowed = [f.name for f in fields(kind)]
    wrong = sorted(set(given) - set(allowed))
    if wrong:
        raise DataError(f"Partition {name} has no {wrong[0]!r}; it has {', '.join(allowed)}.")
    try:
        base: Partition = kind(**given)
    except TypeError:
        raise DataError(f"Partition {name} needs {', '.join(allowed)}; got {given}.") from None
    if not imbalance:
        return base
    return Imbalance(base, **(dict(imbalance) if isinstance(imbalance, Mapping) else {}))


def table(parts: Sequence[Rows], labels: Labels, names: Sequence[str] | None = None) -> Table:
    """Return a partition as a table: clients as rows, sizes and class counts as columns."""
    kinds = np.unique(labels)
    counts = np.array([[np.count_nonzero(labels[rows] == k) for k in kinds] for rows in parts])
    titles = names or [f"client {i}" for i in range(len(parts))]
    rows = [
        (str(title), str(len(part)), *map(str, row))
        for title, part, row in zip(titles, parts, counts, strict=True)
    ]
    totals = ("all", str(counts.sum()), *map(str, counts.sum(0)))
    header = ("client", "samples", *(f"class {k}" for k in kinds))
    return Table(f"{len(parts)} clients", header, rows, totals)


# -- small parts ----------------------------------------------------------------------------------


def _enough(partition: Any, labels: Labels, needed: int) -> None:
    kind = type(partition).__name__
    if partition.clients < 1:
        raise DataError(f"{kind} needs at least 1 client, got {partition.clients}.")
    if len(labels) < needed:
        raise DataError(f"{kind} needs {needed} samples for {partition}, got {len(labels)}.")
