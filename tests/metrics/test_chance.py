"""What few test samples do by chance alone: the floor, the spread beyond it, the test."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, fisher_exact
from scipy.stats import t as student_t

from equifed.metrics import chance as module
from equifed.metrics import (
    chance_floor,
    compare_to_chance,
    variance_beyond_chance,
    worst_fraction,
)
from equifed.metrics.chance import find_worse_means


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    p=st.one_of(st.just(0.0), st.floats(1e-100, 1)),  # SciPy's pmf overflows below
    fraction=st.sampled_from([0.2, 0.5, 1.0]),
)
@settings(max_examples=40, deadline=None)
def test_the_floor_is_the_expectation_over_all_outcomes(sizes, p, fraction):
    m, expected = np.array(sizes), 0.0
    chances = {n: binom.pmf(np.arange(n + 1), n, p) for n in set(sizes)}
    for outcome in itertools.product(*(range(k + 1) for k in sizes)):
        likely = math.prod(chances[n][k] for k, n in zip(outcome, sizes, strict=True))
        expected += likely * worst_fraction(np.array(outcome) / m, fraction, higher_is_better=True)
    assert chance_floor(sizes, p, fraction) == pytest.approx(expected, abs=1e-10)


def test_the_floor_drawn_is_the_floor_computed(monkeypatch):
    sizes = np.random.default_rng(0).integers(5, 60, 40)
    exact = chance_floor(sizes, 0.8)
    monkeypatch.setattr(module, "MOST_WORK", 0)
    assert chance_floor(sizes, 0.8) == pytest.approx(exact, abs=0.003)


def test_the_floor_rises_to_the_accuracy_with_the_samples():
    floors = [chance_floor([m] * 20, 0.8) for m in (5, 20, 80, 320)]
    assert floors == sorted(floors)
    assert 0.75 < floors[-1] < 0.8
    assert chance_floor([7], 0.6) == pytest.approx(0.6)


@pytest.mark.parametrize(("sizes", "p"), [([0, 3], 0.5), ([3], 1.2), ([3], math.nan)])
def test_a_floor_of_nothing_is_refused(sizes, p):
    with pytest.raises(ValueError, match="accuracy must lie"):
        chance_floor(sizes, p)


@pytest.mark.long
@pytest.mark.parametrize("true", [np.full(6, 0.7), np.array([0.2, 0.9, 0.5, 0.6, 0.6, 0.7])])
def test_the_variance_beyond_chance_is_unbiased(true):
    draw, sizes = np.random.default_rng(1), np.array([2, 3, 5, 10, 40, 7])
    found = [variance_beyond_chance(draw.binomial(sizes, true), sizes) for _ in range(6000)]
    error = np.std(found) / math.sqrt(len(found))
    assert np.mean(found) == pytest.approx(true.var(ddof=1), abs=4 * error)


def test_a_variance_needs_two_clients_with_two_samples():
    assert math.isnan(variance_beyond_chance([1, 5], [1, 9]))


def test_the_tails_are_those_of_fishers_exact_test():
    k, m = np.array([30, 41, 21]), np.array([40, 50, 45])
    found = module._lower_tails(k, m)
    for i in range(3):
        rest = k.sum() - k[i], m.sum() - m[i]
        table = [[k[i], m[i] - k[i]], [rest[0], rest[1] - rest[0]]]
        assert found[i] == pytest.approx(fisher_exact(table, alternative="less").pvalue)


@pytest.mark.long
def test_equal_service_is_doubted_no_oftener_than_said():
    draw, doubted = np.random.default_rng(3), 0
    for _ in range(200):
        sizes = draw.integers(2, 60, int(draw.integers(3, 30)))
        doubted += not compare_to_chance(draw.binomial(sizes, 0.85), sizes).equal
    assert doubted <= binom.ppf(0.999, 200, module.LEVEL)


@pytest.mark.parametrize(
    ("sizes", "correct"), [((3, 2, 4, 2, 3), (2, 2, 2, 1, 2)), ((5, 1, 6), (3, 1, 4))]
)
def test_the_usual_range_is_that_of_answers_that_are_dealt_out(sizes, correct):
    """Oracle: every way in which so many right answers can be dealt out, by its chance."""
    worst, ways = [], []
    for dealt in itertools.product(*(range(m + 1) for m in sizes)):
        if sum(dealt) == sum(correct):
            ways.append(math.prod(map(math.comb, sizes, dealt)))
            worst.append(min(k / m for k, m in zip(dealt, sizes, strict=True)))
    chances, lowest = np.array(ways) / sum(ways), np.array(worst)
    found = compare_to_chance(correct, sizes)
    for quantile, end in zip((0.025, 0.975), found.usual, strict=True):
        assert chances[lowest < end - 1e-9].sum() - 0.02 <= quantile
        assert quantile <= chances[lowest <= end + 1e-9].sum() + 0.02


@given(seed=st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_the_verdict_does_not_depend_on_the_order_of_clients(seed):
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 50, 8)
    correct = draw.binomial(sizes, draw.uniform(0.2, 1, 8))
    order = draw.permutation(8)
    one, other = compare_to_chance(correct, sizes), compare_to_chance(correct[order], sizes[order])
    assert {order[i] for i in other.underserved} == set(one.underserved)
    assert other.floor == pytest.approx(one.floor)


@pytest.mark.parametrize("correct", [[0, 0, 0], [5, 9, 1]], ids=["none right", "all right"])
def test_no_spread_is_no_doubt(correct):
    found = compare_to_chance(correct, [5, 9, 1])
    assert found.equal and found.p_value == 1
    assert found.floor == found.worst == found.pooled


def test_clients_without_samples_are_refused():
    with pytest.raises(ValueError, match="at least one sample"):
        compare_to_chance([1, 0], [2, 0])


def test_means_of_one_client_or_without_spread_tell_nothing():
    assert find_worse_means([3.0], [0.1], [9]) == ()
    assert find_worse_means([1.0, 9.0], [0.0, 0.0], [1, 1]) == ()
    assert find_worse_means([0.0, 0.0], [0.0, 0.0], [5, 5]) == ()


@given(
    means=st.lists(st.floats(0.1, 10), min_size=2, max_size=6),
    factor=st.floats(0.01, 100),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None)
def test_whose_loss_is_worse_is_welchs_test_and_knows_no_unit(means, factor, seed):
    """Against SciPy's t distribution on logarithms; the same clients in any unit and order."""
    draw, mean = np.random.default_rng(seed), np.array(means)
    n, m = len(mean), draw.integers(2, 50, len(means))
    error = mean * draw.uniform(0.02, 0.3, n)
    expected, near = [], False
    for i in range(n):
        rest = np.delete(mean, i).mean()
        noise = np.sqrt(np.sum(np.delete(error, i) ** 2)) / (n - 1)
        width = np.sqrt((error[i] / mean[i]) ** 2 + (noise / rest) ** 2)
        tail = n * student_t.sf(np.log(mean[i] / rest) / width, m[i] - 1)
        near |= abs(tail / module.LEVEL - 1) < 1e-6
        expected += [i] if tail <= module.LEVEL else []
    if near:
        return
    assert find_worse_means(mean, error, m) == tuple(expected)
    assert find_worse_means(factor * mean, factor * error, m) == tuple(expected)
    order = draw.permutation(n)
    found = find_worse_means(mean[order], error[order], m[order])
    assert sorted(order[list(found)]) == expected
