"""Relative unfairness, CVaR, HCVaR."""

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


def capped_extreme(values, level, sense):
    """The linear programme over the capped simplex, by a generic solver."""
    n = len(values)
    cap = 1 / (level * n)
    solved = linprog(sense * values, A_eq=np.ones((1, n)), b_eq=[1], bounds=[(0, cap)] * n)
    assert solved.success
    return sense * solved.fun


def test_by_hand():
    losses = np.array([4.0, 1.0, 3.0, 2.0])
    assert metrics.relative_unfairness(losses, 0.25, 0.25) == 4.0
    assert metrics.relative_unfairness(losses, 0.5, 0.5) == pytest.approx(3.5 / 1.5)
    # 0.375 * 4 = 1.5 clients: (4 + 3 / 2) / 1.5 over (1 + 2 / 2) / 1.5
    assert metrics.relative_unfairness(losses, 0.375, 0.375) == pytest.approx(5.5 / 2)
    assert metrics.cvar(losses, 0.5) == 3.5
    assert metrics.cvar(losses, 0.375) == pytest.approx(5.5 / 1.5)
    assert metrics.cvar(losses, 0.5, higher_is_better=True) == 1.5
    # caps 0.25 / (1, 1, 0.5, 1): the loss 4 takes 0.25, 3 takes 0.5, 2 takes the last 0.25
    assert metrics.hcvar(losses, [1, 1, 0.5, 1]) == pytest.approx(1 + 1.5 + 0.5)


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
@given(vectors(-1e6), st.floats(0.02, 1.0))
def test_cvar_has_its_variational_form(losses, tail):
    # The minimum over eta is attained at one of the losses.
    excess = np.maximum(losses[None, :] - losses[:, None], 0).mean(axis=1) / tail
    expected = (losses + excess).min()
    slack = 1e-9 * (1 + np.abs(losses).max())
    assert metrics.cvar(losses, tail) == pytest.approx(expected, abs=slack)


@quick
@given(
    st.integers(1, 8).flatmap(
        lambda n: st.tuples(
            *(st.lists(st.floats(low, 1.0), min_size=n, max_size=n) for low in (0.0, 0.05, 0.01))
        )
    )
)
def test_hcvar_equals_both_sides_of_lemma_1(drawn):
    losses, alphas, weights = map(np.array, drawn)
    p = weights / weights.sum()
    dual = losses + (p / alphas * np.maximum(losses[None, :] - losses[:, None], 0)).sum(axis=1)
    primal = linprog(-losses, A_eq=np.ones((1, len(p))), b_eq=[1], bounds=np.c_[0 * p, p / alphas])
    # The solver's default tolerance is 1e-7; the caps may sum to 1 exactly.
    value = metrics.hcvar(losses, alphas, weights)
    assert value == pytest.approx(dual.min(), abs=1e-12)
    if primal.success:
        assert value == pytest.approx(-primal.fun, abs=1e-6)


atoms = st.one_of(st.floats(-1.0, 1.0), st.sampled_from([0.0, 0.5, 1.0]))


@quick
@given(
    st.integers(1, 8).flatmap(
        lambda n: st.tuples(
            *(
                st.lists(numbers, min_size=n, max_size=n)
                for numbers in (atoms, st.floats(0.05, 1.0), st.floats(0.01, 1.0))
            )
        )
    )
)
def test_the_conditional_expectation_is_hcvar_whatever_the_atoms(drawn):
    """Lemma 1, with ties among the losses, and by the definition itself on a fine grid."""
    losses, alphas, weights = map(np.array, drawn)
    value = metrics.hcvar_by_tail(losses, alphas, weights)
    assert value == pytest.approx(metrics.hcvar(losses, alphas, weights), abs=1e-11)
    # Spread every atom over many near losses: then the expectation above the quantile is plain.
    p = weights / weights.sum() / alphas
    fine = 20_000
    near = np.repeat(losses, fine) + 1e-6 * np.tile(np.linspace(0, 1, fine), len(losses))
    mass = np.repeat(p / fine, fine)
    order = np.argsort(-near)
    above = np.cumsum(mass[order]) <= 1.0  # of tau, so 1 / tau of the probability
    plain = (mass[order] * near[order])[above].sum() / mass[order][above].sum()
    assert value == pytest.approx(plain, abs=2e-3)


def test_all_losses_equal_leave_nobody_above_the_quantile():
    assert metrics.hcvar_by_tail([0.3, 0.3, 0.3], [0.5, 0.4, 1.0]) == pytest.approx(0.3)


@quick
@given(vectors(-1e3, 1e3), st.floats(0.02, 1.0))
def test_hcvar_with_equal_levels_is_cvar(losses, tail):
    slack = 1e-9 * (1 + np.abs(losses).max())
    assert metrics.hcvar(losses, tail) == pytest.approx(metrics.cvar(losses, tail), abs=slack)


def test_hcvar_reductions():
    losses, sizes = np.array([3.0, 1.0, 2.0]), np.array([1, 2, 5])
    average = metrics.average_by_sample(losses, sizes)
    assert metrics.hcvar(losses, 1.0, sizes) == pytest.approx(average)
    assert metrics.hcvar(losses, sizes / sizes.sum(), sizes) == pytest.approx(3.0)  # alpha_i = p_i


@quick
@given(vectors(-1e3, 1e3), st.integers(1, 15))
def test_cvar_and_worst_fraction_agree_on_whole_clients(losses, count):
    tail = min(count, len(losses)) / len(losses)
    for higher in (True, False):
        assert metrics.cvar(losses, tail, higher_is_better=higher) == pytest.approx(
            metrics.worst_fraction(losses, tail, higher_is_better=higher), rel=1e-9, abs=1e-9
        )


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


def test_losses_may_be_negative_for_cvar_but_not_for_ratios():
    assert metrics.cvar([-2.0, -1.0], 0.5) == -1.0
    assert metrics.hcvar([-2.0, -1.0], 0.5) == -1.0
    with pytest.raises(ValueError, match="must not be negative"):
        metrics.palma([-2.0, -1.0])


def test_messages():
    with pytest.raises(ValueError, match=r"alpha must lie in \(0, 1\], got 0"):
        metrics.relative_unfairness([1.0], 0, 0.5)
    with pytest.raises(ValueError, match="beta must lie"):
        metrics.relative_unfairness([1.0], 0.5, 40)
    with pytest.raises(ValueError, match="tail must lie"):
        metrics.cvar([1.0], math.nan)
    with pytest.raises(ValueError, match="alphas must lie"):
        metrics.hcvar([1.0, 2.0], [0.5, 1.5])
    with pytest.raises(ValueError, match=r"one level for each of the 2 clients.*got shape \(3,\)"):
        metrics.hcvar([1.0, 2.0], [0.5, 0.5, 0.5])
    with pytest.raises(ValueError, match="weights must not all be zero"):
        metrics.hcvar([1.0, 2.0], 0.5, [0, 0])
