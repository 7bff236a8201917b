"""Memories of client vectors as a state holds them, and as a checkpoint does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from typing_extensions import override

from equifed.contract.arrays import Losses, Vector, Weights
from equifed.contract.clients import ClientVectors


@runtime_checkable
class Scattered(Protocol):
    """Client vectors of which each process holds its part."""

    def collect(self) -> ClientVectors:
        """Return them as a value that a checkpoint can hold; all processes of the group call it."""
        ...


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
