"""The choice of phi against dense algebra, and what it does to real losses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from tests.problems import PROBLEMS

from equifed.algorithms.scaff_pd import ScaffPD
from equifed.choose_phi import (
    LARGEST_PHI,
    best_phi,
    choose_phi,
    inverse_product,
    train_with_chosen_phi,
)
from equifed.objectives import CVaR, RelativeFairness, WorstCase
from equifed.streams import Stream

positive = st.floats(1e-3, 1e3)


@settings(deadline=None)
@given(high=positive, low=positive, bend=positive)
def test_phi_minimises_the_predicted_unfairness(high: float, low: float, bend: float) -> None:
    """(8) against a generic minimiser of (a + c phi^2 / 2) (b + c phi)^(-1/2)."""
    found = minimize_scalar(
        lambda phi: np.log(high + bend * phi**2 / 2) - 0.5 * np.log(low + bend * phi),
        bounds=(0, LARGEST_PHI), method="bounded", options={"xatol": 1e-10},
    )  # fmt: skip
    np.testing.assert_allclose(best_phi(high, low, bend), found.x, atol=1e-4)


def test_phi_stays_within_bounds_and_exists_at_zero_losses() -> None:
    assert best_phi(1e9, 1e-9, 1e-9) == LARGEST_PHI
    assert best_phi(0.0, 1.0, 1.0) == 0
    assert best_phi(1.0, 0.0, 0.0) == LARGEST_PHI


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), d=st.integers(1, 8))
def test_conjugate_gradients_equal_a_dense_solve(seed: int, d: int) -> None:
    random = np.random.default_rng(seed)
    factor = random.normal(size=(d + 3, d))
    matrix, g = factor.T @ factor, random.normal(size=d)
    dense = torch.as_tensor(matrix)
    found, used = inverse_product(lambda v: dense @ v, torch.as_tensor(g), 1e-10, 100)
    np.testing.assert_allclose(found, g @ np.linalg.solve(matrix, g), rtol=1e-6)
    assert used <= 3 * d + 3


def test_negative_curvature_ends_the_search() -> None:
    found, used = inverse_product(lambda v: -v, torch.ones(3), 1e-6, 100)
    assert (found, used) == (0.0, 1)


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_constant_is_that_of_the_hessians(name: str) -> None:
    problem = PROBLEMS[name]
    clients, objective = problem.clients(), RelativeFairness(0.0, CVaR(0.5), CVaR(0.5))
    x = np.random.default_rng(0).normal(size=problem.d)
    choice = choose_phi(clients, torch.as_tensor(x), objective, Stream(0))
    losses = problem.losses(x)
    a, b = objective.extremes(losses)
    hessian = sum(w * problem.hessian_of(i, x) for i, w in enumerate(a))
    g = b @ problem.gradients(x)
    np.testing.assert_allclose(choice.bend, g @ np.linalg.solve(hessian, g), rtol=1e-4)
    np.testing.assert_allclose((choice.high, choice.low), (a @ losses, b @ losses))
    np.testing.assert_allclose(choice.phi, best_phi(choice.high, choice.low, choice.bend))


def test_the_chosen_phi_narrows_the_ratio_and_is_announced() -> None:
    problem = PROBLEMS["least squares"]
    clients, said = problem.clients("stacked"), []
    objective = RelativeFairness(0.5, CVaR(0.5), CVaR(0.5))
    history, choice = train_with_chosen_phi(ScaffPD(objective), clients, rounds=60, say=said.append)
    assert 0 < choice.phi < 1
    assert f"phi = {choice.phi:.4g}" in said[0] and "predicted" in said[0]
    assert history.parameters is not None
    x = torch.cat([p.flatten() for p in history.parameters.values()]).to(torch.float64)
    losses = clients.losses(x, Stream(0))
    a, b = objective.extremes(losses)
    before = choice.high / choice.low
    assert (a @ losses) / (b @ losses) < before


def test_only_relative_fairness_has_a_phi() -> None:
    with pytest.raises(ValueError, match="RelativeFairness"):
        train_with_chosen_phi(ScaffPD(WorstCase()), PROBLEMS["logistic"].clients(), rounds=1)
