"""Which samples a client uses in which step: the same in every engine, drawn all at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equifed.contract import Index, Stream

_LAST = (1 << 63) - 1


@dataclass(frozen=True)
class Batch:
    """One step's samples of c clients, padded to the largest batch."""

    positions: Tensor  # int64 (c, b): all of the client's own; padding may be any of them
    weights: Tensor  # (c, b): one over the batch size, zero for padding; they make batch means
    keys: Tensor | None  # int64 (c, b): of each sample's dropout masks, where anything is dropped

    def first(self, clients: int) -> Batch:
        """Return the part of the first few clients."""
        if clients == len(self.positions):
            return self
        keys = None if self.keys is None else self.keys[:clients]
        return Batch(self.positions[:clients], self.weights[:clients], keys)


class Minibatches:
    """The minibatches of c clients, step by step; each pass has a shuffle with an address.

    >>> from equifed.contract.streams import Stream
    >>> pair = Minibatches(Stream(0), torch.tensor([3, 8]), np.array([4, 2]), 2, torch.float64)
    >>> sorted(pair.at(0).positions[0].tolist() + pair.at(1).positions[0].tolist())
    [0, 1, 2, 3]
    """

    def __init__(
        self,
        stream: Stream,
        clients: Tensor,
        sizes: Index | Tensor,
        batch_size: int | None,
        dtype: torch.dtype,
        dropout: bool = False,
        width: int | None = None,  # columns of every batch, padded to it
        starts: Tensor | None = None,  # where samples begin; else positions count from each first
    ) -> None:
        # Passes are counted on the host: a device would have to be waited for in every step.
        counts: Index = sizes.cpu().numpy() if isinstance(sizes, Tensor) else sizes
        self._stream, self._clients, self._dtype, self._dropout = stream, clients, dtype, dropout
        self._sizes = torch.as_tensor(sizes, device=clients.device)
        self._longest = int(counts.max())
        self._batch = self._longest if batch_size is None else min(batch_size, self._longest)
        self.shuffled = batch_size is not None
        self._per_pass: Index = -(-counts // self._batch) if self.shuffled else np.ones_like(counts)
        self._passes: Index = np.full_like(counts, -1)
        self._width = max(self._batch, width or 0)
        self._starts = None if starts is None else starts.unsqueeze(1)
        self._order: Tensor | None = None
        self._slots = torch.arange(self._width, device=clients.device)
        self._equal = bool((counts == self._longest).all())
        self._full_weights = self._weights(self._batch)
        self._turns = torch.as_tensor(self._per_pass, device=clients.device)

    def at(self, step: int) -> Batch:
        """Return the samples of one step (counted from zero)."""
        order, keys = self._ordered(step), None
        if self._dropout:
            keys = self._stream.at("dropout").keys(self._clients.unsqueeze(1), step, self._slots)
        if self._equal:  # the same with less arithmetic
            first = (step % int(self._per_pass[0])) * self._batch
            most = min(self._batch, self._longest - first)
            weights = self._full_weights if most == self._batch else self._weights(most)
            return Batch(order.narrow(1, first, self._width), weights, keys)
        start = (step % self._turns) * self._batch
        count = torch.clamp(self._sizes - start, max=self._batch).unsqueeze(1)
        used = self._slots < count
        places = start.unsqueeze(1) + torch.where(used, self._slots, 0)
        return Batch(order.gather(1, places), used.to(self._dtype) / count.to(self._dtype), keys)

    def _weights(self, count: int) -> Tensor:
        """Return the weights of so many samples for every client."""
        used = self._slots < count
        return (used.to(self._dtype) / count).expand(len(self._sizes), -1).contiguous()

    def _ordered(self, step: int) -> Tensor:
        """Return the order of each client's samples in the pass that a step belongs to."""
        if not self.shuffled:
            if self._order is None:
                every = (self._slots % self._longest).expand(len(self._sizes), -1)
                self._order = every if self._starts is None else every + self._starts
            return self._order
        passes = step // self._per_pass
        fresh = np.flatnonzero(passes != self._passes)
        if self._order is None or len(fresh) == len(passes):
            self._order = self._drawn(self._clients, self._sizes, self._starts, passes)
        elif len(fresh):
            rows = torch.as_tensor(fresh, device=self._order.device)
            starts = None if self._starts is None else self._starts[rows]
            order = self._drawn(self._clients[rows], self._sizes[rows], starts, passes[fresh])
            self._order = self._order.index_copy(0, rows, order)
        self._passes = passes
        return self._order

    def _drawn(
        self, clients: Tensor, sizes: Tensor, starts: Tensor | None, passes: Index
    ) -> Tensor:
        """Return the shuffled positions of clients that begin another pass."""
        slots = torch.arange(self._longest, device=clients.device)
        # A number that all share stays on the host: copying it would wait for the device.
        number: int | Tensor = int(passes[0])
        if (passes != number).any():
            number = torch.as_tensor(passes, device=clients.device).unsqueeze(1)
        keys = self._stream.at("shuffle").keys(clients.unsqueeze(1), number, slots)
        order = torch.where(slots < sizes.unsqueeze(1), keys, _LAST).argsort(dim=1, stable=True)
        needed = int(self._per_pass[0] - 1) * self._batch + self._width
        if self._equal and needed > self._longest:  # so that the last batch can be padded, too
            order = order.repeat(1, -(-needed // self._longest))[:, :needed]
        return order if starts is None else order + starts
