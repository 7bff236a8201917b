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
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from flwr.app import Message
from flwr.serverapp import Grid

BACKOFF = 0.02
"""Seconds until an object that was announced but is not there yet is asked for again."""

SUPERNODE, SUPERCORE, PROTO = "flwr.supernode", "flwr.supercore", "flwr.proto"
FLEET = f"{SUPERNODE}.fleet_http_client:FleetHttpClient"
RUNTIME = f"{SUPERCORE}.interceptors.http.runtime_version"
INFLATABLE = f"{SUPERCORE}.inflatable.inflatable"
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
"""Private names of flwr, ``module:name``, and the parameters that are given to them."""

USED_BY_SERVER: dict[str, str] = {
    "flwr.superlink.grid.http_grid:HttpGrid._runtime_client": "",
    f"{PROTO}.runtime_pb2:PullAppMessagesRequest": "",
}
"""Those that only a server needs, and that take long to import."""


def find_changes(used: Mapping[str, str] = USED) -> list[str]:
    """Return what this flwr does not have, or takes otherwise: one line for each private name.

    >>> find_changes({"flwr.app:Message": "", "flwr.app:Massage": ""})
    ['flwr.app:Massage was removed']
    """
    return [
        line for symbol, parameters in used.items() for line in _compare(symbol, parameters.split())
    ]


def _compare(symbol: str, parameters: Iterable[str]) -> list[str]:
    try:
        found = _find(symbol)
    except (ImportError, AttributeError):
        return [f"{symbol} was removed"]
    if not parameters:
        return []
    known = inspect.signature(found).parameters
    return [f"{symbol} takes no {name!r} any more" for name in parameters if name not in known]


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


def fetch(
    pull_object: Callable[[Any], Any],
    confirm: Callable[[Any], Any],
    node: Any,
    run: int,
    head: Any,
    tree: Any,
    seconds: float,
    limit: float = math.inf,
) -> Parcel:
    """Pull a message's objects, of ``limit`` bytes together at most, and confirm that they came."""
    pull, total = use("make_pull_object_fn_protobuf")(pull_object, node, run), 0

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
    message = head.metadata.message_id
    confirm(use("ConfirmMessageReceivedRequest")(node=node, run_id=run, message_object_id=message))
    return Parcel(message, tree.SerializeToString(), contents)


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
    client, about = deployed._runtime_client, (deployed.node, deployed.run.run_id)
    pulled = client.PullMessages(use("PullAppMessagesRequest")(message_ids=ids))
    out = []
    for head, tree in zip(pulled.messages_list, pulled.message_object_trees, strict=True):
        answers = head.metadata.reply_to_message_id
        try:
            calls = client.PullObject, client.ConfirmMessageReceived
            parcel = fetch(*calls, *about, head, tree, seconds, limit)
            out.append(Received(answers, parcel.open(), ""))
        except Exception as error:
            out.append(Received(answers, None, _explain_reply(error)))
    return out


def _explain_reply(error: Exception) -> str:
    if isinstance(error, OverflowError):
        return f"sent a reply {error}"
    if type(error).__name__ == "ObjectPullError":
        return "announced a reply and did not send all of it"
    return f"sent a reply that cannot be read ({type(error).__name__})"
