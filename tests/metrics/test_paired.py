"""Means over seeds and paired differences."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from equifed import metrics

RUNS = 2000
THREE_ERRORS = 3 * math.sqrt(0.95 * 0.05 / RUNS)
numbers = st.floats(-1e3, 1e3)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=10), st.floats(0.5, 0.99))
def test_the_t_interval_is_scipys(pairs, level):
    ours, theirs = np.array(pairs).T
    expected = stats.ttest_rel(ours, theirs) if np.ptp(ours - theirs) > 1e-6 else None
    interval = metrics.paired_difference(ours, theirs, level=level)
    assert interval.estimate == pytest.approx((ours - theirs).mean(), abs=1e-9)
    if expected is not None:
        limits = expected.confidence_interval(level)
        assert interval.lower == pytest.approx(limits.low, rel=1e-6, abs=1e-6)
        assert interval.upper == pytest.approx(limits.high, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("seeds", [3, 5, 20])
def test_t_covers_at_its_level(seeds):
    draws = np.random.default_rng(seeds).normal(size=(RUNS, seeds))
    held = np.mean([0.0 in metrics.mean_interval(row) for row in draws])
    assert abs(held - 0.95) <= THREE_ERRORS


def test_bootstrap_covers_with_enough_seeds():
    draws = np.random.default_rng(0).normal(size=(500, 10))
    held = np.mean(
        [
            0.0 in metrics.mean_interval(row, kind="bootstrap", resamples=1000, seed=run)
            for run, row in enumerate(draws)
        ]
    )
    assert abs(held - 0.95) <= 3 * math.sqrt(0.95 * 0.05 / 500)


def test_bootstrap_stays_within_the_observed_and_is_seeded():
    values = [0.1, 0.5, 0.2, 0.9]
    one = metrics.mean_interval(values, kind="bootstrap", seed=1)
    assert one == metrics.mean_interval(values, kind="bootstrap", seed=1)
    assert 0.1 <= one.lower < one.estimate < one.upper <= 0.9


def test_pairing_removes_what_the_seeds_share():
    rng = np.random.default_rng(0)
    shared, ours, theirs = rng.normal(size=(3, 5)) * [[1.0], [0.01], [0.01]]
    paired = metrics.paired_difference(shared + ours + 0.1, shared + theirs)
    single = metrics.mean_interval(shared + ours)
    assert paired.upper - paired.lower < 0.1 * (single.upper - single.lower)
    assert paired.lower > 0  # the gain of 0.1 shows


def test_degenerate_inputs():
    alone = metrics.mean_interval([0.5])
    assert (alone.estimate, alone.lower, alone.upper) == (0.5, -math.inf, math.inf)
    for kind in ("t", "bootstrap"):
        same = metrics.paired_difference([1.0, 2.0], [0.5, 1.5], kind=kind)
        assert (same.lower, same.upper) == (0.5, 0.5)


def test_messages():
    with pytest.raises(ValueError, match="same seeds, got 2 and 3"):
        metrics.paired_difference([1.0, 2.0], [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=r"baseline must hold one finite .* at \[1\]"):
        metrics.paired_difference([1.0, 2.0], [1.0, math.nan])
    with pytest.raises(ValueError, match="values must hold one finite number per seed"):
        metrics.mean_interval([])
    with pytest.raises(ValueError, match="kind must be"):
        metrics.mean_interval([1.0, 2.0], kind="z")
    with pytest.raises(ValueError, match="level must lie"):
        metrics.mean_interval([1.0, 2.0], level=1.0)
