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
from equifed.contract.names import to_cell
from equifed.metrics import gini, lorenz_curve
from equifed.report import svg
from equifed.report.measures import Estimate
from equifed.report.methods import ClientRows, Method
from equifed.report.scales import Scale, plural

MOST_DOTS = 8000
"""Beyond this many dots in one figure, bars are drawn instead."""


@dataclass(frozen=True, eq=False)
class Figure:
    """A plot, what it shows in words, and the numbers behind it."""

    key: str
    title: str
    caption: str
    alt: str
    plot: svg.Plot
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    legend: Sequence[int] = ()

    @property
    def drawing(self) -> Markup:
        """The plot as SVG."""
        return self.plot.svg(self.alt)

    @property
    def table(self) -> str:
        """The numbers as CSV."""
        return csv_text(self.columns, self.rows)


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
    if isinstance(cell, str):
        return to_cell(cell)
    if isinstance(cell, float):
        return "" if math.isnan(cell) else f"{cell:.8g}"
    return cell


def colour(i: int) -> str:
    """Return the style class of a method: the baseline is grey, the others have colours."""
    return f"m{i % 8}"


def draw_distribution(
    methods: Sequence[Method], rows: Sequence[ClientRows], averages: Losses, scale: Scale
) -> Figure:
    """One row of dots per method, one dot per client."""
    many = len(methods[0].clients) > 40
    step, top = (46.0 if not many else 150.0 if len(methods) == 1 else 62.0), 10.0
    height = top + step * len(methods) + svg.BOTTOM
    values = [row.value * scale.factor for row in rows]
    write = "{:.0f}".format if scale.kind.is_fraction else "{:g}".format
    x = svg.Axis(*svg.limits(*values), 14.0, svg.WIDTH - svg.RIGHT, scale.axis, write)
    nothing = svg.Axis(0, 0, height - svg.BOTTOM, top, write=lambda v: "")
    plot = svg.Plot(x, nothing, height=height)
    dense = sum(np.isfinite(v).sum() for v in values) > MOST_DOTS
    for m, (method, value) in enumerate(zip(methods, values, strict=True)):
        base = top + step * m
        plot.text(x.start, base + 12, method.name, class_="name")
        middle, room = base + step / 2 + 7, step - 20
        if dense:
            _draw_bars(plot, value, middle, room, m)
        else:
            _draw_dots(plot, value, middle, room, m, rows[m].worst_position(scale))
        mean = float(averages[m]) * scale.factor
        if math.isfinite(mean):
            tip = f"{method.name}: average {scale.text(averages[m])}"
            ends = {"x1": x.at(mean), "x2": x.at(mean), "y1": base + 18, "y2": base + step - 4}
            plot.add(svg.tag("line", **ends, class_="mean", data_tip=tip))
    pairs = list(zip(methods, rows, strict=True))
    alt = f"Distribution of {scale.label} over {plural(len(methods[0].clients), 'client')}. "
    ranges = zip(methods, rows, averages, strict=True)
    alt += " ".join(_describe_range(*one, scale) for one in ranges)
    caption = "One dot per client; the bar marks the average, the ring the worst-served client."
    numbers = [
        [method.name, name, float(v)]
        for method, row in pairs
        for name, v in zip(method.clients, row.value, strict=True)
    ]
    columns = ["method", "client", scale.label]
    return Figure("distribution", "Every client", caption, alt, plot, columns, numbers)


def _draw_dots(
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


def _draw_bars(plot: svg.Plot, values: Losses, middle: float, room: float, m: int) -> None:
    known = values[np.isfinite(values)]
    counts, edges = np.histogram(known, bins=60, range=(plot.x.low, plot.x.high))
    for count, left, right in zip(counts, edges[:-1], edges[1:], strict=True):
        if count:
            tall = room * count / counts.max()
            width = plot.x.at(right) - plot.x.at(left) - 0.6
            tip = f"{plural(int(count), 'client')} between {left:.4g} and {right:.4g}"
            box = {"x": plot.x.at(left), "y": middle + room / 2 - tall, "width": width}
            mark = {"class_": f"bar {colour(m)}", "data_tip": tip}
            plot.add(svg.tag("rect", **box, height=tall, **mark))


def _describe_range(method: Method, rows: ClientRows, average: float, scale: Scale) -> str:
    i = rows.worst_position(scale)
    if i is None:
        return f"{method.name}: not evaluated."
    if len(method.clients) == 1:
        return f"{method.name}: {scale.text(float(rows.value[i]))}."
    best = float((np.nanmax if scale.higher_is_better else np.nanmin)(rows.value))
    return (
        f"{method.name}: worst {method.clients[i]} {scale.text(float(rows.value[i]))}, average "
        f"{scale.text(average)}, best {scale.text(best)}."
    )


def draw_lorenz(
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
    columns = ["method", "fraction_of_clients", f"share_of_{what}"]
    legend = range(len(methods))
    return Figure(key, f"Lorenz curves of {what}", caption, alt, plot, columns, rows, legend)


def find_non_dominated(average: Losses, worst: Losses, *, higher_is_better: bool) -> list[bool]:
    """Return which points no other point beats in one coordinate without losing in the other.

    >>> average, worst = np.array([0.9, 0.8, 0.7]), np.array([0.5, 0.6, 0.4])
    >>> find_non_dominated(average, worst, higher_is_better=True)
    [True, True, False]
    """
    sign = 1.0 if higher_is_better else -1.0
    points = sign * np.column_stack([average, worst])
    beaten = [
        bool(((points >= point).all(axis=1) & (points > point).any(axis=1)).any())
        for point in points
    ]
    return [not lost and bool(np.isfinite(p).all()) for lost, p in zip(beaten, points, strict=True)]


def find_frontier(found: Sequence[dict[str, Estimate]], scale: Scale) -> list[bool]:
    """Return which methods are not dominated in average and worst client."""
    return find_non_dominated(*list_levels(found), higher_is_better=scale.higher_is_better)


def draw_frontier(
    names: Sequence[str],
    found: Sequence[dict[str, Estimate]],
    scale: Scale,
    colours: Sequence[int] | None = None,
) -> Figure:
    """Average against worst client, with the seeds and the non-dominated methods marked."""
    colours = range(len(names)) if colours is None else colours
    levels = list_levels(found)
    average, worst = levels * scale.factor
    best = find_frontier(found, scale)
    seeds = [_seeds(e, scale) for e in found]
    xs, ys = [s[:, 0] for s in seeds], [s[:, 1] for s in seeds]
    plot = svg.frame(
        svg.limits(average, *xs, pad=0.12), svg.limits(worst, *ys, pad=0.12),
        x_label=f"average {scale.axis}", y_label=f"worst client's {scale.axis}",
    )  # fmt: skip
    front = sorted((a, w) for a, w, keep in zip(average, worst, best, strict=True) if keep)
    if len(front) > 1:
        plot.line([a for a, _ in front], [w for _, w in front], class_="line diagonal")
    rows, words = [], []
    for m, name in enumerate(names):
        if not (math.isfinite(average[m]) and math.isfinite(worst[m])):
            continue
        for x, y in seeds[m] if len(seeds[m]) > 1 else ():
            plot.dot(x, y, 1.8, class_=f"dot faint {colour(colours[m])}")
        values = [float(level[m]) for level in levels]
        said = f"{name}: average {scale.text(values[0])}, worst {scale.text(values[1])}"
        mark = "dot big" if best[m] else "dot big hollow"
        plot.dot(average[m], worst[m], 5.0, class_=f"{mark} {colour(colours[m])}", data_tip=said)
        rows.append([name, *values, int(best[m])])
        words.append(f"{said}{' (not dominated)' if best[m] else ''}.")
    _draw_names(plot, names, average, worst)
    alt = f"Average {scale.label} against the worst client's. {' '.join(words)}"
    caption = (
        f"Across: average {scale.label}. Up: worst client. Filled: no other is better in one "
        "without being worse in the other."
        + (" Small dots: seeds." if any(len(s) > 1 for s in seeds) else "")
    )
    columns = ["method", "average", "worst", "non_dominated"]
    return Figure("scatter", "Average against worst", caption, alt, plot, columns, rows)


def _draw_names(plot: svg.Plot, names: Sequence[str], xs: Losses, ys: Losses) -> None:
    """Name the points, moved up or down until no name lies on another."""
    taken: list[tuple[float, float, float]] = []
    for name, x, y in zip(names, plot.x(xs), plot.y(ys), strict=True):
        if not (math.isfinite(x) and math.isfinite(y)):
            continue
        short = name if len(name) <= 22 else name[:21] + "…"
        wide = 7.0 * len(short)
        left = x + wide + 10 > svg.WIDTH
        start = x - wide - 9 if left else x + 9
        level = y + 4
        offsets = [d for k in range(12) for d in (12 * k, -12 * k)]
        for offset in offsets:
            free = all(
                abs(level + offset - other) >= 11 or start > b or start + wide < a
                for a, b, other in taken
            )
            if free and svg.TOP <= level + offset <= plot.y.start - 2:
                level += offset
                break
        taken.append((start, start + wide, level))
        anchor = {"x": x - 9, "text_anchor": "end"} if left else {"x": x + 9}
        plot.add(svg.tag("text", short, **anchor, y=level, class_="name"))


def list_levels(found: Sequence[dict[str, Estimate]]) -> Losses:
    """Return the average and the worst client of every method, shape (2, methods)."""
    keys = ("average_by_client", "worst")
    means = [[e[k].interval.estimate if k in e else math.nan for e in found] for k in keys]
    return np.array(means)


def _seeds(found: dict[str, Estimate], scale: Scale) -> Losses:
    if "worst" not in found:
        return np.empty((0, 2))
    pairs = zip(found["average_by_client"].values, found["worst"].values, strict=True)
    return np.array(list(pairs)) * scale.factor
