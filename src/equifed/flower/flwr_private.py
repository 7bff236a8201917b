"""Everything of flwr that is private to it, in one place.

A node of ours speaks Flower's Fleet API with Flower's own client: its TLS, its node keys, its
signatures, its heartbeats. What it takes for that has no promise of staying as it is, so every name
stands in :data:`USED` and :func:`find_changes` says which one a newer flwr changed; the server then
falls back to Flower's public calls, and stock SuperNodes still serve a run.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import math
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

BACKOFF = 0.02  # seconds until an announced object that is not there yet is asked for again
PATIENCE = 60.0  # seconds for which a call is repeated when the SuperLink cannot be reached
# Flower's codes of a wrong interval (the key is known, then), and of a node that is not let in
REGISTERED, NOT_ACTIVATED = 2003, 2004

SUPERNODE, SUPERCORE, PROTO = "flwr.supernode", "flwr.supercore", "flwr.proto"
FLEET = f"{SUPERNODE}.fleet_http_client:FleetHttpClient"
RUNTIME = f"{SUPERCORE}.interceptors.http.runtime_version"
INFLATABLE = f"{SUPERCORE}.inflatable.inflatable"
# Private names of flwr, ``module:name``, and the parameters that are given to them
USED: dict[str, str] = {
    f"{FLEET}.from_server_address": "server_address insecure root_certificates interceptors",
    f"{FLEET}.ActivateNode": "request",
    f"{FLEET}.DeactivateNode": "request",
    f"{FLEET}.SendNodeHeartbeat": "request",
    f"{FLEET}.PullMessages": "request",
    f"{FLEET}.PushMessages": "request",
    f"{FLEET}.PullObject": "request",
    f"{FLEET}.PushObject": "request",
    f"{FLEET}.ConfirmMessageReceived": "request",
    f"{SUPERNODE}.node_auth_http_interceptor:NodeAuthHttpInterceptor": "private_key public_key",
    f"{RUNTIME}:RuntimeVersionHttpInterceptor": "component_name",
    f"{SUPERCORE}.heartbeat:HeartbeatSender": "heartbeat_fn",
    f"{SUPERCORE}.error:FlowerError.from_json": "",
    f"{SUPERCORE}.primitives.asymmetric:public_key_to_bytes": "public_key",
    f"{SUPERCORE}.task_identity:TaskIdentity": "",
    "flwr.common.config:parse_config_args": "config",
    "flwr.common.constant:HEARTBEAT_DEFAULT_INTERVAL": "",
    "flwr.common.serde:message_from_proto": "message_proto",
    "flwr.common.serde:message_to_proto": "message",
    "flwr.app.message:remove_content_from_message": "message",
    f"{INFLATABLE}_protobuf_utils:make_pull_object_fn_protobuf": "pull_object_protobuf node run_id",
    f"{INFLATABLE}_protobuf_utils:make_push_object_fn_protobuf": (
        "push_object_protobuf node run_id session_id"
    ),
    f"{INFLATABLE}_utils:pull_objects": (
        "object_ids pull_object_fn max_time initial_backoff backoff_cap"
    ),
    f"{INFLATABLE}_utils:push_object_contents_from_iterable": "object_contents push_object_fn",
    f"{INFLATABLE}_utils:inflate_object_from_contents": (
        "object_id object_contents keep_object_contents"
    ),
    f"{INFLATABLE}_object:get_all_nested_objects": "obj",
    f"{INFLATABLE}_object:get_object_tree": "obj",
    f"{INFLATABLE}_object:iterate_object_tree": "tree",
    f"{INFLATABLE}_object:no_object_id_recompute": "",
    f"{PROTO}.fleet_pb2:ActivateNodeRequest": "",
    f"{PROTO}.fleet_pb2:DeactivateNodeRequest": "",
    f"{PROTO}.fleet_pb2:PullMessagesRequest": "",
    f"{PROTO}.fleet_pb2:PushMessagesRequest": "",
    f"{PROTO}.heartbeat_pb2:SendNodeHeartbeatRequest": "",
    f"{PROTO}.message_pb2:ConfirmMessageReceivedRequest": "",
    f"{PROTO}.message_pb2:ObjectTree": "",
    f"{PROTO}.node_pb2:Node": "",
}
# Those that only a server needs, and that take long to import
USED_BY_SERVER: dict[str, str] = {
    "flwr.superlink.grid.http_grid:HttpGrid._runtime_client": "",
    f"{PROTO}.runtime_pb2:PullAppMessagesRequest": "",
}


def find_changes(used: Mapping[str, str] = USED) -> list[str]:
    """Return what this flwr does not have, or takes otherwise: one line for each private name.

    >>> find_changes({"flwr.app:Message": "", "flwr.app:Massage": ""})
    ['flwr.app:Massage was removed']
    """
    found = []
    for symbol, parameters in used.items():
        try:
            used_one = _find(symbol)
        except (ImportError, AttributeError):
            found.append(f"{symbol} was removed")
            continue
        known = inspect.signature(used_one).parameters if parameters else {}
        new = (name for name in parameters.split() if name not in known)
        found += [f"{symbol} takes no {name!r} any more" for name in new]
    return found


@functools.cache
def _find(symbol: str) -> Any:
    module, _, path = symbol.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))


@functools.cache
def use(name: str) -> Any:
    """Return a private name by its last part; one that is not listed is not used."""
    pairs = [symbol.split(":") for symbol in USED | USED_BY_SERVER]
    (module,) = {module for module, path in pairs if path.split(".")[0] == name}
    return _find(f"{module}:{name}")


@functools.cache
def _is_known() -> bool:
    return not find_changes(USED | USED_BY_SERVER)


def parse_node_config(words: str) -> dict[str, Any]:
    """Read settings as ``flower-supernode --node-config`` does.

    >>> parse_node_config('name="north" partition-id=3')
    {'name': 'north', 'partition-id': 3}
    """
    parsed: dict[str, Any] = use("parse_config_args")([words])
    return parsed


def set_identity(run: int, node: int) -> None:
    """Say in whose name messages are made in this process; ``Message(...)`` asks for it."""
    identity = use("TaskIdentity")
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
        with use("no_object_id_recompute")():
            message.metadata.__dict__["_message_id"] = message.object_id
            tree = use("get_object_tree")(message)
            objects = use("get_all_nested_objects")(message)
            contents = {key: value.deflate() for key, value in objects.items()}
        return cls(message.metadata.message_id, tree.SerializeToString(), contents)

    def count_bytes(self) -> int:
        """Return the bytes of the objects."""
        return sum(map(len, self.contents.values()))

    def open(self) -> Message:
        """Put the message together."""
        inflate = use("inflate_object_from_contents")
        message: Message = inflate(self.id, self.contents, keep_object_contents=True)
        if not isinstance(message, Message):
            raise TypeError(f"a {type(message).__name__} in place of a message")
        message.metadata.__dict__["_message_id"] = self.id
        return message


Call = Callable[[str, Any], Any]  # of a method of one of Flower's clients, by name, with a request


def _fetch(
    call: Call, node: Any, run: int, head: Any, tree: Any, seconds: float, limit: float = math.inf
) -> Parcel:
    """Pull a message's objects, of ``limit`` bytes together at most, and confirm that they came."""
    message, total = head.metadata.message_id, 0
    pull = use("make_pull_object_fn_protobuf")(functools.partial(call, "PullObject"), node, run)

    def pull_bounded(key: str) -> bytes:
        nonlocal total
        content: bytes = pull(key)
        total += len(content)
        if total > limit:
            raise OverflowError(f"larger than {limit} bytes")
        return content

    ids = list(dict.fromkeys(t.object_id for t in use("iterate_object_tree")(tree)))
    contents = use("pull_objects")(
        ids, pull_bounded, max_time=seconds, initial_backoff=BACKOFF, backoff_cap=1.0
    )
    came = use("ConfirmMessageReceivedRequest")(node=node, run_id=run, message_object_id=message)
    call("ConfirmMessageReceived", came)
    return Parcel(message, tree.SerializeToString(), contents)


# -- the node's side -------------------------------------------------------------------------------


class FleetError(RuntimeError):
    """The SuperLink does not take this node, or cannot be reached; says why and what to do."""


class RunOver(RuntimeError):
    """The run that a request belongs to is not running any more."""


class Fleet:
    """The connection of one node to the SuperLink at ``HOST:PORT``, on Flower's own client.

    It trusts the authority of ``root_certificates`` (PEM), and proves who it is with its ``key``.
    """

    def __init__(self, address: str, root_certificates: bytes, key: Any) -> None:
        self.address, self.node_id, self.lost = address, 0, threading.Event()
        self._public = use("public_key_to_bytes")(key.public_key())
        version = use("RuntimeVersionHttpInterceptor")(component_name="SuperNode")
        signing = use("NodeAuthHttpInterceptor")(key, key.public_key())
        self._client = use("FleetHttpClient").from_server_address(
            address, False, root_certificates, interceptors=[version, signing]
        )
        self._heartbeats = use("HeartbeatSender")(self._beat)

    def open(self) -> int:
        """Become a node of the federation and return its number, or raise :class:`FleetError`."""
        try:
            self.node_id = self._activate(use("HEARTBEAT_DEFAULT_INTERVAL"))
        except Exception as error:
            raise FleetError(self.explain(error)) from error
        self._node = use("Node")(node_id=self.node_id)
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
            if code not in (REGISTERED, NOT_ACTIVATED):
                raise FleetError(self.explain(error)) from error
            return code == REGISTERED
        return True

    def close(self) -> None:
        """Leave the federation; never raises."""
        if self._heartbeats.is_running:
            self._heartbeats.stop()
        if self.node_id:
            with contextlib.suppress(Exception):  # it was gone before we were
                self._client.DeactivateNode(use("DeactivateNodeRequest")(node_id=self.node_id))
        self._client.close()

    def receive(self) -> tuple[int, float, Parcel] | None:
        """Return the next request (its Flower run, seconds that it is good for), or None."""
        found = self._call("PullMessages", use("PullMessagesRequest")(node=self._node))
        if not found.messages_list:
            return None
        head = use("message_from_proto")(found.messages_list[0])
        run, seconds, tree = head.metadata.run_id, head.metadata.ttl, found.message_object_trees[0]
        return run, seconds, _fetch(self._call, self._node, run, head, tree, seconds)

    def send(self, reply: Parcel, message: Message, seconds: float) -> None:
        """Send a reply; ``message`` is what is in the parcel."""
        tree, run = use("ObjectTree").FromString(reply.tree), message.metadata.run_id
        head = use("message_to_proto")(use("remove_content_from_message")(message))
        request = use("PushMessagesRequest")(
            node=self._node, messages_list=[head], message_object_trees=[tree],
            clientapp_runtime_list=[seconds],
        )  # fmt: skip
        pushed = self._call("PushMessages", request)
        wanted, call = set(pushed.objects_to_push), functools.partial(self._call, "PushObject")
        push = use("make_push_object_fn_protobuf")(call, self._node, run, pushed.session_id)
        contents = (pair for pair in reply.contents.items() if pair[0] in wanted)
        use("push_object_contents_from_iterable")(contents, push)

    def explain(self, error: Exception) -> str:
        """Say in our own words why the SuperLink does not take this node."""
        code, status = _read_code(error), _read_status(error)
        if isinstance(error, httpx.TransportError):
            return explain_transport(self.address, str(error))
        if code == NOT_ACTIVATED and not self.is_registered():
            return (
                f"{self.address} does not know this node's key (code 2004): the operator of the "
                "SuperLink must register its public half with flwr supernode register"
            )
        if code == NOT_ACTIVATED:
            return (
                f"{self.address} reports that a node with this key is connected (code 2004): "
                "another process uses the same key, or this node ended without signing off less "
                "than a minute ago and will be admitted soon"
            )
        if status == httpx.codes.UNAUTHORIZED:
            return (
                f"{self.address} does not accept this node's signature: compare the clocks of "
                "both machines (this one's may be 5 s ahead, or 5 minutes behind)"
            )
        what = f"HTTP {status}, code {code}" if status else type(error).__name__
        return f"{self.address} refuses this node, or cannot be used ({what})"

    def _beat(self) -> bool:
        """Send one sign of life; Flower's sender repeats it, and comes back if this is False."""
        interval = use("HEARTBEAT_DEFAULT_INTERVAL")
        request = use("SendNodeHeartbeatRequest")(node=self._node, heartbeat_interval=interval)
        try:
            known = self._client.SendNodeHeartbeat(request).success
        except httpx.HTTPError as error:
            if _read_status(error, 500) >= 500:
                return False
            known = False
        if not known:
            self.lost.set()
        return True

    def _call(self, method: str, request: Any) -> Any:
        """Call; repeat while the SuperLink cannot be reached, for a while."""
        until, pause = time.monotonic() + PATIENCE, 0.2
        while True:
            try:
                return getattr(self._client, method)(request)
            except httpx.HTTPError as error:
                status = _read_status(error, 500)
                if status == httpx.codes.FORBIDDEN:
                    raise RunOver from error
                if status < 500 or time.monotonic() > until:
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


def _read_status(error: Exception, default: int = 0) -> int:
    return int(getattr(getattr(error, "response", None), "status_code", default))


def _read_code(error: Exception) -> int | None:
    """Return Flower's own code of an HTTP error."""
    response = getattr(error, "response", None)
    found = None if response is None else use("FlowerError").from_json(response.text)
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
    deployed: Any = grid
    about, out = (deployed.node, deployed.run.run_id), list[Received]()

    def call(method: str, request: Any) -> Any:
        return getattr(deployed._runtime_client, method)(request)

    pulled = call("PullMessages", use("PullAppMessagesRequest")(message_ids=ids))
    for head, tree in zip(pulled.messages_list, pulled.message_object_trees, strict=True):
        message, problem = None, ""
        try:
            message = _fetch(call, *about, head, tree, seconds, limit).open()
        except Exception as error:
            kind = type(error).__name__
            told = {"ObjectPullError": "announced a reply and did not send all of it"}
            told["OverflowError"] = f"sent a reply {error}"
            problem = told.get(kind, f"sent a reply that cannot be read ({kind})")
        out.append(Received(head.metadata.reply_to_message_id, message, problem))
    return out
