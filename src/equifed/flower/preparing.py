"""What sites tell of their tables before a run, and one preparation for all of them.

Fitting it, questions go out and sums of the answers come back; statistics are of each site, for
people.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from flwr.serverapp import Grid

from equifed.contract.clients import MissingClients
from equifed.contract.streams import Stream
from equifed.data.describe import Described, Table, tabulate_columns, tabulate_shares
from equifed.data.fit import NOT_ASKED, Question, ask_kinds, combine_targets
from equifed.data.fit_by_sums import (
    BASE,
    MOST_NAMES,
    Vector,
    fit_by_sums,
    from_vector,
    measure_vector,
)
from equifed.data.preparation import NumberColumn, Target
from equifed.data.site_table import TableSettings
from equifed.data.split import DataError
from equifed.flower.app_config import FederationSettings
from equifed.flower.handshake import (
    Hello,
    StartError,
    check_versions,
    describe_difference,
    greet_all,
)
from equifed.flower.mailbox import Mailbox
from equifed.flower.members import Fitted, Members
from equifed.flower.messenger import Messenger, SecureSums
from equifed.flower.participant import FAR
from equifed.flower.plan import Plan, read_plan, sign_plan, unpack_plan
from equifed.flower.task import OneClient, Task
from equifed.flower.wire import Reply, Request, WireError, expect_number, expect_vector
from equifed.training.files import write_file


@dataclass
class Fit:
    """Fits the preparation of sites that said hello with their tables, as was agreed on.

    With ``hidden`` sums the server sees sums alone; without, sites send their answers.
    """

    settings: TableSettings
    task: Task
    hidden: SecureSums | None = None
    warnings: list[str] = field(default_factory=list)

    def __call__(self, mailbox: Mailbox, run: str, hellos: Sequence[Hello]) -> Fitted | None:
        """Refuse tables that do not fit together; ask until the preparation is known, if it is not.

        Raises :class:`StartError` if that cannot be.
        """
        check_tables(hellos, self.settings)
        target = combine_told_targets(hellos, self.settings)
        if all(hello.model for hello in hellos):
            return None
        asked = {**self._ask_first(hellos[0], target), "salt": run}
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
            fitted = fit_by_sums(asked, add, partial(_collect, messenger))
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
        wide = [c for c in fitted.columns if isinstance(c, NumberColumn) and c.name in counts]
        scaled = wide if fitted.scale == "standard" else ()
        return fitted, {c.name: [counts[c.name], c.centre, c.scale] for c in scaled}

    def _ask_first(self, first: Hello, target: Target) -> Question:
        """Return the first question, of the columns that all have."""
        settings, table = self.settings, first.table
        assert table is not None
        return ask_kinds(
            [name for name, _ in table.columns],
            target,
            settings.prepare,
            client=settings.client,
            choosy=settings.features is None,
            left_out=dict.fromkeys(table.rest, NOT_ASKED),
        )


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


# -- statistics of every site ----------------------------------------------------------------------

STATISTICS = "statistics.json"

Told = dict[str, Any]
"""One site's statistics: ``rows`` by split, ``columns`` and ``labels``; without the last two where
it does not show them by name."""


def show_statistics(
    grid: Grid, settings: FederationSettings, say: Callable[[str], None], plan: Plan
) -> dict[str, Any]:
    """Ask every site, print tables and what is odd, and return both.

    ``plan`` is the one that nobody signed, for sites that let anybody ask.
    With a run folder in the settings they are also written there, to ``statistics.json``.
    """
    signed = unpack_plan(settings.plan) if settings.plan else sign_plan(plan)
    run, told = read_plan(signed["text"]).run, {"plan": signed}
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
        raise StartError(f"No site sent statistics: {'; '.join(odd)}.")
    for other in listed[1:]:
        odd += [d for d in [describe_difference(listed[0], other)] if d]
    odd += find_outlying(found)
    for table in tabulate(found):
        for line in (*str(table).splitlines(), ""):
            say(line)
    for sentence in odd:
        say(f"WARNING: {sentence}")
    result = {"sites": found, "warnings": odd}
    if settings.out:
        Path(settings.out).mkdir(parents=True, exist_ok=True)
        write_file(Path(settings.out) / STATISTICS, json.dumps(result, indent=1).encode() + b"\n")
    return result


def read_statistics(numbers: Mapping[str, Any]) -> Told:
    """Read a site's reply, or raise :class:`WireError`."""
    try:
        given = numbers["statistics"]
        told: Told = {"rows": {str(k): _count(v) for k, v in given["rows"].items()}}
        if "columns" in given:
            told["columns"] = {str(c): _read_column(d) for c, d in given["columns"].items()}
            labels = given.get("labels")
            if labels is not None:
                told["labels"] = {str(text): _count(n) for text, n in labels.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WireError("sent no statistics") from error
    return told


def tabulate(found: Mapping[str, Told]) -> list[Table]:
    """Return tables of rows, labels, gaps and means, sites as rows."""
    splits = list(dict.fromkeys(k for told in found.values() for k in told["rows"]))
    rows = [(who, *(str(told["rows"].get(k, 0)) for k in splits)) for who, told in found.items()]
    tables = [Table("rows", ("site", *splits), rows)]
    shown = {who: told for who, told in found.items() if "columns" in told}
    labels = list(dict.fromkeys(t for told in shown.values() for t in told.get("labels", {})))
    if labels:
        counts = [[told.get("labels", {}).get(t, 0) for t in labels] for told in shown.values()]
        about = "training rows", list(shown), np.array(counts), labels
        tables.append(tabulate_shares(*about)[0])
    return tables + (tabulate_columns("training rows", _turn(shown)) if shown else [])


def find_outlying(found: Mapping[str, Told]) -> list[str]:
    """Name sites whose column is far from the others', constant or empty, or with one label."""
    shown = {who: told for who, told in found.items() if "columns" in told}
    out = [f"{who} does not show its numbers by name" for who in found if who not in shown]
    for column, told in _turn(shown).items():
        empty = [who for who, d in told.items() if d["rows"] and d["missing"] == d["rows"]]
        out += [f"{who}: column {column!r} has no value at all" for who in empty]
        numbers = {who: d for who, d in told.items() if "mean" in d}
        same = [who for who, d in numbers.items() if d["deviation"] == 0]
        for who in same if len(same) < len(numbers) else ():
            value = f"{numbers[who]['mean']:.4g} in every row, and varies at other sites"
            out.append(f"{who}: column {column!r} is {value}. Does it stand for a missing value?")
        for who in numbers if len(numbers) > 1 else ():
            others = [d for name, d in numbers.items() if name != who]
            out += _compare(who, column, numbers[who], others)
    for who, t in shown.items():
        labels = {text: n for text, n in t.get("labels", {}).items() if n}
        if "labels" in t and len(labels) == 1:
            out.append(f"{who}: every training row has the label {next(iter(labels))!r}")
    return out


def _compare(
    who: str, column: str, own: Mapping[str, float], others: Sequence[Mapping[str, float]]
) -> list[str]:
    sizes = [d["rows"] - d["missing"] for d in others]
    means, deviations = (np.array([d[key] for d in others]) for key in ("mean", "deviation"))
    mean = float(np.average(means, weights=sizes))
    deviation = math.sqrt(np.average(deviations**2 + (means - mean) ** 2, weights=sizes))
    apart = abs(own["mean"] - mean)
    if apart <= FAR * deviation or apart <= 1e-9 * max(abs(mean), abs(own["mean"])):
        return []
    how = f"{apart / deviation:.1f} deviations" if deviation else f"{apart:.3g}"
    factor = f", {own['mean'] / mean:.3g} times theirs" if mean and own["mean"] / mean > 0 else ""
    return [
        f"{who}: column {column!r} has the mean {own['mean']:.4g}, the other sites "
        f"{mean:.4g} ± {deviation:.2g}: {how} apart{factor}. Are its units the same?"
    ]


def _turn(shown: Mapping[str, Told]) -> Described:
    """Return statistics by column, then by site."""
    columns = list(dict.fromkeys(c for told in shown.values() for c in told["columns"]))
    nothing = {"rows": 1, "missing": 1}
    return {c: {who: t["columns"].get(c, nothing) for who, t in shown.items()} for c in columns}


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("no count")
    return value


def _read_column(told: Mapping[str, Any]) -> dict[str, float]:
    out: dict[str, float] = {"rows": _count(told["rows"]), "missing": _count(told["missing"])}
    if out["missing"] > out["rows"]:
        raise ValueError("more gaps than rows")
    if "mean" in told and out["missing"] < out["rows"]:
        out["mean"] = expect_number("mean", told["mean"])
        out["deviation"] = expect_number("deviation", told["deviation"], least=0.0)
    return out
