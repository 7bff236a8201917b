"""The choice of phi against dense algebra, and what it does to real losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from tests.problems import PROBLEMS

from equifed.algorithms.scaff_pd import ScaffPD
from equifed.algorithms.scaff_pd_ia import ScaffPDIA
from equifed.contract.streams import Stream
from equifed.objectives import CVaR, RelativeFairness
from equifed.steps.phi import LARGEST_PHI, best_phi, choose_phi, inverse_product
from equifed.training import checkpoints
from equifed.training.loop import train

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


@pytest.mark.long
def test_the_chosen_phi_narrows_the_ratio_and_is_announced() -> None:
    problem = PROBLEMS["least squares"]
    clients, sides = problem.clients("stacked"), (CVaR(0.5), CVaR(0.5))
    algorithm = ScaffPDIA("auto", *sides, warmup=40)
    history = train(algorithm, clients, rounds=100)
    phis = [r.numbers["phi"] for r in history.rounds]
    assert phis[:40] == [0.0] * 40 and len(set(phis[40:])) == 1 and 0 < phis[40] < 1
    (note,) = (e for e in history.events if f"phi = {phis[40]:.4g}" in e["reason"])
    assert note["round"] == 41 and "predicted" in note["reason"]
    assert history.parameters is not None
    ratios = []
    for rounds in (40, 100):
        done = train(algorithm, clients, rounds=rounds)
        assert done.parameters is not None
        losses = clients.losses(
            torch.cat([p.flatten() for p in done.parameters.values()]), Stream(0)
        )
        a, b = RelativeFairness(0.0, *sides).extremes(losses)
        ratios.append((a @ losses) / (b @ losses))
    assert ratios[1] < ratios[0]


def test_a_given_phi_is_scaff_pd_with_that_objective() -> None:
    """Reduction: the same numbers, round by round."""
    problem = PROBLEMS["logistic"]
    clients, start = problem.clients(), torch.zeros(problem.d, dtype=torch.float64)
    given, plain = ScaffPDIA(0.2), ScaffPD(RelativeFairness(0.2))
    one, other = given.init(clients, start), plain.init(clients, start)
    for r in range(5):
        one, _ = given.round(one, clients, Stream(0).at("round", r))
        other, _ = plain.round(other, clients, Stream(0).at("round", r))
    assert torch.equal(one.x, other.x)
    np.testing.assert_array_equal(one.weights, other.weights)


def test_a_state_with_a_chosen_phi_survives_a_checkpoint(tmp_path: Path) -> None:
    problem = PROBLEMS["least squares"]
    clients, algorithm = problem.clients(), ScaffPDIA(warmup=2)
    template = state = algorithm.init(clients, torch.zeros(problem.d, dtype=torch.float64))
    for r in range(4):
        state, _ = algorithm.round(state, clients, Stream(0).at("round", r))
    checkpoints.save(tmp_path, 4, state, {})
    _, loaded, _ = checkpoints.load(tmp_path, template)
    after = [algorithm.round(s, clients, Stream(0).at("round", 4))[0] for s in (state, loaded)]
    assert torch.equal(after[0].x, after[1].x) and after[0].phi == after[1].phi


@pytest.mark.parametrize("wrong", [{"phi": "often"}, {"phi": 1.0}, {"warmup": 0}])
def test_nonsense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ScaffPDIA(**wrong)
