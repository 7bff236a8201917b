"""The site's own record of what came and what left: one line of JSON for each request."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Message

from equifed.flower.wire import Reply

_WORK = ("PushMessages", "ConfirmMessageReceived")
"""Calls that are made for a request, besides those that carry its objects."""

LONGEST = 4096
"""Characters of numbers that a line quotes; longer ones (shares of secrets) by their digest."""


@dataclass
class Ledger:
    """Bytes of the bodies of all HTTP requests and responses, for one purpose."""

    sent: int = 0
    received: int = 0


@dataclass
class Counter:
    """Counts what passes, request by request: for the answers, and for keeping the connection."""

    work: Ledger = field(default_factory=Ledger)
    keeping: Ledger = field(default_factory=Ledger)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def intercept(self, context: Any, call_next: Callable[[Any], Any]) -> Any:
        """Count one request and its response; the name is Flower's."""
        method = context.rpc_method.rpartition("/")[2]
        ledger = self.work if "Object" in method or method in _WORK else self.keeping
        body = len(context.request.content)
        with self._lock:
            ledger.sent += body
        response = call_next(context)
        with self._lock:
            ledger.received += response.num_bytes_downloaded
        return response

    def move_last_poll(self, sent: int, received: int) -> None:
        """Put the poll that brought a request to the account of that request."""
        with self._lock:
            self.keeping.sent -= sent
            self.keeping.received -= received
            self.work.sent += sent
            self.work.received += received

    def close_work(self) -> Ledger:
        """Return what the last request cost, and begin anew."""
        with self._lock:
            closed, self.work = self.work, Ledger()
        return closed

    def close_keeping(self) -> Ledger:
        """Return what keeping the connection cost since the last call."""
        with self._lock:
            closed, self.keeping = self.keeping, Ledger()
        return closed


class AuditError(OSError):
    """The audit log cannot be written, so the node ends."""


class Audit:
    """Appends to a file that its owner alone may read.

    ``bytes_in`` and ``bytes_out`` are the bodies of every HTTP request and response that the node
    exchanged with the SuperLink for that line: a recording proxy counts the same. Polls and signs
    of life between requests are on lines of their own (``"event": "idle"``).

    Parameters
    ----------
    path : Path
        The file; it is made if it is not there.
    site : str
        Who writes.
    """

    def __init__(self, path: Path, site: str) -> None:
        self.path, self.site = path, site
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, event: str, ledger: Ledger | None = None, **told: Any) -> None:
        """Write one line, at once and whole."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": now, "site": self.site, "event": event, **told}
        if ledger is not None:
            line.update(bytes_in=ledger.received, bytes_out=ledger.sent)
        try:
            os.write(self._file, json.dumps(line).encode() + b"\n")
        except OSError as error:
            raise AuditError(
                f"The audit log {self.path} cannot be written ({error.strerror}); a node that "
                "cannot say what leaves it sends nothing."
            ) from error

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def describe_reply(message: Message) -> dict[str, Any]:
    """Say what a reply holds, read from the message that leaves."""
    if message.has_error():
        return {"error": f"Flower error {message.error.code}: {message.error.reason}"}
    try:
        reply = Reply.from_records(message.content)
    except ValueError:  # the site's own app answered in its own way
        return {"records": sorted(map(str, message.content))}
    shapes = {
        name: {"dtype": array.dtype.name, "shape": list(array.shape)}
        for name, array in reply.arrays.items()
    }
    told: dict[str, Any] = {"arrays": shapes, "numbers": _shorten(reply.numbers)}
    if reply.error:
        told["refused" if reply.error == "refused" else "error"] = f"{reply.error}: {reply.text}"
    return told


def _shorten(numbers: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(numbers)
    if len(text) <= LONGEST:
        return numbers
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"characters": len(text), "sha256": digest, "names": sorted(numbers)[:20]}
