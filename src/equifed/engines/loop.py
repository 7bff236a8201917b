"""The reference engine: every client by itself; other engines must agree with it.

It is also for modules that ``torch.func.vmap`` cannot take, or takes slowly: on several cores each
client has one to itself, with a module of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Self, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from equifed.contract import ClientVectors, Index, LocalWork, Losses, Stream, Weights
from equifed.engines.in_process import InProcessClients
from equifed.engines.minibatches import Batch, Minibatches
from equifed.engines.ordered_sums import DenseVectors, dense_rows, to_numpy
from equifed.engines.own import plain_work
from equifed.engines.threads import map_in_threads, products_in

Result = TypeVar("Result")

Gradient = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""Returns the loss at a model in some step, and a gradient that may be changed."""


def walk_client(
    x: Tensor, work: LocalWork, steps: int, gradient: Gradient, correction: Tensor | None = None,
    slope: float | None = None, size: int | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Return one client's results by name, and a hinge's threshold, after its steps.

    Of its numbers the first ``size`` are kept in the ball.
    """
    u, found = x.clone(), dict[str, Tensor]()
    means = [kind for kind in work.results if kind in ("average", "mean_gradient")]
    found |= {kind: torch.zeros_like(x) for kind in means}
    if work.hinge is not None:
        found["threshold"] = x.new_tensor(work.hinge.threshold)
    scale = None if work.scale is None else work.scale.to(x)
    if scale is not None and correction is not None:
        correction = scale.multiply(correction)
    for step in range(steps):
        value, direction = gradient(u, step)
        if slope is not None and work.hinge is not None:
            s = slope * torch.sigmoid((value - found["threshold"]) / work.hinge.smoothing)
            direction *= s
            found["threshold"] = found["threshold"] - work.lr * (1 - s)
        if work.mean_gradient:
            found["mean_gradient"] += direction
        if scale is not None:
            direction = scale.multiply(direction)
        if work.proximal:
            direction += work.proximal * (u - x)
        if correction is not None:
            direction += correction
        u -= direction.mul_(work.lr)
        work.project(u[:size])
        if work.average:
            found["average"] += u
        if step + 1 == min(work.snapshot or 0, steps):
            found["snapshot"] = u.clone()
    found |= {kind: found[kind] / steps for kind in means}
    found["displacement"] = torch.sub(x, u, out=u)
    if work.multiplier and correction is not None:  # c_i - c + proximal (x - u)
        found["multiplier"] = work.proximal * found["displacement"] - correction
    return found


class LoopClients(InProcessClients):
    """Each client by itself; arguments as for :class:`InProcessClients`."""

    engine = "loop"

    @override
    def measure_losses(self, x: Tensor, stream: Stream, batch_size: int | None) -> Tensor:
        def measure(self: Self, k: int) -> Tensor:
            with torch.no_grad():  # every thread has a switch of its own
                batch = self._batches(k, stream, batch_size).at(0)
                at = self._with_own(x, k)
                return self._loss(at, k, batch) + self.model.penalty(at, self._own_l2(k))

        return torch.stack(self._map(measure))

    @override
    def differentiate(
        self, x: Tensor, stream: Stream, batch_size: int | None
    ) -> tuple[Losses, ClientVectors]:
        def one(self: Self, k: int) -> tuple[Tensor, Tensor]:
            batch = self._batches(k, stream, batch_size).at(0)
            return self._gradient(self._with_own(x, k), k, batch)

        values, rows = zip(*self._map(one), strict=True)
        losses = self.require_finite(to_numpy(torch.stack(values)), "loss")
        gradients = DenseVectors(torch.stack([row[: self.model.size] for row in rows]))
        self.require_finite(gradients.squared_norms(), "squared gradient norm")
        return losses, gradients

    @override
    def move(
        self, x: Tensor, work: LocalWork, stream: Stream, control: ClientVectors | None,
        target: Tensor | None, slopes: Weights | None,
    ) -> tuple[Mapping[str, ClientVectors], Losses | None]:  # fmt: skip
        steps, rows = work.steps_for(self.sizes), None if control is None else dense_rows(control)

        def one(self: Self, k: int) -> dict[str, Tensor]:
            correction = None
            if rows is not None and target is not None:
                correction = target - rows[k]
                if work.correction != 1:
                    correction *= work.correction
            slope = None if slopes is None else float(slopes[k])
            return self._walk(x, work, stream, k, int(steps[k]), correction, slope)

        walks, d = self._map(one), self.model.size
        made = {kind: torch.stack([walk[kind] for walk in walks]) for kind in work.results}
        lengths = to_numpy(made["displacement"].square().sum(dim=1))
        self.require_finite(lengths, "squared length of the local update")
        if self.remembers_own():  # own parameters stay here
            start = self.own_rows.start
            before = start[torch.as_tensor(self.index, device=start.device)]
            self.own_rows.put(self.index, before - made["displacement"][:, d:])
        ends = [walk["threshold"] for walk in walks if work.hinge is not None]
        thresholds = to_numpy(torch.stack(ends)) if ends else None
        return {kind: DenseVectors(matrix[:, :d]) for kind, matrix in made.items()}, thresholds

    def _walk(
        self, x: Tensor, work: LocalWork, stream: Stream, k: int, steps: int,
        correction: Tensor | None, slope: float | None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """One client's local steps; alternating: as many plain ones on its own parameters first."""
        size = work.batch_size
        if not self.remembers_own() or self.own is None:
            return walk_client(x, work, steps, self._steer(k, stream, size), correction, slope)
        d, shared = self.model.size, None
        start = u = self._with_own(x, k)
        own = torch.arange(len(u), device=u.device) >= d
        if self.own.steps == "alternating":
            alone = self._steer(k, stream.at("own"), size, moving=own.to(u.dtype))
            u = u - walk_client(u, plain_work(work), steps, alone, size=d)["displacement"]
            shared = (~own).to(u.dtype)
        if correction is not None:  # of the shared ones
            correction = torch.cat([correction, correction.new_zeros(self.model.own_size)])
        steer = self._steer(k, stream, size, moving=shared)
        found = walk_client(u, work, steps, steer, correction, slope, d)
        moved = found["displacement"]
        return {**found, "displacement": torch.where(own, start - (u - moved), moved)}

    def _steer(
        self, k: int, stream: Stream, batch_size: int | None, moving: Tensor | None = None
    ) -> Gradient:
        """Return the k-th client's gradients along a walk, of the coordinates that move."""
        batches = self._batches(k, stream, batch_size)

        def gradient(u: Tensor, step: int) -> tuple[Tensor, Tensor]:
            at = u if self.offsets is None else self._with_own(u, k)  # of its profile loss
            value, direction = self._gradient(at, k, batches.at(step))
            return value, direction[: len(u)] if moving is None else direction * moving

        return gradient

    def _with_own(self, x: Tensor, k: int) -> Tensor:
        """Return the model with the own parameters of the k-th client at its end."""
        if self.own is None:
            return x
        if self.own.steps == "profile":
            return torch.cat([x, self._newton(x, k)[0]])
        return torch.cat([x, self.own_rows.start[int(self.index[k])]])

    def _newton(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k-th client's best own parameters and the squared decrement that is left."""
        assert self.offsets is not None
        i, none = int(self.index[k]), x.new_zeros(self.model.own_size)
        targets = self._targets[self._offsets[i] : self._offsets[i + 1]]
        with torch.no_grad():  # the bias is added to the outputs of the shared part
            plain = self.model.outputs(torch.cat([x, none]), self.inputs_of(i), training=True)
        outputs, truth = plain.T[None], targets[None]
        shares = x.new_full((1, len(targets)), 1 / len(targets))
        given = outputs, self.offsets.wanted(outputs, truth, shares), shares
        best = self.offsets.solve(*given)
        return best[0], self.offsets.newton(best, *given)[1][0]

    @override
    def best_own(self, x: Tensor) -> Iterator[tuple[slice | Index, Tensor, Tensor, Tensor]]:
        for k in range(len(self.index)):
            inputs = self.inputs_of(int(self.index[k])).flatten(1)
            yield slice(k, k + 1), *self._newton(x, k), inputs.square().sum(dim=1).mean()

    def _map(self, function: Callable[[Self, int], Result]) -> list[Result]:
        """Return a function's results for all clients; it gets a model no other thread uses."""
        together = self.model.device.type == "cpu" and torch.get_num_threads() > 1
        if not together:
            return [function(self, k) for k in range(len(self.index))]
        spare = []
        for _ in range(torch.get_num_threads()):
            twin = copy.copy(self)
            twin.model = self.model.twin()
            spare.append(twin)

        def call(k: int) -> Result:
            mine = spare.pop()
            try:
                return function(mine, k)
            finally:
                spare.append(mine)

        return map_in_threads(call, range(len(self.index)), together)

    def _batches(self, k: int, stream: Stream, batch_size: int | None) -> Minibatches:
        index, dropout = self.index[k : k + 1], bool(self.model.dropouts)
        client, size = torch.as_tensor(index, device=self.model.device), self._sizes[index]
        return Minibatches(stream, client, size, batch_size, self.model.dtype, dropout)

    def _loss(self, u: Tensor, k: int, batch: Batch) -> Tensor:
        """Mean loss of the k-th client's batch, without the L2 penalty."""
        used = batch.weights[0] > 0  # the last batch of a pass may be smaller
        rows = self._offsets[self.index[k]] + batch.positions[0][used]
        keys = None if batch.keys is None else batch.keys[0][used]
        inputs, targets = (v.index_select(0, rows) for v in (self._inputs, self._targets))
        with products_in("full", u.device):
            return self.model.sample_losses(u, inputs, targets, keys).mean()

    def _gradient(self, u: Tensor, k: int, batch: Batch) -> tuple[Tensor, Tensor]:
        """Mean loss and its gradient, with the L2 penalty."""
        at = u.detach().requires_grad_()
        value = self._loss(at, k, batch)
        with products_in("full", u.device):
            (gradient,) = torch.autograd.grad(value, at)
        own_l2 = self._own_l2(k)
        pulled = self.model.add_pull(gradient, u, own_l2)
        return value.detach() + self.model.penalty(u, own_l2), pulled

    def _own_l2(self, k: int) -> float | None:
        """Return the k-th client's penalty on own parameters; None without any."""
        return None if self.own is None else self.own.strength(int(self.sizes[k]))
