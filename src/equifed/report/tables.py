"""The tables of a report: comparison, clients, groups, what was run, events; and its JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from equifed.contract.arrays import Losses
from equifed.contract.evaluation import Details
from equifed.metrics import Interval, summary
from equifed.report.charts import csv_text
from equifed.report.document import (
    Report,
    find_note,
    write_limits,
    write_value,
)
from equifed.report.methods import DASH, Method, Scale, add_sign, capital, is_finite
from equifed.report.numbers import Measure, Measured, choose_format
from equifed.report.text import find_date, write_headline

COLUMNS = ("value", "lower", "upper", "loss", "sizes", "weight", "participation", "quarantines")
"""Per-client numbers in CSV and JSON."""
ASIDE = {
    "average_by_client": ("majority_class", "majority class"),
    "worst_20_percent": ("chance_floor", "by chance alone"),
}
"""Measures that say little without what stands beside them."""
MOST_ROWS = 300
"""Rows of the table of groups on the page; all are in its CSV file."""


# -- comparison -----------------------------------------------------------------------------------


def list_comparison(report: Report) -> list[dict[str, Any]]:
    """Return the comparison: one row per measure, one cell per method."""
    if report.scale is None:
        return []
    rows = []
    for measure in report.measures:
        name, words = ASIDE.get(measure.key, ("", ""))
        cells = []
        for m, (found, beside) in enumerate(zip(report.estimates, report.beside, strict=True)):
            base = m == report.baseline
            cell = format_cell(found.get(measure.key), measure, report.scale, base)
            aside = f"{words} {report.scale.text(beside[name])}" if name in beside else ""
            cells.append(cell | {"aside": aside})
        label = "The client" if report.single and measure.key == "worst" else measure.label
        rows.append(
            {"key": measure.key, "label": label, "meaning": measure.meaning, "cells": cells}
        )
    return rows


def format_cell(
    found: Measured | None, measure: Measure, scale: Scale, baseline: bool = False
) -> dict[str, str]:
    """Return a cell: the mean, half the interval's width or its ends, the difference."""
    out = {"value": "", "note": "", "change": "", "tone": "", "aside": ""}
    if found is not None and any(math.isinf(value) for value in found.values):
        return out | {"value": "∞"}
    if found is None or found.reached == 0:
        return out | {"value": "not reached" if "target" in measure.key else DASH}
    if found.reached < len(found.values):
        return out | {"value": f"reached by {found.reached} of {len(found.values)}"}
    write = choose_format(measure, scale)
    out |= {"value": write(found.interval.estimate), "note": _format_limits(found, write)}
    if found.difference is not None and not baseline:
        interval, over_seeds = found.difference.interval, found.difference.about == "seeds"
        out["change"], out["tone"] = _format_change(interval, over_seeds, measure, write)
    return out


def _format_limits(found: Measured, write: Callable[[float], str]) -> str:
    """Return the interval over seeds as ±, which is symmetric; that over samples by its ends.

    A number that its interval leaves outside has the corrected one beside it.
    """
    interval = found.interval
    if not is_finite(interval) or interval.lower == interval.upper:
        return ""
    if found.source == "seeds":
        return "± " + _bare(write(interval.upper - interval.estimate))
    span = f"{_bare(write(interval.lower))} to {_bare(write(interval.upper))}"
    if interval.estimate in interval or interval.corrected is None:
        return span
    return f"corrected {_bare(write(interval.corrected))}: {span}"


def _bare(text: str) -> str:
    return text.removesuffix(" points").removesuffix(" %")


def _format_change(
    difference: Interval, over_seeds: bool, measure: Measure, write: Callable[[float], str]
) -> tuple[str, str]:
    """Return the paired difference, and whether it is for better or worse beyond doubt."""

    def signed(value: float) -> str:
        return add_sign(value, _bare(write(abs(value))))

    text = signed(difference.estimate)
    if not is_finite(difference) or difference.lower == difference.upper == 0:
        return text, ""
    if not over_seeds:
        text = f"{text} ({signed(difference.lower)} to {signed(difference.upper)})"
    elif difference.lower < difference.upper:
        text = add_margin(text, _bare(write(difference.upper - difference.estimate)))
    if difference.lower <= 0 <= difference.upper:
        return text, ""
    return text, "better" if (difference.estimate < 0) == measure.lower_is_better else "worse"


def add_margin(text: str, margin: str) -> str:
    """Put a margin after a number, and their unit once if they share it.

    >>> add_margin("−1.98 MB", "1.02 MB"), add_margin("−875 kB", "1 MB"), add_margin("+2", "1")
    ('−1.98 ± 1.02 MB', '−875 kB ± 1 MB', '+2 ± 1')
    """
    value, _, unit = text.partition(" ")
    shared = unit and margin.endswith(" " + unit)
    return f"{value if shared else text} ± {margin}"


def summarise_further(method: Method, scale: Scale) -> list[dict[str, str]]:
    """Return average, worst-served fifth and worst client of every further metric."""
    rows = []
    for kind, record in method.further(scale):
        known = record.values[np.isfinite(record.values)]
        if known.size:
            found = summary(known, higher_is_better=kind.higher_is_better)
            rows.append({
                "label": capital(kind.label),
                "average": kind.write(found["average_by_client"]),
                "fifth": kind.write(found["worst_20_percent"]),
                "worst": kind.write(found["worst"]),
                "client": method.clients[int(np.nanargmin(kind.sign * record.values))],
                "clients": f"{known.size:,}",
                "direction": "higher is better" if kind.higher_is_better else "lower is better",
            })  # fmt: skip
    return rows


# -- clients --------------------------------------------------------------------------------------


def pack_clients(report: Report) -> dict[str, Any]:
    """Return what the page's script needs for the table of clients and for the names on hover."""
    data: dict[str, Any] = {"clients": list(report.methods[0].clients), "methods": []}
    data |= {"lead": report.lead, "baseline": report.baseline}
    if report.scale is None:
        return data
    keys = [key for key, _ in list_heads(report)]
    data |= {
        "limits": shows_limits(report),
        "higher": report.scale.higher_is_better,
        "label": report.scale.label,
        "n": [int(n) for n in report.rows[0].sizes],
        "more": keys,
        "loss": shows_loss(report),
    }
    base = report.rows[report.baseline].value
    nothing = dict.fromkeys(keys, _pack([], [DASH] * len(base), [""] * len(base)))
    for method, rows, more in zip(report.methods, report.rows, report.columns, strict=True):
        names = ("value", "lower", "upper", "loss", "weight", "participation")
        columns = {name: getattr(rows, name) for name in names}
        with np.errstate(invalid="ignore"):  # both infinite
            columns["change"] = rows.value - base
        known = {c.key: _pack(c.values, c.texts, c.limits) for c in more}
        data["methods"].append({
            "name": method.name,
            **{key: [to_json_number(v) for v in column] for key, column in columns.items()},
            "quarantines": [int(q) for q in rows.quarantines],
            "text": _write_columns(columns, report.scale),
            "more": nothing | known,
        })  # fmt: skip
    return data


def _pack(values: Any, texts: Sequence[str], limits: Sequence[str]) -> dict[str, Any]:
    numbers = [to_json_number(v) for v in values] or [None] * len(texts)
    return {"value": numbers, "text": list(texts), "limits": list(limits)}


def list_heads(report: Report) -> list[tuple[str, str]]:
    """Return key and label of every further column that some method has."""
    return list({c.key: c.label for columns in report.columns for c in columns}.items())


def shows_loss(report: Report) -> bool:
    """Tell whether the loss is another number than the main metric."""
    return report.scale is not None and report.scale.metric not in ("loss", "mse")


def shows_limits(report: Report) -> bool:
    """Tell whether some client's main metric has limits."""
    return any(bool(np.isfinite(rows.lower).any()) for rows in report.rows)


def _write_columns(columns: dict[str, Losses], scale: Scale) -> dict[str, list[str]]:
    """Write the table's numbers here, as everywhere else: two ways to round would show two."""
    limits = zip(columns["lower"], columns["upper"], strict=True)
    loss = Scale("loss", "")
    return {
        "value": [scale.text(v) for v in columns["value"]],
        "limits": [scale.span(a, b) if math.isfinite(a) else DASH for a, b in limits],
        "change": [scale.signed(v) for v in columns["change"]],
        "loss": [loss.text(v) for v in columns["loss"]],
        "weight": [f"{v:.4f}" if math.isfinite(v) else DASH for v in columns["weight"]],
        "participation": [
            f"{100 * v:.0f} %" if math.isfinite(v) else DASH for v in columns["participation"]
        ],
    }


def write_clients_csv(report: Report) -> str:
    """Return the table of clients as CSV."""
    shown = "value" if report.scale is None else report.scale.metric
    columns = ["method", "client", shown, "lower_95", "upper_95", "loss", "n", *COLUMNS[5:]]
    heads, rows = [key for key, _ in list_heads(report)], []
    for method, found, more in zip(report.methods, report.rows, report.columns, strict=False):
        known, nothing = {c.key: c.values for c in more}, np.full(len(method.clients), math.nan)
        every = [getattr(found, name) for name in COLUMNS] + [known.get(h, nothing) for h in heads]
        numbers = [column.tolist() for column in every]
        rows += [[method.name, *row] for row in zip(method.clients, *numbers, strict=True)]
    return csv_text([*columns, *heads], rows)


# -- groups inside clients ------------------------------------------------------------------------


def list_groups(method: Method, scale: Scale) -> dict[str, Any] | None:
    """Return the table of groups inside clients: its metrics, rows, and the same as CSV."""
    details = method.details(scale)
    if details is None or not details.group_names():
        return None
    kinds = [scale.kind, *(kind for kind, _ in method.further(scale))]
    rows, plain = [], []
    for client, detail in zip(method.clients, details.clients, strict=True):
        for group, found in ({} if detail is None else detail.groups).items():
            values = [found.values.get(kind.name, math.nan) for kind in kinds]
            ends = [found.limits.get(kind.name, (math.nan, math.nan)) for kind in kinds]
            told = list(zip(kinds, values, ends, strict=True))
            cells = [
                {"value": write_value(v, kind), "limits": write_limits(two, kind)}
                for kind, v, two in told
            ]
            rows.append({"client": client, "group": group, "size": found.size, "cells": cells})
            numbers = [number for _, v, two in told for number in (v, *two)]
            plain.append([client, group, found.size, *numbers])
    ending = ("", "_lower_95", "_upper_95")
    columns = ["client", "group", "n", *(kind.name + end for kind in kinds for end in ending)]
    return {
        "labels": [capital(kind.label) for kind in kinds],
        "rows": rows[:MOST_ROWS],
        "left": max(0, len(rows) - MOST_ROWS),
        "pooled": _pool_groups(details, scale),
        "csv": csv_text(columns, plain),
    }


def _pool_groups(details: Details, scale: Scale) -> list[dict[str, str]]:
    """Return every group over all clients: its samples, and the mean of the main metric."""
    out = []
    for name in details.group_names() if scale.kind.each is not None else ():
        found = [c.groups[name] for c in details.clients if c is not None and name in c.groups]
        sizes = np.array([g.size for g in found], dtype=np.float64)
        values = np.array([g.values.get(scale.metric, math.nan) for g in found])
        mean = float(values @ sizes / sizes.sum())
        out.append({
            "group": name, "clients": f"{len(found):,}", "size": f"{int(sizes.sum()):,}",
            "value": scale.text(mean),
        })  # fmt: skip
    return out


# -- what was run ---------------------------------------------------------------------------------


def collect_facts(methods: Sequence[Method]) -> dict[str, Any]:
    """Return what was run: what all methods share once, then the rest by method."""
    import tomli_w

    facts, rows = [_list_facts(method) for method in methods], []
    several = len(methods) > 1
    shared = [f for f in facts[0] if several and all(f in other for other in facts)]
    for method, found in zip(methods, facts, strict=True):
        one, config = len(method.runs) == 1, method.runs[0].config
        shown = tomli_w.dumps({k: v for k, v in config.items() if k != "seed" or one})
        rest = [fact for fact in found if fact not in shared]
        rows.append({"name": method.name, "facts": rest, "config": shown})
    return {"shared": shared, "methods": rows}


def _list_facts(method: Method) -> list[tuple[str, str]]:
    first = method.runs[0]
    data, versions = first.provenance.get("data", {}), first.provenance.get("versions", {})
    source, told = data.get("source") or "", {}
    if isinstance(source, dict):
        told = {key: source[key] for key in ("preparation", "rows and columns") if key in source}
        rest = {key: value for key, value in source.items() if key not in told}
        source = "; ".join(f"{key}: {value}" for key, value in rest.items())
    seconds = sum(r.seconds for run in method.runs for r in run.history.rounds)
    unfinished = sum(not run.complete for run in method.runs)
    facts = {
        "Seeds": ", ".join("not recorded" if s is None else str(s) for s in method.seeds),
        "What ran": first.history.algorithm or "",
        "Data": data.get("name", ""),
        "Source": str(source),
        "Preparation": str(told.get("preparation", "")),
        "Rows and columns": str(told.get("rows and columns", "")),
        "SHA-256 of the data": data.get("sha256", ""),
        "Versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
        "Own part": find_note(first.history),
        "Date": find_date([method]),
        "Training time": f"{seconds:.1f} s",
        "Not finished": f"{unfinished} of {len(method.runs)} runs" if unfinished else "",
        "Run folders": ", ".join(run.folder for run in method.runs if run.folder),
    }
    return [(label, value) for label, value in facts.items() if value]


def format_event(event: dict[str, Any]) -> dict[str, str]:
    """Return an event as the table shows it."""
    known = ("event", "round", "client", "reason", "time", "seed", "method")
    apart = ("given_out", "gains", "one_class")  # the reason says it, or the table of clients
    rest = {k: v for k, v in event.items() if k not in (*known, *apart)}
    row = {k: "" if event.get(k) is None else str(event[k]) for k in known}
    if rest:
        row["reason"] = " ".join(filter(None, [row["reason"], json.dumps(rest, default=str)]))
    return row


# -- JSON -----------------------------------------------------------------------------------------


def as_json(report: Report) -> dict[str, Any]:
    """Return the report's numbers; null stands for what is not known, not defined or infinite."""
    scale = report.scale
    return {
        "title": report.title,
        "metric": None if scale is None else scale.metric,
        "split": None if scale is None else scale.split,
        "baseline": report.methods[report.baseline].name,
        "target": None if report.target is None else {"value": report.target, "of": "worst"},
        "headline": write_headline(report),
        "verdict": report.verdict.to_json(),
        "methods": [_method_json(report, m) for m in range(len(report.methods))],
    }


def _method_json(report: Report, m: int) -> dict[str, Any]:
    method = report.methods[m]
    out: dict[str, Any] = {
        "name": method.name,
        "seeds": list(method.seeds),
        "runs": [
            {
                "folder": r.folder,
                "config": r.config,
                "provenance": r.provenance,
                "given_out": None if r.history.given_out is None else asdict(r.history.given_out),
                "certificate": r.history.certificate(),
            }
            for r in method.runs
        ],
        "events": method.events(),
        "measures": {},
        "clients": [],
    }
    if report.scale is None:
        return out
    out["measures"] = {k: _measured_json(found) for k, found in report.estimates[m].items()}
    rows, more = report.rows[m], report.columns[m]
    out["beside"] = report.beside[m]
    out["clients"] = [
        {
            "client": name,
            **{c: to_json_number(getattr(rows, c)[i]) for c in COLUMNS},
            **{column.key: to_json_number(column.values[i]) for column in more},
        }
        for i, name in enumerate(method.clients)
    ]
    return out


def _measured_json(found: Measured) -> dict[str, Any]:
    difference, told = found.difference, None
    if difference is not None:
        told = {
            **_interval_json(difference.interval),
            "limits_about": difference.about,
            "paired_samples": difference.paired,
        }
    return {
        "values": [to_json_number(v) for v in found.values],
        **_interval_json(found.interval),
        "limits_about": found.source,
        "difference": told,
        "pairs": 0 if difference is None else difference.pairs,
    }


def _interval_json(interval: Interval) -> dict[str, float | None]:
    out = {key: to_json_number(getattr(interval, key)) for key in ("estimate", "lower", "upper")}
    if interval.corrected is not None and interval.estimate not in interval:
        out["corrected"] = to_json_number(interval.corrected)
    return out


def to_json_number(value: Any) -> float | int | None:
    """Return a number that JSON has, or None.

    >>> to_json_number(np.float64(0.5)), to_json_number(float("inf")), to_json_number(np.int64(3))
    (0.5, None, 3)
    """
    if isinstance(value, int | np.integer):
        return int(value)
    return float(value) if math.isfinite(value) else None
