"""Local steps as Triton programs, through Triton's interpreter: they agree with the loop."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tests.problems import classification, regression
from torch import nn

from equifed.contract.local import LocalSGD, LocalWork
from equifed.contract.streams import Stream
from equifed.engines.loop import LoopClients
from equifed.engines.stacked import fused
from equifed.engines.stacked.clients import StackedClients
from equifed.engines.stacked.fused import Fused, Shape
from equifed.metrics import METRICS

pytest.importorskip("triton", "3.4", reason="Triton 3.4 or newer, which is for Linux")
pytestmark = pytest.mark.filterwarnings(  # the interpreter of Triton 3.6 with NumPy before 2.4
    "ignore:Conversion of an array with ndim:DeprecationWarning"
)
assert os.environ["TRITON_INTERPRET"] == "1", "see tests/conftest.py"

ROUNDING = 2e-5
"""Of the relative difference to the loop in float64; products are summed in another order."""


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "INTERPRETED", True)


def chain(features: int, *units: int, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    """Return a fully connected network."""
    torch.manual_seed(0)
    sizes = [features, *units]
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [activation()] * bool(layers) + [nn.Linear(a, b)]
    return nn.Sequential(*layers)


def differences(
    data: Any, module: nn.Module, work: LocalSGD, corrected: bool = False, **options: Any
) -> dict[str, float]:
    """Return how far each kind of vector is from the loop's, relative to its length.

    With them come the numbers that must be finite, of which nothing else is seen.
    """
    stacked = StackedClients(data, module, **options)
    assert isinstance(stacked.fused, Fused), stacked.fused
    assert stacked.fused.refuse(work.work(), stacked.sizes) is None
    loop = LoopClients(data, module, dtype=torch.float64, **options)
    found: list[dict[str, torch.Tensor]] = []
    for engine in (loop, stacked):
        x = loop.initial(Stream(3)).to(engine.model.dtype)
        more = {}
        if corrected:
            _, control = engine.value_and_gradient(x, Stream(1))
            target = control.weighted_sum(np.full(len(engine.names), 0.3))
            more = {"control": control, "target": target}
        told: dict[str, torch.Tensor] = {}
        check = engine.require_finite

        def note(numbers: Any, what: str, told: Any = told, check: Any = check) -> Any:
            told[what] = torch.as_tensor(numbers).double()
            return check(numbers, what)

        engine.require_finite = note
        moved = engine.local_steps(x, work, Stream(0).at(5), **more)
        kinds = work.work().results
        vectors = {kind: getattr(moved, kind).dense().double() for kind in kinds}
        length = "squared length of the local update"
        found.append({**vectors, length: told[length]})
    return {k: float((v - found[1][k]).norm() / v.norm()) for k, v in found[0].items()}


EVERYTHING = {"proximal": 0.3, "snapshot": 2, "average": True}


@pytest.mark.parametrize(
    ("units", "activation", "work", "corrected", "options"),
    [
        ((3,), nn.ReLU, LocalSGD(0.1, epochs=2, batch_size=8), False, {"l2": 0.1}),
        ((4, 3), nn.ReLU, LocalWork(0.1, epochs=2, batch_size=8, **EVERYTHING), True, {"l2": 0.1}),
        ((20, 5, 3), nn.Tanh, LocalWork(0.1, steps=5, batch_size=8, mean_gradient=True), True,
         {"l2": 0.3, "penalise": "weights"}),
        ((4, 3), nn.Tanh, LocalWork(0.1, steps=1, batch_size=30, multiplier=True), True, {}),
        ((17, 3), nn.ReLU, LocalSGD(0.02, steps=7, batch_size=16), False, {"loss": "squared"}),
    ],
)  # fmt: skip
def test_programs_agree_with_the_loop(
    units: tuple[int, ...], activation: type[nn.Module], work: LocalSGD, corrected: bool,
    options: dict[str, Any],
) -> None:  # fmt: skip
    # Ragged clients, the last one smaller than a batch, and more inputs than one block holds.
    data = classification([20, 13, 5], (37,), 3, dtype=np.float32)
    found = differences(data, chain(37, *units, activation=activation), work, corrected, **options)
    assert max(found.values()) < ROUNDING, found


def test_logistic_and_squared_losses_of_one_output_agree_with_the_loop() -> None:
    work = LocalSGD(0.05, steps=3, batch_size=4)
    two = classification([9, 4], (5,), 2, dtype=np.float32)
    found = differences(two, chain(5, 3, 1), work, loss="logistic")
    numbers = regression([9, 4], 5)
    found |= {"squared": max(differences(numbers, chain(5, 3, 1), work).values())}
    assert max(found.values()) < ROUNDING, found


@pytest.mark.parametrize("programs", [1, 512])  # whole clients, or parts of them
@pytest.mark.parametrize(
    ("units", "activation", "options"),
    [
        ((3,), nn.ReLU, {"l2": 0.1}),
        ((20, 5, 3), nn.Tanh, {"l2": 0.3, "penalise": "weights"}),
        ((17, 3), nn.ReLU, {"loss": "squared"}),
        ((4, 1), nn.Tanh, {"loss": "logistic"}),
    ],
)
def test_passes_over_all_samples_agree_with_the_loop(
    units: tuple[int, ...], activation: type[nn.Module], options: dict[str, Any], programs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(fused, "PROGRAMS", programs)
    monkeypatch.setattr(fused, "DELTAS", 1 << 13)  # some clients come in parts
    data = classification([150, 13, 5], (37,), max(2, units[-1]), dtype=np.float32)
    module = chain(37, *units, activation=activation)
    stacked = StackedClients(data, module, **options)
    monkeypatch.setattr(stacked, "supply", None)  # nothing is fetched for products
    loop = LoopClients(data, module, dtype=torch.float64, **options)
    x = loop.initial(Stream(3))
    values, gradients = loop.value_and_gradient(x, Stream(0))
    found, handle = stacked.value_and_gradient(x.float(), Stream(0))
    true, other = gradients.dense(), handle.dense().double()
    assert found == pytest.approx(values, rel=ROUNDING)
    assert stacked.losses(x.float(), Stream(0)) == pytest.approx(values, rel=ROUNDING)
    assert float((other - true).norm() / true.norm()) < ROUNDING


@pytest.mark.parametrize("factor", [1.1, float("nan")])
def test_wrong_answers_of_programs_are_noticed_and_not_used(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another driver or compiler might give them: the first pass is held against the module."""
    data = classification([15, 13, 5], (7,), 3, dtype=np.float32)
    stacked = StackedClients(data, chain(7, 4, 3))
    right = stacked.fused._pass  # type: ignore[union-attr]

    def wrong(*given: Any) -> Any:
        told = right(*given)
        if given[7] is not None:
            given[7].mul_(factor)
        return told

    monkeypatch.setattr(stacked.fused, "_pass", wrong)
    loop = LoopClients(data, chain(7, 4, 3), dtype=torch.float64)
    x = loop.initial(Stream(3))
    _, gradients = loop.value_and_gradient(x, Stream(0))
    _, handle = stacked.value_and_gradient(x.float(), Stream(0))
    true, found = gradients.dense(), handle.dense().double()
    assert float((found - true).norm() / true.norm()) < ROUNDING
    work = LocalWork(0.1, steps=1, batch_size=5)
    assert "differ from the module" in stacked.fused.refuse(work, np.array([5]))  # type: ignore[union-attr, operator]


def test_evaluation_by_programs_is_that_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    data = classification([150, 13, 5], (37,), 3, dtype=np.float32)
    clients = StackedClients(data, chain(37, 4, 3))
    x = clients.initial(Stream(3))
    (quick,) = clients.evaluate(x, ("train",))
    (named,) = clients.evaluate(x, ("train",), [METRICS["balanced_accuracy"]])  # needs the outputs
    clients._evaluator.quick = None
    (plain,) = clients.evaluate(x, ("train",))
    assert quick.hits is not None
    assert plain.hits is not None
    for one in (quick, named):
        assert one.metrics["loss"] == pytest.approx(plain.metrics["loss"], rel=ROUNDING)
        assert (one.metrics["accuracy"] == plain.metrics["accuracy"]).all()
    assert (quick.hits.correct == plain.hits.correct).all()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_drawn_shapes_agree_with_the_loop(seed: int) -> None:
    draw = np.random.default_rng(seed)
    features, outputs = int(draw.integers(3, 200)), int(draw.integers(2, 12))
    hidden = draw.integers(2, 60, size=draw.integers(0, 3)).tolist()
    sizes = draw.integers(1, 40, size=4).tolist()
    data = classification(sizes, (features,), outputs, dtype=np.float32)
    work = LocalSGD(0.05, epochs=int(draw.integers(1, 4)), batch_size=int(draw.integers(1, 30)))
    activation = [nn.ReLU, nn.Tanh][int(draw.integers(2))]
    module = chain(features, *hidden, outputs, activation=activation)
    found = differences(data, module, work, corrected=bool(draw.integers(2)), l2=0.01)
    assert max(found.values()) < ROUNDING, (features, hidden, outputs, sizes, work, found)


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (LocalSGD(0.1, steps=2), "on all samples"),
        (LocalSGD(0.1, steps=2, batch_size=4, radius=1.0), "projected"),
        (LocalWork(0.1, steps=2, batch_size=4, mean_gradient=True, proximal=1.0), "proximal"),
        (LocalSGD(0.1, steps=2, batch_size=200), "larger than 128"),
    ],
)
def test_work_that_is_not_for_programs_is_refused_with_a_reason(
    work: LocalSGD, reason: str
) -> None:
    data = classification([300, 4], (5,), 3, dtype=np.float32)
    clients = StackedClients(data, chain(5, 4, 3))
    assert isinstance(clients.fused, Fused)
    assert reason in str(clients.fused.refuse(work.work(), clients.sizes))


@pytest.mark.parametrize(
    ("module", "options", "reason"),
    [
        (chain(5, 4, 4, 4, 3), {}, "not a chain of at most three"),
        (nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 3)), {}, "not a chain"),
        (nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3, bias=False)), {}, "differ in"),
        (nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 3)), {}, "not fully connected"),
        (chain(5, 3), {"dtype": torch.float64}, "float64"),
        (chain(5, 3), {"own": "bias"}, "own parameters"),
    ],
)
def test_models_that_are_not_for_programs_have_a_reason(
    module: nn.Module, options: dict[str, Any], reason: str
) -> None:
    data = classification([8, 4], (5,), 3, dtype=np.float32)
    assert reason in str(StackedClients(data, module, **options).fused)


def test_without_the_interpreter_a_cpu_has_no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "INTERPRETED", False)
    clients = StackedClients(classification([8, 4], (5,), 3, dtype=np.float32), chain(5, 3))
    assert clients.fused == "the device is cpu"


def test_a_triton_of_before_the_tested_ones_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.__version__", "3.3.1")
    clients = StackedClients(classification([8, 4], (5,), 3, dtype=np.float32), chain(5, 3))
    assert clients.fused == "Triton 3.3.1 is older than 3.4"


@pytest.mark.parametrize("units", [(257, 10), (50, 10), (128, 64, 10), (256, 3)])
def test_planned_tiles_fit_into_shared_memory_or_the_shape_is_refused(
    units: tuple[int, ...],
) -> None:
    shape = Shape(784, units, 50, "full")
    assert (shape.refused is None) == (shape.largest <= 1 << 13)
    assert shape.refused is not None or shape.fitting


def test_orders_by_comparing_are_those_by_sorting(monkeypatch: pytest.MonkeyPatch) -> None:
    data, work = classification([40, 13, 5], (3,), 3, dtype=np.float32), LocalSGD(0.1, 7, None, 4)
    found = []
    for pairs in (0, 1 << 20):
        monkeypatch.setattr(fused, "COMPARED", pairs)
        clients = StackedClients(data, chain(3, 3))
        moved = clients.local_steps(clients.initial(Stream(0)), work, Stream(0).at(5))
        found.append(moved.displacement.dense())  # type: ignore[union-attr]
    assert torch.equal(*found)
