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
from equifed.report.charts import colour, draw_figures, draw_frontier, find_frontier
from equifed.report.document import Report, build
from equifed.report.methods import TIMES, as_methods, capital, plural
from equifed.report.numbers import LABELS
from equifed.training.files import write_file
from equifed.training.history import History

TEMPLATES = Path(__file__).parent / "templates"
SLUG = 40
"""Characters of a name in a path."""
SUMMARY = ("average_by_client", "worst", "worst_20_percent", "best_20_percent", "spread")
"""What a participant hears of the others."""
POINT = (*SUMMARY, "gini")
"""What the page of a sweep shows of every setting."""
EVENTS = ("event", "method", "seed", "round", "client", "reason", "time")
NO_TABLE: dict[str, list[str]] = {"clients": [], "methods": []}
"""What a page without a table of clients tells its script."""


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
    lead, scale, parts = report.methods[report.lead], report.scale, {}
    if scale is not None:
        parts = {
            "comparison": tables.tabulate_comparison(report),
            "evidence": _describe_differences(report),
            "further": tables.summarise_further(lead, scale),
            "own": [
                f"{method.name}: {sentence}" if report.several else sentence
                for method in report.methods
                for sentence in text.describe_own(method, scale)
            ],
            "groups": tables.list_groups(lead, scale),
        }
    proved = [(method.name, method.history.describe_certificate()) for method in report.methods]
    events = [event for method in report.methods for event in method.events()]
    return load_templates().get_template("report.html").render(
        report=report,
        refresh=refresh,
        subtitle=text.write_subtitle(report),
        palette=choose_palette(len(report.methods), report.baseline, report.lead),
        headline=text.write_headline(report),
        figures=draw_figures(report),
        certificates=[f"{name}: {note}." for name, note in proved if note is not None],
        data=tables.pack_clients(report),
        heads=tables.list_heads(report),
        glossary=text.list_glossary(report),
        clients_csv=tables.write_clients_csv(report),
        runs=tables.collect_facts(report.methods),
        events=tables.list_events(events, EVENTS),
        **parts,
        **load_script(),
    )  # fmt: skip


def _describe_differences(report: Report) -> str:
    """Say what the limits of the differences allow for."""
    found = report.told[report.lead].estimates.get("worst")
    if found is None or found.difference is None:
        return ""
    return text.describe_evidence(found.difference, report.shown).replace(" that agree", "")


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
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    names = report.methods[0].clients
    for i, name in enumerate(names):
        path = folder / f"{i + 1:0{len(str(len(names)))}d}-{slug(name)}.html"
        path.write_text(render_participant(report, i), encoding="utf-8")


def render_participant(report: Report, i: int) -> str:
    """Return the page of one client."""
    scale, told = report.shown, report.told[report.lead]
    method, client = told.method, told.method.clients[i]
    keys = [key for key in SUMMARY if key in told.estimates and not report.single]
    known = [c for c in tables.list_columns(report, told) if c.key in tables.list_heads(report)]
    events = [event for event in method.events() if event.get("client") == client]
    return load_templates().get_template("participant.html").render(
        title=report.title,
        client=client,
        method=method.name,
        sentence=text.describe_participant(told, i),
        cards=[(c.label, c.texts[i], c.notes[i]) for c in known if c.key != "change"],
        own=text.describe_own(method, scale)[:1],
        summary=tables.make_table((), [(LABELS[key], report.write(key)) for key in keys]),
        clients=plural(int(np.isfinite(told.value).sum()), "client"),
        scale=scale,
        seeds=" · ".join([plural(len(method.runs), "seed"), *text.write_date([method])]),
        events=tables.list_events(events, ("event", "seed", "round", "reason", "time")),
        data=NO_TABLE,
        palette=[0, 1],
        **load_script(),
    )  # fmt: skip


def frontier_svg(report: Report, colours: Sequence[int]) -> str:
    """Return the frontier of a sweep as an SVG file that needs no page around it."""
    return svg.standalone(draw_frontier(report.told, colours).drawing)


def frontier_page(report: Report, colours: Sequence[int], table: str) -> str:
    """Return the page of a sweep: the frontier, the points, and what was run."""
    seeds, marks = max(len(m.runs) for m in report.methods), find_frontier(report.told)
    names = [method.name for method in report.methods]
    measures = [m for m in report.measures if m.key in POINT]
    rows = [
        [name, *(tables.format_cell(told, m, True) for m in measures), "●" if mark else "○"]
        for name, told, mark in zip(names, report.told, marks, strict=True)
    ]
    heads = ("Setting", *(m.label for m in measures), "Not dominated")
    return load_templates().get_template("frontier.html").render(
        report=report,
        sentence=text.describe_frontier(names, marks, seeds),
        figure=draw_frontier(report.told, colours),
        points=tables.make_table(heads, rows),
        table=table,
        runs=tables.collect_facts(report.methods[:1]),
        palette=range(8),
        data=NO_TABLE,
        **load_script(),
    )  # fmt: skip
