"""Relative entropy: the KL objective and the entropic steps against bisection and a solver."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles import capped_simplex_by_bisection, kl_prox_by_bisection, solve, solver_parts

from equifed.objectives import (
    KL,
    Average,
    ChiSquare,
    CVaR,
    Entropic,
    Euclidean,
    HeterogeneousCVaR,
    L1Distance,
    L2Distance,
    LpDistance,
    RelativeFairness,
    Tilted,
    Transport,
    WorstCase,
)
from equifed.objectives.projections import entropic_prox

pytestmark = pytest.mark.long

numbers = st.lists(st.floats(-3, 3), min_size=2, max_size=7).map(np.array)
some = settings(deadline=None, max_examples=60)


@pytest.mark.long
@settings(deadline=None, max_examples=20)
@given(point=numbers, temperature=st.sampled_from([1e-2, 0.3, 1.0, 30.0]), data=st.data())
def test_the_prox_of_kl_is_two_nested_bisections(point, temperature, data):
    prior = np.array([data.draw(st.floats(0.05, 1.0)) for _ in point])
    prior /= prior.sum()
    fast = KL(temperature, tuple(prior)).prox(point, 1.0)
    assert np.allclose(fast, kl_prox_by_bisection(point, temperature, prior), rtol=0, atol=1e-10)


@some
@given(point=numbers)
def test_the_prox_of_kl_runs_from_the_projection_to_the_prior(point):
    ones = np.ones(point.size)
    cold, hot = KL(1e-14).prox(point, 1.0), KL(1e14).prox(point, 1.0)
    assert np.allclose(cold, capped_simplex_by_bisection(point, ones), rtol=0, atol=1e-11)
    assert np.allclose(hot, 1 / point.size, rtol=0, atol=1e-11)


@pytest.mark.parametrize("temperature", [1e-300, 1e-100, 1e-8, 1.0, 1e8, 1e100, 1e300])
@pytest.mark.parametrize("scale", [1e-300, 1e-8, 1.0, 1e8, 1e300])
def test_the_equations_of_the_prox_hold_at_every_scale(temperature, scale):
    point = scale * np.array([1.0, 1.0, 0.5, -1.0, 0.0])
    weights = KL(temperature).prox(point, 1.0)
    assert weights.sum() == pytest.approx(1, abs=1e-12) and weights[0] == weights[1]
    inside = weights > 1e-280
    # w + T log(w / p) - point is the same for all, to rounding of the largest term.
    terms = np.stack([weights, temperature * np.log(5 * weights.clip(1e-300)), -point])[:, inside]
    spread = np.ptp(terms.sum(axis=0))
    assert spread <= 1e-13 * np.abs(terms).max() + 1e-13 * temperature


@some
@given(losses=numbers, data=st.data())
def test_kl_runs_from_the_average_to_the_worst_case(losses, data):
    assert KL(1e-9).value(losses) == pytest.approx(losses.max(), abs=1e-7)
    assert KL(1e9).value(losses) == pytest.approx(losses.mean(), abs=1e-7)
    sizes = tuple(data.draw(st.integers(1, 9)) for _ in losses)
    assert KL(1e9, sizes).value(losses) == pytest.approx(Average(sizes).value(losses), abs=1e-7)


def test_a_prior_of_one_in_a_million_million_loses_nothing():
    losses, sizes = np.array([5.0, 1.0]), (1e-300, 1.0)
    exact = 1.0 + np.log1p(1e-300 * np.expm1(4.0))  # log of the weighted mean of e^l
    assert KL(1.0, sizes).value(losses) == pytest.approx(exact, rel=1e-14)


@some
@given(losses=numbers, tilt=st.floats(0.01, 20))
def test_positive_tilts_are_kl_and_negative_ones_its_mirror(losses, tilt):
    assert Tilted(tilt).value(losses) == pytest.approx(KL(1 / tilt).value(losses), abs=1e-12)
    assert np.allclose(Tilted(tilt).weights(losses), KL(1 / tilt).weights(losses))
    assert Tilted(-tilt).value(losses) == pytest.approx(-Tilted(tilt).value(-losses), abs=1e-12)
    direct = np.log(np.mean(np.exp(-tilt * losses))) / -tilt
    assert Tilted(-tilt).value(losses) == pytest.approx(direct, abs=1e-9)


def test_no_tilt_is_the_average():
    losses = np.array([1.0, 2.0, 6.0])
    assert Tilted(0.0).value(losses) == 3.0
    assert Tilted(1e-320).value(losses) == 3.0
    assert Tilted(1e-9).value(losses) == pytest.approx(3.0, abs=1e-7)
    assert np.array_equal(Tilted(0.0, (1, 1, 2)).weights(losses), [0.25, 0.25, 0.5])


def solver_step(objective, start, losses, step):
    import cvxpy as cp

    w = cp.Variable(start.size)
    constraints, penalty = solver_parts(objective, w)
    gain = step * (losses @ w - penalty) - cp.sum(cp.rel_entr(w, start))
    solve(cp.Problem(cp.Maximize(gain), constraints))
    return np.asarray(w.value)


@pytest.mark.parametrize(
    "objective",
    [
        Average((1, 2, 3, 4, 5)),
        WorstCase(),
        CVaR(0.5),
        HeterogeneousCVaR((0.4, 0.9, 0.5, 0.7, 1.0)),
        KL(0.4, (1, 2, 3, 4, 5)),
        ChiSquare(0.3),
        ChiSquare(0.3, CVaR(0.5)),
        ChiSquare(0.05, HeterogeneousCVaR((0.4, 0.9, 0.5, 0.7, 1.0)), (1, 2, 3, 4, 5)),
        L2Distance(0.8, (1, 2, 3, 4, 5)),
    ],
    ids=repr,
)
def test_a_generic_solver_agrees_with_the_entropic_step(objective):
    rng = np.random.default_rng(5)
    for step in (0.2, 3.0):
        start, losses = rng.dirichlet(np.ones(5)), rng.uniform(0, 3, 5)
        ours = Entropic().ascend(objective, start, losses, step)
        assert np.allclose(ours, solver_step(objective, start, losses, step), rtol=0, atol=2e-5)


def test_on_the_simplex_the_entropic_step_is_multiplicative_weights():
    start, losses = np.array([0.2, 0.5, 0.3]), np.array([1.0, 0.0, 2.0])
    expected = start * np.exp(0.7 * losses)
    assert np.allclose(
        Entropic().ascend(WorstCase(), start, losses, 0.7), expected / expected.sum()
    )


@pytest.mark.parametrize("claim", [1e3, 1e9, 1e300, 1.7e308])
def test_a_huge_claim_takes_its_cap_and_the_rest_is_shared_as_if_it_were_not_there(claim):
    losses = np.array([claim, 1.0, 2.0, 0.5])
    start = np.full(4, 0.25)
    weights = Entropic().ascend(CVaR(0.625), start, losses, 1.0)
    assert weights[0] == 0.4
    others = np.exp(losses[1:])
    assert np.allclose(weights[1:], np.minimum(0.6 * others / others.sum(), 0.4), atol=1e-12)
    penalised = Entropic().ascend(ChiSquare(0.01, CVaR(0.625)), start, losses, 1.0)
    assert penalised[0] == 0.4 and penalised.sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("scale", [1e5, 1e10, 1e16, 1e300])
def test_capped_entropic_steps_stay_feasible_at_huge_scales(scale):
    rng = np.random.default_rng(11)
    for _ in range(50):
        caps = rng.uniform(0.1, 0.6, 8)
        prior = rng.dirichlet(np.ones(8))
        point = scale * rng.choice([1.0, 1.0 + 1e-15, 0.5, 0.5 + 1e-16], 8) + rng.normal(size=8)
        for temperature in (1e-3, 1.0, 1e5):
            weights = entropic_prox(point, temperature, prior, caps)
            assert weights.sum() == pytest.approx(1, abs=1e-12)
            assert (weights >= 0).all() and (weights <= caps).all()


@pytest.mark.parametrize(
    "objective",
    [
        RelativeFairness(0.2),
        ChiSquare(0.1, KL(1.0)),
        L1Distance(1.0),
        LpDistance(1.5),
        Transport(1.0, ((0, 1), (1, 0))),
    ],
    ids=repr,
)
def test_steps_without_an_exact_form_are_refused(objective):
    with pytest.raises(ValueError, match="Euclidean"):
        Entropic().ascend(objective, np.array([0.5, 0.5]), np.ones(2), 1.0)


def test_dead_and_negative_weights_are_refused_where_they_make_the_step_impossible():
    with pytest.raises(ValueError, match="revive"):
        Entropic().ascend(CVaR(1.0), np.array([1.0, 0.0]), np.ones(2), 1.0)
    with pytest.raises(ValueError, match="weights >= 0"):
        Entropic().ascend(WorstCase(), np.array([1.5, -0.5]), np.ones(2), 1.0)
    kept = Entropic().ascend(WorstCase(), np.array([0.5, 0.5, 0.0]), np.array([0.0, 0, 9]), 1.0)
    assert np.array_equal(kept, [0.5, 0.5, 0.0])


def test_the_euclidean_step_is_the_prox_of_the_step_ahead():
    start, losses = np.array([0.2, 0.5, 0.3]), np.array([1.0, 0.0, 2.0])
    for objective in (WorstCase(), KL(0.3), RelativeFairness(0.3)):
        ours = Euclidean().ascend(objective, start, losses, 0.7)
        assert np.array_equal(ours, objective.prox(start + 0.7 * losses, 0.7))
