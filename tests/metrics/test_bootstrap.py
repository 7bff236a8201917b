"""Bootstrap intervals: what they promise, simulated."""

import math
from functools import partial

import numpy as np
import pytest
from scipy import stats

from equifed import metrics
from equifed.metrics import bootstrap
from equifed.metrics.bootstrap import corrected_interval, resample_samples

pytestmark = pytest.mark.long

WORST = partial(metrics.worst_fraction, fraction=0.2, higher_is_better=True)
STATISTICS = {
    "average": metrics.average_by_client,
    "standard deviation": metrics.standard_deviation,
    "gini": metrics.gini,
    "worst 20 %": WORST,
    "20:20": metrics.twenty_twenty,
}
every_statistic = pytest.mark.parametrize("statistic", STATISTICS.values(), ids=STATISTICS)
RUNS = 400
# The promise is asymptotic: two points for that, and three standard errors of the simulation.
FLOOR = 0.95 - 0.02 - 3 * math.sqrt(0.95 * 0.05 / RUNS)


@every_statistic
def test_other_samples_cover_the_truth_of_these_clients(statistic):
    rng = np.random.default_rng(1)
    clients, trials = 40, np.full(40, 100)
    truths = rng.beta(8, 2, clients)
    held = [
        statistic(truths)
        in metrics.bootstrap_accuracies(statistic, correct, trials, resamples=200, seed=run)
        for run, correct in enumerate(rng.binomial(trials, truths, size=(RUNS, clients)))
    ]
    assert np.mean(held) >= FLOOR


@every_statistic
def test_equal_clients_are_not_found_unequal(statistic):
    rng = np.random.default_rng(2)
    truths, trials = np.full(50, 0.85), np.full(50, 100)
    held = [
        statistic(truths)
        in metrics.bootstrap_accuracies(statistic, correct, trials, resamples=100, seed=run)
        for run, correct in enumerate(rng.binomial(trials, truths, size=(RUNS, 50)))
    ]
    assert np.mean(held) >= FLOOR


@every_statistic
def test_other_clients_cover_the_population(statistic):
    rng = np.random.default_rng(3)
    population = statistic(rng.beta(8, 2, 400_000))
    held = [
        population in metrics.bootstrap_clients(statistic, values, resamples=200, seed=run)
        for run, values in enumerate(rng.beta(8, 2, size=(RUNS, 100)))
    ]
    assert np.mean(held) >= FLOOR


@every_statistic
def test_both_levels_cover_the_true_accuracies_of_the_population(statistic):
    rng = np.random.default_rng(4)
    population = statistic(rng.beta(8, 2, 400_000))
    trials = np.full(60, 50)
    held = [
        population
        in metrics.bootstrap_accuracies(
            statistic, correct, trials, resample="both", resamples=200, seed=run
        )
        for run, correct in enumerate(rng.binomial(trials, rng.beta(8, 2, size=(RUNS, 60))))
    ]
    assert np.mean(held) >= FLOOR


def test_percentiles_would_miss_where_the_correction_holds():
    """The reason for the correction: noise in the clients inflates their inequality twice."""
    rng = np.random.default_rng(5)
    trials = np.full(100, 50)
    truths = rng.beta(8, 2, 100)
    held = np.zeros(2)
    for run in range(100):
        correct = rng.binomial(trials, truths).astype(float)
        draws = np.concatenate(
            [metrics.gini(block) for block in resample_samples(correct, trials, 200, run)]
        )
        lower, upper = np.quantile(draws, [0.025, 0.975])
        interval = metrics.bootstrap_accuracies(
            metrics.gini, correct, trials, resamples=200, seed=run
        )
        held += [lower <= metrics.gini(truths) <= upper, metrics.gini(truths) in interval]
    assert held[0] < 20
    assert held[1] > 85


def test_the_average_over_clients_is_the_t_interval():
    values = np.random.default_rng(6).normal(size=25)
    interval = metrics.bootstrap_clients(metrics.average_by_client, values, resamples=100_000)
    expected = stats.t.interval(0.95, 24, values.mean(), stats.sem(values))
    assert (interval.lower, interval.upper) == pytest.approx(expected, abs=0.01)


def test_the_average_over_samples_has_the_binomial_error():
    correct, trials = np.array([60, 80, 95, 30]), np.array([100, 200, 100, 40])
    interval = metrics.bootstrap_accuracies(
        metrics.average_by_client, correct, trials, resamples=100_000
    )
    p = correct / trials
    half = stats.norm.ppf(0.975) * math.sqrt((p * (1 - p) / trials).sum()) / 4
    expected = (p.mean() - half, p.mean() + half)
    assert (interval.lower, interval.upper) == pytest.approx(expected, abs=1e-3)


def test_columns_travel_together():
    values, sizes = np.array([0.0, 1.0]), np.array([1.0, 3.0])
    interval = metrics.bootstrap_clients(
        metrics.average_by_sample, values, sizes, resamples=50_000, level=0.5
    )
    # Resamples: both clients 0 (1/4), both 1 (1/4), mixed 3/4 (1/2); their mean and deviation:
    mean, deviation = 0.625, math.sqrt(0.25 * 1 + 0.5 * 0.5625 - 0.625**2)
    half = stats.t.ppf(0.75, 1) * math.sqrt(2) * deviation
    assert interval.estimate == 0.75
    assert interval.lower == pytest.approx(1.5 - mean - half, abs=0.01)


def test_seeded_and_independent_of_blocks(monkeypatch):
    correct, trials = np.array([60, 80, 95]), np.array([100, 100, 100])
    calls = [
        partial(metrics.bootstrap_clients, metrics.gini, correct / trials),
        partial(metrics.bootstrap_accuracies, metrics.gini, correct, trials),
        partial(metrics.bootstrap_accuracies, metrics.gini, correct, trials, resample="both"),
    ]
    first = [call(resamples=101, seed=7) for call in calls]
    assert first == [call(resamples=101, seed=7) for call in calls]
    assert all(a != call(resamples=101, seed=8) for a, call in zip(first, calls, strict=True))
    monkeypatch.setattr(bootstrap, "_BLOCK", 30)
    for a, call in zip(first[:2], calls[:2], strict=True):
        b = call(resamples=101, seed=7)
        assert (a.lower, a.upper) == pytest.approx((b.lower, b.upper), rel=1e-12)


def test_one_client_says_nothing_about_others():
    interval = metrics.bootstrap_clients(metrics.average_by_client, [0.5], resamples=10)
    assert (interval.lower, interval.upper) == (-math.inf, math.inf)
    alone = metrics.bootstrap_accuracies(metrics.average_by_client, [5], [10], resamples=100)
    assert 0 < alone.lower < 0.5 < alone.upper < 1


def test_an_infinite_ratio_has_no_limits():
    interval = corrected_interval(
        3.0, [1.0, math.inf], quantile=2.0, level=0.95, bounds=(1.0, math.inf)
    )
    assert (interval.lower, interval.upper) == (1.0, math.inf)


def test_summary_intervals_agree_with_single_ones():
    correct, trials = np.array([60, 80, 95, 88, 70]), np.array([100, 120, 100, 100, 90])
    p = correct / trials
    options = {"resamples": 300, "seed": 3}
    whole = metrics.summary_intervals(p, higher_is_better=True, **options)
    assert whole["gini"] == metrics.bootstrap_clients(metrics.gini, p, **options)
    for resample in ("samples", "both"):
        options["resample"] = resample
        rows = metrics.accuracy_intervals(correct, trials, **options)
        alone = metrics.bootstrap_accuracies(metrics.standard_deviation, correct, trials, **options)
        assert rows["standard_deviation"].upper == pytest.approx(alone.upper, rel=1e-12)
        assert rows["worst_20_percent"].estimate == WORST(p)


def test_named_intervals_are_those_of_all():
    correct, trials = np.array([6, 80, 3, 40]), np.array([10, 100, 9, 50])
    for found in (
        lambda **more: metrics.accuracy_intervals(correct, trials, resamples=50, **more),
        lambda **more: metrics.summary_intervals(
            correct / trials, higher_is_better=True, resamples=50, **more
        ),
    ):
        every = found()
        chosen = tuple(name for name in every if name in ("average_by_client", "gini"))
        assert len(chosen) == 2
        assert found(names=chosen) == {name: every[name] for name in chosen}


def test_summary_intervals_leave_single_clients_to_the_exact_interval():
    correct, trials = np.array([60, 80, 95]), np.array([100, 100, 100])
    samples = metrics.accuracy_intervals(correct, trials, resamples=50)
    exact = metrics.worst_client_interval(correct, trials).interval
    assert samples["worst"] == samples["minimum"] == exact
    both = metrics.accuracy_intervals(correct, trials, resample="both", resamples=50)
    extreme = {r.name for r in metrics.reducers() if r.extreme}
    assert extreme.isdisjoint(both)
    assert {r.name for r in metrics.reducers()} == extreme | set(both)
    losses = metrics.summary_intervals([-1.0, 2.0, 3.0], higher_is_better=False, resamples=50)
    assert "variance" in losses
    assert "gini" not in losses


def test_summary_intervals_stay_within_bounds_and_hold_equality():
    trials = np.full(20, 30)
    rows = metrics.accuracy_intervals(np.full(20, 27), trials, resamples=200)
    for reducer in metrics.reducers():
        if reducer.name in rows:
            low, high = reducer.bounds
            assert low <= rows[reducer.name].lower <= rows[reducer.name].upper <= high
    assert 0.0 in rows["gini"]
    assert 1.0 in rows["jain"]


def test_messages():
    with pytest.raises(ValueError, match="positions 1 have no test sample"):
        metrics.bootstrap_accuracies(metrics.gini, [1, 0], [2, 0])
    with pytest.raises(ValueError, match=r"one length.*\(2,\), \(1,\)"):
        metrics.bootstrap_clients(metrics.average_by_sample, [1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="resamples must be at least 2"):
        metrics.bootstrap_clients(metrics.gini, [1.0, 2.0], resamples=1)
    with pytest.raises(ValueError, match="level must lie"):
        metrics.bootstrap_accuracies(metrics.gini, [1, 2], [2, 3], level=95)
    with pytest.raises(ValueError, match="'samples' or 'both', got 'clients'"):
        metrics.accuracy_intervals([1, 2], [2, 3], resample="clients")
