"""Agreement: ``stacked`` gives the numbers of ``loop``, whatever the chunk size and the memory."""

from __future__ import annotations

import warnings
from itertools import product

import numpy as np
import pytest
import torch
from tests.engines.ragged import engines, start
from tests.problems import SIZES, classification, regression
from torch import nn

from equifed.contract.arrays import ClientVectors
from equifed.contract.clients import MissingClients, Moved
from equifed.contract.local import LocalSGD, LocalWork, SmoothedHinge
from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.engines.loop import LoopClients
from equifed.engines.simulate import simulate
from equifed.engines.stacked.clients import StackedClients
from equifed.models import losses
from equifed.models.architectures import build

pytestmark = pytest.mark.long

STREAM = Stream(7).at("round", 2)
WEIGHTS = np.array([0.3, -0.1, 0.25, 0.4, 0.15])  # relative fairness has negative ones
SLOPES = np.array([0.5, 1.0, 0.0, 2.0, 0.1])
MODES = {"chunk 1": {"chunk": 1}, "chunk 2": {"chunk": 2}, "auto": {}, "lazy": {"memory": 1}}

PROBLEMS = {
    "logistic": (classification(), build("logistic", (3,), 3), losses.cross_entropy),
    "mlp": (classification(), build("mlp", (3,), 3, hidden=[5, 4]), losses.cross_entropy),
    "dropout": (
        classification(),
        build("mlp", (3,), 3, hidden=[6, 4], dropout=0.4),
        losses.cross_entropy,
    ),
    "tanh": (
        classification(),
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 3)),
        losses.cross_entropy,
    ),
    "linear": (regression(), nn.Linear(3, 1, bias=False), losses.squared),
    "two targets": (regression(outputs=2), build("linear", (3,), 2), losses.squared),
    "wide": (regression(features=20, outputs=2), build("linear", (20,), 2), losses.squared),
    "one-hot": (classification(), build("linear", (3,), 3, bias=False), losses.squared),
    "binary": (classification(classes=2), build("linear", (3,), 1), losses.binary_logistic),
    "svm": (classification(classes=2), build("linear", (3,), 1), losses.hinge),
    "own loss": (
        regression(),
        nn.Linear(3, 1),
        lambda o, t: torch.log(1 + (o[:, 0] - t) ** 2) + 0.1 * o[:, 0],
    ),
    "cnn": (
        classification(shape=(4, 4)),
        build("cnn", (4, 4), 3, channels=[2], kernel=3, hidden=4, groups=1, dropout=0.3),
        losses.cross_entropy,
    ),
    "residual": (
        classification(),
        nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 3)),
        losses.cross_entropy,
    ),
}

WORKS = {
    "full batch": LocalSGD(lr=0.1, steps=4),
    "minibatches": LocalSGD(lr=0.1, steps=5, batch_size=2),
    "batch above sizes": LocalSGD(lr=0.1, steps=3, batch_size=50),
    "epochs": LocalSGD(lr=0.1, epochs=2, batch_size=3),
    "full epochs": LocalSGD(lr=0.1, epochs=3),
    "proximal": LocalSGD(lr=0.1, steps=4, batch_size=2, proximal=0.7),
    "ball": LocalSGD(lr=0.3, steps=4, batch_size=2, radius=0.9),
    "box": LocalWork(
        lr=0.3, steps=4, batch_size=2, onto=lambda x: x.clamp(-0.2, 0.3), average=True
    ),
    "snapshot": LocalWork(lr=0.1, epochs=2, batch_size=2, snapshot=3),
    "average": LocalWork(lr=0.1, epochs=2, batch_size=2, average=True),
    "mean gradient": LocalWork(lr=0.1, epochs=2, batch_size=2, mean_gradient=True),
    "hinge": LocalWork(lr=0.1, epochs=2, batch_size=2, hinge=SmoothedHinge(0.6, 0.2)),
    "full, all but hinge and ball": LocalWork(
        lr=0.02,
        steps=12,
        proximal=0.4,
        snapshot=5,
        average=True,
        mean_gradient=True,
    ),
    "everything": LocalWork(
        lr=0.1,
        epochs=2,
        batch_size=2,
        proximal=0.3,
        radius=1.1,
        snapshot=2,
        average=True,
        mean_gradient=True,
        hinge=SmoothedHinge(0.6, 0.2),
    ),
}

LEAST_SQUARES = ["full batch", "full epochs", "full, all but hinge and ball"]


def same(ours: ClientVectors | None, theirs: ClientVectors | None, n: int) -> None:
    """Both absent, or equal in weighted sums and norms."""
    assert (ours is None) == (theirs is None)
    if ours is None or theirs is None:
        return
    for weights in (WEIGHTS[:n], np.eye(n)[n - 1]):
        torch.testing.assert_close(
            ours.weighted_sum(weights), theirs.weighted_sum(weights), rtol=1e-10, atol=1e-10
        )
    np.testing.assert_allclose(ours.squared_norms(), theirs.squared_norms(), rtol=1e-10, atol=1e-12)


def same_move(ours: Moved, theirs: Moved) -> None:
    n = len(theirs.steps)
    np.testing.assert_array_equal(ours.steps, theirs.steps)
    for kind in ("displacement", "snapshot", "average", "mean_gradient"):
        same(getattr(ours, kind), getattr(theirs, kind), n)
    assert (ours.thresholds is None) == (theirs.thresholds is None)
    if ours.thresholds is not None and theirs.thresholds is not None:
        np.testing.assert_allclose(ours.thresholds, theirs.thresholds, rtol=1e-10)


@pytest.mark.parametrize(
    ("problem", "mode", "batch_size"),
    [
        *product(PROBLEMS, ["auto"], [None, 3]),
        *product(PROBLEMS, ["chunk 2", "lazy"], [None]),
        *product(["mlp", "cnn"], ["chunk 1", "lazy"], [3]),
    ],
)
def test_losses_and_gradients_agree(problem: str, mode: str, batch_size: int | None) -> None:
    reference, clients = engines(*PROBLEMS[problem], **MODES[mode])
    x = start(reference)
    np.testing.assert_allclose(
        clients.losses(x, STREAM, batch_size), reference.losses(x, STREAM, batch_size), rtol=1e-10
    )
    ours, theirs = (c.value_and_gradient(x, STREAM, batch_size) for c in (clients, reference))
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-10)
    same(ours[1], theirs[1], 5)
    np.testing.assert_array_equal(clients.traffic.up, reference.traffic.up)
    np.testing.assert_array_equal(clients.traffic.down, reference.traffic.down)


@pytest.mark.parametrize(
    ("problem", "work", "mode", "corrected"),
    [
        *product(["dropout"], WORKS, ["chunk 2", "lazy"], [True]),
        *product(["residual"], WORKS, ["chunk 2"], [True]),
        *product(["wide"], LEAST_SQUARES, MODES, [False, True]),
        *product(["two targets", "one-hot"], LEAST_SQUARES, ["chunk 2"], [True]),
        *product(PROBLEMS, ["full batch", "everything"], ["auto"], [False]),
        *product(PROBLEMS, ["epochs"], ["lazy"], [True]),
        *product(["mlp", "cnn"], ["minibatches"], MODES, [False, True]),
    ],
)
def test_local_steps_agree(problem: str, work: str, mode: str, corrected: bool) -> None:
    reference, clients = engines(*PROBLEMS[problem], **MODES[mode])
    x = start(reference)
    moved = []
    for engine in (clients, reference):
        options = {}
        if corrected:
            gradients = engine.value_and_gradient(x, STREAM.at("gradient"))[1]
            options = {"control": gradients, "target": gradients.weighted_sum(WEIGHTS)}
        if WORKS[work].work().hinge is not None:
            options["slopes"] = SLOPES
        moved.append(engine.local_steps(x, WORKS[work], STREAM.at("local"), **options))
    same_move(*moved)


@pytest.mark.parametrize("mode", MODES)
def test_a_client_does_the_same_in_any_subset(mode: str) -> None:
    reference, clients = engines(*PROBLEMS["dropout"], **MODES[mode])
    x, index = start(reference), np.array([0, 2, 3])
    part, theirs = clients.subset(index), reference.subset(index)
    work = WORKS["average"]
    same_move(part.local_steps(x, work, STREAM), theirs.local_steps(x, work, STREAM))
    whole = clients.losses(x, STREAM, 2)
    np.testing.assert_allclose(part.losses(x, STREAM, 2), whole[index], rtol=1e-12)
    norms = clients.local_steps(x, work, STREAM).displacement.squared_norms()
    np.testing.assert_allclose(
        part.local_steps(x, work, STREAM).displacement.squared_norms(), norms[index], rtol=1e-12
    )


@pytest.mark.parametrize("mode", MODES)
def test_memories_of_clients_agree(mode: str) -> None:
    reference, clients = engines(*PROBLEMS["mlp"], **MODES[mode])
    x, some = start(reference), np.array([1, 4])
    kept = []
    for engine in (clients, reference):
        own = engine.remembered(None, engine.index)
        work = WORKS["mean gradient"]
        moved = engine.local_steps(x, work, STREAM, control=own, target=torch.zeros_like(x))
        memory = engine.remember(None, engine.index, moved.mean_gradient)
        part = engine.subset(some).local_steps(
            x, work, STREAM.at(1), control=engine.remembered(memory, some), target=0.1 * x
        )
        kept.append(engine.remember(memory, some, part.mean_gradient))
    same(*kept, n=5)


@pytest.mark.parametrize("mode", MODES)
def test_a_non_finite_client_is_named(mode: str) -> None:
    draw = np.random.default_rng(0)
    data = {f"c{i}": (draw.normal(size=(m, 3)), draw.normal(size=m)) for i, m in enumerate(SIZES)}
    data["c2"][0][:] = 1e200  # its square overflows
    reference, clients = engines(
        Federation.from_clients(data), nn.Linear(3, 1), losses.squared, **MODES[mode]
    )
    x, work = start(reference), LocalSGD(lr=0.1, steps=2, batch_size=3)

    def gradients(engine: LoopClients | StackedClients) -> object:
        return engine.value_and_gradient(x, STREAM)[1].weighted_sum(WEIGHTS)

    def local(engine: LoopClients | StackedClients) -> object:
        return engine.local_steps(x, work, STREAM).displacement.weighted_sum(WEIGHTS)

    for call in (lambda engine: engine.losses(x, STREAM), gradients, local):
        for engine in (clients, reference):
            with pytest.raises(MissingClients, match="c2") as missing:
                call(engine)
            assert list(missing.value.reasons) == [2]


@pytest.mark.parametrize("memory", [1, 1 << 30])
def test_a_gradient_that_overflows_alone_is_named(memory: int) -> None:
    def kink(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.sqrt((outputs[:, 0] - targets).abs())  # infinite slope at zero

    data = {"a": (np.ones((2, 1)), np.ones(2)), "b": (np.ones((1, 1)), np.zeros(1))}
    _, clients = engines(
        Federation.from_clients(data), nn.Linear(1, 1, bias=False), kink, l2=0.0, memory=memory
    )
    with pytest.raises(MissingClients, match="b: squared gradient norm"):
        _, handle = clients.value_and_gradient(torch.zeros(1, dtype=torch.float64), STREAM)
        handle.weighted_sum(np.array([0.5, 0.5]))


def test_models_with_running_statistics_are_refused() -> None:
    with pytest.raises(ValueError, match="GroupNorm"):
        engines(classification(), nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)), losses.squared)


class FunctionalDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.inner(inputs), 0.5, training=self.training)


def test_models_that_draw_their_own_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"nn\.Dropout"):
        engines(classification(), FunctionalDropout(), losses.cross_entropy)


def text() -> Federation:
    draw = np.random.default_rng(0)
    tokens = {
        f"c{i}": (draw.integers(5, size=(m, 4)), draw.integers(5, size=m))
        for i, m in enumerate(SIZES)
    }
    return Federation.from_clients(tokens, classes=5, tokens=True)


def test_an_lstm_is_batched_or_falls_back_and_agrees_in_any_case() -> None:
    module, work = build("lstm", (4,), 5, embedding=2, hidden=3), WORKS["minibatches"]
    reference = LoopClients(text(), module, losses.cross_entropy, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whether vmap takes an LSTM depends on torch
        clients = simulate(text(), module, losses.cross_entropy, dtype=torch.float64)
    x = start(reference)
    same_move(clients.local_steps(x, work, STREAM), reference.local_steps(x, work, STREAM))


class Branching(nn.Module):
    """Looks at its own weights, which ``vmap`` cannot batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(inputs)
        return outputs if self.inner.weight.sum() > 0 else 2 * outputs


def test_a_module_that_vmap_cannot_take_falls_back_to_the_loop_with_one_notice() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        clients = simulate(classification(), Branching(), losses.cross_entropy)
        clients.local_steps(clients.initial(STREAM), WORKS["minibatches"], STREAM)
    assert isinstance(clients, LoopClients)
    assert ["loop engine" in str(w.message) for w in caught] == [True]


def test_wrong_arguments_are_refused() -> None:
    reference, clients = engines(*PROBLEMS["linear"])
    x, work = start(reference), WORKS["full batch"]
    with pytest.raises(ValueError, match="control and target"):
        clients.local_steps(x, work, STREAM, target=x)
    with pytest.raises(ValueError, match="slopes"):
        clients.local_steps(x, work, STREAM, slopes=SLOPES)
    with pytest.raises(ValueError, match="memory"):
        engines(*PROBLEMS["linear"], memory=0)
    with pytest.raises(ValueError, match="chunk"):
        engines(*PROBLEMS["linear"], chunk=0)
