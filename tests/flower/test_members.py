"""The first hello: order, versions, schemas, models, and who is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from tests.flower.grid import (
    QUICK,
    MemoryGrid,
    convex,
    flower_clients,
    loop_clients,
    memory_grid,
    task,
)

from equifed.data import DataError
from equifed.flower import handshake
from equifed.flower.client import make_client_app
from equifed.flower.members import StartError, gather
from equifed.flower.participant import to_federation
from equifed.flower.task import Task
from equifed.flower.wire import PROTOCOL, Reply
from equifed.models.losses import cross_entropy

pytestmark = pytest.mark.long


@pytest.fixture
def grid(tmp_path: Path) -> MemoryGrid:
    return memory_grid(convex(), task(), tmp_path)


def hello(change: Callable[[dict[str, Any]], Any], client: int = 2) -> Any:
    """Change what one client says of itself."""

    def tamper(partition: int, request: Message, reply: Message) -> list[Message]:
        told = Reply.from_records(reply.content)
        if partition == client:
            change(told.numbers)
        return [Message(told.to_records(), reply_to=request)]

    return tamper


def test_clients_are_in_the_order_of_their_partitions(grid: MemoryGrid) -> None:
    clients, loop = flower_clients(grid, task()), loop_clients(convex(), task())
    assert clients.names == loop.names
    np.testing.assert_array_equal(clients.sizes, loop.sizes)


def test_without_partitions_they_are_in_the_order_of_their_names(tmp_path: Path) -> None:
    federation = convex(3)
    names = ["west", "north", "east"]

    def load(context: Context) -> Any:
        x, y = federation.train.client(names.index(str(context.node_config["name"])))
        return x, y

    apps = {i: make_client_app(load, task(), classes=3, memory=tmp_path) for i in range(3)}
    grid = MemoryGrid(apps, {i: {"name": name} for i, name in enumerate(names)})
    clients = flower_clients(grid, task())
    assert clients.names == ("east", "north", "west")
    assert clients.sizes.tolist() == [12 + 5 * 2, 12 + 5, 12]


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "version": (
        lambda n: n["versions"].update(equifed="0.0.7"),
        r"The server has equifed .*, but client-2 has 0\.0\.7; install the same minor version",
    ),
    "shape": (
        lambda n: n["schema"].update(input_shape=[9]),
        r"client-0 and client-2 have different data: input_shape is \(5,\) and \(9,\)",
    ),
    "classes": (
        lambda n: n["schema"].update(classes=2),
        "client-0 and client-2 have different data: classes is 3 and 2",
    ),
    "model": (lambda n: n.update(model="another"), "client-2 built another model than the server"),
    "name": (lambda n: n.update(name="client-1"), "Two nodes have the name 'client-1'"),
    "nonsense": (lambda n: n.pop("sizes"), "client-2: the hello is incomplete"),
    "no samples": (lambda n: n["sizes"].update(train=0), "client-2: the hello names no samples"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_client_that_does_not_fit_is_named(case: str, grid: MemoryGrid) -> None:
    change, message = WRONG[case]
    grid.tamper = hello(change)
    with pytest.raises(StartError, match=message):
        flower_clients(grid, task())


def test_accents_in_two_ways_are_one_name() -> None:
    said = {i: Mock(partition=None) for i in range(3)}
    for i, name in enumerate(["Orl\u00e9ans", "Orle\u0301ans", "west"]):
        said[i].name = name
    with pytest.raises(StartError, match="Two nodes have the name 'Orl\u00e9ans'"):
        handshake.sort_nodes(said, None)


def test_another_protocol_is_named(grid: MemoryGrid) -> None:
    def tamper(partition: int, request: Message, reply: Message) -> list[Message]:
        if partition == 1:
            record = reply.content.config_records["equifed"]
            record["header"] = str(record["header"]).replace(
                f'"protocol": {PROTOCOL}', f'"protocol": {PROTOCOL - 1}'
            )
        return [reply]

    grid.tamper = tamper
    with pytest.raises(StartError, match=f"the client speaks version {PROTOCOL - 1} of the mess"):
        flower_clients(grid, task())


def test_missing_nodes_are_waited_for_and_then_reported(grid: MemoryGrid) -> None:
    with pytest.raises(StartError, match="5 clients are expected, 4 nodes are connected"):
        gather(grid, task(), replace(QUICK, wait=0.05), "run", 5)
    node, looks = next(iter(grid.get_node_ids())), iter(range(100))
    grid.offline.add(node)
    nodes = grid.get_node_ids

    def later() -> Any:
        if next(looks) > 2:
            grid.offline.clear()
        return nodes()

    grid.get_node_ids = later  # type: ignore[method-assign]
    assert len(flower_clients(grid, task(), replace(QUICK, wait=5.0)).names) == 4


def test_a_node_that_does_not_answer_at_the_start_is_told_at_once(
    grid: MemoryGrid, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that is frozen is connected for a minute, and used to be waited for in silence."""
    monkeypatch.setattr(handshake, "AT_ONCE", 0.0)
    grid.tamper = lambda partition, request, reply: [] if partition == 2 else [reply]
    with pytest.raises(StartError, match="no answer"):
        flower_clients(grid, task(), replace(QUICK, timeout=0.1, wait=0.3))
    line, *_ = capsys.readouterr().out.splitlines()
    told = "equifed: waiting for 4 sites, 4 connected: client-0, client-1, client-3, node "
    assert line.startswith(told) and line.endswith(" (no answer yet)")


def test_a_resumed_run_keeps_its_order_and_its_clients(grid: MemoryGrid) -> None:
    order = ["client-3", "client-1", "client-0", "client-2"]
    _, members = gather(grid, task(), QUICK, "run", 4, order)
    assert list(members.names) == order
    with pytest.raises(StartError, match=r"missing \['gone'\], new \['client-2'\]"):
        gather(grid, task(), QUICK, "run", 4, [*order[:3], "gone"])


def test_a_client_that_returns_with_other_data_stays_a_stranger(grid: MemoryGrid) -> None:
    clients = flower_clients(grid, task())
    before = clients.mailbox.nodes[1]
    grid.apps[77], context = grid.apps.pop(before), grid.contexts.pop(before)
    grid.contexts[77] = Context(1, 77, context.node_config, context.state, {})
    grid.tamper = hello(lambda n: n["sizes"].update(train=99), client=1)
    assert clients.mailbox.find_absent(range(4)) == {1} and clients.mailbox.nodes[1] == before
    (event,) = clients.members.events
    assert (event["event"], event["client"]) == ("left out", "client-1")
    assert "it came back with" in event["reason"] and "99" in event["reason"]


def test_a_newcomer_waits_for_the_place_of_the_client_whose_name_it_has(grid: MemoryGrid) -> None:
    clients = flower_clients(grid, task())
    before = clients.mailbox.nodes[1]
    grid.apps[77], config = grid.apps[before], grid.contexts[before].node_config
    grid.contexts[77] = Context(1, 77, config, RecordDict(), {})
    assert clients.mailbox.find_absent(range(4)) == set() and clients.mailbox.nodes[1] == before
    grid.offline.add(before)
    assert clients.mailbox.find_absent(range(4)) == set() and clients.mailbox.nodes[1] == 77
    assert not clients.members.events


# -- what load_data may return ----------------------------------------------------------------


class Samples:
    """A dataset object."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, k: int) -> tuple[Any, int]:
        return np.full(3, float(k)), k % 2


def test_load_data_may_return_pairs_mappings_datasets_and_federations() -> None:
    x, y = np.ones((4, 3)), np.array([0, 1, 0, 1])
    assert to_federation((x, y), "a").names == ("a",)
    held = to_federation({"train": (x, y), "test": Samples()}, "a", classes=3)
    assert held.test is not None and len(held.test) == 4 and held.classes == 3
    assert to_federation(Samples(), "a").train.inputs[2].tolist() == [2.0, 2.0, 2.0]
    one = convex().subset([2])
    assert to_federation(one, "a") is one


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (convex(2), "the data of one client, got a federation of 2"),
        ({"test": ((), ())}, "a mapping with 'train'"),
        (7, "expected a pair .X, y., got int"),
    ],
)
def test_load_data_that_returns_anything_else_is_told_so(value: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        to_federation(value, "a")


def test_a_task_chooses_the_loss_by_the_kind_of_target() -> None:
    auto = Task(task().model, "auto", dtype="float64")
    assert auto.build_engine(convex().subset([0])).model.loss is cross_entropy
