"""All that a report is made of, before it becomes a page or JSON.

What it tells beside its main metric is about the first run of a method, whose samples all its seeds
share: the majority class, own models, own parts, further metrics, calibration.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from equifed.contract.arrays import Losses
from equifed.metrics import Metric
from equifed.report.methods import DASH, Method, ReportError, Scale, capital, join_names, plural
from equifed.report.numbers import (
    ClientRows,
    Measure,
    Measured,
    choose_format,
    choose_scale,
    choose_target,
    collect_client_rows,
    estimate_measures,
    list_measures,
)
from equifed.report.verdict import (
    Verdict,
    describe_gain,
    find_floor,
    tabulate_alone,
    write_verdict,
)
from equifed.training.files import Damaged
from equifed.training.history import History
from equifed.training.tables import OWN

FEW_TOLD = 12
"""Own numbers that a model card lists."""


@dataclass(frozen=True, eq=False)
class Report:
    """The methods, what was measured, and against which of them the others are held."""

    title: str
    methods: list[Method]
    baseline: int
    scale: Scale | None
    target: float | None
    measures: tuple[Measure, ...]
    estimates: list[dict[str, Measured]]
    rows: list[ClientRows]
    problems: tuple[str, ...] = ()

    @property
    def several(self) -> bool:
        """Whether there is something to compare."""
        return len(self.methods) > 1

    @property
    def shown(self) -> Scale:
        """The scale; an error where nothing was evaluated."""
        if self.scale is None:
            raise ReportError("No evaluation was recorded: there is nothing to tell participants.")
        return self.scale

    @property
    def names(self) -> list[str]:
        """Names of the methods."""
        return [method.name for method in self.methods]

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
        """What else is known about every client, by method."""
        if self.scale is None:
            return [[] for _ in self.methods]
        return [collect_columns(method, self.scale) for method in self.methods]

    @functools.cached_property
    def beside(self) -> list[dict[str, float]]:
        """What to hold measures against, by method: the majority class and the chance floor."""
        if self.scale is None or not self.scale.kind.is_fraction:
            return [{} for _ in self.methods]
        out = []
        for method, columns in zip(self.methods, self.columns, strict=True):
            shares = np.concatenate(
                [c.values for c in columns if c.key == "majority"] or [np.empty(0)]
            )
            known = shares[np.isfinite(shares)]
            told = {"majority_class": float(known.mean())} if known.size else {}
            floor = find_floor(method, self.scale)
            out.append(told | ({"chance_floor": floor} if math.isfinite(floor) else {}))
        return out

    def write(self, key: str) -> str:
        """Write a measure of the headline's method."""
        measure = next(measure for measure in self.measures if measure.key == key)
        estimate = self.estimates[self.lead][key].interval.estimate
        return choose_format(measure, self.shown)(estimate)

    @property
    def sampled(self) -> bool:
        """Whether limits of some number are about other test samples."""
        return any(e.source == "samples" for found in self.estimates for e in found.values())

    @property
    def lead(self) -> int:
        """The method of the headline: the one whose worst client is served best."""
        if self.scale is None:
            return 0
        found = [e["worst"].interval.estimate if "worst" in e else math.nan for e in self.estimates]
        worst = np.nan_to_num(self.scale.kind.sign * np.array(found), nan=-math.inf)
        others = [i for i in range(len(worst)) if i != self.baseline] or [self.baseline]
        return max(others, key=lambda i: worst[i])


def build(
    methods: list[Method],
    *,
    title: str | None = None,
    baseline: str | None = None,
    target: float | None = None,
    problems: Sequence[str] = (),
) -> Report:
    """Measure methods; the first one is the baseline unless another is named.

    ``target`` is the worst client's value for rounds and bytes to a target; by default its final
    value under the baseline.
    """
    names = [method.name for method in methods]
    if baseline is not None and baseline not in names:
        raise ReportError(f"there is no method {baseline!r}; choose from {', '.join(names)}")
    base = 0 if baseline is None else names.index(baseline)
    scale, title = choose_scale(methods), title or _choose_title(methods)
    if scale is None:
        return Report(title, methods, base, None, None, (), [], [], tuple(problems))
    if target is None and len(methods) > 1:
        target = choose_target(methods[base], scale)
    others = [None if m == base else methods[base] for m in range(len(methods))]
    return Report(
        title=title,
        methods=methods,
        baseline=base,
        scale=scale,
        target=target,
        measures=list_measures(scale, target),
        estimates=[
            estimate_measures(method, other, scale, target)
            for method, other in zip(methods, others, strict=True)
        ],
        rows=[collect_client_rows(method, scale) for method in methods],
        problems=tuple(problems),
    )


def _choose_title(methods: Sequence[Method]) -> str:
    """Return the name of the data, or of the only method."""
    names = [method.runs[0].provenance.get("data", {}).get("name") for method in methods]
    other = methods[0].name if len(methods) == 1 else "Comparison"
    return str(next(filter(None, names), other))


# -- columns of the table of clients --------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Column:
    """One more number per client: as it is, as it is written, and its limits in words."""

    key: str
    label: str
    values: Losses
    texts: tuple[str, ...]
    limits: tuple[str, ...]


def collect_columns(method: Method, scale: Scale) -> list[Column]:
    """Return what else is known about every client."""
    history, out = method.history, []
    details, shared = method.details(scale), history.without_own
    if scale.metric == "accuracy" and details is not None:
        out.append(_write_column("majority", "Majority class", details.majorities(), scale.kind))
    if shared is not None and (shared.metric, shared.split) == (scale.metric, scale.split):
        out.append(_write_column("without_own", "Without own part", shared.values, scale.kind))
    alone = tabulate_alone(history, scale)
    if alone is not None:
        gains = np.where(np.isfinite(alone.values), "not compared", "").astype(object)
        for i in alone.some:
            gains[i] = describe_gain(alone, int(i), scale).replace(" points", "")
        column = _write_column("alone", "Alone", alone.values, scale.kind)
        out.append(replace(column, limits=tuple(gains)))
    for kind, record in method.further(scale):
        limits = None if details is None else details.limits(kind.name)
        out.append(_write_column(kind.name, capital(kind.label), record.values, kind, limits))
    errors = [
        math.nan if c is None or c.calibration is None else c.calibration.error()
        for c in (() if details is None else details.clients)
    ]
    if not np.isnan(errors).all():
        kind = Metric("calibration_error", higher_is_better=False)
        out.append(_write_column(kind.name, "Calibration error", np.array(errors), kind))
    return out


def _write_column(
    key: str, label: str, values: Losses, kind: Metric, limits: Losses | None = None
) -> Column:
    texts = tuple(write_value(v, kind) for v in values)
    known = np.full((len(values), 2), math.nan) if limits is None else limits
    spans = tuple(write_limits(ends, kind) for ends in known)
    return Column(key, label, np.asarray(values, dtype=np.float64), texts, spans)


def write_value(value: float, kind: Metric) -> str:
    """Write a value with its unit, or a dash if it is not known."""
    return kind.write(value) if math.isfinite(value) else DASH


def write_limits(ends: Sequence[float] | Losses, kind: Metric) -> str:
    """Write the limits of a metric without its unit; nothing if they are not known."""
    if not np.isfinite(ends).all():
        return ""
    return " to ".join(kind.write_number(v) if kind.is_fraction else f"{v:.3g}" for v in ends)


# -- own parts ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class OwnTable:
    """Own parameters of every client, flat: (N, p) with a name for each number."""

    parameters: tuple[str, ...]
    names: tuple[str, ...]
    values: Losses

    @property
    def describe(self) -> str:
        """Say in words what clients keep.

        >>> OwnTable(("1.bias",), ("1.bias",), np.zeros((3, 1))).describe
        'own part: 1.bias, 1 number per client'
        """
        count = plural(self.values.shape[1], "number")
        return f"own part: {', '.join(self.parameters)}, {count} per client"

    def list_spread(self, most: int = FEW_TOLD) -> str:
        """Write mean and standard deviation over clients of the first numbers."""
        mean, spread = self.values.mean(axis=0), self.values.std(axis=0)
        columns = zip(self.names, mean, spread, strict=True)
        return join_names([f"{name} {m:.3g} ± {s:.2g}" for name, m, s in columns], most)


def read_own(history: History) -> OwnTable | None:
    """Return the own parts that a history or its folder has; None: there are none."""
    found = {} if history.own is None else {n: np.asarray(v) for n, v in history.own.items()}
    path = None if history.folder is None else Path(history.folder) / OWN
    if not found and path is not None and path.exists():
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            found = load_file(path)
        except (OSError, ValueError, SafetensorError) as error:
            raise Damaged(f"{path} is damaged: it cannot be read ({error}).") from None
    rows = [v.reshape(len(v), -1).astype(np.float64) for v in found.values()]
    if not rows or len(rows[0]) != len(history.names):
        return None
    names = [
        name if part.shape[1] == 1 else f"{name}[{k}]"
        for name, part in zip(found, rows, strict=True)
        for k in range(part.shape[1])
    ]
    return OwnTable(tuple(found), tuple(names), np.concatenate(rows, axis=1))


def find_note(history: History) -> str:
    """Return what training said about own parts, with the strength of their penalty."""
    notes = (str(e["reason"]) for e in history.events if e["event"] == "note")
    return next((note for note in notes if note.startswith("own part ")), "")
