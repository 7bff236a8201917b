"""A memory of client vectors that the server knows by key only."""

from __future__ import annotations

from dataclasses import dataclass

from equifed.contract.arrays import Losses, Vector, Weights


@dataclass(frozen=True)
class KeyedMemory:
    """One key per client of the federation, or "" for a client whose vector is zero.

    The vectors are with the clients; ``clients.remembered`` turns such a memory into a handle that
    can sum them. A checkpoint stores the keys.
    """

    keys: tuple[str, ...]

    def weighted_sum(self, weights: Weights) -> Vector:
        """Refuse: a memory alone reaches nobody."""
        raise TypeError("Ask clients.remembered(memory, index) for a handle first.")

    def squared_norms(self) -> Losses:
        """Refuse: a memory alone reaches nobody."""
        raise TypeError("Ask clients.remembered(memory, index) for a handle first.")
