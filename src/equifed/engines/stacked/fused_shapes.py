"""How the programs of :mod:`equifed.engines.stacked.fused` are laid out, and which fit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

MOST_ROWS = 128
"""Samples of a batch that are held at once."""

MOST_TILE = 1 << 13
"""Entries of a matrix that a program keeps in registers."""

SHARED = 96 << 10
"""Bytes of a multiprocessor's shared memory that every GPU since 2020 gives a program."""


@dataclass(frozen=True)
class Tiles:
    """How a program is laid out: inputs at a time, warps, and loads in flight."""

    block: int
    warps: int
    stages: int


CANDIDATES = {
    "full": (Tiles(32, 4, 3), Tiles(32, 4, 4), Tiles(16, 4, 4), Tiles(32, 4, 2), Tiles(16, 4, 2)),
    "tf32": (Tiles(32, 4, 4), Tiles(16, 4, 4), Tiles(32, 4, 2), Tiles(16, 4, 2)),
}
"""By precision; the first that fits is taken until they are measured."""


UP = {"full": (64, Tiles(32, 4, 3)), "tf32": (128, Tiles(32, 4, 4))}
DOWN = {"full": (32, Tiles(128, 4, 3)), "tf32": (32, Tiles(128, 8, 3))}
"""Samples at a time, and tiles, of passes over all samples: to the losses, to the first layer."""


@dataclass(frozen=True)
class Shape:
    """A model and the batches of its local steps, padded to what matrix units take."""

    features: int
    units: tuple[int, ...]  # of every layer, the outputs last
    batch: int
    precision: str
    shared: int = SHARED
    passing: bool = False  # over all samples, not by local steps

    @property
    def rows(self) -> int:
        """Samples of a batch, padded."""
        return pad(self.batch)

    @cached_property
    def padded(self) -> tuple[int, ...]:
        """Units of every layer, padded."""
        return tuple(pad(count) for count in self.units)

    @cached_property
    def largest(self) -> int:
        """Entries of the largest matrix above the first layer's weights."""
        pairs = zip((self.rows, *self.padded), self.padded, strict=False)
        return max(a * b for a, b in pairs)

    @cached_property
    def fitting(self) -> list[Tiles]:
        """The tiles of which a program fits into a multiprocessor."""
        some = (UP[self.precision][1],) if self.passing else CANDIDATES[self.precision]
        return [tiles for tiles in some if self._fits(tiles)]

    def _fits(self, tiles: Tiles) -> bool:
        loads = tiles.stages * tiles.block * (self.padded[0] + 2 * self.rows)
        if self.passing:
            twice = 1 + (self.precision == "full")
            loads = tiles.stages * tiles.block * (twice * self.padded[0] + self.rows)
        return 4 * (loads + 2 * self.largest) <= self.shared

    @cached_property
    def refused(self) -> str | None:
        """Why no program holds it, if none does."""
        if self.rows > MOST_ROWS:
            return f"batches of {self.batch} samples are larger than {MOST_ROWS}"
        if self.largest > MOST_TILE or not self.fitting:
            return f"layers of {', '.join(map(str, self.units))} units do not fit into registers"
        return None


def pad(count: int) -> int:
    """Return the next power of two that matrix units take.

    >>> pad(3), pad(50)
    (16, 64)
    """
    return max(16, 1 << (count - 1).bit_length())


def find_shared(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have on a device."""
    if device.type != "cuda":
        return SHARED
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", SHARED))
