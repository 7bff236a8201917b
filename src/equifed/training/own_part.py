"""Own parts from round to round: what clients keep is part of the state that training saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from equifed.contract.algorithm import AnyAlgorithm, Info
from equifed.contract.arrays import Vector
from equifed.contract.clients import Clients
from equifed.contract.streams import Stream
from equifed.training.history import History
from equifed.training.tables import MetricRecord


@dataclass(frozen=True)
class State:
    """The algorithm's state, and the own parts (N, p) of all clients."""

    inner: Any
    own: Vector

    @property
    def x(self) -> Vector:
        """The shared model."""
        return self.inner.x  # type: ignore[no-any-return]


@dataclass(frozen=True)
class KeepingOwn:
    """Any algorithm on clients that move own parts by local steps.

    The algorithm works with the shared model and does not notice: in a round the clients start from
    the own parts of the state, and those with which their last local steps ended are in the next
    one. Clients that take no part keep theirs.
    """

    algorithm: AnyAlgorithm

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        own = clients.own_parts(x)
        assert own is not None
        return State(self.algorithm.init(clients, x), own)

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round of the algorithm."""
        bound = clients.with_own(state.own)
        inner, info = self.algorithm.round(state.inner, bound, stream)
        return State(inner, bound.own_after()), info

    def model(self, state: State) -> Vector:
        """Return the algorithm's shared model."""
        return self.algorithm.model(state.inner)


def keep_own(algorithm: AnyAlgorithm, clients: Clients) -> AnyAlgorithm:
    """Return the algorithm as it runs on these clients."""
    return KeepingOwn(algorithm) if clients.remembers_own() else algorithm


def own_of(state: Any) -> Vector | None:
    """Return the own parts that a state holds; None if it holds none."""
    return state.own if isinstance(state, State) else None


def bind_own(clients: Clients, own: Vector | None) -> Clients:
    """Return the clients with these own parts, if there are any."""
    return clients if own is None else clients.with_own(own)


def give_own(clients: Clients, x: Vector) -> dict[str, Vector] | None:
    """Return the own parts that belong to a shared model, by name; None if there are none."""
    own = clients.own_parts(x)
    return None if own is None else clients.own_parameters(own)


def measure_shared(clients: Clients, history: History, x: Vector) -> MetricRecord | None:
    """Return the main metric of the shared model with the mean of all own parts, if known."""
    shown = history.main_metric()
    if shown is None or history.own is None:
        return None
    metric, split = shown
    for found in clients.evaluate_shared(x, (split,)):
        if metric in found.metrics:
            last = history.rounds[-1].round if history.rounds else 0
            return MetricRecord(last, split, metric, found.metrics[metric], found.sizes)
    return None


def tell_own(clients: Clients) -> list[dict[str, Any]]:
    """Return the events that say which own parts there are and what to know about them."""
    told = {"note": clients.describe_own(), "warning": clients.warn_of_own()}
    return [{"event": e, "round": 0, "reason": text} for e, text in told.items() if text]
