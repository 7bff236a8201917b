"""All that a report is made of, before it becomes a page or JSON."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equifed.report import curves, figures
from equifed.report.figures import Figure
from equifed.report.measures import (
    Estimate,
    Measure,
    Target,
    choose_scale,
    choose_target,
    estimate_measures,
    list_measures,
)
from equifed.report.methods import ClientRows, Method, ReportError, collect_client_rows
from equifed.report.more import Column, collect_columns, draw_calibration
from equifed.report.own_parts import draw_own
from equifed.report.scales import Scale
from equifed.report.verdict import Verdict, floor_of, write_verdict

WEIGHT_FIGURES = 8


@dataclass(frozen=True, eq=False)
class Report:
    """The methods, what was measured, and against which of them the others are held."""

    title: str
    methods: list[Method]
    baseline: int
    scale: Scale | None
    target: Target | None
    measures: tuple[Measure, ...]
    estimates: list[dict[str, Estimate]]
    rows: list[ClientRows]
    problems: tuple[str, ...] = ()

    @property
    def several(self) -> bool:
        """Whether there is something to compare."""
        return len(self.methods) > 1

    @property
    def single(self) -> bool:
        """Whether there is one client only, so that nothing is worst or average."""
        return len(self.methods[0].clients) == 1

    @functools.cached_property
    def verdict(self) -> Verdict:
        """Whether there is anything to gain under the method of the headline."""
        return write_verdict(self.methods[self.lead], self.scale)

    @functools.cached_property
    def columns(self) -> list[list[Column]]:
        """What else is known about every client, by method."""
        if self.scale is None:
            return [[] for _ in self.methods]
        return [collect_columns(method, self.scale) for method in self.methods]

    @functools.cached_property
    def beside(self) -> list[dict[str, float]]:
        """What to hold measures against, by method: the majority class and the chance floor."""
        return [_find_beside(self, m) for m in range(len(self.methods))]

    @property
    def sampled(self) -> bool:
        """Whether limits of some number are about other test samples."""
        return any(e.source == "samples" for found in self.estimates for e in found.values())

    @property
    def lead(self) -> int:
        """The method of the headline: the one whose worst client is served best."""
        if self.scale is None:
            return 0
        sign = self.scale.kind.sign
        worst = [
            sign * found["worst"].interval.estimate if "worst" in found else -math.inf
            for found in self.estimates
        ]
        others = [i for i in range(len(worst)) if i != self.baseline] or [self.baseline]
        return max(others, key=lambda i: -math.inf if math.isnan(worst[i]) else worst[i])


def _find_beside(report: Report, m: int) -> dict[str, float]:
    if report.scale is None or not report.scale.kind.is_fraction:
        return {}
    shares = next((c.values for c in report.columns[m] if c.key == "majority"), np.empty(0))
    known = shares[np.isfinite(shares)]
    out = {"majority_class": float(known.mean())} if known.size else {}
    floor = floor_of(report.methods[m], report.scale)
    return out | ({"chance_floor": floor} if math.isfinite(floor) else {})


def build(
    methods: list[Method],
    *,
    title: str | None = None,
    baseline: str | None = None,
    target: Target | None = None,
    problems: Sequence[str] = (),
) -> Report:
    """Measure methods; the first one is the baseline unless another is named."""
    names = [method.name for method in methods]
    if baseline is not None and baseline not in names:
        raise ReportError(f"there is no method {baseline!r}; choose from {', '.join(names)}")
    base = 0 if baseline is None else names.index(baseline)
    scale = choose_scale(methods)
    title = title or choose_title(methods)
    if scale is None:
        return Report(title, methods, base, None, None, (), [], [], tuple(problems))
    if target is None and len(methods) > 1:
        target = choose_target(methods[base], scale)
    found = [
        estimate_measures(method, None if m == base else methods[base], scale, target)
        for m, method in enumerate(methods)
    ]
    rows = [collect_client_rows(method, scale) for method in methods]
    shown = list_measures(scale, target)
    return Report(title, methods, base, scale, target, shown, found, rows, tuple(problems))


def choose_title(methods: Sequence[Method]) -> str:
    """Return the name of the data, or of the only method."""
    for method in methods:
        name = method.runs[0].provenance.get("data", {}).get("name")
        if name:
            return str(name)
    return methods[0].name if len(methods) == 1 else "Comparison"


def draw_figures(report: Report) -> dict[str, list[Figure]]:
    """Return the figures by section."""
    scale, methods, rows = report.scale, report.methods, report.rows
    clients: list[Figure | None] = []
    time: list[Figure | None] = []
    if scale is not None:
        values, losses = [r.value for r in rows], [r.loss for r in rows]
        averages = figures.list_levels(report.estimates)[0]
        clients.append(figures.draw_distribution(methods, rows, averages, scale))
        if report.several:
            names = [method.name for method in methods]
            clients.append(figures.draw_frontier(names, report.estimates, scale))
        clients.append(figures.draw_lorenz(methods, values, scale.kind.label, "lorenz"))
        clients.append(draw_calibration(methods[report.lead], scale))
        if scale.metric not in ("loss", "mse"):
            clients.append(figures.draw_lorenz(methods, losses, "loss", "lorenz-loss"))
        time += _draw_convergence(methods, scale)
    time.append(curves.draw_certificate(methods))
    weights = [curves.draw_weights(method, m) for m, method in enumerate(methods)]
    own: list[Figure | None] = [draw_own(method, m) for m, method in enumerate(methods)]
    sections = {"clients": clients, "time": time, "weights": weights, "own": own}
    found = {name: [f for f in drawn if f is not None] for name, drawn in sections.items()}
    return found | {"weights": found["weights"][:WEIGHT_FIGURES]}


def _draw_convergence(methods: Sequence[Method], scale: Scale) -> list[Figure]:
    found = [curves.collect_series(method, scale) for method in methods]
    axes: tuple[curves.Against, ...] = ("rounds", "bytes")
    if len(methods) == 1:
        return [curves.draw_method(methods[0], found[0], scale, axis) for axis in axes]
    return [
        curves.draw_convergence(methods, found, scale, of, axis)
        for axis in axes
        for of in ("worst", "average")
    ]
