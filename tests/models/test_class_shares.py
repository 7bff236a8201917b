"""Own shares of classes: against numerical integration, limits, and Bayes' rule on known data."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import minimize_scalar
from scipy.stats import norm

from equifed.models.class_shares import check_kinds, share_shifts


def integrated(counts: np.ndarray) -> np.ndarray:
    """The same for two classes by numerical integration, and search for the part that differs."""
    n = counts.sum(1)
    p = (counts / n[:, None]).mean(0)
    alike = [p[0] ** a * p[1] ** b for a, b in counts]
    differ = [quad(lambda s, a=a, b=b: s**a * (1 - s) ** b, 0, 1)[0] for a, b in counts]
    mean = [quad(lambda s, a=a, b=b: s ** (a + 1) * (1 - s) ** b, 0, 1)[0] for a, b in counts]

    def unlikely(part: float) -> float:
        return -sum(np.log(part * d + (1 - part) * a) for a, d in zip(alike, differ, strict=True))

    part = minimize_scalar(unlikely, bounds=(1e-6, 1 - 1e-6), options={"xatol": 1e-10}).x
    first = np.array([(part * m + (1 - part) * a * p[0]) / (part * d + (1 - part) * a)
                      for a, d, m in zip(alike, differ, mean, strict=True)])  # fmt: skip
    return np.log(np.stack([first, 1 - first], axis=1) / p)


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_posterior_mean_of_the_shares(seed: int) -> None:
    draw = np.random.default_rng(seed)
    shares = np.where(draw.random(12) < 0.4, draw.random(12), 0.7)
    n = draw.integers(5, 40, 12)
    first = draw.binomial(n, shares)
    counts = np.stack([first, n - first], axis=1)
    np.testing.assert_allclose(share_shifts(counts), integrated(counts), atol=2e-3)


@given(st.lists(st.lists(st.integers(0, 50), min_size=4, max_size=4), min_size=1, max_size=8),
       st.permutations(range(4)))  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_names_of_classes_and_kinds_do_not_matter(
    counts: list[list[int]], order: list[int]
) -> None:
    held, kinds = np.array(counts), [0, 1, 1, 2]
    shifts = share_shifts(held, kinds)
    assert np.isfinite(shifts).all()
    np.testing.assert_array_equal(shifts[:, 1], shifts[:, 2])
    turned = share_shifts(held[:, order], [kinds[k] for k in order])
    np.testing.assert_allclose(turned, shifts[:, order], atol=1e-12)
    named = share_shifts(held, [7, 3, 3, 5])  # numbers need not begin at 0
    np.testing.assert_allclose(named, shifts, atol=1e-12)
    merged = np.stack([held[:, 0], held[:, 1] + held[:, 2], held[:, 3]], axis=1)
    np.testing.assert_allclose(share_shifts(merged), shifts[:, [0, 1, 3]], atol=1e-12)
    assert not shifts[held.sum(1) == 0].any()


def test_chance_moves_nobody_and_much_data_tell_all() -> None:
    draw = np.random.default_rng(0)
    alike = draw.multinomial(100, [0.5, 0.3, 0.2], 50)
    counted = np.log(alike / 100 / alike.mean(0) * 100)
    assert np.abs(share_shifts(alike)).mean() < 0.1 * np.abs(counted).mean()
    counts = np.array([[9_000, 1_000], [1_000, 9_000], [5_000, 5_000]])
    expected = np.log(counts / 10_000 / 0.5)
    np.testing.assert_allclose(share_shifts(counts)[:2], expected[:2], atol=1e-3)
    without = share_shifts(np.array([[70, 30, 0]] * 30 + [[0, 60, 0], [0, 0, 0]]))
    assert without[-2, 0] < -3 and without[-2, 1] > 0.5  # it has none of the first
    assert not without[:, 2].any() and not without[-1].any()  # a class and a client without samples
    assert not share_shifts(np.zeros((3, 4))).any()


def test_shifted_logits_are_the_clients_bayes_rule() -> None:
    draw = np.random.default_rng(1)
    shares = np.array([0.1, 0.5, 0.5, 0.5, 0.9])  # of the class at +1; the other is at -1
    counts = np.array([[round(400 * (1 - s)), round(400 * s)] for s in shares])
    shifts = share_shifts(counts)
    x = 2 * draw.random(20_000) - 1
    pooled = norm.logpdf(x, 1) - norm.logpdf(x, -1)  # shares are 1/2 on average
    for s, moved in zip(shares, shifts, strict=True):
        bayes = pooled + np.log(s / (1 - s)) > 0
        ours = pooled + moved[1] - moved[0] > 0
        assert np.mean(ours == bayes) > 0.98
        assert s == 0.5 or np.mean(ours == bayes) > np.mean((pooled > 0) == bayes) + 0.1


@pytest.mark.parametrize("kinds", ["class", [0, 1], [0, 1, -1], [0, 1, 0.5], 3, None, [0, 1, 2, 3]])
def test_kinds_that_cannot_be_are_refused(kinds: object) -> None:
    with pytest.raises(ValueError, match=r"class_kinds is .*3 numbers, got "):
        check_kinds(kinds, 3)
