"""Who takes part: draws by weights, the tail of the losses, and clients that are absent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.problems import PROBLEMS, Logistic, rounds, start

from equifed.algorithms import AFL, DRFA, DeltaFL, ScaffPD
from equifed.algorithms.delta_fl import upper_quantile
from equifed.contract.absence import draw_clients, running_mean
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.objectives import CVaR, RelativeFairness
from equifed.steps.schedules import ConstantSteps

PROBLEM = PROBLEMS["more clients"]
WORK = LocalSGD(lr=0.05, steps=2)


def test_draws_follow_the_weights() -> None:
    clients = PROBLEM.clients()
    weights = np.array([0.0, 0.1, 0.1, 0.2, 0.2, 0.4, 0.0])
    total = np.zeros(7)
    for seed in range(400):
        chosen, share = draw_clients(clients, weights, 5, Stream(seed))
        assert share.sum() == pytest.approx(1.0)
        total[chosen.index] += share
    error = np.sqrt(weights * (1 - weights) / (5 * 400))
    assert (np.abs(total / 400 - weights) <= 4 * error).all()


def test_draws_leave_absent_clients_out() -> None:
    here = PROBLEM.clients().subset([2, 5])
    chosen, share = draw_clients(here, np.array([0.9, 0, 0.02, 0, 0, 0.06, 0.02]), 1000, Stream(0))
    assert chosen.index.tolist() == [2, 5]
    assert share[1] == pytest.approx(0.75, abs=0.06)


def test_negative_weights_cannot_be_drawn_by() -> None:
    algorithm = DRFA(WORK, 1.0, RelativeFairness(phi=0.5), clients_per_round=3)
    with pytest.raises(ValueError, match="negative weights"):
        rounds(algorithm, PROBLEM.clients(), start(PROBLEM), 5)


@given(
    losses=st.lists(st.floats(-5, 5), min_size=1, max_size=9),
    level=st.floats(0.01, 1.0),
)
@settings(deadline=None, max_examples=60)
def test_the_upper_quantile_is_the_largest_loss_with_enough_mass_above(
    losses: list[float], level: float
) -> None:
    values = np.array(losses)
    mass = np.arange(1.0, len(values) + 1) / np.arange(1.0, len(values) + 1).sum()
    fit = [e for e in values if mass[values >= e].sum() >= level * (1 - 1e-9)]
    assert upper_quantile(values, mass, level) == max(fit)


@pytest.mark.parametrize("level", [1 / 7, 3 / 7, 0.5, 1.0])
def test_the_tail_of_delta_fl_carries_the_superquantile(level: float) -> None:
    """Where level times N is whole, the mean loss of those who train is CVaR."""
    x = start(PROBLEM)
    _, (info,) = rounds(DeltaFL(WORK, level, "uniform"), PROBLEM.clients(), x, 1)
    losses = PROBLEM.losses(x)
    assert len(info.index) == int(np.ceil(level * 7 - 1e-9))
    assert set(info.index) == set(np.argsort(-losses)[: len(info.index)])
    if level != 0.5:
        assert info.objective == pytest.approx(CVaR(level).value(losses))


@pytest.mark.long
@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 2**32 - 1),
    level=st.floats(0.05, 1.0),
    weighting=st.sampled_from(["size", "uniform"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_delta_fl_does_not_decide_by_rounding(
    seed: int, level: float, weighting: str, dtype: torch.dtype
) -> None:
    """Every client has the loss log 2 at the model zero, up to the order of its sum: all train."""
    draw = np.random.default_rng(seed)
    inputs = tuple(draw.normal(size=(m, 3)) for m in draw.integers(1, 300, 9))
    labels = tuple(draw.integers(0, 2, len(a)) for a in inputs)
    problem = Logistic(inputs, labels, 0.1)
    for engine in ("loop", "stacked"):
        clients = problem.clients(engine, dtype=dtype)
        algorithm, x = DeltaFL(WORK, level, weighting), torch.zeros(3, dtype=dtype)
        _, info = algorithm.round(algorithm.init(clients, x), clients, Stream(0))
        assert info.index.tolist() == list(range(9))
        assert info.objective == pytest.approx(np.log(2), rel=1e-5)


@pytest.mark.parametrize(
    "algorithm",
    [AFL(WORK, 0.1), ScaffPD(CVaR(0.5), WORK, ConstantSteps(0.1, 0.2))],
    ids=["afl", "scaff-pd"],
)
def test_absent_clients_keep_their_last_loss(algorithm: object) -> None:
    clients, x = PROBLEM.clients(), start(PROBLEM)
    state, _ = rounds(algorithm, clients, x, 1)
    here = clients.subset([0, 1, 2])
    new, info = algorithm.round(state, here, Stream(0).at("round", 2))
    np.testing.assert_array_equal(new.losses[3:], state.losses[3:])
    assert not np.array_equal(new.losses[:3], state.losses[:3])
    assert info.index.tolist() == [0, 1, 2]


def test_absent_clients_of_drfa_neither_gain_nor_lose_against_the_mean() -> None:
    """With v at the mean of those asked, weights of absent clients move as the mean does."""
    clients, x = PROBLEM.clients(), start(PROBLEM)
    state, _ = rounds(DRFA(WORK, 1e-4), clients.subset([0, 1, 2, 3]), x, 1)
    assert state.weights[4:] == pytest.approx(np.full(3, 1 / 7))
    assert np.ptp(state.weights[:4]) > 0


def test_running_mean_is_the_mean() -> None:
    values = np.random.default_rng(0).normal(size=(5, 3))
    mean = None
    for count, value in enumerate(values, 1):
        mean = running_mean(mean, value, count)
    np.testing.assert_allclose(mean, values.mean(axis=0))
