"""Averages, worst and best, spreads, CVaR."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.metrics.vectors import vectors

from equifed import metrics

quick = settings(deadline=None, max_examples=40)
VALUES = np.array([0.5, 1.0, 0.25, 0.75, 0.0])


def test_by_hand():
    assert metrics.average_by_client(VALUES) == 0.5
    assert metrics.average_by_sample(VALUES, [4, 0, 4, 0, 0]) == 0.375
    assert metrics.minimum(VALUES) == 0.0
    assert metrics.maximum(VALUES) == 1.0
    assert metrics.spread(VALUES) == 1.0
    assert metrics.variance(VALUES) == 0.125  # (0 + .25 + .0625 + .0625 + .25) / 5
    assert metrics.standard_deviation(VALUES) == pytest.approx(0.125**0.5)


def test_the_worst_have_low_accuracies_and_high_losses():
    assert metrics.worst_fraction(VALUES, 0.4, higher_is_better=True) == 0.125
    assert metrics.worst_fraction(VALUES, 0.4, higher_is_better=False) == 0.875
    assert metrics.best_fraction(VALUES, 0.4, higher_is_better=True) == 0.875
    assert metrics.best_fraction(VALUES, 0.4, higher_is_better=False) == 0.125
    assert metrics.worst(VALUES, higher_is_better=True) == 0.0
    assert metrics.worst(VALUES, higher_is_better=False) == 1.0
    assert metrics.best(VALUES, higher_is_better=False) == 0.0


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
    assert metrics.variance([0.3]) == metrics.spread([0.3]) == 0.0


@settings(deadline=None, max_examples=50)
@given(vectors(-1e6))
def test_variance_is_numpys_and_exactly_zero_for_equal_values(values):
    slack = 1e-9 * (1 + np.abs(values).max()) ** 2
    assert metrics.variance(values) == pytest.approx(values.var(), rel=1e-9, abs=slack)
    assert metrics.standard_deviation(np.full(50, values[0])) == 0.0


def test_a_stack_of_vectors_gives_the_results_of_its_rows():
    stack = np.random.default_rng(1).random((7, 6))
    stack[0], stack[1, 2] = 0.0, 0.0  # degenerate rows beside ordinary ones
    kernels = {r.name: lambda v, r=r: r.compute(v, True) for r in metrics.reducers([0.3])}
    kernels |= {
        "average_by_sample": lambda v: metrics.average_by_sample(v, np.arange(6)),
        "atkinson": lambda v: metrics.atkinson(v, 2.0),
        "burden": lambda v: metrics.burden(v, 3.0),
    }
    for name, kernel in kernels.items():
        rows = [kernel(row) for row in stack]
        assert all(isinstance(row, float) for row in rows), name
        np.testing.assert_allclose(kernel(stack), rows, rtol=1e-13, err_msg=name)


def test_cvar_by_hand():
    losses = np.array([4.0, 1.0, 3.0, 2.0])
    assert metrics.cvar(losses, 0.5) == 3.5
    assert metrics.cvar(losses, 0.375) == pytest.approx(5.5 / 1.5)  # (4 + 3 / 2) / 1.5 clients
    assert metrics.cvar(losses, 0.5, higher_is_better=True) == 1.5
    assert metrics.cvar([-2.0, -1.0], 0.5) == -1.0


@quick
@given(vectors(-1e6), st.floats(0.02, 1.0))
def test_cvar_has_its_variational_form(losses, tail):
    # The minimum over eta is attained at one of the losses.
    excess = np.maximum(losses[None, :] - losses[:, None], 0).mean(axis=1) / tail
    expected = (losses + excess).min()
    slack = 1e-9 * (1 + np.abs(losses).max())
    assert metrics.cvar(losses, tail) == pytest.approx(expected, abs=slack)


@quick
@given(vectors(-1e3, 1e3), st.integers(1, 15))
def test_cvar_and_worst_fraction_agree_on_whole_clients(losses, count):
    tail = min(count, len(losses)) / len(losses)
    for higher in (True, False):
        assert metrics.cvar(losses, tail, higher_is_better=higher) == pytest.approx(
            metrics.worst_fraction(losses, tail, higher_is_better=higher), rel=1e-9, abs=1e-9
        )


def test_messages():
    with pytest.raises(ValueError, match="positions 1, 3"):
        metrics.average_by_client([1.0, np.nan, 2.0, np.inf])
    with pytest.raises(ValueError, match=r"shape \(0,\)"):
        metrics.minimum([])
    with pytest.raises(ValueError, match=r"fraction must lie in \(0, 1\], got 20"):
        metrics.worst_fraction(VALUES, 20, higher_is_better=True)
    with pytest.raises(ValueError, match="each of the 5 clients, got 2"):
        metrics.average_by_sample(VALUES, [1, 2])
    with pytest.raises(ValueError, match="not all be zero"):
        metrics.average_by_sample([1.0, 2.0], [0, 0])
    with pytest.raises(ValueError, match="sizes must not be negative"):
        metrics.average_by_sample([1.0, 2.0], [-1, 3])
    with pytest.raises(ValueError, match="tail must lie"):
        metrics.cvar([1.0], math.nan)


def test_long_lists_of_positions_are_cut():
    with pytest.raises(ValueError, match="8, 9 and 5 more"):
        metrics.minimum(np.full(15, np.nan))
