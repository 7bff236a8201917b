"""Where algorithms without a correction end when they take one full step a round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.optima import interior_point, saddle_point
from tests.problems import PROBLEMS, convex_problem, rounds, start

from equifed.algorithms import AFL, DRFA, QFedAvg, Remembering, RFedFair, tilted_erm
from equifed.contract.absence import sample_clients
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.objectives import ChiSquare, HeterogeneousCVaR, QFair, Tilted, WorstCase

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


# -- AFL whose dual step follows the coupling ------------------------------------------------------

MANY = PROBLEMS["more clients"]
SMALL = LocalSGD(lr=0.05, steps=1)


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_afl_follows_the_coupling_like_its_naive_twin(participation: float) -> None:
    """The losses, gradients and weights of those who took part, in NumPy."""
    algorithm = AFL(SMALL, participation=participation)
    state, infos = rounds(algorithm, MANY.clients("stacked"), start(MANY), 30)
    x, weights, known, gamma, steepest = start(MANY), np.ones(MANY.n) / MANY.n, None, 0.0, 0.0
    for r, info in enumerate(infos, start=1):
        here, now, gradients = info.index, MANY.losses(x), MANY.gradients(x)
        new = np.full(MANY.n, now[here].mean()) if known is None else known.copy()
        new[here] = now[here]
        turned = np.zeros(len(here))
        if known is not None:
            to = WorstCase().prox(weights + gamma * new, gamma)
            turned, weights = (to - weights)[here], to
        if known is None:
            squares = np.sum(gradients[here] ** 2) * MANY.n / len(here)
            gamma = 0.3 / (0.05 * squares)
        elif np.ptp(turned) > 0:
            turned = turned - turned.mean()
            coupling = np.sum((turned @ gradients[here]) ** 2) / (turned @ turned)
            steepest = max(coupling, r / (r + 2) * steepest)
            gamma = np.clip(0.3 / (0.05 * steepest), gamma / 2, 2 * gamma)
        assert info.numbers["dual_step"] == pytest.approx(gamma, rel=1e-9)
        x = x - 0.05 * MANY.n / len(here) * weights[here] @ gradients[here]
        known = new
    np.testing.assert_allclose(state.x, x, atol=1e-10)


@pytest.mark.parametrize("case", ["all", "sampled", "missing"])
def test_afl_finds_the_worst_case_optimum_by_itself(case: str) -> None:
    """With nothing known of the problem but how long a step may be, to 1 % and far beyond."""
    best, _ = interior_point(MANY, WorstCase())
    plain = AFL(SMALL, participation=0.3 if case == "sampled" else 1.0)
    algorithm: Any = plain if case == "all" else Remembering(plain)
    clients, stream = MANY.clients("stacked"), Stream(1)
    state = algorithm.init(clients, torch.as_tensor(start(MANY)))
    for r in range(600):
        lost = sample_clients(clients, 0.3, stream.at("here", r)) if case == "missing" else clients
        state, _ = algorithm.round(state, lost, stream.at("round", r))
    above = MANY.losses(algorithm.model(state).numpy()).max() / best - 1
    assert above < 1e-3


@pytest.mark.long
@pytest.mark.parametrize(("seed", "share"), [(61, 1.0), (5, 1.0), (5, 0.3)])
def test_afl_settles_where_weights_turn_slowly(seed: int, share: float) -> None:
    """A memory of some ten rounds forgets steep directions there: it stays 0.3 to 1.2 % above."""
    problem = convex_problem(seed)
    best, _ = interior_point(problem, WorstCase())
    at = np.zeros(problem.d)
    steepest = max(np.linalg.norm(problem.hessian_of(i, at), 2) for i in range(problem.n))
    plain = AFL(LocalSGD(lr=1 / steepest, steps=1), participation=share)
    algorithm: Any = plain if share == 1 else Remembering(plain)
    state, _ = rounds(algorithm, problem.clients("stacked"), at, 600)
    above = problem.losses(algorithm.model(state).numpy()).max() / best - 1
    assert above < (1e-5 if share == 1 else 1e-2)


def test_afl_takes_the_same_steps_in_another_unit_of_the_loss() -> None:
    """Losses times c and a rate over c: the same models and weights."""
    found = []
    for c in (1.0, 100.0):
        scaled = replace(
            MANY, l2=c * MANY.l2, inputs=tuple(np.sqrt(c) * a for a in MANY.inputs),
            targets=tuple(np.sqrt(c) * b for b in MANY.targets),
        )  # fmt: skip
        algorithm = AFL(replace(SMALL, lr=SMALL.lr / c))
        state, _ = rounds(algorithm, scaled.clients("stacked"), start(scaled), 20)
        found.append((state.x.numpy(), state.weights))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-7, atol=1e-9)
