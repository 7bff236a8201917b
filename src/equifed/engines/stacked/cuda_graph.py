"""Local steps on a GPU as CUDA graphs: recorded once, replayed without Python in between.

What changes from round to round (model, clients, batches, corrections) is copied into the places
that the graphs read. A walk is recorded in pieces of a few steps; the one in which DRFA's snapshot
falls, another one in every round, is carried out step by step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from equifed.contract.local import LocalWork
from equifed.engines.stacked.gradient_rules import PenalisedRule
from equifed.engines.stacked.samples import Chunk, PlannedBatches, Supply
from equifed.engines.stacked.walk import ChunkWalk, ChunkWork, Made

Supplier = Callable[[Chunk, PlannedBatches], Supply]

KEPT = 4
"""Walks kept; each holds the memory of its chunk's models and samples."""

PIECE = 32
"""Steps of a graph."""

LONGEST = 1 << 15
"""Steps of a walk that is recorded at most: their graphs take memory, too."""

MASKS = 1 << 25
"""Bytes of dropout masks that are drawn at once."""


class CapturedWalk:
    """The local steps of one chunk's shape, as graphs."""

    def __init__(
        self, given: ChunkWork, rule: PenalisedRule, supply: Supplier, drops: bool
    ) -> None:
        chunk = replace(given.chunk, starts=given.chunk.starts.clone(), ids=given.chunk.ids.clone())
        self._own = replace(
            given,
            x=given.x.clone(),
            chunk=chunk,
            correction=None if given.correction is None else given.correction.clone(),
            slope=None if given.slope is None else given.slope.clone(),
        )
        work = given.work
        purposes = ["shuffle"] * (work.batch_size is not None) + ["dropout"] * drops
        # Addresses of random numbers, which are known only when the graphs run.
        self._salts = {purpose: given.x.new_zeros((), dtype=torch.int64) for purpose in purposes}
        self._plan = PlannedBatches(chunk, given.steps, work.batch_size, given.x.dtype, drops)
        # The graphs read what the supply holds, so it must live as long.
        self._supply, self._rule = supply(chunk, self._plan), rule.begin(chunk.ids)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        with self._recorded():
            self._walk = ChunkWalk(self._own)
            self._plan.draw(self._salts.__getitem__)
            self._supply.prepare()
        steps = range(self._walk.longest)
        self._pieces = [steps[a : a + PIECE] for a in range(0, len(steps), PIECE)]
        for piece in self._pieces:
            with self._recorded():
                self._record(piece)
        self._chunk: Chunk | None = None

    def __call__(self, given: ChunkWork, room: Tensor | None) -> Made:
        """Replay the steps; what comes of them is overwritten by the next replay."""
        own, chunk = self._own, given.chunk
        own.x.copy_(given.x)
        if chunk is not self._chunk:
            own.chunk.starts.copy_(chunk.starts)
            own.chunk.ids.copy_(chunk.ids)
            self._chunk = chunk
        for purpose, salt in self._salts.items():
            salt.fill_(given.stream.at(purpose).salt())
        for place, value in ((own.correction, given.correction), (own.slope, given.slope)):
            if place is not None and value is not None:
                place.copy_(value)
        begin, *pieces = self._graphs
        begin.replay()
        for piece, graph in zip(self._pieces, pieces, strict=True):
            if given.work.snapshot is not None and given.work.snapshot - 1 in piece:
                self._walk.take(piece, self._rule, self._supply, given.work.snapshot)
            else:
                graph.replay()
        return self._walk.finish(self._walk.u if room is None else room)

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Record what is done as one more graph; all share their memory, in this order."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            yield
        self._graphs.append(graph)

    def _record(self, piece: range) -> None:
        """Take the steps of a piece, without a snapshot; dropout masks are drawn for several."""
        walk, ahead, drawn = self._walk, 0, range(0)
        masks: tuple[Tensor, ...] = ()
        for step in piece:
            blocks = self._supply.at(step, walk.live(step))
            keys = blocks[0].keys
            if step == piece.start and keys is not None and len(blocks) == 1:
                ahead = MASKS // (8 * max(1, self._rule.data.units) * keys.numel())
            if ahead > 1 and step not in drawn:
                drawn = range(step, min(step + ahead, piece.stop))
                masks = self._rule.data.masks(self._plan.keys(drawn, walk.live(step)))
            if masks:
                of_step = tuple(mask[step - drawn.start, : walk.live(step)] for mask in masks)
                blocks = [replace(blocks[0], masks=of_step)]
            walk.advance(step, self._rule, blocks, None)


class Graphs:
    """Captured walks by the shape of their work; the second call of a shape captures it."""

    def __init__(self, rule: PenalisedRule, drops: bool) -> None:
        self._rule, self._drops = rule, drops
        self._known: OrderedDict[object, CapturedWalk | None] = OrderedDict()

    def forget(self) -> None:
        """Record all walks anew: their gradients are computed in another way."""
        self._known.clear()

    def walk(self, given: ChunkWork, supply: Supplier, room: Tensor | None = None) -> Made | None:
        """Carry out a chunk's walk, or return None if it is to be done step by step."""
        work, chunk = given.work, given.chunk
        if not can_be_recorded(work, chunk):
            return None
        run = None if work.batch_size is not None or chunk.run is None else chunk.run.start
        shape = work if work.snapshot is None else replace(work, snapshot=1)
        key = (shape, chunk.sizes.tobytes(), given.correction is None, run)
        if key not in self._known:
            self._known[key] = None  # the first call, step by step, also warms the libraries up
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
            return None
        captured = self._known[key]
        if captured is None:
            captured = CapturedWalk(given, self._rule, supply, self._drops)
            self._known[key] = captured
        return captured(given, room)


def can_be_recorded(work: LocalWork, chunk: Chunk) -> bool:
    """Tell whether a walk is short enough, with one snapshot for all and no function of a user."""
    steps = work.steps_for(chunk.sizes)
    plain = work.onto is None and work.scale is None
    short = steps.max() <= LONGEST and PlannedBatches.fits(chunk, steps) and plain
    return bool(short) and (work.snapshot is None or bool(steps.min() == steps.max()))
