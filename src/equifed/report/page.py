"""What is written: a page that needs nothing else, JSON, participants' pages, the model card."""

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
from typing import Any
from urllib.parse import quote

import jinja2
import numpy as np
from markupsafe import Markup

from equifed.contract.arrays import show_text
from equifed.metrics import find_metric
from equifed.report import decisions, svg, tables, text
from equifed.report.charts import colour, draw_figures, draw_frontier
from equifed.report.document import Report, build, describe_own_part
from equifed.report.methods import TIMES, as_methods, capital, find_note, join_names, plural
from equifed.report.numbers import LABELS
from equifed.report.text import describe_budget, describe_privacy, read_budget
from equifed.training.files import write_file
from equifed.training.history import History

TEMPLATES = Path(__file__).parent / "templates"
SLUG = 40
"""Characters of a name in a path."""
SUMMARY = ("average_by_client", "worst", "worst_20_percent", "best_20_percent", "spread")
"""What a participant hears of the others."""
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

    Examples
    --------
    >>> import equifed as ef
    >>> import tempfile
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> history = ef.train(ef.FedAvg(), clients, rounds=5, evaluate=["test"])
    >>> page = ef.write_report(history, tempfile.mkdtemp() + "/report.html")
    >>> "shirt" in page.read_text(), page.with_suffix(".json").exists()
    (True, True)
    """
    report = runs if isinstance(runs, Report) else build(as_methods(runs))
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    # In one step: a browser may load it at any moment.
    write_file(path, render(report, refresh).encode())
    numbers = json.dumps(tables.as_json(report), allow_nan=False, default=str)
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
    """Return a link that holds a CSV file."""
    return "data:text/csv;charset=utf-8," + quote(table, safe=",.-_~:;/()=")


def bind_units(sentence: str) -> str:
    """Keep numbers and their units on one line."""
    for unit in ("%", TIMES, "points"):
        sentence = sentence.replace(" " + unit, "\N{NO-BREAK SPACE}" + unit)
    return sentence


def render(report: Report, refresh: float | None = None) -> str:
    """Return the page; ``refresh`` is after how many seconds it loads itself again."""
    lead, scale, parts = report.methods[report.lead], report.scale, {}
    # of a fit's candidates one counts, and what is run says which parameters are own
    shown, first = (report.methods, 0) if report.chosen is None else ([lead], 1)
    if scale is not None:
        parts = {
            "candidates": tables.tabulate_candidates(report),
            "further": tables.summarise_further(lead, scale),
            "decisions": tables.make_table(decisions.HEADS, decisions.list_decisions(lead, scale)),
            "own": [
                f"{method.name}: {sentence}" if len(shown) > 1 else sentence
                for method in shown
                for sentence in text.describe_own(method, scale)[first:]
            ],
            "groups": tables.list_groups(lead, scale),
        }
    headline = text.write_headline(report)
    proved = [(method.name, method.history.describe_certificate()) for method in shown]
    events = [event for method in report.methods for event in method.events()]
    return load_templates().get_template("report.html").render(
        report=report,
        refresh=refresh,
        subtitle=text.write_subtitle(report),
        palette=choose_palette(len(report.methods), report.baseline, report.lead),
        headline=headline,
        evidence=text.list_evidence(report, headline),
        figures=draw_figures(report),
        certificates=[f"{name}: {note}." for name, note in proved if note is not None],
        data=tables.pack_clients(report),
        glossary=text.list_glossary(report),
        clients_csv=tables.write_clients_csv(report),
        privacy=describe_privacy(report.methods),
        runs=tables.collect_facts(report, report.methods),
        events=tables.list_events(events, EVENTS),
        **parts,
        **load_script(),
    )  # fmt: skip


def choose_palette(count: int, baseline: int, lead: int) -> list[int]:
    """Return a colour for each method: 0 (grey) for the baseline, 1 (accent) for the headline's."""
    first, rest = {baseline: 0, lead: 1}, iter(range(2, 8))
    return [first[m] if m in first else next(rest, 7) for m in range(min(count, 8))]


def slug(name: str) -> str:
    """Return a name that is safe in a path; long ones end in a number that tells them apart."""
    short = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower() or "client"
    if len(short) <= SLUG:
        return short
    return f"{short[: SLUG - 9]}-{zlib.crc32(name.encode()):08x}"


def write_participants(report: Report, folder: Path) -> None:
    """Write a page for every client, replacing those there; numbers tell the files apart."""
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
    known = [c for c in report.columns[report.lead] if c.key != "change"]
    events = [event for event in method.events() if event.get("client") == client]
    return load_templates().get_template("participant.html").render(
        title=report.title,
        client=client,
        method=method.name,
        sentence=text.describe_participant(told, i),
        cards=[(c.label, c.texts[i], c.notes[i]) for c in known],
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
    """Return average against worst client as an SVG file that needs no page around it."""
    return svg.standalone(draw_frontier(report.told, colours).drawing)


# -- the model card -------------------------------------------------------------------------------


def write_card(
    history: History,
    config: Mapping[str, Any],
    told: Mapping[str, Any],
    predictor: Mapping[str, Any],
    preparation: str | None,
    left_out: Sequence[tuple[str, str]] = (),
) -> str:
    """Return the model card of a complete run in Markdown; ``told`` is its ``run.json``."""
    data, model, names = told["data"], config["model"], predictor["classes"]
    what = "a value" if names is None else f"one of the classes {plain(join_names(names, 12))}"
    task = (
        f"Predicts {what} from {plural(int(np.prod(predictor['input_shape'])), 'feature')} with "
        f"the model {code(model['name'])} (loss {code(model['loss'])}, l2 {model['l2']:g}), "
        f"trained on the data of {plural(len(predictor['clients']), 'client')} "
        f"({plain(data['name'])})."
    )
    parts = {
        "# Model card": [task],
        "## Data": _describe_data(data, predictor, preparation, left_out),
        "## Training": _describe_training(history, config, told["versions"]),
        "## Clients": _tabulate(history),
        "## Limits": _list_limits(history),
    }
    return "\n\n".join("\n".join([head, "", *lines]) for head, lines in parts.items()) + "\n"


def _describe_data(
    data: Mapping[str, Any],
    predictor: Mapping[str, Any],
    preparation: str | None,
    left_out: Sequence[tuple[str, str]],
) -> list[str]:
    known = () if preparation is None else ("preparation",)  # it is told below
    source = {k: v for k, v in data.get("source", {}).items() if v and k not in known}
    digest = code(data["sha256"]) if "sha256" in data else "left out, for privacy"
    lines = [f"- Name: {plain(data['name'])}; SHA-256 {digest}."]
    lines += [f"- {plain(key.capitalize())}: {plain(value)}" for key, value in source.items()]
    if preparation is None:
        return [*lines, "- No preparation is part of the model: samples come as the data had them."]
    lines.append(f"- Preparation, part of the model: {plain(preparation)}.")
    lines += [f"- Column {code(name)} was left out: {plain(why)}." for name, why in left_out]
    return [*lines, f"- Features: {plain(join_names(predictor['feature_names'], 40))}."]


def _describe_training(
    history: History, config: Mapping[str, Any], versions: Mapping[str, Any]
) -> list[str]:
    algorithm = dict(config["algorithm"])
    objective = algorithm.pop("objective", None)
    chosen = "the average of the clients" if objective is None else _settings(objective)
    given = history.given_out
    which = "" if given is None else f"; final model: round {given.round} ({given.kind})"
    lines = [
        f"Objective: {chosen}",
        f"Algorithm: {_settings(algorithm)}",
        f"{plural(history.summary()['rounds'], 'round')} from seed {config['seed']}{which}",
        f"Certificate: {history.describe_certificate() or 'no certificate was computed'}",
        plain(capital(find_note(history))),
        plain(capital(describe_own_part(history))),
        "Versions: " + plain(", ".join(f"{n} {number}" for n, number in versions.items())),
    ]
    return [f"- {line}." for line in lines if line]


def _tabulate(history: History) -> list[str]:
    """Return one line per client: its weight and every metric on every split."""
    shown = list(dict.fromkeys((r.split, r.metric) for r in history.metrics))
    columns = {plain(f"{split} {metric}"): history.last(metric, split) for split, metric in shown}
    for told, name in ((history.without_own, "without own part"), (history.alone, "alone")):
        if told is not None:
            columns[plain(f"{told.split} {told.metric} {name}")] = told
    weights = history.weights[max(history.weights)] if history.weights else None
    head = ["client", *columns, *(["weight"] if weights is not None else [])]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for i, name in enumerate(history.names):
        cells = [
            "" if r is None or np.isnan(r.values[i]) else f"{r.values[i]:.4g} (n={r.sizes[i]})"
            for r in columns.values()
        ]
        cells += [f"{weights[i]:.4g}"] if weights is not None else []
        lines.append([plain(name), *cells])
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _list_limits(history: History) -> list[str]:
    lines, chosen = [], history.main_metric()
    if chosen is not None:
        metric, split = chosen
        clients = history.per_client(metric, split)
        if clients:
            sign = find_metric(metric).sign
            worst, best = (f(clients, key=lambda name: sign * clients[name]) for f in (min, max))
            what = plain(f"{split} {metric}")
            lines.append(
                f"- Served worst by {what}: {plain(worst)} ({clients[worst]:.4g}); best: "
                f"{plain(best)} ({clients[best]:.4g})."
            )
        unmeasured = [name for name in history.names if name not in clients]
        if unmeasured:
            unknown = plain(join_names(unmeasured, 12))
            lines.append(f"- Without {plain(split)} samples, so not measured: {unknown}.")
        if split == "train":
            lines.append("- Measured on training samples alone: expect worse on new ones.")
    lines += [f"- {plain(sentence)}" for sentence in history.summary()["warnings"]]
    budget = read_budget(history)
    if budget is not None:
        lines.append(f"- Differential privacy: {describe_budget(budget)}")
    lines.append(
        "- Nothing is known about clients that took no part, about rows unlike those of training, "
        "and about groups inside clients. `equifed evaluate` measures new labelled rows."
    )
    return lines


def _settings(table: Any) -> str:
    """Return a table of settings in one line."""
    if not isinstance(table, Mapping):
        return code(table)
    rest = ", ".join(f"{key} = {value}" for key, value in table.items() if key != "name")
    return code(table.get("name", "")) + (f" ({plain(rest)})" if rest else "")


MARKS = re.compile(r"[\\`*\[\]<>|~]|&(?=#?\w+;)|(?<![^\W_])_|_(?![^\W_])")
"""What means something to Markdown; an underscore inside a word does not."""


def plain(text: object) -> str:
    """Return a text of somebody else's that Markdown shows as it is, in one line."""
    return MARKS.sub(r"\\\g<0>", show_text(str(text)))


def code(text: object) -> str:
    """Return a text of somebody else's as code, in one line."""
    return "`" + show_text(str(text)).replace("`", "'") + "`"
