"""``equifed flower statistics``: what the sites have, side by side, before anything is trained."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from equifed.flower.app_config import FederationSettings
from equifed.flower.greeting import greet_all
from equifed.flower.hello import StartError, check_versions, describe_difference
from equifed.flower.mailbox import Mailbox
from equifed.flower.statistics import Told, find_outlying, read_statistics, tabulate
from equifed.flower.wire import Reply, Request
from equifed.training.files import write_file

STATISTICS = "statistics.json"


def show_statistics(
    grid: Grid, settings: FederationSettings, say: Callable[[str], None]
) -> dict[str, Any]:
    """Ask every site, print tables and what is odd, and return both.

    With a run folder in the settings they are also written there, to ``statistics.json``.
    """
    run, told = secrets.token_hex(8), {"plan": {"requests": ["statistics"]}}
    hellos, left = greet_all(grid, settings.deadlines, run, settings.clients, told)
    nodes = sorted(hellos, key=lambda node: hellos[node].name)
    listed = [hellos[node] for node in nodes]
    check_versions(listed)
    mailbox = Mailbox(grid, settings.deadlines, len(nodes))
    mailbox.nodes = dict(enumerate(nodes))
    found: dict[str, Told] = {}

    def check(i: int, reply: Reply) -> None:
        found[listed[i].name] = read_statistics(reply.numbers)

    asked = {i: Request("statistics", run, "statistics", i) for i in range(len(nodes))}
    answers = mailbox.ask(asked, check)
    odd = [f"{listed[i].name}: {f.reason}" for i, f in sorted(answers.failures.items())]
    odd += [f"{f.name or f'node {node}'}: {f.reason}" for node, f in left.items()]
    if not found:
        raise StartError(f"No site told its statistics: {'; '.join(odd)}.")
    for other in listed[1:]:
        odd += [d for d in [describe_difference(listed[0], other)] if d]
    odd += find_outlying(found)
    for table in tabulate(found):
        for line in str(table).splitlines():
            say(line)
        say("")
    for sentence in odd:
        say(f"WARNING: {sentence}")
    result = {"sites": found, "warnings": odd}
    if settings.out:
        Path(settings.out).mkdir(parents=True, exist_ok=True)
        write_file(Path(settings.out) / STATISTICS, json.dumps(result, indent=1).encode() + b"\n")
    return result
