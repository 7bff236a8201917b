"""Server optimisers and paced local steps: Flower's strategies, reductions, order of wrappers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvgM, FedYogi
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from tests.problems import PROBLEMS, rounds, start

from equifed.algorithms import (
    AFL,
    Averaged,
    FedAvg,
    Paced,
    Safeguarded,
    ScaffPD,
    ServerOptimised,
)
from equifed.algorithms.around import with_inner_state
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.objectives import CVaR
from equifed.training.loop import train

pytestmark = pytest.mark.long

PROBLEM = PROBLEMS["more clients"]
WORK = LocalSGD(lr=0.05, steps=2)
LR, BETAS, TAU, ROUNDS = 0.07, (0.8, 0.95), 1e-2, 6


def flower_strategy(name: str, x: np.ndarray) -> Any:
    """Return Flower's strategy with our settings and the paper's first v."""
    if name == "momentum":
        return FedAvgM(server_learning_rate=LR, server_momentum=BETAS[0])
    made: Any = {"adam": FedAdam, "yogi": FedYogi}.get(name, FedAdagrad)
    betas = {"beta_2": BETAS[1]} if name != "adagrad" else {}
    strategy = made(eta=LR, tau=TAU, **betas, **({"beta_1": BETAS[0]} if betas else {}))
    strategy.beta_1 = BETAS[0]  # FedAdagrad does not let one say it
    strategy.v_t = {"x": np.full_like(x, TAU**2)}
    return strategy


@pytest.mark.parametrize("name", ["momentum", "adagrad", "adam", "yogi"])
def test_it_steps_as_flower_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's own aggregation is replaced by our FedAvg's next model; the optimiser is its own."""
    clients, inner = PROBLEM.clients(), FedAvg(WORK)
    x = start(PROBLEM)
    strategy = flower_strategy(name, x)
    upcoming: list[np.ndarray] = []
    monkeypatch.setattr(
        FlowerFedAvg,
        "aggregate_train",
        lambda self, r, replies: (ArrayRecord({"x": Array(upcoming[-1])}), None),
    )
    for r in range(1, ROUNDS + 1):
        state = inner.init(clients, torch.as_tensor(x))
        upcoming.append(inner.round(state, clients, Stream(0).at("round", r))[0].x.numpy())
        record = ArrayRecord({"x": Array(x)})
        strategy.current_arrays = record if name == "momentum" else {"x": x}
        if name == "adam":  # Flower corrects for bias, the paper does not
            strategy.eta = LR * (1 - BETAS[0] ** (r + 1)) / np.sqrt(1 - BETAS[1] ** (r + 1))
        arrays, _ = strategy.aggregate_train(r, [])
        x = arrays["x"].numpy()
    ours, _ = rounds(ServerOptimised(inner, name, LR, BETAS, TAU), clients, start(PROBLEM), ROUNDS)
    np.testing.assert_allclose(ours.x, x, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("inner", [FedAvg(WORK), AFL(WORK), ScaffPD(CVaR(0.5))], ids=repr)
def test_without_momentum_it_is_the_algorithm(inner: Any) -> None:
    plain, _ = rounds(inner, PROBLEM.clients(), start(PROBLEM), 5)
    still = ServerOptimised(inner, betas=(0.0, 0.0))
    same, _ = rounds(still, PROBLEM.clients(), start(PROBLEM), 5)
    np.testing.assert_allclose(same.x, plain.x, rtol=1e-12, atol=1e-14)


def test_moments_begin_anew_where_the_model_was_moved() -> None:
    clients, algorithm = PROBLEM.clients(), ServerOptimised(FedAvg(WORK), "yogi", 0.1)
    state, _ = rounds(algorithm, clients, start(PROBLEM), 3)
    there = torch.as_tensor(start(PROBLEM, 1))
    moved = with_inner_state(state, replace(state.inner, x=there))
    stream = Stream(0).at("round", 4)
    after, _ = algorithm.round(moved, clients, stream)
    fresh, _ = algorithm.round(algorithm.init(clients, there), clients, stream)
    np.testing.assert_array_equal(after.x, fresh.x)
    np.testing.assert_array_equal(after.v, fresh.v)


def test_training_puts_it_inside_safeguard_and_proofs() -> None:
    core = ScaffPD(CVaR(0.5))
    wanted = Safeguarded(ServerOptimised(core, "adam"))
    assert ServerOptimised(core, "adam").wrapped() == wanted
    assert ServerOptimised(FedAvg(WORK)).wrapped() == ServerOptimised(FedAvg(WORK))
    history = train(ServerOptimised(core), PROBLEM.clients(), rounds=3)
    assert all(r.numbers["gap"] >= 0 for r in history.rounds)


def test_the_pace_is_decay_by_steps() -> None:
    """Every round equals one of FedAvg with that step size."""
    clients, paced = PROBLEM.clients(), Paced(FedAvg(WORK), decay=0.5, every=2)
    x = torch.as_tensor(start(PROBLEM))
    state = paced.init(clients, x)
    for t, factor in enumerate([1, 1, 0.25, 0.25, 0.0625], 1):
        stream = Stream(0).at("round", t)
        single = FedAvg(replace(WORK, lr=WORK.lr * factor))
        x = single.round(single.init(clients, x), clients, stream)[0].x
        state, _ = paced.round(state, clients, stream)
        np.testing.assert_allclose(state.x, x, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ServerOptimised(FedAvg(WORK), "sgd"),
            "'momentum', 'adagrad', 'adam' or 'yogi', got 'sgd'",
        ),
        (lambda: ServerOptimised(FedAvg(WORK), lr=0.0), "lr must be positive, got 0.0"),
        (lambda: ServerOptimised(FedAvg(WORK), betas=(0.9, 1.0)), r"in \[0, 1\)"),
        (
            lambda: ServerOptimised(FedAvg(WORK), tau=float("nan")),
            "tau must be positive and finite, got nan",
        ),
        (lambda: ServerOptimised(Averaged(FedAvg(WORK))), "Averaged goes around"),
        (lambda: ServerOptimised(ScaffPD(CVaR(0.5)).wrapped()), "Safeguarded goes around"),
        (lambda: Paced(ScaffPD(CVaR(0.5))), "follows its schedule"),
        (lambda: Paced(FedAvg(WORK), decay=0.0), r"decay must lie in \(0, 1\]"),
        (lambda: Paced(FedAvg(WORK), every=0), "every must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
