"""A node's connection to its SuperLink, on Flower's own client, and its record of what passed.

Every private name of flwr comes from ``flwr_private.use``, which knows those that it lists alone.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import json
import os
import random
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Message

from equifed.flower.flwr_private import Parcel, fetch, use
from equifed.flower.wire import Reply

PATIENCE = 60.0
"""Seconds for which a call is repeated when the SuperLink cannot be reached."""

REGISTERED, NOT_ACTIVATED, RUN_OVER = 2003, 2004, 403
"""Flower's codes: a wrong interval (the key is known, then), a node that is not let in; HTTP's."""

LONGEST = 4096
"""Characters of numbers that a line quotes; longer ones (shares of secrets) by their digest."""


class FleetError(RuntimeError):
    """The SuperLink does not take this node, or cannot be reached; says why and what to do."""


class RunOver(RuntimeError):
    """The run that a request belongs to is not running any more."""


class Fleet:
    """The connection of one node to the SuperLink at ``HOST:PORT``, on Flower's own client.

    It trusts the authority of ``root_certificates`` (PEM), and proves who it is with its ``key``.
    """

    def __init__(self, address: str, root_certificates: bytes, key: Any) -> None:
        self.address, self.node_id = address, 0
        self.lost = threading.Event()
        self._public = use("public_key_to_bytes")(key.public_key())
        self._client = use("FleetHttpClient").from_server_address(
            address,
            False,
            root_certificates,
            interceptors=[
                use("RuntimeVersionHttpInterceptor")(component_name="SuperNode"),
                use("NodeAuthHttpInterceptor")(key, key.public_key()),
            ],
        )
        self._heartbeats: Any = None

    def open(self) -> int:
        """Become a node of the federation and return its number, or raise :class:`FleetError`."""
        try:
            self.node_id = self._activate(use("HEARTBEAT_DEFAULT_INTERVAL"))
        except Exception as error:
            raise FleetError(self.explain(error)) from error
        self.lost.clear()
        self._node = use("Node")(node_id=self.node_id)
        self._heartbeats = use("HeartbeatSender")(self._beat)
        self._heartbeats.start()
        return self.node_id

    def _activate(self, interval: float) -> int:
        request = use("ActivateNodeRequest")(public_key=self._public, heartbeat_interval=interval)
        return int(self._client.ActivateNode(request).node_id)

    def is_registered(self) -> bool:
        """Tell whether the SuperLink knows this key, without becoming a node.

        An interval of zero is refused after the key was looked up, and before anything is changed.
        """
        try:
            self._activate(0.0)
        except Exception as error:
            code = _read_code(error)
            if code in (REGISTERED, NOT_ACTIVATED):
                return code == REGISTERED
            raise FleetError(self.explain(error)) from error
        return True

    def close(self) -> None:
        """Leave the federation; never raises."""
        if self._heartbeats is not None and self._heartbeats.is_running:
            self._heartbeats.stop()
        if self.node_id:
            with contextlib.suppress(Exception):  # it was gone before we were
                self._client.DeactivateNode(use("DeactivateNodeRequest")(node_id=self.node_id))
        self._client.close()

    def receive(self) -> tuple[int, float, Parcel] | None:
        """Return the next request (its Flower run, seconds that it is good for), or None."""
        found = self._call(self._client.PullMessages, use("PullMessagesRequest")(node=self._node))
        if not found.messages_list:
            return None
        head = use("message_from_proto")(found.messages_list[0])
        tree, run = found.message_object_trees[0], head.metadata.run_id

        def call(name: str) -> Callable[[Any], Any]:
            return lambda request: self._call(getattr(self._client, name), request)

        calls = call("PullObject"), call("ConfirmMessageReceived")
        parcel = fetch(*calls, self._node, run, head, tree, head.metadata.ttl)
        return run, head.metadata.ttl, parcel

    def send(self, reply: Parcel, message: Message, seconds: float) -> None:
        """Send a reply; ``message`` is what is in the parcel."""
        tree, run = use("ObjectTree").FromString(reply.tree), message.metadata.run_id
        head = use("message_to_proto")(use("remove_content_from_message")(message))
        pushed = self._call(
            self._client.PushMessages,
            use("PushMessagesRequest")(
                node=self._node,
                messages_list=[head],
                message_object_trees=[tree],
                clientapp_runtime_list=[seconds],
            ),
        )
        wanted = set(pushed.objects_to_push)
        ids = dict.fromkeys(t.object_id for t in use("iterate_object_tree")(tree))
        push = use("make_push_object_fn_protobuf")(
            lambda request: self._call(self._client.PushObject, request),
            self._node,
            run,
            pushed.session_id,
        )
        contents = ((key, reply.contents[key]) for key in ids if key in wanted)
        use("push_object_contents_from_iterable")(contents, push)

    def explain(self, error: Exception) -> str:
        """Say in our own words why the SuperLink does not take this node."""
        import httpx

        if isinstance(error, httpx.TransportError):
            return explain_transport(self.address, str(error))
        code = _read_code(error)
        if code == NOT_ACTIVATED:
            if not self.is_registered():
                return (
                    f"{self.address} does not know this node's key (code 2004): the operator of "
                    "the SuperLink must register its public half with flwr supernode register"
                )
            return (
                f"{self.address} reports that a node with this key is connected (code 2004): "
                "another process uses the same key, or this node ended without signing off less "
                "than a minute ago and will be admitted soon"
            )
        if isinstance(error, httpx.HTTPStatusError):
            status = error.response.status_code
            if status == httpx.codes.UNAUTHORIZED:
                return (
                    f"{self.address} does not accept this node's signature: compare the clocks of "
                    "both machines (this one's may be 5 s ahead, or 5 minutes behind)"
                )
            return f"{self.address} refuses this node (HTTP {status}, code {code})"
        return f"{self.address} cannot be used ({type(error).__name__})"

    def _beat(self) -> bool:
        """Send one sign of life; Flower's sender repeats it, and comes back if this is False."""
        import httpx

        interval = use("HEARTBEAT_DEFAULT_INTERVAL")
        request = use("SendNodeHeartbeatRequest")(node=self._node, heartbeat_interval=interval)
        try:
            if not self._client.SendNodeHeartbeat(request).success:
                self.lost.set()
        except httpx.TransportError:
            return False
        except httpx.HTTPStatusError as error:
            if error.response.status_code >= 500:
                return False
            self.lost.set()
        return True

    def _call(self, method: Callable[[Any], Any], request: Any) -> Any:
        """Call; repeat while the SuperLink cannot be reached, for a while."""
        import httpx

        until, pause = time.monotonic() + PATIENCE, 0.2
        while True:
            try:
                return method(request)
            except httpx.HTTPStatusError as error:
                status = error.response.status_code
                if status == RUN_OVER:
                    raise RunOver from error
                if status < 500 or time.monotonic() > until:
                    self.lost.set()
                    raise FleetError(self.explain(error)) from error
            except httpx.TransportError as error:
                if time.monotonic() > until:
                    raise FleetError(self.explain(error)) from error
            time.sleep(pause * random.uniform(0.8, 1.2))
            pause = min(2 * pause, 5.0)


def explain_transport(address: str, text: str) -> str:
    """Say why a connection did not come about, from the text of the error.

    >>> explain_transport("fl:1", "certificate verify failed: certificate has expired")
    'the certificate of fl:1 has expired: its owner must renew it'
    """
    certificate = f"the certificate of {address}"
    known = {
        "expired": f"{certificate} has expired: its owner must renew it",
        "not yet valid": f"{certificate} is not valid yet: compare the clocks",
        "mismatch|not valid for": f"{certificate} is for another address",
        "self.signed|local issuer": f"{certificate} was issued by another authority than the given "
        "one",
        "ssl|tls|certificate": f"{address} does not answer with TLS as expected",
    }
    found = (told for words, told in known.items() if re.search(words, text.lower()))
    return next(found, f"{address} cannot be reached")


def _read_code(error: Exception) -> int | None:
    """Return Flower's own code of an HTTP error."""
    response = getattr(error, "response", None)
    if response is None:
        return None
    found = use("FlowerError").from_json(response.text)
    return None if found is None else int(found.code)


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
