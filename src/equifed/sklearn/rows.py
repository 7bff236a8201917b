"""Rows by client: whose they are, what they count, in the order that a federation has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils import check_consistent_length
from sklearn.utils.validation import _check_sample_weight

from equifed.data.columns import name_key, name_values
from equifed.data.split import Split

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Rows:
    """Samples sorted by client.

    Parameters
    ----------
    names : tuple of str
        The clients' names, in order of appearance.
    clients : array
        The clients as they were given.
    inputs, targets : array
        The rows, one client's after the other's.
    counts : array of int
        Rows of each client.
    weights : array, optional
        What each row counts, all above zero; None: one.
    """

    names: tuple[str, ...]
    clients: Array
    inputs: Array
    targets: Array
    counts: Array
    weights: Array | None

    @classmethod
    def sort(cls, X: Array, y: Array, clients: ArrayLike | None, weights: Array | None) -> Rows:
        """Sort rows by client; those that count nothing are left out."""
        owners = _check_clients(clients, X)
        names = name_values(owners, "clients")
        known = list(names)
        place = np.array([known.index(name_key(owner)) for owner in owners], dtype=np.int64)
        order = np.argsort(place, kind="stable")
        if weights is not None:
            order = order[weights[order] > 0]
        counts = np.bincount(place[order], minlength=len(known))
        if not counts.all():
            who = list(names.values())[int(np.flatnonzero(counts == 0)[0])]
            raise ValueError(
                f"sample_weight: client {who!r} has no row that counts more than zero; leave its "
                "rows out."
            )
        first = [int(np.argmax(place == k)) for k in range(len(known))]
        chosen = None if weights is None else weights[order]
        return cls(tuple(names.values()), owners[first], X[order], y[order], counts, chosen)

    @property
    def sizes(self) -> Array:
        """Return what the rows of each client count together."""
        if self.weights is None:
            return self.counts
        return np.add.reduceat(self.weights, np.cumsum(self.counts) - self.counts)

    def split(self) -> Split:
        """Return the rows as a federation has them; weights are a last column of the targets.

        They are scaled so that a client's plain mean of weighted losses is its weighted mean.
        """
        offsets = np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64)
        if self.weights is None:
            return Split(self.inputs, self.targets, offsets)
        share = self.weights * np.repeat(self.counts / self.sizes, self.counts)
        values = self.targets.reshape(len(self.targets), -1).astype(np.float64)
        return Split(self.inputs, np.concatenate([values, share[:, None]], axis=1), offsets)


def find_owners(clients: ArrayLike, X: Array, known: Rows) -> list[str]:
    """Return the names of the clients of new rows; strangers have names of their own."""
    names = {name_key(c): name for c, name in zip(known.clients, known.names, strict=True)}
    return [names.get(name_key(o), f"{o!r}, a stranger") for o in _check_clients(clients, X)]


def check_own(own: Any, clients: ArrayLike | None, weights: Array | None) -> None:
    """Refuse own parts of nobody, and of rows that count differently."""
    if own is not None and clients is None:
        raise ValueError(
            f"own={own!r} is about parameters that every client keeps: say whose rows they are, "
            "fit(X, y, clients=...), or leave own out."
        )
    if own is not None and weights is not None:
        raise ValueError(
            f"own={own!r} and sample_weight do not go together; leave one of them out."
        )


def check_weights(sample_weight: ArrayLike | None, X: Array) -> Array | None:
    """Return what each row counts; None if all count the same."""
    if sample_weight is None:
        return None
    weights = np.asarray(_check_sample_weight(sample_weight, X, dtype=np.float64))
    if weights.min() < 0 or not weights.max() > 0:
        raise ValueError(
            "sample_weight must not be negative and not zero everywhere, got a smallest of "
            f"{weights.min():g} and a largest of {weights.max():g}."
        )
    return None if (weights == weights[0]).all() else weights


def _check_clients(clients: ArrayLike | None, X: Array) -> Array:
    """Return the client of every row as objects."""
    if clients is None:
        return np.full(len(X), "all", dtype=object)
    check_consistent_length(X, clients)
    owners = np.empty(len(X), dtype=object)
    owners[:] = list(np.asarray(clients, dtype=object).tolist())
    bad = [k for k, owner in enumerate(owners) if owner is None or owner != owner]
    if bad:
        raise ValueError(
            f"clients: row {bad[0]} has no client ({owners[bad[0]]!r}), nor have "
            f"{len(bad) - 1} others; every row needs one."
        )
    return owners
