"""A site's node: one process that stays, runs the app of the site, and nothing that is sent to it.

It takes the place of Flower's SuperNode and serves the same runs. Requests that are not ours are
refused; the work is done in a process of its own that may crash; what came and what left is in the
audit log. It comes back by itself when the SuperLink was gone, and ends on SIGTERM.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import multiprocessing
import signal
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType
from typing import Any

from flwr.app import Context, Error, Message, RecordDict

from equifed.flower.fleet import (
    Audit,
    AuditError,
    Fleet,
    FleetError,
    RunOver,
    describe_reply,
)
from equifed.flower.flwr_private import Parcel, find_changes, parse_node_config, set_identity
from equifed.flower.site import Policy, Site, SiteError, name_site, read_site
from equifed.flower.wire import REFUSED, VERBS, Request, WireError
from equifed.training.keys import read_private

SHORTEST, LONGEST = 0.1, 2.0
"""Seconds between two polls: a tenth of the time that the node has been idle, within these."""

RETRY = (1.0, 15.0)
"""Seconds until the next try to connect, at first and at most."""

KEY_IN_USE = 90.0
"""Seconds after which a SuperLink has noticed that a node is gone."""

KEPT_RUNS = 8
"""Runs whose context the process keeps."""

RAISED = 2
"""Flower's code for a client app that raised an exception."""

log = logging.getLogger("equifed")


class Stop(BaseException):
    """The operating system asked the node to end."""


class Node:
    """The node of one site; ``connect`` makes a connection.

    The audit log is ``audit.jsonl`` in the site's memory folder, unless another is given.
    """

    def __init__(self, site: Site, connect: Callable[[], Fleet], audit: Path | None = None) -> None:
        self.site, self.connect = site, connect
        self.name, self.policy = name_site(site.settings, 0), Policy.of(read_site(site.settings))
        self.audit = Audit(audit or site.memory / "audit.jsonl", self.name)
        self.work = Workshop(site)
        self._told, self._since = "", 0.0

    def run(self) -> None:
        """Serve until the operating system says stop; :class:`SiteError` if the app is unusable."""
        try:
            with _stop_on_signals():
                self.work.start()
                self.audit.write("started", app=self.site.app)
                self._connect_again_and_again()
        except Stop:
            log.info("equifed: the node ends")
        finally:
            self.work.stop()
            self.audit.write("stopped")
            self.audit.close()

    def _connect_again_and_again(self) -> None:
        pause = RETRY[0]
        while True:
            fleet: Fleet | None = None
            try:
                fleet = self.connect()
                number = fleet.open()
                self.audit.write("connected", superlink=fleet.address, node=str(number))
                log.info("equifed: %s is connected to %s", self.name, fleet.address)
                self._told, pause = "", RETRY[0]
                self._serve(fleet)
            except AuditError:
                raise
            except FleetError as error:
                self._tell(str(error))
            except Exception as error:  # a node that stays outlives what nobody thought of
                log.exception("equifed: the connection failed")
                self._tell(f"the connection failed ({type(error).__name__})")
            finally:
                if fleet is not None:
                    fleet.close()
            time.sleep(pause)
            pause = min(2 * pause, RETRY[1])

    def _tell(self, reason: str) -> None:
        """Say once why there is no connection, and once more when it lasts."""
        now = time.monotonic()
        if reason == self._told and now - self._since < KEY_IN_USE:
            return
        again = reason == self._told
        if again and "with this key is connected" in reason:
            log.error("equifed: %s; it lasts, so another machine uses the key", reason)
        else:
            log.error("equifed: %s; trying again", reason)
        if not again:
            self.audit.write("disconnected", reason=reason)
        self._told, self._since = reason, now

    def _serve(self, fleet: Fleet) -> None:
        idle = time.monotonic()
        while True:
            if fleet.lost.is_set():
                raise FleetError(f"{fleet.address} does not know this node any more")
            try:
                got = fleet.receive()
            except RunOver:
                self.audit.write("run is over")
                continue
            if got is None:
                time.sleep(min(LONGEST, max(SHORTEST, 0.1 * (time.monotonic() - idle))))
                continue
            self._answer(fleet, *got)
            idle = time.monotonic()

    def _answer(self, fleet: Fleet, run: int, seconds: float, parcel: Parcel) -> None:
        """Answer one request; what leaves is written down before it does."""
        began, leaves = time.monotonic(), None
        told: dict[str, Any] = {"flower_run": str(run), "bytes_in": parcel.count_bytes()}
        try:
            set_identity(run, fleet.node_id)
            what, reply = self._do(run, fleet.node_id, seconds, parcel, parcel.open())
            told |= what
            leaves = reply.open()
            told |= describe_reply(leaves) | {"bytes_out": reply.count_bytes()}
        except Exception as error:
            log.exception("equifed: a request could not be answered")
            told["error"] = f"not answered ({type(error).__name__})"
        took = time.monotonic() - began
        self.audit.write("request", **told, seconds=round(took, 4))
        if leaves is None:
            return
        try:
            fleet.send(reply, leaves, took)
        except Exception as error:
            reason = "the run was over" if isinstance(error, RunOver) else type(error).__name__
            self.audit.write("not delivered", tag=told.get("tag"), reason=reason)
            if isinstance(error, FleetError):
                raise

    def _do(
        self, run: int, node: int, seconds: float, parcel: Parcel, message: Message
    ) -> tuple[dict[str, Any], Parcel]:
        """Return what to write down about a request, and the reply."""
        kind = message.metadata.message_type
        try:
            request = judge_request(message)
        except WireError as error:
            log.warning("equifed: refused %s: %s", kind, error)
            refusal = Parcel.of(Message(Error(RAISED, REFUSED), reply_to=message))
            return {"request": kind, "refused": str(error)}, refusal
        told = {"request": request.op, "run": request.run, "tag": request.tag}
        if "late" in request.args:
            told["told"] = str(request.args["late"])[:500]
        most = self.policy.max_seconds
        try:
            if most is None or seconds <= most:
                return told, self.work.answer(run, node, parcel, seconds)
            return told, self.work.answer(run, node, parcel, most, "this site allows")
        except WorkFailed as error:
            log.error("equifed: %s", error)
            kind = "refused" if error.refused else "failed"
            failed = request.reply({"name": self.name}, error=kind, text=str(error))
            return told, Parcel.of(Message(failed.to_records(), reply_to=message))


def serve_site(
    app: str,
    node_config: str,
    superlink: str,
    root_certificates: Path,
    node_key: Path,
    audit: Path | None,
    any_operator: bool = False,
) -> None:
    """Run the node of a site until it is told to stop; :class:`SiteError` if it cannot."""
    _show_log()
    settings = {"node-key": str(node_key), **parse_node_config(node_config)}
    if not Policy.of(read_site(settings)).operators and not any_operator:
        raise SiteError(
            "The site's policy lists no operators, so any user who may submit a run could query "
            'its data one row at a time. Write operators = ["ssh-ed25519 AAAA... anna"] into the '
            "file that policy names, or use --any-operator if that is what you want."
        )
    changes = find_changes()
    if changes:
        raise SiteError(
            f"This flwr is not one that a node of ours knows ({'; '.join(changes)}); install "
            "another version, or take part with flower-supernode."
        )
    key, trusted = open_key(node_key), root_certificates.read_bytes()

    def connect() -> Fleet:
        return Fleet(superlink, trusted, key)

    try:
        connect().close()  # a certificate that cannot be read is told at once
    except (ValueError, OSError) as error:
        raise SiteError(f"{root_certificates} holds no certificate: {error}") from error
    # The key also signs the hello, and the keys of hidden sums.
    Node(Site(app, settings), connect, audit).run()


def _show_log() -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    log.setLevel(logging.INFO)


def judge_request(message: Message) -> Request:
    """Return a request of ours, or raise :class:`WireError` about anything else."""
    kind = message.metadata.message_type
    if kind not in {verb.message for verb in VERBS.values()} or not message.has_content():
        raise WireError(f"{kind[:60]!r} is not a request that this site answers")
    request = Request.from_records(message.content)
    if VERBS[request.op].message != kind:
        raise WireError(f"{kind!r} asks for {request.op!r}")
    return request


def open_key(path: Path) -> Any:
    """Return a node's key, held by this process alone for as long as it lives."""
    key = read_private(path)
    with contextlib.suppress(ImportError):  # there is no such lock on this system
        import fcntl

        file = path.open("rb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise SiteError(f"Another node on this machine uses the key {path}.") from error
        _HELD.append(file)
    return key


_HELD: list[Any] = []
"""Key files that this process holds."""


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[None]:
    """Turn the first SIGTERM or SIGINT into :class:`Stop`, and leave the later ones be."""
    numbers = (signal.SIGTERM, signal.SIGINT)

    def stop(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise Stop

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- the work, in a process of its own -------------------------------------------------------------


class WorkFailed(RuntimeError):
    """The process that does the work died or took too long; says which, not about what."""

    refused = False  # whether it was the site's own limit


class Workshop:
    """Does one request at a time in a supervised process."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None

    def start(self) -> None:
        """Start the process, which imports the site's app once; :class:`SiteError` if it cannot."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, self.site), daemon=True)
        self._process.start()
        theirs.close()
        head, _ = self._take(None)
        if not head["ready"]:
            self.stop()
            raise SiteError(head["text"])

    def answer(
        self, run: int, node: int, request: Parcel, seconds: float, limit: str = "the server waits"
    ) -> Parcel:
        """Return the reply; after ``seconds``, which are those that ``limit`` says, it is ended."""
        try:
            if self._process is None:
                self.start()
            assert self._pipe is not None
            _put(self._pipe, {"run": run, "node": node}, request)
            _, reply = self._take(seconds)
        except (OSError, EOFError, WorkFailed, SiteError) as error:
            failed = WorkFailed(self._describe_end(error, limit))
            failed.refused = isinstance(error, WorkFailed) and "site" in limit
            self.stop()
            with contextlib.suppress(SiteError):  # told with the next request
                self.start()
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
        return _take(self._pipe)

    def _describe_end(self, error: Exception, limit: str) -> str:
        if isinstance(error, WorkFailed):
            return f"the work took longer than {limit} and was ended"
        if self._process is None:
            return "the site's app cannot be imported any more; see the node's log"
        self._process.join(1.0)
        code = self._process.exitcode
        names = {-one: one.name for one in signal.Signals}
        how = names.get(code or 0, f"exit code {code}")
        return f"the process that does the work died ({how}) and was started again"


def _put(pipe: Connection, head: dict[str, Any], parcel: Parcel | None = None) -> None:
    """Send plain values and a message through a pipe."""
    if parcel is not None:
        head = {**head, "id": parcel.id, "keys": list(parcel.contents)}
    pipe.send_bytes(json.dumps(head).encode())
    if parcel is not None:
        pipe.send_bytes(parcel.tree or b" ")
        for content in parcel.contents.values():
            pipe.send_bytes(content)


def _take(pipe: Connection) -> tuple[dict[str, Any], Parcel | None]:
    """Receive what :func:`_put` sent."""
    head = json.loads(pipe.recv_bytes())
    if "keys" not in head:
        return head, None
    tree = pipe.recv_bytes()
    return head, Parcel(head["id"], tree, {key: pipe.recv_bytes() for key in head["keys"]})


def _work(pipe: Connection, site: Site) -> None:
    """Answer requests until the node is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the node, which then ends this
    _show_log()
    try:
        app, settings = site.load()
    except Exception as error:
        text = str(error)
        if not isinstance(error, SiteError):
            log.exception("equifed: the site's app could not be imported")
            text = f"{site.app} cannot be imported ({type(error).__name__}; see the log)"
        _put(pipe, {"ready": False, "text": text})
        return
    _put(pipe, {"ready": True})
    contexts = OrderedDict[int, Context]()
    while True:
        try:
            head, parcel = _take(pipe)
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
        message = parcel.open()
        _put(pipe, {}, Parcel.of(_answer(app, message, contexts[run])))
        if _announces_delivery(message):  # what writes programs loads while others say hello
            importlib.import_module("torch.export._trace")


def _announces_delivery(message: Message) -> bool:
    with contextlib.suppress(WireError):
        request = judge_request(message)
        return request.op == "hello" and '"deliver"' in str(request.args.get("plan"))
    return False


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
