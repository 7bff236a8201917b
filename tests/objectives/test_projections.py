"""The exact projections against bisection, against each other and at every scale."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripts.trust.projections import LARGEST, measure_error
from tests.oracles import capped_simplex_by_bisection, is_majorised

from equifed.objectives.projections import (
    capped_corner,
    entropic_prox,
    project_capped_simplex,
    project_permutahedron,
    spread_evenly,
    tilt,
)

pytestmark = pytest.mark.long

entries = st.one_of(
    st.floats(-2, 2), st.sampled_from([0.0, 0.5, 1.0, -1.0, 0.25]), st.floats(-1e3, 1e3)
)


def vectors(least: int = 1, most: int = 12) -> st.SearchStrategy[np.ndarray]:
    return st.lists(entries, min_size=least, max_size=most).map(np.array)


@settings(deadline=None, max_examples=120)
@given(point=vectors(), tail=st.floats(0.01, 1.0))
def test_two_projections_and_bisection_agree_on_the_capped_simplex(point, tail):
    n = point.size
    caps = np.full(n, min(1.0, 1 / (tail * n)))
    sorted_way = project_permutahedron(point, capped_corner(n, tail))
    assert np.allclose(sorted_way, project_capped_simplex(point, caps), rtol=0, atol=1e-13)
    assert np.allclose(sorted_way, capped_simplex_by_bisection(point, caps), rtol=0, atol=1e-11)


@pytest.mark.long
@settings(deadline=None, max_examples=120)
@given(point=vectors(), data=st.data())
def test_unequal_caps_agree_with_bisection(point, data):
    caps = np.array([data.draw(st.floats(0.001, 2.0)) for _ in point])
    caps *= max(1.0, 1.0000001 / caps.sum())
    weights = project_capped_simplex(point, caps)
    assert abs(weights.sum() - 1) <= 1e-12
    assert (weights >= 0).all() and (weights <= caps).all()
    assert np.allclose(weights, capped_simplex_by_bisection(point, caps), rtol=0, atol=1e-11)


@pytest.mark.parametrize("temperature", [0.01, 0.3, 5.0])
def test_entropic_solutions_under_unequal_caps_and_priors_meet_their_conditions(temperature):
    """Optimality: one price for all who are below their caps, and none lower for those at them."""
    draw = np.random.default_rng(0)
    for n in 60 * [2, 3, 5, 9]:
        point, prior = draw.normal(size=n), draw.dirichlet(np.full(n, 0.3)) + 1e-3
        caps = draw.dirichlet(np.full(n, 0.5)) * draw.uniform(1.02, 2.0) + 1e-3
        mixed, tilted = (
            entropic_prox(point, temperature, prior, caps),
            tilt(prior, point, 2.0, caps),
        )
        for weights, price in (
            (mixed, point - mixed - temperature * np.log(mixed / prior)),
            (tilted, 2.0 * point - np.log(tilted / prior)),
        ):
            assert weights.sum() == pytest.approx(1, abs=1e-12)
            assert (weights > 0).all() and (weights <= caps * (1 + 1e-12)).all()
            below, off = weights < caps * (1 - 1e-9), 1e-8 * (1 + np.abs(price).max())
            common = price[below] if below.any() else price.min(keepdims=True)
            assert np.ptp(common) <= off and (price[~below] >= common.max() - off).all()


@settings(deadline=None, max_examples=120)
@given(point=vectors(), data=st.data())
def test_projection_onto_any_permutahedron_satisfies_the_variational_inequality(point, data):
    corner = np.sort([data.draw(entries) for _ in point])[::-1]
    weights = project_permutahedron(point, corner)
    size = np.abs(corner).sum() + 1
    assert is_majorised(weights, corner, tolerance=1e-12 * size)
    # <point - w, v - w> <= 0 for all v of the set; the worst v follows the order of point - w.
    residual = point - weights
    worst = spread_evenly(residual, corner)
    assert residual @ (worst - weights) <= 1e-12 * size * (np.abs(residual).max() + 1)


@pytest.mark.parametrize("scale", [1e-300, 1e-9, 1.0, 1e9, 1e300])
@pytest.mark.parametrize("tail", [0.1, 0.5, 1.0])
def test_huge_and_tiny_points_with_ties(scale, tail):
    point = scale * np.array([1.0, 1.0, 1.0, 0.5, 0.5, -1.0, 0.0, 1.0])
    n = point.size
    corner = capped_corner(n, tail)
    for weights in (
        project_permutahedron(point, corner),
        project_capped_simplex(point, np.full(n, min(1, 1 / (tail * n)))),
    ):
        assert is_majorised(weights, corner, tolerance=1e-12)
        assert weights[0] == weights[1] == weights[2] == weights[7] and weights[3] == weights[4]
        if scale >= 10:  # gaps larger than the set: the projection is the face of the maximiser
            assert np.allclose(weights, spread_evenly(point, corner), rtol=0, atol=1e-15)
        if scale <= 1e-300:
            assert np.allclose(weights, 1 / n, rtol=0, atol=1e-15)


def test_a_shift_of_1e12_changes_nothing_but_the_rounding_of_the_point():
    point = np.array([0.25, 0.5, -0.125, 0.75])
    corner = capped_corner(4, 0.5)
    assert np.array_equal(
        project_permutahedron(point, corner), project_permutahedron(point + 2.0**40, corner)
    )
    caps = np.array([0.4, 0.5, 0.3, 0.9])
    assert np.array_equal(
        project_capped_simplex(point, caps), project_capped_simplex(point + 2.0**40, caps)
    )


@given(n=st.integers(1, 50), tail=st.floats(1e-3, 1.0))
def test_the_corner_of_the_capped_simplex_is_a_vertex(n, tail):
    corner = capped_corner(n, tail)
    cap = min(1.0, 1 / (tail * n))
    assert corner.sum() == pytest.approx(1, abs=1e-14)
    assert (np.diff(corner) <= 0).all() and corner.min() >= 0 and corner.max() <= cap
    assert ((corner > 0) & (corner < cap)).sum() <= 1


def test_projections_at_every_scale_are_those_of_exact_arithmetic() -> None:
    assert max(measure_error(seed) for seed in range(100)) <= LARGEST
