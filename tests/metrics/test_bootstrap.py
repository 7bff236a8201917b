"""Bootstrap intervals: what they promise, simulated."""

import math

import numpy as np
import pytest
from scipy import stats

from equifed import metrics
from equifed.metrics import intervals
from equifed.metrics.intervals import corrected_interval, draw_accuracies

pytestmark = pytest.mark.long

NAMES = (
    "average_by_client", "standard_deviation", "gini", "worst_20_percent", "twenty_twenty",
)  # fmt: skip
RUNS = 400
# The promise is asymptotic: two points for that, and three standard errors of the simulation.
FLOOR = 0.95 - 0.02 - 3 * math.sqrt(0.95 * 0.05 / RUNS)


def reduce(values):
    return {name: metrics.REDUCERS[name].compute(values, True) for name in NAMES}


def check_coverage(truth, found):
    """Check of every name how often the truth lies in its interval."""
    found = list(found)
    for name in NAMES:
        assert np.mean([truth[name] in intervals[name] for intervals in found]) >= FLOOR, name


def test_other_samples_cover_the_truth_of_these_clients():
    rng = np.random.default_rng(1)
    clients, trials = 40, np.full(40, 100)
    truths = rng.beta(8, 2, clients)
    draws = rng.binomial(trials, truths, size=(RUNS, clients))
    check_coverage(
        reduce(truths),
        (
            metrics.accuracy_intervals(correct, trials, resamples=200, seed=run, names=NAMES)
            for run, correct in enumerate(draws)
        ),
    )


def test_equal_clients_are_not_found_unequal():
    rng = np.random.default_rng(2)
    truths, trials = np.full(50, 0.85), np.full(50, 100)
    draws = rng.binomial(trials, truths, size=(RUNS, 50))
    check_coverage(
        reduce(truths),
        (
            metrics.accuracy_intervals(correct, trials, resamples=100, seed=run, names=NAMES)
            for run, correct in enumerate(draws)
        ),
    )


def test_percentiles_would_miss_where_the_correction_holds():
    """The reason for the correction: noise in the clients inflates their inequality twice."""
    rng = np.random.default_rng(5)
    trials = np.full(100, 50)
    truths = rng.beta(8, 2, 100)
    held = np.zeros(2)
    for run in range(100):
        correct = rng.binomial(trials, truths).astype(float)
        draw = np.random.default_rng(run)
        draws = metrics.gini(draw_accuracies(correct, trials, draw, 200))
        lower, upper = np.quantile(draws, [0.025, 0.975])
        found = metrics.accuracy_intervals(correct, trials, resamples=200, seed=run, names=["gini"])
        held += [lower <= metrics.gini(truths) <= upper, metrics.gini(truths) in found["gini"]]
    assert held[0] < 20
    assert held[1] > 85


def test_the_average_over_samples_has_the_binomial_error():
    correct, trials = np.array([60, 80, 95, 30]), np.array([100, 200, 100, 40])
    options = {"resamples": 100_000, "names": NAMES[:1]}
    interval = metrics.accuracy_intervals(correct, trials, **options)["average_by_client"]
    p = correct / trials
    half = stats.norm.ppf(0.975) * math.sqrt((p * (1 - p) / trials).sum()) / 4
    expected = (p.mean() - half, p.mean() + half)
    assert (interval.lower, interval.upper) == pytest.approx(expected, abs=1e-3)


def test_seeded_and_independent_of_blocks(monkeypatch):
    correct, trials = np.array([60, 80, 95]), np.array([100, 100, 100])

    def find(seed):
        return metrics.accuracy_intervals(correct, trials, resamples=101, seed=seed)["gini"]

    first = find(7)
    assert first == find(7) != find(8)
    monkeypatch.setattr(intervals, "_BLOCK", 30)
    again = find(7)
    assert (again.lower, again.upper) == pytest.approx((first.lower, first.upper), rel=1e-12)


def test_one_client_has_limits_between_nothing_and_all():
    alone = metrics.accuracy_intervals([5], [10], resamples=100)["average_by_client"]
    assert 0 < alone.lower < 0.5 < alone.upper < 1


def test_an_infinite_ratio_has_no_limits():
    interval = corrected_interval(3.0, [1.0, math.inf], (1.0, math.inf))
    assert (interval.lower, interval.upper) == (1.0, math.inf)


def test_named_intervals_are_those_of_all():
    counts = np.array([6, 80, 3, 40]), np.array([10, 100, 9, 50])
    every = metrics.accuracy_intervals(*counts, resamples=50)
    chosen = ("average_by_client", "gini")
    found = metrics.accuracy_intervals(*counts, resamples=50, names=chosen)
    assert found == {name: every[name] for name in chosen}


def test_single_clients_are_left_to_the_exact_interval():
    correct, trials = np.array([60, 80, 95]), np.array([100, 100, 100])
    found = metrics.accuracy_intervals(correct, trials, resamples=50)
    assert found["worst"] == metrics.worst_client_interval(correct, trials).interval
    several = {name for name, r in metrics.REDUCERS.items() if not r.extreme}
    assert set(found) == several | {"worst"}


def test_intervals_stay_within_bounds_and_hold_equality():
    trials = np.full(20, 30)
    rows = metrics.accuracy_intervals(np.full(20, 27), trials, resamples=200)
    for reducer in metrics.REDUCERS.values():
        if reducer.name in rows:
            low, high = reducer.bounds
            assert low <= rows[reducer.name].lower <= rows[reducer.name].upper <= high
    assert 0.0 in rows["gini"]


def test_messages():
    with pytest.raises(ValueError, match="positions 1 have no test sample"):
        metrics.accuracy_intervals([1, 0], [2, 0])
    with pytest.raises(ValueError, match="resamples must be at least 2"):
        metrics.accuracy_intervals([1, 2], [2, 3], resamples=1)
