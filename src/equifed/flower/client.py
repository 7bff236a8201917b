"""The client's side: a ``ClientApp`` around the user's data and the library's own local work.

Whatever goes wrong becomes an error in our own words: the text of an exception may hold data and
stays in the client's log.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from equifed.contract.clients import MissingClients
from equifed.flower.data import as_federation
from equifed.flower.memory import default_root
from equifed.flower.secure.masks import RangeError
from equifed.flower.secure.session import SecureError
from equifed.flower.task import Task
from equifed.flower.wire import OPERATIONS, Reply, Request, WireError
from equifed.flower.worker import LEVELS, Client, Stale, Worker

LoadData = Callable[[Context], Any]
"""The user's function; see :func:`equifed.flower.data.as_federation` for its result."""

log = logging.getLogger("equifed")


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
    app, loaded = ClientApp(), OrderedDict[tuple[int, int], Client]()

    def client(context: Context) -> Client:
        """Return the client of a node; a process that lives on loads its data once."""
        key = (context.run_id, context.node_id)
        if key not in loaded:
            federation = as_federation(load_data(context), client_name(context), classes)
            root = memory or Path(str(context.node_config.get("memory", default_root())))
            own = task if isinstance(task, Task) else task(context)
            loaded[key] = Client(federation, own, root, _partition(context), _floor(context))
            while len(loaded) > 64:  # a simulation runs many nodes in one process
                loaded.popitem(last=False)
        return loaded[key]

    def answer(message: Message, context: Context) -> Message:
        reply = answered(message, lambda: client(context))
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


def answered(message: Message, load: Callable[[], Client]) -> Reply:
    """Return the reply to a message; never raise, never quote an exception."""
    try:
        request = Request.from_records(message.content)
    except WireError as error:
        return Reply("", "", "", error="request", text=str(error))

    def refused(kind: str, text: str) -> Reply:
        return Reply(request.op, request.run, request.tag, error=kind, text=text)

    try:
        client = load()
    except Exception as error:
        log.exception("equifed: the data could not be loaded")
        kind = type(error).__name__
        return refused("data", f"{kind} while loading the data; see the client's log")
    try:
        return Worker(client, request).answer()
    except Stale as error:
        return refused("stale", str(error))
    except MissingClients as error:
        return refused("non-finite", next(iter(error.reasons.values())))
    except (WireError, RangeError, SecureError) as error:  # our own words
        return refused("refused" if isinstance(error, SecureError) else "request", str(error))
    except Exception as error:
        log.exception("equifed: the request failed")
        return refused("failed", f"{type(error).__name__} in {request.op}; see the client's log")
