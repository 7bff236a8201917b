"""FedMDFG's tables: 100 clients of two shards each, ten a round; average, spread and worst client.

The worst of 100 clients with 100 test images each is low by chance alone: the floor is what it
would be on average if all were served equally (:func:`equifed.metrics.chance_floor` of the smallest
one).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equifed.metrics import chance_floor, paired_difference, variance_beyond_chance, worst_fraction
from experiments.harness.drawing import Line, figure
from experiments.harness.experiment import Cell, Check, Context, Outcome, Table
from experiments.harness.measures import with_interval, with_limits
from experiments.harness.network_runs import run_all
from experiments.harness.network_task import Result, with_samples

Array = NDArray[np.float64]
Found = Mapping[str, Mapping[int, Result]]
SOURCE, BASE, OURS = "FedMDFG (Pan et al. 2023)", "FedAvg", "tuned SCAFF-PD"
GIVEN = "FedAvg, lr 0.1"
"""FedAvg with a step size that was not chosen, where the chosen one diverges in a seed."""


def floor_of_minimum(result: Result) -> float:
    """Return what the worst client would have if all were served equally well."""
    values, sizes = result.accuracy["test"], result.sizes["test"]
    return chance_floor(sizes, float(values @ sizes / sizes.sum()), 1 / len(values))


def beyond_chance(result: Result) -> float:
    """Return the standard deviation of the true accuracies; 0 where chance explains all of it."""
    values, sizes = result.accuracy["test"], result.sizes["test"]
    return math.sqrt(max(0.0, variance_beyond_chance(np.round(values * sizes), sizes)))


MEASURES: dict[str, Callable[[Result], float]] = {
    "average": lambda one: float(one.accuracy["test"].mean()),
    "standard deviation": lambda one: float(one.accuracy["test"].std()),
    "worst": lambda one: float(one.accuracy["test"].min()),
    "floor of the worst": floor_of_minimum,
    "worst 20 %": lambda one: float(
        worst_fraction(one.accuracy["test"], 0.2, higher_is_better=True)
    ),
    "spread beyond chance": beyond_chance,
}


def run(context: Context) -> Outcome:
    """Carry out the runs, and put the published numbers beside ours."""
    settings, all_runs = context.settings, run_all(context)
    found = {
        m: {seed: with_samples(one) for seed, one in runs.items()}
        for m, runs in all_runs.results.items()
    }
    if not found:
        raise ValueError("No method has a complete run yet; run it again to go on.")
    tables = {"methods": methods_table(found, settings.get("published", {}), all_runs.runs),
              "choice": all_runs.choice, "clients": clients_table(found)}  # fmt: skip
    if BASE in found and len(found) > 1:
        tables["against"] = differences_table(found)
    lines = {m: Line([column(found, m, "average").mean()], [column(found, m, "worst").mean()],
                     dots=True) for m in found}  # fmt: skip
    drawn = figure(lines, title="Test accuracy, mean over seeds", x_label="average",
                   y_label="worst client")  # fmt: skip
    return Outcome(checks(found, settings), tables, {"average-and-worst": drawn}, all_runs.problems)


def column(found: Found, method: str, measure: str) -> Array:
    """Return a measure of a method, seed by seed."""
    return np.array([MEASURES[measure](one) for one in found[method].values()])


def methods_table(
    found: Found, published: Mapping[str, Any], runs: Mapping[str, tuple[int, int]]
) -> Table:
    """Return every method's measures, the published ones beside them, and how many runs it took."""
    rows: list[list[Cell]] = []
    for method in [*found, *(m for m in published if m not in found)]:
        shown: list[Cell] = [None] * len(MEASURES)
        if method in found:
            shown = [with_interval(column(found, method, m), ".3f") for m in MEASURES]
        told = " / ".join(f"{v:g}" for v in published.get(method, [])) or None
        begun, ended = runs.get(method, (0, 0))
        rows.append([method, len(found.get(method, {})), *shown, told, begun, ended])
    titles = ("method", "seeds", *MEASURES, "published average / deviation / worst",
              "runs begun", "runs ended")  # fmt: skip
    return Table("Test accuracy, mean over seeds ± 95 %", titles, rows)


def differences_table(found: Found) -> Table:
    """Return what methods have more than FedAvg, and ours than all, over the seeds of both."""
    pairs = [(m, BASE) for m in found if m != BASE]
    pairs += [(OURS, m) for m in found if OURS in found and m not in (OURS, BASE)]
    shown, rows = ("average", "worst", "worst 20 %"), list[list[Cell]]()
    for method, other in pairs:
        both = [s for s in found[method] if s in found[other]]
        if both:
            changes = [paired_difference(*(
                [100 * MEASURES[k](found[m][s]) for s in both] for m in (method, other)
            )) for k in shown]  # fmt: skip
            rows.append([method, other, len(both), *map(with_limits, changes)])
    return Table("Points more within seeds, 95 % limits",
                 ("method", "more than", "seeds", *shown), rows)  # fmt: skip


def clients_table(found: Found) -> Table:
    """Return every client's accuracy."""
    rows: list[list[Cell]] = [
        [method, seed, name, round(float(value), 4), int(size)]
        for method, runs in found.items()
        for seed, one in runs.items()
        for name, value, size in zip(
            one.names, one.accuracy["test"], one.sizes["test"], strict=True
        )
    ]
    columns = ("method", "seed", "client", "test accuracy", "test images")
    return Table("Every client", columns, rows)


def checks(found: Found, settings: Mapping[str, Any]) -> list[Check]:
    """Hold published numbers and aims against what came out."""
    means = {m: {k: float(column(found, m, k).mean()) for k in MEASURES} for m in found}
    out = []
    for method, told in settings.get("published", {}).items():
        if method in means:
            average, _, worst = told
            ours = means[method]
            near = ours["average"] >= average - 0.02 and ours["worst"] >= worst - 0.05
            out.append(Check(
                f"{method}: average {average:g}, worst {worst:g}", SOURCE,
                f"average {ours['average']:.3f}, worst {ours['worst']:.3f} ({len(found[method])} "
                "seeds)",
                near, "agree: at most 0.02 and 0.05 below; test images are dealt otherwise there",
            ))  # fmt: skip
    if OURS in means:
        ours, wanted = means[OURS], settings.get("wanted", {})
        others = ("the best of the other published methods", "FedMDFG") if wanted else ()
        for place, words in enumerate(others):
            out.append(Check(
                f"{OURS} exceeds {words}: average {wanted['average'][place]:g}, worst "
                f"{wanted['worst'][place]:g}", "our aim",
                f"average {ours['average']:.3f}, worst {ours['worst']:.3f}; floor of the worst "
                f"{ours['floor of the worst']:.3f}",
                all(ours[k] > wanted[k][place] for k in wanted),
            ))  # fmt: skip
        for base in (one for one in (BASE, GIVEN) if one in means):
            change = means[OURS]["worst 20 %"] - means[base]["worst 20 %"]
            doubt = "it failed to train in a seed: see the next" if base == BASE else ""
            out.append(Check(f"{OURS} does not serve the worst fifth worse than {base}", "our aim",
                             f"{100 * change:+.1f} points", change >= 0,
                             doubt if GIVEN in means else ""))  # fmt: skip
    return out or [Check("published numbers", SOURCE, "no method of the table has run", False)]
