"""One suite over every saddle objective: sets, conjugacy, dual steps, limits of arithmetic."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass

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
    HeterogeneousCVaR,
    L1Distance,
    L2Distance,
    QFair,
    RelativeFairness,
    SaddleObjective,
    Tilted,
    Transport,
    WorstCase,
)
from equifed.runs.catalogue import OBJECTIVES
from equifed.testing import OBJECTIVE_CHECKS, check_objective
from equifed.testing.objectives import POINTLESS, Points, draw_points

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
    "kl": lambda order: KL(0.5),
    "kl by size": lambda order: KL(0.2, sizes(order)),
    "l1": lambda order: L1Distance(0.3),
    "l1 by size": lambda order: L1Distance(0.1, sizes(order)),
    "l2 squared by size": lambda order: L2Distance(0.7, sizes(order)),
    "l2 plain": lambda order: L2Distance(0.5, squared=False),
    "l2 plain by size": lambda order: L2Distance(0.2, sizes(order), squared=False),
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
}
SADDLES = pytest.mark.parametrize("build", CATALOGUE.values(), ids=list(CATALOGUE))
N = 6
numbers = st.one_of(st.floats(-3, 3), st.sampled_from([0.0, 1.0, 0.5, 2.0]))
points = st.lists(numbers, min_size=N, max_size=N).map(np.array)
steps = st.sampled_from([0.01, 0.3, 1.0, 20.0])
some = settings(deadline=None, max_examples=12)


def new(build: Builder, n: int = N) -> SaddleObjective:
    return build(np.arange(n))


def drawn(n: int) -> st.SearchStrategy[Points]:
    vector = st.lists(numbers, min_size=n, max_size=n).map(np.array)
    return st.builds(Points, vector, vector, vector, steps)


@SADDLES
@pytest.mark.parametrize("check", OBJECTIVE_CHECKS.values(), ids=list(OBJECTIVE_CHECKS))
@some
@given(data=st.data())
def test_it_keeps_the_contract(build, check, data):
    n = data.draw(st.sampled_from([1, N])) if check in POINTLESS else N
    check(new(build, n), data.draw(drawn(n)))


def test_the_whole_catalogue_is_here():
    built = {type(new(build)) for build in CATALOGUE.values()} | {QFair, Tilted}
    assert built >= {entry.load() for entry in OBJECTIVES.values()}


@pytest.mark.parametrize(
    "objective",
    [CVaR(0.5), ChiSquare(0.1), QFair(0.0), QFair(2.0), Tilted(1.5), Tilted(-1.0), Tilted(0.0)],
    ids=repr,
)
def test_the_suite_passes_without_a_search(objective):
    check_objective(objective)


@dataclass(frozen=True)
class Shifted(CVaR):
    """Its value is too large."""

    def value(self, losses):
        return super().value(losses) + 0.1


@dataclass(frozen=True)
class Inexact(CVaR):
    """Its dual step stops short, inside the set."""

    def prox(self, point, step):
        return 0.99 * super().prox(point, step) + 0.01 * self.start(len(point))


@dataclass(frozen=True)
class Outside(CVaR):
    """Its weights leave the set."""

    def weights(self, losses):
        return np.eye(len(losses))[int(np.argmax(losses))]


@pytest.mark.parametrize(
    ("objective", "name"),
    [
        (Shifted(0.5), "Fenchel-Young"),
        (Inexact(0.5), "the prox is optimal"),
        (Outside(0.5), "every answer is feasible"),
    ],
)
def test_a_broken_promise_is_found(objective, name):
    check = OBJECTIVE_CHECKS[name]
    with pytest.raises(AssertionError):
        for points in draw_points(6, 12):
            check(objective, points)
    with pytest.raises(AssertionError, match="fails the check"):
        check_objective(objective)


@SADDLES
@some
@given(point=points, losses=points, step=steps)
def test_every_answer_is_feasible(build, point, losses, step):
    objective = new(build)
    size = objective.l1_norm(N)
    for weights in (
        objective.prox(point, step),
        objective.weights(losses),
        objective.start(N),
    ):
        assert weights.dtype == np.float64 and weights.shape == (N,)
        assert violation(objective, weights) <= 1e-12 * size
        assert np.abs(weights).sum() <= size + 1e-12 * size


@SADDLES
@some
@given(losses=points, point=points, order=st.permutations(range(N)))
def test_renaming_the_clients_renames_the_weights(build, losses, point, order):
    order = np.array(order)
    here, there = new(build), build(order)
    assert there.value(losses[order]) == pytest.approx(here.value(losses), abs=1e-12)
    for step in (0.1, 2.0):
        assert np.allclose(
            there.prox(point[order], step), here.prox(point, step)[order], rtol=0, atol=1e-10
        )
    assert np.allclose(
        there.weights(losses[order]), here.weights(losses)[order], rtol=0, atol=1e-10
    )


@SADDLES
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


def treats_clients_alike(build: Builder) -> bool:
    return build(np.arange(N)) == build(np.arange(N)[::-1])


@pytest.mark.parametrize("build", [b for b in CATALOGUE.values() if treats_clients_alike(b)])
def test_equal_losses_are_treated_alike(build):
    objective = new(build)
    weights = objective.weights(np.array([2.0, 1.0, 2.0, 1.0, 2.0, 0.5]))
    assert weights[0] == weights[2] == weights[4] and weights[1] == weights[3]


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
            name in repr(objective)
            for name in ("RelativeFairness", "L1Distance", "squared=False", "Transport", "KL")
        )
        return
    assert violation(objective, best) <= 1e-12

    def gain(w: np.ndarray) -> float:
        entropy = np.sum(w[w > 0] * np.log(w[w > 0] / start[w > 0]))
        return step * (w @ losses - objective.penalty(w)) - float(entropy)

    for other in (objective.prox(target, 1.0), objective.weights(losses), objective.start(N)):
        assert gain(best) >= gain(other) - 1e-9 * (1 + step)


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
