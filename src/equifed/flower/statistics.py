"""What sites tell of their rows before a run: how many, gaps, labels, means; and who is unlike."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flwr.serverapp import Grid

from equifed.data.columns import blank, name_category, read_numbers, to_numbers
from equifed.data.describe import (
    Described,
    Table,
    describe_values,
    tabulate_columns,
    tabulate_shares,
)
from equifed.data.federation import Federation
from equifed.data.site_table import SiteTable
from equifed.flower.app_config import FederationSettings
from equifed.flower.handshake import (
    StartError,
    check_versions,
    describe_difference,
    greet_all,
)
from equifed.flower.mailbox import Mailbox
from equifed.flower.plan import Plan, read_plan, sign_plan, unpack_plan
from equifed.flower.wire import Reply, Request, WireError, expect_number
from equifed.training.files import write_file

STATISTICS = "statistics.json"

FAR = 3.0
"""Deviations of the others by which a site's mean must lie apart to be called outlying."""

Told = dict[str, Any]
"""One site's statistics: ``rows`` by split, ``columns`` and ``labels``; without the last two where
it does not show them by name."""


def describe_table(table: SiteTable, shown: bool) -> Told:
    """Return a site's statistics of its training rows."""
    told: Told = {"rows": table.sizes}
    if not shown:
        return told
    target = table.request.target
    columns = table.take([*table.features, target], "train")
    told["columns"] = {name: describe_values(columns[name]) for name in table.features}
    task, values = table.request.task, columns[target]
    numbers = to_numbers(values)
    if task == "regression" or (numbers is not None and not (numbers == np.rint(numbers)).all()):
        told["columns"][target] = describe_values(values)
    else:
        labels = Counter(name_category(v) for v in values)
        told["labels"] = {text: labels[text] for text in sorted(labels)[:50]}
    return told


def describe_arrays(federation: Federation, shown: bool) -> Told:
    """Return the statistics of a client that gives arrays."""
    told: Told = {"rows": {k: len(split) for k, split in federation.splits().items()}}
    if not shown:
        return told
    inputs, targets = federation.train.inputs, federation.train.targets
    flat = inputs.reshape(len(inputs), -1).astype(np.float64)
    prepared = federation.preparation
    names: Sequence[str] = () if prepared is None else prepared.feature_names
    if len(names) != flat.shape[1]:
        names = [f"feature {k + 1}" for k in range(min(flat.shape[1], 200))]
    told["columns"] = {name: describe_values(flat[:, k].tolist()) for k, name in enumerate(names)}
    if federation.classes is not None:
        counts = np.bincount(targets.ravel(), minlength=federation.classes).tolist()
        titles = federation.class_names or [f"class {k}" for k in range(len(counts))]
        told["labels"] = dict(zip(titles, counts, strict=True))
    return told


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


def find_far(table: SiteTable, totals: Mapping[str, Any]) -> list[str]:
    """Name the columns whose mean here is far from that of the other sites.

    ``totals`` are count, mean and deviation of every column over all sites.
    """
    found = []
    for name, (count, mean, deviation) in totals.items():
        if name not in table.features:  # of other columns nothing is told
            continue
        own = read_numbers(name, blank(table.take([name], "train")[name], "words"))
        own = own[~np.isnan(own)]
        n, left = len(own), int(count) - len(own)
        if n < 2 or left < 2:
            continue
        here, there = float(own.mean()), mean + (mean - own.mean()) * n / left  # (N M - n m)/(N-n)
        square = (count * deviation**2 - n * (own.var() + (here - mean) ** 2)) / left
        scale = math.sqrt(max(square - (there - mean) ** 2, 0.0))
        scale = max(scale, 1e-12 * abs(there))
        if scale > 0 and abs(here - there) > FAR * scale:
            found.append(
                f"its column {name!r} has a mean that lies {abs(here - there) / scale:.1f} "
                "deviations from that of the other sites; are its units the same?"
            )
    return found


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
