"""Local steps on a GPU as CUDA graphs: recorded once, replayed without Python in between.

A round of local steps is some hundred small kernels; starting them one by one takes longer than
running them. A graph starts all of them at once. What changes from round to round (the model, the
clients, the seed of the shuffles, the corrections) is copied into the places that the graph reads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from equifed.contract.local import LocalSGD, batches_per_pass
from equifed.contract.streams import mix
from equifed.engines.minibatches import Keys
from equifed.engines.stacked.chunks import Chunk, Supply
from equifed.engines.stacked.gradient_rules import PenalisedRule
from equifed.engines.stacked.walk import ChunkWork, Walk

Supplier = Callable[[Chunk, Keys, int | None], Supply]

KEPT = 4
"""Graphs kept; each holds the memory of its chunk's models and samples."""


@dataclass(frozen=True)
class SaltedKeys:
    """Keys whose address is known only when the graph runs: a salt in the device's memory."""

    salts: Mapping[str, Tensor]
    salt: Tensor | None = None

    def at(self, *more: int | str) -> SaltedKeys:
        """Return the keys for one purpose."""
        (purpose,) = more
        return SaltedKeys(self.salts, self.salts[str(purpose)])

    def keys(self, clients: Tensor, *words: Tensor | int) -> Tensor:
        """Return what :meth:`equifed.contract.streams.Stream.keys` returns at that address."""
        assert self.salt is not None
        state = mix(clients, self.salt)
        for word in words:
            state = mix(state, word)
        return state & ((1 << 63) - 1)


class CapturedWalk:
    """The local steps of one chunk's shape, as a graph."""

    def __init__(
        self, given: ChunkWork, rule: PenalisedRule, supply: Supplier, drops: bool
    ) -> None:
        chunk = replace(given.chunk, starts=given.chunk.starts.clone(), ids=given.chunk.ids.clone())
        self._own = replace(
            given,
            x=given.x.clone(),
            chunk=chunk,
            correction=_clone(given.correction),
            slope=_clone(given.slope),
        )
        # Displacements are made after a replay, right where they are to be; multipliers need them.
        self._inside = given.work.multiplier
        purposes = ["shuffle"] * (given.work.batch_size is not None) + ["dropout"] * drops
        self._salts = {purpose: given.x.new_zeros((), dtype=torch.int64) for purpose in purposes}
        # The graph reads what the supply holds, so it must live as long.
        self._supply = supply(chunk, SaltedKeys(self._salts), given.work.batch_size)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._walk = self._own.walk(rule, self._supply)
            later = () if self._inside else ("lengths", "displacement")
            for kind in ("lengths", *given.work.results):
                if kind not in later:
                    self._walk.result(kind)
        self._chunk: Chunk | None = None

    def __call__(self, given: ChunkWork, room: Tensor | None) -> Walk:
        """Replay the steps; what the walk returns is overwritten by the next replay."""
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
        self._graph.replay()
        if not self._inside:
            self._walk.displace_again(room)
        return self._walk


class Graphs:
    """Captured walks by the shape of their work; the second call of a shape captures it.

    Parameters
    ----------
    rule : PenalisedRule
        How gradients are computed.
    drops : bool
        Whether the model has dropout.
    """

    def __init__(self, rule: PenalisedRule, drops: bool) -> None:
        self._rule, self._drops = rule, drops
        self._known: OrderedDict[object, CapturedWalk | None] = OrderedDict()

    def walk(self, given: ChunkWork, supply: Supplier, room: Tensor | None = None) -> Walk | None:
        """Return the walk of a chunk, or None if it is to be carried out step by step.

        Displacements may be made in the ``room``.
        """
        work, chunk = given.work, given.chunk
        if not _uniform(work, chunk):
            return None
        run = None if work.batch_size is not None or chunk.run is None else chunk.run.start
        key = (work, chunk.sizes.tobytes(), given.correction is None, run)
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


def _uniform(work: LocalSGD, chunk: Chunk) -> bool:
    """Tell whether all clients take the same number of steps and begin passes together."""
    turns = batches_per_pass(chunk.sizes, work.batch_size)
    return bool((turns == turns[0]).all()) and len(np.unique(work.steps_for(chunk.sizes))) == 1


def _clone(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.clone()
