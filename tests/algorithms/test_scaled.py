"""Scaled: the algorithm in other coordinates, with proofs about the model in those of the data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.auto_steps import hard_problem
from tests import naive
from tests.flower.grid import convex, flower_clients, loop_clients, memory_grid, task
from tests.optima import interior_point
from tests.problems import (
    Array,
    Problem,
    classification,
    convex_problem,
    least_squares,
    logistic,
    rounds,
)

from equifed.algorithms import FairNewton, FedAvg, FedDyn, ScaffPD, Scaled, scaled
from equifed.algorithms.around import Certified, change_state, inner_state
from equifed.algorithms.safeguarded import Safeguarded
from equifed.algorithms.server_optimised import ServerOptimised
from equifed.contract.arrays import BlockMatrix
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.engines.simulate import simulate
from equifed.flower.messenger import SecureSums
from equifed.objectives import ChiSquare, CVaR, WorstCase
from equifed.steps.schedules import ConstantSteps
from equifed.training.history import History
from equifed.training.loop import train

UNITS = 10.0 ** np.linspace(-3, 3, 6)
LOCAL = LocalSGD(lr=0.02, steps=4)


@dataclass(frozen=True)
class InOtherCoordinates(Problem):
    """f(R y), written down."""

    inner: Problem | None = None
    columns: str = "equal"

    @property
    def root(self) -> Array:
        """R, with the square root of the metric that is symmetric: SCAFF-PD sees no rotation."""
        assert self.inner is not None
        zero, n = np.zeros(self.inner.d), self.inner.n
        metric = sum(self.inner.hessian_of(i, zero) for i in range(n)) / n
        if self.columns == "equal":
            return np.diag(1 / np.sqrt(np.diag(metric)))
        values, vectors = np.linalg.eigh(metric)
        return vectors / np.sqrt(values) @ vectors.T

    def loss_of(self, i: int, x: Array) -> float:
        return self.inner.loss_of(i, self.root @ x)

    def gradient_of(self, i: int, x: Array) -> Array:
        return self.root.T @ self.inner.gradient_of(i, self.root @ x)

    def hessian_of(self, i: int, x: Array) -> Array:
        return self.root.T @ self.inner.hessian_of(i, self.root @ x) @ self.root


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
@pytest.mark.parametrize("columns", ["equal", "uncorrelated"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_it_is_scaff_pd_on_functions_of_other_coordinates(
    name: str, columns: Any, engine: str
) -> None:
    problem = PROBLEMS[name]
    if columns == "uncorrelated":  # the oracle's square root is no good in other units
        problem = replace(problem, inputs=tuple(a / UNITS[: problem.d] + 1 for a in problem.inputs))
    plain = ScaffPD(ChiSquare(0.1, scale=1.0), LOCAL, ConstantSteps(0.08, 0.5, 0.9))
    algorithm = Scaled(plain, columns)
    state, infos = rounds(algorithm, problem.clients(engine), np.zeros(problem.d), 7)
    twin = InOtherCoordinates(
        problem.inputs, problem.targets, problem.l2, inner=problem, columns=columns
    )
    y, weights = naive.scaff_pd(
        twin, np.zeros(problem.d), 7, 0.1, 1.0, 0.08, 0.5, 0.9, LOCAL.lr, LOCAL.steps
    )
    rounding = 1e-10 if columns == "equal" else 1e-7  # what is added so that nothing is flat
    np.testing.assert_allclose(state.x, twin.root @ y, rtol=rounding)
    np.testing.assert_allclose(infos[-1].weights, weights, rtol=rounding)


@pytest.mark.parametrize("columns", ["equal", "uncorrelated"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_units_of_the_columns_do_not_matter_without_a_penalty(name: str, columns: Any) -> None:
    """Automatic steps, too: they measure the smoothness in the new coordinates."""
    problem = replace(PROBLEMS[name], l2=0.0)
    again = replace(problem, inputs=tuple(a * 7.0 ** np.arange(problem.d) for a in problem.inputs))
    fair = Scaled(ScaffPD(CVaR(0.5)), columns)
    one, two = (play(fair, p.clients(), 20) for p in (problem, again))
    for a, b in zip(one.rounds, two.rounds, strict=True):
        assert a.objective == pytest.approx(b.objective, rel=1e-6)
    np.testing.assert_allclose(model(one), model(two) * 7.0 ** np.arange(problem.d), rtol=1e-5)


@pytest.mark.parametrize("objective", [WorstCase(), ChiSquare(0.1, scale=1.0)], ids=repr)
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


def test_mixtures_of_columns_do_not_matter_where_they_are_uncorrelated() -> None:
    problem = replace(least_squares(1), l2=0.0)
    mix = np.random.default_rng(0).standard_normal((problem.d, problem.d))
    mixed = replace(problem, inputs=tuple(a @ mix for a in problem.inputs))
    plain = ScaffPD(ChiSquare(0.1, scale=1.0), LOCAL, ConstantSteps(0.08, 0.5, 0.9))
    fair = Scaled(plain, "uncorrelated")
    one, two = (play(fair, p.clients(), 20) for p in (problem, mixed))
    np.testing.assert_allclose(model(one), mix @ model(two), rtol=1e-6)


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("name", ["copies, noise 0.01", "copies, classes", "means of 10"])
def test_collinear_columns_are_solved_and_certified(
    name: str, hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, objective = hard_problem(name), CVaR(0.5)
    best, _ = interior_point(problem, objective)
    clients = problem.clients()
    if hidden:  # sums are rounded, and no client's vector is seen
        monkeypatch.setattr(type(clients), "hides_sums", True)
    history = play(Scaled(ScaffPD(objective), "uncorrelated"), clients, 100)
    values = np.array([r.objective for r in history.rounds])
    gaps = np.array([r.numbers["gap"] for r in history.rounds])
    assert values.min() - best <= 1e-3 * best
    assert (gaps >= values - best - 1e-7 * best).all()


@pytest.mark.parametrize("privacy", [None, SecureSums], ids=["clear", "secure"])
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("columns", ["equal", "uncorrelated"])
def test_it_runs_over_flower_as_in_one_process(
    privacy: Any, classes: int, columns: Any, tmp_path: Path
) -> None:
    data, fair = convex(classes=classes), Scaled(ScaffPD(ChiSquare(0.1, scale=1.0)), columns)
    grid = memory_grid(data, task(), tmp_path)
    hidden = None if privacy is None else privacy()
    found = play(fair, flower_clients(grid, task(), hidden=hidden), 6)
    expected = play(fair, loop_clients(data, task()), 6)
    np.testing.assert_allclose(model(found), model(expected), rtol=0, atol=1e-9)
    assert found.rounds[-1].numbers == pytest.approx(expected.rounds[-1].numbers, rel=1e-6)


def test_wrappers_outside_see_the_model_in_the_coordinates_of_the_data() -> None:
    problem = PROBLEMS["least squares"]
    clients, algorithm = problem.clients(), Scaled(ScaffPD(ChiSquare(0.1, scale=1.0)))
    x = torch.linspace(-1, 1, problem.d, dtype=torch.float64)
    state, _ = algorithm.round(algorithm.init(clients, x), clients, Stream(0).at("round", 1))
    torch.testing.assert_close(inner_state(state).x, state.x)
    there = change_state(state, x=x)
    torch.testing.assert_close(algorithm.model(there), x)
    assert state.inner.x is not there.inner.x and there.coordinates is state.coordinates
    safe, momentum = Safeguarded(algorithm), ServerOptimised(Scaled(FedAvg(LOCAL)), "momentum", 1.0)
    assert safe.wrapped() == safe
    assert np.isfinite(model(play(momentum, problem.clients(), 5))).all()


def test_what_cannot_be_scaled_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="must be 'equal' or 'uncorrelated', got 'white'"):
        Scaled(FedAvg(LOCAL), "white")  # type: ignore[arg-type]
    ball = LocalSGD(lr=0.1, steps=2, radius=1.0)
    with pytest.raises(ValueError, match=r"leave local\.radius and"):
        Scaled(FedAvg(ball))
    clients = least_squares(1).clients()
    with pytest.raises(ValueError, match="FairNewton cannot run here: the coordinates are scaled"):
        play(Scaled(FairNewton(ChiSquare(0.1, scale=1.0))), clients, 1)
    with pytest.raises(ValueError, match="scaled coordinates cannot have FedDyn's multipliers"):
        play(Scaled(FedDyn(LOCAL)), clients, 1)
    network = simulate(least_squares(1).federation(), "mlp", "squared")
    for columns in ("equal", "uncorrelated"):
        with pytest.raises(ValueError, match=r"not linear\. Use ScaffPD without it"):
            play(Scaled(ScaffPD(ChiSquare(0.1, scale=1.0)), columns), network, 1)
    monkeypatch.setattr(scaled, "BLOCKS", 4)
    with pytest.raises(ValueError, match=r"need 1 x 3 x 3 numbers, 0\.0 GB, more than"):
        play(Scaled(ScaffPD(ChiSquare(0.1, scale=1.0)), "uncorrelated"), clients, 1)


def test_curvature_that_is_stated_inside_proves_nothing_outside() -> None:
    problem = PROBLEMS["least squares"]
    inside = Scaled(Certified(ScaffPD(ChiSquare(0.1, scale=1.0)), strong_convexity=problem.l2))
    history = play(inside, problem.clients(), 3)
    assert all("gap" not in r.numbers for r in history.rounds)
    assert any("put Certified around it" in e["reason"] for e in history.events)
    around = Certified(Scaled(ScaffPD(ChiSquare(0.1, scale=1.0))), strong_convexity=problem.l2)
    assert all("gap" in r.numbers for r in play(around, problem.clients(), 3).rounds)


def test_bounds_are_those_of_the_stretched_coordinates_or_unknown_for_the_same_reason() -> None:
    """x = 2 y: second derivatives are four times as large, whatever the direction."""
    for weights in (None, {0: 0.5, 1: 2.0}):
        clients = simulate(
            classification(classes=2), "logistic", "logistic", l2=0.1, class_weights=weights
        )
        d = clients.model.size
        twice = BlockMatrix(torch.full((d, 1, 1), 2.0).double(), torch.arange(d)[:, None])
        known, seen = (
            clients.curvature(),
            scaled._Scaling(clients, scaled.Coordinates(twice)).curvature(),
        )
        if isinstance(known, str):
            assert weights is not None and seen == known
            continue
        np.testing.assert_allclose(seen.smoothness, 4 * known.smoothness)
        np.testing.assert_allclose(seen.strong_convexity, 4 * known.strong_convexity)
        assert weights is None and seen.lowest == known.lowest
