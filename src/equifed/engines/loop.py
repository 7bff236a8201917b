"""The reference engine: one client at a time, no cleverness.

Every other engine must agree with this one. It is also the engine for modules that
``torch.func.vmap`` cannot take.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from equifed.contract.arrays import Losses, Weights
from equifed.contract.clients import ClientVectors, Moved
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.engines.in_process import (
    DenseVectors,
    InProcessClients,
    check_local_arguments,
    to_numpy,
)
from equifed.engines.minibatches import Batch, Minibatches
from equifed.models.hessians import LinearHessian


class LoopClients(InProcessClients):
    """One client after the other; arguments as for :class:`InProcessClients`."""

    @override
    def losses(self, x: Tensor, stream: Stream, batch_size: int | None = None) -> Losses:
        with torch.no_grad():
            values = [
                self._loss(x, k, self._batches(k, stream, batch_size).at(0)) for k in self._each()
            ]
        self._book(down=1, up=0, losses=1)
        out = to_numpy(torch.stack(values))
        self.refuse_non_finite(out, "loss")
        return out

    @override
    def value_and_gradient(
        self, x: Tensor, stream: Stream, batch_size: int | None = None
    ) -> tuple[Losses, ClientVectors]:
        pairs = [
            self._gradient(x, k, self._batches(k, stream, batch_size).at(0)) for k in self._each()
        ]
        self._book(down=1, up=1, losses=1)
        losses = to_numpy(torch.stack([value for value, _ in pairs]))
        self.refuse_non_finite(losses, "loss")
        gradients = DenseVectors(torch.stack([gradient for _, gradient in pairs]))
        self.refuse_non_finite(gradients.squared_norms(), "squared gradient norm")
        return losses, gradients

    @override
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
        check_local_arguments(work, control, target, slopes)
        assert control is None or isinstance(control, DenseVectors)
        steps = work.steps_for(self.sizes)
        results = []
        for k in self._each():
            correction = None
            if control is not None and target is not None:
                correction = target - control.matrix[k]
            slope = None if slopes is None else float(slopes[k])
            results.append(self._walk(x, work, stream, k, int(steps[k]), correction, slope))
        self._book_local(work, corrected=target is not None)
        *vectors, thresholds = (
            None if column[0] is None else torch.stack(column)
            for column in map(list, zip(*results, strict=True))
        )
        named = zip(("displacement", "snapshot", "average", "mean_gradient"), vectors, strict=True)
        moved = {kind: DenseVectors(rows) for kind, rows in named if rows is not None}
        lengths = moved["displacement"].squared_norms()
        self.refuse_non_finite(lengths, "squared length of the local update")
        ends = None if thresholds is None else to_numpy(thresholds)
        return Moved(steps=steps, thresholds=ends, **moved)

    @override
    def sum_hessians(
        self, hessian: LinearHessian, x: Tensor, weights: Weights, thin: Tensor | None
    ) -> Tensor:
        total = hessian.zeros(thin)
        for k in self._each():
            inputs, own = self._inputs_of(int(self.index[k])), hessian.zeros(thin)
            hessian.add(own, x, inputs, x.new_full((len(inputs),), 1 / len(inputs)), thin)
            if not torch.isfinite(own).all():
                self._refuse_curvature(hessian, x)
            total += float(weights[k]) * own  # sum of w_i H_i
        return total

    def _walk(
        self,
        x: Tensor,
        work: LocalSGD,
        stream: Stream,
        k: int,
        steps: int,
        correction: Tensor | None,
        slope: float | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """One client's local steps; the formula is in :class:`equifed.LocalSGD`."""
        batches = self._batches(k, stream, work.batch_size)
        u, iterates, gradients, snapshot = x, torch.zeros_like(x), torch.zeros_like(x), None
        threshold = None if work.hinge is None else x.new_tensor(work.hinge.threshold)
        for step in range(steps):
            value, gradient = self._gradient(u, k, batches.at(step))
            if work.hinge is not None and threshold is not None and slope is not None:
                s = slope * torch.sigmoid((value - threshold) / work.hinge.smoothing)
                gradient = s * gradient
                threshold = threshold - work.lr * (1 - s)
            direction = gradient + work.proximal * (u - x)
            if correction is not None:
                direction = direction + correction
            u = u - work.lr * direction
            if work.radius is not None:
                u = u * torch.clamp(work.radius / torch.linalg.vector_norm(u), max=1.0)
            iterates, gradients = iterates + u, gradients + gradient
            if step + 1 == min(work.snapshot or 0, steps):
                snapshot = u
        return (
            x - u,
            snapshot,
            iterates / steps if work.average else None,
            gradients / steps if work.mean_gradient else None,
            threshold,
        )

    def _each(self) -> range:
        return range(len(self.index))

    def _batches(self, k: int, stream: Stream, batch_size: int | None) -> Minibatches:
        device = self.model.device
        i = int(self.index[k])
        client = torch.tensor([i], device=device)
        size = torch.tensor([self._offsets[i + 1] - self._offsets[i]], device=device)
        dropout = bool(self.model.dropouts)
        return Minibatches(stream, client, size, batch_size, self.model.dtype, dropout)

    def _loss(self, u: Tensor, k: int, batch: Batch) -> Tensor:
        """Mean loss of the k-th client's batch, with the L2 penalty."""
        used = batch.weights[0] > 0  # the last batch of a pass may be smaller
        rows = self._offsets[self.index[k]] + batch.positions[0][used]
        keys = None if batch.keys is None else batch.keys[0][used]
        each = self.model.sample_losses(u, self._inputs[rows], self._targets[rows], keys)
        return each.mean() + self.model.penalty(u)

    def _gradient(self, u: Tensor, k: int, batch: Batch) -> tuple[Tensor, Tensor]:
        u = u.detach().requires_grad_()
        value = self._loss(u, k, batch)
        (gradient,) = torch.autograd.grad(value, u)
        return value.detach(), gradient
