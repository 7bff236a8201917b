"""Lorenz curve, the indices of shares, ratios of tails."""

import math

import cvxpy as cp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.optimize import linprog
from tests.metrics.vectors import positive_vectors, vectors

from equifed import metrics

pytestmark = pytest.mark.long

INDICES = {
    "gini": metrics.gini,
    "theil": metrics.theil,
    "atkinson 0.5": lambda v: metrics.atkinson(v, 0.5),
    "atkinson 1": lambda v: metrics.atkinson(v, 1.0),
    "atkinson 3": lambda v: metrics.atkinson(v, 3.0),
    "burden 1": lambda v: metrics.burden(v, 1.0),
    "burden 4": lambda v: metrics.burden(v, 4.0),
    "one minus jain": lambda v: 1 - metrics.jain(v),
    "one minus cosine": lambda v: 1 - metrics.cosine(v),
    "entropy lost": lambda v: math.log(len(v)) - metrics.entropy(v),
}
quick = settings(deadline=None, max_examples=40)


def test_by_hand():
    values = [1.0, 2.0, 5.0]
    assert metrics.gini(values) == pytest.approx(1 / 3)  # (1+4+3) * 2 / (2 * 3 * 8)
    assert metrics.jain(values) == pytest.approx(64 / 90)
    assert metrics.cosine(values) == pytest.approx(8 / math.sqrt(90))
    assert metrics.atkinson(values, math.inf) == pytest.approx(1 - 3 / 8)
    assert metrics.atkinson(values, 1) == pytest.approx(1 - 10 ** (1 / 3) * 3 / 8)
    assert metrics.atkinson(values, 2) == pytest.approx(1 - 3 / (1 + 1 / 2 + 1 / 5) * 3 / 8)
    assert metrics.burden(values, 1) == pytest.approx(math.sqrt(30 / 3) * 3 / 8 - 1)
    assert metrics.burden(values, math.inf) == pytest.approx(5 * 3 / 8 - 1)
    half_bits = metrics.entropy([2.0, 1.0, 1.0])
    assert half_bits == pytest.approx(1.5 * math.log(2))
    assert metrics.theil([2.0, 1.0, 1.0]) == pytest.approx(math.log(3) - 1.5 * math.log(2))
    x, y = metrics.lorenz_curve([5.0, 1.0, 2.0])
    np.testing.assert_allclose(x, [0, 1 / 3, 2 / 3, 1])
    np.testing.assert_allclose(y, [0, 1 / 8, 3 / 8, 1])


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


@quick
@given(positive_vectors(), st.floats(0.05, 8.0))
def test_against_scipy(values, aversion):
    assert metrics.entropy(values) == pytest.approx(stats.entropy(values), abs=1e-12)
    uniform = np.ones(len(values))
    assert metrics.theil(values) == pytest.approx(stats.entropy(values, uniform), abs=1e-12)
    mean = values.mean()
    assert metrics.atkinson(values, 1.0) == pytest.approx(1 - stats.gmean(values) / mean, abs=1e-12)
    assert metrics.atkinson(values, 2.0) == pytest.approx(1 - stats.hmean(values) / mean, abs=1e-12)
    if abs(aversion - 1) > 0.05:
        power = stats.pmean(values, 1 - aversion)
        assert metrics.atkinson(values, aversion) == pytest.approx(1 - power / mean, abs=1e-10)
    power = stats.pmean(values, 1 + aversion)
    assert metrics.burden(values, aversion) == pytest.approx(power / mean - 1, abs=1e-10)


@quick
@given(vectors())
def test_relations_between_indices(values):
    jain = metrics.jain(values)
    assert metrics.cosine(values) ** 2 == pytest.approx(jain)
    assert metrics.burden(values, 1.0) == pytest.approx(1 / math.sqrt(jain) - 1, abs=1e-9)
    assert metrics.theil(values) == pytest.approx(
        math.log(len(values)) - metrics.entropy(values), abs=1e-12
    )
    if values.sum() > 0:
        variation = values.std() / values.mean()
        assert jain == pytest.approx(1 / (1 + variation**2))


@quick
@given(values=vectors(), scale=st.sampled_from([1e-290, 1e-3, 7.0, 1e290]))
def test_scale_does_not_matter(values, scale):
    for name, index in INDICES.items():
        assert index(values * scale) == pytest.approx(index(values), abs=1e-9), name


@quick
@given(values=vectors(), random=st.randoms())
def test_names_do_not_matter(values, random):
    shuffled = np.array(random.sample(values.tolist(), len(values)))
    for name, index in INDICES.items():
        assert index(shuffled) == pytest.approx(index(values), abs=1e-12), name


@quick
@given(values=positive_vectors(min_size=2), part=st.floats(0.0, 0.5), data=st.data())
def test_a_transfer_to_the_poorer_never_raises_inequality(values, part, data):
    i, j = data.draw(st.permutations(range(len(values))))[:2]
    rich, poor = (i, j) if values[i] > values[j] else (j, i)
    after = values.copy()
    given_away = part * (values[rich] - values[poor])
    after[rich] -= given_away
    after[poor] += given_away
    for name, index in INDICES.items():
        assert index(after) <= index(values) + 1e-12, name


def test_a_real_transfer_lowers_inequality():
    for name, index in INDICES.items():
        assert index(np.array([2.0, 2.0, 5.0])) < index(np.array([1.0, 3.0, 5.0])) - 1e-4, name


@quick
@given(values=vectors(max_size=6), copies=st.integers(2, 4))
def test_copies_of_the_federation_are_as_unequal(values, copies):
    for name, index in INDICES.items():
        assert index(np.tile(values, copies)) == pytest.approx(index(values), abs=1e-9), name


@quick
@given(vectors())
def test_bounds(values):
    n, slack = len(values), 1e-12
    assert 0 <= metrics.gini(values) <= 1 - 1 / n + slack
    assert 0 <= metrics.theil(values) <= math.log(n) + slack
    assert 0 <= metrics.entropy(values) <= math.log(n) + slack
    assert 1 / n - slack <= metrics.jain(values) <= 1
    assert 1 / math.sqrt(n) - slack <= metrics.cosine(values) <= 1
    assert 0 <= metrics.atkinson(values, 3.0) <= 1
    assert 0 <= metrics.burden(values, 3.0) <= n - 1 + slack * n


def test_one_client_has_everything():
    n, values = 5, np.array([0.0, 0.0, 3.0, 0.0, 0.0])
    assert metrics.gini(values) == pytest.approx(1 - 1 / n)
    assert metrics.theil(values) == pytest.approx(math.log(n))
    assert metrics.jain(values) == pytest.approx(1 / n)
    assert metrics.entropy(values) == 0
    assert metrics.atkinson(values, 1.0) == 1
    assert metrics.atkinson(values, 2.0) == 1
    assert metrics.atkinson(values, 0.5) == pytest.approx(1 - 1 / n)  # n^(1 - 1/0.5) = 1/n
    assert metrics.burden(values, math.inf) == pytest.approx(n - 1)


@pytest.mark.parametrize("values", [[0.0, 0.0, 0.0], [0.0], [3.0], [0.1] * 3])
def test_equality_is_zero_also_at_zero_and_alone(values):
    for name, index in INDICES.items():
        assert index(np.array(values)) == pytest.approx(0.0, abs=1e-12), name


@quick
@given(positive_vectors(min_size=2))
def test_atkinson_grows_with_aversion_up_to_its_limit(values):
    path = [metrics.atkinson(values, e) for e in (0, 0.5, 1 - 1e-9, 1, 1 + 1e-9, 2, 50, 1e4)]
    assert path[0] == pytest.approx(0, abs=1e-12)
    assert (np.diff(path) >= -1e-9).all()
    assert path[-1] == pytest.approx(metrics.atkinson(values, math.inf), abs=1e-2)
    assert path[2] == pytest.approx(path[4], abs=1e-7)


def test_atkinson_looks_down_and_burden_looks_up():
    # Both vectors have mean 4 and the same distances to it, mirrored.
    one_low, one_high = np.array([1.0, 5.0, 5.0, 5.0]), np.array([7.0, 3.0, 3.0, 3.0])
    for aversion in (1.0, 5.0, math.inf):
        assert metrics.atkinson(one_low, aversion) > metrics.atkinson(one_high, aversion) + 0.01
        assert metrics.burden(one_high, aversion) > metrics.burden(one_low, aversion) - 1e-12
    assert metrics.burden(one_high, math.inf) == pytest.approx(0.75)
    assert metrics.burden(one_low, math.inf) == pytest.approx(0.25)


def test_cosine_takes_negative_values():
    assert metrics.cosine([-1.0, -1.0]) == pytest.approx(-1)
    assert metrics.cosine([-1.0, 1.0]) == 0


def test_negative_values_are_refused_by_position():
    ratios = {"palma": metrics.palma, "20:20": metrics.twenty_twenty}
    for name, index in (INDICES | ratios).items():
        if name != "one minus cosine":
            with pytest.raises(ValueError, match=r"must not be negative.*positions 1 are"):
                index(np.array([1.0, -2.0, 3.0]))


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


def test_named_ratios_are_means_of_tails():
    values = np.random.default_rng(0).permutation(np.arange(1.0, 101.0))
    assert metrics.twenty_twenty(values) == pytest.approx(
        np.arange(81, 101).mean() / np.arange(1, 21).mean()
    )
    assert metrics.palma(values) == pytest.approx(
        np.arange(91, 101).mean() / np.arange(1, 41).mean()
    )


@quick
@given(positive_vectors(max_size=8), st.floats(0.02, 1.0), st.floats(0.02, 1.0))
def test_relative_unfairness_is_the_ratio_of_two_programmes(values, alpha, beta):
    expected = capped_extreme(values, alpha, -1) / capped_extreme(values, beta, 1)
    assert metrics.relative_unfairness(values, alpha, beta) == pytest.approx(expected, rel=1e-7)


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


@quick
@given(positive_vectors(), st.floats(0.02, 1.0), st.floats(0.02, 1.0), st.floats(1e-3, 1e3))
def test_relative_unfairness_properties(values, alpha, beta, scale):
    ratio = metrics.relative_unfairness(values, alpha, beta)
    assert ratio >= 1
    assert metrics.relative_unfairness(values * scale, alpha, beta) == pytest.approx(ratio)
    assert metrics.relative_unfairness(values[::-1], alpha, beta) == pytest.approx(ratio)
    smaller_tails = metrics.relative_unfairness(values, alpha / 2, beta / 2)
    assert smaller_tails >= ratio - 1e-9 * ratio


@quick
@given(positive_vectors())
def test_mean_over_minimum_is_atkinson_with_infinite_aversion(values):
    ratio = metrics.relative_unfairness(values, 1.0, 1 / len(values))
    assert 1 - 1 / ratio == pytest.approx(metrics.atkinson(values, math.inf), abs=1e-12)


def test_zeros_are_defined():
    assert metrics.relative_unfairness([0.0, 0.0], 0.2, 0.2) == 1.0
    assert metrics.relative_unfairness([0.0, 1.0], 0.2, 0.2) == math.inf
    assert metrics.relative_unfairness([2.0], 0.2, 0.2) == 1.0
    assert metrics.relative_unfairness([0.0, 1.0], 0.5, 1.0) == 2.0


def test_messages():
    with pytest.raises(ValueError, match="aversion must be at least 0"):
        metrics.atkinson([1.0, 2.0], -1)
    with pytest.raises(ValueError, match="aversion must be at least 0"):
        metrics.burden([1.0, 2.0], math.nan)
    with pytest.raises(ValueError, match="positions 0"):
        metrics.gini([math.nan, 1.0])
    with pytest.raises(ValueError, match=r"alpha must lie in \(0, 1\], got 0"):
        metrics.relative_unfairness([1.0], 0, 0.5)
    with pytest.raises(ValueError, match="beta must lie"):
        metrics.relative_unfairness([1.0], 0.5, 40)
