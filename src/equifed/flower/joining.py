"""Sites that come later: into a run that is under way, by the operator's word, or after its end.

A run has one list of clients to its end: its tables, weights and stored vectors belong to them. So
a site that joins ends one part of the run after a round and begins the next, in a folder of its
own, from the model and with the preparation of the part before. Where the server app ended between
two parts, whoever resumes the run begins the next one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from equifed.flower.app_config import AppConfig, FederationSettings
from equifed.flower.deadlines import Deadlines
from equifed.flower.greeting import greet
from equifed.flower.hello import (
    Hello,
    StartError,
    check_schemas,
    check_tables,
    check_versions,
    combine_told_targets,
    describe_difference,
)
from equifed.flower.kept import Kept
from equifed.flower.members import HELLO_SECONDS, Members
from equifed.flower.server import FlowerClients
from equifed.flower.site_data import TableSettings
from equifed.flower.site_work import describe_settings
from equifed.training.files import write_file
from equifed.training.folder import is_complete
from equifed.training.history import History
from equifed.training.tables import EVENTS, read_events

ADMITTED = "admitted.json"
"""In a run folder: the sites that may join it, by the operator's word."""


CHECKPOINT = "checkpoint"
"""In a run folder: what a run goes on from. A part without it begins again, in another folder."""

JOINS = "joins by the operator's word"
"""Why a part of a run stopped, after the name."""


def admit(folder: Path, names: list[str]) -> None:
    """Write down that sites may join a run; said again, it is tried again."""
    told = {**_read_word(folder), **dict.fromkeys(names, time.time())}
    write_file(folder / ADMITTED, json.dumps(told, indent=1).encode() + b"\n")


def _read_word(folder: Path) -> dict[str, float]:
    """Return whom the operator admitted, and when."""
    try:
        told = json.loads((folder / ADMITTED).read_text(encoding="utf-8"))
        return {str(name): float(when) for name, when in told.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


class Admission:
    """Stops a part of a run after a round if a site is there that the operator admitted.

    Parameters
    ----------
    clients : FlowerClients
        Who takes part until then.
    folder : Path, optional
        The run folder; without one nobody can be admitted.
    rounds : int
        The last round, after which nobody joins.
    table : TableSettings, optional
        What was agreed on the sites' tables, where they give tables.

    Attributes
    ----------
    joined : dict
        Node and hello of those who join.
    """

    def __init__(
        self,
        clients: FlowerClients,
        folder: Path | None,
        rounds: int,
        table: TableSettings | None = None,
    ) -> None:
        self.clients, self.folder, self.rounds, self.table = clients, folder, rounds, table
        self.joined: dict[int, Hello] = {}
        self._word: dict[str, float] = {}
        self._done: set[str] = set()
        self._others: set[int] = set()
        self._waiting: set[str] = set()

    def __call__(self, history: History) -> str | None:
        """Return who joins, which is why this part stops; None if nobody does."""
        if self.folder is None or history.rounds[-1].round >= self.rounds:
            return None
        word = _read_word(self.folder)
        if word != self._word:  # the operator said something, perhaps again
            self._word, self._done, self._others, self._waiting = word, set(), set(), set()
        members, nodes = self.clients.members, set(self.clients.mailbox.nodes.values())
        wanted = set(word) - set(members.names) - self._done
        connected = set(self.clients.mailbox.grid.get_node_ids()) if wanted else set()
        new = sorted(connected - nodes - self._others)
        if not new or not nodes <= connected:
            self._tell_wait(wanted, nodes - connected)
            return None
        self._ask(new, wanted)
        names = " and ".join(sorted(hello.name for hello in self.joined.values()))
        return f"{names} {JOINS}" if names else None

    def _tell_wait(self, wanted: set[str], gone: set[int]) -> None:
        """Say once why an admitted site does not join yet."""
        members, nodes = self.clients.members, self.clients.mailbox.nodes
        lost = ", ".join(members.names[i] for i, node in nodes.items() if node in gone)
        why = f"{lost} is not connected" if lost else "it is not connected"
        for name in sorted(wanted - self._waiting):
            self._waiting.add(name)
            members.events.append({"event": "note", "client": name, "reason": f"it waits: {why}"})

    def _ask(self, new: list[int], wanted: set[str]) -> None:
        members, mailbox = self.clients.members, self.clients.mailbox
        once = replace(mailbox.deadlines, on_missing="fail", timeout=HELLO_SECONDS)
        hellos, failures = greet(mailbox.grid, once, members.run, new, members.told)
        self._others |= {node for node in failures if failures[node].name not in wanted}
        self._others |= {node for node, hello in hellos.items() if hello.name not in wanted}
        wrong = {f.name: f.reason for f in failures.values() if f.name in wanted}
        names = [hello.name for hello in hellos.values()]
        for node, hello in hellos.items():
            if hello.name not in wanted:
                continue
            problem = find_misfit(members, hello) or self._find_table_misfit(node)
            if names.count(hello.name) > 1:
                problem = "two nodes call themselves so"
            if problem:
                wrong[hello.name] = problem
            else:
                self.joined[node] = hello
        for name, reason in wrong.items():
            self._done.add(str(name))
            members.leave_out(str(name), f"it was admitted and does not fit: {reason}")

    def _find_table_misfit(self, node: int) -> str:
        mailbox, plan = self.clients.mailbox, self.clients.members.told["plan"]
        try:
            nodes = [*mailbox.nodes.values(), node]
            check_as_tables(mailbox.grid, mailbox.deadlines, nodes, plan, self.table)
        except StartError as error:
            return str(error)
        return ""


def check_as_tables(
    grid: Grid,
    deadlines: Deadlines,
    nodes: list[int],
    plan: dict[str, Any],
    table: TableSettings | None,
) -> None:
    """Compare the tables of sites as they are: columns, units, kinds and settings of the app.

    Sites that take the preparation of an earlier run say hello with its features, which do not
    show the units of what they were made of.
    """
    if table is None:
        return
    once = replace(deadlines, on_missing="fail", timeout=HELLO_SECONDS)
    hellos, failures = greet(grid, once, secrets.token_hex(8), nodes, {"plan": plan})
    if failures:
        told = "; ".join(f"{f.name or 'a site'}: {f.reason}" for f in failures.values())
        raise StartError(f"Not every site showed its columns: {told}.")
    listed = [hellos[node] for node in nodes]
    check_versions(listed)
    check_schemas(listed)
    check_tables(listed, table, describe_settings(table))
    combine_told_targets(listed, table)


def find_misfit(members: Members, hello: Hello) -> str:
    """Say why a site cannot join a federation; nothing if it can."""
    if not hello.is_current():
        return f"it has equifed {hello.versions.get('equifed', '?')[:20]}; install the server's"
    differs = describe_difference(members.hellos[0], hello)
    if differs:
        return differs
    return "" if hello.model == members.hellos[0].model else "it built another model"


def plan_next_part(
    config: AppConfig, settings: FederationSettings, clients: int, done: int
) -> tuple[AppConfig, FederationSettings]:
    """Return what the next part of a run does: the rounds that are left, with so many clients.

    Its draws are those of another seed: rounds count from 1 again.
    """
    now = replace(
        settings,
        clients=clients,
        rounds=settings.rounds - done,
        start=settings.out,
        out=str(_name_part(Path(settings.out))),
        resume=False,
        changes=(),
    )
    return replace(config, seed=config.seed + 1), now


@dataclass(frozen=True)
class OpenPart:
    """The part of a run that is to go on: unfinished, or ended for sites that were to join."""

    folder: Path
    kept: Kept
    joining: tuple[str, ...] = ()
    done: int = 0  # its rounds, if sites were to join

    @property
    def names(self) -> list[str]:
        """Who takes part from here on."""
        return [*self.kept.names, *self.joining]

    def check(self, members: Members) -> None:
        """Refuse others than those who took part and who were to join."""
        if set(members.names) != set(self.names):
            raise StartError(
                f"The next part of the run in {self.folder} is one of {', '.join(self.names)}; "
                f"connected are {', '.join(members.names)}."
            )


def find_open_part(folder: Path) -> OpenPart | None:
    """Return the part of a run that is to go on; None if the run is complete."""
    kept, (joining, done) = Kept.read(folder), _find_joining(folder)
    for path in sorted(folder.parent.glob("*-part*")):  # beside it, and begun from it
        with contextlib.suppress(StartError):
            begun = is_complete(path) or any((path / CHECKPOINT).glob("*"))
            if begun and Path(Kept.read(path).told.get("start") or path).name == folder.name:
                return find_open_part(path)
    if is_complete(folder) and not joining:
        return None
    return OpenPart(folder, kept, joining, done)


def _find_joining(folder: Path) -> tuple[tuple[str, ...], int]:
    """Return who was to join when a part ended for that, and its last round."""
    if not is_complete(folder):
        return (), 0
    for event in read_events(folder / EVENTS):
        said = str(event.get("reason"))
        if event["event"] == "stopped" and said.endswith(JOINS):
            word, said = sorted(_read_word(folder)), said.removesuffix(f" {JOINS}")
            some = (c for k in range(len(word)) for c in itertools.combinations(word, k + 1))
            named = next((c for c in some if " and ".join(c) == said), tuple(said.split(" and ")))
            return named, int(event["round"])
    return (), 0


def _name_part(folder: Path) -> Path:
    """Return a folder for the next part that is not there.

    >>> _name_part(Path("nowhere/run")).name, _name_part(Path("nowhere/run-part2")).name
    ('run-part2', 'run-part3')
    """
    found = re.fullmatch(r"(.*)-part(\d+)", folder.name)
    stem, k = (found.group(1), int(found.group(2))) if found else (folder.name, 1)
    while (folder.with_name(f"{stem}-part{k + 1}")).exists():
        k += 1
    return folder.with_name(f"{stem}-part{k + 1}")


def read_model(folder: Path) -> dict[str, Any]:
    """Return the model of a complete run."""
    found = History.load(folder).parameters
    if found is None:
        raise StartError(f"The run in {folder} is not complete: it has no model yet.")
    return found


@contextlib.contextmanager
def hide_others(grid: Grid, admission: Admission) -> Iterator[None]:
    """Show only the clients of a run and those who join: nobody else was admitted."""
    see = grid.get_node_ids
    hidden = set(see()) - set(admission.clients.mailbox.nodes.values()) - set(admission.joined)
    grid.get_node_ids = lambda: [n for n in see() if n not in hidden]  # type: ignore[method-assign]
    try:
        yield
    finally:
        del grid.get_node_ids
