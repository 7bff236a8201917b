"""Nodes that connect while a run is under way: they are told that it goes on without them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message

from equifed.flower.flwr_private import pull_replies
from equifed.flower.mailbox import Mailbox
from equifed.flower.wire import OPERATIONS, Reply, Request

PATIENCE = 60.0
"""Seconds after which a late node that does not say its name is written down by its number."""

TEXT = (
    "a run is under way without this node, which came after its start; it takes part in the next "
    "run, or at once if it takes the place of a client that is gone"
)
REASON = "it came after the start; it was told, and takes part in the next run"


@dataclass
class Late:
    """Tells late nodes, waits for nobody, and writes down who they are.

    Parameters
    ----------
    mailbox : Mailbox
        Whose nodes are not late.
    run : str
        Identity of the run.
    events : list
        Where it is written down.
    """

    mailbox: Mailbox
    run: str
    events: list[dict[str, Any]]
    told: set[int] = field(default_factory=set)
    waiting: dict[str, tuple[int, float]] = field(default_factory=dict)

    def look(self, connected: set[int]) -> None:
        """Tell nodes that are new, and read what those before have answered."""
        self._read()
        new = sorted(connected - set(self.mailbox.nodes.values()) - self.told)
        self.told |= set(new)
        for node in new:
            request = Request("notice", self.run, f"notice/{node}", -1, {"text": TEXT})
            message = Message(request.to_records(), node, OPERATIONS["notice"], ttl=PATIENCE)
            sent = list(self.mailbox.grid.push_messages([message]))
            self.waiting[sent[0] if sent and sent[0] else f"unsent {node}"] = node, time.monotonic()

    def _read(self) -> None:
        if not self.waiting:
            return
        ids = [key for key in self.waiting if not key.startswith("unsent")]
        for received in pull_replies(self.mailbox.grid, ids, 1 << 16, 1.0) if ids else ():
            node, _ = self.waiting.pop(received.answers, (None, 0.0))
            if node is not None:
                self._write(_find_name(received.message) or f"node {node}")
        now = time.monotonic()
        for key in [k for k, (_, since) in self.waiting.items() if now - since > PATIENCE]:
            self._write(f"node {self.waiting.pop(key)[0]}")

    def _write(self, client: str) -> None:
        self.events.append({"event": "left out", "client": client, "reason": REASON})


def _find_name(message: Message | None) -> str:
    """Return what a node calls itself, nothing if it does not say."""
    try:
        assert message is not None
        return str(Reply.from_records(message.content).numbers["name"])[:200]
    except Exception:  # whatever it answered, it is not in the run
        return ""
