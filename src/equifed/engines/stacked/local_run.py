"""One call of ``local_steps`` of the stacked engine, carried out chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from equifed.contract.arrays import Losses, Weights
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.engines.in_process import DenseVectors, to_numpy, to_tensor
from equifed.engines.stacked.chunks import Chunk, empty_rows, put_rows, rows_of
from equifed.engines.stacked.shared_gradients import SharedGradients
from equifed.engines.stacked.threads import in_threads
from equifed.engines.stacked.walk import Walk, walked

if TYPE_CHECKING:
    from equifed.engines.stacked.clients import StackedClients

Used = TypeVar("Used")


class LocalRun:
    """One call of ``local_steps`` that can be carried out as often as needed."""

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
        matrices = {kind: empty_rows(n, self._x) for kind in self.kinds} if keep else {}
        thresholds = np.zeros(n)

        def store(chunk: Chunk, walk: Walk) -> None:
            for kind, matrix in matrices.items():
                put_rows(matrix, chunk.places, walk.result(kind))  # nothing to do if it is there
            if walk.threshold is not None:
                thresholds[chunk.places] = to_numpy(walk.threshold)

        self._carry_out(store, matrices.get("displacement"))
        return matrices, thresholds if self._work.hinge is not None else None

    def weighted_sum(self, kind: str, weights: Weights) -> Tensor:
        """Return one kind's weighted sum; all kinds are summed in the same run and remembered."""
        key = np.asarray(weights, dtype=np.float64).tobytes()

        def part(chunk: Chunk, walk: Walk) -> dict[str, Tensor]:
            share = to_tensor(np.asarray(weights)[chunk.places], self._x)
            return {k: share @ walk.result(k) for k in self.kinds}

        if self._sums is None or self._sums[0] != key:
            parts = self._carry_out(part)
            sums = {k: torch.stack([one[k] for one in parts]).sum(0) for k in self.kinds}
            self._sums = (key, sums)
        return self._sums[1][kind]

    def squared_norms(self, kind: str) -> Losses:
        """Return the squared norms of one kind of vector."""
        out = np.zeros(len(self._clients.index))

        def norms(chunk: Chunk, walk: Walk) -> None:
            out[chunk.places] = to_numpy(walk.result(kind).square().sum(dim=1))

        self._carry_out(norms)
        return out

    def _carry_out(
        self, use: Callable[[Chunk, Walk], Used], room: Tensor | None = None
    ) -> list[Used]:
        """Carry out the local steps and use every chunk's; raise at the end for diverged ones.

        If there is ``room`` for all clients, their displacements may be made right there.
        """
        lengths = self._x.new_zeros(len(self._clients.index))

        def one(chunk: Chunk) -> Used:
            walk = self._walk(chunk, room)
            put_rows(lengths, chunk.places, walk.result("lengths"))
            return use(chunk, walk)

        chunks = self._clients.chunks(self._work.batch_size)
        used = in_threads(one, chunks, self._clients.independent)
        squared = to_numpy(lengths) ** 2
        self._clients._refuse_non_finite(squared, "squared length of the local update")
        return used

    def _walk(self, chunk: Chunk, room: Tensor | None) -> Walk:
        clients, work = self._clients, self._work
        slope = None
        if self._slopes is not None:
            slope = to_tensor(self._slopes[chunk.places], self._x)
        steps, correction = work.steps_for(chunk.sizes), self._correction(chunk)
        quick = clients.least_squares
        if quick is not None and quick.pays(work, int(steps[0]), int(chunk.sizes[0])):
            whole, key = clients.supply(chunk, self._stream, None).whole, chunk.clients.tobytes()
            return quick.walk(self._x, work, steps, correction, whole, key)
        if clients.graphs is not None:
            given = (self._stream, chunk, correction, slope, self.kinds)
            replayed = clients.graphs.walk(clients, self._x, work, *given)
            if replayed is not None:
                return replayed
        supply = clients.supply(chunk, self._stream, work.batch_size)
        own = room[chunk.places] if room is not None and isinstance(chunk.places, slice) else None
        return walked(Walk(self._x, work, steps, correction, slope, own), clients.rule, supply)

    def _correction(self, chunk: Chunk) -> Tensor | None:
        """Return target - control of a chunk's clients."""
        if self._target is None or self._control is None:
            return None
        if isinstance(self._control, SharedGradients):
            return self._target - self._control.rows(chunk)[0]
        return self._target - rows_of(self._control.matrix, chunk.places)


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
