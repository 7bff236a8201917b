"""Excess risk: the inner objective of shifted losses, in value, weights, penalty and steps."""

from __future__ import annotations

import cvxpy as cp
import numpy as np
import pytest
from tests.problems import classification

from equifed.algorithms.scaff_pd import ScaffPD
from equifed.engines.simulate import simulate
from equifed.objectives import (
    KL,
    Average,
    ChiSquare,
    CVaR,
    ExcessRisk,
    Proportional,
    QFair,
    WorstCase,
)
from equifed.testing import check_objective
from equifed.training.loop import train

SHIFT = (0.3, -0.2, 1.5, 0.0, 0.7, 0.7)
BASES = [
    Average(),
    WorstCase(),
    CVaR(0.4),
    ChiSquare(0.3, scale=1.0),
    ChiSquare(0.1, CVaR(0.5), scale=1.0),
    KL(0.5, scale=1.0),
]


@pytest.mark.parametrize("base", BASES, ids=repr)
def test_it_keeps_the_contract(base) -> None:
    check_objective(ExcessRisk(SHIFT, base), clients=(6,))


@pytest.mark.parametrize("base", BASES, ids=repr)
def test_it_is_the_base_of_shifted_losses(base) -> None:
    draw, b = np.random.default_rng(0), np.array(SHIFT)
    for _ in range(20):
        losses = draw.uniform(0, 3, 6)
        excess = ExcessRisk(SHIFT, base)
        assert excess.value(losses) == base.value(losses - b)
        np.testing.assert_array_equal(excess.weights(losses), base.weights(losses - b))
        assert ExcessRisk((0.0,) * 6, base).value(losses) == base.value(losses)


@pytest.mark.parametrize("rho", [0.0, 0.3])
def test_the_dual_step_is_that_of_a_solver(rho) -> None:
    draw, b = np.random.default_rng(1), np.array(SHIFT)
    for step in (0.1, 2.0):
        point = draw.normal(size=6)
        w = cp.Variable(6)
        penalty = rho * 6 / 2 * cp.sum_squares(w - 1 / 6) + b @ w
        goal = cp.Minimize(step * penalty + cp.sum_squares(w - point) / 2)
        cp.Problem(goal, [w >= 0, cp.sum(w) == 1]).solve(solver="CLARABEL")
        found = ExcessRisk(SHIFT, ChiSquare(rho, scale=1.0)).prox(point, step)
        np.testing.assert_allclose(found, w.value, atol=1e-6)


@pytest.mark.long
def test_training_certifies_the_largest_regret() -> None:
    clients = simulate(classification(), "logistic", l2=0.1)
    n = len(clients.names)
    b = tuple(np.linspace(0.0, 0.4, n))
    history = train(ScaffPD(ExcessRisk(b, ChiSquare(0.1, scale=1.0))), clients, rounds=60)
    proof = history.certificate()
    assert isinstance(proof, dict) and proof["gap"] < 0.05
    losses = clients.losses(clients.flatten(history.parameters), None)
    assert history.summary()["objective"] == pytest.approx(
        ChiSquare(0.1, scale=1.0).value(losses - np.array(b)), abs=1e-5
    )


def test_wrong_settings_are_refused() -> None:
    for base in (QFair(1.0), Proportional(1.0, scale=1.0)):
        with pytest.raises(ValueError, match="excess losses may be negative"):
            ExcessRisk(SHIFT, base)
    with pytest.raises(ValueError, match="baselines: 6 entries for 2 clients"):
        ExcessRisk(SHIFT).value(np.ones(2))
    with pytest.raises(ValueError, match="nan at position 1"):
        ExcessRisk((0.0, float("nan")))
