"""RC-FL: Lemma 1 three ways, the smoothing bound of Lemma 2, reductions and refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equifed.objectives import Average, CVaR, HeterogeneousCVaR, WorstCase
from equifed.objectives.cvar import check_tails

some = settings(deadline=None, max_examples=100)


@st.composite
def problems(draw):
    """Losses (with ties), shares p and tails in [p, 1]."""
    n = draw(st.integers(1, 7))
    losses = np.array([draw(st.sampled_from([0.0, 0.5, 1.0, 1.5]) | st.floats(0, 3))])
    losses = np.append(losses, [draw(st.floats(0, 3) | st.just(1.0)) for _ in range(n - 1)])
    p = np.array([draw(st.floats(0.05, 1.0)) for _ in range(n)])
    p /= p.sum()
    tails = p + (1 - p) * np.array([draw(st.floats(0, 1)) for _ in range(n)])
    return losses, p, np.minimum(tails, 1.0)


def dual(losses, p, tails, eta):
    """Lemma 1, middle: eta + E[(f - eta)_+ / alpha]."""
    return eta + float(np.sum(p / tails * np.maximum(losses - eta, 0.0)))


def smoothed(losses, p, tails, eta, mu):
    """Return the objective of (5): the hinge replaced by mu log(1 + exp(./mu))."""
    return eta + float(np.sum(p / tails * mu * np.logaddexp(0.0, (losses - eta) / mu)))


def tail_average(losses, p, tails):
    """Lemma 1, right: the upper 1/tau quantile mean under P(i) = p_i / (alpha_i tau).

    As the integral of the quantile function over the upper 1/tau of probability, which splits an
    atom at the quantile instead of dropping it.
    """
    tau = float(np.sum(p / tails))
    probability = p / tails / tau
    order = np.argsort(losses)
    upper_ends = np.cumsum(probability[order])
    lower_ends = upper_ends - probability[order]
    inside = np.clip(upper_ends, 1 - 1 / tau, 1) - np.clip(lower_ends, 1 - 1 / tau, 1)
    return tau * float(inside @ losses[order])


@pytest.mark.long
@some
@given(problem=problems())
def test_lemma_1_supremum_infimum_and_tail_average_are_one_number(problem):
    losses, p, tails = problem
    supremum = HeterogeneousCVaR(tuple(tails), tuple(p)).value(losses)
    infimum = min(dual(losses, p, tails, eta) for eta in losses)  # a minimum sits at a kink
    assert supremum == pytest.approx(infimum, abs=1e-12)
    assert supremum == pytest.approx(tail_average(losses, p, tails), abs=1e-9)


def test_the_conditional_expectation_of_definition_2_where_the_tail_ends_between_clients():
    p, tails = np.full(4, 0.25), np.array([0.5, 0.5, 1.0, 0.5])
    losses = np.array([3.0, 4.0, 1.0, 0.5])  # the two worst have caps 1/2 + 1/2 = 1
    probability = (p / tails) / np.sum(p / tails)
    above = losses > 1.0  # the quantile at 1 - 1/tau
    expected = float(probability[above] @ losses[above] / probability[above].sum())
    assert HeterogeneousCVaR(tuple(tails)).value(losses) == pytest.approx(expected, abs=1e-15)


@some
@given(problem=problems(), eta=st.floats(-1, 4), mu=st.floats(1e-6, 2))
def test_lemma_2_smoothing_adds_between_zero_and_mu_tau(problem, eta, mu):
    losses, p, tails = problem
    exact, smooth = dual(losses, p, tails, eta), smoothed(losses, p, tails, eta, mu)
    assert exact - 1e-12 <= smooth <= exact + mu * float(np.sum(p / tails)) + 1e-12


@pytest.mark.long
@some
@given(problem=problems())
def test_the_corners_of_the_tails_are_the_average_and_the_worst_case(problem):
    losses, p, _ = problem
    share = tuple(p)
    assert HeterogeneousCVaR(1.0, share).value(losses) == pytest.approx(
        Average(share).value(losses), abs=1e-12
    )
    assert HeterogeneousCVaR(share, share).value(losses) == pytest.approx(
        WorstCase().value(losses), abs=1e-12
    )


@pytest.mark.long
@some
@given(losses=st.lists(st.floats(0, 3), min_size=4, max_size=4).map(np.array))
@pytest.mark.parametrize("tail", [0.25, 0.4, 0.8, 1.0])
def test_equal_tails_and_sizes_are_cvar(losses, tail):
    ours, known = HeterogeneousCVaR(tail), CVaR(tail)
    assert ours.value(losses) == pytest.approx(known.value(losses), abs=1e-12)
    assert np.allclose(ours.weights(losses), known.weights(losses), rtol=0, atol=1e-12)
    assert np.allclose(ours.prox(losses, 1.0), known.prox(losses, 1.0), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("tails", "named"),
    [((0.5, 0.5, 1.5, 1.0), "client 2 is 1.5, above 1"),
     ((0.2, 0.5, 0.1, 1.0), r"client 2 is 0.1, below its share 0.25 of")],
)  # fmt: skip
def test_the_tail_that_is_most_out_of_range_is_named(tails, named):
    with pytest.raises(ValueError, match=named):
        check_tails(tails, np.full(4, 0.25), "RFedFair")


def test_equal_tails_are_the_size_weighted_cvar():
    """The worst half of the *samples*: a client of size k counts as k clients of size one."""
    losses, sizes = np.array([1.0, 4.0, 2.0]), (5, 1, 4)
    per_sample = np.repeat(losses, sizes)
    assert HeterogeneousCVaR(0.5, sizes).value(losses) == pytest.approx(
        CVaR(0.5).value(per_sample), abs=1e-14
    )


@pytest.mark.long
def test_a_million_clients_sum_to_one():
    losses = np.random.default_rng(0).normal(size=10**6)
    assert HeterogeneousCVaR(0.3).weights(losses).sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: HeterogeneousCVaR(0.0), "tails"),
        (lambda: HeterogeneousCVaR((0.5, 1.2)), "tails"),
        (lambda: HeterogeneousCVaR((0.1, 0.9), (1, 1)), "client 0 is 0.1, below its share 0.5"),
        (lambda: HeterogeneousCVaR((0.5, 0.9, 1.0)).value(np.ones(2)), "3 tails for 2 clients"),
        (lambda: HeterogeneousCVaR(1.0, (1, 1)).value(np.ones(3)), "2 entries for 3 clients"),
        (lambda: HeterogeneousCVaR(1.0, (1, -1)), "positive"),
    ],
)
def test_wrong_arguments_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        wrong()
