"""All minibatches of a walk drawn at once, for walks that are recorded as CUDA graphs.

Step by step, clients of unequal sizes begin their passes at different times, which the host has to
follow; and a batch takes a dozen small kernels. Which place of which pass a step reads depends on
the clients' sizes alone, though, so it is worked out once. A round then draws the shuffles of all
passes together, sorts them, and reads them off.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from equifed.contract.arrays import Index
from equifed.contract.local import batches_per_pass
from equifed.engines.minibatches import Batch, Keys
from equifed.engines.stacked.chunks import Chunk

ENTRIES = 1 << 24
"""Most samples (with padding) of a walk that is planned; each takes some tens of bytes."""


class PlannedBatches:
    """What :class:`equifed.engines.minibatches.Minibatches` gives, in tensors that stay in place.

    Parameters
    ----------
    chunk : Chunk
        The clients, those with more samples first.
    steps : array of int, shape (c,)
        Steps of each client.
    batch_size : int, optional
        Samples per step; None means all of them, in their order.
    dtype : torch.dtype
        Precision of the weights.
    dropout : bool
        Whether to draw keys for dropout masks.
    """

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

    def draw(self, stream: Keys) -> None:
        """Draw the batches of one walk; ``at`` returns them from now on."""
        order = self._within
        if self.shuffled:
            shuffle = stream.at("shuffle")
            order = self._sorted(shuffle.keys(self._ids[self._owner], self._pass, self._within))
        torch.index_select(
            order + self._starts[self._owner], 0, self._table.view(-1), out=self._positions.view(-1)
        )
        if self._keys is not None:
            when, clients = self._when.view(-1, 1, 1), self._ids.unsqueeze(1)
            self._keys.copy_(stream.at("dropout").keys(clients, when, self._slots))

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
