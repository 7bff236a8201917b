"""Handles for vectors that clients keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from equifed.contract.arrays import Losses, Weights
from equifed.engines.in_process import DenseVectors

if TYPE_CHECKING:
    from equifed.flower.server import FlowerClients

Remake = Callable[["FlowerClients"], None]
"""Lets clients compute again what they lost."""


class FlowerVectors:
    """One vector per client, on the clients; under privacy "none" the server has them too.

    Parameters
    ----------
    clients : FlowerClients
        Whose vectors these are.
    keys : sequence of str
        Under which key each of them keeps its vector; "" stands for zero.
    rows : Tensor (n, d), optional
        The vectors, where the server was given them.
    remake : callable, optional
        How to compute the vectors again on clients that lost them.
    pending : Pending, optional
        Local work that these vectors are the result of, if it may not have been asked for yet.
    """

    def __init__(
        self,
        clients: FlowerClients,
        keys: Sequence[str],
        rows: Tensor | None = None,
        remake: Remake | None = None,
        pending: Pending | None = None,
    ) -> None:
        self.clients, self.keys, self.rows = clients, tuple(keys), rows
        self.remake, self.pending = remake, pending

    def weighted_sum(self, weights: Weights) -> Tensor:
        """Return sum_i weights_i v_i; unless the server has the vectors, in one exchange or more.

        Local work that nobody asked for yet is fused with the sum into one exchange.
        """
        if self.clients.private:
            if self.pending is not None and not self.pending.done:
                return self.pending.summed(self, weights)
            return self.clients.hidden_sum(self, weights)
        return DenseVectors(self.known()).weighted_sum(weights)

    def squared_norms(self) -> Losses:
        """Return |v_i|^2 for every client."""
        if self.rows is not None:
            return DenseVectors(self.rows).squared_norms()
        self.settle()
        return self.clients.norms(self)

    def known(self) -> Tensor:
        """Return the vectors themselves, asking for them if need be; privacy "none" only."""
        if self.rows is None:
            self.rows = self.clients.recalled(self)
        return self.rows

    def settle(self) -> None:
        """Make sure that the clients hold these vectors."""
        if self.pending is not None and not self.pending.done:
            self.pending.run()

    def key_of(self, client: int) -> str:
        """Return the key of a client by its position in the federation."""
        return self.keys[int((self.clients.index == client).argmax())]


@dataclass
class Pending:
    """Local work that is asked for when its result is: with the sum, in one exchange.

    Parameters
    ----------
    ask : callable
        Runs the exchange, without a sum (None) or fused with one of a part with weights.
    """

    ask: Callable[[tuple[str, Weights] | None], Tensor | None]
    done: bool = False

    def run(self) -> None:
        """Ask for the local work alone."""
        self.ask(None)
        self.done = True

    def summed(self, vectors: FlowerVectors, weights: Weights) -> Tensor:
        """Ask for the local work and a weighted sum of one part of its result."""
        part = vectors.keys[0].rpartition("/")[2]
        total = self.ask((part, weights))
        assert total is not None
        self.done = True
        return total
