"""From a report to files: one page that needs nothing else, JSON, and a page per participant."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
import numpy as np
from markupsafe import Markup

from equifed.report.document import Report, all_figures, as_json, headline, number
from equifed.report.figures import colour, csv_text
from equifed.report.measures import Estimate, Measure, written
from equifed.report.scales import Scale, bytes_text, finite, plural


def write_report(report: Report, out: str | Path, *, per_client: bool = False) -> Path:
    """Write ``out`` (HTML), the same numbers beside it as JSON, and the participants' pages."""
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(report), encoding="utf-8")
    numbers = json.dumps(as_json(report), indent=1, allow_nan=False, default=str)
    path.with_suffix(".json").write_text(numbers + "\n", encoding="utf-8")
    if per_client:
        from equifed.report.participant import write_participants

        write_participants(report, path.with_name(path.stem + "-clients"))
    return path


@functools.cache
def environment() -> jinja2.Environment:
    """Return the templates; whatever is put into them is escaped."""
    env = jinja2.Environment(
        loader=jinja2.PackageLoader("equifed.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters["data_link"] = data_link
    env.globals.update(style=_source("style.css"), colour=colour, plural=plural)
    return env


def _source(name: str) -> Markup:
    text = (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")
    return Markup(text)  # our own file


def script(name: str = "report.js") -> dict[str, Markup]:
    """Return a script, and the policy that lets the page run this script and nothing else."""
    source = _source(name)
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return {"script": source, "policy": Markup(policy)}


def data_link(text: str) -> str:
    r"""Return a link that holds a CSV file.

    >>> data_link("a,b\n1,2\n")
    'data:text/csv;charset=utf-8,a,b%0A1,2%0A'
    """
    return "data:text/csv;charset=utf-8," + quote(text, safe=",.-_~:;/()=")


def render(report: Report) -> str:
    """Return the page."""
    page = environment().get_template("report.html")
    return page.render(
        report=report,
        subtitle=subtitle(report),
        headline=headline(report),
        cards=cards(report),
        comparison=comparison_rows(report),
        all_measures=measure_rows(report),
        figures=all_figures(report),
        table=table_data(report),
        clients_csv=clients_csv(report),
        runs=run_rows(report),
        events=[event_row(e) for method in report.methods for e in method.events()],
        **script(),
    )


def subtitle(report: Report) -> str:
    """Say in one line what was run."""
    method = report.methods[0]
    seeds = max(len(m.runs) for m in report.methods)
    rounds = max(len(run.history.rounds) for m in report.methods for run in m.runs)
    names = ", ".join(m.name for m in report.methods)
    counts = [plural(len(method.clients), "client"), plural(rounds, "round"), plural(seeds, "seed")]
    return " · ".join([names, *counts])


def cards(report: Report) -> list[dict[str, str]]:
    """Return the few numbers at the top, of the headline's method."""
    if report.scale is None:
        return []
    scale, found, rows = report.scale, report.estimates[report.lead], report.rows[report.lead]
    method, worst = report.methods[report.lead], rows.worst_position(report.scale)
    if worst is None or "worst" not in found:
        return []
    base = report.methods[report.baseline].name
    shown = []
    for key, label in (("worst", "Worst client"), ("average_by_client", "Average over clients"),
                       ("spread", "Best to worst")):  # fmt: skip
        measure = next(m for m in report.measures if m.key == key)
        estimate = found[key]
        note = method.clients[worst] if key == "worst" and len(method.runs) == 1 else ""
        difference = estimate.difference
        change = "" if difference is None else f"{scale.change(difference.estimate)} against {base}"
        value = written(measure, scale)(estimate.interval.estimate)
        shown.append({"label": label, "value": value, "note": note, "change": change})
    sent = found["bytes"].interval.estimate
    rounds = plural(int(found["rounds"].interval.estimate), "round")
    shown.append(
        {"label": "Sent and received", "value": bytes_text(sent), "note": rounds, "change": ""}
    )
    return shown


def comparison_rows(report: Report) -> list[dict[str, Any]]:
    """Return the comparison: one row per measure, one cell per method."""
    if report.scale is None:
        return []
    rows = []
    for measure in report.measures:
        cells = [
            cell(found.get(measure.key), measure, report.scale, m == report.baseline)
            for m, found in enumerate(report.estimates)
        ]
        rows.append({"label": measure.label, "meaning": measure.meaning, "cells": cells})
    return rows


def cell(
    found: Estimate | None, measure: Measure, scale: Scale, baseline: bool = False
) -> dict[str, str]:
    """Return a cell: the mean, half the interval's width or its ends, the difference."""
    if found is None or found.reached == 0:
        return {"value": "not reached" if "target" in measure.key else "–", "note": "",
                "change": "", "tone": ""}  # fmt: skip
    write = written(measure, scale)
    if found.reached < len(found.values):
        return {"value": f"reached by {found.reached} of {len(found.values)}", "note": "",
                "change": "", "tone": ""}  # fmt: skip
    note = ""
    if finite(found.interval):
        lower, upper = (write(v) for v in (found.interval.lower, found.interval.upper))
        note = f"{_bare(lower)} to {_bare(upper)}"
    change, tone = "", ""
    if found.difference is not None and not baseline:
        change, tone = _change(found, measure, scale)
    return {"value": write(found.interval.estimate), "note": note, "change": change, "tone": tone}


def _bare(text: str) -> str:
    return text.removesuffix(" points").removesuffix(" %")


def _change(found: Estimate, measure: Measure, scale: Scale) -> tuple[str, str]:
    """Return the paired difference, and whether it is for better or worse beyond doubt."""
    difference = found.difference
    assert difference is not None
    write = written(measure, scale)

    def signed(value: float) -> str:
        sign = "−" if value < 0 else "+"
        return sign + _bare(write(abs(value)))

    text = signed(difference.estimate)
    if not finite(difference):
        return text, ""
    text += f" [{signed(difference.lower)}, {signed(difference.upper)}]"
    if difference.lower <= 0 <= difference.upper:
        return text, ""
    return text, "better" if (difference.estimate < 0) == measure.lower_is_better else "worse"


def measure_rows(report: Report) -> list[dict[str, Any]]:
    """Return every reducer with its meaning, for the table of all measures."""
    from equifed.metrics.summary import BY_SAMPLE, reducers

    if report.scale is None:
        return []
    rows = []
    for reducer in (BY_SAMPLE, *reducers()):
        values = [
            found[reducer.name].interval.estimate if reducer.name in found else float("nan")
            for found in report.estimates
        ]
        shown = [f"{v:.4f}" if np.isfinite(v) else "∞" if v > 0 else "–" for v in values]
        rows.append({"name": reducer.name, "meaning": reducer.meaning, "values": shown})
    return rows


def table_data(report: Report) -> dict[str, Any]:
    """Return what the page's script needs for the table of clients and for the names on hover."""
    data: dict[str, Any] = {"clients": list(report.methods[0].clients), "methods": []}
    data["lead"], data["baseline"] = report.lead, report.baseline
    if report.scale is None:
        return data
    scale = report.scale
    data |= {"percent": scale.metric == "accuracy", "higher": scale.higher_is_better}
    data["label"] = scale.label
    data["n"] = [int(n) for n in report.rows[0].sizes]
    for method, rows in zip(report.methods, report.rows, strict=True):
        columns = {
            "value": rows.value, "lower": rows.lower, "upper": rows.upper, "loss": rows.loss,
            "weight": rows.weight, "participation": rows.participation,
        }  # fmt: skip
        packed: dict[str, Any] = {k: [_short(v) for v in column] for k, column in columns.items()}
        packed["quarantines"] = [int(q) for q in rows.quarantines]
        data["methods"].append({"name": method.name, **packed})
    return data


def _short(value: float) -> float | None:
    """Return a number with the digits that a page shows."""
    known = number(value)
    return None if known is None else float(f"{known:.5g}")


def clients_csv(report: Report) -> str:
    """Return the table of clients as CSV."""
    names = ("value", "lower", "upper", "loss", "sizes", "weight", "participation", "quarantines")
    shown = "value" if report.scale is None else report.scale.metric
    columns = ["method", "client", shown, "lower_95", "upper_95", "loss", "n", *names[5:]]
    rows = (
        [method.name, client, *(_plain(getattr(found, name)[i]) for name in names)]
        for method, found in zip(report.methods, report.rows, strict=False)
        for i, client in enumerate(method.clients)
    )
    return csv_text(columns, rows)


def _plain(value: Any) -> object:
    return int(value) if isinstance(value, np.integer) else float(value)


def run_rows(report: Report) -> list[dict[str, Any]]:
    """Return what was run, method by method."""
    import tomli_w

    out = []
    for method in report.methods:
        first = method.runs[0]
        config = {k: v for k, v in first.config.items() if k != "seed" or len(method.runs) == 1}
        out.append(
            {
                "name": method.name,
                "seeds": ", ".join("not recorded" if s is None else str(s) for s in method.seeds),
                "config": tomli_w.dumps(config) if config else "",
                "versions": first.provenance.get("versions", {}),
                "data": first.provenance.get("data", {}),
                "folders": [run.folder for run in method.runs if run.folder],
                "seconds": sum(r.seconds for run in method.runs for r in run.history.rounds),
                "incomplete": sum(not run.complete for run in method.runs),
            }
        )
    return out


def event_row(event: dict[str, Any]) -> dict[str, str]:
    """Return an event as the table shows it."""
    known = ("event", "round", "client", "reason", "time", "seed", "method")
    rest = {k: v for k, v in event.items() if k not in known}
    row = {k: "" if event.get(k) is None else str(event[k]) for k in known}
    if rest:
        row["reason"] = " ".join(filter(None, [row["reason"], json.dumps(rest, default=str)]))
    return row


def slug(name: str) -> str:
    """Return a name that is safe in a path.

    >>> slug("<script>alert(1)</script>")
    'script-alert-1-script'
    """
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:40].lower() or "client"
