"""FedDyn, DRDM, AAggFF, FedDG-GA and normalised updates beside naive twins."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.optimize import minimize
from tests.naive import simplex, walk
from tests.problems import PROBLEMS, Problem, least_squares, rounds, start

from equifed.algorithms import (
    DRDM,
    DRFA,
    AAggFF,
    AgnosticFedAvg,
    FedAvg,
    FedDGGA,
    FedDyn,
    FedEBA,
    Normalised,
    Scaffold,
    ScaffPD,
    UPGrad,
    fedprox,
)
from equifed.algorithms.shelf.online_weights import regularised_leader, respond
from equifed.contract.absence import Memory, Recall
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.engines.simulate import simulate
from equifed.objectives import CVaR

pytestmark = pytest.mark.long

WORK = LocalSGD(lr=0.05, steps=4)
ROUNDS = 4
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def updates(problem: Problem, x: np.ndarray) -> np.ndarray:
    return np.array([x - walk(problem, i, x, 0.05, 4)[-1] for i in range(problem.n)])


# -- FedDyn and DRDM -------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_feddyn_is_its_naive_twin(problem: Problem, weighting: Any, fraction: float) -> None:
    n, alpha, x = problem.n, 0.7, start(problem)
    p = problem.sizes / problem.sizes.sum() if weighting == "size" else np.full(n, 1 / n)
    h_i, h, m = (
        [np.zeros(problem.d) for _ in range(n)],
        np.zeros(problem.d),
        math.ceil(fraction * n),
    )
    for r in range(1, ROUNDS + 1):
        pick = Stream(3).at("round", r, "participants").generator()
        chosen = pick.choice(n, size=m, replace=False) if m < n else np.arange(n)
        ends = {i: walk(problem, i, x, 0.05, 4, -h_i[i], alpha)[-1] for i in chosen}
        for i in chosen:
            h_i[i] = h_i[i] - alpha * (ends[i] - x)
            h = h - alpha * p[i] * (ends[i] - x)
        x = sum(p[i] * ends[i] for i in chosen) / sum(p[i] for i in chosen) - h / alpha
        np.testing.assert_allclose(h, sum(p[i] * h_i[i] for i in range(n)), atol=1e-12)
    algorithm = FedDyn(WORK, alpha, weighting, fraction)
    state, _ = rounds(algorithm, problem.clients(), start(problem), ROUNDS, seed=3)
    np.testing.assert_allclose(state.x, x, **CLOSE)
    np.testing.assert_allclose(state.h, h, **CLOSE)


def test_feddyn_ends_at_the_average_optimum_and_tilts_are_gradients(problem: Problem) -> None:
    """FedAvg with as many local steps ends elsewhere."""
    clients, x = problem.clients("stacked"), start(problem)
    state, _ = rounds(FedDyn(WORK), clients, x, 150)
    end = np.asarray(state.x)
    assert np.linalg.norm(problem.gradients(end).mean(0)) < 1e-6
    np.testing.assert_allclose(state.multipliers.matrix, problem.gradients(end), atol=1e-5)
    plain, _ = rounds(FedAvg(WORK, "uniform"), clients, x, 150)
    assert np.linalg.norm(problem.gradients(np.asarray(plain.x)).mean(0)) > 1e-3


def test_drdm_is_its_naive_twin(problem: Problem) -> None:
    n, alpha, gamma, x = problem.n, 0.7, 0.02, start(problem)
    h, weights = np.zeros((n, problem.d)), np.full(n, 1 / n)
    for r in range(1, ROUNDS + 1):
        t = int(Stream(0).at("round", r, "snapshot").generator().integers(1, 5))
        paths = [walk(problem, i, x, 0.05, 4, -h[i], alpha) for i in range(n)]
        h = h - alpha * (np.array([path[-1] for path in paths]) - x)
        snapshot = sum(weights[i] * paths[i][t] for i in range(n))
        x = sum(weights[i] * paths[i][-1] for i in range(n)) - weights @ h / alpha
        weights = simplex(weights + 4 * gamma * problem.losses(snapshot))
    state, _ = rounds(DRDM(WORK, alpha, gamma), problem.clients(), start(problem), ROUNDS)
    np.testing.assert_allclose(state.x, x, **CLOSE)
    np.testing.assert_allclose(state.weights, weights, **CLOSE)


def test_drdm_stands_still_at_the_saddle_point_only() -> None:
    """With its weights held, the model ends where the weighted gradients vanish."""
    problem = PROBLEMS["least squares"]
    algorithm = DRDM(WORK, dual_step=1e-12)
    clients, weights = problem.clients(), np.array([0.1, 0.2, 0.3, 0.4])
    state = replace(algorithm.init(clients, torch.as_tensor(start(problem))), weights=weights)
    for r in range(200):
        state, _ = algorithm.round(state, clients, Stream(0).at("round", r))
    assert np.linalg.norm(weights @ problem.gradients(np.asarray(state.x))) < 1e-6


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_multiplier_is_the_correction_and_the_pull(engine: str) -> None:
    problem = least_squares(5)
    clients, x = problem.clients(engine), torch.as_tensor(start(problem))
    _, control = clients.value_and_gradient(x, Stream(0))
    target = torch.arange(problem.d, dtype=torch.float64)
    work = LocalSGD(lr=0.05, steps=3, proximal=0.4).work(multiplier=True)
    moved = clients.local_steps(x, work, Stream(0), control=control, target=target)
    for e in np.eye(problem.n):
        expected = control.weighted_sum(e) - target + 0.4 * moved.displacement.weighted_sum(e)
        torch.testing.assert_close(moved.multiplier.weighted_sum(e), expected)
    with pytest.raises(ValueError, match="it needs a control"):
        clients.local_steps(x, work, Stream(0))


@pytest.mark.parametrize("steps", ["joint", "alternating"])
@pytest.mark.parametrize("algorithm", [FedDyn(WORK), DRDM(WORK), FedDyn(WORK, participation=0.5)])
def test_engines_agree_where_clients_have_own_parts(algorithm: Any, steps: str) -> None:
    problem = PROBLEMS["logistic"]
    found = []
    for engine in ("loop", "stacked"):
        clients = problem.clients_with_own(engine, own_steps=steps)
        own = torch.zeros(problem.n, 1, dtype=torch.float64)
        state = algorithm.init(clients, torch.as_tensor(start(problem)))
        for r in range(ROUNDS):
            here = clients.with_own(own)
            state, _ = algorithm.round(state, here, Stream(0).at("round", r))
            own = here.own_after()
        found.append((state.x, own))
    torch.testing.assert_close(found[0], found[1])
    assert found[0][1].abs().min() > 0


# -- AAggFF ----------------------------------------------------------------------------------------


def by_slsqp(slope: np.ndarray, curvature: np.ndarray) -> np.ndarray:
    n = len(slope)
    found = minimize(
        lambda p: slope @ p + p @ curvature @ p / 2,
        np.full(n, 1 / n),
        jac=lambda p: slope + curvature @ p,
        bounds=[(0, None)] * n,
        constraints=[{"type": "eq", "fun": lambda p: p.sum() - 1}],
        method="SLSQP",
        options={"ftol": 1e-16, "maxiter": 500},
    )
    return np.asarray(found.x)


def test_aaggff_of_silos_is_its_naive_twin(problem: Problem) -> None:
    n, x, p, seen = problem.n, start(problem), np.full(problem.n, 1 / problem.n), []
    for _ in range(ROUNDS):
        losses = problem.losses(x)
        r = stats.norm.cdf(losses / losses.mean(), loc=1) / n
        seen.append(-r / (1 + p @ r))
        a, b = 4.0, n / 4
        h = sum(np.outer(g, g) for g in seen)
        p = by_slsqp(sum(seen), a * np.eye(n) + b * h)
        x = x - p @ updates(problem, x)
    state, _ = rounds(AAggFF(WORK), problem.clients(), start(problem), ROUNDS)
    np.testing.assert_allclose(state.weights, p, atol=1e-6)
    np.testing.assert_allclose(state.x, x, rtol=1e-5, atol=1e-5)


def test_responses_are_a_distribution_function() -> None:
    losses = np.array([0.0, 0.2, 1.0, 1.7, 2.1])  # of mean 1
    np.testing.assert_allclose(respond(losses), stats.norm(1).cdf(losses), atol=1e-12)


def test_the_leader_is_that_of_a_generic_solver() -> None:
    draw = np.random.default_rng(0)
    for n in (1, 2, 5, 20):
        a = draw.normal(size=(n, n))
        slope, curvature = 3 * draw.normal(size=n), 4 * np.eye(n) + a @ a.T
        found = regularised_leader(slope, curvature)
        best = by_slsqp(slope, curvature)
        value = [slope @ p + p @ curvature @ p / 2 for p in (found, best)]
        assert found.sum() == pytest.approx(1) and found.min() >= 0
        assert value[0] <= value[1] + 1e-9


def test_equal_losses_keep_equal_weights() -> None:
    np.testing.assert_allclose(respond(np.full(3, 7.0)), 0.5)
    with pytest.raises(ValueError, match=r"at least 0, got -1"):
        respond(np.array([-1.0, 2.0]))


# -- FedDG-GA --------------------------------------------------------------------------------------


def test_feddg_ga_is_its_naive_twin(problem: Problem) -> None:
    own = tuple(0.1 * i for i in range(problem.n))
    x, p = start(problem), np.full(problem.n, 1 / problem.n)
    for t in range(ROUNDS):
        gap = problem.losses(x) - np.array(own)
        far = gap - gap.mean()
        p = np.clip(p + 0.3 * 0.9**t * far / max(abs(far)), 0, 1)
        p /= p.sum()
        x = x - p @ updates(problem, x)
    algorithm = FedDGGA(WORK, 0.3, 0.9, own)
    state, _ = rounds(algorithm, problem.clients(), start(problem), ROUNDS)
    np.testing.assert_allclose(state.x, x, **CLOSE)
    np.testing.assert_allclose(state.weights, p, **CLOSE)


def test_feddg_ga_looks_at_validation_samples() -> None:
    """Targets of the validation samples alone decide who gains weight; one client has none."""
    draw = np.random.default_rng(0)
    train = {str(i): (draw.normal(size=(4, 2)), draw.normal(size=4)) for i in range(3)}
    held = {"0": (np.ones((2, 2)), np.full(2, 50.0)), "1": (np.ones((2, 2)), np.zeros(2))}
    whole = Federation.from_clients(train, validation=held)
    clients = simulate(whole, torch.nn.Linear(2, 1, bias=False), "squared", dtype=torch.float64)
    state, _ = rounds(FedDGGA(WORK), clients, np.zeros(2), 1)
    assert state.losses[0] == pytest.approx(2500) and state.losses[1] == pytest.approx(0)
    assert state.losses[2] == pytest.approx(float(np.mean(train["2"][1] ** 2)))
    assert np.argmax(state.weights) == 0


# -- normalised updates ----------------------------------------------------------------------------


PASS = LocalSGD(lr=0.05, epochs=1, batch_size=1)
"""Clients take unequal numbers of steps."""


@pytest.mark.parametrize("mu", [0.0, 0.8])
def test_normalised_by_steps_is_fednova(problem: Problem, mu: float) -> None:
    """Clients take as many passes, hence unequal numbers of steps, of batches of all samples."""
    sizes, x = problem.sizes, start(problem)
    work = replace(PASS, proximal=mu)
    clients, p = problem.clients(), sizes / sizes.sum()
    taken = sizes.astype(int)
    a = np.array([sum((1 - 0.05 * mu) ** j for j in range(k)) for k in taken])
    moved = clients.local_steps(torch.as_tensor(x), work, Stream(0).at("round", 1, "local"))
    d = np.array([moved.displacement.weighted_sum(e).numpy() for e in np.eye(problem.n)])
    expected = x - (p @ a) * sum(p[i] * d[i] / a[i] for i in range(problem.n))
    state, _ = rounds(Normalised(FedAvg(work)), clients, x, 1)
    np.testing.assert_allclose(state.x, expected, **CLOSE)
    even = Normalised(fedprox(mu, WORK))
    same, plain = (rounds(one, clients, x, ROUNDS)[0] for one in (even, fedprox(mu, WORK)))
    np.testing.assert_allclose(same.x, plain.x, **CLOSE)  # equal steps: nothing to do


def test_inner_products_are_those_of_normalised_updates(problem: Problem) -> None:
    """UPGrad of updates as long as the mean path: the twin scales them before UPGrad sees any."""
    from equifed.algorithms.shelf.gradient_conflicts import unconflicting

    clients, a, x = problem.clients(), problem.sizes, start(problem)
    moved = clients.local_steps(torch.as_tensor(x), PASS, Stream(0).at("round", 1, "local"))
    g = np.array([moved.displacement.weighted_sum(e).numpy() for e in np.eye(problem.n)])
    scaled = (a @ a / a.sum() / a)[:, None] * g
    expected = x - unconflicting(scaled @ scaled.T) @ scaled
    state, _ = rounds(Normalised(UPGrad(PASS)), clients, x, 1)
    np.testing.assert_allclose(state.x, expected, rtol=1e-7, atol=1e-7)


def test_absent_clients_count_with_their_normalised_updates() -> None:
    problem = PROBLEMS["more clients"]
    clients, x = problem.clients(), torch.as_tensor(start(problem))
    algorithm = Normalised(AgnosticFedAvg(PASS, 0.01))
    state, memory = algorithm.init(clients, x), Memory()
    for r, here in enumerate([[0, 1, 2], [3, 4, 5, 6], [0, 2, 4]]):
        view = Recall(clients.subset(here), memory)
        state, _ = algorithm.round(state, view, Stream(0).at("round", r))
        memory = view.memory()
    assert memory.sent is not None
    kept, mine = memory.sent.vectors.matrix.numpy(), memory.sent.weights
    np.testing.assert_allclose(mine @ kept, memory.sent.total, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedDyn(alpha=0.0), "alpha must be positive, got 0.0; FedAvg has none"),
        (lambda: FedDyn(replace(WORK, proximal=0.1)), r"got local.proximal = 0.1; leave it out"),
        (lambda: DRDM(LocalSGD(lr=0.1, epochs=1)), "DRDM needs local.steps"),
        (lambda: DRDM(dual_step=0.0), "dual_step must be positive"),
        (lambda: FedDGGA(step=0.0), r"step must lie in \(0, 1\]"),
        (lambda: FedDGGA(references=(float("nan"),)), "must be finite"),
        (lambda: Normalised(ScaffPD(CVaR(0.5))), "the step size of ScaffPD is not its own"),
    ],
)
def test_wrong_arguments_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "algorithm", [Scaffold(WORK), FedDyn(WORK), DRFA(WORK), FedEBA(WORK, angle=0.0)], ids=repr
)
def test_what_cannot_be_normalised_is_refused_by_name(algorithm: Any) -> None:
    problem = PROBLEMS["least squares"]
    with pytest.raises(ValueError, match=f"those of {type(algorithm).__name__} have a correction"):
        rounds(Normalised(algorithm), problem.clients(), start(problem), 1)


def test_references_are_one_per_client() -> None:
    problem = PROBLEMS["least squares"]
    with pytest.raises(ValueError, match="references: 2 entries for 4 clients"):
        rounds(FedDGGA(references=(0.0, 1.0)), problem.clients(), start(problem), 1)
