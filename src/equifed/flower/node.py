"""A site's node: one process that stays, runs the app of the site, and nothing that is sent to it.

It takes the place of Flower's SuperNode and serves the same runs. Requests that are not ours are
refused; the work is done in a process of its own that may crash; what came and what left is in the
audit log. It comes back by itself when the SuperLink was gone, and ends on SIGTERM.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import importlib
import json
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict

from equifed.flower.flwr_private import (
    Fleet,
    FleetError,
    Parcel,
    RunOver,
    find_changes,
    parse_node_config,
    set_identity,
)
from equifed.flower.site import Policy, Site, SiteError
from equifed.flower.wire import REFUSED, VERBS, Reply, Request, WireError
from equifed.training.keys import read_private

POLLS = (0.1, 2.0)  # seconds between two: a tenth of the time of being idle, within these
RETRY = (1.0, 15.0)  # seconds until the next try to connect, at first and at most
KEY_IN_USE = 90.0  # seconds after which a SuperLink has noticed that a node is gone
RAISED = 2  # Flower's code for a client app that raised an exception
LONGEST = 4096  # characters of numbers that a line quotes; of longer ones (shares) the digest

log = logging.getLogger("equifed")


class Node:
    """The node of one site; ``connect`` makes a connection.

    The audit log is ``audit.jsonl`` in the site's memory folder, unless another is given.
    """

    def __init__(self, site: Site, connect: Callable[[], Fleet], audit: Path | None = None) -> None:
        self.site, self.connect, self.work = site, connect, Workshop(site)
        self.policy = Policy.of(site.settings)
        self.audit = Audit(audit or site.memory / "audit.jsonl", site.name)
        self._told, self._since = "", 0.0

    def run(self) -> None:
        """Serve until the operating system says stop; :class:`SiteError` if the app is unusable."""
        try:
            self.work.start()
            self.audit.write("started", app=self.site.app)
            self._connect_again_and_again()
        except KeyboardInterrupt:
            log.info("equifed: the node ends")
        finally:
            self.work.stop()
            self.audit.write("stopped")
            self.audit.close()

    def _connect_again_and_again(self) -> None:
        pause = RETRY[0]
        while True:
            try:
                with contextlib.closing(self.connect()) as fleet:
                    number = fleet.open()
                    self.audit.write("connected", superlink=fleet.address, node=str(number))
                    log.info("equifed: %s is connected to %s", self.site.name, fleet.address)
                    self._told, pause = "", RETRY[0]
                    self._serve(fleet)
            except AuditError:
                raise
            except FleetError as error:
                self._tell(str(error))
            except Exception as error:  # a node that stays outlives what nobody thought of
                log.exception("equifed: the connection failed")
                self._tell(f"the connection failed ({type(error).__name__})")
            time.sleep(pause)
            pause = min(2 * pause, RETRY[1])

    def _tell(self, reason: str) -> None:
        """Say once why there is no connection, and once more when it lasts."""
        now, again = time.monotonic(), reason == self._told
        if again and now - self._since < KEY_IN_USE:
            return
        lasts = again and "with this key is connected" in reason
        then = "it lasts, so another machine uses the key" if lasts else "trying again"
        log.error("equifed: %s; %s", reason, then)
        if not again:
            self.audit.write("disconnected", reason=reason)
        self._told, self._since = reason, now

    def _serve(self, fleet: Fleet) -> None:
        idle = time.monotonic()
        while not fleet.lost.is_set():
            try:
                got = fleet.receive()
            except RunOver:
                self.audit.write("run is over")
                continue
            if got is None:
                time.sleep(min(POLLS[1], max(POLLS[0], 0.1 * (time.monotonic() - idle))))
            else:
                self._answer(fleet, *got)
                idle = time.monotonic()
        raise FleetError(f"{fleet.address} does not know this node any more")

    def _answer(self, fleet: Fleet, run: int, seconds: float, parcel: Parcel) -> None:
        """Answer one request; what leaves is written down before it does."""
        began, leaves = time.monotonic(), None
        told: dict[str, Any] = {"flower_run": str(run), "bytes_in": parcel.count_bytes()}
        try:
            set_identity(run, fleet.node_id)
            reply = self._do(run, fleet.node_id, seconds, parcel, told)
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
        self, run: int, node: int, seconds: float, parcel: Parcel, told: dict[str, Any]
    ) -> Parcel:
        """Return the reply to a request, and write down what was asked."""
        message = parcel.open()
        told["request"] = message.metadata.message_type
        try:
            request = judge_request(message)
        except WireError as error:
            log.warning("equifed: refused %s: %s", told["request"], error)
            told["refused"] = str(error)
            return Parcel.of(Message(Error(RAISED, REFUSED), reply_to=message))
        told |= {"request": request.op, "run": request.run, "tag": request.tag}
        told |= {"told": str(request.args["late"])[:500]} if "late" in request.args else {}
        most = self.policy.max_seconds or seconds
        kind = "refused" if most < seconds else "failed"
        try:
            return self.work.answer(run, node, parcel, min(seconds, most))
        except TimeoutError:
            limit = "this site allows" if most < seconds else "the server waits"
            text = f"the work took longer than {limit} and was ended"
        except ChildProcessError as error:
            kind, text = "failed", str(error)
        log.error("equifed: %s", text)
        failed = request.reply({"name": self.site.name}, error=kind, text=text)
        return Parcel.of(Message(failed.to_records(), reply_to=message))


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
    site = Site(app, {"node-key": str(node_key), **parse_node_config(node_config)})
    if not Policy.of(site.settings).operators and not any_operator:
        raise SiteError(
            "The site's policy lists no operators, so any user who may submit a run could query "
            'its data one row at a time. Write operators = ["ssh-ed25519 AAAA... anna"] into the '
            "file that policy names, or use --any-operator if that is what you want."
        )
    if changes := find_changes():
        raise SiteError(
            f"This flwr is not one that a node of ours knows ({'; '.join(changes)}); install "
            "another version, or take part with flower-supernode."
        )
    key, trusted = open_key(node_key), root_certificates.read_bytes()
    try:
        Fleet(superlink, trusted, key).close()  # a certificate that cannot be read is told at once
    except (ValueError, OSError) as error:
        raise SiteError(f"{root_certificates} holds no certificate: {error}") from error

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    # The key also signs the hello, and the keys of hidden sums.
    Node(site, lambda: Fleet(superlink, trusted, key), audit).run()


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


_HELD: list[Any] = []  # key files that this process holds


def open_key(path: Path) -> Any:
    """Return a node's key, held by this process alone for as long as it lives."""
    key = read_private(path)
    with contextlib.suppress(ImportError):  # there is no such lock on this system
        import fcntl

        _HELD.append(path.open("rb"))
        try:
            fcntl.flock(_HELD[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            _HELD.pop().close()
            raise SiteError(f"Another node on this machine uses the key {path}.") from error
    return key


# -- the audit log ---------------------------------------------------------------------------------


class AuditError(OSError):
    """The audit log cannot be written, so the node ends; it may be started again."""

    exit_code = 1


class Audit:
    """Appends to a file that its owner alone may read: one line of JSON for each request.

    ``bytes_in`` and ``bytes_out`` are those of the objects that Flower stores of a message.
    """

    def __init__(self, path: Path, site: str) -> None:
        self.path, self.site = path, site
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, event: str, **told: Any) -> None:
        """Write one line, at once and whole."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        content = json.dumps({"time": now, "site": self.site, "event": event, **told}).encode()
        try:
            if os.write(self._file, content + b"\n") <= len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise AuditError(
                f"The audit log {self.path} cannot be written ({error.strerror}); a node that "
                "cannot record what it sends sends nothing. Make room, and start it again."
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
    arrays = {k: {"dtype": a.dtype.name, "shape": list(a.shape)} for k, a in reply.arrays.items()}
    numbers, text = reply.numbers, json.dumps(reply.numbers)
    if len(text) > LONGEST:
        digest = hashlib.sha256(text.encode()).hexdigest()
        numbers = {"characters": len(text), "sha256": digest, "names": sorted(numbers)[:20]}
    told: dict[str, Any] = {"arrays": arrays, "numbers": numbers}
    if reply.error:
        told["refused" if reply.error == "refused" else "error"] = f"{reply.error}: {reply.text}"
    return told


# -- the work, in a process of its own -------------------------------------------------------------


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
        if wrong := self._take(None)[0]["wrong"]:
            self.stop()
            raise SiteError(wrong)

    def answer(self, run: int, node: int, request: Parcel, seconds: float) -> Parcel:
        """Return the reply; ``ChildProcessError`` if the process died, ``TimeoutError`` in time."""
        try:
            if self._process is None:
                self.start()
            assert self._pipe is not None
            _put(self._pipe, request, run=run, node=node)
            return self._take(seconds)[1]
        except (OSError, EOFError, SiteError) as error:
            failed = (
                error
                if isinstance(error, TimeoutError)
                else ChildProcessError(self._describe_end())
            )
            self.stop()
            with contextlib.suppress(SiteError):  # told with the next request
                self.start()
            raise failed from error

    def stop(self) -> None:
        """End the process, whatever it does."""
        if self._process is not None and self._pipe is not None:
            self._process.kill()
            self._process.join()
            self._process.close()
            self._pipe.close()
        self._process = self._pipe = None

    def _take(self, seconds: float | None) -> tuple[dict[str, Any], Parcel]:
        assert self._pipe is not None and self._process is not None
        ready = wait([self._pipe, self._process.sentinel], seconds)
        if not ready:
            raise TimeoutError
        if self._pipe not in ready and not self._pipe.poll():
            raise EOFError
        return _take(self._pipe)

    def _describe_end(self) -> str:
        if self._process is None:
            return "the site's app cannot be imported any more; see the node's log"
        self._process.join(1.0)
        code = self._process.exitcode
        how = {-one: one.name for one in signal.Signals}.get(code or 0, f"exit code {code}")
        return f"the process that does the work died ({how}) and was started again"


def _put(pipe: Connection, parcel: Parcel, **head: Any) -> None:
    """Send a message and plain values through a pipe."""
    told = {**head, "id": parcel.id, "keys": list(parcel.contents)}
    for content in (json.dumps(told).encode(), parcel.tree, *parcel.contents.values()):
        pipe.send_bytes(content)


def _take(pipe: Connection) -> tuple[dict[str, Any], Parcel]:
    """Receive what :func:`_put` sent."""
    head = json.loads(pipe.recv_bytes())
    tree = pipe.recv_bytes()
    return head, Parcel(head["id"], tree, {key: pipe.recv_bytes() for key in head["keys"]})


def _work(pipe: Connection, site: Site) -> None:
    """Answer requests until the node is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the node, which then ends this
    _show_log()
    wrong = ""
    try:
        app, settings = site.load()
    except SiteError as error:
        wrong = str(error)
    except Exception as error:
        log.exception("equifed: the site's app could not be imported")
        wrong = f"{site.app} cannot be imported ({type(error).__name__}; see the log)"
    _put(pipe, Parcel("", b"-", {}), wrong=wrong)
    while not wrong:
        try:
            head, parcel = _take(pipe)
        except (EOFError, OSError):
            return
        began, message = time.monotonic(), parcel.open()
        set_identity(head["run"], head["node"])
        about = head["run"], head["node"], dict(site.given), RecordDict(), dict(settings)
        try:
            reply: Message = app(message=message, context=Context(*about))
        except Exception:
            log.exception("equifed: the site's app failed")
            reply = Message(Error(RAISED, "the site's app failed"), reply_to=message)
        what = message.metadata.message_type
        log.info("equifed: answered %s in %.3f s", what, time.monotonic() - began)
        _put(pipe, Parcel.of(reply))
        request = judge_request(message)
        if request.op == "hello" and '"deliver"' in str(request.args.get("plan")):
            importlib.import_module("torch.export._trace")  # while others still say hello
