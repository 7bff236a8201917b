"""All that a report is made of, before it becomes a page or JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from equifed.report import curves, figures
from equifed.report.figures import Figure
from equifed.report.measures import (
    Estimate,
    Measure,
    Target,
    default_target,
    estimates,
    measures,
    shown_scale,
)
from equifed.report.methods import ClientRows, Method, ReportError, client_rows
from equifed.report.scales import Scale

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
    scale = shown_scale(methods)
    title = title or default_title(methods)
    if scale is None:
        return Report(title, methods, base, None, None, (), [], [], tuple(problems))
    if target is None and len(methods) > 1:
        target = default_target(methods[base], scale)
    found = [
        estimates(method, None if m == base else methods[base], scale, target)
        for m, method in enumerate(methods)
    ]
    rows = [client_rows(method, scale) for method in methods]
    return Report(
        title, methods, base, scale, target, measures(scale, target), found, rows, tuple(problems)
    )


def default_title(methods: Sequence[Method]) -> str:
    """Return the name of the data, or of the only method."""
    for method in methods:
        name = method.runs[0].provenance.get("data", {}).get("name")
        if name:
            return str(name)
    return methods[0].name if len(methods) == 1 else "Comparison"


def all_figures(report: Report) -> dict[str, list[Figure]]:
    """Return the figures by section."""
    scale, methods = report.scale, report.methods
    if scale is None:
        gap = curves.certificate(methods)
        return {"clients": [], "time": [gap] if gap else [], "weights": _weights(methods)}
    losses = [row.loss for row in report.rows]
    clients = [
        figures.distribution(methods, report.rows, scale),
        *([_scatter(report, scale)] if report.several else []),
        figures.lorenz(methods, [r.value for r in report.rows], scale.metric, "lorenz"),
        figures.lorenz(methods, losses, "loss", "lorenz-loss") if scale.metric != "loss" else None,
    ]
    time = [*_convergence(methods, scale), curves.certificate(methods)]
    return {
        "clients": [f for f in clients if f is not None],
        "time": [f for f in time if f is not None],
        "weights": _weights(methods),
    }


def _scatter(report: Report, scale: Scale) -> Figure:
    return figures.scatter([m.name for m in report.methods], report.estimates, scale)


def _weights(methods: Sequence[Method]) -> list[Figure]:
    found = [curves.weights(method, m) for m, method in enumerate(methods)]
    return [f for f in found if f is not None][:WEIGHT_FIGURES]


def _convergence(methods: Sequence[Method], scale: Scale) -> list[Figure]:
    found = [curves.series(method, scale) for method in methods]
    axes: tuple[curves.Against, ...] = ("rounds", "bytes")
    if len(methods) == 1:
        return [curves.one_method(methods[0], found[0], scale, axis) for axis in axes]
    return [
        curves.convergence(methods, found, scale, of, axis)
        for axis in axes
        for of in ("worst", "average")
    ]
