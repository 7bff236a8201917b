"""What every algorithm of the catalogue must do, whatever it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.conformance.cases import CASES, EPOCHS
from tests.conformance.verbs import choose_cases, list_calls

from equifed.algorithms.fedavg import FedAvg, State
from equifed.contract.algorithm import AnyAlgorithm
from equifed.contract.clients import Clients, MissingClients
from equifed.contract.streams import Stream
from equifed.runs.catalogue import ALGORITHMS
from equifed.testing import ALGORITHM_CHECKS, check_algorithm
from equifed.testing.objectives import run_check

pytestmark = pytest.mark.long


AGREEMENT = "engines agree"
ALONE = {name: check for name, check in ALGORITHM_CHECKS.items() if name != AGREEMENT}
"""The checks that look at one engine."""

PLAIN = [name for name in CASES if name.endswith("/plain")]
VARIED = ("any clients may be absent", "a saved state resumes identically")
"""What a setting can break: who is asked, and what is remembered. A round is part of both."""


@pytest.mark.parametrize("check", ALONE.values(), ids=list(ALONE))
@pytest.mark.parametrize("case", PLAIN)
def test_it_keeps_the_contract(case: str, check: Callable[[AnyAlgorithm], None]) -> None:
    check(CASES[case])


@pytest.mark.parametrize("case", [name for name in CASES if name not in PLAIN])
def test_it_keeps_the_contract_with_other_settings(case: str) -> None:
    for name in VARIED:
        run_check(CASES[case], name, partial(ALGORITHM_CHECKS[name], CASES[case]))


def test_engines_agree_on_every_call() -> None:
    """Engines see calls, not algorithms: each call of a case is made by one that is compared."""
    calls = list_calls(CASES)
    chosen = choose_cases(calls)
    assert set().union(*(calls[name] for name in chosen)) == set().union(*calls.values())
    for name in chosen:
        run_check(CASES[name], AGREEMENT, partial(ALGORITHM_CHECKS[AGREEMENT], CASES[name]))


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
    "a saved state resumes identically": Lossy(EPOCHS),
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
