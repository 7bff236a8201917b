"""What the worst client gains and what the average pays: one point per method."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from equifed.contract.arrays import Losses
from equifed.report import svg
from equifed.report.figures import Figure, colour, csv_text
from equifed.report.measures import Estimate
from equifed.report.scales import Scale


def non_dominated(average: Losses, worst: Losses, *, higher_is_better: bool) -> list[bool]:
    """Return which points no other point beats in one coordinate without losing in the other.

    >>> non_dominated(np.array([0.9, 0.8, 0.7]), np.array([0.5, 0.6, 0.4]), higher_is_better=True)
    [True, True, False]
    """
    sign = 1.0 if higher_is_better else -1.0
    points = sign * np.column_stack([average, worst])
    beaten = [
        bool(((points >= point).all(axis=1) & (points > point).any(axis=1)).any())
        for point in points
    ]
    return [not lost and bool(np.isfinite(p).all()) for lost, p in zip(beaten, points, strict=True)]


def on_frontier(found: Sequence[dict[str, Estimate]], scale: Scale) -> list[bool]:
    """Return which methods are not dominated in average and worst client."""
    average = np.array([_mean(e, "average_by_client") for e in found])
    worst = np.array([_mean(e, "worst") for e in found])
    return non_dominated(average, worst, higher_is_better=scale.higher_is_better)


def scatter(
    names: Sequence[str],
    found: Sequence[dict[str, Estimate]],
    scale: Scale,
    colours: Sequence[int] | None = None,
) -> Figure:
    """Average against worst client, with the seeds and the non-dominated methods marked."""
    colours = range(len(names)) if colours is None else colours
    average = np.array([_mean(e, "average_by_client") for e in found]) * scale.factor
    worst = np.array([_mean(e, "worst") for e in found]) * scale.factor
    best = on_frontier(found, scale)
    seeds = [_seeds(e, scale) for e in found]
    xs, ys = [s[:, 0] for s in seeds], [s[:, 1] for s in seeds]
    plot = svg.frame(
        svg.limits(average, *xs, pad=0.12), svg.limits(worst, *ys, pad=0.12),
        x_label=f"average {scale.axis}",
        y_label=f"worst client's {scale.axis}",
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
        values = [float(v) / scale.factor for v in (average[m], worst[m])]
        said = f"{name}: average {scale.text(values[0])}, worst {scale.text(values[1])}"
        mark = "dot big" if best[m] else "dot big hollow"
        plot.dot(average[m], worst[m], 5.0, class_=f"{mark} {colour(colours[m])}", data_tip=said)
        rows.append([name, *values, int(best[m])])
        words.append(f"{said}{' (not dominated)' if best[m] else ''}.")
    _labels(plot, names, average, worst)
    alt = f"Average {scale.label} against the worst client's. {' '.join(words)}"
    caption = (
        f"Across: average {scale.label}. Up: worst client. Filled: no other is better in one "
        "without being worse in the other."
        + (" Small dots: seeds." if any(len(s) > 1 for s in seeds) else "")
    )
    table = csv_text(["method", "average", "worst", "non_dominated"], rows)
    return Figure("scatter", "Average against worst", caption, alt, plot.svg(alt), table)


def _labels(plot: svg.Plot, names: Sequence[str], xs: Losses, ys: Losses) -> None:
    """Name the points, moved up or down until no name lies on another."""
    taken: list[tuple[float, float, float]] = []
    for name, x, y in zip(names, plot.x(xs), plot.y(ys), strict=True):
        if not (math.isfinite(x) and math.isfinite(y)):
            continue
        short = name if len(name) <= 22 else name[:21] + "…"
        wide = 6.2 * len(short)
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


def _mean(found: dict[str, Estimate], key: str) -> float:
    return found[key].interval.estimate if key in found else math.nan


def _seeds(found: dict[str, Estimate], scale: Scale) -> Losses:
    if "worst" not in found:
        return np.empty((0, 2))
    pairs = zip(found["average_by_client"].values, found["worst"].values, strict=True)
    return np.array(list(pairs)) * scale.factor
