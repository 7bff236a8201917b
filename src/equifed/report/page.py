"""From a report to files: one page that needs nothing else, JSON, and a page per participant."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
import shutil
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import jinja2
import numpy as np
from markupsafe import Markup

from equifed.report import svg, tables, text
from equifed.report.charts import colour, draw_frontier, find_frontier
from equifed.report.curves import (
    Series,
    collect_series,
    describe_weights,
    draw_course,
    draw_figures,
)
from equifed.report.document import Report, build
from equifed.report.methods import TIMES, as_methods, capital, plural
from equifed.report.numbers import COSTS, LABELS
from equifed.training.files import write_file
from equifed.training.history import History

TEMPLATES = Path(__file__).parent / "templates"
SLUG = 40
"""Characters of a name in a path."""
SUMMARY = ("average_by_client", "worst", "worst_20_percent", "best_20_percent", "spread")
"""What a participant hears of the others."""
SINGLE = ("worst", *COSTS)
"""Rows of the comparison when there is one client only."""
POINT = (*SUMMARY, "gini")
"""What the page of a sweep shows of every setting."""


def write_report(
    runs: Report | History | Sequence[History] | Mapping[str, History | Sequence[History]],
    out: str | Path,
    *,
    per_client: bool = False,
    refresh: float | None = None,
) -> Path:
    """Write ``out`` (HTML), the same numbers beside it as JSON, and the participants' pages.

    Parameters
    ----------
    runs : History, sequence of them, mapping of name to histories, or Report
        One run, several (those that differ in the seed alone go together), methods with a run for
        each seed, or what was built of them already.
    out : path
        The page.
    per_client : bool
        Write a page for each participant, too.
    refresh : float, optional
        Let the page load itself again after so many seconds, for runs that go on.
    """
    report = runs if isinstance(runs, Report) else build(as_methods(runs))
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    # In one step: a browser may load it at any moment.
    write_file(path, render(report, refresh).encode())
    numbers = json.dumps(tables.as_json(report), indent=1, allow_nan=False, default=str)
    write_file(path.with_suffix(".json"), f"{numbers}\n".encode())
    if per_client:
        write_participants(report, path.with_name(path.stem + "-clients"))
    return path


@functools.cache
def load_templates() -> jinja2.Environment:
    """Return the templates; whatever is put into them is escaped."""
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters.update(data_link=make_data_link, bound=bind_units, capital=capital)
    env.globals.update(style=_read_template("style.css"), colour=colour, plural=plural)
    env.globals.update(dashes=svg.DASHES)
    return env


def _read_template(name: str) -> Markup:
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))  # our own file


def load_script(name: str = "report.js") -> dict[str, Markup]:
    """Return a script, and the policy that lets the page run this script and nothing else."""
    source = _read_template(name)
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return {"script": source, "policy": Markup(policy)}


def make_data_link(table: str) -> str:
    r"""Return a link that holds a CSV file.

    >>> make_data_link("a,b\n1,2\n")
    'data:text/csv;charset=utf-8,a,b%0A1,2%0A'
    """
    return "data:text/csv;charset=utf-8," + quote(table, safe=",.-_~:;/()=")


def bind_units(sentence: str) -> str:
    """Keep numbers and their units on one line."""
    for unit in ("%", TIMES, "points"):
        sentence = sentence.replace(" " + unit, "\N{NO-BREAK SPACE}" + unit)
    return sentence


def render(report: Report, refresh: float | None = None) -> str:
    """Return the page; ``refresh`` is after how many seconds it loads itself again."""
    page, lead = load_templates().get_template("report.html"), report.methods[report.lead]
    figures = draw_figures(report)
    return page.render(
        report=report,
        refresh=refresh,
        subtitle=text.write_subtitle(report),
        palette=choose_palette(len(report.methods), report.baseline, report.lead),
        headline=text.write_headline(report),
        cards=text.list_cards(report),
        comparison=[
            r for r in tables.list_comparison(report) if not report.single or r["key"] in SINGLE
        ],
        evidence=_describe_differences(report),
        figures=figures,
        certificate_notes=text.collect_certificate_notes(report.methods),
        weight_notes=describe_weights(report.methods, figures["weights"]),
        table=tables.pack_clients(report),
        heads=tables.list_heads(report),
        shows_loss=tables.shows_loss(report),
        shows_limits=tables.shows_limits(report),
        further=[] if report.scale is None else tables.summarise_further(lead, report.scale),
        undefined=[] if report.scale is None else text.describe_undefined(lead, report.scale),
        own=[] if report.scale is None else _list_own(report),
        groups=None if report.scale is None else tables.list_groups(lead, report.scale),
        glossary=text.list_glossary(report.methods, report.scale),
        clients_csv=tables.write_clients_csv(report),
        runs=tables.collect_facts(report.methods),
        events=[tables.format_event(e) for method in report.methods for e in method.events()],
        **load_script(),
    )


def _list_own(report: Report) -> list[str]:
    """Say what the clients of every method keep for themselves."""
    return [
        f"{method.name}: {sentence}" if report.several else sentence
        for method in report.methods
        for sentence in text.describe_own(method, report.shown)
    ]


def _describe_differences(report: Report) -> str:
    """Say what the limits of the differences allow for."""
    found = report.estimates[report.lead].get("worst") if report.estimates else None
    if report.scale is None or found is None or found.difference is None:
        return ""
    return text.describe_evidence(found.difference, report.scale).replace(" that agree", "")


def choose_palette(count: int, baseline: int, lead: int) -> list[int]:
    """Return a colour for each method: 0 (grey) for the baseline, 1 (accent) for the headline's.

    >>> choose_palette(4, baseline=0, lead=2)
    [0, 2, 1, 3]
    """
    first, rest = {baseline: 0, lead: 1}, iter(range(2, 8))
    return [first[m] if m in first else next(rest, 7) for m in range(min(count, 8))]


def slug(name: str) -> str:
    """Return a name that is safe in a path; long ones end in a number that tells them apart.

    >>> slug("<script>alert(1)</script>")
    'script-alert-1-script'
    >>> slug("a" * 50), slug("a" * 49 + "b")
    ('aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa-47d7ba7d', 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa-dedeebc7')
    """
    short = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower() or "client"
    if len(short) <= SLUG:
        return short
    return f"{short[: SLUG - 9]}-{zlib.crc32(name.encode()):08x}"


def write_participants(report: Report, folder: Path) -> None:
    """Write one page for every client of the headline's method, replacing the pages there.

    The names of the files begin with the client's number, so that no two are the same.
    """
    found = collect_series(report.methods[report.lead], report.shown)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    names = report.methods[0].clients
    for i, name in enumerate(names):
        path = folder / f"{i + 1:0{len(str(len(names)))}d}-{slug(name)}.html"
        path.write_text(render_participant(report, i, found), encoding="utf-8")


def render_participant(report: Report, i: int, found: Series) -> str:
    """Return the page of one client."""
    scale, method, rows = report.shown, report.methods[report.lead], report.rows[report.lead]
    client, found_of = method.clients[i], report.estimates[report.lead]
    keys = [key for key in SUMMARY if key in found_of and not report.single]
    figures = [] if not len(found.rounds) else [draw_course(client, found, i, scale)]
    return load_templates().get_template("participant.html").render(
        title=report.title,
        client=client,
        method=method.name,
        sentence=text.describe_participant(report, i),
        cards=text.list_participant_cards(report, i),
        summary=[{"label": LABELS[key], "value": report.write(key)} for key in keys],
        clients=plural(int(np.isfinite(rows.value).sum()), "client"),
        scale=scale,
        seeds=" · ".join([plural(len(method.runs), "seed"), *text.write_date([method])]),
        figures=figures,
        events=[tables.format_event(e) for e in method.events() if e.get("client") == client],
        data={"clients": [], "methods": []},
        palette=[0, 1],
        **load_script(),
    )  # fmt: skip


def frontier_svg(report: Report, colours: Sequence[int]) -> str:
    """Return the frontier of a sweep as an SVG file that needs no page around it."""
    figure = draw_frontier(report.names, report.estimates, report.shown, colours)
    return svg.standalone(figure.drawing)


def frontier_page(report: Report, colours: Sequence[int], table: str) -> str:
    """Return the page of a sweep: the frontier, the points, and what was run."""
    scale, seeds = report.shown, max(len(m.runs) for m in report.methods)
    marks = find_frontier(report.estimates, scale)
    measures = [m for m in report.measures if m.key in POINT]
    return load_templates().get_template("frontier.html").render(
        report=report,
        sentence=text.describe_frontier(report.names, marks, seeds),
        figure=draw_frontier(report.names, report.estimates, scale, colours),
        measures=measures,
        points=[
            {
                "name": name,
                "mark": mark,
                "cells": [tables.format_cell(found.get(m.key), m, scale, True) for m in measures],
            }
            for name, found, mark in zip(report.names, report.estimates, marks, strict=True)
        ],
        table=table,
        runs=tables.collect_facts(report.methods[:1]),
        palette=range(8),
        data={"clients": [], "methods": []},
        **load_script(),
    )  # fmt: skip
