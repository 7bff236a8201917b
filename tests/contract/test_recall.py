"""Recall: absent clients count with what they sent last (MIFA)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.problems import PROBLEMS, rounds, start

from equifed.algorithms import AFL, DRFA, DeltaFL, FedAvg, FedEBA, Scaffold, ScaffPD, tilted_erm
from equifed.contract import absence
from equifed.contract.absence import PATIENCE, Memory, Recall
from equifed.contract.clients import Clients
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.contract.views import ClientsView
from equifed.objectives import Average, CVaR, WorstCase
from equifed.steps.schedules import ConstantSteps
from equifed.training.checkpoint import pack, unpack

pytestmark = pytest.mark.long

PROBLEM = PROBLEMS["more clients"]
N = PROBLEM.n
LR = 0.05
ONE = LocalSGD(lr=LR, steps=1)
STEPS = ConstantSteps(0.1, 0.2)
ALL: list[Any] = [
    AFL(ONE),
    DRFA(ONE),
    DeltaFL(ONE),
    FedAvg(ONE),
    FedEBA(ONE, angle=90.0, align_model=False),
    Scaffold(ONE, "fresh"),
    ScaffPD(CVaR(0.5), ONE, STEPS),
    tilted_erm(ONE),
]


def present(seed: int, count: int) -> list[np.ndarray]:
    """Who is there in each round: anybody with chance 0.6, at least one; all in the first."""
    draw, out = np.random.default_rng(seed), [np.arange(N)]
    while len(out) < count:
        here = np.flatnonzero(draw.random(N) < 0.6)
        out.append(here if len(here) else draw.integers(N, size=1))
    return out


def play(algorithm: Any, who: list[np.ndarray], engine: Any = "stacked") -> Any:
    """Rounds without a memory."""
    clients = PROBLEM.clients(engine)
    state = algorithm.init(clients, torch.as_tensor(start(PROBLEM)))
    for r, here in enumerate(who):
        state, _ = algorithm.round(state, clients.subset(here), Stream(0).at("round", r))
    return state


def recall(
    algorithm: Any,
    who: list[np.ndarray],
    engine: Any = "stacked",
    begin: Any = None,
    first: int = 0,
) -> tuple[Any, Memory]:
    """Rounds in which training remembers what absent clients sent."""
    clients, patience = PROBLEM.clients(engine), getattr(algorithm, "patience", PATIENCE)
    state, memory = begin or (algorithm.init(clients, torch.as_tensor(start(PROBLEM))), Memory())
    for r, here in enumerate(who, start=first):
        view = Recall(clients.subset(here), memory, patience)
        state, _ = algorithm.round(state, view, Stream(0).at("round", r))
        memory = view.memory()
    return state, memory


@given(seed=st.integers(0, 100))
@settings(deadline=None, max_examples=15)
def test_it_is_mifa_with_a_table(seed: int) -> None:
    """Gradient steps on the average; the oracle holds everybody's last gradient in a table."""
    who, x, began = present(seed, 12), start(PROBLEM), False
    table: dict[int, np.ndarray] = {}
    for here in who:
        began, gradients = began or len(here) < N, PROBLEM.gradients(x)
        table |= {int(i): gradients[i] for i in here}
        x = x - LR * len(here) / len(table) * np.mean(list(table.values()), axis=0)
        table = table if began else {}
    state, _ = recall(FedAvg(ONE, "uniform"), who)
    np.testing.assert_allclose(state.x, x, atol=1e-12)


@pytest.mark.parametrize("algorithm", ALL, ids=lambda a: type(a).__name__)
def test_with_everybody_there_it_is_the_algorithm_to_the_bit(algorithm: Any) -> None:
    who = 5 * [np.arange(N)]
    (state, memory), plain = recall(algorithm, who), play(algorithm, who)
    np.testing.assert_array_equal(state.x, plain.x)
    assert memory.sent is None and memory.away is None


@pytest.mark.parametrize(
    "algorithm",
    [FedAvg(ONE, "uniform"), ScaffPD(Average(), ONE, STEPS)],
    ids=lambda a: type(a).__name__,
)
def test_who_is_missing_makes_no_noise_at_the_solution(algorithm: Any) -> None:
    """Gradients of the clients do not vanish there; their last contributions cancel."""
    clients, who = PROBLEM.clients("stacked"), present(1, 400)
    solution = rounds(algorithm, clients, start(PROBLEM), 600)[0].x.numpy()
    assert np.abs(PROBLEM.gradients(solution)).max() > 0.1
    assert np.abs(play(algorithm, who).x.numpy() - solution).max() > 1e-3
    assert np.abs(recall(algorithm, who)[0].x.numpy() - solution).max() < 1e-5


@pytest.mark.parametrize("objective", [WorstCase(), CVaR(0.5)], ids=repr)
def test_half_of_the_clients_missing_ends_at_the_solution(objective: Any) -> None:
    algorithm = ScaffPD(objective)
    exact = play(algorithm.wrapped(), [np.arange(N)] * 200)
    best = objective.value(PROBLEM.losses(exact.x.numpy()))
    found, _ = recall(algorithm.wrapped(), present(2, 300))
    assert objective.value(PROBLEM.losses(found.x.numpy())) <= best * 1.01


@pytest.mark.parametrize(
    "algorithm",
    [
        FedAvg(ONE, participation=0.5),
        DRFA(ONE, clients_per_round=3),
        AFL(ONE, clients_per_round=3),
        DeltaFL(ONE, participation=0.5),
    ],
    ids=repr,
)
def test_algorithms_that_sample_run_as_without(algorithm: Any) -> None:
    who = present(3, 8)
    state, memory = recall(algorithm, who)
    np.testing.assert_array_equal(state.x, play(algorithm, who).x)
    assert memory.sent is None


def test_who_is_away_for_good_is_forgotten() -> None:
    """After the patience its last answer leads nobody: the rounds are those of the others alone."""
    algorithm = AFL(ONE, patience=4)
    others = np.arange(N - 1)
    state, memory = recall(algorithm, [np.arange(N)] + 4 * [others])
    assert memory.sent is not None and not memory.sent.heard[-1]
    before, memory = recall(algorithm, [np.arange(N)] + 3 * [others])
    assert memory.sent is not None
    clients, address = PROBLEM.clients("stacked"), Stream(0).at("round", 4)
    plain, _ = algorithm.round(before, clients.subset(others), address)
    np.testing.assert_allclose(state.x, plain.x, atol=1e-12)


def test_the_memory_ends_when_everybody_is_there_again() -> None:
    algorithm = AFL(ONE, patience=3)
    who = [np.arange(N - 1)] + 2 * [np.arange(N)]
    assert recall(algorithm, who)[1].sent is not None
    assert recall(algorithm, [*who, np.arange(N)])[1].sent is None


class Forgetful(ClientsView):
    """An engine that keeps nothing for anybody."""

    remembered, remember, can_remember = Clients.remembered, Clients.remember, Clients.can_remember


def test_an_engine_without_memories_runs_as_without() -> None:
    who, clients = present(4, 6), Forgetful(PROBLEM.clients("loop"))
    assert not clients.can_remember() and PROBLEM.clients("loop").can_remember()
    state, memory = FedAvg(ONE).init(clients, torch.as_tensor(start(PROBLEM))), Memory()
    for r, here in enumerate(who):
        view = Recall(clients.subset(here), memory)
        state, _ = FedAvg(ONE).round(state, view, Stream(0).at("round", r))
        memory = view.memory()
    np.testing.assert_allclose(state.x, play(FedAvg(ONE), who, "loop").x, atol=1e-12)


def test_too_many_numbers_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    who = present(5, 6)
    monkeypatch.setattr(absence, "LARGEST", 0)
    state, memory = recall(AFL(ONE), who)
    assert memory.sent is None
    np.testing.assert_array_equal(state.x, play(AFL(ONE), who).x)


@pytest.mark.parametrize("algorithm", ALL, ids=lambda a: type(a).__name__)
def test_engines_agree_and_checkpoints_hold_the_memory(algorithm: Any) -> None:
    who = present(6, 8)
    state, _ = recall(algorithm, who)
    np.testing.assert_allclose(state.x, recall(algorithm, who, "loop")[0].x, atol=1e-10)
    half, tensors = recall(algorithm, who[:4]), {}
    tree = pack(half, "state", tensors)
    again = unpack(tree, tensors, algorithm.init(PROBLEM.clients("stacked"), half[0].x))
    again = recall(algorithm, who[4:], begin=again, first=4)
    np.testing.assert_array_equal(again[0].x, state.x)


def test_probes_and_second_sums_are_left_alone() -> None:
    """Automatic steps measure the smoothness, and ask a second sum, as they would without."""
    who = [np.arange(N - 1)]
    algorithm = ScaffPD(CVaR(0.5), local=LocalSGD(lr=1.0, steps=4))
    plain, (state, _) = play(algorithm, who), recall(algorithm, who)
    assert state.sizes == plain.sizes
    assert state.weights.tolist() == plain.weights.tolist()
