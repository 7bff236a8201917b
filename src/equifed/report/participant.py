"""A page for one participant: its own numbers, and of the others nothing but the summary."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from equifed.contract.arrays import Losses
from equifed.report import svg
from equifed.report.curves import Series, series
from equifed.report.document import Report
from equifed.report.figures import Figure, csv_text
from equifed.report.measures import LABELS, over_clients, written
from equifed.report.methods import ReportError
from equifed.report.page import environment, script, slug
from equifed.report.scales import Scale, plural
from equifed.report.tables import event_row

SUMMARY = ("average_by_client", "worst", "worst_20_percent", "best_20_percent", "spread")


def write_participants(report: Report, folder: Path) -> list[Path]:
    """Write one page for every client of the headline's method, replacing the pages there.

    The names of the files begin with the client's number, so that no two are the same.
    """
    if report.scale is None:
        raise ReportError("No evaluation was recorded: there is nothing to tell participants.")
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    found = series(report.methods[report.lead], report.scale)
    digits = len(str(len(report.methods[0].clients)))
    paths = []
    for i, name in enumerate(report.methods[0].clients):
        path = folder / f"{i + 1:0{digits}d}-{slug(name)}.html"
        path.write_text(render_participant(report, i, found), encoding="utf-8")
        paths.append(path)
    return paths


def render_participant(report: Report, i: int, found: Series) -> str:
    """Return the page of one client."""
    assert report.scale is not None
    scale, m = report.scale, report.lead
    method, rows = report.methods[m], report.rows[m]
    figures = [] if not len(found.rounds) else [_course(method.clients[i], found, i, scale)]
    return environment().get_template("participant.html").render(
        title=report.title,
        client=method.clients[i],
        method=method.name,
        sentence=_sentence(report, i),
        cards=_cards(report, i),
        summary=_summary(report),
        clients=plural(int(np.isfinite(rows.value).sum()), "client"),
        scale=scale,
        seeds=plural(len(method.runs), "seed"),
        figures=figures,
        events=[event_row(e) for e in method.events() if e.get("client") == method.clients[i]],
        data={"clients": [], "methods": []},
        palette=[0, 1],
        **script(),
    )  # fmt: skip


def _sentence(report: Report, i: int) -> str:
    assert report.scale is not None
    scale, rows = report.scale, report.rows[report.lead]
    value, average = float(rows.value[i]), float(np.nanmean(rows.value))
    if not np.isfinite(value):
        return f"There is no {scale.label} of yours: you have no samples in that split."
    limits = ""
    if np.isfinite(rows.lower[i]):
        limits = f" (95 % interval {scale.span(rows.lower[i], rows.upper[i])})"
    better = (value > average) == scale.higher_is_better
    side = "better" if better else "worse"
    distance = f"{scale.gap(abs(value - average))} {side} than" if value != average else "equal to"
    return (
        f"The model has a {scale.label} of {scale.text(value)} on your "
        f"{plural(int(rows.sizes[i]), 'sample')}{limits}. That is {distance} the average over "
        f"clients, {scale.text(average)}."
    )


def _cards(report: Report, i: int) -> list[dict[str, str]]:
    assert report.scale is not None
    rows, scale = report.rows[report.lead], report.scale
    shown: list[tuple[str, Any]] = [
        (scale.label.capitalize(), scale.text(float(rows.value[i]))),
        ("Loss", Scale("loss", "").text(float(rows.loss[i]))),
        ("Your samples", f"{int(rows.sizes[i]):,}"),
        ("Your weight", f"{rows.weight[i]:.4f}" if np.isfinite(rows.weight[i]) else "–"),
        ("Rounds you took part in", f"{100 * rows.participation[i]:.0f} %"),
        ("Rounds your answer was refused", f"{int(rows.quarantines[i])}"),
    ]
    return [{"label": label, "value": value, "note": "", "change": ""} for label, value in shown]


def _summary(report: Report) -> list[dict[str, str]]:
    assert report.scale is not None
    found = report.estimates[report.lead]
    by_key = {measure.key: measure for measure in report.measures}
    return [
        {
            "label": LABELS[key],
            "value": written(by_key[key], report.scale)(found[key].interval.estimate),
        }
        for key in SUMMARY
        if key in found
    ]


def _course(client: str, found: Series, i: int, scale: Scale) -> Figure:
    """Return the client's own line beside the average over clients."""
    values: Losses = found.values.mean(axis=0) * scale.factor
    own, average = values[:, i], over_clients(values, scale, "average")
    x = found.rounds.astype(np.float64)
    plot = svg.frame(
        (0, float(x[-1]) or 1.0), svg.limits(own, average), x_label="rounds",
        write_x="{:,.0f}".format,
    )  # fmt: skip
    plot.line(x, average, class_="line grey", data_tip="average over clients")
    plot.line(x, own, class_="line accent", data_tip=client)
    alt = f"{scale.label.capitalize()} of {client} and the average over clients against rounds."
    rows = [
        [int(r), float(o) / scale.factor, float(a) / scale.factor]
        for r, o, a in zip(found.rounds, own, average, strict=True)
    ]
    caption = f"{scale.axis.capitalize()}. Coloured: you. Grey: average over clients."
    table = csv_text(["round", "you", "average_over_clients"], rows)
    return Figure("course", "On the way there", caption, alt, plot.svg(alt), table)
