"""Remembering: absent clients count with what they sent last (MIFA)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.problems import PROBLEMS, rounds, start

from equifed.algorithms import AFL, DRFA, DeltaFL, FedAvg, FedEBA, Scaffold, ScaffPD, TiltedERM
from equifed.algorithms.remembering import Remembering
from equifed.algorithms.safeguarded import safeguard
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
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
    FedEBA(ONE, angle=90.0),
    Scaffold(ONE, "fresh"),
    ScaffPD(CVaR(0.5), ONE, STEPS),
    TiltedERM(ONE),
]


def present(seed: int, count: int) -> list[np.ndarray]:
    """Who is there in each round: anybody with chance 0.6, at least one; all in the first."""
    draw, out = np.random.default_rng(seed), [np.arange(N)]
    while len(out) < count:
        here = np.flatnonzero(draw.random(N) < 0.6)
        out.append(here if len(here) else draw.integers(N, size=1))
    return out


def play(algorithm: Any, who: list[np.ndarray], engine: Any = "stacked", x: Any = None) -> Any:
    clients = PROBLEM.clients(engine)
    state = algorithm.init(clients, torch.as_tensor(start(PROBLEM) if x is None else x))
    for r, here in enumerate(who):
        state, _ = algorithm.round(state, clients.subset(here), Stream(0).at("round", r))
    return state


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
    state = play(Remembering(FedAvg(ONE, "uniform")), who)
    np.testing.assert_allclose(state.x, x, atol=1e-12)


@pytest.mark.parametrize("algorithm", ALL, ids=lambda a: type(a).__name__)
def test_with_everybody_there_it_is_the_algorithm_to_the_bit(algorithm: Any) -> None:
    clients, x = PROBLEM.clients("stacked"), start(PROBLEM)
    state, infos = rounds(Remembering(algorithm), clients, x, 5)
    plain, others = rounds(algorithm, clients, x, 5)
    np.testing.assert_array_equal(state.x, plain.x)
    assert state.memory is None
    for info, other in zip(infos, others, strict=True):
        np.testing.assert_array_equal(info.weights, other.weights)


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
    assert np.abs(play(Remembering(algorithm), who).x.numpy() - solution).max() < 1e-5


@pytest.mark.parametrize("objective", [WorstCase(), CVaR(0.5)], ids=repr)
def test_half_of_the_clients_missing_ends_at_the_solution(objective: Any) -> None:
    algorithm = ScaffPD(objective)
    exact = play(safeguard(algorithm), [np.arange(N)] * 200)
    best = objective.value(PROBLEM.losses(exact.x.numpy()))
    found = play(safeguard(algorithm), present(2, 300))
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
    state = play(Remembering(algorithm), who)
    np.testing.assert_array_equal(state.x, play(algorithm, who).x)
    assert state.memory is None


def test_who_is_away_for_good_is_forgotten() -> None:
    """After the patience its last answer leads nobody: the rounds are those of the others alone."""
    algorithm = AFL(ONE, patience=4)
    others = np.arange(N - 1)
    state = play(Remembering(algorithm), [np.arange(N)] + 4 * [others])
    assert state.memory is not None and not state.memory.heard[-1]
    before = play(Remembering(algorithm), [np.arange(N)] + 3 * [others])
    assert before.memory is not None
    clients, address = PROBLEM.clients("stacked"), Stream(0).at("round", 4)
    plain, _ = algorithm.round(before.inner, clients.subset(others), address)
    np.testing.assert_allclose(state.x, plain.x, atol=1e-12)


def test_the_memory_ends_when_everybody_is_there_again() -> None:
    algorithm = Remembering(AFL(ONE, patience=3))
    who = [np.arange(N - 1)] + 2 * [np.arange(N)]
    assert play(algorithm, who).memory is not None
    assert play(algorithm, [*who, np.arange(N)]).memory is None


def test_too_many_numbers_are_not_remembered() -> None:
    who = present(5, 6)
    state = play(Remembering(AFL(ONE), largest=0), who)
    assert state.memory is None
    np.testing.assert_array_equal(state.x, play(AFL(ONE), who).x)


@pytest.mark.parametrize("algorithm", ALL, ids=lambda a: type(a).__name__)
def test_engines_agree_and_checkpoints_hold_the_memory(algorithm: Any) -> None:
    who, wrapped = present(6, 8), Remembering(algorithm)
    state = play(wrapped, who)
    np.testing.assert_allclose(state.x, play(wrapped, who, "loop").x, atol=1e-10)
    half, tensors = play(wrapped, who[:4]), {}
    tree = pack(half, "state", tensors)
    clients = PROBLEM.clients("stacked")
    again = unpack(tree, tensors, wrapped.init(clients, half.x))
    for r, here in enumerate(who[4:], start=4):
        again, _ = wrapped.round(again, clients.subset(here), Stream(0).at("round", r))
    np.testing.assert_array_equal(again.x, state.x)


def test_probes_and_second_sums_are_left_alone() -> None:
    """Automatic steps measure the smoothness, and ask a second sum, as they would without."""
    clients, who = PROBLEM.clients("stacked"), np.arange(N - 1)
    algorithm = ScaffPD(CVaR(0.5), local=LocalSGD(lr=1.0, steps=4))
    x = torch.as_tensor(start(PROBLEM))
    plain = algorithm.round(algorithm.init(clients, x), clients.subset(who), Stream(0))[0]
    wrapped = Remembering(algorithm)
    state = wrapped.round(wrapped.init(clients, x), clients.subset(who), Stream(0))[0]
    assert state.inner.sizes == plain.sizes
    assert replace(state.inner, x=plain.x).weights.tolist() == plain.weights.tolist()
