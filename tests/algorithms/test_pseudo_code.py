"""Agreement with a second, naive implementation of every algorithm's pseudo-code."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests import naive
from tests.problems import Problem, rounds, start

from equifed.algorithms import (
    AFL,
    DRFA,
    AgnosticFedAvg,
    DeltaFL,
    FedAvg,
    QFedAvg,
    RFedFair,
    Scaffold,
    ScaffPD,
    fedprox,
    qfedsgd,
    tilted_erm,
)
from equifed.contract.local import LocalSGD
from equifed.objectives import ChiSquare, CVaR, Euclidean, ProjectedGradient, WorstCase
from equifed.steps.schedules import ConstantSteps

ROUNDS = 4
WORK = LocalSGD(lr=0.05, steps=4)
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def by_size(problem: Problem) -> np.ndarray:
    return problem.sizes / problem.sizes.sum()


def uniform(problem: Problem) -> np.ndarray:
    return np.full(problem.n, 1 / problem.n)


def play(algorithm: object, problem: Problem, seed: int = 0) -> object:
    return rounds(algorithm, problem.clients(), start(problem), ROUNDS, seed)[0]


def equal(model: object, expected: object) -> None:
    np.testing.assert_allclose(model, expected, **CLOSE)


@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_fedavg(problem: Problem, weighting: str) -> None:
    p = by_size(problem) if weighting == "size" else uniform(problem)
    state = play(FedAvg(WORK, weighting, server_lr=0.7), problem)
    equal(state.x, naive.fedavg(problem, start(problem), ROUNDS, p, 0.05, 4, server_lr=0.7))


def test_fedprox(problem: Problem) -> None:
    expected = naive.fedavg(problem, start(problem), ROUNDS, by_size(problem), 0.05, 4, 0.3)
    equal(play(fedprox(0.3, WORK), problem).x, expected)


@pytest.mark.parametrize(
    ("fraction", "option", "weighting"),
    [(1.0, 1, "size"), (0.5, 1, "uniform"), (1.0, 2, "uniform"), (0.5, 2, "size")],
)
def test_scaffold_with_stored_variates(
    problem: Problem, fraction: float, option: int, weighting: str
) -> None:
    p = by_size(problem) if weighting == "size" else uniform(problem)
    variates = {1: "stored-gradient", 2: "stored"}[option]
    state = play(Scaffold(WORK, variates, weighting, fraction), problem, seed=3)
    given = (0.05, 4, fraction, 3, p, option)
    equal(state.x, naive.scaffold_stored(problem, start(problem), ROUNDS, *given))


def test_scaffold_with_fresh_variates(problem: Problem) -> None:
    expected = naive.scaffold_fresh(problem, start(problem), ROUNDS, 0.05, 4)
    equal(play(Scaffold(WORK, variates="fresh"), problem).x, expected)


@pytest.mark.parametrize(
    ("objective", "rho", "tail"),
    [
        (WorstCase(), 0.0, None),
        (CVaR(0.5), 0.0, 0.5),
        (ChiSquare(0.1), 0.1, None),
        (ChiSquare(0.1, CVaR(0.5)), 0.1, 0.5),
    ],
    ids=repr,
)
def test_scaff_pd(problem: Problem, objective: object, rho: float, tail: float | None) -> None:
    cap = 1.0 if tail is None else 1 / (tail * problem.n)
    steps = ConstantSteps(0.2, 0.4, extrapolation=0.9)
    state = play(ScaffPD(objective, WORK, steps), problem)
    x, weights = naive.scaff_pd(
        problem, start(problem), ROUNDS, rho, cap, 0.2, 0.4, 0.9, eta=0.05, steps=4
    )
    equal(state.x, x)
    equal(state.weights, weights)


@pytest.mark.parametrize("steps", [1, 4])
def test_afl(problem: Problem, steps: int) -> None:
    state = play(AFL(LocalSGD(lr=0.05, steps=steps), dual_step=0.1), problem)
    x, weights = naive.afl(problem, start(problem), ROUNDS, 0.05, 0.1, steps)
    equal(state.x, x)
    equal(state.weights, weights)


def test_afl_gives_out_the_means_of_its_rounds(problem: Problem) -> None:
    algorithm = AFL(LocalSGD(lr=0.05, steps=1), dual_step=0.1, output="average")
    state = play(algorithm, problem)
    visited = [naive.afl(problem, start(problem), r, 0.05, 0.1) for r in range(1, ROUNDS + 1)]
    equal(algorithm.model(state), np.mean([x for x, _ in visited], axis=0))
    equal(algorithm.weights(state), np.mean([weights for _, weights in visited], axis=0))


@pytest.mark.parametrize("by_hand", [False, True], ids=["", "onto"])
@pytest.mark.parametrize("radius", [None, 0.8])
@pytest.mark.parametrize("rho", [0.0, 0.2])
def test_drfa(problem: Problem, rho: float, radius: float | None, by_hand: bool) -> None:
    work = LocalSGD(lr=0.05, steps=4, radius=radius)
    if by_hand:  # the same set W, or all models, as a projection of the user's
        work = replace(work, radius=None, onto=lambda x: x * min(1, (radius or 1e9) / x.norm()))
    algorithm = DRFA(work, 0.03, ChiSquare(rho), clients_per_round=3, output="average")
    state = play(algorithm, problem, seed=5)
    x, weights, mean_x, mean_weights = naive.drfa(
        problem, start(problem), ROUNDS, 0.05, 4, 0.03, 3, seed=5, rho=rho, radius=radius
    )
    equal(state.x, x)
    equal(state.weights, weights)
    equal(algorithm.model(state), mean_x)
    equal(algorithm.weights(state), mean_weights)  # lambda-hat
    equal(replace(algorithm, output="last").weights(state), weights)


@pytest.mark.parametrize("printed", [False, True])
def test_drfa_with_full_dual_gradient(problem: Problem, printed: bool) -> None:
    dual = ProjectedGradient() if printed else Euclidean()
    algorithm = DRFA(WORK, 0.1, ChiSquare(0.2), ascent="full", dual=dual)
    state = play(algorithm, problem)
    x, weights = naive.drfa_gda(problem, start(problem), ROUNDS, 0.05, 4, 0.1, 0.2, printed)
    equal(algorithm.model(state), x)
    equal(state.weights, weights)


@pytest.mark.parametrize("clients_per_round", [None, 3])
def test_rfedfair(problem: Problem, clients_per_round: int | None) -> None:
    p = by_size(problem)
    tails = np.clip(np.linspace(0.4, 0.9, problem.n), p, 1)
    algorithm = RFedFair(
        WORK, tuple(tails), smoothing=0.2, threshold=0.5, clients_per_round=clients_per_round
    )
    state = play(algorithm, problem, seed=7)
    x, threshold, mean = naive.rfedfair(
        problem, start(problem), 0.5, ROUNDS, 0.05, 4, 0.2, tails, p, clients_per_round, seed=7
    )
    equal(state.x, x)
    equal(state.threshold, threshold)
    equal(algorithm.model(state), mean)


@pytest.mark.parametrize(
    ("q", "weighting"), [(0.0, "size"), (0.5, "uniform"), (2.0, "size"), (2.0, "uniform")]
)
def test_qfedavg(problem: Problem, q: float, weighting: str) -> None:
    p = by_size(problem) if weighting == "size" else uniform(problem)
    state = play(QFedAvg(WORK, q, weighting=weighting), problem)
    equal(state.x, naive.qfedavg(problem, start(problem), ROUNDS, q, 0.05, 4, p))


@pytest.mark.parametrize("q", [0.0, 0.5, 2.0])
def test_qfedsgd(problem: Problem, q: float) -> None:
    state = play(qfedsgd(lr=0.1, q=q), problem)
    equal(state.x, naive.qfedsgd(problem, start(problem), ROUNDS, q, big=10.0))


@pytest.mark.parametrize(
    ("level", "weighting"), [(0.25, "size"), (0.5, "uniform"), (0.9, "size"), (0.9, "uniform")]
)
def test_delta_fl(problem: Problem, level: float, weighting: str) -> None:
    p = by_size(problem) if weighting == "size" else uniform(problem)
    state = play(DeltaFL(WORK, level, weighting), problem)
    equal(state.x, naive.delta_fl(problem, start(problem), ROUNDS, 0.05, 4, level, p))


def test_agnostic_fedavg(problem: Problem) -> None:
    state = play(AgnosticFedAvg(WORK, dual_step=0.1), problem)
    x, weights = naive.agnostic_fedavg(problem, start(problem), ROUNDS, 0.05, 4, 0.1)
    equal(state.x, x)
    equal(state.weights, weights)


@pytest.mark.parametrize("tilt", [-1.0, 0.0, 2.0])
def test_tilted_erm(problem: Problem, tilt: float) -> None:
    state = play(tilted_erm(WORK, tilt), problem)
    equal(state.x, naive.tilted(problem, start(problem), ROUNDS, 0.05, 4, tilt))
