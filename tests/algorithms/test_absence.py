"""Clients that are absent: unbiased steps, no extrapolation over absence, who counts, the cost."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.absence import CASES, cost, engines
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.problems import OBJECTIVES, PROBLEMS, Problem, rounds, start

from equifed.algorithms import (
    AFL,
    DRFA,
    AgnosticFedAvg,
    DeltaFL,
    FedEBA,
    RFedFair,
    ScaffPD,
    ScaffPDIA,
    tilted_erm,
)
from equifed.algorithms.absence import call_roll
from equifed.algorithms.drfa import State
from equifed.contract.absence import PATIENCE
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.objectives import ChiSquare, CVaR, RelativeFairness, SaddleObjective, WorstCase
from equifed.runs import catalogue
from equifed.steps.schedules import ConstantSteps
from equifed.training.loop import train

pytestmark = pytest.mark.long

PROBLEM = PROBLEMS["more clients"]
ONE = LocalSGD(lr=0.05, steps=1)
STEPS = ConstantSteps(0.1, 0.2)
SIGNED = np.array([-0.5, 0.0, 0.4, 1.3, -0.2, 0.0, 0.0])


def subsets(n: int, size: int) -> list[np.ndarray]:
    return [np.array(group) for group in itertools.combinations(range(n), size)]


# -- point 3: unbiased, scaled once ----------------------------------------------------------------


class Held(WorstCase):
    """Weights that stay what they are."""

    def prox(self, point: np.ndarray, step: float) -> np.ndarray:
        return point


def steps_of_all_subsets(algorithm: Any, weights: np.ndarray, size: int, **known: Any) -> Any:
    """Return the steps of x of all groups of one size, and that of everybody."""
    clients, x = PROBLEM.clients(), torch.as_tensor(start(PROBLEM))
    state = replace(algorithm.init(clients, x), weights=weights, **known)
    groups = [*subsets(PROBLEM.n, size), np.arange(PROBLEM.n)]
    moved = [algorithm.round(state, clients.subset(g), Stream(0))[0].x - x for g in groups]
    return torch.stack(moved[:-1]).numpy(), moved[-1].numpy()


@pytest.mark.parametrize("size", range(1, 7))
@pytest.mark.parametrize("weights", [SIGNED, np.abs(SIGNED) / 2.4], ids=["signed", "unsigned"])
def test_the_mean_step_of_scaff_pd_over_all_subsets_is_the_full_one(
    weights: np.ndarray, size: int
) -> None:
    """With one local step; version 0.1 flipped signs, and scaling both factors is no cure."""
    algorithm = ScaffPD(Held(), ONE, ConstantSteps(0.1, 1e-300))
    losses = PROBLEM.losses(start(PROBLEM))  # nobody's is stale: the dual step is that of all
    parts, full = steps_of_all_subsets(algorithm, weights, size, losses=losses)
    np.testing.assert_allclose(parts.mean(axis=0), full, rtol=0, atol=1e-14)
    assert np.abs(parts - full).max() > 1e-3


@pytest.mark.parametrize("size", range(1, 7))
def test_the_mean_step_of_afl_over_all_subsets_is_the_full_one(size: int) -> None:
    weights = np.abs(SIGNED) / 2.4
    for algorithm in (AFL(ONE), AgnosticFedAvg(ONE), DRFA(ONE)):
        parts, full = steps_of_all_subsets(algorithm, weights, size)
        np.testing.assert_allclose(parts.mean(axis=0), full, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "algorithm", [tilted_erm(ONE, 0.5), FedEBA(ONE, 2.0, angle=90), FedEBA(ONE, 2.0, angle=0)]
)
def test_the_mean_step_of_tilted_risk_over_all_subsets_is_the_full_one(algorithm: Any) -> None:
    """Also where all local steps have a part in common (FedEBA+ within its angle)."""
    clients, x = PROBLEM.clients(), torch.as_tensor(start(PROBLEM))
    state = replace(algorithm.init(clients, x), losses=PROBLEM.losses(start(PROBLEM)))
    groups = [*subsets(PROBLEM.n, 4), np.arange(PROBLEM.n)]
    *parts, full = [algorithm.round(state, clients.subset(g), Stream(0))[0].x - x for g in groups]
    np.testing.assert_allclose(torch.stack(parts).mean(0), full, rtol=0, atol=1e-14)


@pytest.mark.parametrize("size", [1, 4, 6])
def test_the_mean_step_of_rfedfair_over_all_subsets_is_the_full_one(size: int) -> None:
    """Of model and threshold, with weights by size."""
    clients, x = PROBLEM.clients(), torch.as_tensor(start(PROBLEM))
    algorithm = RFedFair(ONE, threshold=0.5, output="last")
    state, groups = algorithm.init(clients, x), [*subsets(7, size), np.arange(7)]
    ends = [algorithm.round(state, clients.subset(g), Stream(0))[0] for g in groups]
    models, thresholds = torch.stack([e.x for e in ends]), [e.threshold for e in ends]
    np.testing.assert_allclose(models[:-1].mean(0), models[-1], rtol=0, atol=1e-13)
    np.testing.assert_allclose(np.mean(thresholds[:-1]), thresholds[-1], rtol=0, atol=1e-13)


def test_draws_of_those_present_have_the_right_mean() -> None:
    """DRFA draws by weights that sum to one; the step carries the scale."""
    clients, x = PROBLEM.clients(), torch.as_tensor(start(PROBLEM))
    algorithm, weights = DRFA(ONE, clients_per_round=200), np.abs(SIGNED) / 2.4
    state, here = replace(algorithm.init(clients, x), weights=weights), np.array([0, 3, 5])
    found = [
        (algorithm.round(state, clients.subset(here), Stream(s))[0].x - x).numpy() for s in range(8)
    ]
    expected = -0.05 * 7 / 3 * weights[here] @ PROBLEM.gradients(start(PROBLEM))[here]
    np.testing.assert_allclose(np.mean(found, axis=0), expected, rtol=0.1)


@pytest.mark.parametrize("part", [0.25, 1.0])
def test_a_snapshot_where_those_who_are_there_end_the_round_is_theirs(part: float) -> None:
    """Off the straight way by what they are off it, and by a running mean of that later."""
    problem, work = PROBLEMS["logistic"], LocalSGD(lr=0.3, steps=4)
    x, everybody = torch.as_tensor(start(problem)), problem.clients()
    state = State(x, np.full(problem.n, 1 / problem.n))
    roll = call_roll(DRFA(work), state, everybody.subset([0, 2]))
    moved = roll.local_steps(x, work.work(snapshot=max(1, int(4 * part))), Stream(0).at("local"))
    assert moved.snapshot is not None
    share, theirs = roll.weights, moved.snapshot.weighted_sum(roll.weights)
    end = x - moved.displacement.weighted_sum(share)
    at, bend = roll.snapshot(moved, share, (x, end), part, None)
    torch.testing.assert_close(at, theirs)
    torch.testing.assert_close(bend, theirs - (x + part * (end - x)))
    before = torch.ones_like(x)
    at, later = roll.snapshot(moved, share, (x, end), part, before)
    torch.testing.assert_close(later, 0.95 * before + 0.05 * bend)
    torch.testing.assert_close(at, x + part * (end - x) + later)


# Snapshots after one, three and all four steps.
@pytest.mark.parametrize(("seed", "size"), [(0, 1), (0, 4), (1, 2), (1, 5), (7, 3), (7, 6)])
def test_the_mean_bend_of_drfas_snapshots_over_all_subsets_is_that_of_everybody(
    seed: int, size: int
) -> None:
    """Version 0.1 averaged the snapshots of those who were there; a straight way has no bend."""
    clients, x, stream = PROBLEM.clients(), torch.as_tensor(start(PROBLEM)), Stream(seed)
    work, weights = LocalSGD(lr=0.05, steps=4), np.abs(SIGNED) / 2.4
    state = replace(DRFA(work).init(clients, x), weights=weights)
    t = int(stream.at("snapshot").generator().integers(1, 5))
    moved = clients.local_steps(x, work.work(snapshot=t), stream.at("local"))
    assert moved.snapshot is not None
    full = moved.snapshot.weighted_sum(weights) - x
    full = full + t / 4 * moved.displacement.weighted_sum(weights)
    found = [DRFA(work).round(state, clients.subset(g), stream)[0].bend for g in subsets(7, size)]
    np.testing.assert_allclose(torch.stack(found).mean(0), full, rtol=0, atol=1e-13)
    assert (t == 4) == (float(full.abs().max()) < 1e-13)


# -- point 6: extrapolation ------------------------------------------------------------------------


@given(seed=st.integers(0, 50), away=st.integers(1, 25), theta=st.sampled_from([0.5, 0.9, 1.0]))
@settings(deadline=None, max_examples=10)
def test_a_client_that_comes_back_is_not_extrapolated(seed: int, away: int, theta: float) -> None:
    """The dual step of its first round back is the one with its present loss alone."""
    clients, sigma = PROBLEM.clients("stacked"), 0.2
    algorithm = ScaffPD(CVaR(0.5), ONE, ConstantSteps(0.05, sigma, theta), patience=1000)
    state, _ = rounds(algorithm, clients, start(PROBLEM, seed), 2)
    for r in range(away):
        state, _ = algorithm.round(state, clients.subset(range(6)), Stream(1).at(r))
    now, before = PROBLEM.losses(state.x.numpy()), state.losses
    ahead = now + theta * (now - before)
    ahead[6] = now[6]  # who was away
    expected = CVaR(0.5).prox(state.weights + sigma * ahead, sigma)
    new, _ = algorithm.round(state, clients, Stream(2))
    np.testing.assert_allclose(new.weights, expected, atol=1e-12)


def test_the_worst_client_loses_no_weight_by_coming_back() -> None:
    """Version 0.1 took the change of twenty rounds for a slope; here its loss fell meanwhile."""
    clients, x = PROBLEM.clients(), torch.as_tensor(start(PROBLEM))
    algorithm, weights = ScaffPD(WorstCase(), ONE, ConstantSteps(0.05, 0.1)), np.full(7, 1 / 7)
    losses = PROBLEM.losses(start(PROBLEM))
    worst, away = int(losses.argmax()), np.zeros(7, dtype=np.int64)
    away[worst] = 10
    stale = losses + 20.0 * (np.arange(7) == worst)  # what it was before it left
    state = replace(algorithm.init(clients, x), weights=weights, losses=stale, away=away)
    new, _ = algorithm.round(state, clients, Stream(0))
    assert new.weights[worst] > weights[worst]


# -- point 7: clients away for good ----------------------------------------------------------------

SADDLE = [
    AFL(ONE, 0.05, CVaR(0.5), patience=3),
    AgnosticFedAvg(ONE, 0.1, patience=3),
    DRFA(ONE, 0.05, ChiSquare(0.1), patience=3),
    DeltaFL(ONE, patience=3),
    DRFA(ONE, 0.05, clients_per_round=7, patience=3),
    ScaffPD(WorstCase(), ONE, STEPS, patience=3),
    ScaffPD(WorstCase(), patience=3).wrapped(),
    ScaffPDIA(0.3, local=ONE, steps=STEPS, patience=3),
    tilted_erm(ONE, 1.0, patience=3),
]


@pytest.mark.parametrize("algorithm", SADDLE, ids=lambda a: type(a).__name__)
def test_a_client_away_for_good_leaves_and_comes_back(algorithm: Any) -> None:
    clients = PROBLEM.clients("stacked")
    state, _ = rounds(algorithm, clients, start(PROBLEM), 2)
    here, told = clients.subset(range(6)), []
    for r in range(6):
        state, info = algorithm.round(state, here, Stream(3).at(r))
        told += [(r, note) for note in info.notes]
        assert info.weights.sum() == pytest.approx(1.0)
    state, info = algorithm.round(state, here, Stream(3).at(6))
    assert info.weights[6] == 0
    assert [r for r, note in told if "client 6 has been away for 3 rounds: its w" in note] == [2]
    state, info = algorithm.round(state, clients, Stream(3).at(7))
    assert any("client 6 is back" in note for note in info.notes)
    weights = [algorithm.round(state, clients, Stream(3).at(8))[1].weights]
    assert all(w.sum() == pytest.approx(1.0) for w in weights)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("seed", range(2))
def test_without_those_who_left_it_is_the_smaller_problem(name: str, seed: int) -> None:
    """Rounds of seven clients, two gone for good, are those of the five alone, to rounding."""
    objective: SaddleObjective = OBJECTIVES[name](np.random.default_rng(seed), 7)
    five = subproblem(PROBLEM, range(5))
    algorithm = ScaffPD(objective, LocalSGD(lr=0.05, steps=3), STEPS)
    clients = PROBLEM.clients("stacked")
    state = algorithm.init(clients, torch.as_tensor(start(PROBLEM)))
    gone = replace(state, away=np.array([0, 0, 0, 0, 0, PATIENCE, PATIENCE]))
    if name in ("heterogeneous CVaR", "transport"):  # numbers for each client: everybody stays
        _, info = algorithm.round(replace(gone, away=gone.away - 1), clients.subset(range(5)), SEED)
        assert sum("it keeps its weight, since" in note for note in info.notes) == 2
        assert info.weights[5:].any()
        return
    gone = replace(gone, weights=np.r_[objective.start(5), 0, 0])
    small = algorithm.init(five.clients("stacked"), gone.x)
    for r in range(4):
        gone, _ = algorithm.round(gone, clients.subset(range(5)), Stream(0).at(r))
        small, _ = algorithm.round(small, five.clients("stacked"), Stream(0).at(r))
    np.testing.assert_allclose(gone.x, small.x, atol=1e-10)
    np.testing.assert_allclose(gone.weights, np.r_[small.weights, 0, 0], atol=1e-10)


SEED = Stream(0).at("round")


def subproblem(problem: Problem, index: Any) -> Problem:
    inputs, targets = ([values[i] for i in index] for values in (problem.inputs, problem.targets))
    return replace(problem, inputs=tuple(inputs), targets=tuple(targets))


def test_sampled_clients_are_not_away() -> None:
    """One in seven is asked in a round; twenty rounds without an answer are no absence then."""
    algorithm = ScaffPD(CVaR(0.5), ONE, STEPS, participation=1 / 7)
    _, infos = rounds(algorithm, PROBLEM.clients("stacked"), start(PROBLEM), 100)
    assert not any(info.notes for info in infos)


def test_the_absence_is_an_event_of_the_run() -> None:
    clients = PROBLEM.clients("stacked")
    history = train(AFL(ONE, patience=4), clients.subset(range(6)), rounds=6)
    said = [e["reason"] for e in history.events if e["event"] == "note"]
    assert any("client 6 has been away for 4 rounds" in reason for reason in said)


# -- point 7: what absence costs -------------------------------------------------------------------


def test_the_table_has_every_algorithm_of_the_catalogue() -> None:
    noisy = ("private-fedavg",)  # its noise is more than what absence costs
    assert {name.partition(",")[0] for name in CASES} == set(catalogue.ALGORITHMS) - set(
        catalogue.WRAPPERS + catalogue.NO_OBJECTIVE + noisy
    )


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_a_third_of_the_clients_missing_costs_at_most_five_percent(name: str) -> None:
    """A short form of ``benchmarks/absence.py``: 100 rounds with 30 % missing in each."""
    clients = engines(0)["least squares"]
    worst, value = cost(CASES[name], clients, rounds=100, absent=0.3)
    assert worst <= 0.05
    assert abs(value) <= 0.05


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("objective", [RelativeFairness(0.3), WorstCase()], ids=repr)
def test_half_of_the_clients_do_not_make_it_explode(objective: SaddleObjective, seed: int) -> None:
    """With signed weights version 0.1 peaked at a million times the first value."""
    clients = PROBLEM.clients("stacked")
    algorithm = ScaffPD(objective, participation=0.5).wrapped()
    _, infos = rounds(algorithm, clients, start(PROBLEM, seed), 60, seed)
    assert max(i.objective for i in infos) < 10 * infos[0].objective
