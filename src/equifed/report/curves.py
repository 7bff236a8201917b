"""Figures over time (convergence against rounds and bytes, the certificate, the weights), and all.

:func:`draw_figures` puts the figures of a report together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from equifed.contract.arrays import Index, Losses, Weights
from equifed.metrics import best_fraction, worst_fraction
from equifed.report import charts, svg
from equifed.report.charts import FEW_CLIENTS, Figure, colour
from equifed.report.document import Report
from equifed.report.methods import Method, Scale, bytes_text, capital
from equifed.report.numbers import count_bytes, reduce_clients

Against = Literal["rounds", "bytes"]
MOST_WEIGHTS = 60
"""Up to this many clients have lines in a figure of the weights."""
WEIGHT_FIGURES = 8


def draw_figures(report: Report) -> dict[str, list[Figure]]:
    """Return the figures by section."""
    scale, methods, rows = report.scale, report.methods, report.rows
    clients: list[Figure | None] = []
    time: list[Figure | None] = []
    if scale is not None:
        averages = charts.list_levels(report.estimates)[0]
        clients += [
            charts.draw_distribution(methods, rows, averages, scale),
            charts.draw_frontier(report.names, report.estimates, scale) if report.several else None,
            charts.draw_lorenz(methods, [r.value for r in rows], scale.kind.label, "lorenz"),
            charts.draw_calibration(methods[report.lead], scale),
        ]
        if scale.metric not in ("loss", "mse"):
            losses = [r.loss for r in rows]
            clients.append(charts.draw_lorenz(methods, losses, "loss", "lorenz-loss"))
        time += _draw_convergence(methods, scale)
    time.append(_draw_certificate(methods))
    weights = [_draw_weights(method, m) for m, method in enumerate(methods)]
    own = [charts.draw_own(method, m) for m, method in enumerate(methods)]
    sections = {"clients": clients, "time": time, "weights": weights, "own": own}
    drawn = {name: [f for f in figures if f is not None] for name, figures in sections.items()}
    return drawn | {"weights": drawn["weights"][:WEIGHT_FIGURES]}


def _draw_convergence(methods: Sequence[Method], scale: Scale) -> list[Figure]:
    found = [collect_series(method, scale) for method in methods]
    axes: tuple[Against, ...] = ("rounds", "bytes")
    if len(methods) == 1:
        return [_draw_method(methods[0], found[0], scale, axis) for axis in axes]
    return [
        _draw_levels(methods, found, scale, of, axis)
        for axis in axes
        for of in ("worst", "average")
    ]


@dataclass(frozen=True, eq=False)
class Series:
    """What the runs of a method have in common: evaluated rounds, and values (runs, k, clients)."""

    rounds: Index
    bytes: Losses
    values: Losses

    def x(self, against: Against) -> Losses:
        """Return where the evaluations lie on the axis."""
        return self.rounds.astype(np.float64) if against == "rounds" else self.bytes


def collect_series(method: Method, scale: Scale) -> Series:
    """Return the evaluations that all runs have, thinned to what can be drawn."""
    found = [run.history.series(scale.metric, scale.split) for run in method.runs]
    common = found[0][0]
    for rounds, _ in found[1:]:
        common = np.intersect1d(common, rounds)
    common = common[svg.thinned(len(common))]
    values = [v[np.searchsorted(rounds, common)] for rounds, v in found]
    sent = [count_bytes(run.history, common) for run in method.runs]
    return Series(common, np.mean(sent, axis=0), np.array(values))


def _draw_levels(
    methods: Sequence[Method], found: Sequence[Series], scale: Scale, of: str, against: Against
) -> Figure:
    """One line per method: the worst client or the average, mean over seeds with their range."""
    lines = [
        np.array([reduce_clients(run, scale, of) for run in s.values]) * scale.factor for s in found
    ]
    plot = _frame_time([s.x(against) for s in found], lines, scale, against)
    words, rows = [], []
    for m, (method, s, line) in enumerate(zip(methods, found, lines, strict=True)):
        if not len(s.rounds):
            continue
        x, (mean, low, high) = s.x(against), (line.mean(axis=0), line.min(axis=0), line.max(axis=0))
        if len(line) > 1:
            plot.band(x, low, high, class_=f"band {colour(m)}")
        final = scale.text(float(mean[-1]) / scale.factor)
        tip = f"{method.name}: {final} at the end"
        plot.line(x, mean, class_=f"line {colour(m)}", data_tip=tip)
        words.append(f"{method.name} ends at {final}.")
        numbers = np.array([mean, low, high]).T / scale.factor
        told = zip(s.rounds, s.bytes, numbers.tolist(), strict=True)
        rows += [[method.name, int(r), float(b), *three] for r, b, three in told]
    what = "Worst client" if of == "worst" else "Average over clients"
    several = any(len(line) > 1 for line in lines)
    over = "; mean over seeds, shaded from the lowest to the highest seed" if several else ""
    return Figure(
        key=f"{of}-{against}",
        title=f"{what} against {against}",
        caption=f"{capital(scale.axis)}{over}.",
        alt=f"{what}, {scale.label}, against {against}. {' '.join(words)}",
        plot=plot,
        columns=["method", "round", "bytes", "mean", "lowest_seed", "highest_seed"],
        rows=rows,
        legend=range(len(methods)),
    )


def _frame_time(
    xs: Sequence[Losses],
    lines: Sequence[Losses],
    scale: Scale,
    against: Against,
    right: float = svg.RIGHT,
) -> svg.Plot:
    end = max((float(x[-1]) for x in xs if len(x)), default=1.0)
    write = bytes_text if against == "bytes" else "{:,.0f}".format
    label = "rounds" if against == "rounds" else "bytes sent and received by all clients"
    # Without the first tenth of the evaluations, where the model knows nothing yet.
    counts = [line.shape[-1] for line in lines]
    settled = [
        line[..., math.ceil(n / 10) * (n > 3) :] for n, line in zip(counts, lines, strict=True)
    ]
    low, high = svg.limits(*settled)
    up = max(low, 0.0), min(high, 100.0 if scale.kind.is_fraction else math.inf)
    plot = svg.frame((0, end or 1.0), up, x_label=label, write_x=write, right=right)
    plot.clip = True
    return plot


def _draw_method(method: Method, s: Series, scale: Scale, against: Against) -> Figure:
    """Average and worst client of one method, with the tails, or with every client if few."""
    values, x = s.values.mean(axis=0) * scale.factor, s.x(against)
    known = values[:, ~np.isnan(values).any(axis=0)]
    worst, average = (reduce_clients(values, scale, of) for of in ("worst", "average"))
    plot = _frame_time([x], [known.T], scale, against, right=64.0)
    many = known.shape[1] > FEW_CLIENTS
    if many:
        higher = {"higher_is_better": scale.higher_is_better}
        low, high = (f(known, 0.2, **higher) for f in (worst_fraction, best_fraction))
        plot.band(x, low, high, class_="band grey")
    else:
        for i in range(values.shape[1]):
            plot.line(x, values[:, i], class_="line thin grey", data_m=0, data_c=i)
    plot.line(x, worst, class_="line dashed accent", data_tip="worst client of each round")
    plot.line(x, average, class_="line ink", data_tip="average over clients")
    plot.label_ends({"average": average, "worst": worst})
    rows = [
        [int(r), float(b), float(a) / scale.factor, float(w) / scale.factor]
        for r, b, a, w in zip(s.rounds, s.bytes, average, worst, strict=True)
    ]
    ends = "" if not len(x) else (
        f" It ends at an average of {scale.text(float(average[-1]) / scale.factor)} and a worst "
        f"client of {scale.text(float(worst[-1]) / scale.factor)}."
    )  # fmt: skip
    rest = "Shaded: from the worst-served to the best-served 20 %" if many else "Thin: every client"
    return Figure(
        key=f"convergence-{against}",
        title=f"Convergence against {against}",
        caption=f"{capital(scale.axis)}. {rest}.",
        alt=f"{method.name}: average and worst {scale.label} against {against}.{ends}",
        plot=plot,
        columns=["round", "bytes", "average", "worst"],
        rows=rows,
    )


def draw_course(client: str, found: Series, i: int, scale: Scale) -> Figure:
    """Return the client's own line beside the average over clients."""
    values = found.values.mean(axis=0) * scale.factor
    own, average = values[:, i], reduce_clients(values, scale, "average")
    x = found.rounds.astype(np.float64)
    across, up = (0, float(x[-1]) or 1.0), svg.limits(own, average)
    plot = svg.frame(across, up, x_label="rounds", write_x="{:,.0f}".format)
    plot.line(x, average, class_="line dashed grey", data_tip="average over clients")
    plot.line(x, own, class_="line accent", data_tip=client)
    return Figure(
        key="course",
        title="On the way there",
        caption=f"{capital(scale.axis)}. Solid: you. Dashed: average over clients.",
        alt=f"{capital(scale.label)} of {client} and the average over clients against rounds.",
        plot=plot,
        columns=["round", "you", "average_over_clients"],
        rows=[
            [int(r), float(o) / scale.factor, float(a) / scale.factor]
            for r, o, a in zip(found.rounds, own, average, strict=True)
        ],
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
    words, rows = [], []
    for m, gap in gaps.items():
        name = methods[m].name
        tip = f"{name}: {methods[m].history.describe_certificate()}"
        plot.line(gap[:, 0], gap[:, 1], class_=f"line {colour(m)}", data_tip=tip)
        words.append(f"{tip}.")
        rows += [[name, int(r), float(g)] for r, g in gap]
    return Figure(
        key="certificate",
        title="Certificate",
        caption="How far the objective after so many rounds can still be from its optimum, at most;"
        " computed from the run itself (first seed).",
        alt=f"Certified optimality gap against rounds, logarithmic. {' '.join(words)}",
        plot=plot,
        columns=["method", "round", "gap"],
        rows=rows,
        legend=tuple(gaps),
    )


def describe_weights(methods: Sequence[Method], drawn: Sequence[Figure]) -> list[str]:
    """Say of every method whose weights are not drawn why they are not."""
    shown = {figure.key for figure in drawn}
    reasons: dict[str, list[str]] = {}
    for method in (x for m, x in enumerate(methods) if f"weights-{m}" not in shown):
        recorded = method.history.weights
        if not recorded:
            reason = "no weights were recorded"
        elif _moved(recorded):
            reason = "not drawn here; the run folder has them (weights.csv)"
        elif len(recorded) == 1:
            reason = "recorded in one round only, so nothing is known of how they moved"
        else:
            reason = "the weights of the first round were kept"
        reasons.setdefault(reason, []).append(method.name)
    return [f"{', '.join(names)}: {reason}." for reason, names in reasons.items()]


def _moved(recorded: dict[int, Weights]) -> bool:
    return bool(np.ptp(list(recorded.values()), axis=0).max() >= 1e-12)


def _draw_weights(method: Method, m: int) -> Figure | None:
    """Client weights over the rounds of the first run; None where they never change."""
    recorded = method.history.weights
    if not recorded or not _moved(recorded):
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
        columns=["round", "client", "weight"],
        rows=[
            [int(r), method.clients[i], float(table[k, i])]
            for k, r in enumerate(rounds)
            for i in shown
        ],
    )
