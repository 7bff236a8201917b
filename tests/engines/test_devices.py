"""What runs on GPUs, as far as it can be tested anywhere; the rest is skipped without CUDA."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.engines.ragged import engines, start
from tests.problems import classification
from torch import nn

from equifed.algorithms.scaffold import Scaffold
from equifed.contract.local import LocalSGD, SmoothedHinge
from equifed.contract.own import OwnSteps
from equifed.contract.streams import Stream
from equifed.engines.precision import products_in
from equifed.engines.simulate import simulate
from equifed.engines.stacked.chunks import split_into_chunks
from equifed.engines.stacked.clients import StackedClients, bound_memory
from equifed.engines.stacked.cuda_graph import SaltedKeys, _uniform
from equifed.models import losses
from equifed.models.architectures import build
from equifed.training.loop import train


def test_salted_keys_are_those_of_the_stream() -> None:
    stream = Stream(5).at("round", 3)
    salts = {p: torch.tensor(stream.at(p).salt()) for p in ("shuffle", "dropout")}
    clients, slots = torch.tensor([[2], [9]]), torch.arange(6)
    for purpose in salts:
        ours = SaltedKeys(salts).at(purpose).keys(clients, 4, slots)
        assert torch.equal(ours, stream.at(purpose).keys(clients, 4, slots))


def test_graphs_take_chunks_whose_clients_keep_step() -> None:
    def chunk(*sizes: int) -> object:
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        everyone, here = np.arange(len(sizes)), torch.device("cpu")
        widths = np.diff(offsets)
        return next(
            split_into_chunks(everyone, offsets, widths, True, lambda size: len(sizes), here)
        )

    steps, epochs = (
        LocalSGD(lr=1.0, steps=3, batch_size=4),
        LocalSGD(lr=1.0, epochs=2, batch_size=4),
    )
    assert _uniform(steps, chunk(8, 8)) and _uniform(epochs, chunk(8, 7))
    assert not _uniform(steps, chunk(9, 8))  # one begins its second pass later
    assert not _uniform(epochs, chunk(9, 8))
    assert _uniform(LocalSGD(lr=1.0, steps=3), chunk(9, 2))


def test_bf16_products_stay_near_full_precision_and_keep_the_models_dtype() -> None:
    data, module = classification(shape=(30,)), build("mlp", (30,), 3, hidden=[600])
    full, rounded = (
        StackedClients(data, module, losses.cross_entropy, precision=p) for p in ("full", "bf16")
    )
    x, work = full.initial(Stream(0)), LocalSGD(lr=0.1, steps=3, batch_size=2)
    a, b = (c.local_steps(x, work, Stream(0)).displacement.dense() for c in (full, rounded))
    assert b.dtype == torch.float32
    assert 1e-5 < float((a - b).norm() / a.norm()) < 2e-2


def test_tf32_is_asked_for_only_during_products() -> None:
    before = torch.get_float32_matmul_precision()
    with products_in("tf32", torch.device("cpu")):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bf16.*fp8"):
        StackedClients(classification(), nn.Linear(3, 3), losses.cross_entropy, precision="fp8")


@pytest.mark.parametrize(("gibibytes", "bound"), [(141, 141 << 27), (4, 1 << 30)])
def test_a_gpu_keeps_an_eighth_of_its_memory(
    gibibytes: int, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = SimpleNamespace(total_memory=gibibytes << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert bound_memory(torch.device("cuda")) == bound
    assert bound_memory(torch.device("cpu")) == 1 << 30


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler
def test_compiled_gradients_agree() -> None:
    module = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 3))
    reference, clients = engines(classification(), module, losses.cross_entropy, compiled=True)
    x, work = start(reference), LocalSGD(lr=0.1, steps=3, batch_size=2)
    ours, theirs = (
        c.local_steps(x, work, Stream(0)).displacement.dense() for c in (clients, reference)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.long
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("options", [{}, {"streamed": True}, {"memory": 1}], ids=str)
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_cuda_agrees_with_the_loop_on_the_cpu(name: str, options: dict[str, int]) -> None:
    data = classification(sizes=(9,) * 5, shape=(6, 6))
    module = build(name, (6, 6), 3, dropout=0.3)
    reference, _ = engines(data, module, losses.cross_entropy)
    clients = StackedClients(
        data, module, losses.cross_entropy, l2=0.1, dtype=torch.float64, device="cuda", **options
    )
    hinge = SmoothedHinge(1.0, 0.1)
    works = [LocalSGD(lr=0.1, steps=3, batch_size=4), LocalSGD(lr=0.1, steps=2, hinge=hinge)]
    weights = np.full(5, 0.2)
    for work in works:
        for r in range(4):  # the second round of a shape captures a graph, later ones replay it
            x, stream, sums = start(reference, seed=r), Stream(0).at(r), []
            slopes = None if work.hinge is None else np.linspace(0, 1, 5)
            for engine in (clients, reference):
                at = x.to(engine.model.device)
                control = engine.value_and_gradient(at, stream)[1]
                target = control.weighted_sum(weights)
                moved = engine.local_steps(
                    at, work, stream, control=control, target=target, slopes=slopes
                )
                sums.append(moved.displacement.weighted_sum(weights).cpu())
            torch.testing.assert_close(*sums, rtol=1e-10, atol=1e-12)


@pytest.mark.long
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("steps", ["profile", "joint", "alternating"])
def test_own_parts_on_cuda_agree_with_the_loop_on_the_cpu(steps: OwnSteps) -> None:
    """Joint steps as captured graphs; profile losses and alternating steps one by one."""
    data, name = classification(sizes=(9,) * 5), "logistic" if steps == "profile" else "mlp"
    given: dict[str, Any] = {"l2": 0.1, "dtype": torch.float64, "own": "bias", "own_steps": steps}
    work = LocalSGD(lr=0.1, steps=3, batch_size=None if steps == "profile" else 4)
    histories = [
        train(Scaffold(work), simulate(data, name, engine=engine, device=device, **given), rounds=5)
        for engine, device in (("loop", "cpu"), ("stacked", "cuda"))
    ]
    for told in ("own", "parameters"):
        theirs, ours = (getattr(history, told) for history in histories)
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, rtol=0, atol=1e-9)
