"""Client vectors of the stacked engine that are made again, chunk by chunk, when asked for.

A handle keeps how to make them; randomness has an address, so they come out the same every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from equifed.contract.arrays import Losses, Weights
from equifed.contract.local import LocalWork
from equifed.contract.streams import Stream
from equifed.engines.ordered_sums import (
    DenseVectors,
    InProcessVectors,
    Node,
    node_values,
    put_rows,
    to_numpy,
    to_tensor,
)
from equifed.engines.stacked.samples import Chunk
from equifed.engines.stacked.walk import ChunkWalk, ChunkWork, OwnColumns
from equifed.engines.threads import map_in_threads

Used = TypeVar("Used")

Maker: TypeAlias = Any
"""The ``StackedClients`` that make these vectors."""


class SharedGradients(InProcessVectors):
    """Gradients at one shared model, not kept but made again for every weighted sum."""

    def __init__(self, clients: Maker, x: Tensor, stream: Stream, batch_size: int | None) -> None:
        self._clients, self._x, self._stream, self._batch = clients, x, stream, batch_size

    @override
    def nodes(self, nodes: Sequence[Node], weights: Weights, first: int) -> list[Tensor]:
        # With as many gradients at a time as memory holds.
        rows, most = partial(self._between, first), self._clients.rows_at_once(1)
        values = [value[0] for value in node_values(nodes, weights, rows, most, len(weights))]
        if not all(bool(torch.isfinite(value).all()) for value in values):
            self._clients.require_finite(self.squared_norms(), "squared gradient norm")
        return values

    def _between(self, first: int, begin: int, end: int) -> list[Tensor]:
        return [self.part(begin - first, end - first).dense()]

    @override
    def part(self, begin: int, end: int) -> SharedGradients:
        some = self._clients.subset(self._clients.index[begin:end])
        return SharedGradients(some, self._x, self._stream, self._batch)

    @override
    def squared_norms(self) -> Losses:
        out = np.zeros(len(self._clients.index))
        for chunk in self._clients.chunks(self._batch):
            out[chunk.places] = to_numpy(self.rows(chunk)[0].square().sum(dim=1))
        return out

    @override
    def dense(self) -> Tensor:  # whatever the memory bound says
        return self.everything()[2].matrix

    @override
    def of_chunk(self, chunk: Chunk) -> Tensor:
        return self.rows(chunk)[0]

    def rows(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return gradients (c, d) and losses (c,) of a chunk's clients."""
        samples = self._clients.supply(chunk, self._stream, self._batch).at(0)
        clients = self._clients
        gradient, value = clients.rule.gradient(clients.models(self._x, chunk), samples)
        return gradient[:, : clients.model.size], value

    def everything(self) -> tuple[Losses, Losses, DenseVectors]:
        """Return the losses, the squared norms and all gradients, side by side."""
        n = len(self._clients.index)
        matrix = self._clients.workspace.empty_rows(n, self._x)
        numbers = self._x.new_empty(n, 2)

        def store(chunk: Chunk) -> None:
            gradient, value = self.rows(chunk)
            put_rows(matrix, chunk.places, gradient)
            norm = torch.linalg.vector_norm(gradient, dim=1)
            put_rows(numbers, chunk.places, torch.stack([value, norm.square()], dim=1))

        map_in_threads(store, self._clients.chunks(self._batch), self._clients.independent)
        losses, norms = to_numpy(numbers).T  # one copy, since it waits for the device
        return losses.copy(), norms, DenseVectors(matrix)


class LocalRun:
    """One call of ``local_steps`` that can be carried out as often as needed."""

    def __init__(
        self,
        clients: Maker,
        x: Tensor,
        work: LocalWork,
        stream: Stream,
        control: InProcessVectors | None,
        target: Tensor | None,
        slopes: Weights | None,
    ) -> None:
        self._clients, self._x, self._work, self._stream = clients, x, work, stream
        self._control, self._target, self._slopes = control, target, slopes
        self._sums: tuple[bytes, list[Tensor]] | None = None

    def everything(self, keep: bool = True) -> tuple[dict[str, Tensor], Losses | None]:
        """Return the vectors of all clients (unless not to be kept) and their thresholds."""
        n = len(self._clients.index)
        kinds, workspace = self._kinds if keep else [], self._clients.workspace
        matrices = {kind: workspace.empty_rows(n, self._x) for kind in kinds}
        thresholds, size = np.zeros(n), self._clients.model.size
        keeps, rows = self._clients.remembers_own(), self._clients.own_rows
        own = rows.start[self._clients.index] if keeps else rows.start

        def store(chunk: Chunk, walk: ChunkWalk) -> None:
            for kind, matrix in matrices.items():  # nothing to do if it is there
                put_rows(matrix, chunk.places, walk.result(kind)[:, :size])
            if walk.threshold is not None:
                thresholds[chunk.places] = to_numpy(walk.threshold)
            if walk.own is not None:
                put_rows(own, chunk.places, walk.own)

        self._carry_out(store, None if keeps else matrices.get("displacement"))
        if keeps:
            rows.put(self._clients.index, own)
        return matrices, thresholds if self._work.hinge is not None else None

    def nodes(self, kind: str, nodes: Sequence[Node], weights: Weights, first: int) -> list[Tensor]:
        """Return parts of one kind's weighted sum; those of all kinds are made together."""
        key = np.asarray([first, *weights], dtype=np.float64).tobytes()
        if self._sums is None or self._sums[0] != key:
            rows, most = partial(self._between, first), self._clients.rows_at_once(len(self._kinds))
            self._sums = (key, list(node_values(nodes, weights, rows, most, len(weights))))
        return [value[self._kinds.index(kind)] for value in self._sums[1]]

    @property
    def _kinds(self) -> list[str]:
        return list(self._work.results)

    def _between(self, first: int, begin: int, end: int) -> list[Tensor]:
        """Return every kind of vector of a few of the clients."""
        begin, end = begin - first, end - first
        control, slopes = self._control, self._slopes
        if control is not None:
            control = control.part(begin, end)
        again = self._clients.with_own(self._clients.own_rows.start)  # which remembers its own ends
        some = again.subset(self._clients.index[begin:end])
        slopes = None if slopes is None else slopes[begin:end]
        run = LocalRun(some, self._x, self._work, self._stream, control, self._target, slopes)
        matrices, _ = run.everything()
        return [matrices[kind] for kind in self._kinds]

    def squared_norms(self, kind: str) -> Losses:
        """Return the squared norms of one kind of vector."""
        out = np.zeros(len(self._clients.index))

        def norms(chunk: Chunk, walk: ChunkWalk) -> None:
            rows = walk.result(kind)[:, : self._clients.model.size]
            out[chunk.places] = to_numpy(rows.square().sum(dim=1))

        self._carry_out(norms)
        return out

    def _carry_out(
        self, use: Callable[[Chunk, ChunkWalk], Used], room: Tensor | None = None
    ) -> list[Used]:
        """Carry out the local steps and use every chunk's; raise at the end for diverged ones.

        If there is ``room`` for all clients, their displacements may be made right there.
        """
        lengths = self._x.new_zeros(len(self._clients.index))

        def one(chunk: Chunk) -> Used:
            walk = self._clients.walk(self._given(chunk), room)
            put_rows(lengths, chunk.places, walk.result("lengths"))
            return use(chunk, walk)

        chunks = self._clients.chunks(self._work.batch_size)
        used = map_in_threads(one, chunks, self._clients.independent)
        squared = to_numpy(lengths) ** 2
        self._clients.require_finite(squared, "squared length of the local update")
        return used

    def _given(self, chunk: Chunk) -> ChunkWork:
        slope = None
        if self._slopes is not None:
            slope = to_tensor(self._slopes[chunk.places], self._x)
        correction, x, own = self._correction(chunk), self._x, None
        if self._clients.remembers_own():
            x = self._clients.models(x, chunk)
            alternating = self._clients.own is not None and self._clients.own.steps == "alternating"
            own = OwnColumns(self._clients.model.size, alternating)
            if correction is not None:  # of the shared part only
                correction = pad(correction, (0, x.shape[1] - self._x.shape[0]))
        return ChunkWork(x, self._work, self._stream, chunk, correction, slope, own)

    def _correction(self, chunk: Chunk) -> Tensor | None:
        """Return target - control of a chunk's clients, as much of it as the work takes."""
        if self._target is None or self._control is None:
            return None
        whole = self._target - self._control.of_chunk(chunk)
        return whole if self._work.correction == 1 else whole.mul_(self._work.correction)


class ReplayedVectors(InProcessVectors):
    """One kind of vector of a local run that is carried out when it is asked for."""

    def __init__(self, run: LocalRun, kind: str) -> None:
        self._run, self._kind = run, kind

    @override
    def nodes(self, nodes: Sequence[Node], weights: Weights, first: int) -> list[Tensor]:
        return self._run.nodes(self._kind, nodes, weights, first)

    @override
    def squared_norms(self) -> Losses:
        return self._run.squared_norms(self._kind)

    @override
    def dense(self) -> Tensor:  # whatever the memory bound says
        return self._run.everything()[0][self._kind]
