"""All that a report is made of, before it becomes a page or JSON: what every method's runs say.

Beside the main metric it is about a method's first run, whose samples all its seeds share.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from equifed.contract.arrays import Index, Losses, Weights
from equifed.metrics import Metric, WorstClient, wilson_interval, worst_client_interval
from equifed.metrics.metric import DASH
from equifed.report.methods import Method, ReportError, Scale, capital, plural
from equifed.report.numbers import (
    Measure,
    Measured,
    choose_format,
    choose_target,
    estimate_measures,
    list_measures,
)
from equifed.report.verdict import Verdict, describe_gain, find_floor, tabulate_alone, write_verdict
from equifed.training.files import StoredRun
from equifed.training.history import History
from equifed.training.tables import OWN, read_part

MOST_LISTED = 1000
"""Of more clients, the page lists so many lines of all methods together, of those served worst; all
are in the JSON beside it."""


@dataclass(frozen=True, eq=False)
class Column:
    """One number per client: as it is, as it is written, and what stands below it."""

    key: str
    label: str
    values: Losses | Index
    texts: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Told:
    """What the runs of one method say; per-client numbers have shape (N,), NaN where not known.

    Limits are means over runs, which share their test samples: several runs do not narrow them.
    """

    method: Method
    scale: Scale
    estimates: dict[str, Measured]
    value: Losses
    lower: Losses
    upper: Losses
    loss: Losses
    sizes: Index
    weight: Weights
    participation: Weights
    quarantines: Index
    lowest: WorstClient | None  # what the first run's samples say about the worst client

    @property
    def worst(self) -> int | None:
        """The client with the worst mean, if any was measured."""
        if np.isnan(self.value).all():
            return None
        return int(np.nanargmin(self.scale.kind.sign * self.value))

    def level(self, key: str) -> float:
        """Return a measure's estimate; NaN if there is none."""
        return self.estimates[key].interval.estimate if key in self.estimates else math.nan

    @functools.cached_property
    def columns(self) -> list[Column]:
        """What else is known about every client."""
        return collect_columns(self.method, self.scale)

    @functools.cached_property
    def beside(self) -> dict[str, float]:
        """What to hold measures against: the majority class and the chance floor."""
        if not self.scale.kind.is_fraction:
            return {}
        known = [v for c in self.columns if c.key == "majority" for v in c.values if v == v]
        found = {"majority_class": float(np.mean(known)) if known else math.nan}
        found["chance_floor"] = find_floor(self.method, self.scale)
        return {key: value for key, value in found.items() if math.isfinite(value)}


def read_told(method: Method, base: Method | None, scale: Scale, target: float | None) -> Told:
    """Read what the runs of a method say; NaN where some run has no number."""
    lower, upper, lowest = _limit_clients(method, scale)
    return Told(
        method,
        scale,
        estimate_measures(method, base, scale, target),
        value=np.asarray(method.final(scale).mean(axis=0)),
        lower=lower,
        upper=upper,
        loss=np.asarray(method.final(Scale("loss", scale.split)).mean(axis=0)),
        sizes=method.sizes(scale),
        weight=method.last_weights(),
        participation=method.participation(),
        quarantines=method.count_events("quarantine"),
        lowest=lowest,
    )


def _limit_clients(method: Method, scale: Scale) -> tuple[Losses, Losses, WorstClient | None]:
    """Return the limits of every client, and what is known about the worst of them."""
    lower, upper = np.full((2, len(method.clients)), np.nan)
    known = method.count_correct(scale)
    if known is None:  # no accuracies: what the clients' samples say
        told = [run.details for run in method.runs]
        found = [d.limits(scale.metric) for d in told if d is not None and d.split == scale.split]
        if len(found) == len(method.runs):
            lower, upper = np.mean(found, axis=0).T
        return lower, upper, None
    some, counts, sizes = known
    lower[some], upper[some] = np.mean([wilson_interval(k, sizes) for k in counts], axis=0)
    worst = worst_client_interval(counts[0], sizes)
    candidates = tuple(int(some[i]) for i in worst.candidates)
    return lower, upper, WorstClient(worst.interval, int(some[worst.observed]), candidates)


@dataclass(frozen=True, eq=False)
class Report:
    """The methods, what was measured, and against which of them the others are held."""

    title: str
    methods: list[Method]
    baseline: int
    scale: Scale | None = None
    target: float | None = None
    measures: tuple[Measure, ...] = ()
    told: tuple[Told, ...] = ()  # one for every method; none where nothing was evaluated
    problems: tuple[str, ...] = ()
    root: Path | None = None  # where the names of folders begin
    chosen: int | None = None  # the method that was chosen on validation rows

    @property
    def several(self) -> bool:
        """Whether there is something to compare."""
        return len(self.methods) > 1

    @property
    def shown(self) -> Scale:
        """The scale; an error where nothing was evaluated."""
        if self.scale is None:
            raise ReportError(
                "No evaluation was recorded: there is nothing to report to participants."
            )
        return self.scale

    @property
    def single(self) -> bool:
        """Whether there is one client only, so that nothing is worst or average."""
        return len(self.methods[0].clients) == 1

    @functools.cached_property
    def verdict(self) -> Verdict:
        """Whether there is anything to gain under the method of the headline."""
        return write_verdict(self.methods[self.lead], self.scale)

    @functools.cached_property
    def columns(self) -> list[list[Column]]:
        """The table of clients under every method, without columns that have nothing to say."""
        says = {
            "change": self.several,
            "loss": self.scale is not None and self.scale.metric not in ("loss", "mse"),
            "weight": any(np.isfinite(told.weight).any() for told in self.told),
            "participation": any((told.participation < 1).any() for told in self.told),
            "quarantines": any(told.quarantines.any() for told in self.told),
        }
        found = [list_columns(told, self.told[self.baseline].value) for told in self.told]
        return [[c for c in columns if says.get(c.key, True)] for columns in found]

    @functools.cached_property
    def heads(self) -> dict[str, str]:
        """Key and label of every column of the table of clients."""
        return {c.key: c.label for columns in self.columns for c in columns}

    def name_folder(self, run: History) -> str:
        """Return where a run is, as seen from where the report's names of folders begin."""
        if run.folder is None:
            return ""
        path = Path(run.folder)
        return str(path) if self.root is None else path.relative_to(self.root).as_posix()

    def write(self, key: str) -> str:
        """Write a measure of the headline's method."""
        measure = next(measure for measure in self.measures if measure.key == key)
        return choose_format(measure, self.shown)(self.told[self.lead].level(key))

    @functools.cached_property
    def lead(self) -> int:
        """The method of the headline: the chosen one, else whose worst-served fifth does best.

        The baseline counts, and goes before those that serve the fifth as well.
        """
        if self.chosen is not None or self.scale is None:
            return self.chosen or 0
        found = self.scale.kind.sign * np.array([t.level("worst_20_percent") for t in self.told])
        served = np.nan_to_num(found, nan=-math.inf, neginf=-math.inf)
        return max(range(len(served)), key=lambda m: (served[m], m == self.baseline))

    @functools.cached_property
    def tied(self) -> list[str]:
        """Names of the methods whose worst-served fifth reads the same as the headline's."""
        levels = [self.shown.text(told.level("worst_20_percent")) for told in self.told]
        pairs = zip(self.methods, levels, strict=True)
        return [method.name for method, level in pairs if level == levels[self.lead]]

    @functools.cached_property
    def listed(self) -> Index:
        """The clients in the page's table: all, or of very many those that are served worst."""
        count = len(self.methods[0].clients)
        if count * len(self.methods) <= 2 * MOST_LISTED or self.scale is None:
            return np.arange(count)
        order = np.argsort(self.scale.kind.sign * self.told[self.lead].value, kind="stable")
        return np.sort(order[: max(100, MOST_LISTED // len(self.methods))])


def build(
    methods: list[Method],
    *,
    title: str | None = None,
    baseline: str | None = None,
    target: float | None = None,
    problems: Sequence[str] = (),
    root: Path | None = None,
    chosen: str | None = None,
) -> Report:
    """Measure methods; the first one is the baseline unless another is named.

    ``chosen`` names the method that was chosen on validation rows: the page is about it.
    ``target`` is the worst client's value to reach; by default its final one under the baseline.
    """
    names = [method.name for method in methods]
    for name in (baseline, chosen):
        if name is not None and name not in names:
            raise ReportError(f"there is no method {name!r}; choose from {', '.join(names)}")
    base = 0 if baseline is None else names.index(baseline)
    evaluated = (run.main_metric() for method in methods for run in method.runs)
    scale = next((Scale(*found) for found in evaluated if found is not None), None)
    title = title or _choose_title(methods)
    rest = (tuple(problems), root, None if chosen is None else names.index(chosen))
    if scale is None:
        return Report(title, methods, base, None, None, (), (), *rest)
    if target is None and len(methods) > 1:
        target = choose_target(methods[base], scale)
    told = [
        read_told(method, None if m == base else methods[base], scale, target)
        for m, method in enumerate(methods)
    ]
    measures = list_measures(scale, target)
    return Report(title, methods, base, scale, target, measures, tuple(told), *rest)


def _choose_title(methods: Sequence[Method]) -> str:
    """Return the name of the data, or of the only method."""
    names = [method.runs[0].provenance.get("data", {}).get("name") for method in methods]
    other = methods[0].name if len(methods) == 1 else "Comparison"
    return str(next(filter(None, names), other))


# -- columns of the table of clients --------------------------------------------------------------


def list_columns(told: Told, base: Losses) -> list[Column]:
    """Return the table of clients under one method; ``base`` has the baseline's values."""
    scale, count = told.scale, len(told.method.clients)
    pairs = zip(told.lower, told.upper, strict=True)
    limits = [scale.span(a, b) if math.isfinite(a) else "" for a, b in pairs]
    with np.errstate(invalid="ignore"):  # both infinite
        change = told.value - base

    def plain(key: str, label: str, values: Any, write: Callable[[Any], str]) -> Column:
        texts = (write(v) if np.isfinite(v) else DASH for v in values)
        return Column(key, label, values, tuple(texts), ("",) * count)

    return [
        write_column("value", capital(scale.kind.label), told.value, scale.kind, limits),
        plain("change", "Change", change, scale.signed),
        *told.columns,
        plain("loss", "Loss", told.loss, Scale("loss", "").text),
        plain("n", "Samples", told.sizes, "{:,}".format),
        plain("weight", "Weight", told.weight, "{:.4f}".format),
        plain("participation", "Took part", told.participation, lambda v: f"{100 * v:.0f} %"),
        plain("quarantines", "Refused", told.quarantines, "{:,}".format),
    ]


def collect_columns(method: Method, scale: Scale) -> list[Column]:
    """Return what else is known about every client."""
    history, details, out = method.history, method.details(scale), []
    if scale.metric == "accuracy" and details is not None:
        out.append(write_column("majority", "Majority class", details.majorities(), scale.kind))
    beside = {"average": "Solved for the average", "without_own": "Without own part"}
    for key, label in beside.items():
        found = getattr(history, key)
        if found is not None and (found.metric, found.split) == (scale.metric, scale.split):
            out.append(write_column(key, label, found.values, scale.kind))
    alone = tabulate_alone(history, scale)
    if alone is not None:
        gains = ["not compared" if np.isfinite(v) else "" for v in alone.values]
        for i in alone.some:
            gains[i] = describe_gain(alone, int(i), scale).replace(" points", "")
        out.append(write_column("alone", "Alone", alone.values, scale.kind, gains))
    for kind, record in method.further(scale):
        limits = [""] * len(history.names) if details is None else [
            write_limits(ends, kind) for ends in details.limits(kind.name)
        ]  # fmt: skip
        out.append(write_column(kind.name, capital(kind.label), record.values, kind, limits))
    errors = np.array([
        math.nan if c is None or c.calibration is None else c.calibration.error()
        for c in (() if details is None else details.clients)
    ])  # fmt: skip
    if np.isfinite(errors).any():
        kind = Metric("calibration_error", higher_is_better=False)
        out.append(write_column(kind.name, "Calibration error", errors, kind))
    return out


def write_column(
    key: str, label: str, values: Any, kind: Metric, notes: Sequence[str] | None = None
) -> Column:
    """Return a column whose numbers are written as those of a metric."""
    texts = tuple(map(kind.write, values))
    return Column(key, label, np.asarray(values), texts, tuple(notes or [""] * len(texts)))


def write_limits(ends: Sequence[float] | Losses, kind: Metric) -> str:
    """Write the limits of a metric without its unit; nothing if they are not known."""
    if not np.isfinite(ends).all():
        return ""
    return " to ".join(kind.write_number(v) if kind.is_fraction else f"{v:.3g}" for v in ends)


# -- own parts ------------------------------------------------------------------------------------


def describe_own_part(history: History) -> str:
    """Say which parameters clients keep, as the history or its folder has them; "" if none."""
    found: Mapping[str, Any] = history.own or {}
    if not found and history.folder is not None and history.folder.is_dir():
        found = read_part(StoredRun(history.folder), OWN) or {}
    if not found:
        return ""
    count = sum(np.asarray(values)[0].size for values in found.values())
    return f"own part: {', '.join(found)}, {plural(count, 'number')} per client"
