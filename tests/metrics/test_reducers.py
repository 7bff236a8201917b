"""Averages, worst and best, spreads, Lorenz curve, Gini coefficient, ratios of tails."""

import math

import cvxpy as cp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from tests.metrics.vectors import positive_vectors, vectors

from equifed import metrics

quick = settings(deadline=None, max_examples=40)
VALUES = np.array([0.5, 1.0, 0.25, 0.75, 0.0])


def test_by_hand():
    assert metrics.average_by_client(VALUES) == 0.5
    assert metrics.average_by_sample(VALUES, [4, 0, 4, 0, 0]) == 0.375
    assert metrics.spread(VALUES) == 1.0
    # (0 + .25 + .0625 + .0625 + .25) / 5 = 0.125
    assert metrics.standard_deviation(VALUES) == pytest.approx(0.125**0.5)


def test_the_worst_have_low_accuracies_and_high_losses():
    assert metrics.worst_fraction(VALUES, 0.4, higher_is_better=True) == 0.125
    assert metrics.worst_fraction(VALUES, 0.4, higher_is_better=False) == 0.875
    assert metrics.best_fraction(VALUES, 0.4, higher_is_better=True) == 0.875
    assert metrics.best_fraction(VALUES, 0.4, higher_is_better=False) == 0.125
    assert metrics.worst(VALUES, higher_is_better=True) == 0.0
    assert metrics.worst(VALUES, higher_is_better=False) == 1.0


def test_a_fraction_of_clients_is_rounded_up():
    # 0.3 * 5 = 1.5 clients are two, 0.01 * 5 is one.
    assert metrics.worst_fraction(VALUES, 0.3, higher_is_better=True) == 0.125
    assert metrics.worst_fraction(VALUES, 0.01, higher_is_better=True) == 0.0


def test_a_whole_number_of_clients_is_not_rounded():
    # percent / 100 * 100 is not always percent in floating point (0.07 * 100 = 7.000000000000001)
    values = np.arange(100.0)
    for percent in range(1, 101):
        worst = metrics.worst_fraction(values, percent / 100, higher_is_better=True)
        assert worst == np.arange(percent).mean(), percent


@settings(deadline=None, max_examples=50)
@given(vectors(-1e6), st.floats(0.01, 1.0), st.booleans(), st.randoms())
def test_order_bounds_and_permutations(values, fraction, higher, random):
    shuffled = np.array(random.sample(values.tolist(), len(values)))
    worst = metrics.worst_fraction(values, fraction, higher_is_better=higher)
    best = metrics.best_fraction(values, fraction, higher_is_better=higher)
    mean = metrics.average_by_client(values)
    slack = 1e-9 * (1 + np.abs(values).max())
    sign = 1 if higher else -1
    assert sign * metrics.worst(values, higher_is_better=higher) <= sign * worst + slack
    assert sign * worst <= sign * mean + slack
    assert sign * mean <= sign * best + slack
    assert metrics.worst_fraction(shuffled, fraction, higher_is_better=higher) == pytest.approx(
        worst, rel=1e-12, abs=slack
    )


def test_by_sample_is_the_pooled_average():
    rng = np.random.default_rng(0)
    groups = [rng.random(size) for size in (3, 10, 1)]
    means = [group.mean() for group in groups]
    pooled = np.concatenate(groups).mean()
    assert metrics.average_by_sample(means, [3, 10, 1]) == pytest.approx(pooled, rel=1e-14)


def test_one_client_is_its_own_worst_and_has_no_spread():
    assert metrics.worst_fraction([0.3], 0.2, higher_is_better=True) == 0.3
    assert metrics.standard_deviation([0.3]) == metrics.spread([0.3]) == 0.0


@settings(deadline=None, max_examples=50)
@given(vectors(-1e6))
def test_the_deviation_is_numpys_and_exactly_zero_for_equal_values(values):
    slack = 1e-9 * (1 + np.abs(values).max()) ** 2
    found = metrics.standard_deviation(values)
    assert found**2 == pytest.approx(values.var(), rel=1e-9, abs=slack)
    assert metrics.standard_deviation(np.full(50, values[0])) == 0.0


def test_a_stack_of_vectors_gives_the_results_of_its_rows():
    stack = np.random.default_rng(1).random((7, 6))
    stack[0], stack[1, 2] = 0.0, 0.0  # degenerate rows beside ordinary ones
    kernels = {r.name: lambda v, r=r: r.compute(v, True) for r in metrics.REDUCERS.values()}
    kernels["average_by_sample"] = lambda v: metrics.average_by_sample(v, np.arange(6))
    for name, kernel in kernels.items():
        rows = [kernel(row) for row in stack]
        assert all(isinstance(row, float) for row in rows), name
        np.testing.assert_allclose(kernel(stack), rows, rtol=1e-13, err_msg=name)


# -- inequality ----------------------------------------------------------------------------------


@quick
@given(vectors())
def test_gini_is_the_area_and_the_mean_difference(values):
    x, y = metrics.lorenz_curve(values)
    gini = metrics.gini(values)
    assert gini == pytest.approx(1 - 2 * np.trapezoid(y, x), abs=1e-12)
    if values.sum() > 0:
        differences = np.abs(values[:, None] - values).sum()
        assert gini == pytest.approx(differences / (2 * values.size * values.sum()), abs=1e-12)


@quick
@given(vectors())
def test_lorenz_curve_is_convex_under_the_diagonal(values):
    x, y = metrics.lorenz_curve(values)
    assert (x[0], y[0], x[-1], y[-1]) == (0.0, 0.0, 1.0, 1.0)
    assert (np.diff(y) >= -1e-15).all()
    assert (np.diff(y, n=2) >= -1e-12).all()
    assert (y <= x + 1e-12).all()
    assert 0 <= metrics.gini(values) <= 1 - 1 / len(values) + 1e-12


@quick
@given(values=vectors(), scale=st.sampled_from([1e-290, 1e-3, 7.0, 1e290]))
def test_scale_does_not_matter(values, scale):
    assert metrics.gini(values * scale) == pytest.approx(metrics.gini(values), abs=1e-9)


@quick
@given(values=vectors(), random=st.randoms())
def test_names_do_not_matter(values, random):
    shuffled = np.array(random.sample(values.tolist(), len(values)))
    assert metrics.gini(shuffled) == pytest.approx(metrics.gini(values), abs=1e-12)


@quick
@given(values=positive_vectors(min_size=2), part=st.floats(0.0, 0.5), data=st.data())
def test_a_transfer_to_the_poorer_never_raises_inequality(values, part, data):
    i, j = data.draw(st.permutations(range(len(values))))[:2]
    rich, poor = (i, j) if values[i] > values[j] else (j, i)
    after = values.copy()
    given_away = part * (values[rich] - values[poor])
    after[rich] -= given_away
    after[poor] += given_away
    assert metrics.gini(after) <= metrics.gini(values) + 1e-12


def test_a_real_transfer_lowers_inequality():
    assert metrics.gini(np.array([2.0, 2.0, 5.0])) < metrics.gini(np.array([1.0, 3.0, 5.0])) - 1e-4


@quick
@given(values=vectors(max_size=6), copies=st.integers(2, 4))
def test_copies_of_the_federation_are_as_unequal(values, copies):
    assert metrics.gini(np.tile(values, copies)) == pytest.approx(metrics.gini(values), abs=1e-9)


@pytest.mark.parametrize("values", [[0.0, 0.0, 0.0], [0.0], [3.0], [0.1] * 3])
def test_equality_is_zero_also_at_zero_and_alone(values):
    assert metrics.gini(np.array(values)) == pytest.approx(0.0, abs=1e-12)


# -- ratios of tails ------------------------------------------------------------------------------


def capped_extreme(values, level, sense):
    """The linear programme over the capped simplex, by a generic solver."""
    n = len(values)
    cap = 1 / (level * n)
    solved = linprog(sense * values, A_eq=np.ones((1, n)), b_eq=[1], bounds=[(0, cap)] * n)
    assert solved.success
    return sense * solved.fun


def test_ratios_by_hand():
    losses = np.array([4.0, 1.0, 3.0, 2.0])
    assert metrics.relative_unfairness(losses, 0.25, 0.25) == 4.0
    assert metrics.relative_unfairness(losses, 0.5, 0.5) == pytest.approx(3.5 / 1.5)
    # 0.375 * 4 = 1.5 clients: (4 + 3 / 2) / 1.5 over (1 + 2 / 2) / 1.5
    assert metrics.relative_unfairness(losses, 0.375, 0.375) == pytest.approx(5.5 / 2)


@pytest.mark.long
@quick
@given(positive_vectors(max_size=8), st.floats(0.02, 1.0), st.floats(0.02, 1.0))
def test_relative_unfairness_is_the_ratio_of_two_programmes(values, alpha, beta):
    expected = capped_extreme(values, alpha, -1) / capped_extreme(values, beta, 1)
    assert metrics.relative_unfairness(values, alpha, beta) == pytest.approx(expected, rel=1e-7)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_relative_unfairness_agrees_with_an_interior_point_solver(seed):
    rng = np.random.default_rng(seed)
    n, (alpha, beta) = 11, rng.uniform(0.05, 1, 2)
    values = rng.exponential(size=n)
    a, b = cp.Variable(n, nonneg=True), cp.Variable(n, nonneg=True)
    top = cp.Problem(cp.Maximize(values @ a), [cp.sum(a) == 1, a <= 1 / (alpha * n)])
    bottom = cp.Problem(cp.Minimize(values @ b), [cp.sum(b) == 1, b <= 1 / (beta * n)])
    expected = top.solve(solver=cp.CLARABEL) / bottom.solve(solver=cp.CLARABEL)
    assert metrics.relative_unfairness(values, alpha, beta) == pytest.approx(expected, rel=1e-6)


@pytest.mark.long
@quick
@given(positive_vectors(), st.floats(0.02, 1.0), st.floats(0.02, 1.0), st.floats(1e-3, 1e3))
def test_relative_unfairness_properties(values, alpha, beta, scale):
    ratio = metrics.relative_unfairness(values, alpha, beta)
    assert ratio >= 1
    assert metrics.relative_unfairness(values * scale, alpha, beta) == pytest.approx(ratio)
    assert metrics.relative_unfairness(values[::-1], alpha, beta) == pytest.approx(ratio)
    smaller_tails = metrics.relative_unfairness(values, alpha / 2, beta / 2)
    assert smaller_tails >= ratio - 1e-9 * ratio


def test_zeros_are_defined():
    assert metrics.relative_unfairness([0.0, 0.0], 0.2, 0.2) == 1.0
    assert metrics.relative_unfairness([0.0, 1.0], 0.2, 0.2) == math.inf
    assert metrics.relative_unfairness([2.0], 0.2, 0.2) == 1.0
    assert metrics.relative_unfairness([0.0, 1.0], 0.5, 1.0) == 2.0


def test_twenty_twenty_is_the_ratio_of_means_of_tails():
    values = np.random.default_rng(0).permutation(np.arange(1.0, 101.0))
    expected = np.arange(81, 101).mean() / np.arange(1, 21).mean()
    assert metrics.twenty_twenty(values) == pytest.approx(expected)


def test_gini_by_hand_and_its_bounds():
    assert metrics.gini([1.0, 2.0, 5.0]) == pytest.approx(1 / 3)  # (1+4+3) * 2 / (2 * 3 * 8)
    assert metrics.gini([0.0, 0.0, 3.0, 0.0, 0.0]) == pytest.approx(1 - 1 / 5)
    x, y = metrics.lorenz_curve([5.0, 1.0, 2.0])
    np.testing.assert_allclose(x, [0, 1 / 3, 2 / 3, 1])
    np.testing.assert_allclose(y, [0, 1 / 8, 3 / 8, 1])


def test_negative_values_are_refused_by_position():
    for index in (metrics.gini, metrics.twenty_twenty):
        with pytest.raises(ValueError, match=r"must not be negative.*positions 1 are"):
            index(np.array([1.0, -2.0, 3.0]))


def test_messages():
    with pytest.raises(ValueError, match="positions 1, 3"):
        metrics.average_by_client([1.0, np.nan, 2.0, np.inf])
    with pytest.raises(ValueError, match=r"shape \(0,\)"):
        metrics.spread([])
    with pytest.raises(ValueError, match=r"fraction must lie in \(0, 1\], got 20"):
        metrics.worst_fraction(VALUES, 20, higher_is_better=True)
    with pytest.raises(ValueError, match="each of the 5 clients, got 2"):
        metrics.average_by_sample(VALUES, [1, 2])
    with pytest.raises(ValueError, match="not all be zero"):
        metrics.average_by_sample([1.0, 2.0], [0, 0])
    with pytest.raises(ValueError, match="sizes must not be negative"):
        metrics.average_by_sample([1.0, 2.0], [-1, 3])
    with pytest.raises(ValueError, match="positions 0"):
        metrics.gini([math.nan, 1.0])
    with pytest.raises(ValueError, match=r"alpha must lie in \(0, 1\], got 0"):
        metrics.relative_unfairness([1.0], 0, 0.5)
    with pytest.raises(ValueError, match="beta must lie"):
        metrics.relative_unfairness([1.0], 0.5, 40)


def test_long_lists_of_positions_are_cut():
    with pytest.raises(ValueError, match="8, 9 and 5 more"):
        metrics.spread(np.full(15, np.nan))


@pytest.mark.parametrize("reducer", metrics.REDUCERS.values(), ids=lambda one: one.name)
def test_what_is_said_of_a_reducer_is_how_it_behaves(reducer):
    draw = np.random.default_rng(0)
    values = np.sort(draw.uniform(1, 2, 9))
    found = reducer.compute(values, True)
    # Of a level: it rises with all clients. The others say how far clients are apart.
    assert reducer.level == math.isclose(reducer.compute(values + 1, True), found + 1)
    assert reducer.directed == (reducer.compute(values, False) != found)
    inner = values.copy()
    inner[1:-1] += 0.01 * np.diff(values)[:-1]  # neither the best nor the worst client
    assert reducer.extreme == (reducer.compute(inner, True) == found)
    if reducer.signed:
        assert math.isfinite(reducer.compute(-values, True))
    else:
        with pytest.raises(ValueError, match="must not be negative"):
            reducer.compute(-values, True)
    equal, far = reducer.compute(np.ones(2000), True), np.eye(1, 2000)[0]
    low, high = (-math.inf, math.inf) if reducer.level else (equal, reducer.compute(far, True))
    assert reducer.bounds[0] == low
    assert math.isinf(reducer.bounds[1]) or reducer.bounds[1] == pytest.approx(high, abs=1e-3)
