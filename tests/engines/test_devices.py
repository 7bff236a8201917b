"""What runs on GPUs, as far as it can be tested anywhere; the rest is skipped without CUDA."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.engines.ragged import engines, start
from tests.problems import classification
from torch import nn

from equifed.algorithms.scaffold import Scaffold
from equifed.contract.local import LocalSGD, LocalWork, OwnSteps, SmoothedHinge
from equifed.contract.streams import Stream, hash_words
from equifed.engines.minibatches import Minibatches
from equifed.engines.simulate import simulate
from equifed.engines.stacked.clients import StackedClients, bound_memory
from equifed.engines.stacked.cuda_graph import can_be_recorded
from equifed.engines.stacked.samples import Chunk, PlannedBatches, split_into_chunks
from equifed.engines.threads import products_in
from equifed.models import losses
from equifed.models.architectures import build
from equifed.training.loop import train


def test_keys_of_a_salt_in_memory_are_those_of_the_stream() -> None:
    stream, clients, slots = Stream(5).at("round", 3), torch.tensor([[2], [9]]), torch.arange(6)
    for purpose in ("shuffle", "dropout"):
        ours = hash_words(clients, torch.tensor(stream.at(purpose).salt()), 4, slots)
        assert torch.equal(ours, stream.at(purpose).keys(clients, 4, slots))


def chunk_of(*sizes: int) -> Chunk:
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    everyone, widths, here = np.arange(len(sizes)), np.diff(offsets), torch.device("cpu")
    return next(split_into_chunks(everyone, offsets, widths, True, lambda size: len(sizes), here))


def test_graphs_take_walks_of_clients_of_any_sizes_that_are_not_endless() -> None:
    steps = LocalWork(lr=1.0, steps=3, batch_size=4)
    epochs = LocalWork(lr=1.0, epochs=2, batch_size=4)
    for work in (steps, epochs, replace(steps, snapshot=2), LocalWork(lr=1.0, steps=3)):
        assert can_be_recorded(work, chunk_of(9, 2))
    assert not can_be_recorded(replace(epochs, snapshot=2), chunk_of(9, 2))  # some stop before it
    assert not can_be_recorded(replace(steps, steps=10**6), chunk_of(9, 2))
    assert can_be_recorded(replace(epochs, batch_size=10**9), chunk_of(9, 2))  # all their samples


@pytest.mark.parametrize("sizes", [(7, 3, 12, 1), (6, 6)])
@pytest.mark.parametrize("batch_size", [1, 4, 5, 100, None])
@pytest.mark.parametrize("given", [{"epochs": 3}, {"steps": 13}], ids=str)
def test_planned_batches_are_those_of_every_step(
    sizes: tuple[int, ...], batch_size: int | None, given: dict[str, int]
) -> None:
    """All at once or one after the other: the same samples, weights and keys for those who walk."""
    chunk, stream = chunk_of(*sizes), Stream(3).at("round", 1)
    steps = LocalSGD(lr=1.0, batch_size=batch_size, **given).steps_for(chunk.sizes)
    assert PlannedBatches.fits(chunk, steps)
    planned = PlannedBatches(chunk, steps, batch_size, torch.float64, True)
    for again in (stream, stream.at("more")):
        planned.draw(lambda purpose, again=again: again.at(purpose).salt())
        told = (chunk.ids, chunk.sizes, batch_size, torch.float64)
        batches = Minibatches(again, *told, dropout=True, width=chunk.width, starts=chunk.starts)
        assert planned.shuffled == batches.shuffled
        for step in range(int(steps.max())):
            live = int((steps > step).sum())
            ours, theirs = planned.at(step).first(live), batches.at(step).first(live)
            columns = slice(theirs.weights.shape[1])
            assert torch.equal(ours.weights[:, columns], theirs.weights)
            assert not ours.weights[:, theirs.weights.shape[1] :].any()
            used = theirs.weights > 0
            assert torch.equal(ours.positions[:, columns][used], theirs.positions[used])
            assert ours.keys is not None and theirs.keys is not None
            assert torch.equal(ours.keys[:, columns], theirs.keys)
            assert torch.equal(planned.keys(range(step, step + 1), live)[0], ours.keys)


def test_masks_drawn_ahead_are_those_of_every_step() -> None:
    data, module = classification(shape=(5,)), build("mlp", (5,), 3, hidden=[4, 6], dropout=0.3)
    clients = StackedClients(data, module, losses.cross_entropy, dtype=torch.float64)
    (chunk,) = clients.chunks(2)
    supply, rule = clients.supply(chunk, Stream(0), 2), clients.rule.data
    each = [supply.at(step)[0] for step in range(3)]
    assert rule.units == 10
    masks = rule.masks(torch.stack([one.keys for one in each if one.keys is not None]))
    u = clients.initial(Stream(0)).expand(len(chunk), -1)
    for step in range(3):
        samples = supply.at(step)[0]
        ahead = replace(samples, masks=tuple(mask[step] for mask in masks), keys=None)
        for ours, theirs in zip(rule.gradient(u, ahead), rule.gradient(u, samples), strict=True):
            assert torch.equal(ours, theirs)


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
@pytest.mark.parametrize("options", [{}, {"memory": 1}], ids=str)
@pytest.mark.parametrize("sizes", [(9,) * 5, (9, 2, 14, 1, 7)], ids=["equal", "unequal"])
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_cuda_agrees_with_the_loop_on_the_cpu(
    name: str, sizes: tuple[int, ...], options: dict[str, int]
) -> None:
    data = classification(sizes=sizes, shape=(6, 6))
    module = build(name, (6, 6), 3, dropout=0.3)
    reference, _ = engines(data, module, losses.cross_entropy)
    clients = StackedClients(
        data, module, losses.cross_entropy, l2=0.1, dtype=torch.float64, device="cuda", **options
    )
    hinge = SmoothedHinge(1.0, 0.1)
    lr = 0.1 if name == "mlp" else 1e-4  # of many steps, which must not diverge
    works = [
        LocalWork(lr=0.1, steps=3, batch_size=4),
        LocalWork(lr=0.1, steps=2, hinge=hinge),
        LocalWork(lr=lr, epochs=3, batch_size=1, average=True),
        LocalWork(lr=lr, steps=70, batch_size=2, snapshot=1),
        LocalWork(lr=lr, steps=3, snapshot=1),
    ]
    weights = np.full(5, 0.2)
    for work in works:
        for r in range(4):  # the second round of a shape captures a graph, later ones replay it
            x, stream, sums = start(reference, seed=r), Stream(0).at(r), []
            if work.snapshot is not None:  # in every round at another step
                work = replace(work, snapshot=1 + r * (work.steps or 0) // 4)
            slopes = None if work.hinge is None else np.linspace(0, 1, 5)
            for engine in (clients, reference):
                at = x.to(engine.model.device)
                control = engine.value_and_gradient(at, stream)[1]
                target = control.weighted_sum(weights)
                moved = engine.local_steps(
                    at, work, stream, control=control, target=target, slopes=slopes
                )
                kinds = (getattr(moved, kind) for kind in work.results)
                sums.append([kind.weighted_sum(weights).cpu() for kind in kinds])
            torch.testing.assert_close(*sums, rtol=1e-10, atol=1e-12)


@pytest.mark.long
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("steps", ["profile", "joint", "alternating"])
def test_own_parts_on_cuda_agree_with_the_loop_on_the_cpu(steps: OwnSteps) -> None:
    """Joint steps as captured graphs; profile losses and alternating steps one by one."""
    data, name = classification(sizes=(9, 2, 14, 1, 7)), "logistic" if steps == "profile" else "mlp"
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
