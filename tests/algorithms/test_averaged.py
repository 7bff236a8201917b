"""The mean of the iterates: its formula, its weights, and how it goes with other wrappers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.problems import PROBLEMS, rounds, start

from equifed.algorithms import AFL, Averaged, FedAvg, ScaffPD
from equifed.algorithms.around import Certified
from equifed.algorithms.safeguarded import Safeguarded
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.objectives import CVaR
from equifed.training.loop import train

pytestmark = pytest.mark.long

PROBLEM = PROBLEMS["more clients"]
WORK = LocalSGD(lr=0.05, steps=2)


def iterates(algorithm: Any, count: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    clients = PROBLEM.clients("stacked")
    state, models, weights = algorithm.init(clients, torch.as_tensor(start(PROBLEM))), [], []
    for r in range(1, count + 1):
        state, info = algorithm.round(state, clients, Stream(0).at("round", r))
        models.append(state.x.numpy())
        weights.append(info.weights)
    return models, weights


@given(decay=st.sampled_from([0.0, 1.0, 3.0]), count=st.integers(1, 12))
@settings(deadline=None, max_examples=15)
def test_it_is_the_polynomially_weighted_mean(decay: float, count: int) -> None:
    """For a whole decay, round s of t has the share of binomial(s - 1 + decay, decay)."""
    models, weights = iterates(AFL(WORK), count)
    order = int(decay)
    raw = np.array([np.prod([s + k for k in range(order)]) for s in range(1, count + 1)])
    share = raw / raw.sum()
    state, _ = rounds(Averaged(AFL(WORK), decay), PROBLEM.clients("stacked"), start(PROBLEM), count)
    np.testing.assert_allclose(state.mean, share @ np.array(models), atol=1e-12)
    np.testing.assert_allclose(state.weights, share @ np.array(weights), atol=1e-12)
    np.testing.assert_array_equal(state.x, models[-1])


def test_it_gives_out_the_mean_and_leaves_the_rounds_alone() -> None:
    algorithm = Averaged(FedAvg(WORK))
    state, infos = rounds(algorithm, PROBLEM.clients(), start(PROBLEM), 5)
    plain, others = rounds(FedAvg(WORK), PROBLEM.clients(), start(PROBLEM), 5)
    assert algorithm.model(state) is state.mean
    np.testing.assert_array_equal(state.x, plain.x)
    for one, other in zip(infos, others, strict=True):
        np.testing.assert_array_equal(one.weights, other.weights)


def test_a_run_that_goes_on_has_the_same_mean_to_the_bit() -> None:
    """It knows no horizon: ten rounds are five and five more."""
    clients, algorithm = PROBLEM.clients(), Averaged(ScaffPD(CVaR(0.5)).wrapped())
    whole, _ = rounds(algorithm, clients, start(PROBLEM), 10)
    state, _ = rounds(algorithm, clients, start(PROBLEM), 5)
    for r in range(6, 11):
        state, _ = algorithm.round(state, clients, Stream(0).at("round", r))
    np.testing.assert_array_equal(state.mean, whole.mean)
    np.testing.assert_array_equal(state.weights, whole.weights)


@pytest.mark.parametrize(
    "algorithm",
    [
        Averaged(Safeguarded(Certified(ScaffPD(CVaR(0.5))))),
        Safeguarded(Averaged(Certified(ScaffPD(CVaR(0.5))))),
        Safeguarded(Certified(Averaged(ScaffPD(CVaR(0.5))))),
    ],
    ids=["outside", "between", "inside"],
)
def test_wrappers_may_be_inside_or_outside(algorithm: Any) -> None:
    """The same rounds, certificates and mean, in whatever order."""
    clients = PROBLEM.clients("stacked")
    state, infos = rounds(algorithm, clients, start(PROBLEM), 8)
    plain, others = rounds(ScaffPD(CVaR(0.5)).wrapped(), clients, start(PROBLEM), 8)
    np.testing.assert_array_equal(state.x, plain.x)
    assert [i.numbers for i in infos] == [i.numbers for i in others]
    outside = Averaged(ScaffPD(CVaR(0.5)).wrapped())
    mean, _ = rounds(outside, clients, start(PROBLEM), 8)
    np.testing.assert_array_equal(algorithm.model(state), mean.mean)


def test_training_wraps_what_is_inside() -> None:
    fair = ScaffPD(CVaR(0.5))
    assert Averaged(fair).wrapped() == Averaged(Safeguarded(fair))
    assert Averaged(Certified(AFL(WORK))).wrapped() == Averaged(Certified(AFL(WORK)))
    history = train(Averaged(ScaffPD(CVaR(0.5))), PROBLEM.clients(), rounds=3)
    assert "gap" in history.rounds[-1].numbers


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Averaged(FedAvg(WORK), decay=-1.0), "at least 0, got -1"),
    ],
)
def test_wrong_arguments_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
