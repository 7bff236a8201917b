"""The clients' gradients at one shared model, kept or made again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from equifed.contract.arrays import Losses, Weights
from equifed.contract.streams import Stream
from equifed.engines.in_process import DenseVectors, to_numpy, to_tensor
from equifed.engines.stacked.chunks import Chunk, empty_rows, put_rows
from equifed.engines.stacked.threads import in_threads

if TYPE_CHECKING:
    from equifed.engines.stacked.clients import StackedClients


class SharedGradients:
    """Gradients at one shared model, not kept: a weighted sum is one pass over the samples."""

    def __init__(
        self, clients: StackedClients, x: Tensor, stream: Stream, batch_size: int | None
    ) -> None:
        self._clients, self._x, self._stream, self._batch = clients, x, stream, batch_size

    def weighted_sum(self, weights: Weights) -> Tensor:
        """Return sum_i weights_i grad f_i(x): each sample counts its client's weight."""
        clients, x = self._clients, self._x.unsqueeze(0)
        total = clients.model.l2 * float(weights.sum()) * self._x
        for chunk in clients.chunks(self._batch):
            shares = to_tensor(weights[chunk.places], x)
            for samples in clients.supply(chunk, self._stream, self._batch).at(0):
                total += clients.rule.data.gradient(x, samples.as_one(shares))[0].squeeze(0)
        if not torch.isfinite(total).all():
            clients._refuse_non_finite(self.squared_norms(), "squared gradient norm")
        return total

    def squared_norms(self) -> Losses:
        """Return |grad f_i(x)|^2, chunk by chunk."""
        out = np.zeros(len(self._clients.index))
        for chunk in self._clients.chunks(self._batch):
            out[chunk.places] = to_numpy(self.rows(chunk)[0].square().sum(dim=1))
        return out

    def rows(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return gradients (c, d) and losses (c,) of a chunk's clients."""
        samples = self._clients.supply(chunk, self._stream, self._batch).at(0)
        return self._clients.rule.gradient(self._x.expand(len(chunk), -1), samples)

    def everything(self) -> tuple[Losses, Losses, DenseVectors]:
        """Return the losses, the squared norms and all gradients, side by side."""
        n = len(self._clients.index)
        matrix, numbers = empty_rows(n, self._x), self._x.new_empty(n, 2)

        def store(chunk: Chunk) -> None:
            gradient, value = self.rows(chunk)
            put_rows(matrix, chunk.places, gradient)
            norm = torch.linalg.vector_norm(gradient, dim=1)
            put_rows(numbers, chunk.places, torch.stack([value, norm.square()], dim=1))

        in_threads(store, self._clients.chunks(self._batch), self._clients.independent)
        losses, norms = to_numpy(numbers).T  # one copy, since it waits for the device
        return losses.copy(), norms, DenseVectors(matrix)
