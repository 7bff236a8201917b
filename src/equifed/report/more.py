"""What a report tells beside its main metric: further metrics, majority class, calibration, groups.

Everything is about the first run of a method, whose samples all its seeds share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from equifed.contract.arrays import Losses
from equifed.contract.evaluation import BINS, Calibration, Details
from equifed.metrics import Metric, find_metric, summary
from equifed.report import svg
from equifed.report.alone import NAMED, describe_gain, tabulate_alone
from equifed.report.figures import Figure, csv_text
from equifed.report.methods import Method
from equifed.report.scales import DASH, Scale, capital, plural
from equifed.training.history import History

FEW_CLIENTS = 12
"""Up to this many clients have calibration curves of their own."""
FEW_SAMPLES = 20
"""Clients with fewer samples have no curve: it would be noise."""
MOST_ROWS = 300
"""Rows of the table of groups on the page; all are in its CSV file."""


@dataclass(frozen=True, eq=False)
class Column:
    """One more number per client: as it is, as it is written, and its limits in words."""

    key: str
    label: str
    values: Losses
    texts: tuple[str, ...]
    limits: tuple[str, ...]


def find_details(history: History, scale: Scale) -> Details | None:
    """Return what single samples say about the split that is shown."""
    found = history.details
    return found if found is not None and found.split == scale.split else None


def list_further(history: History, scale: Scale) -> list[str]:
    """Return the metrics of the last evaluation beside the main one and the loss."""
    names = dict.fromkeys(r.metric for r in history.metrics if r.split == scale.split)
    return [name for name in names if name not in (scale.metric, "loss")]


def collect_columns(method: Method, scale: Scale) -> list[Column]:
    """Return what else is known about every client."""
    history = method.runs[0].history
    details, out = find_details(history, scale), []
    if scale.metric == "accuracy" and details is not None:
        shares = details.majorities()
        out.append(_write_column("majority", "Majority class", shares, scale.kind))
    shared = history.without_own
    if shared is not None and (shared.metric, shared.split) == (scale.metric, scale.split):
        out.append(_write_column("without_own", "Without own part", shared.values, scale.kind))
    alone = tabulate_alone(history, scale)
    if alone is not None:
        column = _write_column("alone", "Alone", alone.values, scale.kind)
        gains = ["not compared"] * len(alone.values)
        for i in alone.some:
            gains[i] = describe_gain(alone, int(i), scale).replace(" points", "")
        known = zip(gains, alone.values, strict=True)
        told = tuple(g if math.isfinite(v) else "" for g, v in known)
        out.append(replace(column, limits=told))
    for name in list_further(history, scale):
        record = history.last(name, scale.split)
        limits = None if details is None else details.limits(name)
        kind = find_metric(name)
        if record is not None:
            out.append(_write_column(name, capital(kind.label), record.values, kind, limits))
    if details is not None:
        errors = [math.nan if c is None or c.calibration is None else c.calibration.error()
                  for c in details.clients]  # fmt: skip
        if not np.isnan(errors).all():
            kind = Metric("calibration_error", higher_is_better=False)
            label = "Calibration error"
            out.append(_write_column(kind.name, label, np.array(errors), kind))
    return out


def _write_column(
    key: str, label: str, values: Losses, kind: Metric, limits: Losses | None = None
) -> Column:
    texts = tuple(kind.write(v) if math.isfinite(v) else DASH for v in values)
    spans = (
        [""] * len(values)
        if limits is None
        else [_write_limits(ends[0], ends[1], kind) for ends in limits]
    )
    return Column(key, label, np.asarray(values, dtype=np.float64), texts, tuple(spans))


def _write_limits(lower: float, upper: float, kind: Metric) -> str:
    if not (math.isfinite(lower) and math.isfinite(upper)):
        return ""
    if kind.is_fraction:
        return f"{kind.write_number(lower)} to {kind.write_number(upper)}"
    return f"{lower:.3g} to {upper:.3g}"


def describe_undefined(method: Method, scale: Scale) -> list[str]:
    """Say for whom a metric is not defined, and that they are left out of its summaries."""
    history, out = method.runs[0].history, []
    for name in list_further(history, scale):
        record, kind = history.last(name, scale.split), find_metric(name)
        if record is None:
            continue
        lost = np.flatnonzero(np.isnan(record.values) & (record.sizes > 0))
        if len(lost):
            names = ", ".join(history.names[i] for i in lost[:NAMED])
            more = f" and {len(lost) - NAMED:,} more" if len(lost) > NAMED else ""
            why = f" ({kind.undefined})" if kind.undefined else ""
            left = "it is" if len(lost) == 1 else "they are"
            out.append(
                f"{capital(kind.label)} is not defined for {names}{more}{why}; "
                f"{left} left out of its average and of its worst-served 20 %."
            )
    return out


def summarise_further(method: Method, scale: Scale) -> list[dict[str, str]]:
    """Return average, worst-served fifth and worst client of every further metric."""
    history, rows = method.runs[0].history, []
    for name in list_further(history, scale):
        record, kind = history.last(name, scale.split), find_metric(name)
        known = np.empty(0) if record is None else record.values[np.isfinite(record.values)]
        if record is None or not known.size:
            continue
        found = summary(known, higher_is_better=kind.higher_is_better)
        worst = int(np.nanargmin(kind.sign * record.values))
        rows.append({
            "label": capital(kind.label),
            "average": kind.write(found["average_by_client"]),
            "fifth": kind.write(found["worst_20_percent"]),
            "worst": kind.write(found["worst"]),
            "client": history.names[worst],
            "clients": f"{known.size:,}",
            "direction": "higher is better" if kind.higher_is_better else "lower is better",
        })  # fmt: skip
    return rows


# -- groups inside clients ------------------------------------------------------------------------


def list_groups(method: Method, scale: Scale) -> dict[str, Any] | None:
    """Return the table of groups inside clients: its metrics, rows, and the same as CSV."""
    history = method.runs[0].history
    details = find_details(history, scale)
    if details is None or not details.group_names():
        return None
    further = [name for name in list_further(history, scale) if name != scale.metric]
    metrics = [scale.metric, *further]
    rows, plain = [], []
    for client, detail in zip(history.names, details.clients, strict=True):
        for group, found in ({} if detail is None else detail.groups).items():
            cells = []
            numbers: list[object] = [client, group, found.size]
            for name in metrics:
                kind, value = find_metric(name), found.values.get(name, math.nan)
                ends = found.limits.get(name, (math.nan, math.nan))
                text = kind.write(value) if math.isfinite(value) else DASH
                cells.append({"value": text, "limits": _write_limits(ends[0], ends[1], kind)})
                numbers += [value, *ends]
            rows.append({"client": client, "group": group, "size": found.size, "cells": cells})
            plain.append(numbers)
    columns = ["client", "group", "n"]
    for name in metrics:
        columns += [name, f"{name}_lower_95", f"{name}_upper_95"]
    return {
        "labels": [capital(find_metric(name).label) for name in metrics],
        "rows": rows[:MOST_ROWS],
        "left": max(0, len(rows) - MOST_ROWS),
        "pooled": pool_groups(details, scale),
        "csv": csv_text(columns, plain),
    }


def pool_groups(details: Details, scale: Scale) -> list[dict[str, str]]:
    """Return every group over all clients: its samples, and the mean of the main metric."""
    if find_metric(scale.metric).each is None:
        return []
    out = []
    for name in details.group_names():
        found = [c.groups[name] for c in details.clients if c is not None and name in c.groups]
        sizes = np.array([g.size for g in found], dtype=np.float64)
        values = np.array([g.values.get(scale.metric, math.nan) for g in found])
        mean = float(values @ sizes / sizes.sum())
        out.append({
            "group": name, "clients": f"{len(found):,}", "size": f"{int(sizes.sum()):,}",
            "value": scale.text(mean),
        })  # fmt: skip
    return out


# -- calibration ----------------------------------------------------------------------------------


def draw_calibration(method: Method, scale: Scale) -> Figure | None:
    """Return how often answers are right against how sure the model was; None if not known."""
    details = find_details(method.runs[0].history, scale)
    pooled = None if details is None else details.pool_calibration()
    if details is None or pooled is None or not sum(pooled.count):
        return None
    plot = svg.frame(
        (0, 1), (0, 1), x_label="probability that the model gave its answer",
        write_x="{:.1f}".format, write_y="{:.1f}".format,
    )  # fmt: skip
    plot.line([0, 1], [0, 1], class_="line diagonal", data_tip="perfectly calibrated")
    known = [(i, c.calibration) for i, c in enumerate(details.clients)
             if c is not None and c.calibration is not None]  # fmt: skip
    rows = [["all clients", *row] for row in _list_bins(pooled)]
    for i, one in known if len(known) <= FEW_CLIENTS else []:
        rows += [[method.clients[i], *row] for row in _list_bins(one)]
        if sum(one.count) >= FEW_SAMPLES:
            x, y = np.array([row[1:3] for row in _list_bins(one)], dtype=np.float64).T
            tip = f"{method.clients[i]}: calibration error {one.error():.3f}"
            plot.line(x, y, class_="line thin grey", data_tip=tip)
    x, y = np.array([row[1:3] for row in _list_bins(pooled)], dtype=np.float64).T
    plot.line(x, y, class_="line accent", data_tip="all clients together")
    for (count, *_), a, b in zip(_list_bins(pooled), x, y, strict=True):
        tip = f"{plural(int(count), 'sample')}: {b:.0%} right where the model says {a:.0%}"
        plot.dot(float(a), float(b), 3.6, class_="dot accent", data_tip=tip)
    over = sum(pooled.confidence) > sum(pooled.correct)
    way = "surer than it is right" if over else "right more often than it is sure"
    alt = (
        f"Calibration on {plural(sum(pooled.count), 'sample')} of all clients: expected "
        f"calibration error {pooled.error():.3f} in {BINS} bins; on the whole the model is {way}."
    )
    thin = " Thin: every client." if len(known) <= FEW_CLIENTS else ""
    caption = (
        "How often answers are right (up) against how probable the model called them (across). On "
        f"the dotted line a probability can be taken at its word.{thin}"
    )
    columns = ["client", "samples", "mean_probability", "fraction_right"]
    return Figure("calibration", "Calibration", caption, alt, plot, columns, rows)


def _list_bins(found: Calibration) -> list[tuple[int, float, float]]:
    """Return samples, mean probability and fraction right of every bin that has samples."""
    bins = zip(found.count, found.confidence, found.correct, strict=True)
    return [(n, sure / n, right / n) for n, sure, right in bins if n]
