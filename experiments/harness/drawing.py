"""Figures of experiments in the style of the reports, as SVG files that stand alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equifed.metrics import Interval
from equifed.report import colour, frame, limits, standalone
from experiments.harness.measures import series
from experiments.harness.running import Histories

Array = NDArray[np.float64]
LABELS = {"worst": "worst", "average": "average", "deviation": "standard deviation of"}
COLOURS = 8
"""Lines beyond so many have the same colours again, and are dashed."""


@dataclass(frozen=True)
class Line:
    """A line, with limits around it if there are several seeds."""

    x: ArrayLike
    y: ArrayLike
    low: ArrayLike | None = None
    high: ArrayLike | None = None
    dots: bool = False

    @classmethod
    def of_seeds(cls, x: ArrayLike, values: Array, dots: bool = False) -> Line:
        """Return the mean over seeds, in a band from the least to the largest seed."""
        return cls(x, values.mean(0), values.min(0), values.max(0), dots)


def figure(
    lines: Mapping[str, Line],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log: bool = False,
    y_limits: tuple[float, float] | None = None,
) -> str:
    """Return a figure with a legend as the text of an SVG file."""
    ys = [v for line in lines.values() for v in (line.y, line.low, line.high) if v is not None]
    single = all(np.size(line.x) == 1 for line in lines.values())  # dots want room, lines do not
    plot = frame(
        limits(*[line.x for line in lines.values()], pad=0.05 if single else 0.0),
        y_limits or (_decades(ys) if log else limits(*ys)),
        x_label=x_label, y_label=f"{title} ({y_label})", log_y=log, left=60.0, right=150.0,
        write_y="{:.0e}".format if log else "{:g}".format,
    )  # fmt: skip
    plot.clip = True
    legend = {}
    for i, (name, line) in enumerate(lines.items()):
        style = {"class_": f"line {colour(i)}"}
        style |= {"stroke_dasharray": "5 3"} if i >= COLOURS else {}
        legend[name] = style
        if line.low is not None and line.high is not None:
            plot.band(line.x, line.low, line.high, class_=f"band {colour(i)}")
        plot.line(line.x, line.y, **style)
        if line.dots:
            dot = f"dot {'big hollow' if i >= COLOURS else ''} {colour(i)}"
            for a, b in zip(np.ravel(line.x), np.ravel(line.y), strict=True):
                plot.dot(float(a), float(b), class_=dot)
            legend[name] = {"class_": dot} if single else style
    plot.legend(legend)
    return standalone(plot.svg(title))


def intervals(told: Mapping[str, Mapping[str, Interval]], *, title: str, x_label: str) -> str:
    """Return a figure of intervals in rows, with a colour for each of the things compared.

    ``told`` maps what is compared to the intervals of some rows.
    """
    rows = list(dict.fromkeys(row for one in told.values() for row in one))
    found = [one for by_row in told.values() for one in by_row.values()]
    ends = limits([0.0, *(one.lower for one in found), *(one.upper for one in found)])
    plot = frame(
        ends, (-0.5, len(rows) - 0.5), x_label=x_label, y_label=title, left=125.0, right=150.0,
        write_y=lambda value: "", height=60.0 + 34.0 * len(rows),
    )  # fmt: skip
    for i, row in enumerate(reversed(rows)):
        plot.text(plot.x.start - 6, plot.y.at(i) + 4, row, text_anchor="end", class_="tick")
    plot.line([0.0, 0.0], [-0.5, len(rows) - 0.5], class_="axis")
    styles: dict[str, dict[str, object]] = {
        name: {"class_": f"line {colour(k)}", "style": "stroke-dasharray:none"}  # some are short
        for k, name in enumerate(told)
    }
    for k, (name, by_row) in enumerate(told.items()):
        for row, one in by_row.items():
            place = len(rows) - 1 - rows.index(row) + 0.3 - 0.6 * k / max(1, len(told) - 1)
            plot.line([one.lower, one.upper], [place, place], **styles[name])
            plot.dot(one.estimate, place, class_=f"dot {colour(k)}")
    plot.legend(styles)
    return standalone(plot.svg(title))


def _decades(ys: Sequence[ArrayLike]) -> tuple[float, float]:
    known = np.concatenate([np.ravel(np.asarray(y, dtype=np.float64)) for y in ys])
    low, high = np.log10([known.min(), known.max()])
    return float(10 ** np.floor(low)), float(10 ** np.ceil(high + 1e-9))


def draw_rounds(found: Histories, names: Sequence[str], what: str, title: str) -> str:
    """Draw worst, average or deviation of the test accuracies round by round."""
    lines = {}
    for name in (one for one in names if one in found):
        runs = [series(history, what) for history in found[name].values()]
        lines[name] = Line.of_seeds(runs[0][0], np.array([v for _, v in runs]))
    return figure(
        lines, title=title, x_label="round (line: mean, band: all seeds)",
        y_label=f"{LABELS[what]} test accuracy, %",
    )  # fmt: skip
