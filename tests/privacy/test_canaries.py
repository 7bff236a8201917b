"""The audit: its bound by exact arithmetic and by mechanisms whose epsilon is known."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripts.trust import canaries
from scripts.trust.canaries import bound_epsilon, count_right, lower_bound, p_value


def p_exactly(m: int, r: int, v: int, odds: Fraction, delta: Fraction) -> Fraction:
    """The theorem's sums, term by term in rational numbers; odds are e^epsilon."""
    q = odds / (1 + odds)
    b = [math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
    alphas = [sum(b[max(0, v - i) : v], Fraction(0)) / i for i in range(1, m + 1)]
    return min(Fraction(1), sum(b[v:], Fraction(0)) + 2 * m * delta * max(alphas))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 25), st.integers(0, 40), st.sampled_from([0, 1e-5, 1e-2, 0.3]))
def test_the_bound_is_the_theorem_in_exact_arithmetic(data, m, tenths, delta):
    r = data.draw(st.integers(0, m))
    v = data.draw(st.integers(0, r))
    epsilon = tenths / 10
    exact = p_exactly(m, r, v, Fraction(math.exp(epsilon)), Fraction(delta))
    assert p_value(m, r, v, epsilon, delta) == pytest.approx(float(exact), rel=1e-9, abs=1e-14)


def test_a_bound_is_where_the_probability_reaches_the_level():
    found = lower_bound(1000, 300, 270, 1e-5, 0.05)
    assert (
        p_value(1000, 300, 270, found, 1e-5) < 0.05 <= p_value(1000, 300, 270, found + 1e-5, 1e-5)
    )
    # all right, no delta: q^r is the level
    assert lower_bound(50, 50, 50, 0.0) == pytest.approx(-math.log(0.05 ** (-1 / 50) - 1), abs=1e-5)
    assert lower_bound(100, 100, 50, 1e-5) == 0.0


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.0), (2.0, 0.0), (1.0, 1e-3)])
def test_randomised_response_is_refuted_as_rarely_as_the_level_says(epsilon, delta):
    # tells every coin truly with probability delta, else with the odds e^epsilon: exactly private
    draw, m, runs = np.random.default_rng(0), 200, 200
    q = delta + (1 - delta) / (1 + math.exp(-epsilon))
    rights = (draw.random((runs, m)) < q).sum(axis=1)
    bounds = {int(v): lower_bound(m, m, int(v), delta) for v in set(rights)}
    found = np.array([bounds[int(v)] for v in rights])
    above = np.mean(found > epsilon)
    assert above <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)
    if delta == 0:
        assert above > 0  # as often as it may, up to whole numbers
        assert found.mean() > epsilon / 3


def test_the_surest_are_guessed_by_their_signs():
    coins, scores = np.array([1.0, -1.0, 1.0, -1.0]), np.array([3.0, 2.0, 0.1, -0.2])
    assert [count_right(coins, scores, r) for r in (1, 2, 3, 4)] == [1, 1, 2, 3]


def test_a_guess_at_nothing_refutes_nothing():
    draw = np.random.default_rng(1)
    coins = draw.choice([-1.0, 1.0], 2000)
    found = [bound_epsilon(coins, draw.normal(size=2000), 1e-6) for _ in range(40)]
    assert np.mean(np.array(found) > 0) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 40)


@pytest.mark.long
@pytest.mark.parametrize("name", canaries.AUDITS)
@pytest.mark.parametrize("epsilon", canaries.EPSILONS)
def test_noise_keeps_bounds_below_the_ledgers_and_its_absence_is_seen(name, epsilon):
    if "fifth" in name:
        pytest.importorskip("dp_accounting")
    run = canaries.AUDITS[name]
    bound = run(epsilon, 0, True)
    assert bound <= epsilon
    assert bound > 0.2 * epsilon or name != "12 sums of all gradients"  # elsewhere bounds are loose
    assert run(epsilon, 0, False) > epsilon
