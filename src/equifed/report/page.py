"""From a report to files: one page that needs nothing else, JSON, and a page per participant."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from equifed.report.document import Report, all_figures, as_json, build, headline
from equifed.report.figures import colour
from equifed.report.measures import written
from equifed.report.methods import Method, as_methods
from equifed.report.scales import TIMES, bytes_text, plural
from equifed.report.tables import (
    clients_csv,
    comparison_rows,
    event_row,
    measure_rows,
    run_facts,
    table_data,
)
from equifed.report.words import certificate_notes
from equifed.training.history import History

SLUG = 40
"""Characters of a name in a path."""


def write_report(
    runs: Report | History | Mapping[str, History | Sequence[History]],
    out: str | Path,
    *,
    per_client: bool = False,
) -> Path:
    """Write ``out`` (HTML), the same numbers beside it as JSON, and the participants' pages.

    Parameters
    ----------
    runs : History, mapping of name to histories, or Report
        One run, or methods with a run for each seed, or what was built of them already.
    out : path
        The page.
    per_client : bool
        Write a page for each participant, too.
    """
    report = runs if isinstance(runs, Report) else build(as_methods(runs))
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
    env.filters["bound"] = bound
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


def bound(sentence: str) -> str:
    """Keep numbers and their units on one line."""
    for unit in ("%", TIMES, "points"):
        sentence = sentence.replace(" " + unit, "\N{NO-BREAK SPACE}" + unit)
    return sentence


def render(report: Report) -> str:
    """Return the page."""
    page = environment().get_template("report.html")
    return page.render(
        report=report,
        subtitle=subtitle(report),
        palette=palette(len(report.methods), report.baseline, report.lead),
        headline=headline(report),
        cards=cards(report),
        comparison=comparison_rows(report),
        all_measures=measure_rows(report),
        figures=all_figures(report),
        certificate_notes=certificate_notes(report.methods),
        table=table_data(report),
        clients_csv=clients_csv(report),
        runs=run_facts(report.methods),
        events=[event_row(e) for method in report.methods for e in method.events()],
        **script(),
    )


def palette(count: int, baseline: int, lead: int) -> list[int]:
    """Return a colour for each method: 0 (grey) for the baseline, 1 (accent) for the headline's.

    >>> palette(4, baseline=0, lead=2)
    [0, 2, 1, 3]
    """
    first = {baseline: 0, lead: 1}
    rest = iter(range(2, 8))
    return [first[m] if m in first else next(rest, 7) for m in range(min(count, 8))]


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
        note = _whose(method, worst) if key == "worst" else ""
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


def _whose(method: Method, worst: int) -> str:
    """Say whose the worst value is: with several seeds not always the same client's."""
    several = f"worst in each seed, mean of {len(method.runs)}"
    return method.clients[worst] if len(method.runs) == 1 else several


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
