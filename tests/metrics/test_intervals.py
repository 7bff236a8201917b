"""Binomial intervals, for one client and for the worst of many."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from equifed import metrics
from equifed.metrics.intervals import correct_counts, limit_exactly

quick = settings(deadline=None, max_examples=60)
counts = st.integers(1, 400).flatmap(lambda m: st.tuples(st.integers(0, m), st.just(m)))


def exact_interval(correct, trials):
    return limit_exactly(np.asarray(correct), np.asarray(trials), 0.025)


@quick
@given(counts)
def test_limits_equal_scipys(pair):
    k, m = pair
    for ours, method in ((metrics.wilson_interval, "wilson"), (exact_interval, "exact")):
        expected = stats.binomtest(k, m).proportion_ci(0.95, method)
        lower, upper = ours([k], [m])
        assert lower[0] == pytest.approx(expected.low, abs=1e-9)
        assert upper[0] == pytest.approx(expected.high, abs=1e-9)


@quick
@given(counts)
def test_wilson_limits_are_where_the_score_test_is_at_its_threshold(pair):
    k, m = pair
    lower, upper = (limit[0] for limit in metrics.wilson_interval([k], [m]))
    for limit in (lower, upper):
        if 0 < limit < 1:
            score = (k / m - limit) ** 2 * m / (limit * (1 - limit))
            assert score == pytest.approx(stats.chi2(1).ppf(0.95), rel=1e-6)


def exact_coverage(interval, m, truths):
    """The probability that the interval holds the truth, summed over all outcomes."""
    k = np.arange(m + 1)
    lower, upper = interval(k, np.full(m + 1, m))
    held = (lower <= truths[:, None]) & (truths[:, None] <= upper)
    return (stats.binom.pmf(k, m, truths[:, None]) * held).sum(axis=1)


@pytest.mark.parametrize("m", [10, 50, 300])
def test_coverage_summed_exactly(m):
    truths = np.linspace(0.02, 0.98, 481)
    wilson = exact_coverage(metrics.wilson_interval, m, truths)
    exact = exact_coverage(exact_interval, m, truths)
    assert abs(wilson.mean() - 0.95) < 0.01  # nominal on average over accuracies
    assert exact.min() >= 0.95  # guaranteed at every one


def test_no_samples_and_extremes():
    for interval in (metrics.wilson_interval, exact_interval):
        lower, upper = interval([0, 0, 7], [0, 7, 7])
        assert (lower[0], upper[0]) == (0.0, 1.0)
        assert lower[1] == 0.0
        assert 0 < upper[1] < 1
        assert upper[2] == 1.0
        assert lower[2] == pytest.approx(1 - upper[1])


def simulate_worst(truths, trials, runs=400, seed=0):
    """Coverage of the interval, of the set of candidates, and of the measured worst's own."""
    rng = np.random.default_rng(seed)
    trials = np.broadcast_to(trials, truths.shape)
    held = np.zeros(3)
    for correct in rng.binomial(trials, truths, size=(runs, truths.size)):
        worst = metrics.worst_client_interval(correct, trials)
        lower, upper = metrics.wilson_interval(correct, trials)
        naive = lower[worst.observed] <= truths.min() <= upper[worst.observed]
        held += [
            truths.min() in worst.interval,
            int(truths.argmin()) in worst.candidates,
            naive,
        ]
    return held / runs


@pytest.mark.long
@pytest.mark.parametrize(
    ("truths", "trials"),
    [
        (np.full(100, 0.9), 50),  # all alike: the hardest case for the upper limit
        (np.linspace(0.5, 0.95, 20), 200),
        (np.r_[0.6, np.full(30, 0.9)], 100),  # one client stands out
        (np.full(40, 0.8), np.r_[np.full(20, 5), np.full(20, 500)]),  # unequal sizes
    ],
)
def test_worst_client_interval_covers(truths, trials):
    interval, candidates, _ = simulate_worst(truths, trials)
    three_errors = 3 * np.sqrt(0.95 * 0.05 / 400)
    assert interval >= 0.95 - three_errors
    assert candidates >= 0.95 - three_errors


def test_the_worst_of_many_looks_bad_by_chance():
    _, _, naive = simulate_worst(np.full(100, 0.9), 50)
    assert naive < 0.2  # the ordinary 95 % interval of the measured worst


def test_the_interval_is_built_as_proved():
    correct, trials, n = np.array([30, 44, 41, 0]), np.array([50, 50, 60, 0]), 4
    worst = metrics.worst_client_interval(correct, trials)
    share = 1 - (1 - 0.025) ** (1 / n)
    lower = stats.beta.ppf(0.025, correct[:3], trials[:3] - correct[:3] + 1).min()
    upper = stats.beta.ppf(1 - share, correct[:3] + 1, trials[:3] - correct[:3]).min()
    assert worst.interval.lower == 0.0 < lower  # the client without samples may be anything
    assert worst.interval.upper == pytest.approx(upper, rel=1e-9)
    assert worst.observed == 0
    assert worst.interval.estimate == 0.6
    assert 3 in worst.candidates
    without = metrics.worst_client_interval(correct[:3], trials[:3])
    assert without.interval.lower == pytest.approx(lower, rel=1e-9)


def test_one_client_gives_its_own_interval():
    worst = metrics.worst_client_interval([31], [40])
    lower, upper = exact_interval([31], [40])
    assert worst.interval.lower == pytest.approx(lower[0], rel=1e-9)
    assert worst.interval.upper == pytest.approx(upper[0], rel=1e-9)


def test_more_clients_raise_the_upper_limit_only():
    few, many = (
        metrics.worst_client_interval([40, *[50] * n], [50, *[50] * n]).interval for n in (1, 99)
    )
    assert many.upper > few.upper
    assert many.lower == few.lower


def test_counts_are_recovered_from_accuracies():
    rng = np.random.default_rng(0)
    m = rng.integers(0, 5000, 200)
    k = rng.binomial(m, 0.7)
    with np.errstate(invalid="ignore"):
        accuracies = (k / m).astype(np.float32)
    np.testing.assert_array_equal(correct_counts(accuracies, m), k)


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_accuracies_are_counts_to_a_millionth_of_a_sample_each(size):
    """What single precision leaves of k / m is within it, whatever the number of samples."""
    share = (size - 1) / size
    assert correct_counts([share + 0.9e-6], [size]).tolist() == [size - 1]
    with pytest.raises(ValueError, match="not a whole count"):
        correct_counts([share + 1.1e-6], [size])


def test_messages():
    with pytest.raises(ValueError, match="swapped"):
        metrics.wilson_interval([50], [40])
    with pytest.raises(ValueError, match="positions 1 have fractions"):
        metrics.wilson_interval([1, 0.9], [2, 10])
    with pytest.raises(ValueError, match=r"one count per client, got \(1,\) and \(2,\)"):
        metrics.wilson_interval([1], [2, 3])
    with pytest.raises(ValueError, match="nothing was measured"):
        metrics.worst_client_interval([0, 0], [0, 0])
    with pytest.raises(ValueError, match=r"not a whole count .* positions 1"):
        correct_counts([0.5, 0.5], [10, 3])
    with pytest.raises(ValueError, match="positions 0"):
        correct_counts([np.nan], [3])
    with pytest.raises(ValueError, match="one shape"):
        correct_counts([0.5], [2, 2])
