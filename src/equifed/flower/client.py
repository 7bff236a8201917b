"""The client's side: a ``ClientApp`` around the user's data and the library's own local work.

Whatever goes wrong becomes an error in our own words: the text of an exception may hold data and
stays in the client's log.
"""

from __future__ import annotations

import errno
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from equifed.contract.clients import MissingClients
from equifed.contract.evaluation import SPLITS
from equifed.data.federation import Federation
from equifed.data.fields import Layout, Packed, compare_layouts
from equifed.data.items import Named, take_items
from equifed.data.split import DataError, Holdout
from equifed.flower.account import Waiting
from equifed.flower.budget import Refused
from equifed.flower.memory import LostPart
from equifed.flower.participant import Client, Stale
from equifed.flower.secure.masking import Identity
from equifed.flower.secure.masks import RangeError
from equifed.flower.secure.session import SecureError
from equifed.flower.site import (
    Policy,
    SiteData,
    find_memory,
    name_site,
    read_partition,
    read_site,
)
from equifed.flower.task import Task
from equifed.flower.wire import VERBS, Reply, Request, WireError
from equifed.flower.worker import Worker
from equifed.privacy.ledger import NoAccountant, OverBudget
from equifed.privacy.site import Unanswered

LOADED = 64
"""Clients that one process keeps: a simulation runs many nodes in one."""

AGREED = "[data] of the app"

SEE_LOG = "see the client's log"

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

    def load(context: Context) -> Client:
        """Return the client of a node; a process that lives on loads its data once."""
        key, node = (context.run_id, context.node_id), context.node_config
        told = read_site(node)
        if key not in loaded:
            data = load_data(context)
            if not isinstance(data, SiteData):
                name = name_site(node, context.node_id)
                data = to_federation(data, name, classes, task.samples)
            loaded[key] = Client(
                data,
                task,
                memory or find_memory(node),
                read_partition(node),
                Policy(),
                Identity.from_settings(told),
                Path(str(told["results"])) if "results" in told else None,
            )
            while len(loaded) > LOADED:
                loaded.popitem(last=False)
        loaded[key].policy = Policy.of(told)  # as it is now
        return loaded[key]

    def answer(message: Message, context: Context) -> Message:
        name = name_site(context.node_config, context.node_id)
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
    who = {"name": name}
    try:
        request = Request.from_records(message.content)
    except WireError as error:
        return Reply("", "", "", who, error="request", text=str(error))
    if "late" in request.args:
        log.warning("equifed: the server says: %s", str(request.args["late"])[:500])
    try:
        return Worker(_load(load), request).answer()
    except tuple(OURS) as error:
        kind, text = next(OURS[t] for t in type(error).__mro__ if t in OURS), str(error)
    except MissingClients as error:
        kind, text = "non-finite", next(iter(error.reasons.values()))
    except DataError as error:  # its text may quote a row
        log.exception("equifed: the data cannot be used")
        kind, text = "data", error.told or f"the table cannot be used in {request.op}; {SEE_LOG}"
    except Exception as error:
        log.exception("equifed: the request failed")
        kind, text = "failed", f"{explain_failure(error)} in {request.op}; {SEE_LOG}"
    return request.reply(who, error=kind, text=text)


class _NotLoaded(Exception):
    """The data could not be loaded; says why without showing any."""


OURS: dict[type[Exception], str] = {
    Stale: "stale",
    LostPart: "stale",
    SecureError: "refused",
    Refused: "refused",
    OverBudget: "refused",
    Unanswered: "refused",
    NoAccountant: "refused",
    Waiting: "waiting",
    WireError: "request",
    RangeError: "request",
    _NotLoaded: "data",
}
"""Errors in our own words, and what they are to the server."""


def _load(load: Callable[[], Client]) -> Client:
    try:
        return load()
    except Exception as error:
        log.exception("equifed: the data could not be loaded")
        told = error.told if isinstance(error, DataError) else ""
        raise _NotLoaded(
            told or f"{explain_failure(error)} while loading the data; {SEE_LOG}"
        ) from error


def explain_failure(error: Exception) -> str:
    """Return what went wrong, without the text of an exception that may hold data."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "no space is left on the disk" if full else type(error).__name__


def to_federation(
    value: Any, name: str, classes: int | None = None, samples: Layout | None = None
) -> Federation:
    """Return the data of one client as a federation of one.

    Parameters
    ----------
    value : Federation, (X, y), mapping or dataset
        A federation with one client is taken as it is (its name too); a mapping has ``(X, y)`` or
        a dataset under "train" and, where there are any, "validation" and "test".
    name : str
        The client's name.
    classes : int, optional
        Number of classes of the whole federation.
    samples : Layout, optional
        The agreed arrays of a sample; sequences are filled up to the agreed length.

    Examples
    --------
    >>> import numpy as np
    >>> to_federation((np.ones((3, 2)), np.array([0, 1, 0])), "north", classes=4).classes
    4
    """
    if isinstance(value, Federation):
        if len(value) != 1:
            raise DataError(
                f"load_data must return the data of one client, got a federation of {len(value)}; "
                "choose one with federation.subset([i])."
            )
        if samples is not None:
            compare_layouts(samples, value.layout, "its X", AGREED)
        return value
    parts = value if isinstance(value, Mapping) else {"train": value}
    if "train" not in parts or not set(parts) <= set(SPLITS):
        raise DataError(
            f"load_data must return (X, y) or a mapping with 'train' and possibly 'validation' and "
            f"'test', got the keys {sorted(map(str, parts))}."
        )
    held: dict[str, Any] = {label: {name: part} for label, part in parts.items()}
    titles: tuple[str, ...] = ()
    if samples is not None:
        named = _name_columns(parts["train"], samples)
        held, _, titles = take_items(held, named, Holdout(), samples.whole, None, loose=True)
        for label, part in held.items():
            if isinstance(part[name], Sequence) and len(part[name]) > 1:
                rows = samples.pack(part[name][0], f"its {label} X", AGREED)
                held[label] = {name: (Packed(rows, samples), *part[name][1:])}
    return Federation.from_clients(
        held["train"], validation=held.get("validation"), test=held.get("test"),
        classes=classes or len(titles) or None, class_names=titles,
    )  # fmt: skip


def _name_columns(part: Any, samples: Layout) -> Named:
    """Return which columns are the agreed arrays, for a data set whose items have names."""
    found = None if isinstance(part, Sequence) or not hasattr(part, "__getitem__") else part[0]
    if not samples.named or not isinstance(found, Mapping):
        return Named()
    added = None if samples.padding is None else samples.padding.mask
    return Named(features=[one.name for one in samples.fields if one.name != added])
