"""What a report is about: a metric on a split with how its numbers are written, and methods."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from equifed.contract.arrays import Index, Losses, Weights
from equifed.contract.evaluation import Details
from equifed.metrics import Interval, Metric, find_metric
from equifed.metrics.intervals import correct_counts
from equifed.metrics.metric import DASH
from equifed.training.files import StoredRun, reading, refuse_link
from equifed.training.folder import is_complete
from equifed.training.history import History, MetricRecord
from equifed.training.tables import share_of_method

PLAN = "comparison.json"
MINUS, TIMES = "−", "×"
NAMED = 5
"""At most this many clients are named in a sentence."""


@dataclass(frozen=True)
class Scale:
    """A metric on a split, and how to write its values, everywhere on a page in the same way."""

    metric: str
    split: str

    @property
    def kind(self) -> Metric:
        """What is known about the metric."""
        return find_metric(self.metric)

    @property
    def higher_is_better(self) -> bool:
        """Whether more is better service."""
        return self.kind.higher_is_better

    @property
    def label(self) -> str:
        """Name with the split."""
        return f"{self.split} {self.kind.label}"

    @property
    def axis(self) -> str:
        """Name with the split and the unit."""
        return self.label + ("," + self.kind.unit if self.kind.unit else "")

    def number(self, value: float) -> str:
        """Write a value without its unit."""
        return self.kind.write_number(value)

    def text(self, value: float) -> str:
        """Write a value with its unit."""
        return self.kind.write(value)

    def span(self, lower: float, upper: float) -> str:
        """Write an interval."""
        return f"{self.number(lower)} to {self.number(upper)}{self.kind.unit}"

    def signed(self, value: float) -> str:
        """Write a difference without its unit."""
        return add_sign(value, self.number(abs(value)))

    def change(self, value: float) -> str:
        """Write a difference with its unit."""
        return self.signed(value) + (self.kind.unit_of_differences if math.isfinite(value) else "")

    def gap(self, value: float) -> str:
        """Write a distance between two values."""
        return self.number(value) + (self.kind.unit_of_differences if math.isfinite(value) else "")


def capital(text: str) -> str:
    """Write the first letter large, and leave the others: names of metrics have theirs."""
    return text[:1].upper() + text[1:]


def add_sign(value: float, magnitude: str) -> str:
    """Put a sign before a magnitude; ± where all of its digits are zero."""
    if not math.isfinite(value):
        return DASH
    if not any(digit in magnitude for digit in "123456789"):
        return "±" + magnitude
    return (MINUS if value < 0 else "+") + magnitude


def bytes_text(count: float) -> str:
    """Write a number of bytes."""
    if not math.isfinite(count):
        return DASH
    size, sign = abs(count), MINUS if count < 0 else ""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{sign}{size / scale:.3g} {unit}"
    return f"{sign}{size:.0f} B"


def plural(count: int, word: str) -> str:
    """Write a count with its noun."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def join_names(names: Sequence[object], most: int = NAMED) -> str:
    """List a few names, and count the others."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def is_finite(interval: Interval) -> bool:
    """Return whether an interval says anything."""
    return math.isfinite(interval.lower) and math.isfinite(interval.upper)


def find_note(history: History) -> str:
    """Return what training said about own parts, with the strength of their penalty."""
    notes = (str(e["reason"]) for e in history.events if e["event"] == "note")
    return next((note for note in notes if note.startswith("own part ")), "")


class ReportError(ValueError):
    """There is nothing to report, or the runs cannot be put side by side."""


@dataclass(frozen=True, eq=False)
class Method:
    """Runs that differ in nothing but their seeds, under one name."""

    name: str
    runs: tuple[History, ...]

    @property
    def history(self) -> History:
        """The first run, whose samples all seeds share."""
        return self.runs[0]

    @property
    def clients(self) -> tuple[str, ...]:
        """Names of the clients."""
        return self.history.names

    @property
    def seeds(self) -> tuple[int | None, ...]:
        """Seeds of the runs."""
        return tuple(run.seed for run in self.runs)

    def final(self, scale: Scale) -> Losses:
        """Return the last evaluation of every run, shape (runs, clients); NaN: not evaluated."""
        last = [run.last(scale.metric, scale.split) for run in self.runs]
        empty = np.full(len(self.clients), np.nan)
        return np.array([empty if record is None else record.values for record in last])

    def sizes(self, scale: Scale) -> Index:
        """Return the clients' sample counts in a split."""
        records = (run.last(scale.metric, scale.split) for run in self.runs)
        nothing = np.zeros(len(self.clients), dtype=np.int64)
        return next((record.sizes for record in records if record is not None), nothing)

    def details(self, scale: Scale) -> Details | None:
        """Return what single samples of the first run say about the split that is shown."""
        found = self.history.details
        return found if found is not None and found.split == scale.split else None

    def further(self, scale: Scale) -> list[tuple[Metric, MetricRecord]]:
        """Return the first run's last evaluation of metrics beside the main one and the loss."""
        told = {r.metric: r for r in self.history.metrics if r.split == scale.split}
        return [(find_metric(k), r) for k, r in told.items() if k not in (scale.metric, "loss")]

    def last_weights(self) -> Weights:
        """Return the clients' last recorded weights, mean over runs; NaN if there are none."""
        recorded = [run.weights for run in self.runs if run.weights]
        last = [weights[max(weights)] for weights in recorded]
        return np.mean(last, axis=0) if last else np.full(len(self.clients), np.nan)

    def participation(self) -> Weights:
        """Return the fraction of all runs' rounds that each client took part in."""
        took = [record.clients for run in self.runs for record in run.rounds]
        count = np.zeros(len(self.clients))
        for clients in took:
            count[... if clients is None else list(clients)] += 1
        return count / len(took) if took else np.full(len(self.clients), np.nan)

    def count_events(self, kind: str) -> Index:
        """Return in how many rounds, over all runs, each client had an event of this kind."""
        seen = {
            (event["client"], i, event.get("round", 0))
            for i, run in enumerate(self.runs)
            for event in run.events
            if event["event"] == kind
        }
        counts = Counter(client for client, *_ in seen)
        return np.array([counts[name] for name in self.clients], dtype=np.int64)

    def count_correct(self, scale: Scale) -> tuple[Index, list[Losses], Index] | None:
        """Return whose correct answers are known, their numbers in every run, and of how many."""
        final, sizes = self.final(scale), self.sizes(scale)
        some = np.flatnonzero((sizes > 0) & np.isfinite(final).all(axis=0))
        if not scale.kind.is_fraction or not some.size:
            return None
        try:
            return some, [correct_counts(row[some], sizes[some]) for row in final], sizes[some]
        except ValueError:  # accuracies that are no counts: weighted, or rounded by their source
            return None

    def events(self) -> list[dict[str, Any]]:
        """Return all events with the seed of their run."""
        return [
            {**event, "seed": run.seed, "method": self.name}
            for run in self.runs
            for event in run.events
        ]


def as_methods(
    runs: History | Sequence[History] | Mapping[str, History | Sequence[History]], name: str = "run"
) -> list[Method]:
    """Return methods for histories in memory; in a sequence, those that differ in the seed alone.

    Runs that do not say what they were made of stay apart.
    """
    if isinstance(runs, History):
        runs = {name: runs}
    if not isinstance(runs, Mapping):
        return check_methods(_group(list(runs)))
    listed = {k: (h,) if isinstance(h, History) else tuple(h) for k, h in runs.items()}
    return check_methods([Method(k, found) for k, found in listed.items()])


def read_methods(folders: Iterable[str | Path]) -> list[Method]:
    """Read run folders and comparison folders; runs that differ in the seed alone go together."""
    methods: list[Method] = []
    loose: list[History] = []
    for folder in map(Path, folders):
        if (folder / PLAN).exists():
            methods += read_comparison(folder)
            continue
        inside = [*folder.glob("rounds.csv")] or sorted(folder.glob("*/rounds.csv"))
        for path in inside:
            if path.parent != folder:  # what the folder has been given as, whoever names it chose
                refuse_link(path.parent)
        if not inside:
            raise ReportError(
                f"{folder} holds no run and no comparison: expected rounds.csv in it or in the "
                "folders below it."
            )
        loose += [read_run(path.parent) for path in inside]
    return check_methods([*methods, *_group(loose)])


def read_run(folder: Path) -> History:
    """Read one run folder, without its model."""
    return History.load(folder, model=False)


def read_comparison(folder: Path, plan: list[dict[str, Any]] | None = None) -> list[Method]:
    """Read the complete runs of a comparison, by its plan or by that in the folder."""
    stored = StoredRun(folder)
    if plan is None:
        plan = read_plan(stored)["methods"]
    folders = {e["name"]: [stored.below(run["folder"]) for run in e["runs"]] for e in plan}
    complete = {name: [*filter(is_complete, paths)] for name, paths in folders.items()}
    return [Method(name, tuple(map(read_run, found))) for name, found in complete.items() if found]


def read_plan(stored: StoredRun) -> dict[str, Any]:
    """Return what ``comparison.json`` tells, with the folders of every method's runs."""
    with reading(stored / PLAN):
        plan: dict[str, Any] = stored.json(PLAN)
        for entry in plan["methods"]:
            _ = str(entry["name"]), [str(run["folder"]) for run in entry["runs"]]
        return plan


def _group(runs: Sequence[History]) -> list[Method]:
    groups: dict[str, list[History]] = {}
    for run in runs:
        config = run.provenance.get("config")
        rest = share_of_method({"config": config} if config else run.provenance)
        known = config or "algorithm" in run.provenance
        key = json.dumps(rest, default=str) if known else str(run.folder or id(run))
        groups.setdefault(key, []).append(run)
    names = [_name(group) for group in groups.values()]
    twice = {name for name in names if names.count(name) > 1}
    return [
        Method(str(group[0].folder or f"{name} {i + 1}") if name in twice else name, tuple(group))
        for i, (name, group) in enumerate(zip(names, groups.values(), strict=True))
    ]


def _name(group: Sequence[History]) -> str:
    if group[0].folder is None:
        return group[0].method
    path = Path(group[0].folder).absolute()
    stem = re.sub(r"[-_]?(seed)?[-_]?\d+$", "", path.name) if len(group) > 1 else path.name
    return stem or path.parent.name


def check_methods(methods: list[Method]) -> list[Method]:
    """Refuse what cannot stand side by side."""
    if not methods:
        raise ReportError("There are no runs to report.")
    for method in methods:
        if not method.runs:
            raise ReportError(f"{method.name} has no runs.")
        for run in method.runs:
            run.check()
            if run.names != methods[0].clients:
                raise ReportError(
                    f"{method.name} and {methods[0].name} have different clients, so they cannot "
                    "be compared client by client; make separate reports."
                )
    names = [method.name for method in methods]
    if len(set(names)) < len(names):
        raise ReportError(f"Every method needs its own name, got {', '.join(names)}.")
    return methods
