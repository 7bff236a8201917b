"""The work of a node, in a process of its own that may crash.

The node sends a request to it as the objects that it received, and gets a reply back in the same
form; nothing is pickled. When the process dies, it is started again and the request has failed.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import signal
import time
from collections import OrderedDict
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from flwr.app import Context, Error, Message, RecordDict

from equifed.flower.flwr_private import Parcel, set_identity
from equifed.flower.site import Site, SiteError

KEPT_RUNS = 8
"""Runs whose context the process keeps."""

RAISED = 2
"""Flower's code for a client app that raised an exception."""

log = logging.getLogger("equifed")


class WorkFailed(RuntimeError):
    """The process that does the work died or took too long; says which, not about what.

    ``refused`` tells that it was the site's own limit.
    """

    refused = False


class Workshop:
    """Does one request at a time in a supervised process."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None
        self._ready = False

    def start(self) -> None:
        """Start the process; what it imports is imported once."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, self.site), daemon=True)
        self._process.start()
        theirs.close()
        self._ready = False

    def check(self) -> None:
        """Wait until the process has imported the site's app; :class:`SiteError` if it cannot."""
        if not self._ready:
            head, _ = self._take(None)
            if not head["ready"]:
                self.stop()
                raise SiteError(head["text"])
            self._ready = True

    @property
    def pid(self) -> int | None:
        """Number of the process."""
        return None if self._process is None else self._process.pid

    def answer(
        self, run: int, node: int, request: Parcel, seconds: float, limit: str = "the server waits"
    ) -> Parcel:
        """Return the reply; after ``seconds``, which are those that ``limit`` says, it is ended."""
        try:
            if self._process is None:
                self.start()
            self.check()
            assert self._pipe is not None
            put(self._pipe, {"run": run, "node": node}, request)
            _, reply = self._take(seconds)
        except (OSError, EOFError, WorkFailed, SiteError) as error:
            text = self._describe_end(error, limit)
            self.stop()
            self.start()
            failed = WorkFailed(text)
            failed.refused = isinstance(error, WorkFailed) and "site" in limit
            raise failed from error
        assert reply is not None
        return reply

    def stop(self) -> None:
        """End the process, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process.close()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None

    def _take(self, seconds: float | None) -> tuple[dict[str, Any], Parcel | None]:
        assert self._pipe is not None and self._process is not None
        ready = wait([self._pipe, self._process.sentinel], seconds)
        if not ready:
            raise WorkFailed
        if self._pipe not in ready and not self._pipe.poll():
            raise EOFError
        return take(self._pipe)

    def _describe_end(self, error: Exception, limit: str) -> str:
        if isinstance(error, WorkFailed):
            return f"the work took longer than {limit} and was ended"
        if isinstance(error, SiteError):
            return "the site's app cannot be imported any more; see the node's log"
        assert self._process is not None
        self._process.join(1.0)
        code = self._process.exitcode
        how = "ended" if code is None or code >= 0 else _name_signal(-code)
        return f"the process that does the work died ({how}) and was started again"


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def put(pipe: Connection, head: dict[str, Any], parcel: Parcel | None = None) -> None:
    """Send plain values and a message through a pipe."""
    if parcel is not None:
        head = {**head, "id": parcel.id, "keys": list(parcel.contents)}
    pipe.send_bytes(json.dumps(head).encode())
    if parcel is not None:
        pipe.send_bytes(parcel.tree or b" ")
        for content in parcel.contents.values():
            pipe.send_bytes(content)


def take(pipe: Connection) -> tuple[dict[str, Any], Parcel | None]:
    """Receive what :func:`put` sent."""
    head = json.loads(pipe.recv_bytes())
    if "keys" not in head:
        return head, None
    tree = pipe.recv_bytes()
    return head, Parcel(head["id"], tree, {key: pipe.recv_bytes() for key in head["keys"]})


def _work(pipe: Connection, site: Site) -> None:
    """Answer requests until the node is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the node, which then ends this
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    log.setLevel(logging.INFO)
    try:
        app, settings = site.load()
    except SiteError as error:
        put(pipe, {"ready": False, "text": str(error)})
        return
    except Exception as error:
        log.exception("equifed: the site's app could not be imported")
        text = f"{site.app} cannot be imported ({type(error).__name__}; see the log)"
        put(pipe, {"ready": False, "text": text})
        return
    put(pipe, {"ready": True})
    contexts = OrderedDict[int, Context]()
    while True:
        try:
            head, parcel = take(pipe)
        except (EOFError, OSError):
            return
        assert parcel is not None
        run, node = int(head["run"]), int(head["node"])
        set_identity(run, node)
        if run not in contexts:
            own = dict(site.settings)
            contexts[run] = Context(run, node, own, RecordDict(), dict(settings))
            while len(contexts) > KEPT_RUNS:
                contexts.popitem(last=False)
        put(pipe, {}, Parcel.of(_answer(app, parcel.open(), contexts[run])))


def _answer(app: Any, message: Message, context: Context) -> Message:
    began = time.monotonic()
    try:
        reply: Message = app(message=message, context=context)
    except Exception:
        log.exception("equifed: the site's app failed")
        reply = Message(Error(RAISED, "the site's app failed"), reply_to=message)
    what = message.metadata.message_type
    log.info("equifed: answered %s in %.3f s", what, time.monotonic() - began)
    return reply
