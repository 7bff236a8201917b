"""The hello: what a node says of itself, and whether that fits to the other nodes.

``members`` has the states that a node passes through.
"""

from __future__ import annotations

import math
import time
import unicodedata
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from flwr.serverapp import Grid

from equifed.flower.mailbox import (
    WAIT_LINE,
    Answers,
    Deadlines,
    Exchange,
    Failure,
    Mailbox,
    say,
)
from equifed.flower.plan import read_plan
from equifed.flower.secure.masking import is_signed
from equifed.flower.task import Schema
from equifed.flower.wire import Reply, Request, WireError
from equifed.training.keys import PublicKey, read_keys
from equifed.training.tables import package_versions

LARGEST_SIZE = 1 << 48
"""Samples of a split that a client can say it has."""

KINDS = ("numbers", "texts", "dates", "empty")
"""What a column can hold."""

AT_ONCE = 2.0
"""Seconds in which nodes answer a hello; who takes longer is waited for, and that is said."""

FINAL = ("data:", "refused:")
"""How the reasons begin that waiting does not cure."""

ADVICE = {
    "refused:": "Agree with that site on what it takes part in, or run without it.",
    "no space": "Make room on that site's disk.",
    "data:": "Repair the data there (equifed flower doctor says what is wrong with them).",
    "refused by the site": "Install the same app and the same equifed at that site.",
    "waiting:": "Ask that site to approve the plan: equifed flower approve.",
    "bad ": "Install the same equifed everywhere.",
}
"""What to do about a client that does not say hello, by its failure."""


class StartError(RuntimeError):
    """The federation cannot start, or a client does not fit into it; says who, why, what to do."""


@dataclass(frozen=True)
class TableTold:
    """What a client says of a table that is not prepared yet."""

    columns: tuple[tuple[str, str], ...]
    target: Mapping[str, Any]
    rest: tuple[str, ...]
    units: Mapping[str, str]

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> TableTold:
        """Read plain values; raise if they are anything else."""
        columns = tuple((str(name), str(kind)) for name, kind in told["columns"])
        target = told["target"]
        flags = {key: target[key] for key in ("numeric", "whole")}
        labels = [str(label) for label in target["labels"]]
        if not columns or not {kind for _, kind in columns} <= set(KINDS):
            raise ValueError("no columns")
        if not all(isinstance(flag, bool) for flag in flags.values()):
            raise ValueError("no target")
        if flags["whole"] and not all(label.lstrip("-").isdigit() for label in labels):
            raise ValueError("no labels")
        units = {str(c): str(unit) for c, unit in told["units"].items()}
        rest = tuple(str(c) for c in told["rest"])
        return cls(columns, {**flags, "labels": labels}, rest, units)


@dataclass(frozen=True)
class Hello:
    """What a client says of itself."""

    name: str
    partition: int | None
    versions: dict[str, str]
    sizes: dict[str, int]
    schema: Schema
    model: str
    table: TableTold | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)
    """What the others should know: rules of its policy, columns on another scale."""
    noised: bool = False
    """Whether its answers carry noise for privacy."""
    signed: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """All that it said, with its signature."""

    @classmethod
    def from_reply(cls, reply: Reply) -> Hello:
        """Read a reply, or raise :class:`WireError`."""
        n = reply.numbers
        try:
            hello = cls(
                str(n["name"]),
                None if n["partition"] is None else int(n["partition"]),
                {str(k): str(v) for k, v in n["versions"].items()},
                {str(k): int(v) for k, v in n["sizes"].items()},
                Schema.from_dict(n["schema"]),
                str(n["model"]),
                TableTold.from_dict(n["table"]) if n.get("table") else None,
                tuple(str(note)[:300] for note in n.get("notes", [])[:20]),
                n.get("noised") is True,
                n,
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise WireError("the hello is incomplete") from None
        if hello.sizes.get("train", 0) < 1 or not hello.name or len(hello.name) > 200:
            raise WireError("the hello names no samples, or no client")
        if not all(0 <= size <= LARGEST_SIZE for size in hello.sizes.values()):
            raise WireError("the hello states an impossible number of samples")
        return hello

    def is_current(self) -> bool:
        """Tell whether the client has the minor version of equifed that runs here."""
        own = package_versions(["equifed"])["equifed"]
        return self.versions.get("equifed", "?").split(".")[:2] == own.split(".")[:2]

    def find_change(self, old: Hello) -> str:
        """Say why this client is not the one that said ``old``; nothing if it is."""
        if not self.is_current():
            return f"it came back with equifed {self.versions.get('equifed', '?')[:20]}"
        if self.schema != old.schema:
            return f"it came back with other data. {describe_difference(old, self)}"
        if self.sizes != old.sizes:
            return f"it came back with {self.sizes} samples, and left with {old.sizes}"
        return "" if self.model == old.model else "it came back with another model"


def find_stranger(hello: Hello, run: str, keys: Mapping[str, PublicKey]) -> str:
    """Say why a client is none of those whose keys are listed; nothing if it is, or none are."""
    if not keys:
        return ""
    if hello.name not in keys:
        return f"refused: {hello.name!r:.60} is not in the plan's list of members"
    if not is_signed(hello.signed, keys[hello.name], run, "hello"):
        return f"refused: it does not prove that it has the key that is listed for {hello.name!r}"
    return ""


def check_versions(hellos: Sequence[Hello]) -> None:
    """Refuse clients with another minor version: their local work may differ."""
    wrong = [h for h in hellos if not h.is_current()]
    if wrong:
        listed = ", ".join(f"{h.name} has {h.versions.get('equifed', '?')[:20]}" for h in wrong)
        raise StartError(
            f"The server has equifed {package_versions(['equifed'])['equifed']}, but {listed}; "
            "install the same minor version everywhere."
        )


def check_schemas(hellos: Sequence[Hello]) -> None:
    """Refuse clients whose data are of another kind than the first one's."""
    for told in filter(None, (describe_difference(hellos[0], other) for other in hellos[1:])):
        raise StartError(told)


def check_models(hellos: Sequence[Hello], fingerprint: str) -> None:
    """Refuse clients that built another model than the server."""
    wrong = [hello.name for hello in hellos if hello.model != fingerprint]
    if wrong:
        raise StartError(
            f"{', '.join(wrong)} built another model than the server; all parties must run the "
            "same app with the same settings of model, loss, l2 and dtype."
        )


def describe_difference(first: Hello, other: Hello) -> str:
    """Say where the data of two clients differ, and what to do; nothing if they do not."""
    a, b = first.schema.to_dict(), other.schema.to_dict()
    if unlike := first.schema.compare_samples(other.schema, first.name, other.name):
        return unlike
    if a["names"] and b["names"] and a["names"] != b["names"]:
        return (
            f"{_compare_lists(first, other, 'column', a['names'], b['names'])}. Bring both files "
            "to the same columns in the same order, or list features in [data] of the app: then "
            "columns are matched by name."
        )
    if a["class_names"] and b["class_names"] and a["class_names"] != b["class_names"]:
        return (
            f"{_compare_lists(first, other, 'class', a['class_names'], b['class_names'])}. Labels "
            "would be mixed up: use the same classes in the same order."
        )
    key = next((key for key in a if a[key] != b[key]), "")
    if key == "digest" and not first.model:
        return f"{first.name} and {other.name} have other columns, or another order of them."
    if key == "digest":
        return (
            f"{first.name} and {other.name} prepared their data in different ways (the digests of "
            "their preparations differ); fit one preparation for all."
        )
    told = (
        f"{first.name} and {other.name} have different data: {key} is {a.get(key)} and "
        f"{b.get(key)}. Bring both to the same columns, dtype and number of classes."
    )
    return told if key else ""


def _compare_lists(
    first: Hello, other: Hello, what: str, one: Sequence[str], two: Sequence[str]
) -> str:
    """Name the first place where two lists differ; their words are the sites' own, so shortened."""
    at = next((k for k, (x, y) in enumerate(zip(one, two, strict=False)) if x != y), None)
    if at is not None:
        return f"{other.name}: {what} {at + 1} is {two[at]!r:.60}, {first.name}: {one[at]!r:.60}"
    longer, shorter = (first, other) if len(one) > len(two) else (other, first)
    extra = max(one, two, key=len)[min(len(one), len(two))]
    return f"{longer.name} has the {what} {extra!r:.60}, {shorter.name} has not"


# -- greeting nodes --------------------------------------------------------------------------------


class Greeting:
    """A hello to nodes, and what they answer; they are ``told`` what the run is about."""

    def __init__(
        self,
        grid: Grid,
        deadlines: Deadlines,
        run: str,
        nodes: Iterable[int],
        told: Mapping[str, Any],
        names: Sequence[str] = (),
    ) -> None:
        self.nodes, self.said, self.answers = list(nodes), dict[int, Hello](), Answers()
        self.mailbox = Mailbox(grid, deadlines, len(self.nodes), names)
        self.mailbox.nodes = dict(enumerate(self.nodes))
        self.asked = {
            k: Request("hello", run, f"hello/{node}", -1, dict(told))
            for k, node in enumerate(self.nodes)
        }
        self.exchange = Exchange(self.mailbox, self.asked, self.read, self.answers)

    def read(self, k: int, reply: Reply) -> None:
        """Take one answer."""
        self.said[self.nodes[k]] = Hello.from_reply(reply)

    @property
    def failures(self) -> dict[int, Failure]:
        """Why nodes did not say hello."""
        return {self.nodes[k]: failure for k, failure in self.answers.failures.items()}

    @property
    def silent(self) -> set[int]:
        """Nodes whose answer is still under way."""
        return set(self.nodes) - set(self.said) - set(self.failures)


def list_keys(told: Mapping[str, Any]) -> dict[str, PublicKey]:
    """Return the members' keys of the plan that clients are told."""
    members = read_plan(str(told["plan"]["text"])).members if told.get("plan") else {}
    return read_keys([f"{line} {name}" for name, line in members.items()], "members of the plan")


def greet_all(
    grid: Grid, deadlines: Deadlines, run: str, clients: int, told: Mapping[str, Any]
) -> tuple[dict[int, Hello], dict[int, Failure]]:
    """Greet every node that connects until there are enough clients, or the wait is over.

    Returns what they said, and why others that are connected are not among them. A node that
    refused is greeted again after a pause: it may have been approved since.
    """
    once, keys = replace(deadlines, on_missing="fail"), list_keys(told)
    began, said_at, greeted = time.monotonic(), -math.inf, dict[int, float]()
    said, failures, greetings = dict[int, Hello](), dict[int, Failure](), list[Greeting]()
    while True:
        connected, now = set(grid.get_node_ids()), time.monotonic()
        asked = connected - set(said) - {n for g in greetings for n in g.silent}
        new = sorted(n for n in asked if now - greeted.get(n, -math.inf) > deadlines.pause)
        if len(connected) >= clients and new:
            greeted |= dict.fromkeys(new, now)
            greetings.append(Greeting(grid, once, run, new, told))
        for greeting in greetings:
            greeting.exchange.run(wait=False)
            said |= greeting.said
            failures |= greeting.failures
        strangers = {n: find_stranger(hello, run, keys) for n, hello in said.items()}
        failures |= {n: Failure("error", w, said[n].name) for n, w in strangers.items() if w}
        said = {n: h for n, h in said.items() if n in connected and not strangers[n]}
        failures = {n: f for n, f in failures.items() if n in connected and n not in said}
        greetings = [greeting for greeting in greetings if greeting.silent]
        silent = connected & {n for g in greetings for n in g.silent}
        missing = failures | dict.fromkeys(silent, Failure("silent", "no answer yet"))
        over = now - began >= deadlines.wait
        if len(said) >= clients and (over or not silent):
            return said, missing
        if now - said_at >= WAIT_LINE and not (silent and now - began < AT_ONCE):
            say_waiting(clients, connected, said, missing)
            said_at = now
        hopeless = any(f.kind == "bad" or f.reason.startswith(FINAL) for f in failures.values())
        if over or (hopeless and not silent):
            raise StartError(_explain_start(clients, len(connected), said, missing))
        time.sleep(max(deadlines.poll, 0.01) if silent else min(max(deadlines.poll, 0.01) * 5, 2.0))


def say_waiting(
    clients: int,
    connected: Set[int],
    said: Mapping[int, Hello],
    failures: Mapping[int, Failure],
) -> None:
    """Tell whoever follows the run who is there and who is waited for."""
    here = sorted(hello.name for hello in said.values())
    not_yet = [f"{f.name or f'node {node}'} ({f.reason})" for node, f in failures.items()]
    who = f": {', '.join([*here, *not_yet])[:400]}" if here or not_yet else ""
    say(f"waiting for {clients} sites, {len(connected)} connected{who}")


def _explain_start(
    clients: int, connected: int, said: Mapping[int, Hello], failures: Mapping[int, Failure]
) -> str:
    """Say who is missing and why, and what to do about just that."""
    seen = [f"{f.kind} {f.reason}" for f in failures.values()]
    fitting = [text for sign, text in ADVICE.items() if any(sign in one for one in seen)]
    advice = next(iter(fitting), "Wait for those that did not answer, or raise 'timeout'.")
    if connected < clients:
        advice = "Start the missing nodes, or set 'clients' to the number of organisations."
    problems = [f"{f.name or f'node {node}'}: {f.reason}" for node, f in failures.items()]
    return (
        f"{clients} clients are expected, {connected} nodes are connected and {len(said)} said "
        f"hello ({', '.join(h.name for h in said.values()) or 'none'}). "
        + ("; ".join(problems[:5]) + ". " if problems else "")
        + advice
    ).replace("?. ", "? ")


def sort_nodes(hellos: Mapping[int, Hello], order: Sequence[str] | None) -> list[int]:
    """Return the nodes in the order of their clients; refuse two of one name, and others."""
    names = [hello.name for hello in hellos.values()]
    look = [unicodedata.normalize("NFC", name) for name in names]  # accents in one way
    double = sorted({name for name in look if look.count(name) > 1})
    if double:
        raise StartError(
            f"Two nodes have the name {double[0]!r}; give each node its own name with "
            "--node-config 'name=\"...\"'."
        )
    if order is not None:
        gone, new = sorted(set(order) - set(names)), sorted(set(names) - set(order))
        if gone or new:
            raise StartError(
                f"The run to resume had other clients: missing {gone or 'none'}, new "
                f"{new or 'none'}."
            )
        return sorted(hellos, key=lambda node: list(order).index(hellos[node].name))
    partitions = [hello.partition for hello in hellos.values()]
    if None not in partitions and len(set(partitions)) == len(partitions):
        return sorted(hellos, key=lambda node: hellos[node].partition or 0)
    return sorted(hellos, key=lambda node: hellos[node].name)
