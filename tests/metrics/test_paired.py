"""Means over seeds, and differences of two models that answered the same samples."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from equifed import metrics
from equifed.metrics import Interval
from equifed.metrics.paired import (
    assume_independent,
    average_difference,
    bootstrap_difference,
    combine_sources,
    correlate,
    count_pairs,
    difference_intervals,
    newcombe_interval,
    worst_difference,
)

RUNS = 2000
THREE_ERRORS = 3 * math.sqrt(0.95 * 0.05 / RUNS)
numbers = st.floats(-1e3, 1e3)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=10))
def test_the_t_interval_is_scipys(pairs):
    ours, theirs = np.array(pairs).T
    expected = stats.ttest_rel(ours, theirs) if np.ptp(ours - theirs) > 1e-6 else None
    interval = metrics.paired_difference(ours, theirs)
    assert interval.estimate == pytest.approx((ours - theirs).mean(), abs=1e-9)
    if expected is not None:
        limits = expected.confidence_interval(0.95)
        assert interval.lower == pytest.approx(limits.low, rel=1e-6, abs=1e-6)
        assert interval.upper == pytest.approx(limits.high, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("seeds", [3, 5, 20])
def test_t_covers_at_its_level(seeds):
    draws = np.random.default_rng(seeds).normal(size=(RUNS, seeds))
    held = np.mean([0.0 in metrics.mean_interval(row) for row in draws])
    assert abs(held - 0.95) <= THREE_ERRORS


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
    same = metrics.paired_difference([1.0, 2.0], [0.5, 1.5])
    assert (same.lower, same.upper) == (0.5, 0.5)


def test_messages():
    with pytest.raises(ValueError, match="same seeds, got 2 and 3"):
        metrics.paired_difference([1.0, 2.0], [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=r"baseline must hold one finite .* at \[1\]"):
        metrics.paired_difference([1.0, 2.0], [1.0, math.nan])
    with pytest.raises(ValueError, match="values must hold one finite number per seed"):
        metrics.mean_interval([])


# -- the same samples -----------------------------------------------------------------------------

ALL = ("average_by_client", "average_by_sample", "worst", "worst_20_percent", "gini", "spread")
counts = hnp.arrays(np.int64, st.tuples(st.integers(1, 6), st.just(4)), elements=st.integers(0, 9))
joints = counts.filter(lambda c: (c.sum(axis=1) > 0).all()).map(lambda c: c.astype(float))


@given(data=st.data(), sizes=st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_pairs_are_counted_sample_by_sample(data, sizes):
    answers = hnp.arrays(np.bool_, sum(sizes))
    ours, theirs = data.draw(answers), data.draw(answers)
    expected, start = np.zeros((len(sizes), 4)), 0
    for i, m in enumerate(sizes):
        for a, b in zip(ours[start : start + m], theirs[start : start + m], strict=True):
            expected[
                i, [(True, True), (True, False), (False, True), (False, False)].index((a, b))
            ] += 1
        start += m
    np.testing.assert_array_equal(count_pairs(ours, theirs, sizes), expected)


@settings(max_examples=200)
@given(joint=joints)
def test_limits_hold_the_difference_and_are_never_of_width_zero(joint):
    found, lower, upper = newcombe_interval(joint)
    m = joint.sum(axis=1)
    np.testing.assert_allclose(found, (joint[:, 1] - joint[:, 2]) / m, atol=1e-12)
    assert (lower <= found + 1e-12).all() and (found <= upper + 1e-12).all()
    assert (upper - lower > 0.01).all() and (lower >= -1).all() and (upper <= 1).all()


@given(joint=joints)
def test_exchanging_the_models_turns_the_interval_round(joint):
    swapped = joint[:, [0, 2, 1, 3]]
    for name, one in difference_intervals(joint, ["average_by_client", "worst"]).items():
        other = difference_intervals(swapped, [name])[name]
        assert other.lower == pytest.approx(-one.upper)
        assert other.estimate == pytest.approx(-one.estimate)


@given(joint=joints)
def test_ignoring_a_positive_correlation_only_widens(joint):
    shared = joint[correlate(joint) >= 0]
    if len(shared):
        ours, theirs = shared[:, 0] + shared[:, 1], shared[:, 0] + shared[:, 2]
        apart = assume_independent(ours, theirs, shared.sum(axis=1))
        np.testing.assert_allclose(correlate(apart), 0, atol=1e-9)
        _, lower, upper = newcombe_interval(shared)
        _, low, high = newcombe_interval(apart)
        assert (low <= lower + 1e-9).all() and (high >= upper - 1e-9).all()


@pytest.mark.parametrize("m", [8, 20])
def test_one_clients_interval_covers_over_all_samples_there_could_be(m):
    cells = np.array([c for c in product(range(m + 1), repeat=4) if sum(c) == m], dtype=float)
    _, lower, upper = newcombe_interval(cells)
    reached = []
    for chances in np.random.default_rng(0).dirichlet(np.ones(4), size=40):
        truth = chances[1] - chances[2]
        covers = (lower <= truth) & (truth <= upper)
        reached.append(stats.multinomial.pmf(cells, m, chances)[covers].sum())
    # As Wilson's: at its level on average over the truth, and not far below it anywhere.
    assert np.mean(reached) > 0.945 and min(reached) > 0.85


def draw_joint(rng, chances, m):
    return np.array([rng.multinomial(m, p) for p in chances], dtype=float)


@pytest.mark.parametrize("name", ["average_by_client", "worst", "worst_20_percent"])
def test_summaries_cover_the_true_difference(name):
    chances = np.array([(0.5, 0.2, 0.1, 0.2), (0.3, 0.2, 0.2, 0.3), (0.6, 0.1, 0.2, 0.1)] * 4)
    ours, theirs = chances[:, 0] + chances[:, 1], chances[:, 0] + chances[:, 2]
    truth = metrics.REDUCERS[name].compute(ours, True) - metrics.REDUCERS[name].compute(
        theirs, True
    )
    rng = np.random.default_rng(0)
    trials = [
        difference_intervals(draw_joint(rng, chances, 30), [name], resamples=200)[name]
        for _ in range(300)
    ]
    assert np.mean([truth in interval for interval in trials]) > 0.92


def test_pairing_narrows_what_would_be_two_separate_accuracies():
    joint = np.array([[60.0, 8.0, 2.0, 30.0]] * 3)
    apart = assume_independent(joint[:, 0] + joint[:, 1], joint[:, 0] + joint[:, 2], [100] * 3)
    for name in ("average_by_client", "worst", "worst_20_percent"):
        paired, separate = (difference_intervals(j, [name])[name] for j in (joint, apart))
        assert paired.upper - paired.lower < 0.8 * (separate.upper - separate.lower)


@given(joint=joints)
def test_a_single_client_has_one_interval_under_every_name(joint):
    found, lower, upper = newcombe_interval(joint[:1])
    names = ("average_by_client", "average_by_sample", "worst", "worst_20_percent")
    for interval in difference_intervals(joint[:1], names).values():
        limits = [interval.estimate, interval.lower, interval.upper]
        assert limits == pytest.approx([found[0], lower[0], upper[0]])


@given(joint=joints)
def test_equal_weights_average_the_clients(joint):
    n = len(joint)
    interval = average_difference(joint, np.full(n, 1 / n))
    found, lower, _ = newcombe_interval(joint)
    assert interval.estimate == pytest.approx(found.mean())
    assert interval.estimate - interval.lower == pytest.approx(
        np.sqrt(np.square(found - lower).sum()) / n
    )


def test_reducers_of_one_client_other_than_the_worst_have_no_interval():
    found = difference_intervals(np.array([[3.0, 1, 1, 1]] * 7), ALL, resamples=50)
    assert set(ALL) - set(found) == {"spread"}


def test_a_bootstrap_of_nothing_right_has_no_finite_ratio():
    zeros = np.array([[0.0, 0, 0, 2]] * 10)
    interval = bootstrap_difference(metrics.REDUCERS["twenty_twenty"], zeros, resamples=50)
    assert interval.lower == -np.inf and interval.upper == np.inf


def test_the_worst_client_is_judged_by_the_adjusted_limits():
    joint = np.array([[30.0, 10, 5, 5], [20.0, 5, 10, 15]])
    interval = worst_difference(joint)
    assert interval.estimate == pytest.approx(0.5 - 0.6)
    assert interval.lower < interval.estimate < interval.upper


@given(halves=st.lists(st.floats(0, 5), min_size=1, max_size=4), estimate=st.floats(-2, 2))
def test_more_reasons_to_vary_widen(halves, estimate):
    sources = [Interval(estimate, estimate - h, estimate + h) for h in halves]
    both = combine_sources(estimate, sources)
    assert both.upper - estimate == pytest.approx(np.linalg.norm(halves), abs=1e-9)
    assert estimate - both.lower == pytest.approx(np.linalg.norm(halves), abs=1e-9)
