"""Saying hello to nodes: waiting for enough of them, in which order they are, why some are not."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flwr.serverapp import Grid

from equifed.flower.deadlines import Deadlines
from equifed.flower.hello import Hello, StartError
from equifed.flower.mailbox import Failure, Mailbox
from equifed.flower.wire import Reply, Request

FINAL = ("data:", "refused:")
"""How the reasons begin that waiting does not cure."""


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
    grid: Grid, deadlines: Deadlines, run: str, clients: int, told: Mapping[str, Any]
) -> tuple[dict[int, Hello], dict[int, Failure]]:
    """Greet every node that connects until there are enough clients, or the wait is over.

    Returns what they said, and why others that are connected are not among them.
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
        if len(said) >= clients:
            return said, {node: f for node, f in failures.items() if node not in said}
        hopeless = [f for f in failures.values() if f.kind == "bad" or f.reason.startswith(FINAL)]
        if hopeless or time.monotonic() >= until:
            raise StartError(_explain_start(clients, len(connected), said, failures))
        time.sleep(min(max(deadlines.poll, 0.01) * 5, 2.0))


def _explain_start(
    clients: int, connected: int, said: Mapping[int, Hello], failures: Mapping[int, Failure]
) -> str:
    """Say who is missing and why, and what to do about just that."""
    problems = [f"{f.name or f'node {node}'}: {f.reason}" for node, f in failures.items()]
    advice = "Wait for those that did not answer, or raise 'timeout'."
    if connected < clients:
        advice = "Start the missing nodes, or set 'clients' to the number of organisations."
    elif any(f.reason.startswith("refused:") for f in failures.values()):
        advice = "Agree with that site on what it takes part in, or run without it."
    elif any(f.reason.startswith("data:") for f in failures.values()):
        advice = "Repair the data there (equifed flower doctor says what is wrong with them)."
    elif any("refused by the site" in f.reason for f in failures.values()):
        advice = "Install the same app and the same equifed at that site."
    elif any(f.kind == "bad" for f in failures.values()):
        advice = "Install the same equifed everywhere."
    return (
        f"{clients} clients are expected, {connected} nodes are connected and {len(said)} said "
        f"hello ({', '.join(h.name for h in said.values()) or 'none'}). "
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
