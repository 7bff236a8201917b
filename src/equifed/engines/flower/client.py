"""The client's side: a ``ClientApp`` around the user's data and the library's own local work.

Every request is answered from the request, the data and the client's memory alone, and memory is
written at the end, so a request may be repeated at will. Whatever goes wrong becomes an error in
our own words: the text of an exception may hold data and stays in the client's log.
"""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from equifed.clients import MissingClients
from equifed.data.federation import Federation
from equifed.engines.flower.data import as_federation
from equifed.engines.flower.masking import Masking
from equifed.engines.flower.masks import RangeError
from equifed.engines.flower.memory import Memory, default_root
from equifed.engines.flower.secure import SecureError
from equifed.engines.flower.task import OneClient, Schema, Task, versions
from equifed.engines.flower.wire import OPERATIONS, Reply, Request, WireError, expect
from equifed.engines.in_process import DenseVectors
from equifed.local import LocalSGD
from equifed.metrics.evaluator import FederationEvaluator
from equifed.streams import Stream

LoadData = Callable[[Context], Any]
"""The user's function; see :func:`equifed.engines.flower.data.as_federation` for its result."""

log = logging.getLogger("equifed")


LEVELS = ("none", "sums", "secure")
"""How much of its vectors a client shows, from all to nothing but sums."""


@dataclass(frozen=True)
class Node:
    """What a client knows of itself besides its data: its memory, partition and least privacy."""

    root: Path
    partition: int | None = None
    floor: int = 0


class Stale(Exception):
    """The request refers to something that this client does not hold."""


def client_app(
    load_data: LoadData,
    task: Task | Callable[[Context], Task],
    *,
    classes: int | None = None,
    memory: Path | None = None,
) -> ClientApp:
    """Return a ready ``ClientApp``.

    Parameters
    ----------
    load_data : callable
        Maps Flower's context to this client's data: ``(X, y)``, ``{"train": (X, y), "test": ...}``,
        a dataset object, or a one-client :class:`equifed.Federation`.
    task : Task, or callable
        Model and loss, or how to get them from the context.
    classes : int, optional
        Number of classes of the whole federation, which one client's labels may not show.
    memory : Path, optional
        Folder for what this client keeps; by default that of the node's ``memory`` setting, of
        ``$EQUIFED_MEMORY``, or the user's cache.
    """
    app, loaded = ClientApp(), OrderedDict[tuple[int, int], Federation]()

    def data(context: Context) -> Federation:
        key = (context.run_id, context.node_id)
        if key not in loaded:
            loaded[key] = as_federation(load_data(context), client_name(context), classes)
            while len(loaded) > 64:  # a simulation runs many nodes in one process
                loaded.popitem(last=False)
        return loaded[key]

    def answer(message: Message, context: Context) -> Message:
        root = memory or Path(str(context.node_config.get("memory", default_root())))
        node = Node(root, _partition(context), _floor(context))
        reply = answered(message, lambda: data(context), lambda: _task(task, context), node)
        return Message(reply.to_records(), reply_to=message)

    for message_type in OPERATIONS.values():
        category, _, action = message_type.partition(".")
        getattr(app, category)(action)(answer)
    return app


def client_name(context: Context) -> str:
    """Return the client's name: the node's setting ``name``, or one made of its partition or id."""
    given = context.node_config.get("name")
    partition = _partition(context)
    if given is not None:
        return str(given)
    return f"node-{context.node_id}" if partition is None else f"client-{partition}"


def _partition(context: Context) -> int | None:
    value = context.node_config.get("partition-id")
    return None if value is None else int(value)


def _floor(context: Context) -> int:
    """Return the least privacy that this node takes part in: its setting ``privacy``."""
    return LEVELS.index(str(context.node_config.get("privacy", LEVELS[0])))


def _task(task: Task | Callable[[Context], Task], context: Context) -> Task:
    return task if isinstance(task, Task) else task(context)


def answered(
    message: Message,
    data: Callable[[], Federation],
    task: Callable[[], Task],
    node: Node,
) -> Reply:
    """Return the reply to a message; never raise, never quote an exception."""
    try:
        request = Request.from_records(message.content)
    except WireError as error:
        return Reply("", "", "", error="request", text=str(error))

    def refused(kind: str, text: str) -> Reply:
        return Reply(request.op, request.run, request.tag, error=kind, text=text)

    try:
        federation = data()
    except Exception as error:
        log.exception("equifed: the data could not be loaded")
        kind = type(error).__name__
        return refused("data", f"{kind} while loading the data; see the client's log")
    try:
        return Worker(federation, task(), node, request).answer()
    except Stale as error:
        return refused("stale", str(error))
    except MissingClients as error:
        return refused("non-finite", next(iter(error.reasons.values())))
    except (WireError, RangeError, SecureError) as error:  # our own words
        return refused("refused" if isinstance(error, SecureError) else "request", str(error))
    except Exception as error:
        log.exception("equifed: the request failed")
        return refused("failed", f"{type(error).__name__} in {request.op}; see the client's log")


class Worker:
    """One client at one request."""

    def __init__(self, federation: Federation, task: Task, node: Node, request: Request) -> None:
        self.federation, self.task, self.node = federation, task, node
        self.request, self.args = request, request.args
        self.engine: OneClient = task.engine(federation, max(request.client, 0))
        self.memory = Memory(node.root, request.run, federation.names[0])
        self.round = int(self.args.get("round", 0))

    def answer(self) -> Reply:
        """Do what the request says."""
        operations: Mapping[str, Callable[[], Reply]] = {
            "hello": self.hello,
            "losses": self.losses,
            "gradient": self.gradient,
            "local": self.local,
            "sum": self.sum,
            "norms": self.norms,
            "recall": self.recall,
            "metrics": self.metrics,
            "keys": lambda: self._reply(self._masking().keys()),
            "shares": lambda: self._reply(self._masking().shares()),
            "unmask": lambda: self._reply(self._masking().unmask()),
        }
        reply = operations[self.request.op]()
        self.memory.tidy(self.round, [str(key) for key in self.args.get("pins", [])])
        return reply

    def hello(self) -> Reply:
        """Say who this is, what data there are, and with which software."""
        return self._reply(
            {
                "name": self.federation.names[0],
                "partition": self.node.partition,
                "versions": versions(),
                "sizes": {k: len(split) for k, split in self.federation.splits().items()},
                "schema": Schema.of(self.federation).to_dict(),
                "model": self.task.fingerprint(self.engine),
                "key": self._masking().run_key().hex(),
            }
        )

    def losses(self) -> Reply:
        """Return f_i(x)."""
        losses = self.engine.losses(self._x(), self._stream(), self.args["batch"])
        return self._reply({"loss": float(losses[0])})

    def gradient(self) -> Reply:
        """Return f_i(x), and keep the gradient or also send it."""
        losses, vectors = self.engine.value_and_gradient(
            self._x(), self._stream(), self.args["batch"]
        )
        assert isinstance(vectors, DenseVectors)
        return self._kept({"loss": float(losses[0])}, {"gradient": vectors})

    def local(self) -> Reply:
        """Do local work, and keep or send what comes of it."""
        work = LocalSGD.from_dict(self.args["work"])
        target, slope = None, self.args["slope"]
        control = self._control()
        if control is not None:
            target = self._tensor(expect(self.request.arrays, "target", *self._kind()))
        moved = self.engine.local_steps(
            self._x(),
            work,
            self._stream(),
            control=control,
            target=target,
            slopes=None if slope is None else np.array([float(slope)]),
        )
        numbers: dict[str, Any] = {"steps": int(moved.steps[0])}
        if moved.thresholds is not None:
            numbers["threshold"] = float(moved.thresholds[0])
        parts = {
            name: getattr(moved, name)
            for name in ("displacement", "snapshot", "average", "mean_gradient")
            if getattr(moved, name) is not None
        }
        return self._kept(numbers, parts)

    def sum(self) -> Reply:
        """Return a kept vector times this client's weight, masked."""
        vector = self._recalled(str(self.args["key"]))
        return self._reply({}, {"masked": self._masking().masked(vector)})

    def norms(self) -> Reply:
        """Return the squared length of a kept vector."""
        vectors = DenseVectors(self._tensor(self._recalled(str(self.args["key"])))[None])
        return self._reply({"norm": float(vectors.squared_norms()[0])})

    def recall(self) -> Reply:
        """Return a kept vector in clear."""
        self._allow("none")
        return self._reply({}, {"vector": self._recalled(str(self.args["key"]))})

    def metrics(self) -> Reply:
        """Return loss and accuracy of every split."""
        splits = tuple(self.args["splits"])
        found = FederationEvaluator(self.federation, self.engine.model, splits)(self._x())
        numbers = {
            e.split: {
                "size": int(e.sizes[0]),
                "metrics": {name: float(values[0]) for name, values in e.metrics.items()},
            }
            for e in found
        }
        return self._reply({"splits": numbers})

    # -- small parts ------------------------------------------------------------------------------

    def _reply(
        self, numbers: dict[str, Any], arrays: Mapping[str, NDArray[Any]] | None = None
    ) -> Reply:
        request = self.request
        return Reply(request.op, request.run, request.tag, numbers, arrays or {})

    def _kept(self, numbers: dict[str, Any], parts: Mapping[str, DenseVectors]) -> Reply:
        """Keep vectors under their keys; send them, or one of them scaled and masked, if asked."""
        rows = {name: _array(vectors.matrix[0]) for name, vectors in parts.items()}
        for name, row in rows.items():
            self.memory.put(f"{self.request.tag}/{name}", row, self.round)
        if self.args["give"]:
            self._allow("none")
            return self._reply(numbers, rows)
        if "mask" in self.args:
            masked = self._masking().masked(rows[str(self.args["mask"]["part"])])
            return self._reply(numbers, {"masked": masked})
        return self._reply(numbers)

    def _control(self) -> DenseVectors | None:
        key, sent = self.args["control"], self.request.arrays.get("control")
        if key is None and sent is None:
            return None
        if sent is not None:
            return DenseVectors(
                self._tensor(expect(self.request.arrays, "control", *self._kind()))[None]
            )
        return DenseVectors(self._tensor(self._recalled(str(key)))[None])

    def _recalled(self, key: str) -> NDArray[Any]:
        size, dtype = self._kind()
        if not key:  # the memory that every client starts with
            return np.zeros(size, dtype=dtype)
        vector = self.memory.get(key)
        if vector is None or vector.shape != (size,) or vector.dtype.name != dtype:
            raise Stale(f"this client does not hold {key}")
        return vector

    def _masking(self) -> Masking:
        args = self.args.get("mask", {})
        if args.get("scheme") == "pairs":
            self._allow("sums")
        return Masking(self.memory, args, self.request.client, secrets.token_bytes)

    def _allow(self, level: str) -> None:
        if LEVELS.index(level) < self.node.floor:
            raise SecureError(
                f"this node takes part with privacy {LEVELS[self.node.floor]!r} or more only"
            )

    def _x(self) -> torch.Tensor:
        return self._tensor(expect(self.request.arrays, "x", *self._kind()))

    def _stream(self) -> Stream:
        return Stream(int(self.args["seed"]), tuple(self.args["address"]))

    def _kind(self) -> tuple[int, str]:
        return self.engine.model.size, self.task.dtype

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.as_tensor(array.copy(), device=self.engine.model.device)


def _array(vector: torch.Tensor) -> NDArray[Any]:
    out: NDArray[Any] = vector.detach().to("cpu").contiguous().numpy()
    return out
