"""Randomness with an address.

Every draw names its seed, round, purpose, client and step, so the same address gives the same
numbers in every engine, for every chunk size, for every subset of clients and after a resume. The
server's few decisions use a NumPy generator; the clients' many ones a hash of 63 bits for each
(client, step, slot), a chain of SplitMix64 finalisers (Steele, Lea, Flood, OOPSLA 2014) in integers
that wrap around, so CPU and GPU give the same bits.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import torch

Word: TypeAlias = int | str

_GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _signed(value: int) -> int:
    """Reinterpret 64 bits as a signed integer, torch's only 64-bit kind."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


_M1, _M2, _G = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB), _signed(_GAMMA)


def mix(state: torch.Tensor, word: torch.Tensor | int) -> torch.Tensor:
    """Hash an int64 tensor of states with an int64 word (tensors broadcast)."""
    z = (state ^ word) + _G
    # ``>>`` of a signed tensor copies the sign bit; the masks make it a logical shift.
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _M1
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _M2
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def hash_words(clients: torch.Tensor, *words: torch.Tensor | int) -> torch.Tensor:
    """Return keys of 63 bits of clients, the salt of an address, and further words."""
    state = clients
    for word in words:
        state = mix(state, word)
    return state & ((1 << 63) - 1)


@dataclass(frozen=True)
class Stream:
    """An address for random draws.

    >>> Stream(0).at("round", 3).at("clients").generator().integers(10) == (
    ...     Stream(0).at("round", 3, "clients").generator().integers(10)
    ... )
    np.True_
    """

    seed: int
    address: tuple[Word, ...] = ()

    def at(self, *more: Word) -> Stream:
        """Return the stream at a longer address."""
        return Stream(self.seed, self.address + more)

    def generator(self) -> np.random.Generator:
        """Return a NumPy generator that starts at this address."""
        if self.seed < 0:
            raise ValueError(f"A seed is a whole number of at least 0, got {self.seed}.")
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=self._words()))

    def keys(self, clients: torch.Tensor, *words: torch.Tensor | int) -> torch.Tensor:
        """Return one key of 63 bits for each combination of client and further words, broadcast.

        >>> import torch
        >>> clients, slots = torch.tensor([[0], [5]]), torch.arange(3)
        >>> everyone = Stream(1).at("batches").keys(clients, slots)
        >>> alone = Stream(1).at("batches").keys(torch.tensor([[5]]), slots)
        >>> bool((everyone[1] == alone[0]).all())
        True
        """
        return hash_words(clients, self.salt(), *words)

    def salt(self) -> int:
        """Return the state that the hash chain has reached after the seed and the address."""
        state = (self.seed * _GAMMA + 1) & _MASK
        for word in self._words():
            z = ((state ^ (word & _MASK)) + _GAMMA) & _MASK
            z = ((z ^ (z >> 30)) * _M1) & _MASK
            z = ((z ^ (z >> 27)) * _M2) & _MASK
            state = z ^ (z >> 31)
        return _signed(state)

    def _words(self) -> tuple[int, ...]:
        return tuple(zlib.crc32(w.encode()) if isinstance(w, str) else int(w) for w in self.address)
