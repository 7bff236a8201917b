"""Everything of flwr that is private to it, in one place.

A node of ours speaks Flower's Fleet API with Flower's own client: its TLS, its node keys, its
signatures, its heartbeats. What it takes for that has no promise of staying as it is, so every name
stands in :data:`USED` and :func:`find_changes` says which one a newer flwr changed; the server then
falls back to Flower's public calls, and stock SuperNodes still serve a run.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flwr.app import Message
from flwr.serverapp import Grid

BACKOFF = 0.02
"""Seconds until an object that was announced but is not there yet is asked for again."""

PATIENCE = 60.0
"""Seconds for which a call is repeated when the SuperLink cannot be reached."""

INFLATABLE = "flwr.supercore.inflatable."
PROTOBUF = f"{INFLATABLE}inflatable_protobuf_utils:"
USED: dict[str, tuple[str, ...]] = {
    "flwr.supernode.fleet_http_client:FleetHttpClient.from_server_address": (
        "server_address",
        "insecure",
        "root_certificates",
        "interceptors",
    ),
    **{
        f"flwr.supernode.fleet_http_client:FleetHttpClient.{name}": ("request",)
        for name in (
            "RegisterNode",
            "ActivateNode",
            "DeactivateNode",
            "UnregisterNode",
            "SendNodeHeartbeat",
            "PullMessages",
            "PushMessages",
            "PullObject",
            "PushObject",
            "ConfirmMessageReceived",
        )
    },
    "flwr.supernode.node_auth_http_interceptor:NodeAuthHttpInterceptor": (
        "private_key",
        "public_key",
    ),
    "flwr.supercore.interceptors.http.runtime_version:RuntimeVersionHttpInterceptor": (
        "component_name",
    ),
    "flwr.supercore.heartbeat:HeartbeatSender": ("heartbeat_fn",),
    "flwr.supercore.error:FlowerError.from_json": (),
    "flwr.supercore.primitives.asymmetric:generate_key_pairs": (),
    "flwr.supercore.primitives.asymmetric:public_key_to_bytes": ("public_key",),
    "flwr.supercore.task_identity:TaskIdentity": (),
    "flwr.common.config:parse_config_args": ("config",),
    "flwr.common.constant:HEARTBEAT_DEFAULT_INTERVAL": (),
    "flwr.common.serde:message_from_proto": ("message_proto",),
    "flwr.common.serde:message_to_proto": ("message",),
    "flwr.app.message:remove_content_from_message": ("message",),
    f"{PROTOBUF}make_pull_object_fn_protobuf": ("pull_object_protobuf", "node", "run_id"),
    f"{PROTOBUF}make_push_object_fn_protobuf": (
        "push_object_protobuf",
        "node",
        "run_id",
        "session_id",
    ),
    f"{INFLATABLE}inflatable_utils:pull_objects": (
        "object_ids",
        "pull_object_fn",
        "max_time",
        "initial_backoff",
        "backoff_cap",
    ),
    f"{INFLATABLE}inflatable_utils:push_object_contents_from_iterable": (
        "object_contents",
        "push_object_fn",
    ),
    f"{INFLATABLE}inflatable_utils:inflate_object_from_contents": (
        "object_id",
        "object_contents",
        "keep_object_contents",
    ),
    f"{INFLATABLE}inflatable_object:get_all_nested_objects": ("obj",),
    f"{INFLATABLE}inflatable_object:get_object_tree": ("obj",),
    f"{INFLATABLE}inflatable_object:iterate_object_tree": ("tree",),
    f"{INFLATABLE}inflatable_object:no_object_id_recompute": (),
    "flwr.superlink.grid.http_grid:HttpGrid._runtime_client": (),
    "flwr.proto.fleet_pb2:RegisterNodeFleetRequest": (),
    "flwr.proto.fleet_pb2:ActivateNodeRequest": (),
    "flwr.proto.fleet_pb2:DeactivateNodeRequest": (),
    "flwr.proto.fleet_pb2:UnregisterNodeFleetRequest": (),
    "flwr.proto.fleet_pb2:PullMessagesRequest": (),
    "flwr.proto.fleet_pb2:PushMessagesRequest": (),
    "flwr.proto.heartbeat_pb2:SendNodeHeartbeatRequest": (),
    "flwr.proto.message_pb2:ConfirmMessageReceivedRequest": (),
    "flwr.proto.message_pb2:ObjectTree": (),
    "flwr.proto.node_pb2:Node": (),
    "flwr.proto.runtime_pb2:PullAppMessagesRequest": (),
}
"""Private names of flwr, ``module:name``, and the parameters that are given to them."""

REGISTERED, NOT_ACTIVATED, RUN_OVER = 2003, 2004, 403
"""Flower's codes: a wrong interval (the key is known, then), a node that is not let in; HTTP's."""


class FleetError(RuntimeError):
    """The SuperLink does not take this node, or cannot be reached; says why and what to do."""


class RunOver(RuntimeError):
    """The run that a request belongs to is not running any more."""


def find_changes(used: Mapping[str, tuple[str, ...]] = USED) -> list[str]:
    """Return what this flwr does not have, or takes otherwise: one line for each private name.

    >>> find_changes({"flwr.app:Message": (), "flwr.app:Massage": ()})
    ['flwr.app:Massage is gone']
    """
    return [line for symbol, parameters in used.items() for line in _compare(symbol, parameters)]


def _compare(symbol: str, parameters: Iterable[str]) -> list[str]:
    try:
        found = _find(symbol)
    except (ImportError, AttributeError):
        return [f"{symbol} is gone"]
    if not parameters:
        return []
    known = inspect.signature(found).parameters
    return [f"{symbol} takes no {name!r} any more" for name in parameters if name not in known]


@functools.cache
def _find(symbol: str) -> Any:
    module, _, path = symbol.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))


@functools.cache
def _use(name: str) -> Any:
    """Return a private name by its last part; one that is not listed is not used."""
    (symbol,) = (s for s in USED if s.rpartition(":")[2].partition(".")[0] == name)
    return _find(symbol.partition(":")[0] + ":" + name)


@functools.cache
def _is_known() -> bool:
    return not find_changes()


def parse_node_config(words: str) -> dict[str, Any]:
    """Read settings as ``flower-supernode --node-config`` does.

    >>> parse_node_config('name="north" partition-id=3')
    {'name': 'north', 'partition-id': 3}
    """
    parsed: dict[str, Any] = _find("flwr.common.config:parse_config_args")([words])
    return parsed


def set_identity(run: int, node: int) -> None:
    """Say in whose name messages are made in this process; ``Message(...)`` asks for it."""
    identity = _find("flwr.supercore.task_identity:TaskIdentity")
    identity.run_id, identity.node_id, identity.task_id = run, node, 1


# -- messages as the objects that Flower stores ----------------------------------------------------


class Parcel(NamedTuple):
    """A message as Flower carries it: its id, the tree of its objects, and their bytes."""

    id: str
    tree: bytes
    contents: dict[str, bytes]

    @classmethod
    def of(cls, message: Message) -> Parcel:
        """Take a message apart."""
        inner = f"{INFLATABLE}inflatable_object:"
        with _find(f"{inner}no_object_id_recompute")():
            message.metadata.__dict__["_message_id"] = message.object_id
            tree = _find(f"{inner}get_object_tree")(message)
            objects = _find(f"{inner}get_all_nested_objects")(message)
            contents = {key: value.deflate() for key, value in objects.items()}
        return cls(message.metadata.message_id, tree.SerializeToString(), contents)

    def open(self) -> Message:
        """Put the message together."""
        inflate = _find(f"{INFLATABLE}inflatable_utils:inflate_object_from_contents")
        message: Message = inflate(self.id, self.contents, keep_object_contents=True)
        if not isinstance(message, Message):
            raise TypeError(f"a {type(message).__name__} in place of a message")
        message.metadata.__dict__["_message_id"] = self.id
        return message


# -- the node's side -------------------------------------------------------------------------------


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


_WORK = ("PushMessages", "ConfirmMessageReceived")


class Fleet:
    """The connection of one node to a SuperLink, on Flower's own client.

    Parameters
    ----------
    address : str
        ``HOST:PORT`` of the SuperLink.
    root_certificates : bytes, optional
        CA certificates in PEM; None: no TLS.
    key : EllipticCurvePrivateKey, optional
        The node's key; None: one for this process alone, which an open SuperLink registers.
    counter : Counter, optional
        Where the bytes are counted.
    """

    def __init__(
        self,
        address: str,
        root_certificates: bytes | None,
        key: Any = None,
        counter: Counter | None = None,
    ) -> None:
        self.address, self.counter, self.node_id = address, counter or Counter(), 0
        self.lost = threading.Event()
        self._registers = key is None
        asymmetric = "flwr.supercore.primitives.asymmetric:"
        private, public = (
            _find(f"{asymmetric}generate_key_pairs")() if key is None else (key, key.public_key())
        )
        self._public = _find(f"{asymmetric}public_key_to_bytes")(public)
        self._client = _find(
            "flwr.supernode.fleet_http_client:FleetHttpClient"
        ).from_server_address(
            address,
            root_certificates is None,
            root_certificates,
            interceptors=[
                _use("RuntimeVersionHttpInterceptor")(component_name="SuperNode"),
                _use("NodeAuthHttpInterceptor")(private, public),
                self.counter,
            ],
        )
        self._heartbeats: Any = None

    def open(self) -> int:
        """Become a node of the federation and return the node's number.

        Raises
        ------
        FleetError
            With the cause: not reachable, not trusted, key not registered, key in use.
        """
        interval = _find("flwr.common.constant:HEARTBEAT_DEFAULT_INTERVAL")
        try:
            if self._registers:
                request = _use("RegisterNodeFleetRequest")(public_key=self._public)
                self._client.RegisterNode(request)
                self._registers = False
                self._unregisters = True
            self.node_id = self._activate(interval)
        except Exception as error:
            raise FleetError(self.explain(error)) from error
        self.lost.clear()
        self._node = _use("Node")(node_id=self.node_id)
        self._heartbeats = _use("HeartbeatSender")(self._beat)
        self._heartbeats.start()
        return self.node_id

    _unregisters = False

    def _activate(self, interval: float) -> int:
        request = _use("ActivateNodeRequest")(public_key=self._public, heartbeat_interval=interval)
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
        calls: list[Callable[[], Any]] = []
        if self.node_id:
            leave = _use("DeactivateNodeRequest")(node_id=self.node_id)
            calls.append(lambda: self._client.DeactivateNode(leave))
        if self._unregisters:
            forget = _use("UnregisterNodeFleetRequest")(node_id=self.node_id)
            calls.append(lambda: self._client.UnregisterNode(forget))
        for call in calls:
            try:
                call()
            except Exception:  # it was gone before we were
                break
        self._client.close()

    def receive(self) -> tuple[int, float, Parcel] | None:
        """Return the next request (its Flower run, seconds that it is good for), or None."""
        before = self.counter.keeping.sent, self.counter.keeping.received
        found = self._call(self._client.PullMessages, _use("PullMessagesRequest")(node=self._node))
        if not found.messages_list:
            return None
        after = self.counter.keeping.sent, self.counter.keeping.received
        self.counter.move_last_poll(after[0] - before[0], after[1] - before[1])
        head = _use("message_from_proto")(found.messages_list[0])
        tree, run = found.message_object_trees[0], head.metadata.run_id
        pull = _use("make_pull_object_fn_protobuf")(
            lambda request: self._call(self._client.PullObject, request), self._node, run
        )
        contents = _use("pull_objects")(
            [t.object_id for t in _use("iterate_object_tree")(tree)],
            pull,
            max_time=head.metadata.ttl,
            initial_backoff=BACKOFF,
            backoff_cap=1.0,
        )
        confirm = _use("ConfirmMessageReceivedRequest")
        received = confirm(node=self._node, run_id=run, message_object_id=head.metadata.message_id)
        self._call(self._client.ConfirmMessageReceived, received)
        parcel = Parcel(head.metadata.message_id, tree.SerializeToString(), contents)
        return run, head.metadata.ttl, parcel

    def send(self, reply: Parcel, message: Message, seconds: float) -> None:
        """Send a reply; ``message`` is what is in the parcel."""
        tree, run = _use("ObjectTree").FromString(reply.tree), message.metadata.run_id
        head = _use("message_to_proto")(_use("remove_content_from_message")(message))
        pushed = self._call(
            self._client.PushMessages,
            _use("PushMessagesRequest")(
                node=self._node,
                messages_list=[head],
                message_object_trees=[tree],
                clientapp_runtime_list=[seconds],
            ),
        )
        wanted = set(pushed.objects_to_push)
        ids = dict.fromkeys(t.object_id for t in _use("iterate_object_tree")(tree))
        push = _use("make_push_object_fn_protobuf")(
            lambda request: self._call(self._client.PushObject, request),
            self._node,
            run,
            pushed.session_id,
        )
        contents = ((key, reply.contents[key]) for key in ids if key in wanted)
        _use("push_object_contents_from_iterable")(contents, push)

    def explain(self, error: Exception) -> str:
        """Say in our own words why the SuperLink does not take this node."""
        import httpx

        if isinstance(error, httpx.TransportError):
            return explain_transport(self.address, str(error))
        code = _read_code(error)
        if code == NOT_ACTIVATED:
            if not self.is_registered():
                return (
                    f"{self.address} does not know this node's key (code 2004): whoever runs the "
                    "SuperLink must register its public half with flwr supernode register"
                )
            return (
                f"{self.address} holds that a node with this key is connected (code 2004): another "
                "process uses the same key, or this node ended without saying so less than a "
                "minute ago and is let in soon"
            )
        if isinstance(error, httpx.HTTPStatusError):
            status = error.response.status_code
            if status == httpx.codes.UNAUTHORIZED:
                return (
                    f"{self.address} does not accept this node's signature: compare the clocks of "
                    "both machines"
                )
            return f"{self.address} refuses this node (HTTP {status}, code {code})"
        return f"{self.address} cannot be used ({type(error).__name__})"

    def _beat(self) -> bool:
        """Send one sign of life; Flower's sender repeats it, and comes back if this is False."""
        import httpx

        interval = _find("flwr.common.constant:HEARTBEAT_DEFAULT_INTERVAL")
        request = _use("SendNodeHeartbeatRequest")(node=self._node, heartbeat_interval=interval)
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
    words = text.lower()
    if "expired" in words:
        return f"the certificate of {address} has expired: its owner must renew it"
    if "not yet valid" in words:
        return f"the certificate of {address} is not valid yet: compare the clocks"
    if "mismatch" in words or "not valid for" in words:
        return f"the certificate of {address} is for another address"
    if "self-signed" in words or "self signed" in words or "local issuer" in words:
        return f"the certificate of {address} was issued by another authority than the given one"
    if "ssl" in words or "tls" in words or "certificate" in words:
        return f"{address} does not answer with TLS as expected"
    return f"{address} cannot be reached"


def _read_code(error: Exception) -> int | None:
    """Return Flower's own code of an HTTP error."""
    response = getattr(error, "response", None)
    if response is None:
        return None
    found = _find("flwr.supercore.error:FlowerError").from_json(response.text)
    return None if found is None else int(found.code)


# -- the server's side -----------------------------------------------------------------------------


class Received(NamedTuple):
    """A reply as it came: which request it answers, and the message or why there is none."""

    answers: str
    message: Message | None
    problem: str


def pull_replies(grid: Grid, ids: list[str], limit: int, seconds: float) -> list[Received]:
    """Return the replies to these messages that have arrived.

    On a deployment each reply is fetched for itself, so that one that cannot be read stops no
    other, nothing above ``limit`` bytes is fetched, and an upload that never ends costs ``seconds``
    at most. Flower's own call waits a second for every reply that is still on its way.
    """
    if type(grid).__name__ != "HttpGrid" or not _is_known():
        found = grid.pull_messages(ids)
        return [Received(m.metadata.reply_to_message_id, m, "") for m in found]
    client: Any = grid._runtime_client  # type: ignore[attr-defined]
    pulled = client.PullMessages(_use("PullAppMessagesRequest")(message_ids=ids))
    out = []
    for head, tree in zip(pulled.messages_list, pulled.message_object_trees, strict=True):
        answers = head.metadata.reply_to_message_id
        try:
            parcel = _fetch(client, grid, head, tree, limit, seconds)
            out.append(Received(answers, parcel.open(), ""))
        except Exception as error:
            out.append(Received(answers, None, _explain_reply(error)))
    return out


def _fetch(client: Any, grid: Any, head: Any, tree: Any, limit: int, seconds: float) -> Parcel:
    node, run, total = grid.node, grid.run.run_id, 0
    pull = _use("make_pull_object_fn_protobuf")(client.PullObject, node, run)

    def pull_bounded(key: str) -> bytes:
        nonlocal total
        content: bytes = pull(key)
        total += len(content)
        if total > limit:
            raise OverflowError(f"larger than {limit} bytes")
        return content

    ids = list(dict.fromkeys(t.object_id for t in _use("iterate_object_tree")(tree)))
    contents = _use("pull_objects")(
        ids, pull_bounded, max_time=seconds, initial_backoff=BACKOFF, backoff_cap=1.0
    )
    confirm = _use("ConfirmMessageReceivedRequest")
    client.ConfirmMessageReceived(
        confirm(node=node, run_id=run, message_object_id=head.metadata.message_id)
    )
    return Parcel(head.metadata.message_id, b"", contents)


def _explain_reply(error: Exception) -> str:
    if isinstance(error, OverflowError):
        return f"sent a reply {error}"
    if type(error).__name__ == "ObjectPullError":
        return "announced a reply and did not send all of it"
    return f"sent a reply that cannot be read ({type(error).__name__})"
