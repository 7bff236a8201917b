"""The frontier of a sweep as a page and as a drawing of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from equifed.report.document import Report
from equifed.report.figures import standalone
from equifed.report.frontier import on_frontier, scatter
from equifed.report.page import environment, script, subtitle
from equifed.report.scales import plural
from equifed.report.tables import cell, run_facts

SHOWN = ("average_by_client", "worst", "worst_20_percent", "best_20_percent", "spread", "gini")


def frontier_svg(report: Report, colours: Sequence[int]) -> str:
    """Return the figure as an SVG file that needs no page around it."""
    assert report.scale is not None
    names = [method.name for method in report.methods]
    return standalone(scatter(names, report.estimates, report.scale, colours).drawing)


def frontier_page(report: Report, colours: Sequence[int], table: str) -> str:
    """Return the page: the frontier, the points, and what was run."""
    assert report.scale is not None
    names = [method.name for method in report.methods]
    marks = on_frontier(report.estimates, report.scale)
    return environment().get_template("frontier.html").render(
        report=report,
        subtitle=subtitle(report),
        sentence=_sentence(names, marks, max(len(m.runs) for m in report.methods)),
        figure=scatter(names, report.estimates, report.scale, colours),
        measures=[m for m in report.measures if m.key in SHOWN],
        points=_points(report, marks),
        table=table,
        runs=run_facts(report.methods[:1]),
        palette=range(8),
        data={"clients": [], "methods": []},
        **script(),
    )  # fmt: skip


def _sentence(names: Sequence[str], marks: Sequence[bool], seeds: int) -> str:
    kept = [name for name, mark in zip(names, marks, strict=True) if mark]
    words = "; ".join(kept[:6]) + ("; …" if len(kept) > 6 else "")
    return (
        f"Of {plural(len(names), 'setting')}, {len(kept)} {'is' if len(kept) == 1 else 'are'} not "
        f"dominated, which means that no other serves both the average and the worst client "
        f"better: {words}. Measured with {plural(seeds, 'seed')}; settings whose points lie within "
        f"chance of each other are not told apart."
    )


def _points(report: Report, marks: Sequence[bool]) -> list[dict[str, Any]]:
    assert report.scale is not None
    shown = [m for m in report.measures if m.key in SHOWN]
    return [
        {
            "name": method.name,
            "mark": mark,
            "cells": [cell(found.get(m.key), m, report.scale, baseline=True) for m in shown],
        }
        for method, found, mark in zip(report.methods, report.estimates, marks, strict=True)
    ]
