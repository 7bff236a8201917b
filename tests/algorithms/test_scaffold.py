"""SCAFFOLD's stored variates: where it ends under partial participation, and its two options."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from tests.problems import PROBLEMS, LeastSquares, rounds, start

from equifed.algorithms import Scaffold
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.engines.ordered_sums import DenseVectors

pytestmark = pytest.mark.long

PROBLEM = PROBLEMS["least squares"]
STORED = ["stored", "stored-gradient"]


def solution(problem: LeastSquares, p: np.ndarray) -> np.ndarray:
    """Return the weighted least-squares solution, from the normal equations."""
    zero = np.zeros(problem.d)
    hessian = sum(p[i] * problem.hessian_of(i, zero) for i in range(problem.n))
    return np.linalg.solve(hessian, -p @ problem.gradients(zero))


def shares(weighting: str) -> np.ndarray:
    raw = PROBLEM.sizes if weighting == "size" else np.ones(PROBLEM.n)
    return raw / raw.sum()


@pytest.mark.parametrize("variates", STORED)
@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_it_converges_to_the_weighted_solution_with_half_of_the_clients(
    weighting: str, variates: str
) -> None:
    """Version 0.1 weighed the variates over the sample and ended elsewhere."""
    algorithm = Scaffold(LocalSGD(lr=0.03, steps=4), variates, weighting, participation=0.5)
    state, _ = rounds(algorithm, PROBLEM.clients("stacked"), start(PROBLEM), 400)
    np.testing.assert_allclose(state.x, solution(PROBLEM, shares(weighting)), atol=1e-6)


@pytest.mark.parametrize("variates", STORED)
@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_it_stays_at_the_solution_whoever_is_there(weighting: str, variates: str) -> None:
    p, clients = shares(weighting), PROBLEM.clients()
    x = solution(PROBLEM, p)
    algorithm = Scaffold(LocalSGD(lr=0.05, steps=3), variates, weighting)
    memory = DenseVectors(torch.as_tensor(PROBLEM.gradients(x)))
    for here in itertools.combinations(range(PROBLEM.n), 2):
        state = algorithm.init(clients, torch.as_tensor(x))
        state = type(state)(state.x, state.variate, memory)
        for r in range(3):
            state, _ = algorithm.round(state, clients.subset(here), Stream(0).at("round", r))
        np.testing.assert_allclose(state.x, x, atol=1e-12)
        np.testing.assert_allclose(state.variate, 0, atol=1e-12)


@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_the_servers_variate_is_the_weighted_sum_of_the_clients(weighting: str) -> None:
    clients, p = PROBLEM.clients(), shares(weighting)
    for variates in STORED:
        algorithm = Scaffold(LocalSGD(lr=0.05, steps=3), variates, weighting, participation=0.5)
        state, _ = rounds(algorithm, clients, start(PROBLEM), 9)
        np.testing.assert_allclose(state.variate, state.variates.weighted_sum(p), atol=1e-12)


def test_with_one_local_step_the_two_options_are_one() -> None:
    """The mean gradient along one step is the gradient at its start."""
    one, other = (
        rounds(Scaffold(LocalSGD(lr=0.1, steps=1), v), PROBLEM.clients(), start(PROBLEM), 6)[0]
        for v in STORED
    )
    np.testing.assert_allclose(one.x, other.x, atol=1e-14)
