"""The handshake: nodes are greeted, say who they are and what they have, and it must fit together.

::

    connected --hello--> says name, versions, data --checks--> client of the run
        |                    |                         (tables: one preparation, then hello again)
        |                    +-- does not fit: StartError before the first round
        +-- after the start: is told so, or takes the place of a client of its name that is gone
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flwr.serverapp import Grid

from equifed.data.fit import combine_targets
from equifed.data.preparation import Target
from equifed.data.split import DataError
from equifed.flower.mailbox import Deadlines, Failure, Mailbox
from equifed.flower.site_table import TableSettings
from equifed.flower.task import Schema
from equifed.flower.wire import Reply, Request, WireError
from equifed.training.tables import package_versions

LARGEST_SIZE = 1 << 48
"""Samples of a split that a client can say it has."""

FINAL = ("data:", "refused:")
"""How the reasons begin that waiting does not cure."""

ADVICE = {
    "refused:": "Agree with that site on what it takes part in, or run without it.",
    "data:": "Repair the data there (equifed flower doctor says what is wrong with them).",
    "refused by the site": "Install the same app and the same equifed at that site.",
    "bad ": "Install the same equifed everywhere.",
}
"""What to do about a client that does not say hello, by its failure."""

KINDS = ("numbers", "texts", "dates", "empty")
"""What a column can hold."""


class StartError(RuntimeError):
    """The federation cannot start, or a client does not fit into it; says who, why, what to do."""


@dataclass(frozen=True)
class TableTold:
    """What a client says of a table that is not prepared yet."""

    columns: tuple[tuple[str, str], ...]
    target: Mapping[str, Any]
    rest: tuple[str, ...]
    units: Mapping[str, str]
    settings: Mapping[str, Any]

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
        return cls(columns, {**flags, "labels": labels}, rest, units, dict(told["settings"]))


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

    @classmethod
    def from_reply(cls, reply: Reply) -> Hello:
        """Read a reply, or raise :class:`WireError`."""
        n = reply.numbers
        try:
            sizes = {str(k): int(v) for k, v in n["sizes"].items()}
            hello = cls(
                str(n["name"]),
                None if n["partition"] is None else int(n["partition"]),
                {str(k): str(v) for k, v in n["versions"].items()},
                sizes,
                Schema.from_dict(n["schema"]),
                str(n["model"]),
                TableTold.from_dict(n["table"]) if n.get("table") else None,
                tuple(str(note)[:300] for note in n.get("notes", [])[:20]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise WireError("the hello is incomplete") from None
        if sizes.get("train", 0) < 1 or not hello.name or len(hello.name) > 200:
            raise WireError("the hello names no samples, or no client")
        if not all(0 <= size <= LARGEST_SIZE for size in sizes.values()):
            raise WireError("the hello names a number of samples that nobody has")
        return hello

    def is_current(self) -> bool:
        """Tell whether the client has the minor version of equifed that runs here."""
        own = package_versions(["equifed"])["equifed"]
        return self.versions.get("equifed", "?").split(".")[:2] == own.split(".")[:2]


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
    first = hellos[0]
    for other in hellos[1:]:
        told = describe_difference(first, other)
        if told:
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
    if first.schema == other.schema:
        return ""
    names = (first.schema.names, other.schema.names)
    if all(names) and names[0] != names[1]:
        return (
            f"{_compare_lists(first, other, 'column', *names)}. Bring both files to the same "
            "columns in the same order, or list features in [data] of the app: then columns are "
            "matched by name."
        )
    titles = (first.schema.class_names, other.schema.class_names)
    if all(titles) and titles[0] != titles[1]:
        return (
            f"{_compare_lists(first, other, 'class', *titles)}. Labels would be mixed up: use the "
            "same classes in the same order."
        )
    a, b = first.schema.to_dict(), other.schema.to_dict()
    key = next((key for key in a if a[key] != b[key]), "")
    if key == "digest" and first.table is not None:
        return f"{first.name} and {other.name} have other columns, or another order of them."
    if key == "digest":
        return (
            f"{first.name} and {other.name} prepared their data in different ways (the digests of "
            "their preparations differ); fit one preparation for all."
        )
    return (
        f"{first.name} and {other.name} have different data: {key} is {a[key]} and {b[key]}. "
        "Bring both to the same columns, dtype and number of classes."
    )


def _compare_lists(
    first: Hello, other: Hello, what: str, one: Sequence[str], two: Sequence[str]
) -> str:
    """Name the first place where two lists differ.

    Both names are the sites' own words, so that they are shown shortened.
    """
    at = next((k for k, (x, y) in enumerate(zip(one, two, strict=False)) if x != y), None)
    if at is None:
        longer, shorter = (first, other) if len(one) > len(two) else (other, first)
        at = min(len(one), len(two))
        extra = (one if len(one) > len(two) else two)[at]
        return f"{longer.name} has the {what} {extra!r:.60}, {shorter.name} has not"
    return f"{other.name}: {what} {at + 1} is {two[at]!r:.60}, {first.name}: {one[at]!r:.60}"


def check_tables(hellos: Sequence[Hello], settings: TableSettings, told: Mapping[str, Any]) -> None:
    """Refuse sites whose app, units or columns are not those that were agreed on.

    ``told`` are the settings as plain values.
    """
    for hello in hellos:
        table = hello.table
        if table is None:
            raise StartError(
                f"{hello.name} gives arrays and others give tables; all sites must run the same "
                "app."
            )
        for key in sorted({*told, *table.settings}):
            if table.settings.get(key) != told.get(key):
                raise StartError(
                    f"{hello.name} runs the app with other settings: data.{key} is "
                    f"{table.settings.get(key)!r:.80} there and {told.get(key)!r:.80} here; "
                    "install the same app at every site."
                )
        for column, unit in table.units.items():
            agreed = (settings.units or {}).get(column)
            if agreed is not None and unit != agreed:
                raise StartError(
                    f"{hello.name}: column {column!r} is in {unit!r:.40}, agreed is {agreed!r}; "
                    "convert it there."
                )
    _compare_columns(hellos)


def _compare_columns(hellos: Sequence[Hello]) -> None:
    """Refuse columns in two units, and numbers at one site where another has text."""
    units: dict[str, tuple[str, str]] = {}
    kinds: dict[str, tuple[str, str]] = {}
    for hello in hellos:
        assert hello.table is not None
        for column, unit in hello.table.units.items():
            who, other = units.setdefault(column, (hello.name, unit))
            if unit != other:
                raise StartError(
                    f"{hello.name}: column {column!r:.60} is in {unit!r:.40}, {who}: {other!r:.40}"
                    "; convert it at one of them, and write the agreed unit into [data.units]."
                )
        for column, kind in hello.table.columns:
            if kind == "empty":
                continue
            who, other = kinds.setdefault(column, (hello.name, kind))
            if (kind == "numbers") != (other == "numbers"):
                raise StartError(
                    f"{hello.name}: column {column!r:.60} holds {kind}, {who}: {other}; make them "
                    "alike, or list it in prepare.categorical."
                )


def find_odd_labels(hellos: Sequence[Hello]) -> list[str]:
    """Name sites that share no label with any other: they may call the classes otherwise."""
    told = {h.name: set(h.table.target["labels"]) for h in hellos if h.table}
    return [
        f"{name}: no other site has its labels {', '.join(sorted(labels))[:80]}; does it call the "
        "classes otherwise? class_names in [data] says which there are"
        for name, labels in told.items()
        if labels and not labels & set().union(*(s for n, s in told.items() if n != name))
    ]


def combine_told_targets(hellos: Sequence[Hello], settings: TableSettings) -> Target:
    """Return the target with the classes of all sites."""
    if settings.class_names is not None:
        for hello in hellos:
            labels = hello.table.target["labels"] if hello.table else ()
            odd = [label for label in labels if label not in settings.class_names]
            if odd:
                raise StartError(
                    f"{hello.name} has the label {odd[0]!r:.60}, which is none of the agreed "
                    f"classes {', '.join(settings.class_names)[:200]}; correct it there, or add it "
                    "to class_names in [data]."
                )
        return Target(settings.target, tuple(settings.class_names))
    told = {hello.name: hello.table.target for hello in hellos if hello.table}
    try:
        return combine_targets(settings.target, told, settings.task, settings.classes)
    except DataError as error:
        raise StartError(f"{error} Settings of the app stand in [data] of equifed.toml.") from None


# -- greeting nodes ------------------------------------------------------------------------------


def introduce(
    mailbox: Mailbox, run: str, hellos: Sequence[Hello], told: Mapping[str, Any]
) -> list[Hello]:
    """Hand the preparation to every client, and hear what it makes of its data."""
    again, failures = greet(
        mailbox.grid, mailbox.deadlines, run, list(mailbox.nodes.values()), told
    )
    if failures:
        who = {node: hellos[i].name for i, node in mailbox.nodes.items()}
        why = "; ".join(f"{who[node]}: {f.reason}" for node, f in failures.items())
        raise StartError(f"Not every site could prepare its table: {why}.")
    return [again[node] for node in mailbox.nodes.values()]


def greet(
    grid: Grid,
    deadlines: Deadlines,
    run: str,
    nodes: Sequence[int],
    told: Mapping[str, Any] | None = None,
) -> tuple[dict[int, Hello], dict[int, Failure]]:
    """Say hello to nodes; return what they said, and why the others did not."""
    mailbox, args = Mailbox(grid, deadlines, len(nodes)), dict(told or {})
    mailbox.nodes = dict(enumerate(nodes))
    asked = {k: Request("hello", run, f"hello/{node}", -1, args) for k, node in enumerate(nodes)}
    said: dict[int, Hello] = {}

    def read(k: int, reply: Reply) -> None:
        said[nodes[k]] = Hello.from_reply(reply)

    answers = mailbox.ask(asked, read)
    return said, {nodes[k]: failure for k, failure in answers.failures.items()}


def greet_all(
    grid: Grid, deadlines: Deadlines, run: str, clients: int, told: Mapping[str, Any],
    only: str = "",
) -> tuple[dict[int, Hello], dict[int, Failure]]:  # fmt: skip
    """Greet every node that connects until there are enough clients, or the wait is over.

    Returns what they said, and why others that are connected are not among them. With ``only`` the
    client of that name is waited for, and alone returned.
    """
    until = time.monotonic() + deadlines.wait
    said: dict[int, Hello] = {}
    failures: dict[int, Failure] = {}
    once = replace(deadlines, on_missing="fail")
    while True:
        connected = set(grid.get_node_ids())
        said = {node: hello for node, hello in said.items() if node in connected}
        new = sorted(connected - set(said))
        if len(connected) >= clients and new:
            more, failures = greet(grid, once, run, new, told)
            said.update(more)
        chosen = {node: hello for node, hello in said.items() if only in ("", hello.name)}
        if len(said) >= clients and chosen:
            return chosen, {node: f for node, f in failures.items() if node not in said}
        hopeless = [f for f in failures.values() if f.kind == "bad" or f.reason.startswith(FINAL)]
        if hopeless or time.monotonic() >= until:
            raise StartError(_explain_start(clients, len(connected), said, failures, only))
        time.sleep(min(max(deadlines.poll, 0.01) * 5, 2.0))


def _explain_start(
    clients: int,
    connected: int,
    said: Mapping[int, Hello],
    failures: Mapping[int, Failure],
    only: str,
) -> str:
    """Say who is missing and why, and what to do about just that."""
    problems = [f"{f.name or f'node {node}'}: {f.reason}" for node, f in failures.items()]
    if connected < clients:
        advice = "Start the missing nodes, or set 'clients' to the number of organisations."
    else:
        seen = [f"{f.kind} {f.reason}" for f in failures.values()]
        fitting = [text for sign, text in ADVICE.items() if any(sign in one for one in seen)]
        usual = "Wait for those that did not answer, or raise 'timeout'."
        advice = next(iter(fitting), f"Start the node of {only}." if only else usual)
    return (
        f"{only or f'{clients} clients'} {'is' if only else 'are'} expected, {connected} nodes are "
        f"connected and {len(said)} said hello "
        f"({', '.join(h.name for h in said.values()) or 'none'}). "
        + ("; ".join(problems[:5]) + ". " if problems else "")
        + advice
    )


def sort_nodes(hellos: Mapping[int, Hello], order: Sequence[str] | None) -> list[int]:
    """Return the nodes in the order of their clients; refuse two of one name, and others."""
    names = [hello.name for hello in hellos.values()]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise StartError(
            f"Two nodes call themselves {double[0]!r}; give each node its own name with "
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
