"""``engine="auto"`` measures, keeps what is faster and says so."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.problems import classification
from torch import nn

import equifed as ef
from equifed.contract.streams import Stream
from equifed.engines import simulate as choose
from equifed.engines.distributed import cut_shard
from equifed.engines.loop import LoopClients
from equifed.engines.stacked import compiling
from equifed.engines.stacked.clients import StackedClients
from equifed.engines.stacked.gradient_rules import FunctionRule
from equifed.models.losses import cross_entropy
from equifed.runs.config import RunConfig

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_KNOWN", {})


def images() -> ef.Federation:
    return classification([6, 4, 5], (1, 6, 6), 3, dtype=np.float32)


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))


def slow_down(monkeypatch: pytest.MonkeyPatch, engine: type) -> None:
    """Let an engine's gradients take long."""
    method = engine.value_and_gradient  # type: ignore[attr-defined]

    def sleepy(self: object, *arguments: object) -> object:
        time.sleep(0.3)
        return method(self, *arguments)

    monkeypatch.setattr(engine, "value_and_gradient", sleepy)


def test_a_process_of_a_group_measures_on_the_clients_that_it_holds() -> None:
    """The others stay in its part of the data, empty."""
    shard = cut_shard(images(), np.array([False, False, True]))
    told = ef.simulate(shard, network(), cross_entropy).choice
    assert told is not None and "gradients of 1 clients" in told


@pytest.mark.parametrize(
    ("slow", "kept"), [(StackedClients, LoopClients), (LoopClients, StackedClients)]
)
def test_auto_leaves_what_is_slow(slow: type, kept: type, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch, slow)
    clients = ef.simulate(images(), network(), cross_entropy)
    assert type(clients) is kept
    history = ef.train(ef.FedAvg(ef.LocalSGD(lr=0.1, steps=1)), clients, rounds=1, progress=False)
    (note,) = [e["reason"] for e in history.events if str(e.get("reason")).startswith("engine:")]
    assert "3 clients" in note
    assert (clients.traffic.down > 0).all()


def test_measuring_is_no_exchange() -> None:
    clients = ef.simulate(images(), network(), cross_entropy)
    assert clients.traffic.down.sum() == clients.traffic.up.sum() == 0


def test_a_choice_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ef.simulate(images(), network(), cross_entropy)

    def fail(*arguments: object) -> None:
        raise AssertionError("measured again")

    with monkeypatch.context() as patched:
        patched.setattr(choose, "measure", fail)
        again = ef.simulate(images(), network(), cross_entropy)
        assert type(again) is type(first)
        assert again.choice == first.choice is not None
        with pytest.raises(AssertionError, match="measured again"):  # another shape of data
            ef.simulate(classification([9] * 9, (1, 6, 6), 3), network(), cross_entropy)


def test_fully_connected_models_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "measure", None)
    clients = ef.simulate(ef.load("fashion-three"), "mlp")
    assert isinstance(clients, StackedClients)
    assert clients.choice is None


def test_a_run_writes_the_choice_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        "rounds": 2,
        "data": {"name": "fashion-three", "train": 6, "test": 4},
        "model": {"name": "cnn", "channels": [2], "kernel": 3, "hidden": 4},
        "algorithm": {"name": "fedavg", "local": {"lr": 0.1, "steps": 1}},
    }
    slow_down(monkeypatch, StackedClients)
    ef.run(config, tmp_path / "run", progress=False)
    monkeypatch.undo()
    stored = RunConfig.read(tmp_path / "run" / "config.toml")
    assert stored.engine["name"] == "loop"
    assert ef.run(stored, progress=False).rounds[-1].objective == pytest.approx(
        ef.run(config, progress=False).rounds[-1].objective
    )


def test_threads_do_not_change_a_bit() -> None:
    """Each thread has a module of its own; with one module, they would mix clients up."""
    data = classification([5] * 12, (1, 6, 6), 3, dtype=np.float32)
    module = nn.Sequential(network()[:2], nn.Dropout(0.3), *network()[2:])
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            clients = LoopClients(data, module, cross_entropy, init="given")
            x, work = clients.flatten(module), ef.LocalSGD(lr=0.2, steps=3, batch_size=2)
            moved = clients.local_steps(x, work, Stream(0)).displacement
            losses, gradients = clients.value_and_gradient(x, Stream(0))
            results.append((moved.matrix, gradients.matrix, torch.as_tensor(losses)))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for one, four in zip(*results, strict=True):
        assert torch.equal(one, four)


def test_choices_on_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first engine stays unless another is clearly faster."""
    data, module = images(), network()
    stacked = StackedClients(data, module, cross_entropy)
    loop = LoopClients(data, module, cross_entropy)
    x = stacked.flatten(module)
    for seconds, name in ((0.98, "stacked"), (0.9, "loop")):
        told = {"stacked": 1.0, "loop": seconds}
        monkeypatch.setattr(choose, "measure", lambda *_, told=told: told)
        choose._KNOWN.clear()
        assert choose.choose_faster(stacked, loop, x).engine == name


def test_what_cannot_be_compiled_is_computed_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(function: object, **options: object) -> object:
        def compiled(*arguments: object, **named: object) -> None:
            raise RuntimeError("no rule for this")

        return compiled

    monkeypatch.setattr(torch, "compile", refuse)
    data, module = images(), network()
    compiled = ef.simulate(data, module, cross_entropy, compiled=True)
    plain = ef.simulate(data, module, cross_entropy, engine="stacked")
    x, work = plain.flatten(module), ef.LocalSGD(lr=0.1, steps=2, batch_size=2)
    with pytest.warns(UserWarning, match="cannot be compiled .no rule for this"):
        ours = compiled.local_steps(x, work, Stream(0)).displacement
    theirs = plain.local_steps(x, work, Stream(0)).displacement
    assert torch.equal(ours.matrix, theirs.matrix)


def test_step_sizes_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be constants of a program, and another one would be made for every size."""
    calls: list[int] = []

    def compile_(function: Callable[..., object], **options: object) -> Callable[..., object]:
        def compiled(*arguments: object, **named: object) -> object:
            assert not named and not any(isinstance(one, float) for one in arguments)
            calls.append(len(arguments))
            return function(*arguments)

        return compiled

    monkeypatch.setattr(torch, "compile", compile_)
    data, module = images(), network()
    compiled = ef.simulate(data, module, cross_entropy, compiled=True)
    plain = ef.simulate(data, module, cross_entropy, engine="stacked")
    x = plain.flatten(module)
    for lr in (0.1, 0.05, 0.02):
        work = ef.LocalSGD(lr=lr, steps=2, batch_size=2)
        ours, theirs = (c.local_steps(x, work, Stream(0)).displacement for c in (compiled, plain))
        assert torch.equal(ours.matrix, theirs.matrix)
    assert len(calls) > 3


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A compiler on a clock of its own, and what a gradient takes, plain and compiled."""
    told = {"plain": 0.2, "compiled": 0.1, "now": 0.0}

    def compile_(function: Callable[..., object], **options: object) -> Callable[..., object]:
        def compiled(*arguments: object) -> object:
            told["now"] += told["compiled"] - told["plain"]  # what the function itself adds
            return function(*arguments)

        return compiled

    compute = FunctionRule.compute

    def timed(self: FunctionRule, *arguments: object) -> object:
        told["now"] += told["plain"]
        return compute(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(FunctionRule, "compute", timed)
    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr("equifed.engines.stacked.clients.WHERE", ("cpu",))
    monkeypatch.setattr(compiling.time, "perf_counter", lambda: told["now"])
    return told


@pytest.mark.parametrize(
    ("rounds", "compiled", "said"),
    [
        (20, 0.1, "not compiled: the 16 exchanges to come take 6.4 s, compiling 1"),
        (200, 0.1, "compiled in 0.2 s: 200 ms an exchange, 400 without."),
        (200, 0.3, "compiled in 0.6 s and left again: 600 ms an exchange, 400 without."),
    ],
)
def test_auto_compiles_what_pays(
    rounds: int, compiled: float, said: str, compiler: dict[str, float]
) -> None:
    compiler["compiled"] = compiled
    module, work = network(), ef.LocalSGD(lr=0.1, steps=2, batch_size=3)
    clients = ef.simulate(images(), module, cross_entropy, engine="stacked")
    history = ef.train(ef.FedAvg(work), clients, rounds=rounds, progress=False)
    told = [event["reason"] for event in history.events if event["event"] == "note"]
    assert [note for note in told if f"Gradients on the GPU: {said}" in note], told
    plain = ef.simulate(images(), module, cross_entropy, engine="stacked", compiled=False)
    again = ef.train(ef.FedAvg(work), plain, rounds=rounds, progress=False)
    for one, other in zip(history.parameters.values(), again.parameters.values(), strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def test_changing_clients_are_not_compiled_for(compiler: dict[str, float]) -> None:
    clients = ef.simulate(images(), network(), cross_entropy, engine="stacked")
    work, x = ef.LocalSGD(lr=0.1, epochs=1, batch_size=3), clients.flatten(network())
    clients.expect(None, 10_000, Stream(0))
    for r in range(8):
        clients.subset(range(1 + r % 3)).local_steps(x, work, Stream(r))
    told = [note for _, note in clients.take_notes()]
    assert told == ["Gradients on the GPU: not compiled: the clients of an exchange change."]


def test_engines_are_freed_at_once(compiler: dict[str, float]) -> None:
    """A cycle would keep the memory of a GPU until the collector comes."""
    clients = StackedClients(images(), network(), cross_entropy)
    assert clients.trial is not None
    gone, there = weakref.ref(clients), gc.isenabled()
    gc.disable()
    try:
        del clients
        assert gone() is None
    finally:
        gc.enable() if there else None
