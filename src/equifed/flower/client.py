"""The client's side: a ``ClientApp`` around the user's data and the library's own local work.

Whatever goes wrong becomes an error in our own words: the text of an exception may hold data and
stays in the client's log.
"""

from __future__ import annotations

import errno
import logging
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from equifed.contract import MissingClients
from equifed.data import DataError
from equifed.flower.account import Waiting
from equifed.flower.memory import Refused, Stale
from equifed.flower.participant import Client, SiteData, to_federation
from equifed.flower.secure.session import RangeError, SecureError
from equifed.flower.site import Policy, Site
from equifed.flower.task import Task
from equifed.flower.wire import VERBS, Reply, Request, WireError
from equifed.flower.worker import Worker
from equifed.privacy.ledger import NoAccountant, OverBudget
from equifed.privacy.site import Unanswered

LOADED = 64  # clients that one process keeps: a simulation runs many nodes in one
# Errors in our own words, and what they are to the server
OURS: dict[type[Exception], str] = {
    Stale: "stale",
    SecureError: "refused",
    Refused: "refused",
    OverBudget: "refused",
    Unanswered: "refused",
    NoAccountant: "refused",
    Waiting: "waiting",
    WireError: "request",
    RangeError: "request",
}

log = logging.getLogger("equifed")


def make_client_app(
    load_data: Callable[[Context], Any],
    task: Task,
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
    task : Task
        Model and loss.
    classes : int, optional
        Number of classes of the whole federation, which one client's labels may not show.
    memory : Path, optional
        Folder for what this client keeps; by default that of the node's ``memory`` setting, of
        ``$EQUIFED_MEMORY``, or the user's cache.
    """
    app, loaded = ClientApp(), OrderedDict[tuple[int, int], Client]()
    more = {} if memory is None else {"memory": memory}

    def load(context: Context) -> Client:
        """Return the client of a node; a process that lives on loads its data once."""
        key = (context.run_id, context.node_id)
        site = Site("", {**context.node_config, **more}, context.node_id)
        if key not in loaded:
            data = load_data(context)
            if not isinstance(data, SiteData):
                data = to_federation(data, site.name, classes, task.samples)
            loaded[key] = Client(data, task, site)
            while len(loaded) > LOADED:
                loaded.popitem(last=False)
        loaded[key].policy = Policy.of(site.settings)  # as it is now
        return loaded[key]

    def answer(message: Message, context: Context) -> Message:
        name = Site("", context.node_config, context.node_id).name
        reply = answer_message(message, lambda: load(context), name)
        return Message(reply.to_records(), reply_to=message)

    for verb in VERBS.values():
        category, _, action = verb.message.partition(".")
        getattr(app, category)(action)(answer)
    return app


def answer_message(message: Message, load: Callable[[], Client], name: str) -> Reply:
    """Return the reply to a message; never raise, never quote an exception.

    ``name`` is the client's, which an error says, too: it may be the first that is heard of it.
    """
    try:
        request = Request.from_records(message.content)
    except WireError as error:
        return Reply("", "", "", {"name": name}, error="request", text=str(error))
    if "late" in request.args:
        log.warning("equifed: the server says: %s", str(request.args["late"])[:500])
    kind, where = "data", "while loading the data"
    try:
        client = load()
        kind, where = "failed", f"in {request.op}"
        return Worker(client, request).answer()
    except MissingClients as error:
        kind, text = "non-finite", next(iter(error.reasons.values()))
    except tuple(OURS) as error:
        kind, text = next(OURS[t] for t in type(error).__mro__ if t in OURS), str(error)
    except Exception as error:
        log.exception("equifed: the request failed %s", where)
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "no space is left on the disk" if full else type(error).__name__
        text = f"{what} {where}; see the client's log"
        if isinstance(error, DataError):  # its text may quote a row
            kind, text = "data", error.told or text
    return request.reply({"name": name}, error=kind, text=text)
