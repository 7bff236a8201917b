"""Where algorithms without a correction end when they take one full step a round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.optima import saddle_point
from tests.problems import PROBLEMS, rounds, start

from equifed.algorithms import AFL, DRFA, QFedAvg, RFedFair, tilted_erm
from equifed.contract.local import LocalSGD
from equifed.objectives import ChiSquare, HeterogeneousCVaR, QFair, Tilted

PROBLEM = PROBLEMS["least squares"]
ONE = LocalSGD(lr=0.15, steps=1)


def end(algorithm: Any, count: int) -> tuple[Any, np.ndarray]:
    state, _ = rounds(algorithm, PROBLEM.clients("stacked"), start(PROBLEM), count)
    return state, state.x.numpy()


def test_rfedfair_minimises_the_smoothed_variational_form() -> None:
    """(5): stationary in model and threshold; its value is within Lemma 2's bound of HCVaR."""
    p, tails, mu = PROBLEM.sizes / PROBLEM.sizes.sum(), 0.5, 0.1
    state, x = end(RFedFair(ONE, tails, mu, output="last"), 150)
    losses = PROBLEM.losses(x)
    weights = p / tails / (1 + np.exp(-(losses - state.threshold) / mu))
    assert np.abs(weights @ PROBLEM.gradients(x)).max() < 1e-9
    assert weights.sum() == pytest.approx(1.0, abs=1e-9)
    value = p @ (mu * np.logaddexp(0, (losses - state.threshold) / mu) / tails) + state.threshold
    exact = HeterogeneousCVaR(tails, tuple(PROBLEM.sizes)).value(losses)
    assert exact <= value <= exact + mu * np.sum(p / tails)


@pytest.mark.long
@pytest.mark.parametrize("tilt", [-1.0, 3.0])
def test_tilted_erm_minimises_the_tilted_risk(tilt: float) -> None:
    _, x = end(tilted_erm(ONE, tilt), 150)
    gradient = Tilted(tilt).weights(PROBLEM.losses(x)) @ PROBLEM.gradients(x)
    assert np.abs(gradient).max() < 1e-8


@pytest.mark.long
@pytest.mark.parametrize("q", [0.5, 2.0])
def test_qfedavg_minimises_the_q_fair_objective(q: float) -> None:
    _, x = end(QFedAvg(ONE, q), 200)
    gradient = QFair(q).weights(PROBLEM.losses(x)) @ PROBLEM.gradients(x)
    assert np.abs(gradient).max() < 1e-8


@pytest.mark.long
@pytest.mark.parametrize(
    "algorithm",
    [AFL(ONE, 0.2, ChiSquare(0.3)), DRFA(ONE, 0.2, ChiSquare(0.3), ascent="full")],
    ids=["afl", "drfa"],
)
def test_primal_dual_descent_finds_the_saddle_point(algorithm: Any) -> None:
    solution, weights = saddle_point(PROBLEM, 0.3)
    state, x = end(algorithm, 200)
    np.testing.assert_allclose(x, solution, atol=1e-8)
    np.testing.assert_allclose(state.weights, weights, atol=1e-8)
