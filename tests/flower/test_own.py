"""Own parts on a federation: they stay on the sites' disks, and training is that of the loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from tests.flower.grid import (
    QUICK,
    convex,
    flower_clients,
    memory_grid,
    task,
)

from equifed.algorithms.fedavg import FedAvg
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.algorithms.scaffold import Scaffold
from equifed.contract.clients import MissingClients
from equifed.contract.evaluation import SPLITS
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.engines.loop import LoopClients
from equifed.flower.memory import Memory
from equifed.flower.messenger import SecureSums
from equifed.flower.node import describe_reply
from equifed.flower.task import Task
from equifed.flower.wire import Reply, Request
from equifed.models.losses import outputs_for
from equifed.objectives import ChiSquare
from equifed.steps.schedules import ConstantSteps
from equifed.training.folder import RunFolder
from equifed.training.loop import train
from equifed.training.play_round import MissingPolicy

pytestmark = pytest.mark.long

MINI = LocalSGD(lr=0.1, steps=3, batch_size=5)
FULL = LocalSGD(lr=0.1, steps=3)
CASES: dict[str, tuple[Any, str, Any]] = {
    "fedavg/joint": ("bias", "joint", FedAvg(MINI)),
    "scaffold/alternating": ("head", "alternating", Scaffold(MINI, participation=0.5)),
    "scaff-pd/joint": ("bias", "joint", ScaffPD(ChiSquare(0.5), MINI, ConstantSteps(0.4, 0.5))),
    "fedavg/profile": ("bias", "profile", FedAvg(FULL)),
    "scaff-pd/profile": ("bias", "profile", ScaffPD(ChiSquare(0.5), FULL, ConstantSteps(0.4, 0.5))),
}
HIDDEN: dict[str, Any] = {"none": lambda: None, "secure": SecureSums}


def own_task(own: str, steps: Any) -> Task:
    model, options = ("mlp", {"hidden": (4,)}) if own == "head" else ("logistic", {})
    return replace(task(model, **options), own=own, own_steps=steps)


def loop(federation: Any, the_task: Task) -> LoopClients:
    module = the_task.model(federation.input_shape, outputs_for(federation, the_task.loss))
    return LoopClients(
        federation, module, the_task.loss, l2=the_task.l2, dtype=torch.float64, init="fresh",
        own=the_task.own, own_steps=the_task.own_steps,
    )  # fmt: skip


def on_disk(root: Path, n: int = 4, run: str = "test") -> np.ndarray[Any, Any]:
    """Return the own parts that the sites have at last."""
    parts = [Memory(root, run, f"client-{i}").own_before(1 << 60) for i in range(n)]
    return np.stack([part for part in parts if part is not None])


def equal(found: Any, expected: Any, atol: float = 1e-9) -> None:
    assert found.parameters is not None and expected.parameters is not None
    own = set(expected.own or {})
    assert set(found.parameters) == set(expected.parameters) - own
    for name, value in found.parameters.items():
        torch.testing.assert_close(value, expected.parameters[name], rtol=0, atol=atol)
    for a, b in zip(found.metrics, expected.metrics, strict=True):
        assert (a.round, a.split, a.metric) == (b.round, b.split, b.metric)
        np.testing.assert_allclose(a.values, b.values, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("name", "privacy"),
    [(name, "none") for name in CASES]
    + [(name, "secure") for name in ("scaffold/alternating", "fedavg/joint", "fedavg/profile")],
)
def test_training_is_that_of_the_loop_engine(name: str, privacy: str, tmp_path: Path) -> None:
    own, steps, algorithm = CASES[name]
    federation, the_task = convex(6), own_task(own, steps)
    expected = train(algorithm, loop(federation, the_task), rounds=4, seed=3, evaluate=SPLITS)
    grid = memory_grid(federation, the_task, tmp_path)
    clients = flower_clients(grid, the_task, hidden=HIDDEN[privacy]())
    found = train(algorithm, clients, rounds=4, seed=3, evaluate=SPLITS)
    equal(found, expected)
    told = [e["reason"] for e in found.events if e["event"] == "note"]
    assert any("which stay at the sites" in text for text in told)
    if steps != "profile":
        assert expected.own is not None
        kept = torch.cat([v.reshape(6, -1) for v in expected.own.values()], dim=1).numpy()
        np.testing.assert_allclose(on_disk(tmp_path, 6), kept, atol=1e-9)


def find_bytes(messages: list[Message], parts: np.ndarray[Any, Any]) -> list[str]:
    """Return where a number of an own part is: as bytes of an array, or as a number in words."""
    found, wanted = [], {value.tobytes() for value in parts.ravel()}
    for message in messages:
        reply = Reply.from_records(message.content)
        for name, array in reply.arrays.items():
            words = np.ascontiguousarray(array).view(np.uint8).reshape(-1, 8)
            found += [f"{reply.op} {name}" for word in words if word.tobytes() in wanted]
        found += [
            f"{reply.op} text" for value in parts.ravel() if repr(value) in str(reply.numbers)
        ]
    return found


@pytest.mark.parametrize("privacy", HIDDEN)
@pytest.mark.parametrize("name", ["fedavg/joint", "scaffold/alternating"])
def test_no_byte_of_an_own_part_leaves_a_site(name: str, privacy: str, tmp_path: Path) -> None:
    own, steps, algorithm = CASES[name]
    the_task, parts = own_task(own, steps), []
    grid = memory_grid(convex(), the_task, tmp_path)
    clients = flower_clients(grid, the_task, hidden=HIDDEN[privacy]())
    keep = Memory.keep_own

    def watch(memory: Memory, round: int, part: np.ndarray[Any, Any]) -> None:
        parts.append(part)
        keep(memory, round, part)

    Memory.keep_own = watch  # type: ignore[method-assign]
    try:
        wide = replace(algorithm, participation=1.0)
        history = train(wide, clients, rounds=4, evaluate=SPLITS)
    finally:
        Memory.keep_own = keep  # type: ignore[method-assign]
    stack = np.stack(parts)
    assert len(parts) == 16 and (stack != 0).all()  # four sites, four rounds
    assert find_bytes(grid.received, stack) == []
    shared, all_of_it = clients.model.size, clients.model.size + clients.model.own_size
    for message in grid.received:  # what the audit log has of it
        for array in describe_reply(message).get("arrays", {}).values():
            assert array["shape"] == [shared] != [all_of_it]
    assert history.own is None
    leak = Reply("local", "r", "t", {}, {"displacement": stack[0]})  # the search can find
    assert find_bytes([Message(leak.to_records(), 1, "train.local")], stack)


def test_a_resumed_run_equals_one_that_was_never_interrupted(tmp_path: Path) -> None:
    own, steps, algorithm = CASES["fedavg/joint"]
    federation, the_task = convex(), own_task(own, steps)
    whole = train(algorithm, loop(federation, the_task), rounds=6, seed=3, evaluate=SPLITS)
    grid = memory_grid(federation, the_task, tmp_path / "memory")
    clients = flower_clients(grid, the_task)
    folder = RunFolder(tmp_path / "run", clients.names)
    folder.create()
    train(algorithm, clients, rounds=3, seed=3, evaluate=SPLITS, folder=folder)
    # A server that had gone on to round 5, and whose checkpoint is that of round 3.
    ahead = flower_clients(grid, the_task)
    x = ahead.initial(Stream(3).at("initial"))
    for r in (4, 5):
        ahead.local_steps(x, MINI, Stream(9).at("round", r, "local"))
    again = flower_clients(grid, the_task)
    folder = RunFolder(tmp_path / "run", again.names)
    found = train(algorithm, again, rounds=6, seed=3, evaluate=SPLITS, folder=folder, resume=True)
    equal(found, whole)


def test_a_lost_node_keeps_its_part(tmp_path: Path) -> None:
    own, steps, algorithm = CASES["fedavg/joint"]
    the_task = own_task(own, steps)
    grid = memory_grid(convex(), the_task, tmp_path)
    patient = replace(QUICK, on_missing="continue", quorum=0.5)
    clients, seen = flower_clients(grid, the_task, patient), []
    gone = clients.mailbox.nodes[2]
    starts: list[Any] = []

    def leave(partition: int, request: Message, reply: Message) -> list[Message]:
        told = Request.from_records(request.content)
        round = int(told.args.get("round", 0))
        if told.op == "local":
            seen.append((round, partition))
            starts.append((round, on_disk(tmp_path)[2] if round > 2 else None))
            if round == 2:
                grid.offline.add(gone)
            if round == 4:
                grid.offline.discard(gone)
        return [reply]

    grid.tamper = leave
    train(algorithm, clients, rounds=6, missing=MissingPolicy("continue", 0.5))
    rounds = [r for r, i in seen if i == 2]
    assert 3 not in rounds and 6 in rounds
    parts = [part for r, part in starts if r == 3]
    assert len(parts) == 3 and all((part == parts[0]).all() for part in parts)  # untouched
    assert Memory(tmp_path, "test", "client-2").own_before(3) is not None


def test_a_site_that_lost_its_disk_starts_from_the_drawn_part(tmp_path: Path) -> None:
    own, steps, _ = CASES["fedavg/joint"]
    the_task = own_task(own, steps)
    federation = convex()
    grid = memory_grid(federation, the_task, tmp_path)
    clients = flower_clients(grid, the_task)
    x = clients.initial(Stream(3).at("initial"))
    expected = loop(federation, the_task)
    expected.initial(Stream(3).at("initial"))
    np.testing.assert_allclose(
        clients.losses(x, Stream(3).at("round", 5, "losses")),
        expected.losses(x, Stream(3).at("round", 5, "losses")),
        atol=1e-12,
    )


def test_other_own_parts_are_another_model() -> None:
    federation = convex(1)
    marks = set()
    for own, steps in (("bias", "joint"), ("bias", "alternating"), ("bias", "profile"), (None, "")):
        the_task = task() if own is None else own_task(own, steps)
        marks.add(the_task.fingerprint(the_task.build_engine(federation)))
    assert len(marks) == 4


def test_a_damaged_own_part_is_told_and_not_replaced(tmp_path: Path) -> None:
    the_task = own_task("bias", "joint")
    clients = flower_clients(memory_grid(convex(), the_task, tmp_path), the_task)
    x = clients.initial(Stream(3).at("initial"))
    clients.local_steps(x, MINI, Stream(3).at("round", 1, "local"))
    memory = Memory(tmp_path, "test", "client-2")
    for file in memory.folder.glob("*.vector"):
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(MissingClients, match="own part of round 1 is missing or damaged") as caught:
        clients.losses(x, Stream(3).at("round", 2, "losses"))
    assert list(caught.value.reasons) == [2]
