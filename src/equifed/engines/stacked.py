"""Many clients at once in one process, with ``torch.func``.

The data set stays flat and ragged: one tensor of samples plus offsets. Clients are taken in chunks;
within a chunk their models are the rows of one matrix and one batched program moves all of them.
Results equal the loop engine's to rounding.

Memory is bounded by one argument. When the vectors of all clients fit into it, they are kept as a
matrix; otherwise a handle keeps only how to make them again, and makes them chunk by chunk while it
adds them up. Randomness has an address, so making them again gives the same vectors.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from equifed.arrays import Index, Losses, Weights
from equifed.clients import ClientVectors, Moved
from equifed.data.federation import Federation
from equifed.engines.flat_model import SampleLoss
from equifed.engines.in_process import (
    DenseVectors,
    InProcessClients,
    check_local_arguments,
    named_model,
    to_numpy,
    to_tensor,
)
from equifed.engines.loop import LoopClients
from equifed.engines.minibatches import Batch, Minibatches
from equifed.engines.walk import Walk
from equifed.local import LocalSGD
from equifed.streams import Stream

MEMORY = 1 << 30
"""Default bound, in bytes, on the client vectors that the engine keeps."""

CHUNK_BYTES = 1 << 25
"""Target size of a chunk's models and of its samples: small enough to stay near the caches."""


@dataclass(frozen=True)
class Chunk:
    """Clients that are computed together: their places in the subset and in the federation."""

    places: Index
    clients: Tensor
    starts: Tensor
    sizes: Tensor


class StackedClients(InProcessClients):
    """Clients in chunks through ``torch.func``; see :func:`stacked` for the arguments."""

    def __init__(
        self,
        federation: Federation,
        module: nn.Module,
        loss: SampleLoss,
        *,
        l2: float = 0.0,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        memory: int = MEMORY,
        chunk: int | None = None,
    ) -> None:
        if memory < 1:
            raise ValueError(f"memory is a bound in bytes of at least 1, got {memory}.")
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk is a number of clients of at least 1, got {chunk}.")
        super().__init__(federation, module, loss, l2=l2, dtype=dtype, device=device)
        self._memory, self._chunk = memory, chunk
        in_dims = (0, 0, 0, 0, 0 if self.model.dropouts else None)
        self._batched = vmap(grad_and_value(self._weighted_loss), in_dims=in_dims)

    # The verbs.

    def losses(self, x: Tensor, stream: Stream, batch: int | None = None) -> Losses:
        """Return f_i(x) on all of each client's samples, or on one minibatch."""
        out = torch.zeros(len(self.index), dtype=torch.float64, device=self.model.device)
        with torch.no_grad():
            for part in self._flat(stream, batch):
                values = self._sample_losses(x, part) * part.weights
                out.index_add_(0, part.places, values.to(torch.float64))
        self._book(down=1, up=0, losses=1)
        losses = to_numpy(out + self.model.penalty(x).to(torch.float64))
        self._refuse_non_finite(losses, "loss")
        return losses

    def value_and_gradient(
        self, x: Tensor, stream: Stream, batch: int | None = None
    ) -> tuple[Losses, ClientVectors]:
        """Return f_i(x) and a handle for the gradients at x."""
        if not self._fits(1):
            losses = self.losses(x, stream, batch)
            self.traffic.up[self.index] += self.model.size * self.model.dtype.itemsize
            return losses, SharedGradients(self, x, stream, batch)
        rows, values = self._zeros(len(self.index)), x.new_zeros(len(self.index))
        for chunk in self._chunks(batch):
            gradient, value = self.chunk_gradient(
                x.expand(len(chunk.places), -1), chunk, stream, batch
            )
            rows[chunk.places], values[chunk.places] = gradient, value
        self._book(down=1, up=1, losses=1)
        losses = to_numpy(values)
        self._refuse_non_finite(losses, "loss")
        gradients = DenseVectors(rows)
        self._refuse_non_finite(gradients.squared_norms(), "squared gradient norm")
        return losses, gradients

    def local_steps(
        self,
        x: Tensor,
        work: LocalSGD,
        stream: Stream,
        *,
        control: ClientVectors | None = None,
        target: Tensor | None = None,
        slopes: Weights | None = None,
    ) -> Moved:
        """Let every client do ``work`` from x, chunk by chunk."""
        check_local_arguments(work, control, target, slopes)
        assert control is None or isinstance(control, DenseVectors | SharedGradients)
        run = LocalRun(self, x, work, stream, control, target, slopes)
        self._book_local(work, corrected=target is not None)
        kinds = run.kinds
        thresholds = None
        if self._fits(len(kinds)):
            matrices, thresholds = run.everything()
            vectors: dict[str, ClientVectors] = {k: DenseVectors(m) for k, m in matrices.items()}
        else:
            vectors = {kind: ReplayedVectors(run, kind) for kind in kinds}
            if work.hinge is not None:
                thresholds = run.everything(keep=False)[1]
        return Moved(steps=work.steps_for(self.sizes), thresholds=thresholds, **vectors)

    # Chunks of clients.

    def _fits(self, matrices: int) -> bool:
        """Tell whether that many (n, d) matrices stay within the memory bound."""
        size = len(self.index) * self.model.size * self.model.dtype.itemsize
        return matrices * size <= self._memory

    def _chunks(self, batch: int | None) -> Iterator[Chunk]:
        """Yield the clients in chunks of similar sizes, so that padding stays small."""
        sizes, device = self.sizes, self.model.device
        order = np.argsort(-sizes, kind="stable") if batch is None else np.arange(len(sizes))
        start = 0
        while start < len(order):
            width = int(sizes[order[start]]) if batch is None else batch
            stop = start + self._chunk_length(width)
            places = order[start:stop]
            clients = self.index[places]
            yield Chunk(
                places,
                torch.as_tensor(clients, device=device),
                torch.as_tensor(self._offsets[clients], device=device),
                torch.as_tensor(sizes[places], device=device),
            )
            start = stop

    def _chunk_length(self, width: int) -> int:
        """Return how many clients keep models and samples of a chunk below the target size."""
        if self._chunk is not None:
            return self._chunk
        item = self.model.dtype.itemsize
        sample = self._inputs[0].numel() * self._inputs.element_size()
        budget = min(CHUNK_BYTES, self._memory)
        return max(1, min(budget // (2 * self.model.size * item), budget // (width * sample)))

    def batches(self, chunk: Chunk, stream: Stream, batch: int | None) -> Minibatches:
        """Return the minibatches of a chunk's clients."""
        dropout = bool(self.model.dropouts)
        return Minibatches(stream, chunk.clients, chunk.sizes, batch, self.model.dtype, dropout)

    def chunk_gradient(
        self, u: Tensor, chunk: Chunk, stream: Stream, batch: int | None
    ) -> tuple[Tensor, Tensor]:
        """Return gradient (c, d) and loss (c,) of each client of a chunk at its row of u."""
        return self.batch_gradient(u, chunk, self.batches(chunk, stream, batch).at(0))

    def batch_gradient(self, u: Tensor, chunk: Chunk, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return gradient and loss on one batch, over blocks of samples where it is wide."""
        rows = chunk.starts.unsqueeze(1) + batch.positions
        width = self._block_width(len(rows))
        gradient, value = torch.zeros_like(u), u.new_zeros(len(u))
        for a in range(0, rows.shape[1], width):
            block = rows[:, a : a + width]
            keys = None if batch.keys is None else batch.keys[:, a : a + width]
            g, v = self._batched(
                u, self._inputs[block], self._targets[block], batch.weights[:, a : a + width], keys
            )
            gradient, value = (g, v) if a == 0 else (gradient + g, value + v)
        return gradient + self.model.l2 * u, value + 0.5 * self.model.l2 * u.square().sum(dim=1)

    def _block_width(self, clients: int) -> int:
        sample = self._inputs[0].numel() * self._inputs.element_size()
        return max(1, max(CHUNK_BYTES, self._memory // 4) // (sample * clients))

    def _weighted_loss(
        self, u: Tensor, inputs: Tensor, targets: Tensor, weights: Tensor, keys: Tensor | None
    ) -> Tensor:
        return weights @ self.model.sample_losses(u, inputs, targets, keys)

    # All samples in one pass, at a model that everybody shares.

    def _flat(self, stream: Stream, batch: int | None) -> Iterator[FlatPart]:
        """Yield the samples of all clients in flat pieces with their weights."""
        for chunk in self._chunks(batch):
            drawn = self.batches(chunk, stream, batch).at(0)
            used = drawn.weights > 0
            rows = (chunk.starts.unsqueeze(1) + drawn.positions)[used]
            places = (
                torch.as_tensor(chunk.places, device=rows.device).unsqueeze(1).expand_as(used)[used]
            )
            weights = drawn.weights[used]
            keys = None if drawn.keys is None else drawn.keys[used]
            for a in range(0, len(rows), self._block_width(1)):
                piece = slice(a, a + self._block_width(1))
                yield FlatPart(
                    rows[piece],
                    places[piece],
                    weights[piece],
                    None if keys is None else keys[piece],
                )

    def _sample_losses(self, x: Tensor, part: FlatPart) -> Tensor:
        inputs, targets = self._inputs[part.rows], self._targets[part.rows]
        return self.model.sample_losses(x, inputs, targets, part.keys)


@dataclass(frozen=True)
class FlatPart:
    """Samples of several clients in one row: where they are, whose they are, what they count."""

    rows: Tensor
    places: Tensor
    weights: Tensor
    keys: Tensor | None


class SharedGradients:
    """Gradients at one shared model, not kept: a weighted sum is one pass over the samples."""

    def __init__(
        self, clients: StackedClients, x: Tensor, stream: Stream, batch: int | None
    ) -> None:
        self._clients, self._x, self._stream, self._batch = clients, x, stream, batch

    def weighted_sum(self, weights: Weights) -> Tensor:
        """Return sum_i weights_i grad f_i(x): each sample counts its client's weight."""
        clients, model = self._clients, self._clients.model
        share = to_tensor(weights, self._x)
        total = model.l2 * share.sum() * self._x
        for part in clients._flat(self._stream, self._batch):
            x = self._x.detach().requires_grad_()
            value = (part.weights * share[part.places]) @ clients._sample_losses(x, part)
            total = total + torch.autograd.grad(value, x)[0]
        if not torch.isfinite(total).all():
            clients._refuse_non_finite(self.squared_norms(), "squared gradient norm")
        return total

    def squared_norms(self) -> Losses:
        """Return |grad f_i(x)|^2, chunk by chunk."""
        out = np.zeros(len(self._clients.index))
        for chunk in self._clients._chunks(self._batch):
            out[chunk.places] = to_numpy(self.rows(chunk).square().sum(dim=1))
        return out

    def rows(self, chunk: Chunk) -> Tensor:
        """Return the gradients of a chunk's clients, made again."""
        u = self._x.expand(len(chunk.places), -1)
        return self._clients.chunk_gradient(u, chunk, self._stream, self._batch)[0]


class LocalRun:
    """One call of ``local_steps`` that can be carried out chunk by chunk, as often as needed."""

    def __init__(
        self,
        clients: StackedClients,
        x: Tensor,
        work: LocalSGD,
        stream: Stream,
        control: DenseVectors | SharedGradients | None,
        target: Tensor | None,
        slopes: Weights | None,
    ) -> None:
        self._clients, self._x, self._work, self._stream = clients, x, work, stream
        self._control, self._target, self._slopes = control, target, slopes
        self._sums: tuple[bytes, dict[str, Tensor]] | None = None
        optional = {"snapshot": work.snapshot is not None, "average": work.average}
        optional["mean_gradient"] = work.mean_gradient
        self.kinds = ["displacement", *(kind for kind, wanted in optional.items() if wanted)]

    def everything(self, keep: bool = True) -> tuple[dict[str, Tensor], Losses | None]:
        """Return the vectors of all clients (unless not to be kept) and their thresholds."""
        n = len(self._clients.index)
        matrices = {kind: self._clients._zeros(n) for kind in self.kinds} if keep else {}
        thresholds = np.zeros(n)
        for chunk, walk in self._walks():
            for kind, matrix in matrices.items():
                matrix[chunk.places] = getattr(walk, kind)
            if walk.threshold is not None:
                thresholds[chunk.places] = to_numpy(walk.threshold)
        return matrices, thresholds if self._work.hinge is not None else None

    def weighted_sum(self, kind: str, weights: Weights) -> Tensor:
        """Return one kind's weighted sum; all kinds are summed in the same run and remembered."""
        key = np.asarray(weights, dtype=np.float64).tobytes()
        if self._sums is None or self._sums[0] != key:
            sums = {k: torch.zeros_like(self._x) for k in self.kinds}
            for chunk, walk in self._walks():
                share = to_tensor(np.asarray(weights)[chunk.places], self._x)
                for k in self.kinds:
                    sums[k] += share @ getattr(walk, k)
            self._sums = (key, sums)
        return self._sums[1][kind]

    def squared_norms(self, kind: str) -> Losses:
        """Return the squared norms of one kind of vector."""
        out = np.zeros(len(self._clients.index))
        for chunk, walk in self._walks():
            out[chunk.places] = to_numpy(getattr(walk, kind).square().sum(dim=1))
        return out

    def _walks(self) -> Iterator[tuple[Chunk, Walk]]:
        """Carry out the local steps, chunk by chunk; raise at the end for those that diverged."""
        lengths = np.zeros(len(self._clients.index))
        for chunk in self._clients._chunks(self._work.batch):
            walk = self._walk(chunk)
            lengths[chunk.places] = to_numpy(walk.displacement.square().sum(dim=1))
            yield chunk, walk
        self._clients._refuse_non_finite(lengths, "squared length of the local update")

    def _walk(self, chunk: Chunk) -> Walk:
        clients, work = self._clients, self._work
        correction = slope = None
        if self._target is not None:
            correction = self._target - self._controls(chunk)
        if self._slopes is not None:
            slope = to_tensor(self._slopes[chunk.places], self._x)
        steps = work.steps_for(clients.sizes[chunk.places])
        walk = Walk(self._x, work, torch.as_tensor(steps, device=self._x.device), correction, slope)
        batches = clients.batches(chunk, self._stream, work.batch)
        for step in range(int(steps.max())):
            gradient, value = clients.batch_gradient(walk.u, chunk, batches.at(step))
            walk.advance(step, gradient, value)
        return walk

    def _controls(self, chunk: Chunk) -> Tensor:
        if isinstance(self._control, SharedGradients):
            return self._control.rows(chunk)
        assert self._control is not None
        return self._control.matrix[torch.as_tensor(chunk.places, device=self._x.device)]


class ReplayedVectors:
    """One kind of vector of a local run that is carried out when it is asked for."""

    def __init__(self, run: LocalRun, kind: str) -> None:
        self._run, self._kind = run, kind

    def weighted_sum(self, weights: Weights) -> Tensor:
        """Return sum_i weights_i v_i."""
        return self._run.weighted_sum(self._kind, weights)

    def squared_norms(self) -> Losses:
        """Return |v_i|^2 for every client."""
        return self._run.squared_norms(self._kind)

    def dense(self) -> Tensor:
        """Return all vectors side by side, whatever the memory bound says."""
        return self._run.everything()[0][self._kind]


def stacked(
    federation: Federation,
    module: nn.Module | str,
    loss: SampleLoss | str = "auto",
    *,
    l2: float = 0.0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    memory: int = MEMORY,
    chunk: int | None = None,
) -> StackedClients | LoopClients:
    """Return an engine that moves many clients at once, or ``loop`` if the module forbids it.

    Parameters
    ----------
    federation, module, loss, l2, dtype, device
        As for :class:`equifed.engines.in_process.InProcessClients`.
    memory : int
        Bound in bytes on the client vectors that are kept; beyond it they are made again when
        needed.
    chunk : int, optional
        Clients per chunk; chosen from the model's and the samples' sizes if not given.
    """
    module, loss = named_model(federation, module, loss)
    clients = StackedClients(
        federation, module, loss, l2=l2, dtype=dtype, device=device, memory=memory, chunk=chunk
    )
    try:
        pair = clients.subset(np.arange(min(2, len(clients.names))))
        for part in pair._chunks(1):
            pair.chunk_gradient(
                clients.model.flatten(module).expand(len(part.places), -1), part, Stream(0), 1
            )
    except RuntimeError as error:
        warnings.warn(
            f"{type(module).__name__} cannot be batched over clients "
            f"({str(error).splitlines()[0][:120]}); using the loop engine, one client at a time.",
            UserWarning,
            stacklevel=2,
        )
        return LoopClients(federation, module, loss, l2=l2, dtype=dtype, device=device)
    return clients
