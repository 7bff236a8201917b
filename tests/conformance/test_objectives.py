"""One suite over every saddle objective: sets, conjugacy, dual steps, limits of arithmetic."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles import solver_prox, solver_value, violation

from equifed.objectives import (
    KL,
    Average,
    ChiSquare,
    CVaR,
    Entropic,
    Euclidean,
    ExcessRisk,
    HeterogeneousCVaR,
    L1Distance,
    L2Distance,
    LpDistance,
    ProjectedGradient,
    Proportional,
    QFair,
    RelativeFairness,
    SaddleObjective,
    Tilted,
    Transport,
    WorstCase,
)
from equifed.objectives.capped import CappedTail, with_cap
from equifed.runs import catalogue

pytestmark = pytest.mark.long

Builder = Callable[[np.ndarray], SaddleObjective]


def sizes(order: np.ndarray) -> tuple[float, ...]:
    """Unequal numbers of samples, in the given order of clients."""
    return tuple(1.0 + 3.0 * (order % 4) + 0.1 * order)


def tails(order: np.ndarray) -> tuple[float, ...]:
    """Unequal tails, each above the client's share of the data."""
    numbers = np.array(sizes(np.sort(order)))
    share = (numbers / numbers.sum())[order]
    return tuple(share + (1 - share) * ((7 * order % 5) / 5.0))


def costs(order: np.ndarray) -> tuple[tuple[float, ...], ...]:
    """Return distances of clients on a curve; no two are equal."""
    place = np.sqrt(1.0 + order)
    return tuple(map(tuple, np.abs(place[:, None] - place[None, :])))


# Name -> an objective for clients that come in this order (an array of their original numbers).
CATALOGUE: dict[str, Builder] = {
    "average": lambda order: Average(),
    "average by size": lambda order: Average(sizes(order)),
    "worst case": lambda order: WorstCase(),
    "cvar 0.3": lambda order: CVaR(0.3),
    "cvar 0.75": lambda order: CVaR(0.75),
    "chi-square": lambda order: ChiSquare(0.4),
    "chi-square on cvar": lambda order: ChiSquare(0.1, CVaR(0.5)),
    "chi-square by size": lambda order: ChiSquare(0.3, centre=sizes(order)),
    "chi-square on tails": lambda order: ChiSquare(
        0.2, HeterogeneousCVaR(tails(order), sizes(order))
    ),
    "chi-square on kl": lambda order: ChiSquare(0.2, KL(0.3)),
    "excess risk": lambda order: ExcessRisk(sizes(order)),
    "excess risk of chi-square": lambda order: ExcessRisk(sizes(order), ChiSquare(0.4)),
    "excess risk of kl": lambda order: ExcessRisk(sizes(order), KL(0.5)),
    "kl": lambda order: KL(0.5),
    "kl by size": lambda order: KL(0.2, sizes(order)),
    "l1": lambda order: L1Distance(0.3),
    "l1 by size": lambda order: L1Distance(0.1, sizes(order)),
    "l2 squared by size": lambda order: L2Distance(0.7, sizes(order)),
    "l1.5": lambda order: LpDistance(1.5, 0.4),
    "l4 by size": lambda order: LpDistance(4.0, 0.9, sizes(order)),
    "tilted": lambda order: Tilted(3.0, sizes(order)),
    "tilted, not at all": lambda order: Tilted(0.0),
    "transport": lambda order: Transport(0.6, costs(order)),
    "transport by size": lambda order: Transport(0.2, costs(order), sizes(order)),
    "size-weighted cvar": lambda order: HeterogeneousCVaR(
        max(0.4, max(sizes(order)) / sum(sizes(order))), sizes(order)
    ),
    "heterogeneous cvar": lambda order: HeterogeneousCVaR(tails(order), sizes(order)),
    "relative, worst over best": lambda order: RelativeFairness(0.3),
    "relative, 20:20": lambda order: RelativeFairness(0.2, CVaR(0.2), CVaR(0.2)),
    "relative, palma": lambda order: RelativeFairness(0.5, CVaR(0.1), CVaR(0.4), rho=0.1),
    "relative, worst over average": lambda order: RelativeFairness(
        0.4, WorstCase(), Average(sizes(order))
    ),
    "relative, average over best": lambda order: RelativeFairness(
        0.25, Average(), CVaR(0.5), rho=0.3
    ),
    "worst case, capped": lambda order: with_cap(WorstCase(), 0.4),
    "cvar 0.3, capped": lambda order: with_cap(CVaR(0.3), 0.35),
    "chi-square, capped": lambda order: with_cap(ChiSquare(0.1), 0.4),
    "kl by size, capped": lambda order: with_cap(KL(0.2, sizes(order)), 0.4),
    "average by size, capped": lambda order: with_cap(Average(sizes(order)), 0.2),
    "heterogeneous cvar, capped": lambda order: with_cap(
        HeterogeneousCVaR(tails(order), sizes(order)), 0.35
    ),
    "relative, capped": lambda order: with_cap(RelativeFairness(0.3), 0.4),
    "relative, palma, capped": lambda order: with_cap(
        RelativeFairness(0.5, CVaR(0.1), CVaR(0.4), rho=0.1), 0.5
    ),
}
# The same, with weights whose sum is free.
FREE: dict[str, Builder] = {
    "q-fair 0": lambda order: QFair(0.0, sizes(order)),
    "q-fair 0.2": lambda order: QFair(0.2),
    "q-fair 1": lambda order: QFair(1.0, sizes(order)),
    "q-fair 2": lambda order: QFair(2.0),
    "proportional": lambda order: Proportional(4.0),
    "proportional by size": lambda order: Proportional(3.0, 1.5, sizes(order)),
    "chi-square on q-fair": lambda order: ChiSquare(0.2, QFair(0.5)),
}
SADDLES = pytest.mark.parametrize("build", CATALOGUE.values(), ids=list(CATALOGUE))
EVERY = pytest.mark.parametrize(
    "build", [*CATALOGUE.values(), *FREE.values()], ids=[*CATALOGUE, *FREE]
)
N = 6
numbers = st.one_of(st.floats(-3, 3), st.sampled_from([0.0, 1.0, 0.5, 2.0]))
points = st.lists(numbers, min_size=N, max_size=N).map(np.array)
steps = st.sampled_from([0.01, 0.3, 1.0, 20.0])
some = settings(deadline=None, max_examples=12)


def new(build: Builder, n: int = N) -> SaddleObjective:
    return build(np.arange(n))


def fit(objective: SaddleObjective, losses: np.ndarray) -> np.ndarray:
    """Return losses that the objective is for: q-fair takes none below zero."""
    return np.abs(losses) if "QFair" in repr(objective) else losses


def test_the_whole_catalogue_is_here():
    kinds = {type(build(np.arange(N))) for build in (CATALOGUE | FREE).values()}
    capped = {CappedTail}  # made by guards, never named
    loaded = {entry.load() for entry in catalogue.OBJECTIVES.values()}
    assert kinds - capped == {made for made in loaded if isinstance(made, type)}


@EVERY
def test_it_is_a_saddle_objective_and_a_value(build):
    objective = new(build)
    assert isinstance(objective, SaddleObjective)
    assert objective == new(build) and hash(objective) == hash(new(build))
    with pytest.raises(AttributeError):
        objective.anything = 1  # frozen


@EVERY
@some
@given(point=points, losses=points, step=steps)
def test_every_answer_is_feasible(build, point, losses, step):
    objective = new(build)
    for weights in (
        objective.prox(point, step),
        objective.weights(fit(objective, losses)),
        objective.start(N),
    ):
        assert weights.dtype == np.float64 and weights.shape == (N,)
        simplex = build in CATALOGUE.values()
        size = objective.l1_norm(N) if simplex else 1 + weights.sum()
        assert objective.total(weights) == (1.0 if simplex else weights.sum() or 1.0)
        assert violation(objective, weights) <= 1e-12 * size
        assert np.abs(weights).sum() <= size + 1e-12 * size


@EVERY
@some
@given(losses=points, point=points)
def test_fenchel_young_with_equality_at_the_weights(build, losses, point):
    objective = new(build)
    losses = fit(objective, losses)
    value, best = objective.value(losses), objective.weights(losses)
    other = objective.prox(point, 1.0)
    tolerance = 1e-9 * (1 + abs(value))
    assert value >= other @ losses - objective.penalty(other) - tolerance
    assert value == pytest.approx(best @ losses - objective.penalty(best), abs=tolerance)


@EVERY
@some
@given(point=points, target=points, step=steps)
def test_no_feasible_point_improves_on_the_prox(build, point, target, step):
    objective = new(build)
    best = objective.prox(point, step)
    target = fit(objective, target)
    for other in (objective.prox(target, step), objective.weights(target), objective.start(N)):
        # First-order optimality of step psi + |. - point|^2 / 2, in variational form.
        rise = step * (objective.penalty(other) - objective.penalty(best))
        scale = 1 + step + step * abs(objective.penalty(other))
        assert rise + (best - point) @ (other - best) >= -1e-8 * scale


@EVERY
@some
@given(losses=points, move=points)
def test_weights_are_subgradients_of_the_value(build, losses, move):
    objective = new(build)
    here, there = fit(objective, losses), fit(objective, losses + move)
    rise = objective.value(there) - objective.value(here)
    small = 1e-9 * (1 + abs(objective.value(there)) + abs(objective.value(here)))
    assert rise >= objective.weights(here) @ (there - here) - small
    assert rise <= objective.weights(there) @ (there - here) + small


@EVERY
def test_weights_are_finite_differences_of_the_value(build):
    objective = new(build)
    rng = np.random.default_rng(0)
    for _ in range(5):
        losses = rng.uniform(0, 2, N)
        h = 1e-6
        slopes = [
            (objective.value(losses + h * e) - objective.value(losses - h * e)) / (2 * h)
            for e in np.eye(N)
        ]
        assert np.allclose(slopes, objective.weights(losses), rtol=1e-6, atol=1e-6)


@EVERY
@some
@given(losses=points, point=points, order=st.permutations(range(N)))
def test_renaming_the_clients_renames_the_weights(build, losses, point, order):
    order = np.array(order)
    here, there = new(build), build(order)
    losses = fit(here, losses)
    assert there.value(losses[order]) == pytest.approx(here.value(losses), rel=1e-12, abs=1e-12)
    for step in (0.1, 2.0):
        assert np.allclose(
            there.prox(point[order], step), here.prox(point, step)[order], rtol=0, atol=1e-10
        )
    assert np.allclose(
        there.weights(losses[order]), here.weights(losses)[order], rtol=0, atol=1e-10
    )


@EVERY
def test_a_generic_solver_agrees(build):
    rng = np.random.default_rng(1)
    for n, step in ((3, 0.5), (7, 2.0)):
        objective = new(build, n)
        losses, point = rng.uniform(0, 2, n), rng.normal(1 / n, 0.4, n)
        scale = 1 + abs(objective.value(losses))
        assert objective.value(losses) == pytest.approx(
            solver_value(objective, losses), abs=1e-7 * scale
        )
        assert np.allclose(
            objective.prox(point, step), solver_prox(objective, point, step), rtol=0, atol=2e-5
        )


@SADDLES
def test_one_client_has_all_the_weight(build):
    objective = new(build, 1)
    for number in (-1e300, 0.0, 1e-300, 3.0, 1e300):
        array = np.array([number])
        assert np.allclose(objective.prox(array, 0.7), 1.0, rtol=0, atol=1e-12)
        assert np.allclose(objective.weights(array), 1.0, rtol=0, atol=1e-12)
        wanted = number - objective.penalty(np.ones(1))  # a constant: zero but for excess risk
        assert objective.value(array) == pytest.approx(wanted, rel=1e-12, abs=1e-12)


@SADDLES
@pytest.mark.parametrize("scale", [1e-300, 1e-150, 1e-9, 1e9, 1e150, 1e300])
def test_any_scale_with_ties(build, scale):
    objective = new(build)
    pattern = np.array([1.0, 0.25, 1.0, 0.25, -0.5, 0.0])
    for step in (1e-3, 1.0, 1e3):
        weights = objective.prox(scale * pattern, step)
        assert violation(objective, weights) <= 1e-12 * objective.l1_norm(N)
    losses = scale * np.abs(pattern)
    weights = objective.weights(losses)
    assert violation(objective, weights) <= 1e-12 * objective.l1_norm(N)
    assert objective.value(losses) == pytest.approx(
        weights @ losses - objective.penalty(weights), rel=1e-9, abs=1e-12
    )


@SADDLES
@some
@given(point=points, step=steps)
def test_a_common_shift_of_the_point_changes_nothing(build, point, step):
    objective = new(build)
    point = np.round(point * 64) / 64  # so that the shift is exact
    assert np.allclose(
        objective.prox(point, step), objective.prox(point + 1024.0, step), rtol=0, atol=1e-9
    )


def treats_clients_alike(build: Builder) -> bool:
    return build(np.arange(N)) == build(np.arange(N)[::-1])


@pytest.mark.parametrize("build", [b for b in CATALOGUE.values() if treats_clients_alike(b)])
def test_equal_losses_are_treated_alike(build):
    objective = new(build)
    weights = objective.weights(np.array([2.0, 1.0, 2.0, 1.0, 2.0, 0.5]))
    assert weights[0] == weights[2] == weights[4] and weights[1] == weights[3]


@EVERY
@some
@given(point=points, other=points, step=steps)
def test_strong_convexity_shows_in_the_prox(build, point, other, step):
    objective = new(build)
    moved = objective.prox(point, step) - objective.prox(other, step)
    contraction = 1 / (1 + step * objective.strong_convexity(N))
    assert np.linalg.norm(moved) <= contraction * np.linalg.norm(point - other) + 1e-9


@EVERY
@some
@given(losses=points)
def test_the_maximiser_is_a_fixed_point_of_the_dual_step(build, losses):
    objective = new(build)
    losses = fit(objective, losses)
    best = objective.weights(losses)
    for step in (0.1, 3.0):
        after = Euclidean().ascend(objective, best, losses, step)
        assert np.allclose(after, best, rtol=1e-8, atol=1e-8)


@SADDLES
@some
@given(losses=points, target=points, step=steps)
def test_entropic_steps_are_optimal_or_refused(build, losses, target, step):
    objective = new(build)
    start = 0.5 * objective.start(N) + 0.5 * np.abs(objective.prox(target, 1.0))
    start /= start.sum()
    try:
        best = Entropic().ascend(objective, start, losses, step)
    except ValueError as refusal:
        assert "Euclidean" in str(refusal)
        assert any(
            name in repr(objective) for name in ("Relative", "L1Dist", "LpDist", "Transport", "KL")
        )
        assert not objective.is_entropic
        return
    assert violation(objective, best) <= 1e-12 and objective.is_entropic

    def gain(w: np.ndarray) -> float:
        entropy = np.sum(w[w > 0] * np.log(w[w > 0] / start[w > 0]))
        return step * (w @ losses - objective.penalty(w)) - float(entropy)

    for other in (objective.prox(target, 1.0), objective.weights(losses), objective.start(N)):
        assert gain(best) >= gain(other) - 1e-9 * (1 + step)


@EVERY
@some
@given(target=points, other=points, losses=points)
def test_penalties_have_the_gradient_they_say_or_refuse(build, target, other, losses):
    objective = new(build)
    here, there = objective.prox(target, 1.0), objective.prox(other, 1.0)
    if not objective.is_smooth:
        for call in (
            lambda: objective.penalty_gradient(here),
            lambda: ProjectedGradient().check(objective, "it"),
        ):
            with pytest.raises(ValueError, match=r"does not have exactly|prox"):
                call()
        return
    ProjectedGradient().check(objective, "it")
    middle, along, h = 0.5 * (here + there), there - here, 1e-5
    slope = (objective.penalty(middle + h * along) - objective.penalty(middle - h * along)) / h / 2
    found = objective.penalty_gradient(middle) @ along
    assert found == pytest.approx(slope, rel=1e-4, abs=1e-4)
    best = objective.weights(fit(objective, losses))  # where the gradient step stays, too
    after = ProjectedGradient().ascend(objective, best, fit(objective, losses), 0.1)
    assert np.allclose(after, best, rtol=1e-8, atol=1e-8)


@EVERY
def test_numbers_that_are_not_finite_are_named(build):
    objective = new(build)
    bad = np.ones(N)
    bad[2] = np.nan
    for call in (objective.value, objective.weights, lambda x: objective.prox(x, 1.0)):
        with pytest.raises(ValueError, match="nan at position 2"):
            call(bad)


@EVERY
def test_single_precision_and_lists_are_taken_as_they_are(build):
    objective = new(build)
    narrow = fit(objective, np.linspace(-1, 1, N).astype(np.float32))
    assert np.array_equal(objective.prox(narrow, 1.0), objective.prox(narrow.astype(float), 1.0))
    assert objective.weights(narrow).dtype == np.float64
    assert objective.value(narrow.tolist()) == objective.value(narrow.astype(float))


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_a_million_clients_in_a_gigabyte(scale):
    point = scale * np.random.default_rng(0).standard_normal(1_000_000)
    for objective in (
        WorstCase(),
        CVaR(0.1),
        ChiSquare(0.1),
        ChiSquare(0.1, CVaR(0.5)),
        RelativeFairness(0.3),
        RelativeFairness(0.2, CVaR(0.2), CVaR(0.2), rho=0.1),
    ):
        objective.prox(point[:3], 1.0)  # imports
        tracemalloc.start()
        weights = objective.prox(point, 1.0)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1e9
        assert weights.sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.long
def test_ten_thousand_points_with_ties_at_every_scale():
    rng = np.random.default_rng(3)
    cases = [
        (build(np.arange(n)), n)
        for name, build in CATALOGUE.items()
        for n in (1, 2, 5)
        if "transport" not in name  # slow; it has its own test above
    ]
    for trial in range(10_000):
        objective, n = cases[trial % len(cases)]
        levels = np.array([-1.0, 0.0, 0.5, 1.0, rng.normal()])
        point = rng.choice(levels, n) * 10.0 ** rng.integers(-300, 301)
        weights = objective.prox(point, 10.0 ** rng.integers(-3, 4))
        size = objective.l1_norm(n)
        assert abs(weights.sum() - 1) <= 1e-12 * size, (objective, point)
        assert np.abs(weights).sum() <= size * (1 + 1e-12), (objective, point)
        if not isinstance(objective, RelativeFairness):  # whose membership test is slow
            assert violation(objective, weights) <= 1e-12, (objective, point)
