"""Hard and degenerate problems in the metric: drawn, certified, compared with an interior point."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.optima import interior_point
from tests.problems import LeastSquares, Logistic, Problem, least_squares, logistic

from equifed.algorithms.fair_newton import FairNewton
from equifed.engines.in_process import InProcessClients
from equifed.objectives import (
    Average,
    ChiSquare,
    CVaR,
    RelativeFairness,
    SaddleObjective,
    WorstCase,
)
from equifed.training.history import History
from equifed.training.loop import train

TWISTS = ("rank one", "one class", "copies", "empty features", "scales", "plain")


def drawn_problem(seed: int) -> tuple[str, Problem, SaddleObjective]:
    """2 to 60 clients of 1 to 8 samples, 1 to 12 features, l2 from 1e-6 to 1, and a twist."""
    draw, twist = np.random.default_rng(seed), TWISTS[seed % len(TWISTS)]
    n, d = int(draw.choice([2, 3, 25, 60])), int(draw.choice([1, 2, 5, 12]))
    kind, truth = (LeastSquares, Logistic)[int(draw.integers(2))], draw.normal(size=d)
    inputs = [draw.normal(size=(int(draw.integers(1, 9)), d)) for _ in range(n)]
    if twist == "rank one":
        inputs = [np.outer(draw.normal(size=len(a)), draw.normal(size=d)) for a in inputs]
    if twist == "empty features":
        inputs = [a * (np.arange(d) % 2 == 0) for a in inputs]
    if twist == "scales":
        inputs = [a * 10.0 ** draw.uniform(-3, 3, d) for a in inputs]
    targets = [a @ truth + draw.normal(size=len(a)) for a in inputs]
    if kind is Logistic:
        targets = [(t > 0).astype(float) for t in targets]
    if twist == "one class":
        targets = [np.full(len(t), float(i % 2)) for i, t in enumerate(targets)]
    if twist == "copies":  # every weight is as good as any other
        inputs, targets = inputs[:1] * n, targets[:1] * n
    choices = (WorstCase(), CVaR(max(0.3, 1 / n)), ChiSquare(0.05, scale=1.0), Average())
    objective: SaddleObjective = choices[int(draw.integers(4))]
    return twist, kind(tuple(inputs), tuple(targets), float(10 ** draw.uniform(-6, 0))), objective


def play(
    clients: InProcessClients, objective: SaddleObjective, count: int, **options: object
) -> History:
    x = torch.zeros(clients.model.size, dtype=torch.float64)
    return train(FairNewton(objective, **options), clients, rounds=count, x=x)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(24))
def test_drawn_hard_problems_are_solved_and_certified(seed: int) -> None:
    twist, problem, objective = drawn_problem(seed)
    infos = play(problem.clients("stacked"), objective, 60).rounds
    values = np.array([i.objective for i in infos])
    gaps = np.array([i.numbers["gap"] for i in infos])
    assert gaps[-1] <= 1e-9 * abs(values[-1])
    if twist != "scales":  # the solver loses its way in numbers from 1e-6 to 1e6
        best, _ = interior_point(problem, objective)
        assert values[-1] == pytest.approx(best, rel=1e-6, abs=1e-7)
        assert (gaps >= values - best - 1e-6 * abs(best) - 1e-7).all()


@pytest.mark.long
@pytest.mark.parametrize("objective", [WorstCase(), CVaR(0.2), ChiSquare(0.1, scale=1.0)], ids=repr)
def test_a_thousand_clients_are_certified(objective: SaddleObjective) -> None:
    problem = least_squares(4, n=1000, d=4, samples=5)
    last = play(problem.clients("stacked"), objective, 15).rounds[-1]
    assert last.numbers["gap"] <= 1e-3 * abs(last.objective)


@pytest.mark.long
@pytest.mark.parametrize("make", [least_squares, logistic])
@pytest.mark.parametrize("objective", [Average(), CVaR(0.5)], ids=repr)
def test_own_intercepts_are_those_of_an_interior_point(
    make: type, objective: SaddleObjective
) -> None:
    problem, own_l2 = make(6, n=4), 1e-2
    best, _ = interior_point(problem, objective, own_l2)
    infos = play(problem.clients_with_own("stacked", own_l2=own_l2), objective, 12).rounds
    assert "curvature_sums" in infos[0].numbers
    assert infos[-1].objective == pytest.approx(best, rel=1e-7)
    gaps = np.array([i.numbers["gap"] for i in infos])
    assert (gaps >= np.array([i.objective for i in infos]) - best - 1e-8 * abs(best)).all()
    assert gaps[-1] <= 1e-6 * abs(best)


@pytest.mark.parametrize(("l2", "convex"), [(1e-4, False), (30.0, True)])
def test_signed_weights_take_a_metric_where_all_weighted_losses_are_convex(
    l2: float, convex: bool
) -> None:
    """There a stationary point is the solution, and the certificate says so."""
    objective = RelativeFairness(0.1)
    clients = logistic(3, n=4, l2=l2).clients("stacked")
    bounds = clients.curvature()
    assert (bounds.least_modulus(objective.l1_norm(4)) > 0) is convex
    if not convex:
        with pytest.raises(ValueError, match="not known to be convex"):
            play(clients, objective, 1)
        return
    history = play(clients, objective, 30)
    assert min(w.min() for w in history.weights.values()) < 0
    last = history.rounds[-1]
    assert last.numbers["gap"] <= 1e-9 * abs(last.objective)
