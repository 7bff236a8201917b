"""Who takes part: the first hello, and finding a client again that came back as another node."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from flwr.serverapp import Grid

from equifed.contract.arrays import Index
from equifed.flower.deadlines import Deadlines
from equifed.flower.mailbox import HEADER_SHARE, Failure, Mailbox
from equifed.flower.task import OneClient, Schema, Task
from equifed.flower.wire import PARTS, Reply, Request, WireError
from equifed.training.versions import package_versions

HELLO_SECONDS = 60.0
"""How long a node that came later may take to say hello."""


LARGEST_SIZE = 1 << 48
"""Samples of a split that a client can say it has."""

ROOM = 1 << 21
"""Bytes of a reply besides its vectors."""


class StartError(RuntimeError):
    """The federation cannot start, or a client does not fit into it; says who, why, what to do."""


@dataclass(frozen=True)
class Hello:
    """What a client says of itself."""

    name: str
    partition: int | None
    versions: dict[str, str]
    sizes: dict[str, int]
    schema: Schema
    model: str
    key: bytes
    signature: str = ""

    @classmethod
    def from_reply(cls, reply: Reply) -> Hello:
        """Read a reply, or raise :class:`WireError`."""
        n = reply.numbers
        try:
            sizes = {str(k): int(v) for k, v in n["sizes"].items()}
            hello = cls(
                str(n["name"]),
                None if n["partition"] is None else int(n["partition"]),
                {str(k): str(v) for k, v in n["versions"].items()},
                sizes,
                Schema.from_dict(n["schema"]),
                str(n["model"]),
                bytes.fromhex(n["key"]),
                str(n.get("signature", ""))[:1000],
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise WireError("the hello is incomplete") from None
        if sizes.get("train", 0) < 1 or not hello.name or len(hello.name) > 200:
            raise WireError("the hello names no samples, or no client")
        if not all(0 <= size <= LARGEST_SIZE for size in sizes.values()):
            raise WireError("the hello names a number of samples that nobody has")
        return hello

    def is_current(self) -> bool:
        """Tell whether the client has the minor version of equifed that runs here."""
        own = package_versions(["equifed"])["equifed"]
        return self.versions.get("equifed", "?").split(".")[:2] == own.split(".")[:2]


@dataclass
class Members:
    """The clients of a run, in a fixed order.

    Attributes
    ----------
    run : str
        Identity of the equifed run.
    names : tuple of str
        Clients in order: by partition where every client has one, else by name.
    hellos : list of Hello
        What each of them said.
    engine : OneClient
        The model, built on the server from the clients' common schema.
    """

    run: str
    task: Task
    hellos: list[Hello]
    engine: OneClient
    strangers: set[int] = field(default_factory=set)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the clients in order."""
        return tuple(hello.name for hello in self.hellos)

    @property
    def sizes(self) -> Index:
        """Training samples of every client."""
        return np.array([hello.sizes["train"] for hello in self.hellos], dtype=np.int64)

    @property
    def keys(self) -> list[bytes]:
        """Public key of every client, for pairwise masks."""
        return [hello.key for hello in self.hellos]

    def find(self, mailbox: Mailbox, connected: set[int]) -> None:
        """Greet nodes that were not there before: a client that was restarted may be among them."""
        new = sorted(connected - set(mailbox.nodes.values()) - self.strangers)
        if not new:
            return
        deadlines = replace(mailbox.deadlines, on_missing="fail", timeout=HELLO_SECONDS)
        hellos, _ = greet(mailbox.grid, deadlines, self.run, new)
        self.strangers |= set(new) - set(hellos)
        for node, hello in hellos.items():
            if hello.name not in self.names or not self._fits(hello):
                self.strangers.add(node)
                continue
            i = self.names.index(hello.name)
            if mailbox.nodes.get(i) not in connected:
                mailbox.nodes[i], self.hellos[i] = node, hello

    def _fits(self, hello: Hello) -> bool:
        """Tell whether a client that came back has the data and software that it left with."""
        old = self.hellos[self.names.index(hello.name)]
        same = ("schema", "model", "sizes")
        return all(getattr(hello, key) == getattr(old, key) for key in same) and hello.is_current()


def gather(
    grid: Grid,
    task: Task,
    deadlines: Deadlines,
    run: str,
    clients: int,
    order: Sequence[str] | None = None,
) -> tuple[Mailbox, Members]:
    """Wait for the clients, greet them, and check that they fit together.

    Parameters
    ----------
    grid : Grid
        Flower's connection.
    task : Task
        Model and loss.
    deadlines : Deadlines
        ``wait`` bounds the time until all clients are there.
    run : str
        Identity of the run.
    clients : int
        How many clients the federation has.
    order : sequence of str, optional
        Names in the order of an earlier part of the same run.
    """
    hellos = _greet_all(grid, deadlines, run, clients)
    nodes = _sort_nodes(hellos, order)
    listed = [hellos[node] for node in nodes]
    _check_versions(listed)
    _check_schemas(listed)
    engine = task.build_engine(listed[0].schema.make_placeholder())
    _check_models(listed, task.fingerprint(engine))
    mailbox, members = Mailbox(grid, deadlines, len(listed)), Members(run, task, listed, engine)
    mailbox.nodes = dict(enumerate(nodes))
    mailbox.largest = (len(PARTS) + 1) * 8 * engine.model.size + ROOM + HEADER_SHARE * len(listed)
    mailbox.find = lambda connected: members.find(mailbox, connected)
    return mailbox, members


def greet(
    grid: Grid, deadlines: Deadlines, run: str, nodes: Sequence[int]
) -> tuple[dict[int, Hello], dict[int, Failure]]:
    """Say hello to nodes; return what they said, and why the others did not."""
    mailbox = Mailbox(grid, deadlines, len(nodes))
    mailbox.nodes = dict(enumerate(nodes))
    asked = {k: Request("hello", run, f"hello/{node}", -1) for k, node in enumerate(nodes)}
    said: dict[int, Hello] = {}

    def read(k: int, reply: Reply) -> None:
        said[nodes[k]] = Hello.from_reply(reply)

    answers = mailbox.ask(asked, read)
    return said, {nodes[k]: failure for k, failure in answers.failures.items()}


def _greet_all(grid: Grid, deadlines: Deadlines, run: str, clients: int) -> dict[int, Hello]:
    """Greet every node that connects until there are enough clients, or the wait is over."""
    until = time.monotonic() + deadlines.wait
    said: dict[int, Hello] = {}
    failures: dict[int, Failure] = {}
    once = replace(deadlines, on_missing="fail")
    while True:
        connected = set(grid.get_node_ids())
        said = {node: hello for node, hello in said.items() if node in connected}
        new = sorted(connected - set(said))
        if len(connected) >= clients and new:
            more, failures = greet(grid, once, run, new)
            said.update(more)
        hopeless = [f for f in failures.values() if f.kind == "bad" or "data:" in f.reason]
        if len(said) >= clients:
            return said
        if hopeless or time.monotonic() >= until:
            raise StartError(_explain_start(clients, len(connected), said, failures))
        time.sleep(min(max(deadlines.poll, 0.01) * 5, 2.0))


def _explain_start(
    clients: int, connected: int, said: Mapping[int, Hello], failures: Mapping[int, Failure]
) -> str:
    """Say who is missing and why, and what to do about just that."""
    problems = [f"{f.name or f'node {node}'}: {f.reason}" for node, f in failures.items()]
    advice = "Wait for those that did not answer, or raise 'timeout'."
    if connected < clients:
        advice = "Start the missing nodes, or set 'clients' to the number of organisations."
    elif any("data:" in f.reason for f in failures.values()):
        advice = "Repair the data there (equifed flower doctor says what is wrong with them)."
    elif any("refused by the site" in f.reason for f in failures.values()):
        advice = "Install the same app and the same equifed at that site."
    elif any(f.kind == "bad" for f in failures.values()):
        advice = "Install the same equifed everywhere."
    return (
        f"{clients} clients are expected, {connected} nodes are connected and {len(said)} said "
        f"hello ({', '.join(h.name for h in said.values()) or 'none'}). "
        + ("; ".join(problems[:5]) + ". " if problems else "")
        + advice
    )


def _sort_nodes(hellos: Mapping[int, Hello], order: Sequence[str] | None) -> list[int]:
    names = [hello.name for hello in hellos.values()]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise StartError(
            f"Two nodes call themselves {double[0]!r}; give each node its own name with "
            "--node-config 'name=\"...\"'."
        )
    if order is not None:
        gone, new = sorted(set(order) - set(names)), sorted(set(names) - set(order))
        if gone or new:
            raise StartError(
                f"The run to resume had other clients: missing {gone or 'none'}, new "
                f"{new or 'none'}."
            )
        return sorted(hellos, key=lambda node: list(order).index(hellos[node].name))
    partitions = [hello.partition for hello in hellos.values()]
    if None not in partitions and len(set(partitions)) == len(partitions):
        return sorted(hellos, key=lambda node: hellos[node].partition or 0)
    return sorted(hellos, key=lambda node: hellos[node].name)


def _check_versions(hellos: Sequence[Hello]) -> None:
    """Refuse clients with another minor version: their local work may differ."""
    wrong = [h for h in hellos if not h.is_current()]
    if wrong:
        listed = ", ".join(f"{h.name} has {h.versions.get('equifed', '?')[:20]}" for h in wrong)
        raise StartError(
            f"The server has equifed {package_versions(['equifed'])['equifed']}, but {listed}; "
            "install the same minor version everywhere."
        )


def _check_schemas(hellos: Sequence[Hello]) -> None:
    first = hellos[0]
    for other in hellos[1:]:
        if other.schema == first.schema:
            continue
        a, b = first.schema.to_dict(), other.schema.to_dict()
        key = next(key for key in a if a[key] != b[key])
        raise StartError(
            f"{first.name} and {other.name} have different data: {key} is {a[key]} and {b[key]}. "
            "Bring both to the same columns, dtype and number of classes."
        )


def _check_models(hellos: Sequence[Hello], fingerprint: str) -> None:
    wrong = [hello.name for hello in hellos if hello.model != fingerprint]
    if wrong:
        raise StartError(
            f"{', '.join(wrong)} built another model than the server; all parties must run the "
            "same app with the same settings of model, loss, l2 and dtype."
        )
