"""The tables of a report: comparison, clients, groups, what was run, events; and its JSON."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from equifed.contract.arrays import to_cell
from equifed.metrics import Interval, summary
from equifed.metrics.metric import DASH
from equifed.report.document import Report, Told, write_limits
from equifed.report.methods import Method, Scale, add_sign, capital, find_note, is_finite
from equifed.report.numbers import Measure, Measured, choose_format
from equifed.report.text import find_date, write_headline
from equifed.report.verdict import tabulate_alone
from equifed.training.folder import is_complete

Cell = dict[str, str]
COLUMNS = ("value", "lower", "upper", "loss", "sizes", "weight", "participation", "quarantines")
"""Per-client numbers in JSON."""
RARE = 0.2
"""Accuracy says little where a class has less than this share of the samples."""
ASIDE = {
    "average_by_client": ("majority_class", "majority class"),
    "worst_20_percent": ("chance_floor", "by chance alone"),
}
"""Measures that say little without what stands beside them."""
MOST_ROWS = 300
"""Rows of the table of groups on the page; all are in ``details.json``."""


# -- comparison -----------------------------------------------------------------------------------


def make_cell(value: str, note: str = "", **more: str) -> dict[str, str]:
    """Return a cell: a text, and what stands below it."""
    return {"value": value, "note": note, "aside": "", "change": "", "tone": "", **more}


def make_table(
    heads: Sequence[str | Cell], rows: Iterable[Sequence[str | Cell]], words: Sequence[int] = ()
) -> dict[str, Any]:
    """Return a table as the template draws it; columns in ``words`` hold sentences."""
    lines = [[c if isinstance(c, dict) else make_cell(c) for c in row] for row in (heads, *rows)]
    return {"heads": lines[0], "rows": lines[1:], "words": words}


def list_comparison(report: Report) -> list[dict[str, Any]]:
    """Return the comparison: one row per measure, one cell per method."""
    rows = []
    for measure in report.measures:
        cells = [_beside(told, measure, m == report.baseline) for m, told in enumerate(report.told)]
        label = "The client" if report.single and measure.key == "worst" else measure.label
        rows.append({"key": measure.key, "label": label, "cells": cells})
    return rows


def tabulate_candidates(report: Report) -> dict[str, Any]:
    """Return one row per method: whom it serves how well, who is better off alone, the cost."""
    small = int(np.isfinite(report.told[report.lead].value).sum()) <= 5  # the fifth is one client
    left = {"best_20_percent", "spread", "gini", "worst_20_percent" if small else ""}
    left |= {"average_by_client"} if report.single else set()
    shown = [m for m in report.measures if m.key not in left and "target" not in m.key]
    worth, costs = shown[:-2], shown[-2:] if report.chosen is None else []  # a fit's are alike
    further = [_further_cells(told) for told in report.told]
    alone = [tabulate_alone(t.method.history, t.scale) for t in report.told]
    rows: list[list[str | Cell]] = []
    for m, told in enumerate(report.told):
        marks = {"chosen": m == report.chosen, "baseline": report.several and m == report.baseline}
        name = make_cell(told.method.name, ", ".join(k for k, is_so in marks.items() if is_so))
        before, after = (
            [_beside(told, measure, m == report.baseline) for measure in some]
            for some in (worth, costs)
        )
        found = alone[m]
        sure = DASH if found is None else f"{len(found.sure)} of {len(found.some)}"
        rows.append([name, *before, *further[m].values(), *([sure] if any(alone) else []), *after])
    labels = ["The client" if report.single and s.key == "worst" else s.label for s in worth]
    more = ["Better off alone"] if any(alone) else []
    last = [measure.label for measure in costs]
    return make_table(["Method", *labels, *further[report.lead], *more, *last], rows)


def _further_cells(told: Told) -> dict[str, str]:
    """Return the mean AUROC where a class has less than 20 % of the samples."""
    details = told.method.details(told.scale)
    shares = np.array([math.nan]) if details is None else details.majorities()
    known = np.isfinite(shares)
    if not known.any() or np.average(shares[known], weights=told.sizes[known]) <= 1 - RARE:
        return {}
    found = {kind.name: (kind, r) for kind, r in told.method.further(told.scale)}
    if "auroc" not in found:
        return {}
    kind, record = found["auroc"]
    return {capital(kind.label): kind.write(float(np.nanmean(record.values)))}


def _beside(told: Told, measure: Measure, baseline: bool) -> Cell:
    """Return a cell with what its number has to be held against."""
    cell, (name, words) = format_cell(told, measure, baseline), ASIDE.get(measure.key, ("", ""))
    if name in told.beside and (baseline or name != "majority_class"):  # of the data alone
        cell["aside"] = f"{words} {told.scale.text(told.beside[name])}"
    return cell


def format_cell(told: Told, measure: Measure, baseline: bool = False) -> Cell:
    """Return a cell: the mean, half the interval's width or its ends, the difference."""
    found, write = told.estimates.get(measure.key), choose_format(measure, told.scale)
    if found is not None and any(math.isinf(value) for value in found.values):
        return make_cell("∞")
    if found is None or found.reached == 0:
        return make_cell("not reached" if "target" in measure.key else DASH)
    if found.reached < len(found.values):
        return make_cell(f"reached by {found.reached} of {len(found.values)}")
    out = make_cell(write(found.interval.estimate), _format_limits(found, write))
    if found.difference is not None and not baseline:
        out["change"], out["tone"] = _format_change(found.difference.interval, measure, write)
    return out


def _format_limits(found: Measured, write: Callable[[float], str]) -> str:
    """Return ± over seeds, ends over samples; one outside has the corrected number beside it."""
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
    difference: Interval, measure: Measure, write: Callable[[float], str]
) -> tuple[str, str]:
    """Return the paired difference, and whether it is for better or worse beyond doubt."""
    shown = (difference.estimate, difference.lower, difference.upper)
    change, lower, upper = (add_sign(v, _bare(write(abs(v)))) for v in shown)
    if not is_finite(difference) or difference.lower == difference.upper:
        return change, ""
    text = f"{change} ({lower} to {upper})"
    if difference.lower <= 0 <= difference.upper:
        return text, ""
    return text, "better" if (difference.estimate < 0) == measure.lower_is_better else "worse"


def summarise_further(method: Method, scale: Scale) -> dict[str, Any]:
    """Return average, worst-served fifth and worst client of every further metric."""
    rows: list[list[str | Cell]] = []
    for kind, record in method.further(scale):
        known = record.values[np.isfinite(record.values)]
        if known.size:
            found = summary(known, higher_is_better=kind.higher_is_better)
            worst = method.clients[int(np.nanargmin(kind.sign * record.values))]
            levels = [kind.write(found[key]) for key in ("average_by_client", "worst_20_percent")]
            better = "higher" if kind.higher_is_better else "lower"
            last = make_cell(kind.write(found["worst"]), worst)
            name = make_cell(capital(kind.label), f"{better} is better")
            rows.append([name, *levels, last, f"{known.size:,}"])
    heads = ("Metric", "Average over clients", "Worst-served 20 %", "Worst client", "Clients")
    return make_table(heads, rows)


# -- clients --------------------------------------------------------------------------------------


def pack_clients(report: Report) -> dict[str, Any]:
    """Return what the page's script needs for the table of clients and for the names on hover."""
    methods, listed = [], report.listed.tolist()
    for told, columns in zip(report.told, report.columns, strict=True):
        packed = {
            c.key: {
                "value": [to_json_number(c.values[i]) for i in listed],
                "text": [c.texts[i] for i in listed],
                "notes": [c.notes[i] for i in listed] if any(c.notes) else [],
            }
            for c in columns
        }
        methods.append({"name": told.method.name, "columns": packed})
    higher = report.scale is None or report.scale.higher_is_better
    names = [report.methods[0].clients[i] for i in listed]
    return {"clients": names, "keys": list(report.heads), "higher": higher, "methods": methods}


def write_clients_csv(report: Report) -> str:
    """Return the table of clients as CSV."""
    keys = [key for key in report.heads if key not in ("value", "change")]
    shown = "value" if report.scale is None else report.scale.metric
    rows: list[list[object]] = []
    for told, columns in zip(report.told, report.columns, strict=True):
        known = {c.key: c.values for c in columns}
        nothing = np.full(len(told.value), math.nan)
        every = [told.value, told.lower, told.upper, *(known.get(key, nothing) for key in keys)]
        names, listed = told.method.clients, report.listed
        numbers = zip(*(column[listed].tolist() for column in every), strict=True)
        rows += [
            [told.method.name, names[i], *row]
            for i, row in zip(listed.tolist(), numbers, strict=True)
        ]
    return csv_text(["method", "client", shown, "lower_95", "upper_95", *keys], rows)


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return CSV whose text no spreadsheet takes for a formula."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([_cell(name) for name in columns])
    writer.writerows([[_cell(cell) for cell in row] for row in rows])
    return out.getvalue()


def _cell(cell: object) -> object:
    if isinstance(cell, str):
        return to_cell(cell)
    if isinstance(cell, float):
        return "" if math.isnan(cell) else f"{cell:.8g}"
    return cell


def list_groups(method: Method, scale: Scale) -> dict[str, Any] | None:
    """Return the table of groups inside clients, and how many rows it leaves out."""
    details = method.details(scale)
    if details is None or not details.group_names():
        return None
    kinds, nothing = [scale.kind, *(kind for kind, _ in method.further(scale))], (math.nan,) * 2
    rows: list[list[str | Cell]] = []
    for client, detail in zip(method.clients, details.clients, strict=True):
        for group, found in ({} if detail is None else detail.groups).items():
            cells = [
                make_cell(
                    kind.write(found.values.get(kind.name, math.nan)),
                    write_limits(found.limits.get(kind.name, nothing), kind),
                )
                for kind in kinds
            ]
            rows.append([client, group, f"{found.size:,}", *cells])
    heads = ["Client", "Group", "Samples", *(capital(kind.label) for kind in kinds)]
    left = max(0, len(rows) - MOST_ROWS)
    return {"table": make_table(heads, rows[:MOST_ROWS]), "left": left}


# -- what was run ---------------------------------------------------------------------------------


def collect_facts(report: Report, methods: Sequence[Method]) -> dict[str, Any]:
    """Return what was run: what all methods share once, then the rest by method."""
    import tomli_w

    facts, rows = [_list_facts(report, method) for method in methods], []
    several = len(methods) > 1
    shared = [f for f in facts[0] if several and all(f in other for other in facts)]
    for method, found in zip(methods, facts, strict=True):
        one, config = len(method.runs) == 1, method.history.provenance.get("config", {})
        shown = tomli_w.dumps({k: v for k, v in config.items() if k != "seed" or one})
        rest = [fact for fact in found if fact not in shared]
        rows.append({"name": method.name, "facts": rest, "config": shown})
    return {"shared": shared, "methods": rows}


def _list_facts(report: Report, method: Method) -> list[tuple[str, str]]:
    first = method.history
    data, versions = first.provenance.get("data", {}), first.provenance.get("versions", {})
    source = data.get("source") or ""
    if isinstance(source, dict):
        source = "; ".join(f"{key}: {value}" for key, value in source.items())
    seconds = sum(r.seconds for run in method.runs for r in run.rounds)
    folders = [Path(run.folder) for run in method.runs if run.folder is not None]
    unfinished = sum(not is_complete(folder) for folder in folders)
    facts = {
        "Seeds": ", ".join("not recorded" if s is None else str(s) for s in method.seeds),
        "What ran": first.algorithm or "",
        "Data": data.get("name", ""),
        "Source": str(source),
        "SHA-256 of the data": data.get("sha256", ""),
        "Versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
        "Own part": find_note(first),
        "Date": find_date([method]),
        "Training time": f"{seconds:.1f} s",
        "Not finished": f"{unfinished} of {len(method.runs)} runs" if unfinished else "",
        "Run folders": ", ".join(filter(None, map(report.name_folder, method.runs))),
    }
    return [(label, value) for label, value in facts.items() if value]


def list_events(events: Sequence[dict[str, Any]], columns: Sequence[str]) -> dict[str, Any] | None:
    """Return a table of events; None: there are none."""
    if not events:
        return None
    known = ("event", "round", "client", "reason", "time", "seed", "method")
    apart = (
        "given_out",
        "gains",
        "one_class",
        "ledgers",
    )  # the reason says it, or the table of clients
    rows = []
    for event in events:
        row = {k: "" if event.get(k) is None else str(event[k]) for k in known}
        rest = {k: v for k, v in event.items() if k not in (*known, *apart)}
        row["reason"] += (" " + json.dumps(rest, default=str)) if rest else ""
        rows.append([row[column].strip() for column in columns])
    words = [k for k, column in enumerate(columns) if column in ("client", "reason")]
    return make_table([capital(column) for column in columns], rows, words)


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
                "folder": report.name_folder(r),
                "config": r.provenance.get("config", {}),
                "provenance": {k: v for k, v in r.provenance.items() if k != "config"},
                "given_out": None if r.given_out is None else asdict(r.given_out),
                "certificate": r.certificate(),
            }
            for r in method.runs
        ],
        "events": method.events(),
        "measures": {},
        "clients": [],
    }
    if report.scale is None:
        return out
    told = report.told[m]
    out["measures"] = {k: _measured_json(found) for k, found in told.estimates.items()}
    out["beside"] = told.beside
    out["clients"] = [
        {
            "client": name,
            **{c: to_json_number(getattr(told, c)[i]) for c in COLUMNS},
            **{column.key: to_json_number(column.values[i]) for column in told.columns},
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
    """Return a number that JSON has, or None."""
    if isinstance(value, int | np.integer):
        return int(value)
    return float(value) if math.isfinite(value) else None
