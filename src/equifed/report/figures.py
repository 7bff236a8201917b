"""The figures of a report, each with a text alternative and the numbers behind it."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from equifed.contract.arrays import Losses
from equifed.metrics import gini, lorenz_curve
from equifed.report import svg
from equifed.report.clients import ClientRows
from equifed.report.methods import Method
from equifed.report.scales import Scale

MOST_DOTS = 8000
"""Beyond this many dots in one figure, bars are drawn instead."""

COLOURS = ("#8a929d", "#0f5fae", "#c45a12", "#1e8a5a", "#8a4fb0", "#b8860b", "#c2336f", "#23808c")
STYLE = """
text{font:12px sans-serif;fill:#1b1f24}.tick,.label{fill:#5b6470;font-size:11.5px}
.name{font-weight:600}.grid{stroke:#e6e8eb}.axis{stroke:#5b6470}.faint{opacity:.35}
.line{fill:none;stroke-width:2}.big{stroke-width:2}.band{opacity:.14}
.diagonal{stroke:#5b6470;stroke-width:1;stroke-dasharray:2 4}
"""
"""The page's style in light, for drawings without a page."""


@dataclass(frozen=True)
class Figure:
    """A drawing, what it shows in words, and its numbers as CSV."""

    key: str
    title: str
    caption: str
    alt: str
    drawing: Markup
    table: str
    legend: tuple[int, ...] = ()


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    r"""Return CSV whose text no spreadsheet takes for a formula.

    >>> csv_text(["client", "accuracy"], [["=1+1", 0.5]])
    "client,accuracy\n'=1+1,0.5\n"
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([[_cell(cell) for cell in row] for row in rows])
    return out.getvalue()


def _cell(cell: object) -> object:
    if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return "'" + cell
    if isinstance(cell, float):
        return "" if math.isnan(cell) else f"{cell:.8g}"
    return cell


def colour(i: int) -> str:
    """Return the style class of a method: the baseline is grey, the others have colours."""
    return f"m{i % 8}"


def standalone(drawing: Markup) -> str:
    """Return a drawing as an SVG file that needs no page around it."""
    classes = "".join(  # no variables: not every viewer knows them
        f".line.m{i},.big.m{i}{{stroke:{value}}}.dot.m{i},.band.m{i}{{fill:{value}}}"
        for i, value in enumerate(COLOURS)
    )
    style = svg.tag("style", Markup(STYLE + classes + ".dot.hollow{fill:#fff}"))  # our own text
    paper = svg.tag("rect", width="100%", height="100%", fill="#fff")
    size = {"width": 2 * svg.WIDTH, "height": 2 * svg.HEIGHT}
    inside = style + paper + drawing
    return str(svg.tag("svg", inside, xmlns="http://www.w3.org/2000/svg", **size)) + "\n"


def _percent_axis(scale: Scale) -> str:
    return "{:.0f}" if scale.metric == "accuracy" else "{:g}"


def distribution(methods: Sequence[Method], rows: Sequence[ClientRows], scale: Scale) -> Figure:
    """One row of dots per method, one dot per client."""
    many = len(methods[0].clients) > 40
    step, top = (46.0 if not many else 150.0 if len(methods) == 1 else 62.0), 10.0
    height = top + step * len(methods) + svg.BOTTOM
    values = [row.value * scale.factor for row in rows]
    x = svg.Axis(
        *svg.limits(*values), 14.0, svg.WIDTH - svg.RIGHT, scale.axis,
        _percent_axis(scale).format,
    )  # fmt: skip
    nothing = svg.Axis(0, 0, height - svg.BOTTOM, top, write=lambda v: "")
    plot = svg.Plot(x, nothing, height=height)
    dense = sum(np.isfinite(v).sum() for v in values) > MOST_DOTS
    for m, (method, value) in enumerate(zip(methods, values, strict=True)):
        base = top + step * m
        plot.text(x.start, base + 12, method.name, class_="name")
        middle, room = base + step / 2 + 7, step - 20
        if dense:
            _bars(plot, value, middle, room, m)
        else:
            _dots(plot, value, middle, room, m, rows[m].worst_position(scale))
        mean = x.at(float(np.nanmean(value))) if np.isfinite(value).any() else math.nan
        if math.isfinite(mean):
            tip = f"{method.name}: average {scale.text(float(np.nanmean(value)) / scale.factor)}"
            ends = {"y1": base + 18, "y2": base + step - 4}
            plot.add(svg.tag("line", x1=mean, x2=mean, **ends, class_="mean", data_tip=tip))
    worst = [_worst_words(method, row, scale) for method, row in zip(methods, rows, strict=True)]
    table = csv_text(
        ["method", "client", scale.label],
        (
            [method.name, name, float(v)]
            for method, row in zip(methods, rows, strict=True)
            for name, v in zip(method.clients, row.value, strict=True)
        ),
    )
    words = f"Distribution of {scale.label} over {len(methods[0].clients)} clients. "
    return Figure(
        "distribution",
        "Every client",
        "One dot per client; the bar marks the average, the ring the worst-served client.",
        words + " ".join(worst),
        plot.svg(words + " ".join(worst)),
        table,
    )


def _dots(
    plot: svg.Plot, values: Losses, middle: float, room: float, m: int, worst: int | None
) -> None:
    known = np.flatnonzero(np.isfinite(values))
    order = known[np.argsort(values[known], kind="stable")]
    radius = 3.6 if len(order) <= 60 else 2.6 if len(order) <= 300 else 1.8
    gap = 2 * radius + 0.4
    fits = max(1, int(room / gap))
    counts = np.unique(np.floor(plot.x(values[order]) / gap), return_counts=True)[1]
    squeeze = min(1.0, fits / max(counts, default=1))
    places = svg.swarm([float(p) for p in plot.x(values[order])], gap, max(counts, default=1))
    for i, (place, level) in zip(order, places, strict=True):
        y = middle + level * gap * squeeze
        mark = {"class_": f"dot {colour(m)}", "data_m": m, "data_c": int(i)}
        plot.add(svg.tag("circle", cx=place, cy=y, r=radius, **mark))
        if i == worst:
            plot.add(svg.tag("circle", cx=place, cy=y, r=radius + 3, class_="ring"))


def _bars(plot: svg.Plot, values: Losses, middle: float, room: float, m: int) -> None:
    known = values[np.isfinite(values)]
    counts, edges = np.histogram(known, bins=60, range=(plot.x.low, plot.x.high))
    for count, left, right in zip(counts, edges[:-1], edges[1:], strict=True):
        if count:
            tall = room * count / counts.max()
            width = plot.x.at(right) - plot.x.at(left) - 0.6
            tip = f"{count} clients between {left:.4g} and {right:.4g}"
            box = {"x": plot.x.at(left), "y": middle + room / 2 - tall, "width": width}
            mark = {"class_": f"bar {colour(m)}", "data_tip": tip}
            plot.add(svg.tag("rect", **box, height=tall, **mark))


def _worst_words(method: Method, rows: ClientRows, scale: Scale) -> str:
    i = rows.worst_position(scale)
    if i is None:
        return f"{method.name}: not evaluated."
    average, best = float(np.nanmean(rows.value)), _best(rows.value, scale)
    return (
        f"{method.name}: worst {method.clients[i]} {scale.text(float(rows.value[i]))}, average "
        f"{scale.text(average)}, best {scale.text(best)}."
    )


def _best(values: Losses, scale: Scale) -> float:
    return float((np.nanmax if scale.higher_is_better else np.nanmin)(values))


def lorenz(
    methods: Sequence[Method], values: Sequence[Losses], what: str, key: str
) -> Figure | None:
    """Lorenz curves of what the clients have: accuracies, or losses."""
    known = [v[np.isfinite(v)] for v in values]
    if any(v.size == 0 or (v < 0).any() for v in known):
        return None
    corners = [lorenz_curve(value) for value in known]
    low, high = svg.limits(*(x - y for x, y in corners), [0.0, 0.01], floor=0.0)
    plot = svg.frame(
        (0, 1), (low, high), x_label=f"fraction of clients, from the smallest {what}",
        write_x="{:.1f}".format,
    )  # fmt: skip
    lines, rows = [], []
    for m, (method, value) in enumerate(zip(methods, known, strict=True)):
        x, y = corners[m]
        shown = svg.thinned(len(x))
        g = float(gini(value))
        tip = f"{method.name}: Gini {g:.3f}"
        plot.line(x[shown], (x - y)[shown], class_=f"line {colour(m)}", data_tip=tip)
        lines.append(f"{method.name}: Gini coefficient {g:.3f}.")
        rows += [[method.name, float(a), float(b)] for a, b in zip(x[shown], y[shown], strict=True)]
        order = np.argsort(values[m], kind="stable")[: len(value)]
        if len(methods) == 1 and len(value) <= 200:
            for k, i in enumerate(order, start=1):
                plot.dot(x[k], x[k] - y[k], 2.4, class_=f"dot {colour(m)}", data_m=m, data_c=int(i))
    alt = (
        f"Lorenz curves: how much less than their equal share of all {what} the clients with the "
        f"smallest values have together. {' '.join(lines)}"
    )
    caption = (
        f"How far the curve lies below the diagonal of equality: what the clients with the least "
        f"{what} lack of an equal share. 0 is equality; twice the area is the Gini coefficient."
    )
    table = csv_text(["method", "fraction_of_clients", f"share_of_{what}"], rows)
    legend = tuple(range(len(methods)))
    return Figure(key, f"Lorenz curves of {what}", caption, alt, plot.svg(alt), table, legend)
