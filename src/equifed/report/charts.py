"""Figures of clients and methods, each with a text alternative and the numbers behind it."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from equifed.contract.arrays import Losses, to_cell
from equifed.contract.evaluation import BINS, Calibration
from equifed.metrics import gini, lorenz_curve
from equifed.report import svg
from equifed.report.document import read_own
from equifed.report.methods import Method, Scale, capital, plural
from equifed.report.numbers import ClientRows, Measured

MOST_DOTS = 8000
"""Beyond this many dots in one figure, bars are drawn instead."""
FEW_CLIENTS = 12
"""Up to this many clients have lines of their own."""
FEW_SAMPLES = 20
"""Clients with fewer samples have no calibration curve: it would be noise."""
MOST_OWN = 60
"""Own numbers that have a place of their own in the figure."""


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
    write = ("{:.0f}" if scale.kind.is_fraction else "{:g}").format
    x = svg.Axis(*svg.limits(*values), 14.0, svg.WIDTH - svg.RIGHT, scale.axis, write)
    nothing = svg.Axis(0, 0, height - svg.BOTTOM, top, write=lambda v: "")
    plot = svg.Plot(x, nothing, height=height)
    dense = sum(np.isfinite(v).sum() for v in values) > MOST_DOTS
    words, numbers = [], []
    for m, (method, row, average) in enumerate(zip(methods, rows, averages, strict=True)):
        base = top + step * m
        plot.text(x.start, base + 12, method.name, class_="name")
        middle, room = base + step / 2 + 7, step - 20
        if dense:
            _draw_bars(plot, values[m], middle, room, m)
        else:
            _draw_dots(plot, values[m], middle, room, m, row.worst_position(scale))
        if math.isfinite(average):
            place = x.at(float(average) * scale.factor)
            tip = f"{method.name}: average {scale.text(average)}"
            ends = {"x1": place, "x2": place, "y1": base + 18, "y2": base + step - 4}
            plot.add(svg.tag("line", **ends, class_="mean", data_tip=tip))
        words.append(_describe_range(method, row, average, scale))
        pairs = zip(method.clients, row.value, strict=True)
        numbers += [[method.name, name, float(v)] for name, v in pairs]
    over = f"Distribution of {scale.label} over {plural(len(methods[0].clients), 'client')}."
    return Figure(
        key="distribution",
        title="Every client",
        caption="One dot per client; the bar marks the average, the ring the worst-served client.",
        alt=" ".join([over, *words]),
        plot=plot,
        columns=["method", "client", scale.label],
        rows=numbers,
    )


def _draw_dots(
    plot: svg.Plot, values: Losses, middle: float, room: float, m: int, worst: int | None
) -> None:
    known = np.flatnonzero(np.isfinite(values))
    order = known[np.argsort(values[known], kind="stable")]
    radius = 3.6 if len(order) <= 60 else 2.6 if len(order) <= 300 else 1.8
    gap, xs = 2 * radius + 0.4, plot.x(values[order])
    most = max(np.unique(np.floor(xs / gap), return_counts=True)[1], default=1)
    squeeze = min(1.0, max(1, int(room / gap)) / most)
    for i, (place, level) in zip(order, svg.swarm(xs.tolist(), gap, most), strict=True):
        y = middle + level * gap * squeeze
        plot.circle(place, y, radius, class_=f"dot {colour(m)}", data_m=m, data_c=int(i))
        if i == worst:
            plot.circle(place, y, radius + 3, class_="ring")


def _draw_bars(plot: svg.Plot, values: Losses, middle: float, room: float, m: int) -> None:
    known = values[np.isfinite(values)]
    counts, edges = np.histogram(known, bins=60, range=(plot.x.low, plot.x.high))
    for k in np.flatnonzero(counts):
        left, right, tall = edges[k], edges[k + 1], room * counts[k] / counts.max()
        start = plot.x.at(left)
        box = {"x": start, "y": middle + room / 2 - tall, "width": plot.x.at(right) - start - 0.6}
        tip = f"{plural(int(counts[k]), 'client')} between {left:.4g} and {right:.4g}"
        mark = {"height": tall, "class_": f"bar {colour(m)}", "data_tip": tip}
        plot.add(svg.tag("rect", **box, **mark))


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
    up = svg.limits(*(x - y for x, y in corners), [0.0, 0.01], floor=0.0)
    smallest = f"fraction of clients, from the smallest {what}"
    plot = svg.frame((0, 1), up, x_label=smallest, write_x="{:.1f}".format)
    words, rows = [], []
    for m, (method, value, (x, y)) in enumerate(zip(methods, known, corners, strict=True)):
        g, shown = float(gini(value)), svg.thinned(len(x))
        tip = f"{method.name}: Gini {g:.3f}"
        plot.line(x[shown], (x - y)[shown], class_=f"line {colour(m)}", data_tip=tip)
        words.append(f"{method.name}: Gini coefficient {g:.3f}.")
        rows += [[method.name, float(x[k]), float(y[k])] for k in shown]
        if len(methods) == 1 and len(value) <= 200:
            order = np.argsort(values[m], kind="stable")[: len(value)]
            for k, i in enumerate(order, start=1):
                plot.dot(x[k], x[k] - y[k], 2.4, class_=f"dot {colour(m)}", data_m=m, data_c=int(i))
    return Figure(
        key=key,
        title=f"Lorenz curves of {what}",
        caption="How far the curve lies below the diagonal of equality: what the clients with the "
        f"least {what} lack of an equal share. 0 is equality; twice the area is the Gini "
        "coefficient.",
        alt=f"Lorenz curves: how much less than their equal share of all {what} the clients with "
        f"the smallest values have together. {' '.join(words)}",
        plot=plot,
        columns=["method", "fraction_of_clients", f"share_of_{what}"],
        rows=rows,
        legend=range(len(methods)),
    )


def find_non_dominated(average: Losses, worst: Losses, *, higher_is_better: bool) -> list[bool]:
    """Return which points no other point beats in one coordinate without losing in the other.

    >>> average, worst = np.array([0.9, 0.8, 0.7]), np.array([0.5, 0.6, 0.4])
    >>> find_non_dominated(average, worst, higher_is_better=True)
    [True, True, False]
    """
    points = (1.0 if higher_is_better else -1.0) * np.column_stack([average, worst])
    return [
        bool(np.isfinite(p).all() and not ((points >= p).all(1) & (points > p).any(1)).any())
        for p in points
    ]


def find_frontier(found: Sequence[dict[str, Measured]], scale: Scale) -> list[bool]:
    """Return which methods are not dominated in average and worst client."""
    return find_non_dominated(*list_levels(found), higher_is_better=scale.higher_is_better)


def draw_frontier(
    names: Sequence[str],
    found: Sequence[dict[str, Measured]],
    scale: Scale,
    colours: Sequence[int] | None = None,
) -> Figure:
    """Average against worst client, with the seeds and the non-dominated methods marked."""
    levels, best = list_levels(found), find_frontier(found, scale)
    average, worst = levels * scale.factor
    seeds = [_list_seeds(e) * scale.factor for e in found]
    pairs = [(level, *(s[:, k] for s in seeds)) for k, level in enumerate((average, worst))]
    across, up = (svg.limits(*pair, pad=0.12) for pair in pairs)
    worse = f"worst client's {scale.axis}"
    plot = svg.frame(across, up, x_label=f"average {scale.axis}", y_label=worse)
    front = sorted((a, w) for a, w, keep in zip(average, worst, best, strict=True) if keep)
    if len(front) > 1:
        plot.line(*zip(*front, strict=True), class_="line diagonal")
    rows, words = [], []
    for m in np.flatnonzero(np.isfinite(levels).all(axis=0)).tolist():
        style = colour(m if colours is None else colours[m])
        for x, y in seeds[m] if len(seeds[m]) > 1 else ():
            plot.dot(x, y, 1.8, class_=f"dot faint {style}")
        a, w = map(float, levels[:, m])
        said = f"{names[m]}: average {scale.text(a)}, worst {scale.text(w)}"
        mark = "dot big" if best[m] else "dot big hollow"
        plot.dot(average[m], worst[m], 5.0, class_=f"{mark} {style}", data_tip=said)
        rows.append([names[m], a, w, int(best[m])])
        words.append(f"{said}{' (not dominated)' if best[m] else ''}.")
    _draw_names(plot, names, average, worst)
    dots = " Small dots: seeds." if any(len(s) > 1 for s in seeds) else ""
    return Figure(
        key="scatter",
        title="Average against worst",
        caption=f"Across: average {scale.label}. Up: worst client. Filled: no other is better in "
        f"one without being worse in the other.{dots}",
        alt=f"Average {scale.label} against the worst client's. {' '.join(words)}",
        plot=plot,
        columns=["method", "average", "worst", "non_dominated"],
        rows=rows,
    )


def _draw_names(plot: svg.Plot, names: Sequence[str], xs: Losses, ys: Losses) -> None:
    """Name the points, moved up or down until no name lies on another."""
    taken: list[tuple[float, float, float]] = []
    offsets = [d for k in range(12) for d in (12 * k, -12 * k)]
    for name, x, y in zip(names, plot.x(xs), plot.y(ys), strict=True):
        if not (math.isfinite(x) and math.isfinite(y)):
            continue
        short = svg.shorten(name, 22)
        wide = 7.0 * len(short)
        left = x + wide + 10 > svg.WIDTH
        start = x - wide - 9 if left else x + 9
        near = [other for a, b, other in taken if start <= b and start + wide >= a]
        places = [y + 4 + d for d in offsets if svg.TOP <= y + 4 + d <= plot.y.start - 2]
        free = (p for p in places if all(abs(p - other) >= 11 for other in near))
        level = next(free, y + 4)
        taken.append((start, start + wide, level))
        anchor = {"x": x - 9, "text_anchor": "end"} if left else {"x": x + 9}
        plot.add(svg.tag("text", short, **anchor, y=level, class_="name"))


def list_levels(found: Sequence[dict[str, Measured]]) -> Losses:
    """Return the average and the worst client of every method, shape (2, methods)."""
    keys = ("average_by_client", "worst")
    return np.array([[e[k].interval.estimate if k in e else math.nan for e in found] for k in keys])


def _list_seeds(found: dict[str, Measured]) -> Losses:
    """Return the average and the worst client in every seed, shape (seeds, 2)."""
    if "worst" not in found:
        return np.empty((0, 2))
    return np.array([found[key].values for key in ("average_by_client", "worst")]).T


def draw_calibration(method: Method, scale: Scale) -> Figure | None:
    """Return how often answers are right against how sure the model was; None if not known."""
    details = method.details(scale)
    pooled = None if details is None else details.pool_calibration()
    if details is None or pooled is None or not sum(pooled.count):
        return None
    label, write = "probability that the model gave its answer", "{:.1f}".format
    plot = svg.frame((0, 1), (0, 1), x_label=label, write_x=write, write_y=write)
    plot.line([0, 1], [0, 1], class_="line diagonal", data_tip="perfectly calibrated")
    clients = zip(method.clients, details.clients, strict=True)
    known = [(name, c.calibration) for name, c in clients if c is not None and c.calibration]
    few, bins = len(known) <= FEW_CLIENTS, _list_bins(pooled)
    rows: list[list[object]] = [["all clients", *row] for row in bins]
    for name, one in known if few else []:
        own = _list_bins(one)
        rows += [[name, *row] for row in own]
        if sum(one.count) >= FEW_SAMPLES:
            tip = f"{name}: calibration error {one.error():.3f}"
            plot.line(*list(zip(*own, strict=True))[1:], class_="line thin grey", data_tip=tip)
    everyone = {"class_": "line accent", "data_tip": "all clients together"}
    plot.line(*list(zip(*bins, strict=True))[1:], **everyone)
    for count, a, b in bins:
        tip = f"{plural(count, 'sample')}: {b:.0%} right where the model says {a:.0%}"
        plot.dot(a, b, 3.6, class_="dot accent", data_tip=tip)
    over = sum(pooled.confidence) > sum(pooled.correct)
    way = "surer than it is right" if over else "right more often than it is sure"
    return Figure(
        key="calibration",
        title="Calibration",
        caption="How often answers are right (up) against how probable the model called them "
        "(across). On the dotted line a probability can be taken at its word."
        + " Thin: every client."
        * few,
        alt=f"Calibration on {plural(sum(pooled.count), 'sample')} of all clients: expected "
        f"calibration error {pooled.error():.3f} in {BINS} bins; on the whole the model is {way}.",
        plot=plot,
        columns=["client", "samples", "mean_probability", "fraction_right"],
        rows=rows,
    )


def _list_bins(found: Calibration) -> list[tuple[int, float, float]]:
    """Return samples, mean probability and fraction right of every bin that has samples."""
    bins = zip(found.count, found.confidence, found.correct, strict=True)
    return [(n, sure / n, right / n) for n, sure, right in bins if n]


def draw_own(method: Method, m: int) -> Figure | None:
    """Return mean and spread of every own number over the clients; None: there are none."""
    table = read_own(method.history)
    if table is None:
        return None
    values = table.values[:, :MOST_OWN]
    mean, spread, p = values.mean(axis=0), values.std(axis=0), values.shape[1]
    up = svg.limits(values, mean - spread, mean + spread)
    write = lambda v: f"{v:g}" if v == int(v) and 1 <= v <= p else ""  # noqa: E731
    plot = svg.frame((0.5, p + 0.5), up, x_label="own number", y_label="value", write_x=write)
    for k, (centre, s) in enumerate(zip(mean, spread, strict=True)):
        ends = [values[:, k].min(), values[:, k].max()]
        tip = (
            f"{table.names[k]}: mean {centre:.3g}, standard deviation {s:.2g}, from "
            f"{ends[0]:.3g} to {ends[1]:.3g}"
        )
        plot.line([k + 1] * 2, ends, class_="line thin grey", data_tip=tip)
        plot.line([k + 1] * 2, [centre - s, centre + s], class_="line accent", data_tip=tip)
        plot.dot(k + 1, float(centre), 3.6, class_="dot accent", data_tip=tip)
    left = table.values.shape[1] - p
    return Figure(
        key=f"own-part-{m}",
        title="Own parts" if m == 0 else f"Own parts, {method.name}",
        caption=f"{capital(table.describe)}. Dots: mean over clients; thick: one standard "
        "deviation; thin: from the smallest to the largest client."
        + (f" {left:,} more numbers are in the file." if left else ""),
        alt=f"{capital(table.describe)}; mean and standard deviation: {table.list_spread()}.",
        plot=plot,
        columns=["client", "number", "value"],
        rows=[
            [client, name, float(v)]
            for client, row in zip(method.clients, table.values, strict=True)
            for name, v in zip(table.names, row, strict=True)
        ],
    )
