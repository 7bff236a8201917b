"""Generalisation bounds: their formulas by hand, exact maxima, and cases that allow nothing less.

A bound that only has to hold is kept by any large number. So for each of its terms a case is
computed exactly that breaks nine tenths of it.
"""

from __future__ import annotations

import math
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from equifed.objectives import Average, CVaR, RelativeFairness, WorstCase
from equifed.objectives.generalisation import (
    integrated_bound,
    largest_skewness,
    limit_skewness,
    log_covering_number,
    rc_fl_bound,
    rc_fl_bound_by_client,
    skewness,
    weighted_massart,
)


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**32 - 1))
def test_massart_is_above_the_exact_complexity_of_a_tiny_class(seed: int) -> None:
    """All sign patterns of 8 samples, no sampling error."""
    random = np.random.default_rng(seed)
    samples, weights = np.array([3, 5]), random.uniform(0.2, 2, 2)
    losses = random.uniform(-1, 1, (4, 8))
    factors = np.repeat(weights / samples, samples)
    signs = np.array(list(product((-1, 1), repeat=8)))
    exact = (signs @ (losses * factors).T).max(axis=1).mean()
    assert exact <= weighted_massart(weights, samples, models=4) + 1e-12


def test_nine_tenths_of_massart_are_not_enough() -> None:
    """K classes of random signs have, on average, the mean of the largest of K binomials."""
    samples, models = 20_000, 10**6
    sums = np.arange(samples + 1)
    largest = binom.cdf(sums, samples, 0.5) ** models  # P(the largest of K sums is at most that)
    mean = (sums * np.diff(largest, prepend=0.0)).sum()
    attained = (2 * mean - samples) / samples  # by at least one class: an average over classes
    bound = weighted_massart([1.0], [samples], models)
    assert 0.9 * bound < attained <= bound


def test_a_constant_in_the_losses_changes_no_complexity() -> None:
    random = np.random.default_rng(0)
    losses, signs = random.uniform(0, 1, (4, 8)), np.array(list(product((-1, 1), repeat=8)))
    plain, centred = ((signs @ part.T / 8).max(axis=1).mean() for part in (losses, losses - 0.5))
    assert plain == pytest.approx(centred)
    assert plain <= weighted_massart([1.0], [8], models=4, bound=0.5)


@pytest.mark.parametrize("theorem", [3, 4])
def test_nine_tenths_of_the_luck_are_not_enough(theorem: int) -> None:
    """One model that errs half the time: the exact probability that its samples look too good."""
    samples = 10**6
    failure = (1 if theorem == 3 else 2) * math.exp(-(7**2) / 2)
    give = {"shares": [1.0], "tails": [1.0], "samples": [samples], "failure": failure}
    if theorem == 3:
        luck = rc_fl_bound(0.0, 0.0, **give)
    else:
        luck = rc_fl_bound_by_client(0.0, [0.0], **give)

    def too_good(added: float) -> float:
        return float(binom.cdf(math.ceil(samples * (0.5 - added)) - 1, samples, 0.5))

    assert too_good(luck) <= failure < too_good(0.9 * luck)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 6))
def test_theorems_3_and_4_are_their_formulas(seed: int, n: int) -> None:
    random = np.random.default_rng(seed)
    raw, m = random.uniform(0.5, 1, n), random.integers(5, 500, n)
    p = raw / raw.sum()
    alpha = p + (1 - p) * random.uniform(0, 1, n)
    empirical, whole, big, delta = random.uniform(0.01, 0.9, 4)
    each = random.uniform(0, 1, n)
    tau = sum(p[i] / alpha[i] for i in range(n))
    inside = sum(p[i] ** 2 * math.log(1 / delta) / (2 * alpha[i] ** 2 * m[i]) for i in range(n))
    third = tau * empirical + 2 * whole + big * math.sqrt(inside)
    fourth = empirical
    for i in range(n):
        luck = big * math.sqrt(math.log(2 * n / delta) / (2 * m[i]))
        fourth += p[i] / alpha[i] * (2 * each[i] + luck)
    give = {"shares": raw, "tails": alpha, "samples": m, "bound": big, "failure": delta}
    assert rc_fl_bound(empirical, whole, **give) == pytest.approx(third)
    assert rc_fl_bound_by_client(empirical, each, **give) == pytest.approx(fourth)


def test_theorem_4_has_the_larger_remainder_and_theorem_3_the_factor() -> None:
    shares, tails, samples = [0.3, 0.7], [0.5, 0.8], [50, 70]
    weights = np.array(shares) / np.array(tails)
    whole = weighted_massart(weights, samples, 5)
    each = [weighted_massart([1.0], [m], 5) for m in samples]
    at = [rc_fl_bound(e, whole, shares, tails, samples) for e in (0.0, 1.0)]
    by = [rc_fl_bound_by_client(e, each, shares, tails, samples) for e in (0.0, 1.0)]
    assert at[0] <= by[0]
    np.testing.assert_allclose(at[1] - at[0], weights.sum())  # tau_alpha
    np.testing.assert_allclose(by[1] - by[0], 1.0)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(2, 9), phi=st.floats(0, 0.8))
def test_no_member_of_a_set_is_more_skewed_than_the_set(seed: int, n: int, phi: float) -> None:
    random = np.random.default_rng(seed)
    for objective in (
        CVaR(0.5),
        WorstCase(),
        Average(prior=tuple(random.uniform(0.1, 1, n))),
        RelativeFairness(phi, CVaR(0.4), WorstCase()),
    ):
        largest = largest_skewness(objective, n)
        member = objective.weights(random.normal(size=n))
        assert skewness(member) <= largest * (1 + 1e-9)
        corner = objective.weights(np.arange(n, dtype=np.float64))
        if not isinstance(objective, Average):
            np.testing.assert_allclose(largest, skewness(corner))


@pytest.mark.parametrize("tail", [0.1, 0.4, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("phi", [0.0, 0.2, 0.5])
def test_the_limit_of_the_skewness_is_that_of_many_clients(tail: float, phi: float) -> None:
    sets = RelativeFairness(phi, CVaR(tail), CVaR(tail))
    np.testing.assert_allclose(limit_skewness(tail, phi), largest_skewness(sets, 10_000), rtol=1e-3)
    if tail <= 0.5:  # Proposition 5 as printed leaves out the clients without weight
        scale = 1 / ((1 - phi) * tail)
        printed = tail * ((scale - 1) ** 2 + (phi * scale + 1) ** 2) + 1  # Proposition 5
        short = limit_skewness(tail, phi) - printed
        assert short == pytest.approx(1 - 2 * tail, abs=1e-12)


@settings(deadline=None, max_examples=20)
@given(
    n=st.integers(2, 5),
    m=st.integers(10, 10**5),
    phi=st.floats(0, 0.8),
    radius=st.floats(1e-3, 0.5),
    delta=st.floats(1e-6, 0.5),
)
def test_theorem_4_of_scaff_pd_ia_is_the_formula(
    n: int, m: int, phi: float, radius: float, delta: float
) -> None:
    """Worst case against worst case: all corners have one weight up and one down.

    As printed, for losses -1 and 1, whose range M is 2.
    """
    corner = [1 / (1 - phi), -phi / (1 - phi), *[0.0] * (n - 2)]
    skew = max(n * sum((w - 1 / n) ** 2 for w in c) + 1 for c in permutations(corner))
    norm = sum(map(abs, corner))
    covering = (n - 1) * math.log(1 + 2 * norm / radius)
    class_term = 4 * math.sqrt(7 * (1 + math.log(m * n / 7)))
    set_term = 2 * math.sqrt(covering + math.log(1 / delta))
    wanted = 0.3 + 2 * radius + math.sqrt(skew / (2 * m * n)) * (class_term + set_term)
    found = integrated_bound(0.3, RelativeFairness(phi), n, m, 7, radius=radius, failure=delta)
    assert found == pytest.approx(wanted, rel=1e-12)


@settings(deadline=None, max_examples=20)
@given(scale=st.floats(0.1, 10), shift=st.floats(-3, 3), empirical=st.floats(-1, 1))
def test_theorem_4_of_scaff_pd_ia_does_not_see_the_unit_of_the_loss(
    scale: float, shift: float, empirical: float
) -> None:
    """Losses scale l + shift, weights that sum to one: the bound is moved in the same way."""
    give = (CVaR(0.5), 4, 1000, 7)
    plain = integrated_bound(empirical, *give)
    other = integrated_bound(scale * empirical + shift, *give, loss_range=2 * scale)
    assert other == pytest.approx(scale * plain + shift, rel=1e-9, abs=1e-9)


def test_luck_with_losses_of_minus_one_and_one_is_within_theorem_4() -> None:
    """One client, one model: the mean of m signs is off by more than the set's term too seldom.

    With M = 1 it would be off more often than promised: the term is Hoeffding's for the range.
    """
    m, failure = 400, 0.05
    whole, half = (
        integrated_bound(0.0, CVaR(1.0), 1, m, 1, loss_range=r, failure=failure, log_covering=0.0)
        - r * 0.01
        - 2 * r * math.sqrt(1 + math.log(m)) / math.sqrt(2 * m)
        for r in (2.0, 1.0)
    )

    def too_good(added: float) -> float:  # the chance that a mean of signs is below -added
        return float(binom.cdf(math.ceil(m * (1 - added) / 2) - 1, m, 0.5))

    assert too_good(whole) <= failure < too_good(half)


def test_a_segment_needs_nearly_its_covering_number() -> None:
    """Two clients: weights (t, 1 - t), l1 length 2; exactly ceil(1 / radius) balls cover them."""
    for radius in (0.5, 0.1, 1e-9):
        assert math.log(math.ceil(1 / radius)) <= log_covering_number(1.0, 2, radius)
    assert math.log(1e9) > 0.9 * log_covering_number(1.0, 2, 1e-9)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: weighted_massart([1.0], [10], 0), "models"),
        (lambda: rc_fl_bound(0.1, 0.1, [0.5, 0.5], [0.2, 1], [9, 9]), "share"),
        (lambda: rc_fl_bound(0.1, 0.1, [1.0], [1.0], [9, 9]), "per client"),
        (lambda: rc_fl_bound(0.1, 0.1, [1.0], [1.0], [9], failure=1.0), "failure"),
        (lambda: limit_skewness(0.0, 0.1), "tail"),
        (lambda: integrated_bound(0.1, CVaR(0.5), 2, 10, 20), "VC dimension"),
        (lambda: log_covering_number(1.0, 2, 0.0), "radius"),
    ],
)
def test_nonsense_is_refused(call: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()  # type: ignore[operator]
