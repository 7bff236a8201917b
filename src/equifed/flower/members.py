"""Who takes part: gathering the clients, finding one again after a restart, telling latecomers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid

from equifed.contract.arrays import Index
from equifed.data.preparation import Preparation
from equifed.flower.flwr_private import pull_replies
from equifed.flower.handshake import (
    Hello,
    StartError,
    check_models,
    check_schemas,
    check_versions,
    describe_difference,
    greet,
    greet_all,
    introduce,
    sort_nodes,
)
from equifed.flower.mailbox import HEADER_SHARE, Deadlines, Failure, Mailbox
from equifed.flower.task import OneClient, Task
from equifed.flower.wire import OPERATIONS, PARTS, Reply, Request

PATIENCE = 60.0
"""Seconds in which a node that came later says its name."""

ROOM = 1 << 21
"""Bytes of a reply besides its vectors."""

TOO_LATE = (
    "a run is under way without this node, which came after its start; it takes part in the next "
    "run, or at once in the place of a client that is gone"
)


@dataclass
class Members:
    """The clients of a run, in a fixed order: by partition where all have one, else by name.

    ``told`` is what they were told with the hello (plan and preparation), ``engine`` the model,
    built here from their common schema, ``events`` what is to be written down about nodes that
    are not in the run (``strangers``).
    """

    run: str
    task: Task
    hellos: list[Hello]
    engine: OneClient
    told: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    preparation: Preparation | None = None
    strangers: set[int] = field(default_factory=set)
    _late: set[int] = field(default_factory=set)
    _unnamed: dict[str, int] = field(default_factory=dict)

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

    # -- nodes that connect while the run is under way ---------------------------------------------

    def find(self, mailbox: Mailbox, connected: set[int]) -> None:
        """Greet nodes that were not there before: a client that was restarted may be among them."""
        new = sorted(connected - set(mailbox.nodes.values()) - self.strangers)
        if not new:
            return
        deadlines = replace(mailbox.deadlines, on_missing="fail", timeout=PATIENCE)
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

    def tell_late(self, mailbox: Mailbox, connected: set[int]) -> None:
        """Tell new nodes that the run goes on without them; note their names, wait for none."""
        ids = list(self._unnamed)
        for received in pull_replies(mailbox.grid, ids, 1 << 16, 1.0) if ids else ():
            node = self._unnamed.pop(received.answers, None)
            if node is not None:
                name = _find_name(received.message) or f"node {node}"
                reason = "it came after the start; it was told, and takes part in the next run"
                self.leave_out(name, reason)
        for node in sorted(connected - set(mailbox.nodes.values()) - self.strangers - self._late):
            self._late.add(node)
            request = Request("notice", self.run, f"notice/{node}", -1, {"text": TOO_LATE})
            message = Message(request.to_records(), node, OPERATIONS["notice"], ttl=PATIENCE)
            self._unnamed |= {key: node for key in mailbox.grid.push_messages([message]) if key}


def _find_name(message: Message | None) -> str:
    """Return what a node calls itself, nothing if it does not say."""
    try:
        assert message is not None
        return str(Reply.from_records(message.content).numbers["name"])[:200]
    except Exception:  # whatever it answered, it is not in the run
        return ""


Totals = dict[str, list[float]]
"""Count, mean and deviation of columns over all sites."""

FitTables = Callable[[Mailbox, str, Sequence[Hello]], tuple[Preparation, Totals]]
"""Fits one preparation for all sites that said hello with tables."""


def gather(
    grid: Grid,
    task: Task,
    deadlines: Deadlines,
    run: str,
    clients: int,
    order: Sequence[str] | None = None,
    told: Mapping[str, Any] | None = None,
    fit: FitTables | None = None,
    only: str = "",
) -> tuple[Mailbox, Members]:
    """Wait for so many clients, greet them, and check that they fit together.

    ``order`` are the names of a run that is resumed. With the hello clients are ``told`` the
    ``plan`` (privacy, requests, local work), which they may refuse, and the ``preparation``, if
    the run has one; else ``fit`` makes one for sites that give tables. With ``only`` the client of
    that name takes part alone.
    """
    told = dict(told or {})
    hellos, failures = greet_all(grid, deadlines, run, clients, told, only)
    nodes = sort_nodes(hellos, order)
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
        fitted, totals = fit(mailbox, run, listed)
        told |= {"preparation": fitted.to_json()}
        listed = introduce(mailbox, run, listed, {**told, "totals": totals})
        check_schemas(listed)
    engine = task.build_engine(listed[0].schema.make_placeholder())
    check_models(listed, task.fingerprint(engine))
    members = Members(run, task, listed, engine, told, preparation=fitted)
    for node, failure in failures.items():
        members.leave_out(failure.name or f"node {node}", failure.reason)
    mailbox.largest = (len(PARTS) + 1) * 8 * engine.model.size + ROOM + HEADER_SHARE * len(listed)
    mailbox.find = lambda connected: members.find(mailbox, connected)
    mailbox.look = lambda connected: None if only else members.tell_late(mailbox, connected)
    return mailbox, members
