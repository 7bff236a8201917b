"""Figures of experiments: lines, bands and dots as SVG files that stand alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from numpy.typing import ArrayLike

from equifed.report import svg

COLOURS = (
    "#0b6bcb", "#d1495b", "#2e8b57", "#8a5cc4", "#c77d0a", "#4f6d7a", "#a3155f", "#555555",
    "#00a5b5", "#7a5230", "#8db600", "#e377c2",
)  # fmt: skip
STYLE = """text{font:12px sans-serif;fill:#333}.grid{stroke:#e3e3e3}.axis{stroke:#888}
.line{fill:none;stroke-width:1.8}.band{opacity:.18}.tick{font-size:11px}.title{font-weight:bold}"""


@dataclass(frozen=True)
class Line:
    """A line, with limits around it if there are several seeds."""

    x: ArrayLike
    y: ArrayLike
    low: ArrayLike | None = None
    high: ArrayLike | None = None
    dots: bool = False


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
    shown = {name: _positive(line) if log else line for name, line in lines.items()}
    ys = [v for line in shown.values() for v in (line.y, line.low, line.high) if v is not None]
    single = all(np.size(line.x) == 1 for line in shown.values())  # dots want room, lines do not
    across = svg.limits(*[line.x for line in shown.values()], pad=0.05 if single else 0.0)
    up = y_limits or (_decades(ys) if log else svg.limits(*ys))
    plot = svg.frame(
        across, up, x_label=x_label, y_label=y_label, log_y=log, left=60.0, right=150.0,
        write_y="{:.0e}".format if log else "{:g}".format,
    )  # fmt: skip
    plot.clip = True
    for i, (_name, line) in enumerate(shown.items()):
        colour = COLOURS[i % len(COLOURS)]
        if line.low is not None and line.high is not None:
            plot.band(line.x, line.low, line.high, fill=colour)
        plot.line(line.x, line.y, stroke=colour)
        if line.dots:
            for a, b in zip(np.ravel(line.x), np.ravel(line.y), strict=True):
                plot.dot(float(a), float(b), fill=colour)
    drawing = plot.svg(title)
    extra = [_legend(i, name) for i, name in enumerate(shown)]
    extra.append(svg.tag("text", title, x=svg.WIDTH - 8, y=12.0, text_anchor="end",
                         class_="title"))  # fmt: skip
    return standalone(drawing, extra)


def standalone(drawing: Markup, extra: Sequence[Markup] = ()) -> str:
    """Return a drawing as a file of its own: with a name space, a style and a white ground."""
    style = Markup(f"<style>{STYLE}</style>")
    ground = svg.tag("rect", width="100%", height="100%", fill="#fff")
    head, _, rest = str(drawing).partition(">")
    head = head.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" width="660" ', 1)
    inside = rest.removesuffix("</svg>")
    return f"{head}>{style}{ground}{inside}{''.join(map(str, extra))}</svg>\n"


def _legend(i: int, name: str) -> Markup:
    left, y = svg.WIDTH - 142, 40.0 + 18 * i
    dash = svg.tag("line", x1=left, x2=left + 14, y1=y - 4, y2=y - 4,
                   stroke=COLOURS[i % len(COLOURS)], stroke_width="2.5")  # fmt: skip
    small = {"style": "font-size:10px"} if len(name) > 18 else {}  # the margin is narrow
    return Markup(dash + svg.tag("text", name, x=left + 19, y=y, **small))


def _positive(line: Line) -> Line:
    """Leave out what a logarithmic axis cannot show."""

    def kept(values: ArrayLike | None) -> ArrayLike | None:
        if values is None:
            return None
        array = np.asarray(values, dtype=np.float64)
        return np.where(array > 0, array, np.nan)

    y = kept(line.y)
    assert y is not None
    return Line(line.x, y, kept(line.low), kept(line.high), line.dots)


def _decades(ys: Sequence[ArrayLike]) -> tuple[float, float]:
    flat = np.concatenate([np.ravel(np.asarray(y, dtype=np.float64)) for y in ys])
    known = flat[np.isfinite(flat) & (flat > 0)]
    if known.size == 0:
        return 0.1, 1.0
    low, high = np.log10([known.min(), known.max()])
    return float(10 ** np.floor(low)), float(10 ** np.ceil(high + 1e-9))
