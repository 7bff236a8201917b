"""The automatic rule, line by line of its docstring."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.problems import LeastSquares, least_squares

from equifed.algorithms import ScaffPD
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.engines.ordered_sums import DenseVectors
from equifed.objectives import CVaR
from equifed.steps.automatic import AutoSizes, AutoSteps
from equifed.steps.schedules import Problem, WeightChange

PROBLEM = least_squares(1, n=4, d=3)


def turned(coupling: float) -> WeightChange:
    """Weights that turned from the first client to the second, whose gradients couple so much."""
    change, weights = np.array([-0.1, 0.1]), np.array([0.4, 0.6])
    length = np.sqrt(2 * coupling)  # |sum_i dw_i g_i|^2 / |dw|^2 for opposite gradients: length^2/2
    rows = torch.tensor([[0.0, 0.0], [length, 0.0]], dtype=torch.float64)
    return WeightChange(change, weights, DenseVectors(rows))


@given(coupling=st.floats(1e-6, 1e6), primal=st.floats(1e-3, 1e3), dual=st.floats(1e-3, 1e3))
def test_the_dual_step_follows_the_coupling_at_most_twofold(
    coupling: float, primal: float, dual: float
) -> None:
    before = AutoSizes(primal, dual, 1.0, primal / 5)
    after = AutoSteps().next(before, turned(coupling))
    assert after.steepest == pytest.approx(coupling)
    wanted = 0.7 / (primal * coupling)
    assert after.dual == pytest.approx(min(max(wanted, dual / 2), 2 * dual))
    assert (after.primal, after.local) == (before.primal, before.local)


def test_a_steep_round_is_forgotten_by_a_fifth_a_round() -> None:
    sizes = AutoSizes(0.1, 1.0, 1.0, 0.02, steepest=10.0)
    assert AutoSteps().next(sizes, turned(1.0)).steepest == pytest.approx(8.0)
    assert AutoSteps().next(sizes, turned(9.0)).steepest == pytest.approx(9.0)


def test_each_halving_has_halved_the_dual_step_too() -> None:
    """After a halving T is T / 2 and sigma is sigma / 2: sigma T K falls to a quarter of 0.7."""
    sizes = AutoSizes(0.1, 7.0, 1.0, 0.02)
    assert AutoSteps().next(sizes, turned(1.0)).dual == pytest.approx(7.0)
    halved = sizes.halved()
    assert (halved.primal, halved.dual, halved.local) == (0.05, 3.5, 0.01)
    assert AutoSteps().next(halved, turned(1.0)).dual == pytest.approx(3.5)


def test_weights_that_did_not_turn_change_nothing() -> None:
    sizes = AutoSizes(0.1, 1.0, 1.0, 0.02)
    assert AutoSteps().next(sizes, replace(turned(1.0), change=np.zeros(2))) == sizes


@pytest.mark.parametrize(
    ("local", "horizon"),
    [
        (LocalSGD(lr=1.0, steps=10), 4.0),
        (LocalSGD(lr=1.0, steps=3), 3.0),
        (LocalSGD(lr=1.0, steps=10, batch_size=2), 2.0),
    ],
    ids=["many steps", "few steps", "minibatches"],
)
def test_the_first_sizes_are_those_of_the_rule(local: LocalSGD, horizon: float) -> None:
    clients, x = PROBLEM.clients(), PROBLEM.start()
    gradients = clients.value_and_gradient(x, Stream(0))[1]
    problem = Problem(ScaffPD(CVaR(0.5), local), clients, x, gradients, Stream(0))
    sizes = AutoSteps(smoothness=5.0).start(problem)
    time, squares = horizon / 5.0, float((PROBLEM.gradients(x.numpy()) ** 2).sum())
    assert sizes.primal == pytest.approx(time)
    assert sizes.local == pytest.approx(time / local.steps)
    assert sizes.dual == pytest.approx(0.7 / (time * squares))
    assert (sizes.extrapolation, sizes.smoothness) == (1.0, 5.0)


def test_the_longest_walk_of_unequal_clients_is_as_long_as_the_models_step() -> None:
    """eta J = T for the client with most samples, and less for the others."""
    problem = LeastSquares(
        (np.eye(3)[:1], np.ones((7, 3)), np.eye(3)), (np.ones(1), np.ones(7), np.ones(3)), 0.1
    )
    clients, x = problem.clients(), problem.start()
    gradients = clients.value_and_gradient(x, Stream(0))[1]
    local = LocalSGD(lr=1.0, epochs=1, batch_size=2)
    asked = Problem(ScaffPD(CVaR(0.5), local), clients, x, gradients, Stream(0))
    sizes = AutoSteps(smoothness=5.0).start(asked)
    assert max(local.steps_for(clients.sizes)) == 4
    assert 4 * sizes.local == pytest.approx(sizes.primal)
