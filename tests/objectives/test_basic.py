"""Average, worst case, CVaR and chi-square: reductions, limits and messages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equifed.objectives import (
    Average,
    ChiSquare,
    CVaR,
    Entropic,
    Objective,
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


def test_objectives_without_a_saddle_form_say_so_by_their_class():
    for objective in (QFair(1.0), Tilted(-1.0)):
        assert isinstance(objective, Objective) and not isinstance(objective, SaddleObjective)
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
