"""Scaled: the algorithm in other coordinates, with proofs about the model in those of the data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests import naive
from tests.flower.grid import convex, flower_clients, loop_clients, memory_grid, task
from tests.optima import interior_point
from tests.problems import Array, Problem, convex_problem, least_squares, logistic, rounds

from equifed.algorithms import FairNewton, FedAvg, FedDyn, ScaffPD, Scaled
from equifed.algorithms.around import Certified, change_state, inner_state
from equifed.algorithms.safeguarded import Safeguarded
from equifed.algorithms.server_optimised import ServerOptimised
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.engines.simulate import simulate
from equifed.flower.secure.sums import SecureSums
from equifed.objectives import ChiSquare, CVaR, WorstCase
from equifed.steps.schedules import ConstantSteps
from equifed.training.history import History
from equifed.training.loop import train

UNITS = 10.0 ** np.linspace(-3, 3, 6)
LOCAL = LocalSGD(lr=0.02, steps=4)


@dataclass(frozen=True)
class InOtherCoordinates(Problem):
    """f(root * y), written down."""

    inner: Problem | None = None

    @property
    def root(self) -> Array:
        assert self.inner is not None
        zero, n = np.zeros(self.inner.d), self.inner.n
        sums = sum(np.diag(self.inner.hessian_of(i, zero)) for i in range(n)) / n
        return 1 / np.sqrt(sums)

    def loss_of(self, i: int, x: Array) -> float:
        return self.inner.loss_of(i, self.root * x)

    def gradient_of(self, i: int, x: Array) -> Array:
        return self.root * self.inner.gradient_of(i, self.root * x)

    def hessian_of(self, i: int, x: Array) -> Array:
        return self.root[:, None] * self.inner.hessian_of(i, self.root * x) * self.root


def stretched(problem: Problem) -> Problem:
    """Return a problem with columns in other units."""
    units = UNITS[: problem.d]
    return replace(problem, inputs=tuple(a * units for a in problem.inputs))


PROBLEMS = {
    "least squares": stretched(least_squares(1)),
    "logistic": stretched(logistic(3, n=5)),
}


def play(algorithm: Any, clients: Any, count: int) -> History:
    x = torch.zeros(clients.model.size, dtype=clients.model.dtype)
    return train(algorithm, clients, rounds=count, x=x)


def model(history: History) -> Array:
    assert history.parameters is not None
    return torch.cat([v.reshape(-1) for v in history.parameters.values()]).numpy()


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_it_is_scaff_pd_on_functions_of_other_coordinates(name: str, engine: str) -> None:
    problem = PROBLEMS[name]
    plain = ScaffPD(ChiSquare(0.1), LOCAL, ConstantSteps(0.08, 0.5, 0.9))
    state, infos = rounds(Scaled(plain), problem.clients(engine), np.zeros(problem.d), 7)
    twin = InOtherCoordinates(problem.inputs, problem.targets, problem.l2, inner=problem)
    y, weights = naive.scaff_pd(
        twin, np.zeros(problem.d), 7, 0.1, 1.0, 0.08, 0.5, 0.9, LOCAL.lr, LOCAL.steps
    )
    np.testing.assert_allclose(state.x, twin.root * y, rtol=1e-10)
    np.testing.assert_allclose(infos[-1].weights, weights, rtol=1e-10)


@pytest.mark.parametrize("name", PROBLEMS)
def test_units_of_the_columns_do_not_matter_without_a_penalty(name: str) -> None:
    """Automatic steps, too: they measure the smoothness in the new coordinates."""
    problem = replace(PROBLEMS[name], l2=0.0)
    again = replace(problem, inputs=tuple(a * 7.0 ** np.arange(problem.d) for a in problem.inputs))
    one, two = (play(Scaled(ScaffPD(CVaR(0.5))), p.clients(), 20) for p in (problem, again))
    for a, b in zip(one.rounds, two.rounds, strict=True):
        assert a.objective == pytest.approx(b.objective, rel=1e-6)
    np.testing.assert_allclose(model(one), model(two) * 7.0 ** np.arange(problem.d), rtol=1e-5)


@pytest.mark.parametrize("objective", [WorstCase(), ChiSquare(0.1)], ids=repr)
@pytest.mark.parametrize("seed", [0, 1, 4, 7])
def test_badly_scaled_columns_are_solved_and_certified(objective: Any, seed: int) -> None:
    drawn = convex_problem(seed)
    units = 10 ** np.random.default_rng(seed).uniform(-2, 2, drawn.d)
    problem = replace(drawn, inputs=tuple(a * units for a in drawn.inputs))
    best, _ = interior_point(problem, objective)
    history = play(Scaled(ScaffPD(objective)), problem.clients(), 100)
    values = np.array([r.objective for r in history.rounds])
    gaps = np.array([r.numbers["gap"] for r in history.rounds])
    assert values.min() - best <= 1e-3 * best
    assert (gaps >= values - best - 1e-7 * best).all()  # true in the coordinates of the data
    plain = play(ScaffPD(objective), problem.clients(), 100)
    assert min(r.objective for r in plain.rounds) - best > 1e-2 * best


@pytest.mark.parametrize("privacy", [None, SecureSums], ids=["clear", "secure"])
@pytest.mark.parametrize("classes", [2, 3])
def test_it_runs_over_flower_as_in_one_process(privacy: Any, classes: int, tmp_path: Path) -> None:
    data, fair = convex(classes=classes), Scaled(ScaffPD(ChiSquare(0.1)))
    grid = memory_grid(data, task(), tmp_path)
    hidden = None if privacy is None else privacy()
    found = play(fair, flower_clients(grid, task(), hidden=hidden), 6)
    expected = play(fair, loop_clients(data, task()), 6)
    np.testing.assert_allclose(model(found), model(expected), rtol=0, atol=1e-9)
    assert found.rounds[-1].numbers == pytest.approx(expected.rounds[-1].numbers, rel=1e-6)


def test_wrappers_outside_see_the_model_in_the_coordinates_of_the_data() -> None:
    problem = PROBLEMS["least squares"]
    clients, algorithm = problem.clients(), Scaled(ScaffPD(ChiSquare(0.1)))
    x = torch.linspace(-1, 1, problem.d, dtype=torch.float64)
    state, _ = algorithm.round(algorithm.init(clients, x), clients, Stream(0).at("round", 1))
    torch.testing.assert_close(inner_state(state).x, state.x)
    there = change_state(state, x=x)
    torch.testing.assert_close(algorithm.model(there), x)
    assert state.inner.x is not there.inner.x and torch.equal(there.root, state.root)
    safe, momentum = Safeguarded(algorithm), ServerOptimised(Scaled(FedAvg(LOCAL)), "momentum", 1.0)
    assert safe.wrapped() == safe
    assert np.isfinite(model(play(momentum, problem.clients(), 5))).all()


def test_what_cannot_be_scaled_says_so() -> None:
    ball = LocalSGD(lr=0.1, steps=2, radius=1.0)
    with pytest.raises(ValueError, match=r"leave local\.radius and"):
        Scaled(FedAvg(ball))
    clients = least_squares(1).clients()
    with pytest.raises(ValueError, match="FairNewton cannot run here: the coordinates are scaled"):
        play(Scaled(FairNewton(ChiSquare(0.1))), clients, 1)
    with pytest.raises(ValueError, match="scaled coordinates cannot have FedDyn's multipliers"):
        play(Scaled(FedDyn(LOCAL)), clients, 1)
    network = simulate(least_squares(1).federation(), "mlp", "squared")
    with pytest.raises(ValueError, match=r"not linear\. Use ScaffPD without it"):
        play(Scaled(ScaffPD(ChiSquare(0.1))), network, 1)


def test_curvature_that_is_stated_inside_proves_nothing_outside() -> None:
    problem = PROBLEMS["least squares"]
    inside = Scaled(Certified(ScaffPD(ChiSquare(0.1)), strong_convexity=problem.l2))
    history = play(inside, problem.clients(), 3)
    assert all("gap" not in r.numbers for r in history.rounds)
    assert any("put Certified around it" in e["reason"] for e in history.events)
    around = Certified(Scaled(ScaffPD(ChiSquare(0.1))), strong_convexity=problem.l2)
    assert all("gap" in r.numbers for r in play(around, problem.clients(), 3).rounds)
