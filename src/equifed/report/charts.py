"""The figures of a report, each with a text alternative."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from equifed.contract.arrays import Index, Losses
from equifed.metrics import best_fraction, worst_fraction
from equifed.report import svg
from equifed.report.document import Report, Told
from equifed.report.methods import Method, Scale, capital, plural
from equifed.report.numbers import reduce_clients

MOST_DOTS = 1500
"""Of more clients in one figure, those at evenly spaced ranks are drawn."""
FEW_CLIENTS = 12
"""Up to this many clients have lines of their own."""
MOST_WEIGHTS = 60
"""Up to this many clients have lines in a figure of the weights."""


@dataclass(frozen=True, eq=False)
class Figure:
    """A plot, and what it shows in words."""

    key: str
    title: str
    caption: str
    alt: str
    plot: svg.Plot
    legend: Sequence[int] = ()

    @property
    def drawing(self) -> Markup:
        """The plot as SVG."""
        return self.plot.svg(self.alt)


def draw_figures(report: Report) -> dict[str, list[Figure]]:
    """Return the figures by section."""
    methods, time = report.methods, [_draw_certificate(report.methods)]
    weights = [_draw_weights(methods[report.lead], report.lead)]
    sections: dict[str, list[Figure | None]] = {"clients": [], "time": time, "weights": weights}
    if report.scale is not None:
        sections["clients"].append(draw_distribution(report.told, report.listed))
        if len(methods) > 2 and not report.single:
            sections["clients"].append(draw_frontier(report.told))
        sections["time"] = [*_draw_convergence(methods, report.scale), *time]
    return {name: [f for f in figures if f is not None] for name, figures in sections.items()}


def colour(i: int) -> str:
    """Return the style class of a method: the baseline is grey, the others have colours."""
    return f"m{i % 8}"


# -- clients --------------------------------------------------------------------------------------


def draw_distribution(found: Sequence[Told], listed: Index) -> Figure:
    """One row of dots per method, one dot per client; those in ``listed`` are named on hover."""
    scale, clients = found[0].scale, len(found[0].method.clients)
    step, top = (46.0 if clients <= 40 else 150.0 if len(found) == 1 else 62.0), 10.0
    height = top + step * len(found) + svg.BOTTOM
    values = [told.value * scale.kind.factor for told in found]
    write = ("{:.0f}" if scale.kind.is_fraction else "{:g}").format
    x = svg.Axis(*svg.limits(*values), 14.0, svg.WIDTH - svg.RIGHT, scale.axis, write)
    plot = svg.Plot(x, svg.Axis(0, 0, height - svg.BOTTOM, top, write=lambda v: ""), height=height)
    most = MOST_DOTS // len(found)
    for m, told in enumerate(found):
        base, average = top + step * m, told.level("average_by_client")
        plot.text(x.start, base + 12, told.method.name, class_="name")
        _draw_dots(plot, told, m, listed, most, base + step / 2 + 7, step - 20)
        if math.isfinite(average):
            place = x.at(average * scale.kind.factor)
            tip = f"{told.method.name}: average {scale.text(average)}"
            ends = {"x1": place, "x2": place, "y1": base + 18, "y2": base + step - 4}
            plot.add(svg.tag("line", **ends, class_="mean", data_tip=tip))
    over = f"Distribution of {scale.label} over {plural(clients, 'client')}."
    dots = "One dot per client." if clients <= most else f"{most:,} clients at evenly spaced ranks."
    return Figure(
        key="distribution",
        title="Every client",
        caption=f"{dots} Bar: average. Ring: worst-served client.",
        alt=" ".join([over, *map(_describe_range, found)]),
        plot=plot,
    )


def _draw_dots(
    plot: svg.Plot, told: Told, m: int, listed: Index, most: int, middle: float, room: float
) -> None:
    place_of = {int(i): k for k, i in enumerate(listed)}
    kind, known = told.scale.kind, np.flatnonzero(np.isfinite(told.value))
    order = known[np.argsort(kind.sign * told.value[known], kind="stable")]  # the worst first
    order = order[svg.thinned(len(order), most)]
    radius = 3.6 if len(order) <= 60 else 2.6 if len(order) <= 300 else 1.8
    gap, xs = 2 * radius + 0.4, plot.x(kind.factor * told.value[order])
    tallest = max(np.unique(np.floor(xs / gap), return_counts=True)[1], default=1)
    squeeze = min(1.0, max(1, int(room / gap)) / tallest)
    for i, (place, level) in zip(order, svg.swarm(xs.tolist(), gap, tallest), strict=True):
        y = middle + level * gap * squeeze
        known_as = {"data_m": m, "data_c": place_of[int(i)]} if int(i) in place_of else {}
        plot.circle(place, y, radius, class_=f"dot {colour(m)}", **known_as)
        if i == told.worst:
            plot.circle(place, y, radius + 3, class_="ring")


def _describe_range(told: Told) -> str:
    i, scale, method = told.worst, told.scale, told.method
    if i is None:
        return f"{method.name}: not evaluated."
    worst = scale.text(float(told.value[i]))
    if len(method.clients) == 1:
        return f"{method.name}: {worst}."
    best = scale.text(float(scale.kind.sign * np.nanmax(scale.kind.sign * told.value)))
    average = scale.text(told.level("average_by_client"))
    return f"{method.name}: worst {method.clients[i]} {worst}, average {average}, best {best}."


def find_non_dominated(average: Losses, worst: Losses, *, higher_is_better: bool) -> list[bool]:
    """Return which points no other point beats in one coordinate without losing in the other."""
    points = (1.0 if higher_is_better else -1.0) * np.column_stack([average, worst])
    return [
        bool(np.isfinite(p).all() and not ((points >= p).all(1) & (points > p).any(1)).any())
        for p in points
    ]


def find_frontier(found: Sequence[Told]) -> list[bool]:
    """Return which methods are not dominated in average and worst client."""
    higher = found[0].scale.higher_is_better
    return find_non_dominated(*_list_levels(found), higher_is_better=higher)


def _list_levels(found: Sequence[Told]) -> Losses:
    """Return the average and the worst client of every method, shape (2, methods)."""
    return np.array([[told.level(k) for told in found] for k in ("average_by_client", "worst")])


def draw_frontier(found: Sequence[Told], colours: Sequence[int] | None = None) -> Figure:
    """Average against worst client, with the non-dominated methods marked."""
    scale, levels, best = found[0].scale, _list_levels(found), find_frontier(found)
    factor, names = scale.kind.factor, [told.method.name for told in found]
    average, worst = levels * factor
    across, up = (svg.limits(level, pad=0.12) for level in (average, worst))
    worse = f"worst client's {scale.axis}"
    plot = svg.frame(across, up, x_label=f"average {scale.axis}", y_label=worse)
    front = sorted((a, w) for a, w, keep in zip(average, worst, best, strict=True) if keep)
    if len(front) > 1:
        plot.line(*zip(*front, strict=True), class_="line diagonal")
    words = []
    for m in np.flatnonzero(np.isfinite(levels).all(axis=0)).tolist():
        style = colour(m if colours is None else colours[m])
        a, w = map(scale.text, levels[:, m])
        said = f"{names[m]}: average {a}, worst {w}"
        mark = "dot big" if best[m] else "dot big hollow"
        plot.dot(average[m], worst[m], 5.0, class_=f"{mark} {style}", data_tip=said)
        words.append(f"{said}{' (not dominated)' if best[m] else ''}.")
    _draw_names(plot, names, average, worst)
    return Figure(
        key="scatter",
        title="Average against worst",
        caption="Filled: no other method is better in one without being worse in the other.",
        alt=f"Average {scale.label} against the worst client's. {' '.join(words)}",
        plot=plot,
    )


def _draw_names(plot: svg.Plot, names: Sequence[str], xs: Losses, ys: Losses) -> None:
    """Name the points, moved up or down until no name lies on another."""
    taken: list[tuple[float, float, float]] = []
    offsets = [d for k in range(12) for d in (12 * k, -12 * k)]
    for name, x, y in zip(names, plot.x(xs), plot.y(ys), strict=True):
        if not (math.isfinite(x) and math.isfinite(y)):
            continue
        short = svg.shorten(name, 26)
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


# -- rounds ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Series:
    """What the runs of a method have in common: evaluated rounds, and values (runs, k, clients)."""

    rounds: Index
    values: Losses


def collect_series(method: Method, scale: Scale) -> Series:
    """Return the evaluations that all runs have, thinned to what can be drawn."""
    found = [run.series(scale.metric, scale.split) for run in method.runs]
    common = found[0][0]
    for rounds, _ in found[1:]:
        common = np.intersect1d(common, rounds)
    common = common[svg.thinned(len(common))]
    values = [v[np.searchsorted(rounds, common)] for rounds, v in found]
    return Series(common, np.array(values))


def _draw_convergence(methods: Sequence[Method], scale: Scale) -> list[Figure]:
    found = [collect_series(method, scale) for method in methods]
    if len(methods) > 1 and max(len(series.rounds) for series in found) < 3:
        return []  # evaluated at start and end: the table has that
    if len(methods) == 1:
        return [_draw_method(methods[0], found[0], scale)]
    return [_draw_worst(methods, found, scale)]


def _draw_worst(methods: Sequence[Method], found: Sequence[Series], scale: Scale) -> Figure:
    """One line per method: its worst client, mean over seeds with their range."""
    factor, xs = scale.kind.factor, [s.rounds for s in found]
    lines = [
        np.array([reduce_clients(v, scale, "worst") for v in s.values]) * factor for s in found
    ]
    plot, words = _frame_course(xs, lines, scale), []
    for m, (method, x, line) in enumerate(zip(methods, xs, lines, strict=True)):
        if not len(x):
            continue
        mean = line.mean(axis=0)
        if len(line) > 1:
            plot.band(x, line.min(axis=0), line.max(axis=0), class_=f"band {colour(m)}")
        tip = f"{method.name}: {scale.text(float(mean[-1]) / factor)} at the end"
        plot.line(x, mean, class_=f"line {colour(m)}", data_tip=tip)
        words.append(f"{tip}.")
    several = any(len(line) > 1 for line in lines)
    over = "; mean over seeds, shaded from the lowest to the highest seed" if several else ""
    return Figure(
        key="worst-rounds",
        title="Worst client against rounds",
        caption=f"{capital(scale.axis)}{over}.",
        alt=f"Worst client's {scale.label} against rounds. {' '.join(words)}",
        plot=plot,
        legend=range(len(methods)),
    )


def _frame_course(
    xs: Sequence[Index], lines: Sequence[Losses], scale: Scale, right: float = svg.RIGHT
) -> svg.Plot:
    end = max((float(x[-1]) for x in xs if len(x)), default=1.0)
    # Without the first tenth of the evaluations, where the model knows nothing yet.
    counts = [line.shape[-1] for line in lines]
    settled = [
        line[..., math.ceil(n / 10) * (n > 3) :] for n, line in zip(counts, lines, strict=True)
    ]
    low, high = svg.limits(*settled)
    up = max(low, 0.0), min(high, 100.0 if scale.kind.is_fraction else math.inf)
    plot = svg.frame((0, end or 1.0), up, x_label="rounds", write_x="{:,.0f}".format, right=right)
    plot.clip = True
    return plot


def _draw_method(method: Method, s: Series, scale: Scale) -> Figure:
    """Average and worst client of one method, with the tails, or with every client if few."""
    factor = scale.kind.factor
    values = s.values.mean(axis=0) * factor
    known = values[:, ~np.isnan(values).any(axis=0)]
    worst, average = (reduce_clients(values, scale, of) for of in ("worst", "average"))
    plot = _frame_course([s.rounds], [known.T], scale, right=64.0)
    many = known.shape[1] > FEW_CLIENTS
    if many:
        higher = {"higher_is_better": scale.higher_is_better}
        low, high = (f(known, 0.2, **higher) for f in (worst_fraction, best_fraction))
        plot.band(s.rounds, low, high, class_="band grey")
    for i in range(0 if many else values.shape[1]):
        plot.line(s.rounds, values[:, i], class_="line thin grey", data_m=0, data_c=i)
    plot.line(s.rounds, worst, class_="line dashed accent", data_tip="worst client of each round")
    plot.line(s.rounds, average, class_="line ink", data_tip="average over clients")
    plot.label_ends({"average": average, "worst": worst})
    ends = "" if not len(s.rounds) else (
        f" It ends at an average of {scale.text(float(average[-1]) / factor)} and a worst "
        f"client of {scale.text(float(worst[-1]) / factor)}."
    )  # fmt: skip
    rest = "Shaded: from the worst-served to the best-served 20 %" if many else "Thin: every client"
    return Figure(
        key="convergence-rounds",
        title="Accuracy against rounds" if scale.kind.is_fraction else "Convergence",
        caption=f"{capital(scale.axis)}. {rest}.",
        alt=f"{method.name}: average and worst {scale.label} against rounds.{ends}",
        plot=plot,
    )


def _draw_certificate(methods: Sequence[Method]) -> Figure | None:
    """Return the optimality gap over rounds of the methods that have one, or None."""
    gaps = {}
    for m, method in enumerate(methods):
        records = method.history.rounds
        told = [(r.round - 1, r.numbers.get("gap", 0.0)) for r in records]  # of the model before
        points = [(r, g) for r, g in told if math.isfinite(g) and g > 0]
        if points:
            gaps[m] = np.array(points)[svg.thinned(len(points))]
    if not gaps:
        return None
    every = np.concatenate(list(gaps.values()))
    logs = np.log10(every[:, 1])
    low, high = 10 ** math.floor(logs.min()), 10 ** math.ceil(logs.max())
    plot = svg.frame(
        (0, float(every[:, 0].max())), (low, high if high > low else 10 * low), x_label="rounds",
        write_x="{:,.0f}".format, write_y="{:.0e}".format, log_y=True, left=54.0,
    )  # fmt: skip
    tips = {m: f"{methods[m].name}: {methods[m].history.describe_certificate()}" for m in gaps}
    for m, gap in gaps.items():
        plot.line(gap[:, 0], gap[:, 1], class_=f"line {colour(m)}", data_tip=tips[m])
    return Figure(
        key="certificate",
        title="Proved distance from the optimum",
        caption="How far the objective can still be from its optimum, at most (first seed).",
        alt=f"Proved optimality gap against rounds, logarithmic. {'. '.join(tips.values())}.",
        plot=plot,
        legend=tuple(gaps),
    )


def _draw_weights(method: Method, m: int) -> Figure | None:
    """Client weights over the rounds of the first run; None where they never change."""
    recorded = method.history.weights
    if not recorded or np.ptp(list(recorded.values()), axis=0).max() < 1e-12:
        return None
    rounds = np.array(sorted(recorded), dtype=np.int64)
    rounds = rounds[svg.thinned(len(rounds), 120)]
    table = np.array([recorded[int(r)] for r in rounds])
    n, end = table.shape[1], float(rounds[-1])
    plot = svg.frame(
        (0, end), svg.limits(table, [1 / n]), x_label="rounds", write_x="{:,.0f}".format, right=96.0
    )
    heaviest = np.argsort(-table[-1], kind="stable")[:3].tolist()
    shown, rest = heaviest, "Shaded: the middle 80 % of clients."
    if n > MOST_WEIGHTS:
        plot.band(rounds, *np.quantile(table, [0.1, 0.9], axis=1), class_="band grey")
    else:
        shown, rest = [*(i for i in range(n) if i not in heaviest), *heaviest], "Thin: the others."
    for i in shown:
        style = "line accent" if i in heaviest else "line thin m0"
        plot.line(rounds, table[:, i], class_=style, data_m=m, data_c=i)
    plot.line([0, end], [1 / n, 1 / n], class_="line diagonal", data_tip="equal weights")
    plot.label_ends({method.clients[i]: table[:, i] for i in heaviest})
    names = ", ".join(f"{method.clients[i]} {table[-1, i]:.3f}" for i in heaviest)
    return Figure(
        key=f"weights-{m}",
        title=f"Weights, {method.name}",
        caption=f"Coloured: the heaviest at the end ({names}). {rest} Dotted: equal weights.",
        alt=f"Weights of the clients under {method.name}. Largest at the end: {names}; equal "
        f"weights would be {1 / n:.3g}.",
        plot=plot,
    )
