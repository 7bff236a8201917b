"""The tables of a report: comparison, measures, clients, what was run, events; and its JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from equifed.metrics import Interval
from equifed.metrics.summary import BY_SAMPLE, reducers
from equifed.report.differences import Difference
from equifed.report.document import Report
from equifed.report.measures import Estimate, Measure, choose_format
from equifed.report.methods import Method
from equifed.report.own_parts import find_note
from equifed.report.scales import DASH, Scale, add_sign, is_finite
from equifed.report.words import find_date, write_headline

Facts = list[tuple[str, str]]
COLUMNS = ("value", "lower", "upper", "loss", "sizes", "weight", "participation", "quarantines")
"""Per-client numbers in CSV and JSON."""


ASIDE = {
    "average_by_client": ("majority_class", "majority class"),
    "worst_20_percent": ("chance_floor", "by chance alone"),
}
"""Measures that say little without what stands beside them."""


def list_comparison(report: Report) -> list[dict[str, Any]]:
    """Return the comparison: one row per measure, one cell per method."""
    if report.scale is None:
        return []
    rows = []
    for measure in report.measures:
        cells = [
            format_cell(found.get(measure.key), measure, report.scale, m == report.baseline)
            for m, found in enumerate(report.estimates)
        ]
        label = "The client" if report.single and measure.key == "worst" else measure.label
        if measure.key in ASIDE:
            name, words = ASIDE[measure.key]
            for cell, beside in zip(cells, report.beside, strict=True):
                cell["aside"] = (
                    f"{words} {report.scale.text(beside[name])}" if name in beside else ""
                )
        row = {"key": measure.key, "label": label, "meaning": measure.meaning, "cells": cells}
        rows.append(row)
    return rows


def format_cell(
    found: Estimate | None, measure: Measure, scale: Scale, baseline: bool = False
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


def _format_limits(found: Estimate, write: Callable[[float], str]) -> str:
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
    if unit and margin.endswith(" " + unit):
        return f"{value} ± {margin}"
    return f"{text} ± {margin}"


def list_all_measures(report: Report) -> list[dict[str, Any]]:
    """Return every reducer with its meaning, for the table of all measures."""
    if report.scale is None:
        return []
    rows = []
    for reducer in (BY_SAMPLE, *reducers()):
        values = [
            found[reducer.name].interval.estimate if reducer.name in found else float("nan")
            for found in report.estimates
        ]
        shown = [f"{v:.4f}" if np.isfinite(v) else "∞" if v > 0 else DASH for v in values]
        rows.append({"name": reducer.name, "meaning": reducer.meaning, "values": shown})
    return rows


def collect_facts(methods: Sequence[Method]) -> dict[str, Any]:
    """Return what was run: what all methods share once, then the rest by method."""
    import tomli_w

    facts = [_list_facts(method) for method in methods]
    shared = [fact for fact in facts[0] if all(fact in other for other in facts)]
    rows = []
    for method, found in zip(methods, facts, strict=True):
        config = method.runs[0].config
        config = {k: v for k, v in config.items() if k != "seed" or len(method.runs) == 1}
        rest = [fact for fact in found if fact not in shared] if len(methods) > 1 else found
        text = tomli_w.dumps(config) if config else ""
        rows.append({"name": method.name, "facts": rest, "config": text})
    return {"shared": shared if len(methods) > 1 else [], "methods": rows}


def _list_facts(method: Method) -> Facts:
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


def as_json(report: Report) -> dict[str, Any]:
    """Return the report's numbers; null stands for what is not known, not defined or infinite."""
    scale = report.scale
    return {
        "title": report.title,
        "metric": None if scale is None else scale.metric,
        "split": None if scale is None else scale.split,
        "baseline": report.methods[report.baseline].name,
        "target": None if report.target is None else vars(report.target),
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
    out["measures"] = {k: _estimate_json(found) for k, found in report.estimates[m].items()}
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


def _estimate_json(found: Estimate) -> dict[str, Any]:
    difference = found.difference
    return {
        "values": [to_json_number(v) for v in found.values],
        **_interval_json(found.interval),
        "limits_about": found.source,
        "difference": None if difference is None else _difference_json(difference),
        "pairs": 0 if difference is None else difference.pairs,
    }


def _difference_json(difference: Difference) -> dict[str, Any]:
    told = {"limits_about": difference.about, "paired_samples": difference.paired}
    return {**_interval_json(difference.interval), **told}


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
