"""What every algorithm of the catalogue must do, whatever it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from tests.conformance.cases import CASES, EPOCHS

from equifed.algorithms.fedavg import FedAvg, State
from equifed.contract.algorithm import AnyAlgorithm
from equifed.contract.clients import Clients, MissingClients
from equifed.contract.streams import Stream
from equifed.runs.catalogue import ALGORITHMS
from equifed.testing import ALGORITHM_CHECKS, check_algorithm

pytestmark = pytest.mark.long


@pytest.mark.parametrize("check", ALGORITHM_CHECKS.values(), ids=list(ALGORITHM_CHECKS))
@pytest.mark.parametrize("algorithm", CASES.values(), ids=list(CASES))
def test_it_keeps_the_contract(
    algorithm: AnyAlgorithm, check: Callable[[AnyAlgorithm], None]
) -> None:
    check(algorithm)


def test_the_whole_catalogue_is_here() -> None:
    assert {name.partition("/")[0] for name in CASES} == set(ALGORITHMS)


# -- the suite has teeth: each of these breaks one promise, and the check of that promise says so --


@dataclass(frozen=True)
class Still(FedAvg):
    """Does not move."""

    def round(self, state: Any, clients: Clients, stream: Stream) -> Any:
        return state, super().round(state, clients, stream)[1]


@dataclass(frozen=True)
class Counting(FedAvg):
    """Remembers something outside of its state."""

    seen: list[int] = field(default_factory=list)

    def round(self, state: Any, clients: Clients, stream: Stream) -> Any:
        self.seen.append(1)
        return super().round(state, clients, stream)


@dataclass(frozen=True)
class Hidden(FedAvg):
    """Draws from a generator of its own, which nobody sees."""

    draws: Any = field(default_factory=lambda: np.random.default_rng(0), repr=False)

    def round(self, state: Any, clients: Clients, stream: Stream) -> Any:
        new, info = super().round(state, clients, stream)
        return State(new.x + float(self.draws.normal())), info


@dataclass
class Loose:
    """A state that can be changed."""

    x: Any


@dataclass(frozen=True)
class Unfrozen(FedAvg):
    """Has a state that can be changed."""

    def init(self, clients: Clients, x: Any) -> Any:
        return Loose(x)


@dataclass(frozen=True)
class Lossy(FedAvg):
    """Has a state that no checkpoint can hold."""

    def round(self, state: Any, clients: Clients, stream: Stream) -> Any:
        new, info = super().round(state, clients, stream)
        return Unsaved(new.x), info

    def init(self, clients: Clients, x: Any) -> Any:
        return Unsaved(x)


@dataclass(frozen=True)
class Unsaved:
    """Holds a kind of number that checkpoints do not know."""

    x: Any
    number: complex = 1j


@dataclass(frozen=True)
class Everybody(FedAvg):
    """Counts on all clients being there."""

    def round(self, state: Any, clients: Clients, stream: Stream) -> Any:
        new, info = super().round(state, clients, stream)
        return new, replace(info, index=np.arange(len(clients.names)))


@dataclass(frozen=True)
class Peeking(FedAvg):
    """Asks what the engine is."""

    def round(self, state: Any, clients: Clients, stream: Stream) -> Any:
        new, info = super().round(state, clients, stream)
        return State(new.x + 1e-6 * ("Stacked" in type(clients).__name__)), info


@dataclass(frozen=True)
class Swallowing(FedAvg):
    """Hides that a client gave no numbers."""

    def round(self, state: Any, clients: Clients, stream: Stream) -> Any:
        try:
            return super().round(state, clients, stream)
        except MissingClients as lost:
            left = np.setdiff1d(clients.index, np.fromiter(lost.reasons, dtype=np.int64))
            return super().round(state, clients.subset(left), stream)


BROKEN = {
    "engines agree": Peeking(EPOCHS),
    "a client without a number is quarantined": Swallowing(EPOCHS),
    "a round moves the model and tells what it did": Still(EPOCHS),
    "the same state and stream give the same result": Hidden(EPOCHS),
    "a saved state goes on identically": Lossy(EPOCHS),
    "any clients may be absent": Everybody(EPOCHS),
    "states are frozen values": Unfrozen(EPOCHS),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_is_found(name: str) -> None:
    with pytest.raises(AssertionError, match=f"fails the check '{name}'"):
        check_algorithm(BROKEN[name])


def test_a_round_that_changes_the_algorithm_is_named() -> None:
    with pytest.raises(AssertionError, match=r"states are frozen values.*changed the algorithm"):
        check_algorithm(Counting(EPOCHS))
