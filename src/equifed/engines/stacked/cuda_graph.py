"""Local steps on a GPU as CUDA graphs: recorded once, replayed without Python in between.

A round of local steps is some hundred small kernels; starting them one by one takes longer than
running them. A graph starts all of them at once. What changes from round to round (the model, the
clients, the seed of the shuffles, the corrections) is copied into the places that the graph reads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from equifed.contract.local import LocalSGD, batches_per_pass
from equifed.contract.streams import Stream, mix
from equifed.engines.stacked.chunks import Chunk
from equifed.engines.stacked.walk import Walk, walked

if TYPE_CHECKING:
    from equifed.engines.stacked.clients import StackedClients

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
        self,
        clients: StackedClients,
        x: Tensor,
        work: LocalSGD,
        chunk: Chunk,
        correction: Tensor | None,
        slope: Tensor | None,
        kinds: list[str],
    ) -> None:
        self._x, self._correction, self._slope = x.clone(), _clone(correction), _clone(slope)
        self._starts, self._ids = chunk.starts.clone(), chunk.ids.clone()
        purposes = ["shuffle"] * (work.batch_size is not None) + ["dropout"] * bool(
            clients.model.dropouts
        )
        self._salts = {purpose: x.new_zeros((), dtype=torch.int64) for purpose in purposes}
        own = replace(chunk, starts=self._starts, ids=self._ids)
        # The graph reads what the supply holds, so it must live as long.
        self._supply = supply = clients.supply(own, SaltedKeys(self._salts), work.batch_size)
        steps, rule = work.steps_for(chunk.sizes), clients.rule
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._walk = walked(
                Walk(self._x, work, steps, self._correction, self._slope), rule, supply
            )
            for kind in ("lengths", *kinds):
                self._walk.result(kind)
        self._chunk: Chunk | None = None

    def __call__(
        self,
        x: Tensor,
        stream: Stream,
        chunk: Chunk,
        correction: Tensor | None,
        slope: Tensor | None,
    ) -> Walk:
        """Replay the steps; what the walk returns is overwritten by the next replay."""
        self._x.copy_(x)
        if chunk is not self._chunk:
            self._starts.copy_(chunk.starts)
            self._ids.copy_(chunk.ids)
            self._chunk = chunk
        for purpose, salt in self._salts.items():
            salt.fill_(stream.at(purpose).salt())
        for place, value in ((self._correction, correction), (self._slope, slope)):
            if place is not None and value is not None:
                place.copy_(value)
        self._graph.replay()
        return self._walk


class Graphs:
    """Captured walks by the shape of their work; the second call of a shape captures it."""

    def __init__(self) -> None:
        self._known: OrderedDict[object, CapturedWalk | None] = OrderedDict()

    def walk(
        self,
        clients: StackedClients,
        x: Tensor,
        work: LocalSGD,
        stream: Stream,
        chunk: Chunk,
        correction: Tensor | None,
        slope: Tensor | None,
        kinds: list[str],
    ) -> Walk | None:
        """Return the walk of a chunk, or None if it is to be carried out step by step."""
        if not _uniform(work, chunk):
            return None
        run = None if work.batch_size is not None or chunk.run is None else chunk.run.start
        key = (work, chunk.sizes.tobytes(), correction is None, run)
        if key not in self._known:
            self._known[key] = None  # the first call, step by step, also warms the libraries up
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
            return None
        captured = self._known[key]
        if captured is None:
            captured = self._known[key] = CapturedWalk(
                clients, x, work, chunk, correction, slope, kinds
            )
        return captured(x, stream, chunk, correction, slope)


def _uniform(work: LocalSGD, chunk: Chunk) -> bool:
    """Tell whether all clients take the same number of steps and begin passes together."""
    turns = batches_per_pass(chunk.sizes, work.batch_size)
    return bool((turns == turns[0]).all()) and len(np.unique(work.steps_for(chunk.sizes))) == 1


def _clone(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.clone()
