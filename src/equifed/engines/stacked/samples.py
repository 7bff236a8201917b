"""Clients that are computed together, and how their samples are fetched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equifed.contract.arrays import Index
from equifed.contract.local import batches_per_pass
from equifed.contract.streams import hash_words
from equifed.engines.minibatches import Batch, Minibatches
from equifed.engines.ordered_sums import has_one_order
from equifed.engines.stacked.gradient_rules import StepSamples
from equifed.engines.threads import ALIGNED

CPU_CHUNK = 8 << 20
"""Target for a chunk's models and samples in bytes: small enough to stay near the caches."""

PROFILE_CHUNK = 2 * CPU_CHUNK
"""The same for profile losses, whose inner problems are many small calls for each chunk."""

CUDA_CHUNK = 1 << 32
"""The same on a GPU, which wants few, large calls; far below the memory of any that is used."""

BLOCK = 1 << 23
"""Samples of one client that go through the model at once, in bytes; activations come on top."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """A few clients, those with more samples first."""

    places: slice | Index  # where they stand among the clients that take part
    clients: Index  # their positions in the federation
    ids: Tensor  # the same
    starts: Tensor  # the rows at which their samples begin
    sizes: Index  # their numbers of samples
    counts: Tensor  # the same
    run: slice | None  # all their rows, if these are one run of equally many for every client
    width: int  # columns of their batches: samples and padding

    def __len__(self) -> int:
        return len(self.sizes)


def split_into_chunks(
    index: Index, offsets: Index, widths: Index, mixed: bool, length_for: Callable[[int], int],
    device: torch.device,
) -> Iterator[Chunk]:  # fmt: skip
    """Yield the clients of ``index`` by decreasing number of samples.

    ``length_for`` says how many clients may share a chunk with one of so many samples; ``mixed``
    whether those of another width may, padded to the largest.
    """
    sizes = offsets[index + 1] - offsets[index]
    order = np.argsort(-sizes, kind="stable")
    start = 0
    while start < len(order):
        largest = int(sizes[order[start]])
        width = int(widths[index[order[start]]])
        places = order[start : start + length_for(largest)]
        if not mixed:
            places = places[widths[index[places]] == width]  # the first ones: it falls with size
        clients, counts = index[places], sizes[places]
        begin = int(offsets[clients[0]])
        together = isinstance(as_slice(clients), slice) and counts[-1] == largest == width
        yield Chunk(
            as_slice(places),
            clients,
            torch.as_tensor(clients, device=device),
            torch.as_tensor(offsets[clients], device=device),
            counts,
            torch.as_tensor(counts, device=device),
            slice(begin, begin + largest * len(places)) if together else None,
            width,
        )
        start += len(places)


def common_widths(sizes: Index, multiple: int, bearable: int) -> Index:
    """Return how wide the batches of clients are that use so many samples.

    Few widths, so that many clients can be computed together: from the largest on, a width is kept
    until its padding adds up to more than ``bearable`` samples. Products of one shape have the same
    bits whoever else is computed along, products of another shape have others.

    >>> common_widths(np.array([3, 20, 100, 95]), 8, 16)
    array([ 24,  24, 104, 104])
    """
    own = round_up(sizes, multiple)
    kinds, counts = np.unique(own, return_counts=True)
    widths, wasted = kinds.copy(), 0
    for k in range(len(kinds) - 2, -1, -1):
        wasted += int(widths[k + 1] - kinds[k]) * int(counts[k])
        if wasted > bearable:
            wasted = 0
        else:
            widths[k] = widths[k + 1]
    return np.asarray(widths[np.searchsorted(kinds, own)])


def round_up(values: Any, multiple: int) -> Any:
    """Return the next multiples."""
    return -(-values // multiple) * multiple


def as_slice(places: Index) -> slice | Index:
    """Return places as a slice if they are consecutive: slices make views and plain copies."""
    first = int(places[0])
    if np.array_equal(places, np.arange(first, first + len(places))):
        return slice(first, first + len(places))
    return places


def sample_bytes(inputs: Tensor) -> int:
    """Return the memory of one sample."""
    return max(1, inputs[0].numel() * inputs.element_size())


class Supply:
    """The samples of a chunk, step by step; minibatches take the place of those before."""

    def __init__(
        self,
        inputs: Tensor,  # of all clients, one after the other
        targets: Tensor,
        chunk: Chunk,
        batches: Minibatches | PlannedBatches,
    ) -> None:
        self._inputs, self._targets, self._chunk = inputs, targets, chunk
        self._batches = batches

    @cached_property
    def _room(self) -> Tensor:
        most = self._batches.at(0).positions.numel()  # the first is as large as any
        return self._inputs.new_empty(most, *self._inputs.shape[1:])

    @cached_property
    def whole(self) -> StepSamples:
        """All samples of the chunk's clients, without copying them where that is possible."""
        run, batch = self._chunk.run, self._batches.at(0)
        one_order = has_one_order(self._inputs.dtype, self._inputs.device)
        # Products of rows that begin where copies do not may have other bits.
        if run is None or (one_order and self._inputs[run].data_ptr() % ALIGNED):
            return self._fetch(batch)
        shape = len(self._chunk), self._chunk.width
        inputs, targets = (v[run].view(*shape, *v.shape[1:]) for v in (self._inputs, self._targets))
        return StepSamples(inputs, targets, batch.weights, batch.keys)

    def _fetch(self, batch: Batch, room: Tensor | None = None) -> StepSamples:
        """Return one batch, whose positions count all clients' samples; inputs in the room."""
        rows, shape = batch.positions.reshape(-1), batch.positions.shape  # copied once for both
        out = None if room is None else room.narrow(0, 0, len(rows))
        # index_select copies whole rows, several times as fast as plain indexing.
        inputs = torch.index_select(self._inputs, 0, rows, out=out)
        targets = torch.index_select(self._targets, 0, rows)
        inputs, targets = (v.view(*shape, *v.shape[1:]) for v in (inputs, targets))
        return StepSamples(inputs, targets, batch.weights, batch.keys)

    def prepare(self) -> None:
        """Fetch full batches now, or make room for minibatches."""
        _ = self._room if self._batches.shuffled else self.whole

    def at(self, step: int, live: int | None = None) -> list[StepSamples]:
        """Return the samples of the first ``live`` clients, in blocks a model can take at once."""
        live = len(self._chunk) if live is None else live
        if self._batches.shuffled:
            return [self._fetch(self._batches.at(step).first(live), self._room)]
        whole = self.whole
        if whole.keys is not None and step > 0:  # the same samples, other units dropped
            whole = replace(whole, keys=self._batches.at(step).keys)
        return whole.first(live).blocks(max(1, BLOCK // sample_bytes(self._inputs)))


ENTRIES = 1 << 24
"""Most samples (with padding) of a walk that is planned; each takes some tens of bytes."""


class PlannedBatches:
    """All minibatches of a walk drawn at once, in tensors that stay in place, for CUDA graphs."""

    def __init__(
        self, chunk: Chunk, steps: Index, batch_size: int | None, dtype: torch.dtype, dropout: bool
    ) -> None:
        self.shuffled = batch_size is not None
        device, sizes, longest = chunk.ids.device, chunk.sizes, int(steps.max())
        self._ids, self._starts = chunk.ids, chunk.starts
        batch = int(sizes.max()) if batch_size is None else min(batch_size, int(sizes.max()))
        turns = batches_per_pass(sizes, batch if self.shuffled else None)
        passes = -(-steps // turns) if self.shuffled else np.ones_like(sizes)
        # Rows of a table: one for each step of minibatches, one in all for full batches.
        when = np.arange(longest if self.shuffled else 1)[:, None]
        slots = np.arange(max(batch, chunk.width))
        start = (when % turns) * batch
        count = np.minimum(sizes - start, batch)[..., None]  # samples of a client's batch
        used = slots < count
        place = start[..., None] + np.where(used, slots, 0)
        # Shuffles lie one after the other: the passes of a client, each as long as it has samples.
        first = np.concatenate([[0], np.cumsum(passes * sizes)])[:-1]
        which = np.minimum(when // turns, passes - 1)  # who has stopped reads anything
        self._table = torch.as_tensor(first[:, None] + which[..., None] * sizes[:, None] + place)
        self._table = self._table.to(device)
        self._weights = torch.as_tensor(used / count).to(device, dtype)
        self._slots = torch.as_tensor(slots, device=device)
        self._when = torch.arange(longest, device=device)
        self._equal = int(sizes[0]) if (sizes == sizes[0]).all() else None
        lengths = np.repeat(sizes, passes)
        owner = np.repeat(np.arange(len(sizes)), passes)
        number = np.arange(len(owner)) - np.repeat(np.cumsum(passes) - passes, passes)
        group = np.repeat(np.arange(len(owner)), lengths)
        within = np.arange(len(group)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        parts = (group, owner[group], number[group], within)
        self._group, self._owner, self._pass, self._within = (
            torch.as_tensor(part, device=device) for part in parts
        )
        self._positions = torch.zeros_like(self._table)
        self._keys: Tensor | None = None
        if dropout:
            shape = (longest, len(sizes), len(slots))
            self._keys = torch.zeros(shape, dtype=torch.int64, device=device)

    @staticmethod
    def fits(chunk: Chunk, steps: Index) -> bool:
        """Tell whether a walk is short enough to be planned, and everybody has samples."""
        entries = int(steps.max()) * len(chunk) * chunk.width
        return entries <= ENTRIES and bool((chunk.sizes > 0).all())

    def draw(self, salt_of: Callable[[str], Tensor | int]) -> None:
        """Draw the batches of a walk, by salts of its streams; ``at`` returns them afterwards."""
        order = self._within
        if self.shuffled:
            words = salt_of("shuffle"), self._pass, self._within
            order = self._sorted(hash_words(self._ids[self._owner], *words))
        torch.index_select(
            order + self._starts[self._owner], 0, self._table.view(-1), out=self._positions.view(-1)
        )
        if self._keys is not None:
            words = salt_of("dropout"), self._when.view(-1, 1, 1), self._slots
            self._keys.copy_(hash_words(self._ids.unsqueeze(1), *words))

    def _sorted(self, keys: Tensor) -> Tensor:
        """Return the places of every pass in the order of their keys, pass after pass."""
        if self._equal is not None:
            return keys.view(-1, self._equal).argsort(dim=1, stable=True).view(-1)
        by_key = keys.argsort(stable=True)
        return self._within[by_key[self._group[by_key].argsort(stable=True)]]

    def at(self, step: int) -> Batch:
        """Return the samples of one step (counted from zero)."""
        row = step if self.shuffled else 0
        keys = None if self._keys is None else self._keys[step]
        return Batch(self._positions[row], self._weights[row], keys)

    def keys(self, steps: range, live: int) -> Tensor:
        """Return the keys of some steps for the first ``live`` clients, (steps, live, b)."""
        assert self._keys is not None
        return self._keys[steps.start : steps.stop, :live]
