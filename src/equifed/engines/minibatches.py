"""Which samples a client uses in which step: the same in every engine, drawn all at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equifed.streams import Stream

_LAST = (1 << 63) - 1


@dataclass(frozen=True)
class Batch:
    """One step's samples of c clients, padded to the largest batch.

    Parameters
    ----------
    positions : int64 (c, b)
        Positions among the client's own samples; padding repeats the first of the batch.
    weights : float (c, b)
        One over the batch size for a sample, zero for padding, so the weighted sum is the batch
        mean.
    keys : int64 (c, b), optional
        One key for each sample's dropout masks, where the model drops anything.
    """

    positions: Tensor
    weights: Tensor
    keys: Tensor | None


class Minibatches:
    """The minibatches of c clients, step by step.

    Every pass over a client's samples has its own shuffle, which depends on the stream's address,
    the client and the number of the pass, and on nothing else. Without a batch size every step uses
    all samples in their order.

    Parameters
    ----------
    stream : Stream
        Address of this piece of work (round and purpose).
    clients, sizes : int64 (c,)
        Positions of the clients in the federation, and their numbers of samples.
    batch : int, optional
        Samples per step.
    dtype : torch.dtype
        Precision of the weights.
    dropout : bool
        Whether to draw keys for dropout masks.

    Examples
    --------
    >>> pair = Minibatches(Stream(0), torch.tensor([3, 8]), torch.tensor([4, 2]), 2, torch.float64)
    >>> sorted(pair.at(0).positions[0].tolist() + pair.at(1).positions[0].tolist())
    [0, 1, 2, 3]
    """

    def __init__(
        self,
        stream: Stream,
        clients: Tensor,
        sizes: Tensor,
        batch: int | None,
        dtype: torch.dtype,
        dropout: bool = False,
    ) -> None:
        self.stream, self.clients, self.sizes, self.dtype = stream, clients, sizes, dtype
        self.dropout = dropout
        self.longest = int(sizes.max())
        self.batch = self.longest if batch is None else min(batch, self.longest)
        self.shuffled = batch is not None
        self.per_pass = -(-sizes // self.batch)
        self._pass = torch.full_like(sizes, -1)
        self._order = torch.arange(self.longest, device=sizes.device).expand(len(sizes), -1)

    def at(self, step: int) -> Batch:
        """Return the samples of one step (counted from zero)."""
        slots = torch.arange(self.batch, device=self.sizes.device)
        if self.shuffled:
            self._shuffle(step // self.per_pass)
        start = (
            (step % self.per_pass) * self.batch if self.shuffled else torch.zeros_like(self.sizes)
        )
        count = torch.clamp(self.sizes - start, max=self.batch)
        used = slots < count.unsqueeze(1)
        places = start.unsqueeze(1) + torch.where(used, slots, 0)
        weights = used.to(self.dtype) / count.unsqueeze(1).to(self.dtype)
        keys = None
        if self.dropout:
            keys = self.stream.at("dropout").keys(self.clients.unsqueeze(1), step, slots)
        return Batch(self._order.gather(1, places), weights, keys)

    def _shuffle(self, passes: Tensor) -> None:
        """Draw the order of the samples for the clients that begin another pass."""
        rows = (passes != self._pass).nonzero().squeeze(1)
        if len(rows) == 0:
            return
        slots = torch.arange(self.longest, device=self.sizes.device)
        clients = self.clients[rows].unsqueeze(1)
        keys = self.stream.at("shuffle").keys(clients, passes[rows].unsqueeze(1), slots)
        keys = torch.where(slots < self.sizes[rows].unsqueeze(1), keys, _LAST)
        order = keys.argsort(dim=1, stable=True)
        self._order = order if len(rows) == len(passes) else self._order.index_copy(0, rows, order)
        self._pass = passes
