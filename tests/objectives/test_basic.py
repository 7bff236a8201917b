"""Average, worst case, CVaR and chi-square: reductions, limits and messages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equifed.objectives import (
    KL,
    Average,
    ChiSquare,
    CVaR,
    Entropic,
    L2Distance,
    LpDistance,
    Proportional,
    QFair,
    SaddleObjective,
    Tilted,
    WorstCase,
)
from equifed.objectives.projections import project_capped_simplex

losses_of_clients = st.lists(st.floats(0, 10), min_size=1, max_size=9).map(np.array)


@given(losses=losses_of_clients)
def test_cvar_runs_from_the_average_to_the_worst_case(losses):
    assert CVaR(1.0).value(losses) == pytest.approx(Average().value(losses))
    assert CVaR(1 / losses.size).value(losses) == pytest.approx(WorstCase().value(losses))
    assert CVaR(1e-9).value(losses) == WorstCase().value(losses)


@pytest.mark.long
@settings(deadline=None)
@given(losses=losses_of_clients)
def test_chi_square_runs_from_the_base_to_the_centre(losses):
    for base in (WorstCase(), CVaR(0.4), Average()):
        assert ChiSquare(0.0, base).value(losses) == pytest.approx(base.value(losses), rel=1e-14)
        strong = ChiSquare(1e12, base)
        assert np.allclose(strong.weights(losses), 1 / losses.size, rtol=0, atol=1e-10)
    sizes = tuple(range(1, losses.size + 1))
    strong = ChiSquare(1e12, centre=sizes).weights(losses)
    assert np.allclose(strong, Average(sizes).weights(losses), rtol=0, atol=1e-10)


def test_two_chi_squares_add_up():
    losses = np.array([0.3, 1.0, 0.7, 0.2])
    once, twice = ChiSquare(0.7), ChiSquare(0.5, ChiSquare(0.2))
    assert np.allclose(once.weights(losses), twice.weights(losses), rtol=0, atol=1e-15)
    assert np.allclose(once.prox(losses, 0.3), twice.prox(losses, 0.3), rtol=0, atol=1e-15)
    assert once.strong_convexity(4) == pytest.approx(twice.strong_convexity(4))


def test_claims_up_to_the_largest_float_stay_finite():
    losses = np.array([1.7e308, 1.0, 1.2, 0.9])
    capped = ChiSquare(0.01, CVaR(0.5)).weights(losses)
    assert capped.max() <= 0.5 and capped.sum() == pytest.approx(1, abs=1e-15)
    assert np.array_equal(ChiSquare(0.01).weights(losses), [1, 0, 0, 0])


class OwnWorstCase(SaddleObjective):
    """What somebody outside has to write for an objective on the simplex, and no more."""

    def weights(self, losses):
        return WorstCase().weights(losses)

    def prox(self, point, step):
        return project_capped_simplex(point, np.ones(point.size))


@given(losses=losses_of_clients)
def test_the_defaults_of_a_saddle_objective_are_those_of_the_simplex(losses):
    own, known, n = OwnWorstCase(), WorstCase(), losses.size
    assert own.value(losses) == pytest.approx(known.value(losses))
    assert np.array_equal(own.start(n), known.start(n))
    weights = own.weights(losses)
    assert own.penalty(weights) == known.penalty(weights)
    assert own.strong_convexity(n) == known.strong_convexity(n)
    assert own.l1_norm(n) == known.l1_norm(n)
    with pytest.raises(ValueError, match="OwnWorstCase has no exact entropic step"):
        Entropic().ascend(own, own.start(n), losses, 1.0)


def test_objectives_without_a_saddle_form_say_so():
    assert QFair(1.0).unfit is None and Tilted(2.0).unfit is None
    assert "tilted-erm" in Tilted(-1.0).unfit
    assert Tilted(-1.0).value(np.array([1.0, 2.0])) < 1.5  # a fine objective all the same
    with pytest.raises(ValueError, match="no dual step"):
        Tilted(-1.0).prox(np.ones(2), 1.0)
    with pytest.raises(TypeError, match="abstract"):
        SaddleObjective()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: CVaR(0.0), "WorstCase"),
        (lambda: CVaR(1.5), r"\(0, 1\]"),
        (lambda: ChiSquare(-1.0), "rho"),
        (lambda: ChiSquare(float("nan")), "rho"),
        (lambda: Average(prior=(1.0, 0.0)), "positive"),
        (lambda: Average(prior=(1.0, 2.0)).value(np.ones(3)), "2 entries for 3 clients"),
        (lambda: WorstCase().value(np.array([1.0, np.nan])), "position 1"),
        (lambda: CVaR(0.5).prox(np.array([np.inf, 1.0]), 1.0), "position 0"),
        (lambda: ChiSquare(1.0).prox(np.ones(2), -1.0), "step"),
        (lambda: WorstCase().value(np.ones((2, 2))), "vector"),
        (lambda: WorstCase().value(np.ones(0)), "vector"),
    ],
)
def test_wrong_arguments_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        wrong()


positive = st.lists(st.floats(0, 5), min_size=4, max_size=4).map(np.array)
exponents = st.floats(-1.5, 1.5).map(lambda e: 10**e)


@settings(deadline=None)
@given(
    q=exponents | st.sampled_from([0.5, 1.0, 2.0]),
    step=st.floats(-6, 6).map(lambda e: 10**e),
    point=st.lists(st.floats(-6, 6), min_size=4, max_size=4),
    signs=st.lists(st.sampled_from([-1.0, 1.0]), min_size=4, max_size=4),
)
def test_the_dual_step_of_q_fair_is_a_root_to_the_last_digits(q, step, point, signs):
    """w + step (w/p)^(1/q) changes its sign within a few units in the last place of w."""
    objective = QFair(q, (1.0, 2.0, 3.0, 0.01))
    z = np.array(signs) * 10 ** np.array(point)
    weights, p = objective.prox(z, step), objective.start(4)
    assert (weights[z <= 0] == 0).all()
    up = (z > 0) & (weights > 1e-290)
    width = 1e-14 * (4 + q)  # a power of q multiplies relative errors by q
    for factor, sign in ((1 - width, -1), (1 + width, 1)):
        w = weights[up] * factor
        assert (sign * (w + step * (w / p[up]) ** (1 / q) - z[up]) >= 0).all()


@given(losses=positive, point=positive)
def test_q_fair_runs_from_the_sum_towards_the_worst_case(losses, point):
    assert np.array_equal(QFair(0.0).prox(point, 0.7), np.ones(4))
    mean = QFair(50.0).value(losses / 5) * 51
    assert mean ** (1 / 51) == pytest.approx(WorstCase().value(losses / 5), rel=0.03, abs=1e-6)


@pytest.mark.long
@given(losses=positive, tilt=exponents)
def test_a_positive_tilt_is_kl_in_everything(losses, tilt):
    one, other = Tilted(tilt, (1, 2, 3, 4)), KL(1 / tilt, (1, 2, 3, 4))
    weights = one.prox(losses, 0.3)
    assert np.array_equal(weights, other.prox(losses, 0.3))
    assert one.penalty(weights) == other.penalty(weights)
    assert one.value(losses) == other.value(losses)
    assert one.strong_convexity(4) == other.strong_convexity(4)
    assert np.array_equal(one.mirror(weights, losses, 0.3), other.mirror(weights, losses, 0.3))


@given(losses=st.lists(st.floats(0, 4.5), min_size=4, max_size=4).map(np.array))
def test_proportional_fairness_is_that_of_nash(losses):
    """The derivative of sum log(M - l); its price per unit gained is the same for everybody."""
    objective = Proportional(ceiling=5.0, floor=0.5)
    gains = 5.0 - losses
    assert np.exp(-objective.value(losses)) == pytest.approx(np.prod(gains) ** 0.25)
    assert np.allclose(objective.weights(losses) * gains, 0.25)


def test_proportional_fairness_beyond_its_floor_is_its_tangent():
    objective, far = Proportional(ceiling=2.0, floor=0.5), np.array([1.5, 9.0])
    assert objective.weights(far) == pytest.approx([1.0, 1.0])
    assert objective.value(far) == pytest.approx(-np.log(0.5) + 0.5 * 7.5 / 0.5)


@pytest.mark.long
@pytest.mark.parametrize("power", [1.05, 1.3, 2.0, 3.0, 12.0])
@settings(deadline=None, max_examples=25)
@given(losses=positive, point=positive, strength=exponents, step=exponents)
def test_powers_of_a_distance_meet_the_conditions_of_optimality(
    power, losses, point, strength, step
):
    """Some level nu: a client's pull less its price is nu, or below it at weight zero."""
    objective = LpDistance(power, strength, (1, 2, 3, 4))
    prior = objective.start(4)
    for weights, pull, price in (
        (objective.weights(losses), losses, strength),
        (objective.prox(point, step), point, step * strength),
    ):
        own = pull - (weights if pull is point else 0.0)
        # Intervals: the price of weights that are off by a few units in the last place.
        low, high = (
            own - price * np.sign(d) * np.abs(d) ** (power - 1)
            for d in (weights - prior + 1e-14, weights - prior - 1e-14)
        )
        size = 1e-12 * (1 + np.abs(own).max() + price)
        level = high[weights > 0].min()
        assert low[weights > 0].max() <= level + size
        assert (low[weights == 0] <= level + size).all()
        assert weights.sum() == pytest.approx(1, abs=1e-12) and weights.min() >= 0


@pytest.mark.long
@given(losses=positive, point=positive)
def test_the_second_power_of_a_distance_is_the_squared_distance(losses, point):
    one, other = LpDistance(2.0, 0.7, (1, 2, 3, 4)), L2Distance(0.7, (1, 2, 3, 4))
    assert np.allclose(one.weights(losses), other.weights(losses), rtol=0, atol=1e-14)
    assert np.allclose(one.prox(point, 0.4), other.prox(point, 0.4), rtol=0, atol=1e-14)
    assert one.penalty(other.weights(losses)) == pytest.approx(
        other.penalty(other.weights(losses)), abs=1e-15
    )
    assert one.strong_convexity(4) == other.strong_convexity(4)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: LpDistance(1.0, 1.0), "L1Distance"),
        (lambda: LpDistance(2.0, 0.0), "strength"),
        (lambda: Proportional(0.0), "ceiling"),
        (lambda: Proportional(1.0, 2.0), "floor must lie between 0 and the ceiling"),
    ],
)
def test_settings_outside_their_range_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        wrong()
