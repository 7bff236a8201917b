"""Handles for vectors that clients keep: gradients, updates, memories."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from typing_extensions import override

from equifed.contract.arrays import Losses, Vector, Weights


class ClientVectors(ABC):
    """One vector per client, kept where it is: shape (n, d) in thought only.

    A handle gives out weighted sums and norms, never a single client's vector.
    """

    @abstractmethod
    def weighted_sum(self, weights: Weights) -> Vector:
        """Return sum_i weights_i v_i, summed in the order of the clients."""

    @abstractmethod
    def squared_norms(self) -> Losses:
        """Return |v_i|^2 for every client."""

    def step(self, weights: Weights) -> Vector:
        """Return the weighted sum that moves the model.

        It is :meth:`weighted_sum`, but where absent clients count with what they sent last.
        """
        return self.weighted_sum(weights)

    def weighted_difference(self, old: ClientVectors, weights: Weights) -> Vector:
        """Return sum_i weights_i (v_i - old_i); as one sum where sums are hidden."""
        return self.weighted_sum(weights) - old.weighted_sum(weights)

    def allows(self, weights: Weights) -> bool:
        """Tell whether a sum that is not needed may be asked for; hidden ones may show too much."""
        return True

    def collect(self) -> ClientVectors:
        """Return them as a value that a checkpoint can hold; all processes of a group call it."""
        return self

    @property
    def at_hand(self) -> bool:
        """Whether norms cost neither an exchange nor work done again."""
        return False

    @property
    def claimed(self) -> bool:
        """Whether norms are the clients' own word, because nobody sees their vectors."""
        return False

    @property
    def behind(self) -> ClientVectors:
        """What a view looks at; any other handle is itself."""
        return self


@dataclass(frozen=True)
class KeyedMemory(ClientVectors):
    """One key per client of the federation, or "" for a client whose vector is zero.

    The vectors are with the clients; ``clients.remembered`` turns such a memory into a handle that
    can sum them. A checkpoint stores the keys.
    """

    keys: tuple[str, ...]

    @override
    def weighted_sum(self, weights: Weights) -> Vector:
        raise TypeError("Ask clients.remembered(memory, index) for a handle first.")

    @override
    def squared_norms(self) -> Losses:
        raise TypeError("Ask clients.remembered(memory, index) for a handle first.")


def multiply_rows(rows: Vector) -> Vector:
    """Return the inner products of the rows of a matrix, in float64."""
    rows = rows.double().contiguous()  # products of other strides may have other bits
    return rows @ rows.T
