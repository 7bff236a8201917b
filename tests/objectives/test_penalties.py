"""Distances and transport to a prior, and q-fairness: limits, reductions, known answers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from equifed.objectives import (
    Average,
    ChiSquare,
    L1Distance,
    L2Distance,
    Proportional,
    QFair,
    Transport,
    WorstCase,
)
from equifed.objectives.projections import project_capped_simplex

pytestmark = pytest.mark.long

some = settings(deadline=None, max_examples=25)
numbers = st.lists(st.floats(-2, 2) | st.sampled_from([0.0, 1.0]), min_size=4, max_size=4).map(
    np.array
)
SIZES = (3.0, 1.0, 2.0, 4.0)
LINE = np.abs(np.subtract.outer(np.arange(4.0), np.arange(4.0)))
ALL = [
    lambda strength: L1Distance(strength, SIZES),
    lambda strength: L2Distance(strength, SIZES),
    lambda strength: Transport(strength, LINE, SIZES),
]


@pytest.mark.parametrize("penalised", ALL)
@some
@given(losses=numbers, point=numbers)
def test_a_weak_penalty_is_the_worst_case_and_a_strong_one_the_average(penalised, losses, point):
    weak, strong = penalised(1e-9), penalised(1e9)
    assert weak.value(losses) == pytest.approx(WorstCase().value(losses), abs=1e-7)
    assert strong.value(losses) == pytest.approx(Average(SIZES).value(losses), abs=1e-7)
    onto_simplex = project_capped_simplex(point, np.ones(4))
    assert np.allclose(weak.prox(point, 1.0), onto_simplex, rtol=0, atol=1e-7)
    assert np.allclose(strong.prox(point, 1.0), Average(SIZES).start(4), rtol=0, atol=1e-7)


@some
@given(losses=numbers, point=numbers, strength=st.floats(0.01, 2))
def test_a_transport_that_costs_the_same_everywhere_is_half_the_l1_distance(
    losses, point, strength
):
    moved = Transport(strength, 1 - np.eye(4), SIZES)
    away = L1Distance(strength / 2, SIZES)
    assert moved.value(losses) == pytest.approx(away.value(losses), abs=1e-12)
    weights = away.prox(point, 1.0)
    assert np.allclose(moved.prox(point, 1.0), weights, rtol=0, atol=1e-11)
    assert moved.penalty(weights) == pytest.approx(away.penalty(weights), abs=1e-9)


@some
@given(point=numbers)
def test_the_transport_cost_on_a_line_is_the_distance_of_the_distribution_functions(point):
    weights = WorstCase().prox(point, 1.0)
    expected = np.abs(np.cumsum(weights - Average(SIZES).start(4))).sum()
    assert Transport(2.0, LINE, SIZES).penalty(weights) == pytest.approx(2 * expected, abs=1e-9)


@pytest.mark.parametrize("n", [2, 10, 25])
def test_the_transport_prox_meets_the_conditions_of_optimality(n):
    """Prices w - point: no client's mass sits where it would cost more than elsewhere."""
    rng = np.random.default_rng(n)
    for trial in range(6):
        cost = rng.uniform(0, 1, (n, n)) * (1 - np.eye(n))
        prior = rng.dirichlet(np.ones(n))
        if trial % 2:  # ties everywhere
            cost, prior = np.round(3 * cost), np.full(n, 1 / n)
        objective = Transport(0.3, cost, tuple(prior))
        point = np.round(rng.normal(1 / n, 0.3, n), 1 + 8 * (trial % 3))
        weights = objective.prox(point, 1.0)
        prices = weights - point
        # Duality: step psi(w) + <prices, w> = sum_i p_i min_j (step tau C_ij + prices_j).
        cheapest = prior @ (0.3 * cost + prices).min(axis=1)
        assert objective.penalty(weights) + prices @ weights == pytest.approx(cheapest, abs=1e-9)
        assert weights.sum() == pytest.approx(1, abs=1e-12) and weights.min() >= 0


def test_the_squared_distance_is_chi_square_by_another_name():
    losses = np.array([0.4, 2.0, 1.1, 0.3])
    ours, known = L2Distance(0.8, SIZES), ChiSquare(0.2, centre=SIZES)
    assert np.array_equal(ours.weights(losses), known.weights(losses))
    assert ours.penalty(losses) == pytest.approx(known.penalty(losses), abs=1e-15)
    assert ours.strong_convexity(4) == known.strong_convexity(4)


@given(losses=st.lists(st.floats(0.01, 5), min_size=3, max_size=3).map(np.array))
@pytest.mark.parametrize("q", [0.0, 0.5, 1.0, 3.0])
def test_the_gradient_of_q_fair(losses, q):
    h = 1e-6
    for prior in (None, (1.0, 2.0, 5.0)):
        objective = QFair(q, prior)
        slopes = [
            (objective.value(losses + h * e) - objective.value(losses - h * e)) / (2 * h)
            for e in np.eye(3)
        ]
        assert np.allclose(slopes, objective.weights(losses), rtol=1e-5, atol=1e-6)


@given(losses=st.lists(st.floats(0, 5), min_size=3, max_size=3).map(np.array))
@pytest.mark.parametrize("q", [0.5, 1.0, 3.0])
def test_q_fair_is_the_conjugate_of_a_power(losses, q):
    """SCAFF-PD Section 3: max over w >= 0 of <w, l> - q/(q+1) sum w^(1 + 1/q)."""
    objective = QFair(q)
    best = objective.weights(losses)

    def gain(w):
        return w @ losses - q / (q + 1) * np.sum(w ** (1 + 1 / q))

    assert objective.value(losses) == pytest.approx(gain(best), rel=1e-9, abs=1e-12)
    for other in (best * 1.1, best * 0.9, best + 0.01):
        assert gain(other) <= gain(best) + 1e-12


def test_q_zero_is_the_sum_and_with_a_prior_the_average():
    losses = np.array([0.0, 2.0, 4.0, 1.0])
    assert QFair(0.0).value(losses) == losses.sum()
    assert np.array_equal(QFair(0.0).weights(losses), np.ones(4))
    assert QFair(0.0, SIZES).value(losses) == pytest.approx(Average(SIZES).value(losses))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: L1Distance(0.0), "strength"),
        (lambda: L2Distance(-1.0), "strength"),
        (lambda: L2Distance(1.0, (1, 0)), "positive"),
        (lambda: Transport(1.0, ((0, 1),)), "square"),
        (lambda: Transport(1.0, ((0, -1), (1, 0))), ">= 0"),
        (lambda: Transport(1.0, ((1, 1), (1, 0))), "diagonal"),
        (lambda: Transport(1.0, ((0, 1), (1, 0))).value(np.ones(3)), "2 clients, not 3"),
        (lambda: QFair(-1.0), "q must"),
        (lambda: QFair(1.0).value(np.array([1.0, -2.0])), "position 1"),
        (lambda: QFair(3.0).weights(np.array([1.0, 1e300])), "overflows"),
    ],
)
def test_wrong_arguments_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        wrong()


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 25), kind=st.integers(0, 4))
def test_every_feasible_weight_has_the_transport_cost_of_a_linear_programme(seed, n, kind):
    """Among them priors and weights over many orders of magnitude; the reference is the dual."""
    draw = np.random.default_rng(seed)
    cost = draw.uniform(0, 1, (n, n)) * (1 - np.eye(n))
    if seed % 2:
        cost = np.round(3 * cost)  # ties
    prior = tuple(10 ** draw.uniform(-5, 5, n)) if seed % 3 else None
    objective = Transport(10 ** draw.uniform(-2, 1), tuple(map(tuple, cost)), prior)
    weights = [
        lambda: objective.prox(draw.normal(size=n), 10 ** draw.uniform(-2, 1)),
        lambda: objective.weights(draw.normal(size=n)),
        lambda: draw.dirichlet(np.full(n, 0.03)),
        lambda: np.eye(n)[draw.integers(n)],
        lambda: objective.start(n),
    ][kind]()
    # Potentials a_i + b_j <= C_ij, by another method of another kind (interior point).
    pairs = np.array([np.r_[np.eye(n)[i], np.eye(n)[j]] for i in range(n) for j in range(n)])
    marginals = np.r_[objective.start(n), weights / weights.sum()]
    bounds = [(None, None)] * (2 * n - 1) + [(0, 0)]
    dual = linprog(-marginals, A_ub=pairs, b_ub=cost.ravel(), bounds=bounds, method="highs-ipm")
    wanted = -objective.strength * dual.fun
    assert objective.penalty(weights) == pytest.approx(wanted, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("prior", [None, (0.1, 0.2, 0.7)])
def test_proportional_is_as_strongly_convex_as_its_flattest_direction(prior):
    """psi'' = p / w^2 is smallest at the largest w, which is p / epsilon: epsilon^2 / p."""
    objective, losses = Proportional(2.0, 0.5, prior), np.full(3, 5.0)  # all beyond the ceiling
    w, h = objective.weights(losses), 1e-4
    second = [
        (objective.penalty(w) - 2 * objective.penalty(w - e) + objective.penalty(w - 2 * e)) / h**2
        for e in h * np.eye(3)
    ]
    assert objective.strong_convexity(3) == pytest.approx(min(second), rel=1e-2)
