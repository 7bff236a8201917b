"""Ways to divide a pool of samples among clients."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from equifed.contract.streams import Stream
from equifed.data.split import DataError, Rows, refuse_any

Labels = Rows
Shares = NDArray[np.float64]


class Partition(ABC):
    """What divides a pool of samples among clients.

    >>> class Halves(Partition):
    ...     def assign(self, labels, stream):
    ...         return np.array_split(np.arange(len(labels)), 2)
    >>> [rows.tolist() for rows in Halves().assign(np.zeros(5), Stream(0))]
    [[0, 1, 2], [3, 4]]
    """

    @abstractmethod
    def assign(self, labels: Labels, stream: Stream) -> list[Rows]:
        """Return the rows of each client, sorted, without overlap."""

    def require(self, labels: Labels, clients: int, samples: int) -> None:
        """Refuse fewer than one client, or a pool with fewer samples than are needed."""
        refuse_any(
            (clients < 1, f"{type(self).__name__} needs at least 1 client, got {clients}."),
            (len(labels) < samples, f"{self} needs {samples} samples, got {len(labels)}."),
        )


@dataclass(frozen=True)
class Iid(Partition):
    """Shuffle the pool and deal it out evenly; sizes differ by at most one.

    >>> [len(rows) for rows in Iid(clients=3).assign(np.zeros(10, dtype=np.int64), Stream(0))]
    [4, 3, 3]
    """

    clients: int

    @override
    def assign(self, labels: Labels, stream: Stream) -> list[Rows]:
        self.require(labels, self.clients, self.clients)
        order = stream.at("iid").generator().permutation(len(labels))
        return [np.sort(part) for part in np.array_split(order, self.clients)]


@dataclass(frozen=True)
class Dirichlet(Partition):
    r"""Skew the labels: every class is divided in proportions drawn from a Dirichlet law.

    .. math:: p_k \sim \mathrm{Dir}(\alpha \mathbf 1_N), \quad
       \text{client } i \text{ receives a share } p_{k,i} \text{ of class } k

    as in the studies that SCAFF-PD follows (Li et al. 2022).

    Small :math:`\alpha` leaves clients without samples. A client below ``min_samples`` is then
    topped up with random samples of whoever has most at that moment; every other sample stays
    where the draw put it.

    >>> labels = np.repeat([0, 1], 100)
    >>> for alpha in 0.1, 100.0:  # the share of class 1 at each client
    ...     parts = Dirichlet(clients=3, alpha=alpha).assign(labels, Stream(0))
    ...     print([round(float(labels[rows].mean()), 1) for rows in parts])
    [1.0, 0.0, 0.4]
    [0.5, 0.5, 0.5]
    """

    clients: int
    alpha: float
    min_samples: int = 10

    def __post_init__(self) -> None:
        refuse_any(
            (not (self.alpha > 0 and np.isfinite(self.alpha)),
             f"Dirichlet alpha must be a positive number, got {self.alpha}."),
            (self.min_samples < 1,
             f"Dirichlet min_samples must be at least 1, got {self.min_samples}."),
        )  # fmt: skip

    @override
    def assign(self, labels: Labels, stream: Stream) -> list[Rows]:
        self.require(labels, self.clients, self.clients * self.min_samples)
        draw = stream.at("dirichlet").generator()
        pieces: list[list[Rows]] = [[] for _ in range(self.clients)]
        for label in np.unique(labels):
            rows = draw.permutation(np.flatnonzero(labels == label))
            shares = draw_dirichlet(draw, self.alpha, self.clients)
            for i, piece in enumerate(np.split(rows, cut_points(shares, len(rows)))):
                pieces[i].append(piece)
        parts = top_up([np.concatenate(piece) for piece in pieces], self.min_samples, draw)
        return [np.sort(part) for part in parts]


@dataclass(frozen=True)
class OneClass(Partition):
    """Give every client samples of one class: client i has class ``i % classes``.

    Without ``clients`` there is one per class; otherwise clients of the same class share it
    evenly, and there must be at least as many clients as classes.

    >>> parts = OneClass().assign(np.array([1, 0, 1, 2]), Stream(0))
    >>> [rows.tolist() for rows in parts]
    [[1], [0, 2], [3]]
    """

    clients: int | None = None

    @override
    def assign(self, labels: Labels, stream: Stream) -> list[Rows]:
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
class Shards(Partition):
    """Sort by label, cut into equal shards, and deal every client a few (McMahan et al. 2017).

    >>> labels = np.repeat([0, 1, 2, 3], 5)
    >>> parts = Shards(clients=4, shards=1).assign(labels, Stream(0))
    >>> [set(labels[rows].tolist()) for rows in parts]
    [{0}, {3}, {2}, {1}]
    """

    clients: int
    shards: int = 2

    @override
    def assign(self, labels: Labels, stream: Stream) -> list[Rows]:
        if self.shards < 1:
            raise DataError(f"Shards: a client needs at least 1 shard, got {self.shards}.")
        total = self.clients * self.shards
        self.require(labels, self.clients, total)
        draw = stream.at("shards").generator()
        shuffled = draw.permutation(len(labels))  # so that equal labels are cut at random
        ordered = shuffled[np.argsort(labels[shuffled], kind="stable")]
        pieces = np.array_split(ordered, total)
        dealt = draw.permutation(total).reshape(self.clients, self.shards)
        return [np.sort(np.concatenate([pieces[s] for s in hand])) for hand in dealt]


@dataclass(frozen=True)
class Imbalance(Partition):
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
        refuse_any(*(
            (not 0 <= share <= 1, f"Imbalance {name} must lie in [0, 1], got {share}.")
            for name, share in (("clients", self.clients), ("samples", self.samples))
        ))  # fmt: skip

    @override
    def assign(self, labels: Labels, stream: Stream) -> list[Rows]:
        parts = self.base.assign(labels, stream)
        draw = stream.at("imbalance").generator()
        for i in draw.choice(len(parts), size=round(self.clients * len(parts)), replace=False):
            keep = max(1, len(parts[i]) - round(self.samples * len(parts[i])))
            parts[i] = np.sort(draw.permutation(parts[i])[:keep])
        return parts


PARTITIONS: dict[str, type[Partition]] = {
    "iid": Iid,
    "dirichlet": Dirichlet,
    "one-class": OneClass,
    "shards": Shards,
    "imbalance": Imbalance,
}


def build_partition(spec: Partition | str | Mapping[str, Any]) -> Partition:
    """Build a partition from its name, or from ``{"name": ..., parameter: value, ...}``.

    >>> build_partition({"name": "imbalance", "base": {"name": "iid", "clients": 4}})
    Imbalance(base=Iid(clients=4), clients=0.3, samples=0.7)
    """
    if isinstance(spec, Partition):
        return spec
    given: dict[str, Any] = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = given.pop("name", None)
    if name not in PARTITIONS:
        raise DataError(f"There is no partition {name!r}; there are {', '.join(PARTITIONS)}.")
    if "base" in given:
        given["base"] = build_partition(given["base"])
    try:
        return PARTITIONS[name](**given)
    except TypeError:
        known = ", ".join(inspect.signature(PARTITIONS[name]).parameters)
        raise DataError(f"Partition {name} takes {known}; got {given}.") from None


def draw_dirichlet(draw: np.random.Generator, alpha: float, size: int) -> Shares:
    """Draw from a symmetric Dirichlet law; stable when alpha is so small that gammas underflow."""
    # log Gamma(alpha) = log Gamma(alpha + 1) + log(U) / alpha, then a softmax
    logs = np.log(draw.standard_gamma(alpha + 1, size)) + np.log(draw.random(size)) / alpha
    shares = np.exp(logs - logs.max())
    return np.asarray(shares / shares.sum())


def cut_points(shares: Shares, total: int) -> Rows:
    """Return where to cut ``total`` items so that the pieces have these shares, up to rounding."""
    return np.rint(np.cumsum(shares)[:-1] * total).astype(np.int64)


def top_up(parts: list[Rows], least: int, draw: np.random.Generator) -> list[Rows]:
    """Move random samples from whoever has most to clients with fewer than ``least``."""
    sizes = np.array([len(part) for part in parts])
    for i in np.flatnonzero(sizes < least):
        while sizes[i] < least:
            giver = int(sizes.argmax())
            taken = int(draw.integers(sizes[giver]))
            parts[i] = np.append(parts[i], parts[giver][taken])
            parts[giver] = np.delete(parts[giver], taken)
            sizes[i] += 1
            sizes[giver] -= 1
    return parts
