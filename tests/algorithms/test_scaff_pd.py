"""SCAFF-PD at and towards solutions that a generic solver found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.optima import saddle_point
from tests.problems import PROBLEMS, LeastSquares, Problem, rounds, start

from equifed.algorithms import AFL, ScaffPD
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.datasets.small import synthetic_regression
from equifed.objectives import ChiSquare, CVaR, RelativeFairness, WorstCase
from equifed.steps.schedules import ConstantSteps

OBJECTIVES = {
    "worst case": (WorstCase(), 0.0, None),
    "CVaR": (CVaR(0.5), 0.0, 0.5),
    "chi-square": (ChiSquare(0.1), 0.1, None),
}


@pytest.mark.long
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_scaff_pd_stays_at_a_saddle_point(problem: Problem, name: str) -> None:
    objective, rho, tail = OBJECTIVES[name]
    x, weights = saddle_point(problem, rho, tail)
    algorithm = ScaffPD(objective, LocalSGD(lr=0.02, steps=5), ConstantSteps(0.1, 0.2))
    clients = problem.clients()
    state = replace(algorithm.init(clients, torch.as_tensor(x)), weights=weights)
    for r in range(10):
        state, _ = algorithm.round(state, clients, Stream(0).at("round", r))
    np.testing.assert_allclose(state.x, x, atol=1e-10)
    np.testing.assert_allclose(state.weights, weights, atol=1e-10)


def test_plain_local_steps_leave_a_saddle_point() -> None:
    """The fixed point is the correction's merit: AFL with local steps drifts away from it."""
    problem = PROBLEMS["least squares"]
    x, weights = saddle_point(problem, 0.1)
    algorithm = AFL(LocalSGD(lr=0.02, steps=5), 0.2, ChiSquare(0.1))
    clients = problem.clients()
    state = replace(algorithm.init(clients, torch.as_tensor(x)), weights=weights)
    for r in range(10):
        state, _ = algorithm.round(state, clients, Stream(0).at("round", r))
    assert np.abs(state.x.numpy() - x).max() > 1e-4


def regression() -> LeastSquares:
    """The synthetic regression of SCAFF-PD's Section 6.1 with c = 1, sigma = 0.1, mu = 0.1."""
    train = synthetic_regression().train
    pairs = [train.client(i) for i in range(5)]
    return LeastSquares(tuple(a for a, _ in pairs), tuple(y for _, y in pairs), 0.1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("rho", "primal", "local", "bound"),
    [
        (0.1, 0.4, 0.003, 1e-10),
        (0.05, 0.5, 0.002, 1e-10),
        (0.01, 0.3, 0.003, 1e-9),
    ],
)
def test_the_papers_regression(rho: float, primal: float, local: float, bound: float) -> None:
    """J = 100 local steps with full gradients reach the solution within 60 rounds."""
    problem = regression()
    solution, _ = saddle_point(problem, rho)
    algorithm = ScaffPD(
        ChiSquare(rho), LocalSGD(lr=local, steps=100), ConstantSteps(primal, 1.0, 0.9)
    )
    clients = problem.clients("stacked")
    state, distance = algorithm.init(clients, torch.zeros(10, dtype=torch.float64)), np.inf
    for r in range(60):
        state, _ = algorithm.round(state, clients, Stream(0).at("round", r))
        distance = np.sum((state.x.numpy() - solution) ** 2)
        if distance <= bound:
            break
    assert distance <= bound


@pytest.mark.long
def test_signed_weights_reach_a_saddle_point() -> None:
    """SCAFF-PD-IA: a stationary point with the best response of the weights, two negative."""
    problem = PROBLEMS["more clients"]
    objective = RelativeFairness(phi=0.3, rho=0.05)
    algorithm = ScaffPD(objective, LocalSGD(lr=0.2 / 3, steps=3), ConstantSteps(0.2, 0.5))
    state, _ = rounds(algorithm, problem.clients("stacked"), start(problem), 130)
    x, weights = state.x.numpy(), state.weights
    assert np.sort(weights)[1] < -0.1
    assert np.abs(weights @ problem.gradients(x)).max() < 1e-9
    np.testing.assert_allclose(weights, objective.weights(problem.losses(x)), atol=1e-8)


def test_losses_are_exact_where_gradients_are_of_minibatches() -> None:
    """The paper's setting and the default: one exchange more, and l of all samples."""
    problem, steps = PROBLEMS["least squares"], ConstantSteps(0.1, 0.2)
    x, local = start(problem), LocalSGD(lr=0.02, steps=2, batch_size=2)
    given = {"local": local, "steps": steps, "gradient_batch_size": 2}
    exact, clients = ScaffPD(CVaR(0.5), **given), problem.clients()
    _, (info,) = rounds(exact, clients, x, 1)
    np.testing.assert_allclose(info.losses, problem.losses(x), atol=1e-12)
    assert isinstance(info.proof, str)
    assert clients.traffic.exchanges == 3
    noisy, clients = ScaffPD(CVaR(0.5), **given, loss_batch_size=2), problem.clients()
    _, (info,) = rounds(noisy, clients, x, 1)
    assert np.abs(info.losses - problem.losses(x)).max() > 1e-3
    assert clients.traffic.exchanges == 2
    full, clients = ScaffPD(CVaR(0.5), LocalSGD(lr=0.02, steps=2), steps), problem.clients()
    rounds(full, clients, x, 1)
    assert clients.traffic.exchanges == 2


def test_exact_losses_leave_the_dual_step_alone() -> None:
    """Only the model feels the minibatches: the weights of a round do not depend on the draw."""
    problem = PROBLEMS["least squares"]
    local = LocalSGD(lr=0.02, steps=2, batch_size=2)
    algorithm = ScaffPD(CVaR(0.5), local, ConstantSteps(0.1, 0.2), gradient_batch_size=2)
    one, other = (rounds(algorithm, problem.clients(), start(problem), 1, s)[0] for s in (1, 2))
    np.testing.assert_array_equal(one.weights, other.weights)
    assert not torch.equal(one.x, other.x)


@pytest.mark.parametrize("batches", [(None, None), (2, None), (None, 2), (2, 2)])
def test_losses_and_control_variates_have_batches_of_their_own(
    batches: tuple[int | None, int | None],
) -> None:
    """The round in NumPy: with c_i of the minibatches that were asked for, and full local steps."""
    problem, eta, steps = PROBLEMS["more clients"], 0.05, 3
    x = start(problem)
    fair = ScaffPD(
        CVaR(0.5), LocalSGD(lr=eta, steps=steps), ConstantSteps(eta * steps, 0.3),
        gradient_batch_size=batches[0], loss_batch_size=batches[1],
    )  # fmt: skip
    state, (info,) = rounds(fair, problem.clients(), x, 1)
    assert np.allclose(info.losses, problem.losses(x)) == (batches[1] is None)
    assert (batches == (None, None)) == (not isinstance(info.proof, str))
    stream = Stream(0).at("round", 1).at("gradient")
    c = problem.clients().value_and_gradient(torch.as_tensor(x), stream, batches[0])[1]
    control = np.array([c.weighted_sum(row).numpy() for row in np.eye(problem.n)])
    ends = np.tile(x, (problem.n, 1))
    for _ in range(steps):
        for i, u in enumerate(ends):
            ends[i] = u - eta * (problem.gradient_of(i, u) - control[i] + info.weights @ control)
    np.testing.assert_allclose(state.x.numpy(), x + info.weights @ (ends - x), atol=1e-10)
