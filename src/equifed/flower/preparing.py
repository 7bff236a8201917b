"""Fitting one preparation across sites: questions go out, and sums of the answers come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch

from equifed.contract.clients import MissingClients
from equifed.contract.streams import Stream
from equifed.data.fit import NOT_ASKED, Question, ask_kinds, combine_targets
from equifed.data.fit_by_sums import (
    BASE,
    MOST_NAMES,
    Vector,
    fit_by_sums,
    from_vector,
    measure_vector,
)
from equifed.data.preparation import NumberColumn, Preparation, Target
from equifed.data.site_table import TableSettings
from equifed.data.split import DataError
from equifed.flower.handshake import Hello, StartError
from equifed.flower.mailbox import Mailbox
from equifed.flower.members import Members
from equifed.flower.messenger import Messenger, SecureSums
from equifed.flower.task import OneClient, Task
from equifed.flower.wire import Reply, WireError, expect_vector


@dataclass
class Fit:
    """Fits the preparation of sites that said hello with their tables, as was agreed on.

    With ``hidden`` sums the server sees sums alone; without, sites send their answers.
    """

    settings: TableSettings
    task: Task
    hidden: SecureSums | None = None
    warnings: list[str] = field(default_factory=list)

    def check(self, hellos: Sequence[Hello]) -> None:
        """Refuse tables that do not fit together."""
        check_tables(hellos, self.settings)
        combine_told_targets(hellos, self.settings)

    def run(
        self, mailbox: Mailbox, run: str, hellos: Sequence[Hello]
    ) -> tuple[Preparation, dict[str, list[float]]]:
        """Ask until the preparation is known; :class:`StartError` if that cannot be."""
        settings = self.settings
        first = hellos[0].table
        assert first is not None
        asked = ask_kinds(
            [name for name, _ in first.columns],
            combine_told_targets(hellos, settings),
            settings.prepare,
            client=settings.client,
            choosy=settings.features is None,
            left_out=dict.fromkeys(first.rest, NOT_ASKED),
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
            raise WireError("sent values that are not whole numbers")

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
            raise WireError("sent categories of columns that were not requested")
        for listed in names.values():
            texts = isinstance(listed, list) and all(isinstance(t, str) for t in listed)
            if not texts or len(listed) > MOST_NAMES:
                raise WireError("sent categories in an invalid form")

    replies = messenger.ask(requests, check)
    return [replies[i].numbers["names"] for i in sorted(replies)]


def _list_totals(fitted: Preparation, counts: Mapping[str, int]) -> dict[str, list[float]]:
    """Return count, mean and deviation of the columns that were scaled by these."""
    if fitted.scale != "standard":
        return {}
    return {
        c.name: [counts[c.name], c.centre, c.scale]
        for c in fitted.columns
        if isinstance(c, NumberColumn) and c.name in counts
    }


# -- whether tables fit together ------------------------------------------------------------------


def check_tables(hellos: Sequence[Hello], settings: TableSettings) -> None:
    """Refuse sites whose units or columns are not those that were agreed on."""
    for hello in hellos:
        table = hello.table
        if table is None:
            raise StartError(
                f"{hello.name} gives arrays and others give tables; all sites must run the same "
                "app."
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
