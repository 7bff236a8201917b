"""The certificate: an upper bound on what an interior-point solver finds, wherever it is asked."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.optima import interior_point
from tests.problems import convex_problem
from torch import nn

from equifed.contract.curvature import Curvature
from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.engines.in_process import InProcessClients
from equifed.engines.simulate import simulate
from equifed.models import curvature
from equifed.objectives import (
    KL,
    Average,
    ChiSquare,
    CVaR,
    Proportional,
    SaddleObjective,
    WorstCase,
)
from equifed.steps.certificate import Certificate, certificate

pytestmark = pytest.mark.long

OBJECTIVES = {
    "average": Average(),
    "worst case": WorstCase(),
    "CVaR": CVaR(0.4),
    "chi-square": ChiSquare(0.1),
    "KL": KL(0.5),
}
SEEDS = (24, 35)  # small problems of either kind


@cache
def optimum(seed: int, name: str) -> tuple[float, np.ndarray]:
    return interior_point(convex_problem(seed), OBJECTIVES[name])


@cache
def engine(seed: int) -> InProcessClients:
    clients = convex_problem(seed).clients()
    return clients


def proof_at(
    seed: int, objective: SaddleObjective, x: np.ndarray, point: np.ndarray
) -> tuple[Certificate | str, float]:
    """The certificate at x with the feasible weights nearest to a point, and the objective."""
    clients = engine(seed)
    losses, gradients = clients.value_and_gradient(torch.as_tensor(x), Stream(0))
    weights = objective.prox(point, 0.0)
    known = clients.curvature()
    assert isinstance(known, Curvature)
    gradient = gradients.weighted_sum(weights)
    return certificate(objective, known, losses, weights, gradient), objective.value(losses)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("seed", SEEDS)
@settings(deadline=None, max_examples=15)
@given(draw=st.integers(0, 2**32 - 1), near=st.floats(-8, 1))
def test_no_model_and_weights_have_a_certificate_below_the_true_gap(
    seed: int, name: str, draw: int, near: float
) -> None:
    best, solution = optimum(seed, name)
    random = np.random.default_rng(draw)
    x = solution + 10**near * random.standard_normal(len(solution))
    n = convex_problem(seed).n
    proof, value = proof_at(seed, OBJECTIVES[name], x, random.dirichlet(np.ones(n)))
    assert isinstance(proof, Certificate)
    assert proof.gap >= value - best - 1e-8 * abs(best)
    assert proof.distance >= np.linalg.norm(x - solution) - 1e-3


def test_for_one_sphere_the_certificate_is_the_gap() -> None:
    """One client with loss |x - 1|^2: strong convexity is smoothness, so nothing is lost."""
    federation = Federation.from_clients(
        {"only": (np.eye(3) * np.sqrt(3), np.sqrt(3) * np.ones(3))}
    )
    clients = simulate(federation, nn.Linear(3, 1, bias=False), "squared", dtype=torch.float64)
    x = torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64)
    losses, gradients = clients.value_and_gradient(x, Stream(0))
    known = clients.curvature()
    assert isinstance(known, Curvature)
    weights = np.ones(1)
    proof = certificate(Average(), known, losses, weights, gradients.weighted_sum(weights))
    assert isinstance(proof, Certificate)
    np.testing.assert_allclose(proof.gap, 5.0, rtol=1e-10)
    np.testing.assert_allclose(proof.distance, np.sqrt(5.0), rtol=1e-10)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("samples", [3, 12])
def test_known_curvature_is_that_of_the_data(bias: bool, samples: int) -> None:
    random = np.random.default_rng(0)
    data = [random.normal(size=(samples, 5)) for _ in range(3)]
    labels = np.arange(samples) % 2
    federation = Federation.from_clients({f"c{i}": (a, labels) for i, a in enumerate(data)})
    for loss, outputs, factor in (("squared", 2, 2.0), ("logistic", 1, 0.25)):
        module = nn.Sequential(nn.Flatten(), nn.Linear(5, outputs, bias=bias))
        known = simulate(federation, module, loss, l2=0.1, dtype=torch.float64).curvature()
        assert isinstance(known, Curvature)
        for i, a in enumerate(data):
            full = np.column_stack([a, np.ones(samples)]) if bias else a
            values = np.linalg.eigvalsh(full.T @ full / samples)
            np.testing.assert_allclose(known.smoothness[i], factor * values[-1] + 0.1)
            least = 2 * max(values[0], 0) + 0.1 if loss == "squared" else 0.1
            np.testing.assert_allclose(known.strong_convexity[i], least, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "value"), [("EIGENVALUE_WORK", 0.0), ("MOST_CLIENTS", 1)], ids=lambda v: str(v)
)
def test_cheaper_bounds_are_bounds(
    name: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = convex_problem(24).clients().curvature()
    monkeypatch.setattr(curvature, name, value)
    cheap = convex_problem(24).clients().curvature()
    assert isinstance(exact, Curvature) and isinstance(cheap, Curvature)
    assert (cheap.smoothness >= exact.smoothness).all()
    assert (cheap.strong_convexity <= exact.strong_convexity).all()
    assert (cheap.strong_convexity > 0).all() and not cheap.tight


@settings(deadline=None, max_examples=25)
@given(draw=st.integers(0, 2**32 - 1))
def test_the_modulus_is_below_every_eigenvalue_of_the_weighted_hessian(draw: int) -> None:
    random = np.random.default_rng(draw)
    factors = random.normal(size=(4, 6, 3))
    hessians = np.einsum("nmd,nme->nde", factors, factors)
    values = np.linalg.eigvalsh(hessians)
    weights = random.normal(size=4)
    weights /= weights.sum()
    bounds = Curvature(values[:, -1], values[:, 0])
    least = np.linalg.eigvalsh(np.einsum("n,nde->de", weights, hessians))[0]
    assert bounds.modulus(weights) <= least + 1e-9
    assert bounds.least_modulus(float(np.abs(weights).sum())) <= bounds.modulus(weights) + 1e-9


def test_a_gap_is_not_below_the_rounding_of_an_objective_that_is_mostly_penalty():
    """With utilities of about 100, weights are 1/100 and the objective is its penalty."""
    objective, losses = Proportional(100.0, 0.2), np.array([1.0, 2.0, 2.5])
    bounds, weights = Curvature(np.ones(3), np.ones(3)), objective.weights(losses)
    found = certificate(objective, bounds, losses, weights, torch.zeros(2, dtype=torch.float64))
    assert isinstance(found, Certificate)
    assert found.gap >= np.finfo(np.float64).eps * abs(objective.value(losses)) > 1e-16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("modulus", [1e-12, 1.0])
def test_rounding_is_added_to_every_bound(dtype: torch.dtype, modulus: float) -> None:
    """Of the formula, and of the distance to the smallest value that there can be."""
    losses, weights = np.array([0.3, 0.5]), np.array([0.5, 0.5])
    bounds = Curvature(np.ones(2), np.full(2, modulus), lowest=0.0)
    found = certificate(Average(), bounds, losses, weights, torch.tensor([0.1], dtype=dtype))
    assert isinstance(found, Certificate)
    exact = min(float(torch.tensor(0.1, dtype=dtype)) ** 2 / (2 * modulus), 0.4)
    rounding = 8 * float(torch.finfo(dtype).eps) * 0.4
    assert (found.uncapped is not None) == (modulus < 1)
    assert found.gap - exact == pytest.approx(rounding, rel=1e-6, abs=1e-16)
