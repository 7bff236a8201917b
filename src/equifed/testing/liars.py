"""A client that lies, for trying out what guards are worth."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from equifed.contract.arrays import BlockMatrix, ClientVectors, Index, Losses, Vector, Weights
from equifed.contract.clients import Clients, Moved
from equifed.contract.streams import Stream
from equifed.contract.views import ITERATES, ClientsView, Kind, VectorsView

Claim = float | Callable[[Losses, int], float]
"""A loss to claim, or how it follows from the true losses of those asked and one's place there."""

Factor = float | Callable[[Losses, int, str], float]
"""What to multiply a vector by, or how it follows from the true lengths of all, one's place there,
and the kind of vector."""


class LyingVectors(VectorsView):
    """Client vectors of which one is multiplied."""

    multiply: Factor = 1.0
    place: int | None = None
    partner: LyingVectors | None = None  # the steps that led to these models

    @cached_property
    def factor(self) -> float:
        """By what it is multiplied; a model is moved as far as the step that led to it."""
        if self.partner is not None:
            return self.partner.factor
        if not callable(self.multiply):
            return self.multiply
        if self.place is None:
            return 1.0
        return self.multiply(np.sqrt(self.behind.squared_norms()), self.place, self.kind)

    @override
    def weighted_sum(self, weights: Weights) -> Vector:
        total = self.behind.weighted_sum(weights)
        if self.place is None or weights[self.place] == 0:
            return total
        alone = np.zeros(len(weights))
        alone[self.place] = 1.0
        true = self.behind.weighted_sum(alone)
        origin = self.x if self.kind in ITERATES and self.x is not None else 0.0
        more = (self.factor - 1) * float(weights[self.place])
        return total + more * (true - origin)

    @override
    def squared_norms(self, scale: BlockMatrix | None = None) -> Losses:
        squares = self.behind.squared_norms(scale).copy()
        if self.place is not None and self.kind not in ITERATES:
            with np.errstate(over="ignore"):
                squares[self.place] *= np.float64(self.factor) ** 2
        return squares


class LyingClients(ClientsView):
    """Clients of which one lies; see :func:`with_liar`."""

    def __init__(
        self, behind: Clients, who: int, loss: Claim | None, update: Factor, size: int | None,
        start: int,
    ) -> None:  # fmt: skip
        super().__init__(behind)
        self.who, self.loss, self.update, self.size, self.start = who, loss, update, size, start
        self._kept = {"factor": 1.0}  # what it remembers is what it said

    @property
    @override
    def sizes(self) -> Index:
        sizes = self.behind.sizes
        return sizes if self.size is None else np.where(self.index == self.who, self.size, sizes)

    @override
    def see_numbers(self, numbers: Losses, what: str, stream: Stream) -> Losses:
        place = self._place()
        if self.loss is None or place is None or _round(stream) < self.start:
            return numbers
        said = self.loss(numbers, place) if callable(self.loss) else self.loss
        return np.where(self.index == self.who, said, numbers)

    @override
    def see_vectors(
        self, vectors: ClientVectors, kind: Kind, x: Vector | None, stream: Stream | None,
        corrected: bool = False,
    ) -> ClientVectors:  # fmt: skip
        seen = LyingVectors(vectors, self, kind, x, corrected)
        if stream is None:
            seen.multiply, seen.place = self._kept["factor"], self._place()
        elif _round(stream) >= self.start and self.update != 1:
            seen.multiply, seen.place = self.update, self._place()
        return seen

    @override
    def remember(
        self, memory: ClientVectors | None, index: Index, vectors: ClientVectors
    ) -> ClientVectors:
        if isinstance(vectors, LyingVectors) and self._place() is not None:
            self._kept["factor"] = vectors.factor if vectors.place is not None else 1.0
        return super().remember(memory, index, vectors)

    @override
    def local_steps(self, *given: Any, **named: Any) -> Moved:
        moved = super().local_steps(*given, **named)
        for kind in ITERATES:
            models = getattr(moved, kind)
            if isinstance(models, LyingVectors) and isinstance(moved.displacement, LyingVectors):
                models.partner = moved.displacement
        return moved

    @override
    def inner_products(
        self, vectors: ClientVectors, multiply: Callable[[Vector], Vector]
    ) -> Losses | str:
        said = np.ones(len(self.index))
        if isinstance(vectors, LyingVectors) and vectors.place is not None:
            said[vectors.place] = vectors.factor
        return super().inner_products(
            vectors, lambda rows: multiply(rows * torch.as_tensor(said).to(rows)[:, None])
        )

    def _place(self) -> int | None:
        """Return where the liar stands among those who take part."""
        found = np.flatnonzero(self.index == self.who)
        return int(found[0]) if len(found) else None


def with_liar(
    clients: Clients, who: str | int, *, loss: Claim | None = None, update: Factor = 1.0,
    size: int | None = None, start: int = 1,
) -> Clients:  # fmt: skip
    """Return the same clients, one of whom lies.

    Parameters
    ----------
    clients : Clients
        Honest ones, as :func:`equifed.simulate` makes them.
    who : str or int
        The liar's name or position.
    loss : float or callable, optional
        What it claims as its loss; a callable gets the true losses of those asked and the liar's
        place among them.
    update : float or callable
        By what it multiplies its updates and gradients; a callable gets the true lengths of those
        asked, the liar's place among them, and the kind ("gradient", "displacement", ...).
    size : int, optional
        How many samples it says that it has.
    start : int
        The round in which it begins to lie about losses and updates.

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> liars = with_liar(clients, "shirt", loss=1e6)
    >>> history = ef.train(ef.Guarded(ef.AFL()), liars, rounds=3)
    >>> sorted({event["client"] for event in history.events if event["event"] == "guard"})
    ['shirt']
    """
    position = list(clients.names).index(who) if isinstance(who, str) else who
    if not 0 <= position < len(clients.names):
        raise ValueError(f"who must be a client in 0..{len(clients.names) - 1}, got {who}.")
    return LyingClients(clients, position, loss, update, size, start)


def _round(stream: Stream) -> int:
    """Return the round that a stream's address names; 1 for what comes before the first."""
    after = [b for a, b in pairwise(stream.address) if a == "round"]
    return int(after[0]) if after else 1
