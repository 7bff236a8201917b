"""Shirts against T-shirts and pullovers: two published tables on one division, kept apart.

AFL's paper made three clients of three classes of Fashion-MNIST; others put their methods beside it
under protocols of their own, and the same method has other numbers there. Each protocol is run with
the methods of its table and SCAFF-PD. Every client has one class, so an own bias and an own model
would always be right and say nothing: there are no such rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from experiments.harness.choice import choose
from experiments.harness.drawing import Line, figure
from experiments.harness.experiment import Check, Context, Outcome, Table
from experiments.harness.measures import (
    accuracy_table,
    percentages,
    validation_score,
    with_interval,
    with_limits,
)
from experiments.harness.running import Histories, run_variants

from equifed.metrics import mean_interval, paired_difference
from equifed.runs import merge_tables

NEAR = 2.0
"""Points of accuracy by which a published number may be missed."""
MEASURES = {
    "average": lambda values: values.mean(1),
    "worst": lambda values: values.min(1),
}
OURS = "SCAFF-PD"


def run(context: Context) -> Outcome:
    """Run both protocols, each chosen on its own validation images."""
    parts = [_protocol(context, name) for name in context.settings["protocols"]]
    tables = {key: table for one in parts for key, table in one.tables.items()}
    figures = {key: drawn for one in parts for key, drawn in one.figures.items()}
    checks = [check for one in parts for check in one.checks]
    return Outcome(checks, tables, figures, [p for one in parts for p in one.problems])


def _protocol(context: Context, name: str) -> Outcome:
    protocol = context.settings["protocols"][name]
    settings = merge_tables(context.settings, protocol)
    mine = replace(context, settings=settings, out=context.out / name)
    variants, searched = choose(mine, lambda history: validation_score(history, tail=0))
    found, problems = run_variants(mine, variants, settings["seeds"])
    found = {method: runs for method, runs in found.items() if runs}
    tables = {
        f"{name}-accuracy": accuracy_table(found, MEASURES, by_client=True, fraction=1 / 3),
        f"{name}-published": beside(found, protocol["published"], protocol["source"]),
        f"{name}-grid": searched,
    }
    lines = {m: Line.of_seeds([0, 1, 2], percentages(found[m]), dots=True) for m in found}
    drawn = figure(
        lines, title=protocol["source"], y_label="test accuracy, %",
        x_label="0 T-shirt, 1 pullover, 2 shirt (band: all seeds)",
    )  # fmt: skip
    out = checks(found, protocol["published"], protocol["source"])
    return Outcome(out, tables, {f"{name}-accuracy": drawn}, problems)


def worst(found: Histories, method: str) -> Any:
    """Return the accuracy of the worst client in %, seed by seed."""
    return percentages(found[method]).min(1)


def beside(found: Histories, published: Mapping[str, float], source: str) -> Table:
    """Return the published worst accuracies beside ours."""
    rows = [
        [m, published.get(m), with_interval(worst(found, m)) if m in found else None]
        for m in dict.fromkeys([*published, *found])
    ]
    return Table(f"Worst client in %, {source}", ("method", "published", "here, ± 95 %"), rows)


def checks(found: Histories, published: Mapping[str, float], source: str) -> list[Check]:
    """Compare numbers and order with the published ones, then SCAFF-PD with the best of them."""
    means = {m: mean_interval(worst(found, m)) for m in found}
    out = []
    if OURS in found:
        rival = max((m for m in found if m != OURS), key=lambda m: means[m].estimate)
        change = paired_difference(worst(found, OURS), worst(found, rival))
        out.append(Check(
            f"{OURS} serves the worst client at least as well as every method of the table",
            "our aim",
            f"{OURS} {with_interval(means[OURS])}, best other {rival} "
            f"{with_interval(means[rival])}; within seeds {with_limits(change, ' points')}",
            change.estimate >= 0,
        ))  # fmt: skip
        best = max(published, key=lambda m: published[m])
        out.append(Check(
            f"{OURS} reaches the best published number, {best} {published[best]:g}", "our aim",
            f"{with_interval(means[OURS])}", means[OURS].estimate >= published[best],
        ))  # fmt: skip
    there = [m for m in sorted(published, key=lambda m: published[m]) if m in found]
    here = sorted(there, key=lambda m: means[m].estimate)
    out.append(Check(
        f"worst client, from low to high: {', '.join(there)}", source,
        f"here: {', '.join(f'{m} {with_interval(means[m])}' for m in here)}", here == there,
    ))  # fmt: skip
    for method in there:
        missed = means[method].estimate - published[method]
        out.append(Check(
            f"{method}: worst client {published[method]:g} %", source,
            f"{with_interval(means[method])}", bool(np.abs(missed) <= NEAR),
            f"agree: at most {NEAR:g} points away",
        ))  # fmt: skip
    return out
