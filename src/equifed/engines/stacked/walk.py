"""The local steps of many clients at once, and handles on vectors that are made when asked for.

A handle keeps how to make its vectors; randomness has an address, so they come out the same every
time, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
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
from equifed.engines.stacked.samples import Chunk, Supply
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
        moved = torch.sub(self._x, self.u, out=room)
        vectors = {"displacement": moved}
        if self._work.multiplier and given.correction is not None:  # c_i - c + proximal (x - u)
            vectors["multiplier"] = self._work.proximal * moved - given.correction
        for kind, total in self._kept.items():
            vectors[kind] = total if kind == "snapshot" else total / self._counts()
        own = None if size is None else self._x[:, size:] - moved[:, size:]
        shared = {kind: rows[:, :size] for kind, rows in vectors.items()}
        return Made(shared, self._threshold, square_lengths(moved), own)

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


@dataclass(eq=False)
class Run:
    """A pass over all clients that makes vectors of some kinds, carried out as often as needed."""

    clients: Maker
    like: Tensor  # of the vectors' type, on their device
    batch_size: int | None
    kinds: list[str]
    what: tuple[str, str]  # names of the two numbers of every client that must be finite
    make: Callable[[Any, Chunk, Tensor | None], Made]
    """Makes the vectors of a chunk of clients, if that helps in the room for all of them."""
    moves_own: bool = False  # whether it ends at other own parts
    sums: tuple[bytes, list[Tensor]] = (b"", [])  # the last that were asked for

    def everything(self, keep: bool = True) -> tuple[dict[str, Tensor], Numbers]:
        """Return the vectors of all clients (unless not to be kept) and two numbers of each."""
        index, rows, workspace = self.clients.index, self.clients.own_rows, self.clients.workspace
        kinds = self.kinds if keep else []
        matrices = {kind: empty_rows(len(index), self.like, workspace) for kind in kinds}
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
        start, clients = self.clients.own_rows.start, self.clients

        def rows(begin: int, end: int) -> list[Tensor]:
            # They remember their own ends of own parts.
            some = clients.with_own(start).subset(clients.index[begin - first : end - first])
            matrices, check = replace(self, clients=some).everything()
            check()
            return [matrices[kind] for kind in self.kinds]

        if self.sums[0] != key:
            most = clients.rows_at_once(len(self.kinds))
            self.sums = (key, list(node_values(nodes, weights, rows, most)))
        return [value[self.kinds.index(kind)] for value in self.sums[1]]

    def carry_out(self, use: Callable[[Chunk, Made], None], room: Tensor | None = None) -> Numbers:
        """Make and use every chunk's vectors, and return two numbers of every client."""
        numbers, clients = self.like.new_zeros(len(self.clients.index), 2), self.clients

        def one(chunk: Chunk) -> None:
            made = self.make(clients, chunk, room)
            put_rows(numbers, chunk.places, torch.stack([made.value, made.squares], dim=1))
            use(chunk, made)

        map_in_threads(one, clients.chunks(self.batch_size), clients.independent)
        return Numbers(clients, numbers, self.what)


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
        return self._run.make(self._run.clients, chunk, None).vectors[self._kind]
