"""Generalisation bounds against simulations, their own special cases and exact maxima."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equifed.objectives import Average, CVaR, HeterogeneousCVaR, RelativeFairness, WorstCase
from equifed.steps.bounds import (
    integrated_bound,
    largest_skewness,
    limit_skewness,
    log_covering_number,
    rc_fl_bound,
    rc_fl_bound_by_client,
    skewness,
    weighted_massart,
    weighted_vc,
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


@pytest.mark.parametrize("tails", [(1.0, 1.0, 1.0), (0.5, 0.8, 0.4)])
def test_rc_fl_bounds_hold_in_simulation(tails: tuple[float, ...]) -> None:
    """A class of 6 Bernoulli losses per client: the bounds fail far less often than allowed."""
    random = np.random.default_rng(0)
    samples, shares = np.array([60, 120, 60]), np.array([0.25, 0.5, 0.25])
    truth = random.uniform(0.1, 0.6, (6, 3))
    objective = HeterogeneousCVaR(tails, tuple(shares))
    weights = shares / np.array(tails)
    whole = weighted_massart(weights, samples, 6)
    each = [weighted_massart([1.0], [m], 6) for m in samples]
    failures = 0
    for _ in range(100):
        seen = random.binomial(samples, truth) / samples
        for row, exact in zip(seen, truth, strict=True):
            empirical, true = objective.value(row), objective.value(exact)
            first = rc_fl_bound(empirical, whole, shares, tails, samples, failure=0.1)
            second = rc_fl_bound_by_client(empirical, each, shares, tails, samples, failure=0.1)
            failures += true > min(first, second)
    assert failures <= 20


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


def test_vc_bound_is_the_formula_of_remark_3() -> None:
    shares, tails, samples, d = np.array([0.4, 0.6]), np.array([0.5, 0.9]), np.array([30, 80]), 7
    terms = 2 * d * shares**2 / (tails**2 * samples) * np.log(np.e * 110 / d)
    np.testing.assert_allclose(weighted_vc(shares / tails, samples, d), np.sqrt(terms.sum()))


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
        a, b = 1 / ((1 - phi) * tail), phi / ((1 - phi) * tail)
        printed = tail * ((a - 1) ** 2 + (b + 1) ** 2) + 1
        np.testing.assert_allclose(limit_skewness(tail, phi) - printed, 1 - 2 * tail, atol=1e-12)


def test_theorem_4_of_scaff_pd_ia_is_the_formula() -> None:
    n, m, vc, big, radius, delta = 5, 200, 12, 1.5, 0.02, 0.1
    sets = RelativeFairness(0.1, CVaR(0.4), CVaR(0.4))
    covering = log_covering_number(sets.l1_norm(n), n, radius)
    remainder = np.sqrt(largest_skewness(sets, n) / (2 * m * n)) * (
        4 * np.sqrt(vc) * np.sqrt(1 + np.log(m * n / vc)) + big * np.sqrt(covering - np.log(delta))
    )
    found = integrated_bound(0.3, sets, n, m, vc, bound=big, radius=radius, failure=delta)
    np.testing.assert_allclose(found, 0.3 + big * radius + remainder)


def test_a_grid_covers_the_simplex_within_the_covering_number() -> None:
    """Two clients: weights (t, 1 - t), l1 length 2; ceil(1 / radius) balls cover them."""
    for radius in (0.5, 0.1, 0.01):
        assert np.log(np.ceil(1 / radius)) <= log_covering_number(1.0, 2, radius)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: weighted_massart([1.0], [10], 0), "models"),
        (lambda: weighted_vc([1.0], [10], 10), "VC dimension"),
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
