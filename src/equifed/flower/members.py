"""Who takes part: the first hello, and finding a client again that came back as another node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from flwr.serverapp import Grid

from equifed.contract.arrays import Index
from equifed.data.preparation import Preparation
from equifed.flower.deadlines import Deadlines
from equifed.flower.greeting import greet, greet_all, introduce, sort_nodes
from equifed.flower.hello import (
    Hello,
    StartError,
    check_models,
    check_schemas,
    check_versions,
    describe_difference,
)
from equifed.flower.late import Late
from equifed.flower.mailbox import HEADER_SHARE, Failure, Mailbox
from equifed.flower.task import OneClient, Task
from equifed.flower.wire import PARTS

HELLO_SECONDS = 60.0
"""How long a node that came later may take to say hello."""


ROOM = 1 << 21
"""Bytes of a reply besides its vectors."""


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
    told : dict
        What clients are told with the hello: the plan of the run, and the preparation.
    events : list of dict
        What is to be written down about clients that are not in the run.
    preparation : Preparation, optional
        How the sites' tables became features, where they gave tables.
    outside : int, optional
        Node of a client that was left out on purpose.
    """

    run: str
    task: Task
    hellos: list[Hello]
    engine: OneClient
    told: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    preparation: Preparation | None = None
    outside: int | None = None
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
        hellos, failures = greet(mailbox.grid, deadlines, self.run, new, self.told)
        self.strangers |= set(new) - set(hellos)
        for node, failure in failures.items():
            self.leave_out(failure.name or f"node {node}", failure.reason)
        for node, hello in hellos.items():
            wrong = self._find_difference(hello)
            if wrong:
                self.strangers.add(node)
                self.leave_out(hello.name, wrong)
                continue
            i = self.names.index(hello.name)
            if mailbox.nodes.get(i) not in connected:
                mailbox.nodes[i], self.hellos[i] = node, hello

    def leave_out(self, client: str, reason: str) -> None:
        """Write down that a node takes no part, and why."""
        self.events.append({"event": "left out", "client": client, "reason": reason})

    def note_unusable(self, failures: Mapping[int, Failure]) -> None:
        """Write down whose numbers an evaluation did without because they cannot be used."""
        for i, failure in failures.items():
            if failure.kind == "bad":
                reason = f"its evaluation was not used: {failure.reason}"
                self.events.append({"event": "note", "client": self.names[i], "reason": reason})

    def _find_difference(self, hello: Hello) -> str:
        """Say why a node cannot take the place of a client that is gone; nothing if it can."""
        if hello.name not in self.names:
            return "it is none of the clients of this run; it can take part in the next one"
        old = self.hellos[self.names.index(hello.name)]
        if not hello.is_current():
            return f"it came back with equifed {hello.versions.get('equifed', '?')[:20]}"
        if hello.schema != old.schema:
            return f"it came back with other data. {describe_difference(old, hello)}"
        if hello.sizes != old.sizes:
            return f"it came back with {hello.sizes} samples, and left with {old.sizes}"
        return "" if hello.model == old.model else "it came back with another model"


class FitsTables(Protocol):
    """Fits one preparation for all sites that said hello with tables."""

    totals: dict[str, list[float]]

    def run(self, mailbox: Mailbox, run: str, hellos: Sequence[Hello]) -> Preparation:
        """Return the preparation."""
        ...


def gather(
    grid: Grid,
    task: Task,
    deadlines: Deadlines,
    run: str,
    clients: int,
    order: Sequence[str] | None = None,
    told: Mapping[str, Any] | None = None,
    fit: FitsTables | None = None,
    without: str | None = None,
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
    told : mapping, optional
        What clients are told with the hello: ``plan`` (privacy, requests, local work), which they
        may refuse, and ``preparation``, if the run has one already.
    fit : FitsTables, optional
        How sites that give tables get one preparation.
    without : str, optional
        A client that is left out, to be asked about the model later (``members.outside``).
    """
    told = dict(told or {})
    hellos, failures = greet_all(grid, deadlines, run, clients, told)
    outside = next((node for node, h in hellos.items() if h.name == without), None)
    nodes = [node for node in sort_nodes(hellos, order) if node != outside]
    listed = [hellos[node] for node in nodes]
    check_versions(listed)
    check_schemas(listed)
    mailbox = Mailbox(grid, deadlines, len(listed))
    mailbox.nodes = dict(enumerate(nodes))
    given = told.get("preparation")
    fitted = None if given is None else Preparation.from_json(given)
    if any(hello.table is not None for hello in listed):
        if fit is None:
            raise StartError("The sites give tables, and [data] of the app names no target.")
        fitted = fit.run(mailbox, run, listed)
        told |= {"preparation": fitted.to_json()}
        listed = introduce(mailbox, run, listed, {**told, "totals": fit.totals})
        check_schemas(listed)
    engine = task.build_engine(listed[0].schema.make_placeholder())
    check_models(listed, task.fingerprint(engine))
    members = Members(run, task, listed, engine, told, preparation=fitted, outside=outside)
    members.strangers |= set() if outside is None else {outside}
    for node, failure in failures.items():
        members.leave_out(failure.name or f"node {node}", failure.reason)
    mailbox.largest = (len(PARTS) + 1) * 8 * engine.model.size + ROOM + HEADER_SHARE * len(listed)
    mailbox.find = lambda connected: members.find(mailbox, connected)
    late = Late(mailbox, run, members.events)
    mailbox.look = lambda connected: late.look(connected - members.strangers)
    return mailbox, members
