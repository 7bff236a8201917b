"""The client's side: a ``ClientApp`` around the user's data and the library's own local work.

Whatever goes wrong becomes an error in our own words: the text of an exception may hold data and
stays in the client's log.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from equifed.contract.clients import MissingClients
from equifed.contract.evaluation import SPLITS
from equifed.data.columns import read_numbers
from equifed.data.federation import Federation
from equifed.data.preparation import Preparation
from equifed.data.split import DataError
from equifed.flower.hidden_fit import find_names, to_vector
from equifed.flower.memory import LostPart, Memory
from equifed.flower.secure.masking import STEPS, Identity, Masking, Signer
from equifed.flower.secure.masks import RangeError
from equifed.flower.secure.session import SecureError
from equifed.flower.site import (
    Policy,
    Refused,
    find_memory,
    name_site,
    read_partition,
    read_site,
)
from equifed.flower.site_table import SiteData
from equifed.flower.statistics import describe_table
from equifed.flower.task import PACKAGES, Schema, Task, shorten_names
from equifed.flower.wire import OPERATIONS, Reply, Request, WireError, count_bytes
from equifed.flower.worker import Client, Stale, Worker
from equifed.training.tables import package_versions

LoadData = Callable[[Context], Any]
"""The user's function; see :func:`to_federation` for its result."""

FAR = 3.0
"""Deviations of the other sites by which a site's mean must lie apart to be told."""

log = logging.getLogger("equifed")


def make_client_app(
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
    app, loaded = ClientApp(), OrderedDict[tuple[int, int], Client | TableClient]()

    def load(context: Context) -> Client | TableClient:
        """Return the client of a node; a process that lives on loads its data once."""
        key = (context.run_id, context.node_id)
        if key not in loaded:
            data = load_data(context)
            root = memory or find_memory(context.node_config)
            own = task if isinstance(task, Task) else task(context)
            about = own, root, read_partition(context.node_config), _read_policy(context)
            told = read_site(context.node_config)
            identity = Identity.from_settings(context.node_config)
            results = Path(str(told["results"])) if "results" in told else None
            if isinstance(data, SiteData):
                loaded[key] = TableClient(data, *about, results, identity)
            else:
                federation = to_federation(data, name_client(context), classes)
                loaded[key] = Client(federation, *about, identity, results=results)
            while len(loaded) > 64:  # a simulation runs many nodes in one process
                loaded.popitem(last=False)
        return loaded[key]

    def answer(message: Message, context: Context) -> Message:
        name, policy = name_client(context), _read_policy(context)
        reply = answer_message(message, lambda: load(context), name, policy)
        content = reply.to_records()
        try:
            policy.check_bytes("the reply has", 0 if reply.error else count_bytes(content))
        except Refused as error:
            told = reply.op, reply.run, reply.tag, {"name": name}
            content = Reply(*told, error="refused", text=str(error)).to_records()
        return Message(content, reply_to=message)

    for message_type in OPERATIONS.values():
        category, _, action = message_type.partition(".")
        getattr(app, category)(action)(answer)
    return app


def name_client(context: Context) -> str:
    """Return the client's name: the node's setting ``name``, or one made of its partition or id."""
    return name_site(context.node_config, context.node_id)


def _read_policy(context: Context) -> Policy:
    """Return the site's own rules: its settings ``policy`` and ``privacy``."""
    return Policy.of(read_site(context.node_config))


def answer_message(
    message: Message,
    load: Callable[[], Client | TableClient],
    name: str,
    policy: Policy | None = None,
) -> Reply:
    """Return the reply to a message; never raise, never quote an exception.

    ``name`` is the client's, which an error says, too: it may be the first that is heard of it.
    """
    who = {"name": name}
    try:
        request = Request.from_records(message.content)
    except WireError as error:
        return Reply("", "", "", who, error="request", text=str(error))

    def refuse(kind: str, text: str) -> Reply:
        return request.reply(who, error=kind, text=text)

    try:
        (policy or Policy()).check_request(request.op, count_bytes(message.content))
    except Refused as error:
        return refuse("refused", str(error))
    if request.op == "notice":
        log.warning("equifed: the server says: %s", str(request.args.get("text", ""))[:500])
        return request.reply(who)
    try:
        client = load()
    except Exception as error:
        log.exception("equifed: the data could not be loaded")
        kind = type(error).__name__
        return refuse("data", f"{kind} while loading the data; see the client's log")
    try:
        if isinstance(client, TableClient):
            early = client.answer(request)
            if early is not None:
                return early
            client = client.open(request)
        return Worker(client, request).answer()
    except (Stale, LostPart) as error:
        return refuse("stale", str(error))
    except MissingClients as error:
        return refuse("non-finite", next(iter(error.reasons.values())))
    except (WireError, RangeError, SecureError, Refused) as error:  # our own words
        ours = isinstance(error, SecureError | Refused)
        return refuse("refused" if ours else "request", str(error))
    except DataError:  # its text may quote a row
        log.exception("equifed: the data cannot be used")
        return refuse("data", f"the table cannot be used in {request.op}; see the client's log")
    except Exception as error:
        log.exception("equifed: the request failed")
        return refuse("failed", f"{type(error).__name__} in {request.op}; see the client's log")


def to_federation(value: Any, name: str, classes: int | None = None) -> Federation:
    """Return the data of one client as a federation of one.

    Parameters
    ----------
    value : Federation, (X, y), mapping or dataset
        A federation with one client is taken as it is (its name too); a mapping has ``(X, y)`` or
        a dataset under "train" and, where there are any, "validation" and "test"; a dataset has
        ``len()`` and gives ``(features, target)`` for a position.
    name : str
        The client's name.
    classes : int, optional
        Number of classes of the whole federation.

    Examples
    --------
    >>> to_federation((np.ones((3, 2)), np.array([0, 1, 0])), "north", classes=4).classes
    4
    """
    if isinstance(value, Federation):
        if len(value) != 1:
            raise DataError(
                f"load_data must return the data of one client, got a federation of {len(value)}; "
                "choose one with federation.subset([i])."
            )
        return value
    parts = value if isinstance(value, Mapping) else {"train": value}
    if "train" not in parts or not set(parts) <= set(SPLITS):
        raise DataError(
            f"load_data must return (X, y) or a mapping with 'train' and possibly 'validation' and "
            f"'test', got the keys {sorted(map(str, parts))}."
        )
    pairs = {label: {name: _to_arrays(part)} for label, part in parts.items()}
    return Federation.from_clients(
        pairs["train"],
        validation=pairs.get("validation"),
        test=pairs.get("test"),
        classes=classes,
    )


def _to_arrays(part: Any) -> tuple[Any, Any]:
    """Return ``(X, y)`` of a pair, or of a dataset object by reading all of it."""
    if isinstance(part, tuple | list) and len(part) == 2:
        return part[0], part[1]
    if not (hasattr(part, "__len__") and hasattr(part, "__getitem__")):
        raise DataError(
            f"load_data must return (X, y) or a dataset with len() and positions, got a "
            f"{type(part).__name__}."
        )
    samples = [part[k] for k in range(len(part))]
    return (
        np.stack([np.asarray(x) for x, _ in samples]),
        np.stack([np.asarray(y) for _, y in samples]),
    )


# -- sites that give tables ------------------------------------------------------------------------


@dataclass
class TableClient:
    """One client with a table: what it answers until the preparation of all sites is known.

    It says hello with its columns, answers the questions of the fit with vectors that are only
    added (in clear, or under masks), and takes the fitted preparation, which it keeps for the run.
    From then on it is a client like any other.
    """

    data: SiteData
    task: Task
    root: Path
    partition: int | None = None
    policy: Policy = field(default_factory=Policy)
    results: Path | None = None
    identity: Identity = field(default_factory=Identity)
    _open: dict[str, Client] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The client's name."""
        return self.data.table.name

    def answer(self, request: Request) -> Reply | None:
        """Answer what belongs to the preparation; None where a prepared client is asked."""
        memory = Memory(self.root, request.run, self.name)
        fitted = bool(memory.read_record("preparation"))
        if request.op in STEPS and not fitted:  # they need no model
            return request.reply(self._masking(request, memory).take_step(request.op))
        if request.op == "prepare":
            return self._answer_question(request, memory)
        if request.op == "statistics":
            self.policy.check_plan({}, self.data.table.sizes["train"])
            shown = self.policy.show_by_name
            return request.reply({"statistics": describe_table(self.data.table, shown)})
        if request.op == "hello" and "preparation" in request.args:
            told = request.args["preparation"]
            Preparation.from_json(told)  # refuses what is none
            memory.write_record("preparation", told)
        elif request.op == "hello" and not fitted:
            return self._introduce(request, memory)
        return None

    def open(self, request: Request) -> Client:
        """Return the client with its rows prepared as the run has it."""
        told = Memory(self.root, request.run, self.name).read_record("preparation")
        if not told:
            raise Stale("this client does not hold the preparation of the run")
        text = json.dumps(told, sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()
        if key not in self._open:
            fitted, table = Preparation.from_json(told), self.data.table
            federation = table.prepare(fitted, self.data.settings.dtype)
            for sentence in (*table.told, *table.find_duplicates(fitted)):
                log.warning("equifed: %s", sentence)
            about = self.task, self.root, self.partition, self.policy, self.identity
            self._open = {key: Client(federation, *about, results=self.results)}
        client = self._open[key]
        others = request.args.get("totals")
        if others is not None:
            client.notes = tuple(find_far(self.data, others)) if self.policy.show_by_name else ()
        return client

    def _introduce(self, request: Request, memory: Memory) -> Reply:
        """Say hello with columns that are not prepared yet."""
        table, settings = self.data.table, self.data.settings
        plan = request.args.get("plan", {})
        self.policy.check_plan(plan, table.sizes["train"])
        names, plain = table.features, settings.describe()
        digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()
        shape = (len(names),), settings.dtype, (), "float64"
        schema = Schema(*shape, None, digest, shorten_names(names))
        return request.reply(
            {
                "name": self.name,
                "partition": self.partition,
                "versions": package_versions(PACKAGES),
                "sizes": table.sizes,
                "schema": schema.to_dict(),
                "model": "",
                "table": {
                    "columns": table.describe_kinds(),
                    "target": table.describe_target(),
                    "rest": table.rest,
                    "units": dict(self.data.units),
                    "settings": plain,
                },
                "notes": self.policy.describe(),
            },
        )

    def _masking(self, request: Request, memory: Memory) -> Masking:
        signer = Signer(self.identity, request.run, self.name)
        return Masking(memory, request.args["mask"], request.client, signer)

    def _answer_question(self, request: Request, memory: Memory) -> Reply:
        """Answer one question of the fit."""
        asked = request.args["asked"]
        rule = self.data.settings.describe()["prepare"]
        if {**asked["prepare"]} != rule:
            raise DataError("the question is of another preparation than this site agreed to")
        named = asked["stage"] in ("names", "counts")
        answer = self.data.table.answer({**asked, "stage": "sums"} if named else asked)
        if asked["stage"] == "names":
            return request.reply({"names": find_names(asked, answer)})
        vector = to_vector(asked, answer)
        if "mask" in request.args:
            masked = self._masking(request, memory).mask(vector, _name_question(asked), 0)
            return request.reply({}, {"masked": masked})
        self.policy.allow_clear()
        return request.reply({}, {"vector": vector})


def find_far(data: SiteData, totals: Mapping[str, Any]) -> list[str]:
    """Name the columns whose mean here is far from that of the other sites.

    ``totals`` are count, mean and deviation of every column over all sites.
    """
    found = []
    for name, (count, mean, deviation) in totals.items():
        if name not in data.table.features:
            continue
        numbers = read_numbers(name, data.table.take([name], "train")[name])
        own = numbers[~(numbers != numbers)]
        n, left = len(own), int(count) - len(own)
        if n < 2 or left < 2:
            continue
        here, spread = float(own.mean()), float(own.var())
        there = mean + (mean - here) * n / left  # (N M - n m) / (N - n)
        square = (count * deviation**2 - n * (spread + (here - mean) ** 2)) / left
        scale = math.sqrt(max(square - (there - mean) ** 2, 0.0))
        scale = max(scale, 1e-12 * abs(there))
        if scale > 0 and abs(here - there) > FAR * scale:
            apart = abs(here - there) / scale
            found.append(
                f"its column {name!r} has a mean that lies {apart:.1f} deviations from that of the "
                "other sites; are its units the same?"
            )
    return found


def _name_question(asked: Mapping[str, Any]) -> str:
    """Name a question: sums of its answers over nearly the same sites must not both be opened."""
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()
