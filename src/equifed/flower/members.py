"""Who takes part in a run, from the first hello to the end.

::

    connected --hello--> said hello --fits--> client --silent--> gone --answers again--> client
        |                    |                  ^                  |
        |                    |                  +------------------+-- another node of that name,
        |                    |                                         with the same data and model
        |                    +-- does not fit: StartError before the first round
        +-- after the start: hello that says so --> takes the place of a client that has left,
                                                    or is left out, with its name and the reason

Tables take one more hello before the first round, with the preparation of all sites.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flwr.serverapp import Grid

from equifed.contract.arrays import Index
from equifed.data.preparation import Preparation
from equifed.flower.handshake import (
    Greeting,
    Hello,
    StartError,
    check_models,
    check_schemas,
    check_versions,
    find_stranger,
    greet_all,
    list_keys,
    sort_nodes,
)
from equifed.flower.mailbox import HEADER_SHARE, Deadlines, Failure, Mailbox
from equifed.flower.task import OneClient, Task
from equifed.flower.wire import PARTS

PATIENCE = 60.0
"""Seconds in which a node that came later says its name, where a client is gone."""

ROOM = 1 << 21
"""Bytes of a reply besides its vectors."""

TOO_LATE = (
    "a run is under way without this node, which came after its start; it takes part in the next "
    "run, or at once in the place of a client that has left"
)


@dataclass
class Members:
    """The clients of a run, in a fixed order: by partition where all have one, else by name.

    ``told`` is what they were told with the hello (plan and preparation), ``engine`` the model,
    built here from their common schema, ``events`` what is to be written down about others.
    """

    run: str
    task: Task
    hellos: list[Hello]
    engine: OneClient
    told: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    preparation: Preparation | None = None
    _greetings: list[Greeting] = field(default_factory=list)
    _settled: set[int] = field(default_factory=set)  # newcomers whose fate is known

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the clients in order."""
        return tuple(hello.name for hello in self.hellos)

    @property
    def sizes(self) -> Index:
        """Training samples of every client."""
        return np.array([hello.sizes["train"] for hello in self.hellos], dtype=np.int64)

    def leave_out(self, client: str, reason: str) -> None:
        """Write down that a node takes no part, and why."""
        self.events.append({"event": "left out", "client": client, "reason": reason})

    def note_unusable(self, failures: Mapping[int, Failure]) -> None:
        """Write down whose numbers an evaluation did without because they cannot be used."""
        for i, failure in failures.items():
            if failure.kind == "bad":
                reason = f"its evaluation was not used: {failure.reason}"
                self.events.append({"event": "note", "client": self.names[i], "reason": reason})

    def meet(self, mailbox: Mailbox, connected: set[int], gone: bool) -> None:
        """Greet nodes that came after the start; wait for what they say where a client is gone."""
        greeted = {node for greeting in self._greetings for node in greeting.nodes}
        new = sorted(connected - set(mailbox.nodes.values()) - greeted)
        if new:
            deadlines = replace(mailbox.deadlines, on_missing="fail", timeout=PATIENCE)
            told = {**self.told, "late": TOO_LATE}
            self._greetings.append(Greeting(mailbox.grid, deadlines, self.run, new, told))
        for greeting in self._greetings:
            greeting.exchange.run(wait=gone)
            for node, failure in greeting.failures.items():
                self._settle(node, failure.name or f"node {node}", failure.reason)
            for node, hello in greeting.said.items():
                self._seat(mailbox, connected, node, hello)

    def _seat(self, mailbox: Mailbox, connected: set[int], node: int, hello: Hello) -> None:
        """Give a newcomer the place of a client of its name that is gone, or none."""
        if hello.name not in self.names:
            reason = "it joined after the start; it takes part in the next run"
            return self._settle(node, hello.name, reason)
        i = self.names.index(hello.name)
        change = find_stranger(hello, self.run, list_keys(self.told))
        change = change or hello.find_change(self.hellos[i])
        if change:
            return self._settle(node, hello.name, change)
        if node in connected and mailbox.nodes[i] not in connected:
            mailbox.nodes[i], self.hellos[i] = node, hello
        return None

    def _settle(self, node: int, name: str, reason: str) -> None:
        if node not in self._settled:
            self._settled.add(node)
            self.leave_out(name, reason)


Fitted = tuple[Preparation, dict[str, list[float]]]
"""A preparation, and count, mean and deviation of columns over all sites."""

FitTables = Callable[[Mailbox, str, Sequence[Hello]], Fitted | None]
"""Compares the tables of sites, and fits one preparation for all where they have none yet."""


def gather(
    grid: Grid,
    task: Task,
    deadlines: Deadlines,
    run: str,
    clients: int,
    order: Sequence[str] | None = None,
    told: Mapping[str, Any] | None = None,
    fit: FitTables | None = None,
) -> tuple[Mailbox, Members]:
    """Wait for so many clients, greet them, and check that they fit together.

    ``order`` are the names of a run that is resumed. With the hello clients are ``told`` the
    ``plan`` (privacy, requests, local work), which they may refuse, and the ``preparation``, if
    the run has one; else ``fit`` makes one for sites that give tables.
    """
    told = dict(told or {})
    hellos, failures = greet_all(grid, deadlines, run, clients, told)
    nodes = sort_nodes(hellos, order)
    listed = [hellos[node] for node in nodes]
    check_versions(listed)
    check_schemas(listed)
    mailbox = Mailbox(grid, deadlines, len(listed), [hello.name for hello in listed])
    mailbox.nodes = dict(enumerate(nodes))
    given = told.get("preparation")
    fitted = None if given is None else Preparation.from_json(given)
    if fit is None and any(hello.table is not None for hello in listed):
        raise StartError("The sites give tables, and [data] of the app names no target.")
    made = None if fit is None else fit(mailbox, run, listed)
    if made is not None:
        fitted, totals = made
        told |= {"preparation": fitted.to_json()}
        listed = _introduce(mailbox, run, listed, {**told, "totals": totals})
        check_schemas(listed)
    engine = task.build_engine(listed[0].schema.make_placeholder())
    check_models(listed, task.fingerprint(engine))
    members = Members(run, task, listed, engine, told, preparation=fitted)
    for node, failure in failures.items():
        members.leave_out(failure.name or f"node {node}", failure.reason)
    mailbox.largest = (len(PARTS) + 1) * 8 * engine.model.size + ROOM + HEADER_SHARE * len(listed)
    mailbox.meet = lambda connected, gone: members.meet(mailbox, connected, gone)
    return mailbox, members


def _introduce(
    mailbox: Mailbox, run: str, hellos: Sequence[Hello], told: Mapping[str, Any]
) -> list[Hello]:
    """Hand the preparation to every client, and hear what it makes of its data."""
    nodes, names = mailbox.nodes, mailbox.names
    greeting = Greeting(mailbox.grid, mailbox.deadlines, run, nodes.values(), told, names)
    greeting.answers = greeting.mailbox.ask(greeting.asked, greeting.read)
    if greeting.failures:
        who = {node: hellos[i].name for i, node in nodes.items()}
        why = "; ".join(f"{who[node]}: {f.reason}" for node, f in greeting.failures.items())
        raise StartError(f"Not every site could prepare its table: {why}.")
    return [greeting.said[node] for node in nodes.values()]
