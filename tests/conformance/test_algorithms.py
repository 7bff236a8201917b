"""What every algorithm of the catalogue must do, whatever it computes."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.problems import LeastSquares
from torch import Tensor

from equifed.algorithms import (
    AFL,
    DRFA,
    AgnosticFedAvg,
    DeltaFL,
    FedAvg,
    QFedAvg,
    RFedFair,
    Scaffold,
    ScaffPD,
    ScaffPDIA,
    TiltedERM,
    fedprox,
    qfedsgd,
)
from equifed.contract.algorithm import AnyAlgorithm
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.engines.in_process import DenseVectors
from equifed.engines.loop import LoopClients
from equifed.models.losses import squared
from equifed.objectives import (
    Average,
    ChiSquare,
    CVaR,
    Entropic,
    ProjectedGradient,
    RelativeFairness,
)
from equifed.runs import catalogue
from equifed.steps.schedules import ConstantSteps
from equifed.training import checkpoints
from equifed.training.loop import train

STEPS = LocalSGD(lr=0.05, steps=3, batch_size=3)
EPOCHS = LocalSGD(lr=0.05, epochs=1, batch_size=3)  # ragged: from one to four steps
PRIMAL_DUAL = ConstantSteps(0.1, 0.2, 0.9)

CASES: dict[str, list[AnyAlgorithm]] = {
    "fedavg": [FedAvg(EPOCHS), FedAvg(EPOCHS, "uniform", participation=0.5, server_lr=0.5)],
    "fedprox": [fedprox(0.5, EPOCHS)],
    "scaffold": [
        Scaffold(EPOCHS, participation=0.5),
        Scaffold(EPOCHS, "fresh", "size", gradient_batch_size=4),
    ],
    "afl": [
        AFL(STEPS, 0.05),
        AFL(EPOCHS, 0.05, CVaR(0.5), 0.5, Entropic()),
        AFL(STEPS, 0.05, clients_per_round=3, output="average"),
    ],
    "drfa": [
        DRFA(STEPS, 0.02, clients_per_round=3, output="average"),
        DRFA(STEPS, 0.02, ChiSquare(0.1), dual=Entropic()),
        DRFA(STEPS, 0.05, ChiSquare(0.1), clients_per_round=2, ascent="full"),
        DRFA(STEPS, 0.05, ChiSquare(0.1), ascent="full", dual=ProjectedGradient()),
    ],
    "rfedfair": [RFedFair(STEPS), RFedFair(STEPS, 0.4, clients_per_round=3, output="last")],
    "q-fedavg": [QFedAvg(EPOCHS, 1.0), QFedAvg(STEPS, 0.5, 10.0, "size", 0.5)],
    "q-fedsgd": [qfedsgd(0.05, q=1.0, batch_size=3)],
    "delta-fl": [DeltaFL(EPOCHS), DeltaFL(STEPS, 0.3, "uniform", 0.7)],
    "agnostic-fedavg": [AgnosticFedAvg(EPOCHS, 0.1), AgnosticFedAvg(STEPS, participation=0.5)],
    "tilted-erm": [TiltedERM(EPOCHS, 0.5), TiltedERM(STEPS, -1.0, participation=0.5)],
    "scaff-pd": [
        ScaffPD(ChiSquare(0.1), EPOCHS, PRIMAL_DUAL, gradient_batch_size=4),
        ScaffPD(RelativeFairness(phi=0.3), STEPS, PRIMAL_DUAL),
        ScaffPD(Average(), STEPS, PRIMAL_DUAL, participation=0.5),
        ScaffPD(CVaR(0.5)),
    ],
    "scaff-pd-ia": [
        ScaffPDIA(0.2, local=STEPS, steps=PRIMAL_DUAL),
        ScaffPDIA("auto", CVaR(0.5), CVaR(0.5), warmup=1, local=STEPS, steps=PRIMAL_DUAL),
    ],
}
ALGORITHMS = [
    pytest.param(algorithm, id=f"{name}-{k}")
    for name, variants in CASES.items()
    for k, algorithm in enumerate(variants)
]
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


def problem() -> LeastSquares:
    """Ragged clients, one of them with a single sample."""
    rng = np.random.default_rng(0)
    inputs = tuple(rng.normal(size=(m, 3)) for m in (7, 1, 12, 3, 5))
    targets = tuple(a @ rng.normal(size=3) + rng.normal(size=len(a)) for a in inputs)
    return LeastSquares(inputs, targets, 0.1)


def first(clients: Any) -> Tensor:
    return clients.initial(Stream(0).at("initial")) + 0.5


def play(
    algorithm: AnyAlgorithm, clients: Any, count: int, state: Any = None, done: int = 0
) -> Any:
    state = algorithm.init(clients, first(clients)) if state is None else state
    for r in range(done + 1, done + count + 1):
        state, _ = algorithm.round(state, clients, Stream(1).at("round", r))
    return state


def numbers(state: Any) -> dict[str, np.ndarray]:
    """Return every number of a state by where it is."""
    out: dict[str, np.ndarray] = {}
    for field in dataclasses.fields(state):
        value = getattr(state, field.name)
        if isinstance(value, DenseVectors):
            value = value.matrix
        if dataclasses.is_dataclass(value):
            out |= {f"{field.name}.{key}": v for key, v in numbers(value).items()}
        elif value is not None and not isinstance(value, str):
            out[field.name] = np.asarray(value)
    return out


def assert_equal(one: Any, other: Any, tolerance: float = 0.0) -> None:
    left, right = numbers(one), numbers(other)
    assert left.keys() == right.keys()
    for key in left:
        np.testing.assert_allclose(left[key], right[key], rtol=0, atol=tolerance, err_msg=key)


def assert_sane(state: Any, n: int) -> None:
    for key, values in numbers(state).items():
        assert np.isfinite(values.astype(float)).all(), key
    if hasattr(state, "weights"):
        assert state.weights.shape == (n,)
        assert state.weights.sum() == pytest.approx(1.0)


def test_the_whole_catalogue_is_here() -> None:
    assert set(CASES) == set(catalogue.ALGORITHMS)
    for name, (algorithm, *_) in CASES.items():
        constructor = catalogue.ALGORITHMS[name].load()
        assert constructor is type(algorithm) or not isinstance(constructor, type)


@cache
def reference(algorithm: AnyAlgorithm) -> Any:
    return play(algorithm, problem().clients("loop"), 20)


@pytest.mark.long
@every_algorithm
@pytest.mark.parametrize(
    "options",
    [{}, {"chunk": 1}, {"chunk": 2, "memory": 1}],  # a byte: every handle makes its vectors again
    ids=["default", "one by one", "in pairs without memory"],
)
def test_engines_agree(algorithm: AnyAlgorithm, options: dict[str, int]) -> None:
    state = play(algorithm, problem().clients("stacked", **options), 20)
    assert_equal(state, reference(algorithm), 1e-10)


@every_algorithm
def test_the_model_moves_and_the_round_tells_what_it_did(algorithm: AnyAlgorithm) -> None:
    clients = problem().clients()
    state = algorithm.init(clients, first(clients))
    new, info = algorithm.round(state, clients, Stream(1).at("round", 1))
    assert not torch.equal(new.x, state.x)
    assert algorithm.model(new).shape == state.x.shape
    assert info.weights.shape == (5,) and info.weights.sum() == pytest.approx(1.0)
    assert info.losses is None or info.losses.shape == (5,)
    assert info.index is None or set(info.index) <= set(range(5))


@every_algorithm
def test_the_same_state_and_stream_give_the_same_result(algorithm: AnyAlgorithm) -> None:
    """Also when other draws and questions come between: a stream is an address, not a supply."""
    clients = problem().clients()
    state = play(algorithm, clients, 2)
    before = {key: values.copy() for key, values in numbers(state).items()}
    stream = Stream(1).at("round", 3)
    one, _ = algorithm.round(state, clients, stream)
    stream.generator().normal(size=10)
    clients.losses(state.x, stream.at("losses"), 2)
    clients.subset([0, 3]).local_steps(state.x, STEPS, stream.at("local"))
    other, _ = algorithm.round(state, clients, stream)
    assert_equal(one, other)
    for key, values in numbers(state).items():  # states are values: a round leaves its own alone
        np.testing.assert_array_equal(values, before[key])


@every_algorithm
def test_a_saved_state_goes_on_identically(algorithm: AnyAlgorithm, tmp_path: Path) -> None:
    clients = problem().clients()
    state = play(algorithm, clients, 2)
    checkpoints.save(tmp_path, 2, state, {})
    template = algorithm.init(clients, first(clients))
    done, restored, _ = checkpoints.load(tmp_path, template, algorithm)
    assert done == 2
    assert_equal(play(algorithm, clients, 2, restored, done), play(algorithm, clients, 2, state, 2))


@every_algorithm
def test_any_clients_may_be_absent(algorithm: AnyAlgorithm) -> None:
    clients = problem().clients()
    state = algorithm.init(clients, first(clients))
    for r, here in enumerate([[1, 2], [0, 1, 2, 3, 4], [4], [0, 3], [1, 2, 3, 4]], 1):
        state, info = algorithm.round(state, clients.subset(here), Stream(1).at("round", r))
        assert_sane(state, 5)
        assert info.index is None or set(info.index) <= set(here)


def broken(outputs: Tensor, targets: Tensor) -> Tensor:
    """The squared loss, but not a number where a target is 99."""
    return squared(outputs, targets) * torch.where(targets == 99, torch.nan, 1.0)


@every_algorithm
def test_a_client_without_a_number_is_quarantined(algorithm: AnyAlgorithm) -> None:
    good = problem()
    data = {f"client {i}": (good.inputs[i], good.targets[i]) for i in range(5)}
    data["client 2"] = (good.inputs[2], np.full(12, 99.0))
    model = torch.nn.Linear(3, 1, bias=False)
    clients = LoopClients(Federation.from_clients(data), model, broken, dtype=torch.float64)
    history = train(algorithm, clients, rounds=4, seed=1)
    assert len(history.rounds) == 4
    assert all(torch.isfinite(values).all() for values in history.parameters.values())
    lost = [event["client"] for event in history.events if event["event"] == "quarantine"]
    assert lost and set(lost) == {"client 2"}
    state = play(algorithm, clients.subset([0, 1, 3, 4]), 4)
    assert_sane(state, 5)
