"""Relative fairness: the integrated set, its split into (a, b), and Theorem 1 of SCAFF-PD-IA."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles import max_over_side, solve, solver_parts, solver_prox, violation

from equifed.objectives import (
    KL,
    Average,
    ChiSquare,
    CVaR,
    HeterogeneousCVaR,
    RelativeFairness,
    SaddleObjective,
    WorstCase,
)
from equifed.objectives.relative_fairness import TOLERANCE

SIDES = [
    Average(),
    CVaR(0.2),
    CVaR(0.4),
    CVaR(0.7),
    WorstCase(),
    Average((1, 2, 3, 4, 5)),
]
numbers = st.lists(st.floats(-2, 2) | st.sampled_from([0.0, 1.0]), min_size=5, max_size=5).map(
    np.array
)
some = settings(deadline=None, max_examples=10)


@pytest.mark.long
@pytest.mark.parametrize("upper", SIDES, ids=repr)
@pytest.mark.parametrize("lower", SIDES, ids=repr)
@some
@given(losses=numbers, point=numbers, phi=st.floats(0, 0.9))
def test_value_and_split_for_every_pair_of_sides(upper, lower, losses, point, phi):
    objective = RelativeFairness(phi, upper, lower)
    high, low = max_over_side(upper, losses), -max_over_side(lower, -losses)
    assert objective.value(losses) == pytest.approx((high - phi * low) / (1 - phi), abs=1e-11)
    for weights in (objective.weights(losses), objective.prox(point, 1.0), objective.start(5)):
        a, b = objective.split(weights)
        assert np.allclose((a - phi * b) / (1 - phi), weights, rtol=0, atol=1e-11)
        assert violation(upper, a) <= 1e-11 and violation(lower, b) <= 1e-11


@some
@given(losses=numbers, phi=st.floats(0.01, 0.9))
def test_the_split_of_the_maximiser_attains_both_extremes(losses, phi):
    objective = RelativeFairness(phi, CVaR(0.4), CVaR(0.3))
    a, b = objective.split(objective.weights(losses))
    best_a, best_b = objective.extremes(losses)
    assert a @ losses == pytest.approx(best_a @ losses, abs=1e-10)
    assert b @ losses == pytest.approx(best_b @ losses, abs=1e-10)


@some
@given(losses=numbers, point=numbers)
def test_phi_zero_is_the_upper_side(losses, point):
    for upper in (WorstCase(), CVaR(0.4), Average()):
        objective = RelativeFairness(0.0, upper, CVaR(0.2))
        assert objective.value(losses) == pytest.approx(upper.value(losses), abs=1e-14)
        assert np.allclose(objective.prox(point, 1.0), upper.prox(point, 1.0), rtol=0, atol=1e-14)


@some
@given(point=numbers, losses=numbers)
def test_rho_is_chi_square_on_the_same_set(point, losses):
    plain, penalised = RelativeFairness(0.3), RelativeFairness(0.3, rho=0.2)
    composed = ChiSquare(0.2, plain)
    assert np.array_equal(penalised.prox(point, 0.7), composed.prox(point, 0.7))
    assert penalised.value(losses) == composed.value(losses)
    assert penalised.strong_convexity(5) == composed.strong_convexity(5) == 1.0


def test_the_l1_norm_is_attained_by_a_vertex():
    rng = np.random.default_rng(0)
    for objective in (
        RelativeFairness(0.4),
        RelativeFairness(0.2, CVaR(0.3), CVaR(0.3)),
        RelativeFairness(0.5, WorstCase(), Average((1, 2, 3, 4, 5))),
        RelativeFairness(0.5, Average((1, 2, 3, 4, 5)), WorstCase()),
    ):
        seen = max(np.abs(objective.weights(rng.normal(size=5))).sum() for _ in range(500))
        assert seen == pytest.approx(objective.l1_norm(5), abs=1e-12)
    assert RelativeFairness(0.4).l1_norm(5) == pytest.approx(1.4 / 0.6)


@dataclass(frozen=True)
class Ball(SaddleObjective):
    """A set as a user may write one: weights of sum one within a distance from equal ones."""

    radius: float

    def weights(self, losses):
        away = losses - losses.mean()
        away = away - away.mean()  # where all are equal, what rounding has left
        return 1 / losses.size + self.radius * away / max(np.linalg.norm(away), 1e-300)

    def prox(self, point, step):
        away = point - point.mean()
        return 1 / point.size + away * min(1, self.radius / max(np.linalg.norm(away), 1e-300))


@some
@given(losses=numbers, point=numbers, phi=st.sampled_from([0.0, 0.01, 0.3, 0.9]))
def test_the_difference_of_two_balls_is_a_ball(losses, point, phi):
    objective, whole = (
        RelativeFairness(phi, Ball(0.3), Ball(0.5)),
        Ball((0.3 + phi * 0.5) / (1 - phi)),
    )
    for z in (point, 100 * point):
        bound = TOLERANCE * max(1.0, np.linalg.norm(z - whole.prox(z, 1.0))) ** 0.5
        assert np.linalg.norm(objective.prox(z, 1.0) - whole.prox(z, 1.0)) <= bound
    assert objective.value(losses) == pytest.approx(whole.value(losses), abs=1e-12)
    a, b = objective.split(whole.weights(losses))
    assert np.linalg.norm((a - phi * b) / (1 - phi) - whole.weights(losses)) <= 2 * TOLERANCE
    assert np.linalg.norm(a - 0.2) <= 0.3 + 1e-12 and np.linalg.norm(b - 0.2) <= 0.5 + 1e-12


@some
@given(point=numbers, phi=st.sampled_from([0.0, 0.01, 0.3, 0.9]), level=st.floats(0.2, 1.0))
def test_unequal_caps_that_are_equal_give_the_symmetric_set(point, phi, level):
    """Two methods that share nothing: isotonic regression, and projections in turn."""
    equal = RelativeFairness(phi, CVaR(level), WorstCase())
    same = RelativeFairness(phi, HeterogeneousCVaR(level), WorstCase())
    for scale in (1e-3, 1.0, 1e3):
        error = np.abs(same.prox(scale * point, 1.0) - equal.prox(scale * point, 1.0)).max()
        assert error <= TOLERANCE * max(1.0, scale) ** 0.5
    assert same.value(point) == pytest.approx(equal.value(point), abs=1e-11)
    assert same.l1_norm(5) >= equal.l1_norm(5) - 1e-12


@pytest.mark.long
@pytest.mark.parametrize("n", [1, 2, 7, 40])
def test_a_quadratic_programme_agrees_on_unequal_caps(n):
    rng = np.random.default_rng(n)
    for _ in range(5):
        sides = [
            HeterogeneousCVaR(tuple(1 / n + (1 - 1 / n) * rng.uniform(0, 1, n))) for _ in range(2)
        ]
        objective = RelativeFairness(rng.uniform(0, 0.9), *sides, rho=rng.choice([0.0, 0.3]))
        point = rng.normal(1 / n, 1.0, n)
        wanted = solver_prox(objective, point, 1.0)
        assert np.allclose(objective.prox(point, 1.0), wanted, rtol=0, atol=1e-5)


def test_a_projection_that_is_none_is_refused():
    class Wrong(Ball):
        def prox(self, point, step):
            return super().prox(point / 2, step)

    with pytest.raises(ValueError, match="that prox is the projection"):
        RelativeFairness(0.3, Wrong(0.3), Ball(0.5)).prox(np.array([0.3, 0.9, -0.2]), 1.0)


@given(losses=numbers, phis=st.tuples(st.floats(0, 0.9), st.floats(0, 0.9)))
def test_proposition_9_bounds_the_ratio_and_tightens_with_phi(losses, phis):
    losses = np.abs(losses) + 0.1
    bounds = []
    for phi in sorted(phis):
        objective = RelativeFairness(phi, CVaR(0.4), CVaR(0.3))
        a, b = objective.extremes(losses)
        ratio, low = (a @ losses) / (b @ losses), float(b @ losses)
        lower, upper = objective.unfairness_bounds(losses, 0.5 * low, 2.0 * low)
        assert lower <= ratio * (1 + 1e-12) and ratio <= upper * (1 + 1e-12)
        exact = objective.unfairness_bounds(losses, low, low)
        assert exact == pytest.approx((ratio, ratio))
        bounds.append((lower, upper))
    assert bounds[0][0] <= bounds[1][0] + 1e-12 and bounds[1][1] <= bounds[0][1] + 1e-12
    with pytest.raises(ValueError, match="least"):
        objective.unfairness_bounds(losses, 2.0 * low, 3.0 * low)


def test_a_hundred_thousand_clients_are_split_exactly():
    rng = np.random.default_rng(1)
    objective = RelativeFairness(0.3, CVaR(0.2), CVaR(0.4))
    weights = objective.prox(1e-4 * rng.normal(size=100_000), 1.0)
    a, b = objective.split(weights)
    assert np.abs((a - 0.3 * b) / 0.7 - weights).max() <= 1e-15
    assert violation(CVaR(0.2), a) <= 1e-12 and violation(CVaR(0.4), b) <= 1e-12


def quadratic_federation(seed, n=6, d=2):
    """f_i(x) = (x - c_i)' H_i (x - c_i) / 2 + e_i with similar H_i, so signed sums stay convex."""
    rng = np.random.default_rng(seed)
    roots = rng.normal(size=(n, d, d)) * 0.25
    hessians = np.eye(d) + roots @ roots.transpose(0, 2, 1) / d
    return hessians, rng.normal(size=(n, d)), rng.uniform(0.05, 0.5, n)


def exact_solution(objective, problem):
    """Return min over x of max over weights by the dual: min_x is closed for quadratics."""
    import cvxpy as cp

    hessians, centres, floors = problem
    n = len(floors)
    pulls = np.einsum("nij,nj->ni", hessians, centres)
    constants = 0.5 * np.einsum("ni,ni->n", pulls, centres) + floors
    w = cp.Variable(n)
    constraints, _ = solver_parts(objective, w)
    matrix = sum(w[i] * hessians[i] for i in range(n))
    dual = constants @ w - 0.5 * cp.matrix_frac(pulls.T @ w, matrix)
    best = solve(cp.Problem(cp.Maximize(dual), constraints))
    x = np.linalg.solve(np.einsum("n,nij->ij", w.value, hessians), pulls.T @ w.value)
    away = x - centres
    return float(best), 0.5 * np.einsum("ni,nij,nj->n", away, hessians, away) + floors


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("upper", "lower", "drop"),
    # With the worst case above, solutions at a kink of the maximum may stay where they are.
    [(WorstCase(), WorstCase(), 0.0), (CVaR(0.5), CVaR(0.5), 0.02), (CVaR(0.25), CVaR(0.75), 0.0)],
)
def test_theorem_1_unfairness_does_not_increase_with_phi(seed, upper, lower, drop):
    problem = quadratic_federation(seed)
    unfairness = []
    for phi in (0.0, 0.1, 0.2, 0.3):
        objective = RelativeFairness(phi, upper, lower)
        optimum, losses = exact_solution(objective, problem)
        assert objective.value(losses) == pytest.approx(optimum, rel=1e-4)  # it is a saddle point
        a, b = objective.extremes(losses)
        unfairness.append((a @ losses) / (b @ losses))
    for before, after in pairwise(unfairness):
        assert after <= before * (1 + 1e-4)
    assert unfairness[-1] <= unfairness[0] * (1 + 1e-4 - drop)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: RelativeFairness(1.0), r"\[0, 1\)"),
        (lambda: RelativeFairness(-0.1), r"\[0, 1\)"),
        (lambda: RelativeFairness(0.1, KL(1.0)), "upper must be a set of weights"),
        (lambda: RelativeFairness(0.1, lower=ChiSquare(1.0)), "lower must be"),
        (lambda: RelativeFairness(0.1, rho=-1.0), "rho"),
    ],
)
def test_wrong_arguments_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        wrong()
