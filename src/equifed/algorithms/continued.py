"""Continued: an algorithm that begins where another one, of a near objective, has ended."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

from equifed.algorithms.wrapper import WeightedWrapper, inner_state, with_inner_state
from equifed.contract.algorithm import AnyAlgorithm, Info
from equifed.contract.arrays import Losses, Vector
from equifed.contract.clients import Clients, ClientVectors
from equifed.contract.streams import Stream
from equifed.steps.metric_sizes import MetricSizes


@dataclass(eq=False)
class Trail:
    """What the last round of a walk left: its state, and what everybody answered at which model."""

    state: Any = None
    x: Vector | None = None
    answers: tuple[Losses, ClientVectors] | None = None

    def leads_to(self, x: Vector) -> bool:
        """Tell whether the answers are those at a model, and a metric is known there."""
        known = isinstance(getattr(self.state, "sizes", None), MetricSizes)
        return known and self.x is not None and bool((self.x == x).all())


@dataclass(frozen=True)
class Continued(WeightedWrapper):
    """Rounds in a metric that go on from those of another objective."""

    algorithm: AnyAlgorithm
    trail: Trail = field(default_factory=Trail)

    def init(self, clients: Clients, x: Vector) -> Any:
        """Return the state before the first round."""
        state = self.algorithm.init(clients, x)
        if not self.trail.leads_to(x):
            return state
        last = self.trail.state
        sizes = replace(last.sizes, origin=None, pull=None, gain=0.0, faster=0.0)
        inner = replace(inner_state(state), weights=last.weights, losses=last.losses, sizes=sizes)
        return with_inner_state(state, inner)

    def round(self, state: Any, clients: Clients, stream: Stream) -> tuple[Any, Info]:
        """Return the state after one round of the algorithm."""
        heard = Listening(clients, self.trail)
        after, info = self.algorithm.round(state, cast(Clients, heard), stream)
        self.trail.state = inner_state(after)
        return after, info

    def model(self, state: Any) -> Vector:
        """Return the algorithm's model."""
        return self.algorithm.model(state)


class Listening:
    def __init__(self, clients: Clients, trail: Trail) -> None:
        self._clients, self._trail = clients, trail

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clients, name)

    def value_and_gradient(
        self, x: Vector, stream: Stream, batch_size: int | None = None
    ) -> tuple[Losses, ClientVectors]:
        trail, whole = self._trail, len(self._clients.index) == len(self._clients.names)
        if whole and trail.answers is not None and trail.leads_to(x):
            return trail.answers
        found = self._clients.value_and_gradient(x, stream, batch_size)
        if batch_size is None and whole:
            trail.x, trail.answers = x, found
        return found
