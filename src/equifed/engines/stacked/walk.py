"""The local steps of many clients at once, and handles on vectors that are made when asked for.

A handle keeps how to make its vectors; randomness has an address, so they come out the same every
time, chunk by chunk.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from equifed.contract import BlockMatrix, Index, LocalWork, Losses, Stream, Weights
from equifed.engines.ordered_sums import (
    InProcessVectors,
    Node,
    node_values,
    put_rows,
    sum_squares,
    to_numpy,
)
from equifed.engines.stacked.gradient_rules import PenalisedRule, StepSamples
from equifed.engines.stacked.samples import Chunk, Supply, as_slice
from equifed.engines.threads import empty_rows, map_in_threads

Maker: TypeAlias = Any
"""The ``StackedClients`` that make these vectors."""


@dataclass(frozen=True, eq=False)
class ChunkWork:
    """What the clients of a chunk are to do: ``work`` from x."""

    x: Tensor
    work: LocalWork
    stream: Stream
    chunk: Chunk
    correction: Tensor | None  # (c, d): target - control
    slope: Tensor | None  # (c,): the factor of the hinge
    size: int | None = None  # of what is shared: the columns behind it are own, outside the ball

    @property
    def steps(self) -> Index:
        """Steps of each client, shape (c,)."""
        return self.work.steps_for(self.chunk.sizes)


@dataclass(frozen=True, eq=False)
class Made:
    """What the clients of a chunk send back."""

    vectors: dict[str, Tensor]  # (c, d) of every kind that was asked for
    value: Tensor  # (c,): losses, or thresholds of a hinge
    squares: Tensor  # (c,): squared lengths of what they computed
    own: Tensor | None = None  # where own parameters ended


class ChunkWalk:
    r"""The iterates of c clients, row by row; those who still walk are always the first rows.

    .. math::
       u \leftarrow \Pi\bigl(u - \text{lr}\,(g_i(u) + \text{proximal}\,(u - x) +
                             \text{correction}_i)\bigr)
    """

    def __init__(
        self, given: ChunkWork, room: Tensor | None = None, held: slice | None = None
    ) -> None:
        work, x, steps = given.work, given.x, given.steps
        self._given, self._work, self._x, self._steps, self._held = given, work, x, steps, held
        assert (np.diff(steps) <= 0).all()
        self._live = np.searchsorted(-steps, -np.arange(steps[0])).tolist()
        self.u = (empty_rows(len(steps), x) if room is None else room).copy_(x)
        self._pull = None  # what a step adds whatever the iterate: lr (proximal x - correction)
        self._scale = None if work.scale is None else work.scale.to(x)
        if given.correction is not None:
            self._pull = -work.lr * given.correction
            if self._scale is not None:
                self._pull = self._scale.multiply(self._pull)
        if work.proximal:
            anchor = work.lr * work.proximal * x
            self._pull = anchor.expand_as(self.u) if self._pull is None else self._pull + anchor
        kept = [kind for kind in work.results if kind not in ("displacement", "multiplier")]
        self._kept = {kind: torch.zeros_like(self.u) for kind in kept}  # of which means are sums
        start = 0.0 if work.hinge is None else work.hinge.threshold
        self._threshold = x.new_full((len(steps),), start)

    @property
    def longest(self) -> int:
        """Steps of the client that takes most."""
        return int(self._steps[0])

    def live(self, step: int) -> int:
        """Return how many clients take this step (counted from zero): the first rows."""
        return int(self._live[step]) if step < len(self._live) else 0

    def carry_out(self, rule: PenalisedRule, supply: Supply) -> Made:
        """Take all steps, and return what comes of them."""
        self.take(
            range(self.longest), rule.begin(self._given.chunk.ids), supply, self._work.snapshot
        )
        return self.finish(self.u)

    def take(self, steps: range, rule: PenalisedRule, supply: Supply, snapshot: int | None) -> None:
        """Take some steps; the iterates after ``snapshot`` of them are kept."""
        for step in steps:
            self.advance(step, rule, supply.at(step, self.live(step)), snapshot)

    def advance(
        self, step: int, rule: PenalisedRule, samples: list[StepSamples], snapshot: int | None
    ) -> None:
        """Take one step with the clients that still walk."""
        work, live, kept = self._work, self.live(step), self._kept
        u = self.u if live == len(self.u) else self.u[:live]
        keep = 1 - work.lr * work.proximal
        if work.hinge is None and "mean_gradient" not in kept and self._scale is None:
            rule.step(u, samples, keep=keep, lr=work.lr)
        else:
            gradient, value = rule.gradient(u, samples)
            if work.hinge is not None and self._given.slope is not None:
                threshold = self._threshold[:live]
                s = torch.sigmoid((value - threshold) / work.hinge.smoothing)
                s = self._given.slope[:live] * s
                gradient.mul_(s.unsqueeze(1))
                threshold.sub_(1 - s, alpha=work.lr)
            if "mean_gradient" in kept:
                kept["mean_gradient"][:live] += gradient
            if self._scale is not None:
                gradient = self._scale.multiply(gradient)
            u.mul_(keep).sub_(gradient, alpha=work.lr)
        if self._pull is not None:
            u.add_(self._pull[:live])
        work.project(u[:, : self._given.size])
        if self._held is not None:
            u[:, self._held] = self._x[:live, self._held]
        if "average" in kept:
            kept["average"][:live] += u
        if "snapshot" in kept and snapshot is not None and step < snapshot:
            # Of those who are at the snapshot, or stop before it.
            first = 0 if step + 1 == snapshot else self.live(step + 1)
            kept["snapshot"][first:live] = u[first:]

    def finish(self, room: Tensor) -> Made:
        """Return what comes of the steps; displacements are put into the room."""
        given, size = self._given, self._given.size
        moved = self.decode(torch.sub(self._x, self.u, out=room))
        vectors = {"displacement": moved}
        if self._work.multiplier and given.correction is not None:  # c_i - c + proximal (x - u)
            vectors["multiplier"] = self._work.proximal * moved - given.correction
        for kind, total in self._kept.items():
            vectors[kind] = self.decode(total if kind == "snapshot" else total / self._counts())
        own = None if size is None else self._x[:, size:] - moved[:, size:]
        shared = {kind: rows[:, :size] for kind, rows in vectors.items()}
        return Made(shared, self._threshold, square_lengths(moved), own)

    def decode(self, rows: Tensor) -> Tensor:
        """Return the vectors that rows stand for."""
        return rows

    def _counts(self) -> int | Tensor:
        """Return the clients' steps; a number that all share need not be copied."""
        if self._steps[0] == self._steps[-1]:
            return self.longest
        return torch.as_tensor(self._steps, dtype=self.u.dtype, device=self.u.device).unsqueeze(1)


def square_lengths(rows: Tensor) -> Tensor:
    """Return the squared lengths of rows."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms.square()


class Numbers:
    """Two numbers of every client that must be finite, perhaps on their way from a GPU."""

    def __init__(self, clients: Maker, numbers: Tensor, what: tuple[str, str]) -> None:
        self._clients, self._what, self._ready = clients, what, None
        self._host = numbers.to("cpu", torch.float64, non_blocking=True)
        if numbers.device.type == "cuda":  # others wait for nothing meanwhile
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record()

    def __call__(self) -> Losses:
        """Return the first number of each; raises for clients of which one is not finite."""
        if self._ready is not None:
            self._ready.synchronize()
        found: Losses = self._host.numpy()
        for values, what in zip(found.T, self._what, strict=True):
            self._clients.require_finite(values, what)
        return found[:, 0].copy()


class Run:
    """A pass over all clients that makes vectors of some kinds, carried out as often as needed."""

    what: tuple[str, str]  # names of the two numbers of every client that must be finite
    moves_own = False  # whether it ends at other own parts
    _sums: tuple[bytes, list[Tensor]] | None = None

    def __init__(
        self, clients: Maker, x: Tensor, stream: Stream, batch_size: int | None, kinds: list[str]
    ) -> None:
        self.clients, self._x, self._stream = clients, x, stream
        self._batch, self._kinds = batch_size, kinds

    def make(self, chunk: Chunk, room: Tensor | None = None) -> Made:
        """Make the vectors of a chunk's clients, if that helps in the ``room`` for all of them."""
        raise NotImplementedError

    def everything(self, keep: bool = True) -> tuple[dict[str, Tensor], Numbers]:
        """Return the vectors of all clients (unless not to be kept) and two numbers of each."""
        index, rows, workspace = self.clients.index, self.clients.own_rows, self.clients.workspace
        kinds = self._kinds if keep else []
        matrices = {kind: empty_rows(len(index), self._x, workspace) for kind in kinds}
        own = rows.start[index] if self.moves_own else rows.start

        def store(chunk: Chunk, made: Made) -> None:
            for kind, matrix in matrices.items():  # nothing to do if it is there
                put_rows(matrix, chunk.places, made.vectors[kind])
            if made.own is not None:
                put_rows(own, chunk.places, made.own)

        numbers = self.carry_out(store, None if self.moves_own else matrices.get("displacement"))
        if self.moves_own:
            numbers()
            rows.put(index, own)
        return matrices, numbers

    def nodes(self, kind: str, nodes: Sequence[Node], weights: Weights, first: int) -> list[Tensor]:
        """Return parts of one kind's weighted sum; those of all kinds are made together."""
        key = np.asarray([first, *weights], dtype=np.float64).tobytes()

        def rows(begin: int, end: int) -> list[Tensor]:
            matrices, check = self.part(begin - first, end - first).everything()
            check()
            return [matrices[kind] for kind in self._kinds]

        if self._sums is None or self._sums[0] != key:
            most = self.clients.rows_at_once(len(self._kinds))
            self._sums = (key, list(node_values(nodes, weights, rows, most)))
        return [value[self._kinds.index(kind)] for value in self._sums[1]]

    def part(self, begin: int, end: int) -> Self:
        """Return the run of a few of the clients, which remembers its own ends of own parts."""
        part, again = copy.copy(self), self.clients.with_own(self.clients.own_rows.start)
        part.clients, part._sums = again.subset(self.clients.index[begin:end]), None
        return part

    def carry_out(self, use: Callable[[Chunk, Made], None], room: Tensor | None = None) -> Numbers:
        """Make and use every chunk's vectors, and return two numbers of every client."""
        numbers, clients = self._x.new_zeros(len(self.clients.index), 2), self.clients

        def one(chunk: Chunk) -> None:
            made = self.make(chunk, room)
            put_rows(numbers, chunk.places, torch.stack([made.value, made.squares], dim=1))
            use(chunk, made)

        map_in_threads(one, clients.chunks(self._batch), clients.independent)
        return Numbers(clients, numbers, self.what)


class GradientRun(Run):
    """One call of ``value_and_gradient``."""

    what = ("loss", "squared gradient norm")

    @override
    def make(self, chunk: Chunk, room: Tensor | None = None) -> Made:
        clients, size = self.clients, self.clients.model.size
        found = clients.pass_over(self._x, chunk) if self._batch is None else None
        if found is not None:
            x = self._x.expand(len(chunk), -1)
            gradient, value = clients.rule.penalise(x, found[1], found[0])
        else:
            samples = clients.supply(chunk, self._stream, self._batch).at(0)
            rule, u = clients.rule.begin(chunk.ids), clients.models(self._x, chunk)
            gradient, value = rule.gradient(u, samples)
        return Made({"gradient": gradient[:, :size]}, value, square_lengths(gradient[:, :size]))


class LocalRun(Run):
    """One call of ``local_steps``."""

    what = ("threshold", "squared length of the local update")

    def __init__(
        self, clients: Maker, x: Tensor, work: LocalWork, stream: Stream,
        control: InProcessVectors | None, target: Tensor | None, slopes: Weights | None,
    ) -> None:  # fmt: skip
        super().__init__(clients, x, stream, work.batch_size, list(work.results))
        self._work, self._control, self._target, self._slopes = work, control, target, slopes
        self.moves_own, self._index = clients.remembers_own(), clients.index

    @override
    def make(self, chunk: Chunk, room: Tensor | None = None) -> Made:
        slope, correction, x, size = None, None, self._x, None
        places = as_slice(np.searchsorted(self._index, chunk.clients))
        if self._slopes is not None:
            slope = torch.as_tensor(self._slopes[places], dtype=x.dtype, device=x.device)
        if self._target is not None and self._control is not None:
            correction = self._target - self._control.of_chunk(chunk, places)
            if self._work.correction != 1:
                correction.mul_(self._work.correction)
        if self.moves_own:
            x, size = self.clients.models(x, chunk), self.clients.model.size
            if correction is not None:  # of the shared part only
                correction = pad(correction, (0, self.clients.model.own_size))
        given = ChunkWork(x, self._work, self._stream, chunk, correction, slope, size)
        made: Made = self.clients.walk(given, room)
        return made


class RemadeVectors(InProcessVectors):
    """One kind of vector of a run that is carried out when it is asked for."""

    def __init__(self, run: Run, kind: str) -> None:
        self._run, self._kind = run, kind

    @override
    def nodes(self, nodes: Sequence[Node], weights: Weights, first: int) -> list[Tensor]:
        return self._run.nodes(self._kind, nodes, weights, first)

    @override
    def squared_norms(self, scale: BlockMatrix | None = None) -> Losses:
        out = np.zeros(len(self._run.clients.index))

        def measure(chunk: Chunk, made: Made) -> None:
            out[chunk.places] = to_numpy(sum_squares(made.vectors[self._kind], scale))

        self._run.carry_out(measure)()
        return out

    @override
    def dense(self) -> Tensor:  # whatever the memory bound says
        matrices, check = self._run.everything()
        check()
        return matrices[self._kind]

    @override
    def of_chunk(self, chunk: Chunk, places: slice | Index) -> Tensor:
        return self._run.make(chunk).vectors[self._kind]
