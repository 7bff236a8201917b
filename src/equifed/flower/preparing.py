"""Fitting one preparation across sites: questions go out, and sums of the answers come back."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from equifed.contract.clients import MissingClients
from equifed.contract.streams import Stream
from equifed.data.fit import Question, ask_kinds
from equifed.data.preparation import NumberColumn, Preparation
from equifed.data.split import DataError
from equifed.flower.handshake import (
    Hello,
    StartError,
    check_schemas,
    check_tables,
    combine_told_targets,
    find_odd_labels,
    greet,
)
from equifed.flower.hidden_fit import (
    BASE,
    MOST_NAMES,
    Vector,
    fit_by_sums,
    from_vector,
    measure_vector,
)
from equifed.flower.mailbox import Mailbox
from equifed.flower.members import Members, Totals
from equifed.flower.messenger import HiddenSums, Messenger
from equifed.flower.site_table import TableSettings
from equifed.flower.task import OneClient, Task
from equifed.flower.wire import Reply, WireError, expect_vector

PATIENCE = 60.0
"""Seconds in which a site shows its columns again."""


@dataclass
class Fit:
    """Fits the preparation of sites that said hello with their tables, as was agreed on.

    With ``hidden`` sums the server sees sums alone; without, sites send their answers.
    """

    settings: TableSettings
    task: Task
    hidden: HiddenSums | None = None
    warnings: list[str] = field(default_factory=list)

    def run(
        self, mailbox: Mailbox, run: str, hellos: Sequence[Hello]
    ) -> tuple[Preparation, Totals]:
        """Ask until the preparation is known; :class:`StartError` if that cannot be."""
        settings = self.settings
        check_tables(hellos, settings, settings.describe())
        first = hellos[0].table
        assert first is not None
        asked = ask_kinds(
            [name for name, _ in first.columns],
            combine_told_targets(hellos, settings),
            settings.prepare,
            client=settings.client,
            choosy=settings.features is None,
            left_out=first.rest,
        )
        asked["salt"] = run
        self.warnings = find_odd_labels(hellos)
        nothing = SimpleNamespace(size=0, dtype=torch.float64, device="cpu")
        engine = cast(OneClient, SimpleNamespace(model=nothing))  # there is no model yet
        members = Members(run, self.task, list(hellos), engine)
        messenger, counts = Messenger(mailbox, members, self.hidden), dict[str, int]()

        def add(asked: Question) -> Vector:
            total = _add(messenger, asked)
            if asked["stage"] == "sums":
                found = from_vector(asked, total)
                counts.update({c: told.get("count", 0) for c, told in found.items()})
            return total

        try:
            fitted = fit_by_sums(asked, add, lambda asked: _collect(messenger, asked))
        except DataError as error:
            raise StartError(f"The sites' tables cannot be prepared: {error}") from error
        except MissingClients as lost:
            raise StartError(
                f"Not every site answered while the tables were prepared: {lost}"
            ) from lost
        except (ArithmeticError, ValueError, KeyError, StopIteration) as error:
            raise StartError(
                "The sites' answers do not fit together, so that no preparation comes of them "
                f"({type(error).__name__}); see what they have: equifed flower statistics."
            ) from error
        return fitted, _list_totals(fitted, counts)


def _add(messenger: Messenger, asked: Question) -> Vector:
    """Return the sum of all sites' answers."""
    size, where = measure_vector(asked), Stream(0, ("prepare", str(asked["stage"])))
    requests = messenger.write_requests("prepare", where, {"asked": asked}, {})
    if messenger.hidden is not None:
        ones, ask = np.ones(len(requests)), messenger.mailbox.ask
        return messenger.hidden.total(messenger, requests, ones, "vector", ask, size)

    def check(i: int, reply: Reply) -> None:
        vector = expect_vector(reply.arrays, "vector", size, "float64")
        if not (vector == np.rint(vector)).all() or (np.abs(vector) >= 1 << BASE).any():
            raise WireError("answered with something else than whole numbers")

    replies = messenger.ask(requests, check)
    total: Vector = np.sum([replies[i].arrays["vector"] for i in sorted(replies)], axis=0)
    return total


def _collect(messenger: Messenger, asked: Question) -> list[Mapping[str, Sequence[str]]]:
    """Return the names that every site told."""
    where = Stream(0, ("prepare", "names"))
    requests = messenger.write_requests("prepare", where, {"asked": asked}, {})

    def check(i: int, reply: Reply) -> None:
        names = reply.numbers.get("names")
        if not isinstance(names, dict) or set(names) != set(asked["columns"]):
            raise WireError("named categories of other columns than asked for")
        for listed in names.values():
            texts = isinstance(listed, list) and all(isinstance(t, str) for t in listed)
            if not texts or len(listed) > MOST_NAMES:
                raise WireError("named something else than categories")

    replies = messenger.ask(requests, check)
    return [replies[i].numbers["names"] for i in sorted(replies)]


def compare_tables(mailbox: Mailbox, plan: dict[str, Any], table: TableSettings | None) -> None:
    """Compare the tables of sites as they are: columns, units, kinds and settings of the app.

    Sites that take the preparation of an earlier run say hello with its features, which do not
    show the units of what they were made of.
    """
    if table is None:
        return
    once = replace(mailbox.deadlines, on_missing="fail", timeout=PATIENCE)
    nodes = list(mailbox.nodes.values())
    hellos, failures = greet(mailbox.grid, once, secrets.token_hex(8), nodes, {"plan": plan})
    if failures:
        told = "; ".join(f"{f.name or 'a site'}: {f.reason}" for f in failures.values())
        raise StartError(f"Not every site showed its columns: {told}.")
    listed = [hellos[node] for node in nodes]
    check_schemas(listed)
    check_tables(listed, table, table.describe())
    combine_told_targets(listed, table)


def _list_totals(fitted: Preparation, counts: Mapping[str, int]) -> dict[str, list[float]]:
    """Return count, mean and deviation of the columns that were scaled by these."""
    if fitted.scale != "standard":
        return {}
    return {
        c.name: [counts[c.name], c.centre, c.scale]
        for c in fitted.columns
        if isinstance(c, NumberColumn) and c.name in counts
    }
