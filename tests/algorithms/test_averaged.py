"""The mean of the iterates: its formula, its weights, and how it goes with other wrappers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.optima import interior_point
from tests.problems import PROBLEMS, rounds, start

from equifed.algorithms import AFL, Averaged, FedAvg, ScaffPD
from equifed.algorithms.around import Certified
from equifed.algorithms.safeguarded import Safeguarded
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.objectives import CVaR
from equifed.steps import AcceleratedSteps, ConstantSteps, LinearRateSteps
from equifed.training.loop import train

pytestmark = pytest.mark.long

PROBLEM = PROBLEMS["more clients"]
WORK = LocalSGD(lr=0.05, steps=2)


def iterates(algorithm: Any, count: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    clients = PROBLEM.clients("stacked")
    state, models, weights = algorithm.init(clients, torch.as_tensor(start(PROBLEM))), [], []
    for r in range(1, count + 1):
        state, info = algorithm.round(state, clients, Stream(0).at("round", r))
        models.append(state.x.numpy())
        weights.append(info.weights)
    return models, weights


@given(decay=st.sampled_from([0.0, 1.0, 3.0]), count=st.integers(1, 12))
@settings(deadline=None, max_examples=15)
def test_it_is_the_polynomially_weighted_mean(decay: float, count: int) -> None:
    """For a whole decay, round s of t has the share of binomial(s - 1 + decay, decay)."""
    models, weights = iterates(AFL(WORK), count)
    order = int(decay)
    raw = np.array([np.prod([s + k for k in range(order)]) for s in range(1, count + 1)])
    share = raw / raw.sum()
    state, _ = rounds(Averaged(AFL(WORK), decay), PROBLEM.clients("stacked"), start(PROBLEM), count)
    np.testing.assert_allclose(state.mean, share @ np.array(models), atol=1e-12)
    np.testing.assert_allclose(state.weights, share @ np.array(weights), atol=1e-12)
    np.testing.assert_array_equal(state.x, models[-1])


@pytest.mark.parametrize(
    "steps",
    [
        AcceleratedSteps(2.0, 1.5, 1.0, 4, balance=0.5),
        LinearRateSteps(0.02, 0.02, 0.1, 4, dual_strong_convexity=0.5),
        ConstantSteps(0.05, 0.1, 0.5),
    ],
    ids=["accelerated", "linear", "half"],
)
def test_the_ergodic_mean_has_the_weights_of_the_proof(steps: Any) -> None:
    """t_r = sigma_r / sigma_0 for Condition 5.1 (E.34), theta^-r where theta is constant (E.22)."""
    inner, clients = ScaffPD(CVaR(0.5), WORK, steps), PROBLEM.clients("stacked")
    models, weights = iterates(inner, 9)
    state, infos = rounds(Averaged(inner, "ergodic"), clients, start(PROBLEM), 9)
    sigma = np.array([info.numbers["dual_step"] for info in infos])
    theta = infos[1].numbers["extrapolation"]
    t = sigma / sigma[0] if np.ptp(sigma) else theta ** -np.arange(9.0)
    assert t[-1] > 1.01  # else this is the plain mean
    np.testing.assert_allclose(state.mean, t @ np.array(models) / t.sum(), atol=1e-12)
    np.testing.assert_allclose(state.weights, t @ np.array(weights) / t.sum(), atol=1e-12)


@pytest.mark.parametrize("count", [1, 10, 200])
def test_the_ergodic_mean_keeps_the_bound_of_the_proof(count: int) -> None:
    """(E.39) for all lambda and the optimal x: sum t (Phi(mean) - Phi*) <= distances of the start.

    It is stated for D(x, y) = |x - y|^2 / 2, no noise, and the steps of Condition 5.1.
    """
    objective, clients = CVaR(0.5), PROBLEM.clients("stacked")
    optimum, best = interior_point(PROBLEM, objective)
    curved = [np.linalg.eigvalsh(PROBLEM.hessian_of(i, best)) for i in range(PROBLEM.n)]
    x, largest = start(PROBLEM), max(values[-1] for values in curved)
    ball = 2 * np.sqrt(PROBLEM.n) * largest * np.linalg.norm(x - best)  # of twice the distance
    coupling = np.linalg.norm(PROBLEM.gradients(best), 2) + ball
    steps = AcceleratedSteps(largest, min(values[0] for values in curved), coupling, 2)
    state, infos = rounds(Averaged(ScaffPD(objective, WORK, steps), "ergodic"), clients, x, count)
    sigma = np.array([info.numbers["dual_step"] for info in infos])
    excess = objective.value(PROBLEM.losses(np.asarray(state.mean))) - optimum
    first = infos[0].numbers["primal_step"]
    distance = np.sum((best - x) ** 2) / (2 * first) + 2 / (2 * sigma[0])
    assert -1e-9 <= excess <= distance / (sigma / sigma[0]).sum()


def test_it_gives_out_the_mean_and_leaves_the_rounds_alone() -> None:
    algorithm = Averaged(FedAvg(WORK))
    state, infos = rounds(algorithm, PROBLEM.clients(), start(PROBLEM), 5)
    plain, others = rounds(FedAvg(WORK), PROBLEM.clients(), start(PROBLEM), 5)
    assert algorithm.model(state) is state.mean
    np.testing.assert_array_equal(state.x, plain.x)
    for one, other in zip(infos, others, strict=True):
        np.testing.assert_array_equal(one.weights, other.weights)


def test_a_run_that_goes_on_has_the_same_mean_to_the_bit() -> None:
    """It knows no horizon: ten rounds are five and five more."""
    clients, algorithm = PROBLEM.clients(), Averaged(ScaffPD(CVaR(0.5)).wrapped())
    whole, _ = rounds(algorithm, clients, start(PROBLEM), 10)
    state, _ = rounds(algorithm, clients, start(PROBLEM), 5)
    for r in range(6, 11):
        state, _ = algorithm.round(state, clients, Stream(0).at("round", r))
    np.testing.assert_array_equal(state.mean, whole.mean)
    np.testing.assert_array_equal(state.weights, whole.weights)


@pytest.mark.parametrize(
    "algorithm",
    [
        Averaged(Safeguarded(Certified(ScaffPD(CVaR(0.5))))),
        Safeguarded(Averaged(Certified(ScaffPD(CVaR(0.5))))),
        Safeguarded(Certified(Averaged(ScaffPD(CVaR(0.5))))),
    ],
    ids=["outside", "between", "inside"],
)
def test_wrappers_may_be_inside_or_outside(algorithm: Any) -> None:
    """The same rounds, certificates and mean, in whatever order."""
    clients = PROBLEM.clients("stacked")
    state, infos = rounds(algorithm, clients, start(PROBLEM), 8)
    plain, others = rounds(ScaffPD(CVaR(0.5)).wrapped(), clients, start(PROBLEM), 8)
    np.testing.assert_array_equal(state.x, plain.x)
    assert [i.numbers for i in infos] == [i.numbers for i in others]
    outside = Averaged(ScaffPD(CVaR(0.5)).wrapped())
    mean, _ = rounds(outside, clients, start(PROBLEM), 8)
    np.testing.assert_array_equal(algorithm.model(state), mean.mean)


def test_training_wraps_what_is_inside() -> None:
    fair = ScaffPD(CVaR(0.5))
    assert Averaged(fair).wrapped() == Averaged(Safeguarded(fair))
    assert Averaged(Certified(AFL(WORK))).wrapped() == Averaged(Certified(AFL(WORK)))
    history = train(Averaged(ScaffPD(CVaR(0.5))), PROBLEM.clients(), rounds=3)
    assert "gap" in history.rounds[-1].numbers


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Averaged(FedAvg(WORK), decay=-1.0), "at least 0 or .ergodic., got -1"),
        (lambda: Averaged(FedAvg(WORK), decay="all"), "got 'all'"),
        (
            lambda: Averaged(FedAvg(WORK), "ergodic").init(PROBLEM.clients(), start(PROBLEM)),
            "The ergodic mean looks at step sizes, and FedAvg has none",
        ),
    ],
)
def test_wrong_arguments_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
