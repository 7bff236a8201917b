"""Small drawings: axes, lines and dots as SVG text whose colours come from the page's style."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import ArrayLike

WIDTH, HEIGHT = 440.0, 280.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 14.0, 14.0, 40.0
SHOWN_POINTS = 300
"""A line has at most this many points: more cannot be seen."""
COLOURS = ("#8a929d", "#0f5fae", "#c45a12", "#1e8a5a", "#8a4fb0", "#b8860b", "#c2336f", "#23808c")
DASHES = ("7 3", "none", "2 3", "9 3 2 3", "12 4", "5 2 1 2 1 2", "3 6", "14 3 3 3")
"""Of lines in the order of the colours: they tell methods apart in black and white."""
STYLE = """
text{font:12px sans-serif;fill:#1b1f24}.tick,.label{fill:#5b6470;font-size:11.5px}
.name{font-weight:600}.grid{stroke:#e6e8eb}.axis{stroke:#5b6470}.faint{opacity:.35}
.line{fill:none;stroke-width:2}.big{stroke-width:2}.band{opacity:.14}
.diagonal{stroke:#5b6470;stroke-width:1;stroke-dasharray:2 4}
"""
"""The page's style in light, for drawings without a page."""


def num(value: float) -> str:
    """Write a coordinate shortly."""
    return f"{value:.1f}".removesuffix(".0")


def tag(name: str, content: str | Markup = "", /, **attributes: object) -> Markup:
    """Return an element; every attribute and all text is escaped."""
    shown = {k: num(v) if isinstance(v, float) else str(v) for k, v in attributes.items()}
    pairs = [f'{k.rstrip("_").replace("_", "-")}="{escape(v)}"' for k, v in shown.items()]
    head, inside = " ".join([name, *pairs]), escape(content)
    return Markup(f"<{head}>{inside}</{name}>") if inside else Markup(f"<{head}/>")


def nice_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Return round numbers between two limits."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten between two limits, at most six of them."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    step = max(1, math.ceil((last - first + 1) / 6))
    return [10.0**i for i in range(first, last + 1, step)] or [low]


def _says(text: str, value: float) -> bool:
    """Tell whether a text is that number, or no number at all."""
    try:
        return math.isclose(float(text.replace(",", "")), value, rel_tol=1e-9, abs_tol=1e-12)
    except ValueError:
        return True


@dataclass(frozen=True)
class Axis:
    """From numbers to places between two pixels, with ticks and a label."""

    low: float
    high: float
    start: float
    end: float
    label: str = ""
    write: Callable[[float], str] = field(default="{:g}".format)
    log: bool = False

    def __call__(self, values: ArrayLike) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        """Return the places of numbers."""
        array = np.asarray(values, dtype=np.float64)
        low, high = self.low, self.high
        if self.log:
            array, low, high = np.log10(array), math.log10(low), math.log10(high)
        span = high - low or 1.0
        return np.asarray(self.start + (array - low) / span * (self.end - self.start))

    def at(self, value: float) -> float:
        """Return the place of one number."""
        return float(self(value))

    def ticks(self) -> list[float]:
        """Return where to put ticks: where what is written there is the number itself."""
        if self.log:
            return log_ticks(self.low, self.high)
        every = nice_ticks(self.low, self.high)
        exact = [value for value in every if _says(self.write(value), value)]
        return exact if len(exact) > 1 else every


def limits(*arrays: ArrayLike, pad: float = 0.05) -> tuple[float, float]:
    """Return limits around all finite numbers, with some room."""
    flat = np.concatenate([np.ravel(np.asarray(a, dtype=np.float64)) for a in arrays])
    known = flat[np.isfinite(flat)]
    if known.size == 0:
        return 0.0, 1.0
    low, high = float(known.min()), float(known.max())
    room = (high - low) * pad or max(abs(high) * pad, 1e-12)
    return low - room, high + room


@dataclass
class Plot:
    """A frame with two axes that things are drawn into."""

    x: Axis
    y: Axis
    width: float = WIDTH
    height: float = HEIGHT
    parts: list[Markup] = field(default_factory=list)
    outside: list[Markup] = field(default_factory=list)
    clip: bool = False
    """Whether what lies outside the axes is cut off."""

    def add(self, *parts: Markup) -> None:
        """Draw something."""
        self.parts.extend(parts)

    def line(self, xs: ArrayLike, ys: ArrayLike, **attributes: object) -> None:
        """Draw a line through the points that are finite."""
        points = path(self.x(xs), self.y(ys))
        if points:
            self.add(tag("path", d=points, **{"class_": "line", **attributes}))

    def band(self, xs: ArrayLike, low: ArrayLike, high: ArrayLike, **attributes: object) -> None:
        """Fill between two lines."""
        x, top, bottom = self.x(xs), self.y(high), self.y(low)
        known = np.isfinite(x) & np.isfinite(top) & np.isfinite(bottom)
        there = path(x[known], top[known])
        back = path(x[known][::-1], bottom[known][::-1]).replace("M", "L", 1)
        if there:
            self.add(tag("path", d=f"{there}{back}Z", **{"class_": "band", **attributes}))

    def dot(self, x: float, y: float, radius: float = 3.0, **attributes: object) -> None:
        """Draw a dot."""
        if math.isfinite(x) and math.isfinite(y):
            self.circle(self.x.at(x), self.y.at(y), radius, **{"class_": "dot", **attributes})

    def circle(self, x: float, y: float, radius: float, **attributes: object) -> None:
        """Draw a circle around a place in pixels."""
        self.add(tag("circle", cx=x, cy=y, r=radius, **attributes))

    def label_ends(self, lines: Mapping[str, ArrayLike]) -> None:
        """Write names in the right margin, each where its line ends, none on another."""
        ends = [float(np.asarray(line)[-1]) for line in lines.values() if len(np.asarray(line))]
        for name, place in zip(lines, spaced([self.y.at(v) + 4 for v in ends], 13.0), strict=False):
            if math.isfinite(place):
                self.outside.append(tag("text", shorten(name, 14), x=self.x.end + 6, y=place))

    def legend(self, lines: Mapping[str, Mapping[str, object]]) -> None:
        """Write names in the right margin, each beside a piece of its line, or its dot."""
        left = self.x.end + 8
        for i, (name, attributes) in enumerate(lines.items()):
            y = self.y.end + 10.0 + 18 * i
            piece = {"x1": left, "x2": left + 14, "y1": y - 4, "y2": y - 4, "class_": "line"}
            small = {"style": "font-size:10px"} if len(name) > 18 else {}  # the margin is narrow
            if str(attributes.get("class_")).startswith("dot"):
                mark = tag("circle", cx=left + 7, cy=y - 4, r=3.0, **attributes)
            else:
                mark = tag("line", **{**piece, **attributes})
            self.outside += [mark, tag("text", name, x=left + 19, y=y, **small)]

    def text(self, x: float, y: float, words: str, **attributes: object) -> None:
        """Write at a place in pixels."""
        self.add(tag("text", words, x=x, y=y, **attributes))

    def svg(self, alt: str) -> Markup:
        """Return the drawing; ``alt`` says in words what it shows."""
        drawn = Markup("").join(self.parts)
        shown = [*self._grid(), self._clipped(drawn) if self.clip else drawn, *self.outside]
        box = f"0 0 {num(self.width)} {num(self.height)}"
        return tag("svg", Markup("").join(shown), viewBox=box, role="img", aria_label=alt)

    def _clipped(self, drawn: Markup) -> Markup:
        box = {"x": self.x.start - 2, "y": self.y.end - 2}
        box |= {"width": self.x.end + 4 - self.x.start, "height": self.y.start + 3 - self.y.end}
        return tag("svg", drawn, **box, viewBox=" ".join(map(num, box.values())))

    def _grid(self) -> Iterable[Markup]:
        x, y = self.x, self.y
        left, below = {"text_anchor": "end"}, {"text_anchor": "middle", "class_": "tick"}
        for value in y.ticks():
            place = y.at(value)
            yield tag("line", x1=x.start, x2=x.end, y1=place, y2=place, class_="grid")
            yield tag("text", y.write(value), x=x.start - 6, y=place + 4, **left, class_="tick")
        yield tag("line", x1=x.start, x2=x.end, y1=y.start, y2=y.start, class_="axis")
        for value in x.ticks():
            yield tag("text", x.write(value), x=x.at(value), y=y.start + 16, **below)
        if y.label:
            yield tag("text", y.label, x=6.0, y=y.end - 10, class_="label")
        if x.label:
            yield tag("text", x.label, x=x.end, y=y.start + 33, text_anchor="end", class_="label")


def shorten(name: str, most: int) -> str:
    """Return a name of at most so many characters."""
    return name if len(name) <= most else name[: most - 1] + "…"


def path(xs: ArrayLike, ys: ArrayLike) -> str:
    """Return path data through the finite points, in order."""
    x, y = np.asarray(xs, dtype=np.float64), np.asarray(ys, dtype=np.float64)
    known = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    return "M" + "L".join(f"{num(x[i])} {num(y[i])}" for i in known) if len(known) else ""


def thinned(count: int, most: int = SHOWN_POINTS) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return at most ``most`` positions of ``count``, with the first and the last."""
    if count <= most:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, most).round().astype(np.int64))


def frame(
    x: tuple[float, float],
    y: tuple[float, float],
    *,
    x_label: str = "",
    y_label: str = "",
    write_x: Callable[[float], str] = "{:g}".format,
    write_y: Callable[[float], str] = "{:g}".format,
    log_y: bool = False,
    height: float = HEIGHT,
    left: float = LEFT,
    right: float = RIGHT,
) -> Plot:
    """Return an empty plot with the usual margins."""
    across = Axis(*x, left, WIDTH - right, x_label, write_x)
    up = Axis(*y, height - BOTTOM, TOP + (16 if y_label else 0), y_label, write_y, log_y)
    return Plot(across, up, height=height)


def spaced(places: Sequence[float], gap: float) -> list[float]:
    """Move places down, in order, until neighbours are at least ``gap`` apart."""
    out = list(places)
    last = -math.inf
    for i in sorted(range(len(out)), key=lambda i: out[i]):
        last = out[i] = max(out[i], last + gap)
    return out


def swarm(places: Sequence[float], gap: float, most: int) -> list[tuple[float, int]]:
    """Return places and levels 0, 1, -1, 2, ... of dots, one of each per column ``gap`` wide."""
    filled: Counter[int] = Counter()
    out = []
    for place in places:
        level = filled[math.floor(place / gap)] % most
        filled[math.floor(place / gap)] += 1
        out.append((place, (level + 1) // 2 * (1 if level % 2 else -1)))
    return out


def standalone(drawing: Markup) -> str:
    """Return a drawing as an SVG file that needs no page around it."""
    classes = "".join(  # no variables: not every viewer knows them
        f".line.m{i},.big.m{i}{{stroke:{value}}}.dot.m{i},.band.m{i}{{fill:{value}}}"
        f".line.m{i}{{stroke-dasharray:{DASHES[i]}}}"
        for i, value in enumerate(COLOURS)
    )
    style = tag("style", Markup(STYLE + classes + ".dot.hollow{fill:#fff}"))  # our own text
    paper = tag("rect", width="100%", height="100%", fill="#fff")
    size = {"width": 2 * WIDTH, "height": 2 * HEIGHT}
    inside = style + paper + drawing
    return str(tag("svg", inside, xmlns="http://www.w3.org/2000/svg", **size)) + "\n"
