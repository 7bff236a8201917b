"""Sending requests, waiting for replies with a deadline, and trusting none before it is checked.

Only ``Grid.push_messages``, ``pull_messages`` and ``get_node_ids`` are used. Replies are matched by
the id of the message that they answer (error replies of a SuperLink name another sender), and
polled for here: Flower's own ``send_and_receive`` sleeps three seconds between two looks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal

from flwr.app import Message
from flwr.serverapp import Grid

from equifed.contract.clients import MissingClients, Traffic
from equifed.flower.deadlines import Deadlines
from equifed.flower.wire import OPERATIONS, Reply, Request, WireError, count_bytes

EXPIRY_SECONDS = 60.0
"""How long after its deadline a request may still be delivered; then Flower drops it."""

ERRORS = {
    1: "the client app could not be loaded",
    2: "the client app raised an exception",
    3: "the request expired",
    4: "the reply expired",
    5: "the node is gone",
    7: "the app is invalid",
    8: "the client app stopped responding",
}
"""Flower's error codes in words."""

Kind = Literal["silent", "error", "stale", "bad"]
KINDS: dict[str, Kind] = {"stale": "stale", "non-finite": "bad"}
"""What a client's own report of an error counts as; anything else is an "error"."""


@dataclass(frozen=True)
class Failure:
    """Why a client is missing: "silent", "error", "stale" (lost its memory) or "bad" (unusable)."""

    kind: Kind
    reason: str


@dataclass
class Answers:
    """The usable replies of an exchange, and why the others are missing; by client position."""

    replies: dict[int, Reply] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)

    def complete(self, names: Sequence[str]) -> dict[int, Reply]:
        """Return the replies if nobody is missing, else raise :class:`MissingClients`."""
        if self.failures:
            raise MissingClients({i: f.reason for i, f in self.failures.items()}, names)
        return self.replies


Check = Callable[[int, Reply], None]
"""Raises :class:`WireError` about a reply whose content cannot be used."""


class Mailbox:
    """The server's mailbox for one run.

    Parameters
    ----------
    grid : Grid
        Flower's connection to the nodes.
    deadlines : Deadlines
        How long to wait, and for whom.
    clients : int
        Number of clients of the federation, for the ledger.

    Attributes
    ----------
    nodes : dict
        Which Flower node each client is on; the members write it.
    find : callable
        Called with the connected nodes when a client's node is not among them; may update
        ``nodes``.
    dropped : int
        Replies that answered nothing that was asked, or the same thing twice.
    """

    def __init__(self, grid: Grid, deadlines: Deadlines, clients: int = 0) -> None:
        self.grid, self.deadlines = grid, deadlines
        self.nodes: dict[int, int] = {}
        self.find: Callable[[set[int]], None] = lambda connected: None
        self.traffic = Traffic(clients)
        self.dropped = 0

    def ask(self, requests: Mapping[int, Request], check: Check, partial: bool = False) -> Answers:
        """Send one request to each client and return what came of it.

        Under the policy "wait", clients that are silent or report an error are asked again. Under
        "continue", clients that are not connected are missing at once, and nobody is asked unless
        answers of some are of use (``partial``): the round is repeated without them anyway.
        """
        until, answers = time.monotonic() + self.deadlines.wait, Answers()
        left = dict(requests)
        if self.deadlines.on_missing == "continue":
            absent = self.find_absent(left)
            answers.failures = {i: Failure("silent", "not connected") for i in absent}
            left = {i: r for i, r in left.items() if i not in absent}
            if not left or (absent and not partial):
                return answers
        self.traffic.exchanges += 1
        while True:
            _Exchange(self, left, check, answers).run()
            again = [i for i, f in answers.failures.items() if f.kind in ("silent", "error")]
            if not again or self.deadlines.on_missing != "wait" or time.monotonic() >= until:
                return answers
            time.sleep(self.deadlines.pause)
            left = {i: requests[i] for i in again}
            for i in again:
                del answers.failures[i]

    def list_connected(self) -> set[int]:
        """Return the nodes that are connected now."""
        return set(self.grid.get_node_ids())

    def find_absent(self, clients: Iterable[int]) -> set[int]:
        """Return the clients that are not connected, also after a look for them elsewhere."""
        connected = self.list_connected()
        absent = {i for i in clients if self.nodes.get(i) not in connected}
        if absent:
            self.find(connected)
        return {i for i in absent if self.nodes.get(i) not in connected}


class _Exchange:
    """One push and the polling for its replies."""

    def __init__(
        self, mailbox: Mailbox, requests: Mapping[int, Request], check: Check, answers: Answers
    ) -> None:
        self.mailbox, self.requests, self.check, self.answers = mailbox, requests, check, answers
        self.waiting: dict[str, int] = {}
        self.repeated: set[int] = set()

    def run(self) -> None:
        deadlines, unsent = self.mailbox.deadlines, self._send(self.requests)
        started, quorum_at = time.monotonic(), float("inf")
        while self.waiting or unsent:
            now = time.monotonic()
            over = now - started >= deadlines.timeout or now - quorum_at >= deadlines.grace
            self._collect()  # once more when the time is over: it may be there by now
            if over or not (self.waiting or unsent):
                break
            if self._quorum():
                quorum_at = min(quorum_at, now)
            time.sleep(deadlines.poll)
            if unsent:
                unsent = self._send({i: self.requests[i] for i in unsent})
        waited = time.monotonic() - started
        for i in (*self.waiting.values(), *unsent):
            reason = "not connected" if i in unsent else f"no answer within {waited:.0f} s"
            self._fail(i, "silent", reason)

    def _quorum(self) -> bool:
        """Tell whether those who answered are enough to go on without the rest."""
        deadlines, everybody = self.mailbox.deadlines, len(self.mailbox.traffic.up)
        enough = len(self.answers.replies) >= max(1.0, deadlines.quorum * everybody)
        return deadlines.on_missing == "continue" and enough

    def _send(self, requests: Mapping[int, Request]) -> set[int]:
        """Push requests to the clients that are connected; return those that are not."""
        absent = self.mailbox.find_absent(requests)
        self._push({i: request for i, request in requests.items() if i not in absent})
        return absent

    def _push(self, requests: Mapping[int, Request]) -> None:
        mailbox, messages = self.mailbox, []
        ttl = mailbox.deadlines.timeout + EXPIRY_SECONDS
        for i, request in requests.items():
            content = request.to_records()
            mailbox.traffic.down[i] += count_bytes(content)
            messages.append(Message(content, mailbox.nodes[i], OPERATIONS[request.op], ttl=ttl))
        sent = list(mailbox.grid.push_messages(messages)) if messages else []
        for i, message_id in zip_longest(requests, sent):
            if message_id:
                self.waiting[message_id] = i
            else:
                self._fail(i, "error", "the SuperLink did not take the request")

    def _collect(self) -> None:
        if not self.waiting:
            return
        for message in self.mailbox.grid.pull_messages(list(self.waiting)):
            i = self.waiting.pop(message.metadata.reply_to_message_id, None)
            if i is None:
                self.mailbox.dropped += 1
            else:
                self._judge(i, message)

    def _judge(self, i: int, message: Message) -> None:
        if message.has_error():
            # The reason may quote an exception of the client, so only the code goes on record.
            code = message.error.code
            self._fail(i, "error", f"Flower reports error {code} ({ERRORS.get(code, 'unknown')})")
            return
        self.mailbox.traffic.up[i] += count_bytes(message.content)
        request = self.requests[i]
        try:
            reply = Reply.from_records(message.content)
            if (reply.op, reply.run, reply.tag) != (request.op, request.run, request.tag):
                self._ask_again(i)
            elif reply.error:
                kind = KINDS.get(reply.error, "error")
                self._fail(i, kind, f"{reply.error}: {reply.text}")
            else:
                self.check(i, reply)
                self.answers.replies[i] = reply
        except WireError as error:
            self._fail(i, "bad", str(error))

    def _ask_again(self, i: int) -> None:
        """Repeat a request that was answered with something else; once, then give up."""
        if i in self.repeated:
            self._fail(i, "bad", "answered another request, twice")
        else:
            self.repeated.add(i)
            self._push({i: self.requests[i]})

    def _fail(self, i: int, kind: Kind, reason: str) -> None:
        self.answers.failures[i] = Failure(kind, reason)
