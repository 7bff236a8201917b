"""The local steps of many clients at once: the formula of ``LocalSGD``, row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equifed.contract.arrays import Index
from equifed.contract.local import LocalWork
from equifed.contract.streams import Stream
from equifed.engines.own import plain_work
from equifed.engines.stacked.gradient_rules import PenalisedRule, StepSamples
from equifed.engines.stacked.samples import Chunk, Supply
from equifed.engines.threads import empty_rows


@dataclass(frozen=True)
class OwnColumns:
    """Columns from ``size`` on are own parameters; alternating work moves them first, alone."""

    size: int
    alternating: bool


@dataclass(frozen=True, eq=False)
class ChunkWork:
    """What the clients of a chunk are to do: ``work`` from x.

    ``correction`` (c, d) is target - control, ``slope`` (c,) the factor of the hinge. Clients with
    own parameters have each a model of their own, x is (c, d).
    """

    x: Tensor
    work: LocalWork
    stream: Stream
    chunk: Chunk
    correction: Tensor | None
    slope: Tensor | None
    own: OwnColumns | None = None

    @property
    def steps(self) -> Index:
        """Steps of each client, shape (c,)."""
        return self.work.steps_for(self.chunk.sizes)

    def walk(
        self,
        rule: PenalisedRule,
        supply: Supply,
        room: Tensor | None = None,
        own_supply: Supply | None = None,
    ) -> ChunkWalk:
        """Carry out all steps, one by one; those on own parameters first, with their samples."""
        x, size, held = self.x, None if self.own is None else self.own.size, None
        if own_supply is not None and size is not None:
            first = ChunkWalk(
                x, plain_work(self.work), self.steps, None, None, None, size, slice(size)
            )
            x, held = first.carry_out(rule, own_supply)._u, slice(size, None)
        return self._begun(x, room, held).carry_out(rule, supply)

    def start(self) -> ChunkWalk:
        """Return the walk before its first step."""
        return self._begun(self.x)

    def _begun(self, x: Tensor, room: Tensor | None = None, held: slice | None = None) -> ChunkWalk:
        size = None if self.own is None else self.own.size
        given = (self.work, self.steps, self.correction, self.slope, room, size, held)
        return ChunkWalk(x, *given)


class ChunkWalk:
    r"""The iterates of c clients, from a shared model x.

    .. math::
       u \leftarrow \Pi\bigl(u - \text{lr}\,(g_i(u) + \text{proximal}\,(u - x) +
                             \text{correction}_i)\bigr)

    Parameters
    ----------
    x : Tensor (d,) or (c, d)
        The server's model (in coordinates that each client may have of its own).
    work : LocalWork
        What to do.
    steps : array of int, shape (c,)
        Steps of each client, not increasing: those who still walk are always the first rows.
    correction : Tensor (c, d), optional
        target - control, added to every gradient.
    slope : Tensor (c,), optional
        Factor of the hinge.
    room : Tensor (c, d), optional
        Where the iterates and, at the end, the displacements are to be.
    size : int, optional
        Columns from here on are own parameters, x is (c, d) then. They are outside the ball.
    held : slice, optional
        Columns that do not move.
    """

    def __init__(
        self,
        x: Tensor,
        work: LocalWork,
        steps: Index,
        correction: Tensor | None,
        slope: Tensor | None,
        room: Tensor | None = None,
        size: int | None = None,
        held: slice | None = None,
    ) -> None:
        self._size, self._held = size, held
        assert (np.diff(steps) <= 0).all()
        self._x, self._work, self._steps, self._slope = x, work, steps, slope
        self._live = np.searchsorted(-steps, -np.arange(steps[0])).tolist()
        self._u = (empty_rows(len(steps), x) if room is None else room).copy_(x)
        self._correction = correction
        self._pull = None  # what a step adds whatever the iterate: lr (proximal x - correction)
        if correction is not None:
            self._pull = -work.lr * correction
        if work.proximal:
            anchor = work.lr * work.proximal * x
            self._pull = anchor.expand_as(self._u) if self._pull is None else self._pull + anchor
        self._snapshot = torch.zeros_like(self._u) if work.snapshot is not None else None
        self._iterates = torch.zeros_like(self._u) if work.average else None
        self._gradients = torch.zeros_like(self._u) if work.mean_gradient else None
        self.decode: Callable[[Tensor], Tensor] = lambda rows: rows  # from other coordinates
        self._results: dict[str, Tensor] = {}
        self.threshold: Tensor | None = None
        if work.hinge is not None:
            self.threshold = x.new_full((len(steps),), work.hinge.threshold)

    @property
    def longest(self) -> int:
        """Steps of the client that takes most."""
        return int(self._steps[0])

    def live(self, step: int) -> int:
        """Return how many clients take this step (counted from zero): the first rows."""
        return int(self._live[step]) if step < len(self._live) else 0

    def carry_out(self, rule: PenalisedRule, supply: Supply) -> ChunkWalk:
        """Take all steps, and return the walk."""
        self.take(range(self.longest), rule.begin(), supply, self._work.snapshot)
        return self

    def take(self, steps: range, rule: PenalisedRule, supply: Supply, snapshot: int | None) -> None:
        """Take some steps; the iterates after ``snapshot`` of them are kept."""
        for step in steps:
            self.advance(step, rule, supply.at(step, self.live(step)), snapshot)

    def advance(
        self, step: int, rule: PenalisedRule, samples: list[StepSamples], snapshot: int | None
    ) -> None:
        """Take one step with the clients that still walk."""
        work, live = self._work, self.live(step)
        u = self._u if live == len(self._u) else self._u[:live]
        keep = 1 - work.lr * work.proximal
        if work.hinge is None and self._gradients is None:
            rule.step(u, samples, keep=keep, lr=work.lr)
        else:
            gradient, value = rule.gradient(u, samples)
            self._transform(gradient, value)
            u.mul_(keep).sub_(gradient, alpha=work.lr)
        if self._pull is not None:
            u.add_(self._pull[:live])
        if work.radius is not None:
            shared = u[:, : self._size]
            norm = torch.linalg.vector_norm(shared, dim=1, keepdim=True)
            shared.mul_(torch.clamp(work.radius / norm, max=1.0))
        if self._held is not None:
            u[:, self._held] = self._x[:live, self._held]
        if self._iterates is not None:
            self._iterates[:live] += u
        if self._snapshot is not None and snapshot is not None:
            self._take_snapshot(step, u, snapshot)

    def _transform(self, gradient: Tensor, value: Tensor) -> None:
        """Apply the hinge to the gradients, move the thresholds, and keep the gradients' sum."""
        live, hinge = len(gradient), self._work.hinge
        if hinge is not None and self.threshold is not None and self._slope is not None:
            threshold = self.threshold[:live]
            s = self._slope[:live] * torch.sigmoid((value - threshold) / hinge.smoothing)
            gradient.mul_(s.unsqueeze(1))
            threshold.sub_(1 - s, alpha=self._work.lr)
        if self._gradients is not None:
            self._gradients[:live] += gradient

    def _take_snapshot(self, step: int, u: Tensor, snapshot: int) -> None:
        """Copy the iterates of those who are at the snapshot, or stop before it."""
        assert self._snapshot is not None
        if step < snapshot:
            first = 0 if step + 1 == snapshot else self.live(step + 1)
            self._snapshot[first : len(u)] = u[first:]

    @property
    def own(self) -> Tensor | None:
        """Where own parameters ended."""
        if self._size is None:
            return None
        return self._x[:, self._size :] - self.result("displacement")[:, self._size :]

    def result(self, kind: str) -> Tensor:
        """Return displacement, snapshot, average, mean_gradient or multiplier, (c, d).

        ``lengths`` are the displacements' norms, (c,).
        """
        if kind not in self._results:
            if kind == "lengths":
                made = torch.linalg.vector_norm(self.result("displacement"), dim=1)
            elif kind == "multiplier":  # c_i - c + proximal (x - u)
                assert self._correction is not None
                rest = self._work.proximal * self.result("displacement")
                made = rest - self.decode(self._correction)
            else:
                made = self.decode(self._result(kind))
            self._results[kind] = made
        return self._results[kind]

    def displace_again(self, room: Tensor | None) -> None:
        """Make the displacements of a walk that was repeated, in the room if there is one."""
        self._results.clear()
        out = self._u if room is None else room
        self._results["displacement"] = torch.sub(self._x, self._u, out=out)

    def _result(self, kind: str) -> Tensor:
        if kind == "displacement":
            return torch.sub(self._x, self._u, out=self._u)  # nobody needs the iterates any more
        if kind == "snapshot":
            assert self._snapshot is not None
            return self._snapshot
        total = self._iterates if kind == "average" else self._gradients
        assert total is not None
        if self._steps[0] == self._steps[-1]:  # a number that all share need not be copied
            return total / int(self._steps[0])
        steps = torch.as_tensor(self._steps, dtype=total.dtype, device=total.device)
        return total / steps.unsqueeze(1)
