"""A Flower grid in memory with real ``ClientApp`` objects; the one place that touches internals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from equifed.data.federation import Federation
from equifed.engines.loop import LoopClients
from equifed.flower.client import make_client_app
from equifed.flower.mailbox import Deadlines
from equifed.flower.members import gather
from equifed.flower.messenger import SecureSums
from equifed.flower.server import FlowerClients
from equifed.flower.task import Task
from equifed.models import architectures as models
from equifed.models.losses import outputs_for

# ``Message(...)`` reads these; an engine sets them, a test has to.
TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1

Tamper = Callable[[int, Message, Message], list[Message]]
"""Gets the partition, the request and the honest reply; returns what arrives instead."""

QUICK = Deadlines(timeout=0.3, grace=0.05, wait=0.6, pause=0.01, poll=0.002)


class MemoryGrid(Grid):
    """Delivers at once; replies can be tampered with, nodes can be cut off and messages counted."""

    def __init__(self, apps: dict[int, ClientApp], configs: dict[int, dict[str, Any]]) -> None:
        self.apps = apps
        self.contexts = {
            node: Context(1, node, dict(config), RecordDict(), {})
            for node, config in configs.items()
        }
        self.offline: set[int] = set()
        self.tamper: Tamper | None = None
        self.sent: list[Message] = []
        self.received: list[Message] = []
        self._mail: dict[str, list[Message]] = {}

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, *args: Any, **kwargs: Any) -> Iterable[Message]:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        # Shuffled: nothing may depend on the order of nodes.
        return [n for n in sorted(self.apps, key=lambda n: n * 7919 % 13) if n not in self.offline]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"m{len(self.sent)}"
            ids.append(message.metadata.message_id)
            self.sent.append(message)
            self._mail[message.metadata.message_id] = self._delivered(message)
        return ids

    def _delivered(self, message: Message) -> list[Message]:
        node = message.metadata.dst_node_id
        if node in self.offline:
            # As a SuperLink answers for a node that is gone: the sender is not that node.
            return [Message(Error(5, "Node Unavailable"), reply_to=message)]
        try:
            reply = self.apps[node](message, self.contexts[node])
        except Exception as error:
            reply = Message(Error(2, f"{error}"), reply_to=message)
        if self.tamper is None:
            return [reply]
        partition = int(self.contexts[node].node_config.get("partition-id", -1))
        return self.tamper(partition, message, reply)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        # Last come, first served: nothing may depend on the order of replies.
        found = [m for i in reversed(list(message_ids)) for m in self._mail.pop(i, [])]
        self.received += found
        return found


def convex(
    clients: int = 4, seed: int = 0, d: int = 5, classes: int = 3, names: str = "client-{}"
) -> Federation:
    """Return clients of different sizes with different distributions, and test samples."""
    rng = np.random.default_rng(seed)
    train, test = {}, {}
    for i in range(clients):
        m = 12 + 5 * i
        x = rng.normal(size=(m + 6, d)) + rng.normal(size=d)
        y = (np.abs(x @ rng.normal(size=d)) * classes / 2).astype(np.int64) % classes
        y[:classes] = np.arange(classes)
        train[names.format(i)] = (x[:m], y[:m])
        test[names.format(i)] = (x[m:], y[m:])
    return Federation.from_clients(train, test=test, classes=classes)


def task(model: str = "logistic", dtype: str = "float64", **options: Any) -> Task:
    def build(shape: tuple[int, ...], outputs: int) -> Any:
        return models.build(model, shape, outputs, **options)

    return Task(build, "cross_entropy", l2=1e-3, dtype=dtype)  # type: ignore[arg-type]


def loop_clients(federation: Federation, the_task: Task) -> LoopClients:
    """Return the reference engine for the same task."""
    module = the_task.model(federation.input_shape, outputs_for(federation, the_task.loss))
    dtype = getattr(torch, the_task.dtype)
    return LoopClients(federation, module, the_task.loss, l2=the_task.l2, dtype=dtype)


def memory_grid(federation: Federation, the_task: Task, root: Path, **config: Any) -> MemoryGrid:
    """Return a grid with one node per client; the nodes' ids say nothing about their order."""
    n = len(federation)

    def load(context: Context) -> Federation:
        return federation.subset([int(context.node_config["partition-id"])])

    nodes = {i: 1000 + (i * 37) % 101 for i in range(n)}
    apps = {nodes[i]: make_client_app(load, the_task, memory=root) for i in range(n)}
    configs = {nodes[i]: {"partition-id": i, **config} for i in range(n)}
    return MemoryGrid(apps, configs)


def flower_clients(
    grid: MemoryGrid,
    the_task: Task,
    deadlines: Deadlines = QUICK,
    hidden: SecureSums | None = None,
    run: str = "test",
) -> FlowerClients:
    mailbox, members = gather(grid, the_task, deadlines, run, len(grid.apps))
    return FlowerClients(mailbox, members, hidden)
