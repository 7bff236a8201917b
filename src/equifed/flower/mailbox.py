"""Sending requests, waiting for replies with a deadline, and trusting none before it is checked.

Replies are matched by the id of the message that they answer (error replies of a SuperLink name
another sender), and polled for here: Flower's own ``send_and_receive`` sleeps three seconds between
two looks. Everything about a reply is judged in one place, ``Exchange._judge``: whatever is wrong
with it, also what nobody thought of, makes its sender "bad" and ends no run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal

from flwr.app import Message
from flwr.serverapp import Grid

from equifed.contract.clients import MissingClients, Traffic
from equifed.flower.flwr_private import Received, pull_replies
from equifed.flower.wire import (
    REFUSED,
    REPLY_LIMIT,
    VERBS,
    Reply,
    Request,
    WireError,
    count_bytes,
)
from equifed.training.play_round import MissingPolicy

EXPIRY_SECONDS = 60.0
"""How long after its deadline a request may still be delivered; then Flower drops it."""

WAIT_LINE = 30.0
"""Seconds from one line about who is waited for to the next."""

SHORTEST_POLL = 0.05
"""Seconds between two looks at the start of an exchange; then a tenth of the time waited."""

HEADER_SHARE = 8192
"""Characters of a reply's header for each client of the federation: shares of secrets."""

LARGEST_REPLY = 1 << 26
"""Bytes of a reply that are fetched as long as the size of the model is not known."""

ERRORS = {
    1: "the client app could not be loaded",
    2: "the client app raised an exception",
    3: "the request expired",
    4: "the reply expired",
    5: "the node has left",
    7: "the app is invalid",
    8: "the client app stopped responding",
}
"""Flower's error codes in words."""

Kind = Literal["silent", "error", "stale", "bad"]
KINDS: dict[str, Kind] = {"stale": "stale", "non-finite": "bad"}
"""What a client's own report of an error counts as; anything else is an "error"."""


@dataclass(frozen=True)
class Deadlines:
    """Deadlines of an exchange in seconds, and the policy for missing clients.

    "fail" stops the run, which can be resumed. "wait" asks again, every ``pause`` seconds and for
    at most ``wait`` seconds, then stops. "continue" repeats the round with those who answer.
    """

    on_missing: Literal["fail", "wait", "continue"] = "fail"
    timeout: float = 600.0  # until a silent client counts as missing
    grace: float = 60.0  # under "continue", for the rest once a quorum has answered
    quorum: float = 0.5  # under "continue", fraction of all clients that must take part
    wait: float = 3600.0  # for clients at the start, and under "wait"
    pause: float = 5.0
    poll: float = 0.1  # at most between two looks; at the start of an exchange fewer

    def __post_init__(self) -> None:
        if self.on_missing not in ("fail", "wait", "continue"):
            raise ValueError(
                f"on_missing must be 'fail', 'wait' or 'continue', got {self.on_missing!r}."
            )
        for name in ("timeout", "grace", "wait", "pause", "poll"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be a number of seconds of at least 0, got {value}.")
        if not 0 <= self.quorum <= 1:
            raise ValueError(f"quorum must be a fraction in [0, 1], got {self.quorum}.")

    def to_policy(self) -> MissingPolicy:
        """Return the policy for the training loop, which repeats rounds.

        >>> Deadlines("wait").to_policy().policy
        'fail'
        """
        again = self.on_missing == "continue"
        return MissingPolicy("continue", self.quorum) if again else MissingPolicy("fail")


@dataclass(frozen=True)
class Failure:
    """Why a client is missing: "silent", "error", "stale" (lost its memory) or "bad" (unusable).

    ``name`` is what the client calls itself, where it said so.
    """

    kind: Kind
    reason: str
    name: str = ""


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


def say(text: str) -> None:
    """Print a line; Flower carries it to whoever follows the run."""
    print(f"equifed: {text}", flush=True)


class Mailbox:
    """The server's mailbox for one run.

    ``nodes`` says which Flower node each client is on, ``names`` who it is. ``meet`` is called with
    the connected nodes whenever they are listed, and with whether a client is gone, and may update
    ``nodes``. Replies above ``largest`` bytes are not fetched; ``dropped`` counts those that answer
    nothing that was asked, or the same thing twice.
    """

    def __init__(
        self, grid: Grid, deadlines: Deadlines, clients: int = 0, names: Sequence[str] = ()
    ) -> None:
        self.grid, self.deadlines, self.names = grid, deadlines, names
        self.nodes: dict[int, int] = {}
        self.meet: Callable[[set[int], bool], None] = lambda connected, gone: None
        self.traffic = Traffic(clients)
        self.dropped = 0
        self.largest = LARGEST_REPLY

    def ask(self, requests: Mapping[int, Request], check: Check, partial: bool = False) -> Answers:
        """Send one request to each client and return what came of it.

        Under the policy "wait", clients that are silent or report an error are asked again. Under
        "continue", clients that are not connected are missing at once, and nobody is asked unless
        answers of some are of use (``partial``): the round is repeated without them anyway.
        """
        until, answers = time.monotonic() + self.deadlines.wait, Answers()
        left, said_at = dict(requests), -math.inf
        if self.deadlines.on_missing == "continue":
            absent = self.find_absent(left)
            answers.failures = {i: Failure("silent", "not connected") for i in absent}
            left = {i: r for i, r in left.items() if i not in absent}
            if not left or (absent and not partial):
                return answers
        self.traffic.exchanges += 1
        while True:
            Exchange(self, left, check, answers).run()
            again = [i for i, f in answers.failures.items() if f.kind in ("silent", "error")]
            if not again or self.deadlines.on_missing != "wait" or time.monotonic() >= until:
                return answers
            if time.monotonic() - said_at >= WAIT_LINE:
                said_at = time.monotonic()
                self.say_waiting({i: answers.failures[i].reason for i in again})
            time.sleep(self.deadlines.pause)
            left = {i: requests[i] for i in again}
            for i in again:
                del answers.failures[i]

    def say_waiting(self, reasons: Mapping[int, str]) -> None:
        """Tell whoever follows the run which of its clients are waited for."""
        if self.names:
            who = ", ".join(f"{self.names[i]} ({reason})" for i, reason in sorted(reasons.items()))
            say(f"waiting for {len(reasons)} of {len(self.names)} sites: {who[:400]}")

    def find_absent(self, clients: Iterable[int]) -> set[int]:
        """Return the clients that are not connected, also after newcomers were looked at."""
        connected = set(self.grid.get_node_ids())
        self.meet(connected, any(self.nodes.get(i) not in connected for i in clients))
        return {i for i in clients if self.nodes.get(i) not in connected}


class Exchange:
    """One push and the polling for its replies, which go to ``answers``."""

    def __init__(
        self, mailbox: Mailbox, requests: Mapping[int, Request], check: Check, answers: Answers
    ) -> None:
        self.mailbox, self.requests, self.check, self.answers = mailbox, requests, check, answers
        self.waiting: dict[str, int] = {}
        self.unsent = set(requests)
        self.started, self.quorum_at, self.said_at = math.inf, math.inf, -math.inf

    def run(self, wait: bool = True) -> None:
        """Collect replies until all are there or their time is over; or look once."""
        deadlines = self.mailbox.deadlines
        while self.waiting or self.unsent:
            if self.unsent:
                self.unsent = self._send({i: self.requests[i] for i in self.unsent})
            now = time.monotonic()
            self.started = min(self.started, now)
            late = now - self.started >= deadlines.timeout
            over = late or now - self.quorum_at >= deadlines.grace
            self._collect()  # once more when the time is over: it may be there by now
            if over:
                return self._give_up(now - self.started)
            if not wait or not (self.waiting or self.unsent):
                return None
            if self._quorum():
                self.quorum_at = min(self.quorum_at, now)
            if now - max(self.said_at, self.started) >= WAIT_LINE:
                silent = dict.fromkeys(self.waiting.values(), f"{now - self.started:.0f} s")
                self.mailbox.say_waiting(silent | dict.fromkeys(self.unsent, "not connected"))
                self.said_at = now
            time.sleep(min(deadlines.poll, max(SHORTEST_POLL, 0.1 * (now - self.started))))
        return None

    def _give_up(self, waited: float) -> None:
        for i in (*self.waiting.values(), *self.unsent):
            reason = "not connected" if i in self.unsent else f"no answer within {waited:.0f} s"
            self._fail(i, "silent", reason)
        self.waiting.clear()
        self.unsent.clear()

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
            messages.append(Message(content, mailbox.nodes[i], VERBS[request.op].message, ttl=ttl))
        sent = list(mailbox.grid.push_messages(messages)) if messages else []
        for i, message_id in zip_longest(requests, sent):
            if message_id:
                self.waiting[message_id] = i
            else:
                self._fail(i, "error", "the SuperLink did not take the request")

    def _collect(self) -> None:
        if not self.waiting:
            return
        mailbox, ids = self.mailbox, list(self.waiting)
        for received in pull_replies(mailbox.grid, ids, mailbox.largest, mailbox.deadlines.timeout):
            i = self.waiting.pop(received.answers, None)
            if i is None:
                mailbox.dropped += 1
            else:
                self._judge(i, received)

    def _judge(self, i: int, received: Received) -> None:
        """Decide about a reply; whatever it does to us is its sender's failure."""
        self.sender = ""  # as it calls itself
        try:
            if received.message is None:
                raise WireError(received.problem)
            self._read(i, received.message)
        except WireError as error:
            self._fail(i, "bad", str(error), self.sender)
        except Exception as error:
            what = f"sent a reply that cannot be used ({type(error).__name__})"
            self._fail(i, "bad", what, self.sender)

    def _read(self, i: int, message: Message) -> None:
        if message.has_error():
            # The reason may quote an exception of the client, so only the code goes on record.
            code, reason = message.error.code, message.error.reason
            known = REFUSED if reason == REFUSED else ERRORS.get(code, "unknown")
            self._fail(i, "error", f"Flower reports error {code} ({known})")
            return
        request, clients = self.requests[i], len(self.mailbox.traffic.up)
        self.mailbox.traffic.up[i] += count_bytes(message.content)
        limit = max(REPLY_LIMIT, HEADER_SHARE * clients)
        reply = Reply.from_records(message.content, limit)
        self.sender = name = str(reply.numbers.get("name", ""))[:200]
        if reply.error and not reply.op:  # it could not even read the request, and says why
            self._fail(i, "error", f"{reply.error}: {reply.text}", name)
        elif (reply.op, reply.run, reply.tag) != (request.op, request.run, request.tag):
            self._fail(i, "bad", "answered another request", name)
        elif reply.error:
            kind = KINDS.get(reply.error, "error")
            self._fail(i, kind, f"{reply.error}: {reply.text}", name)
        else:
            self.check(i, reply)
            self.answers.replies[i] = reply

    def _fail(self, i: int, kind: Kind, reason: str, name: str = "") -> None:
        self.answers.failures[i] = Failure(kind, reason, name)
