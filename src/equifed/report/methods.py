"""What a report is about: methods with their runs, and how each of them serves every client."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from equifed.contract.arrays import Index, Losses, Weights
from equifed.metrics import WorstClient, correct_counts, wilson_interval, worst_client_interval
from equifed.report.scales import Scale
from equifed.training.files import Damaged, read_json, refuse_links
from equifed.training.history import History
from equifed.training.provenance import share_of_method
from equifed.training.tables import is_complete

PLAN = "comparison.json"


class ReportError(ValueError):
    """There is nothing to report, or the runs cannot be put side by side."""


@dataclass(frozen=True, eq=False)
class RunData:
    """One run: what happened, and what it was run with as far as that is known."""

    history: History
    seed: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    folder: str = ""
    complete: bool = True


@dataclass(frozen=True, eq=False)
class Method:
    """Runs that differ in nothing but their seeds, under one name."""

    name: str
    runs: tuple[RunData, ...]

    @property
    def clients(self) -> tuple[str, ...]:
        """Names of the clients."""
        return self.runs[0].history.names

    @property
    def seeds(self) -> tuple[int | None, ...]:
        """Seeds of the runs."""
        return tuple(run.seed for run in self.runs)

    def final(self, scale: Scale) -> Losses:
        """Return the last evaluation of every run, shape (runs, clients); NaN: not evaluated."""
        last = [run.history.last(scale.metric, scale.split) for run in self.runs]
        empty = np.full(len(self.clients), np.nan)
        return np.array([empty if record is None else record.values for record in last])

    def sizes(self, scale: Scale) -> Index:
        """Return the clients' sample counts in a split."""
        for run in self.runs:
            record = run.history.last(scale.metric, scale.split)
            if record is not None:
                return record.sizes
        return np.zeros(len(self.clients), dtype=np.int64)

    def last_weights(self) -> Weights:
        """Return the clients' last recorded weights, mean over runs; NaN if there are none."""
        last = [
            run.history.weights[max(run.history.weights)]
            for run in self.runs
            if run.history.weights
        ]
        return np.mean(last, axis=0) if last else np.full(len(self.clients), np.nan)

    def participation(self) -> Weights:
        """Return the fraction of all runs' rounds that each client took part in."""
        count, rounds = np.zeros(len(self.clients)), 0
        for run in self.runs:
            for record in run.history.rounds:
                count[... if record.clients is None else list(record.clients)] += 1
                rounds += 1
        return count / rounds if rounds else np.full(len(self.clients), np.nan)

    def quarantines(self, kind: str = "quarantine") -> Index:
        """Return in how many rounds, over all runs, each client was left out for its answer.

        Other kinds of event ("guard", "watch") are counted alike.
        """
        seen: dict[str, set[tuple[int, int]]] = {}
        for i, run in enumerate(self.runs):
            for event in run.history.events:
                if event["event"] == kind:
                    seen.setdefault(event["client"], set()).add((i, event.get("round", 0)))
        return np.array([len(seen.get(name, ())) for name in self.clients], dtype=np.int64)

    def capped(self) -> Index:
        """Return in how many runs each client reached the cap of a guard on its weight."""
        told = [
            {e["reason"].partition(" is at the cap of ")[0] for e in run.history.events
             if e["event"] == "note"}
            for run in self.runs
        ]  # fmt: skip
        counts = [sum(f"client {name}" in notes for notes in told) for name in self.clients]
        return np.array(counts, dtype=np.int64)

    def events(self) -> list[dict[str, Any]]:
        """Return all events with the seed of their run."""
        return [
            {**event, "seed": run.seed, "method": self.name}
            for run in self.runs
            for event in run.history.events
        ]


def as_methods(
    runs: History | Sequence[History] | Mapping[str, History | Sequence[History]],
    name: str = "run",
) -> list[Method]:
    """Return methods for histories in memory; in a sequence, those that differ in the seed alone.

    Runs that do not say what they were made of stay apart.
    """
    if isinstance(runs, History):
        runs = {name: runs}
    if not isinstance(runs, Mapping):
        return check_methods(_group([_as_run(history) for history in runs]))
    listed = {k: [h] if isinstance(h, History) else list(h) for k, h in runs.items()}
    return check_methods([Method(k, tuple(map(_as_run, hs))) for k, hs in listed.items()])


def _as_run(history: History) -> RunData:
    told = {key: value for key, value in history.provenance.items() if key != "config"}
    folder = "" if history.folder is None else str(history.folder)
    complete = history.given_out is not None or not told
    config = history.provenance.get("config", {})
    return RunData(history, history.seed, config, told, folder, complete)


def read_methods(folders: Iterable[str | Path]) -> list[Method]:
    """Read run folders and comparison folders; runs that differ in the seed alone go together."""
    methods: list[Method] = []
    loose: list[RunData] = []
    for folder in map(Path, folders):
        if (folder / PLAN).exists():
            methods += read_comparison(folder)
        elif (folder / "rounds.csv").exists():
            loose.append(read_run(folder))
        else:
            inside = sorted(path.parent for path in folder.glob("*/rounds.csv"))
            if not inside:
                raise ReportError(
                    f"{folder} holds no run and no comparison: expected rounds.csv in it or in the "
                    "folders below it."
                )
            loose += [read_run(path) for path in inside]
    return check_methods([*methods, *_group(loose)])


def read_run(folder: Path) -> RunData:
    """Read one run folder, without its model."""
    config, provenance = folder / "config.toml", folder / "run.json"
    history = History.load(folder, model=False)
    table = _read_config(config) if config.exists() else {}
    return RunData(
        history,
        table.get("seed", history.seed),
        table,
        read_json(provenance) if provenance.exists() else {},
        str(folder),
        is_complete(folder),
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode())
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path} is damaged: it cannot be read ({error}).") from None


def read_comparison(folder: Path, plan: list[dict[str, Any]] | None = None) -> list[Method]:
    """Read the complete runs of a comparison, by its plan or by that in the folder."""
    refuse_links(folder)
    if plan is None:
        plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))["methods"]
    methods = []
    for entry in plan:
        paths = [folder / run["folder"] for run in entry["runs"]]
        runs = tuple(read_run(path) for path in paths if is_complete(path))
        if runs:
            methods.append(Method(entry["name"], runs))
    return methods


def _group(runs: Sequence[RunData]) -> list[Method]:
    groups: dict[str, list[RunData]] = {}
    for run in runs:
        rest = share_of_method({"config": run.config} if run.config else run.provenance)
        known = run.config or "algorithm" in run.provenance
        key = json.dumps(rest, default=str) if known else run.folder or str(id(run))
        groups.setdefault(key, []).append(run)
    names = [_name(group) for group in groups.values()]
    twice = {name for name in names if names.count(name) > 1}
    return [
        Method((group[0].folder or f"{name} {i + 1}") if name in twice else name, tuple(group))
        for i, (name, group) in enumerate(zip(names, groups.values(), strict=True))
    ]


def _name(group: Sequence[RunData]) -> str:
    if not group[0].folder:
        return group[0].history.method
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
            run.history.check()
            if run.history.names != methods[0].clients:
                raise ReportError(
                    f"{method.name} and {methods[0].name} have different clients, so they cannot "
                    "be compared client by client; report them apart."
                )
    names = [method.name for method in methods]
    if len(set(names)) < len(names):
        raise ReportError(f"Every method needs its own name, got {', '.join(names)}.")
    return methods


@dataclass(frozen=True, eq=False)
class ClientRows:
    """Per-client numbers of one method, each of shape (N,); NaN where a number is not known.

    Parameters
    ----------
    value
        Mean over runs of the shown metric.
    lower, upper
        Mean over runs of 95 % limits: Wilson's for accuracies, for others what the clients' samples
        say. The runs share their test samples, so several runs do not narrow the limits.
    loss
        Mean over runs of the loss on the same split.
    sizes
        Samples in the split.
    weight
        Weight in the last recorded round, mean over runs.
    participation
        Fraction of the rounds the client took part in.
    quarantines
        Rounds in which its answer was refused, over all runs.
    worst
        What the first run's samples say about the worst client, for accuracies.
    """

    value: Losses
    lower: Losses
    upper: Losses
    loss: Losses
    sizes: Index
    weight: Weights
    participation: Weights
    quarantines: Index
    worst: WorstClient | None

    def worst_position(self, scale: Scale) -> int | None:
        """Return the client with the worst mean, if any was measured."""
        if np.isnan(self.value).all():
            return None
        pick = np.nanargmin if scale.higher_is_better else np.nanargmax
        return int(pick(self.value))


def collect_client_rows(method: Method, scale: Scale) -> ClientRows:
    """Return the per-client numbers of a method; NaN where some run has no number."""
    lower, upper, worst = _limit_accuracies(method, scale)
    return ClientRows(
        value=np.asarray(method.final(scale).mean(axis=0)),
        lower=lower,
        upper=upper,
        loss=np.asarray(method.final(Scale("loss", scale.split)).mean(axis=0)),
        sizes=method.sizes(scale),
        weight=method.last_weights(),
        participation=method.participation(),
        quarantines=method.quarantines(),
        worst=worst,
    )


def count_correct(method: Method, scale: Scale) -> tuple[Index, list[Losses], Index] | None:
    """Return whose correct answers are known, their numbers in every run, and of how many."""
    final, sizes = method.final(scale), method.sizes(scale)
    some = np.flatnonzero((sizes > 0) & np.isfinite(final).all(axis=0))
    if not scale.kind.is_fraction or not some.size:
        return None
    try:
        return some, [correct_counts(row[some], sizes[some]) for row in final], sizes[some]
    except ValueError:  # accuracies that are no counts: weighted, or rounded by their source
        return None


def _read_limits(method: Method, scale: Scale) -> tuple[Losses, Losses]:
    """Return what the clients' samples say about other metrics than accuracy, mean over runs."""
    told = [run.history.details for run in method.runs]
    found = [d.limits(scale.metric) for d in told if d is not None and d.split == scale.split]
    if len(found) < len(method.runs):
        found = [np.full((len(method.clients), 2), np.nan)]
    ends = np.mean(found, axis=0)
    return ends[:, 0], ends[:, 1]


def _limit_accuracies(method: Method, scale: Scale) -> tuple[Losses, Losses, WorstClient | None]:
    lower, upper = np.full((2, len(method.clients)), np.nan)
    known = count_correct(method, scale)
    if known is None:
        return *_read_limits(method, scale), None
    some, counts, sizes = known
    limits = np.array([wilson_interval(count, sizes) for count in counts])
    lower[some], upper[some] = limits.mean(axis=0)
    worst = worst_client_interval(counts[0], sizes)
    candidates = tuple(int(some[i]) for i in worst.candidates)
    return lower, upper, WorstClient(worst.interval, int(some[worst.observed]), candidates)
