"""A small CNN on FEMNIST's writers, whose every image is tested once over the folds.

Accuracies are of all folds' predictions together, writer by writer. The worst 20 % stand beside
their chance floor, what they would be if all writers were served equally; the spread beyond chance
is the standard deviation of the true accuracies. Intervals are over writers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from experiments.harness.drawing import Line, figure
from experiments.harness.experiment import Cell, Check, Context, Outcome, Table
from experiments.harness.network_runs import run_all
from experiments.harness.network_task import (
    ALONE,
    BASE,
    BESIDE,
    COPIES,
    FAIR,
    FAIR_MEAN,
    MEAN,
    MOMENTUM,
    OURS,
    OWN_KINDS,
    PLAIN_OURS,
    Result,
    Task,
    add_own_rows,
    own_row,
    read_result,
)
from numpy.typing import NDArray

from equifed.metrics import chance_floor, compare_to_chance, variance_beyond_chance, worst_fraction
from equifed.runs import merge_tables

Array = NDArray[np.float64]
Counts = tuple[Array, Array]
"""Correct predictions and test images of every writer in the table."""

Both = Callable[[str, str], tuple[int, Mapping[str, Counts]]]
"""The counts of two methods on the folds that both have, after the number of these."""

TUNED = f"{BASE}, {OWN_KINDS['all']}"
TAIL, DRAWS = 0.2, 2000


def copied(method: str) -> str:
    """Return what a method is called that sees distorted copies of the training images."""
    return f"{method}, {COPIES}"


COPIED_OURS, COPIED_BASE = copied(OURS), copied(BASE)
COPIED_TUNED = f"{COPIED_BASE}, {OWN_KINDS['all']}"


def run(context: Context) -> Outcome:
    """Carry out the runs, pool the folds, and compare."""
    settings = context.settings
    own = [alone(context, fold) for fold in settings["seeds"]]
    found = run_all(context, own)
    results = {
        **add_own_rows(found.results, found.preferred),
        ALONE: {t.seed: read_result(t.path) for t in own if t.complete},
    }
    results = {method: folds for method, folds in results.items() if folds}
    if not results:
        raise ValueError("No method has a complete run yet; run it again to go on.")
    names = next(iter(next(iter(results.values())).values())).names
    pooled = {method: pool(folds) for method, folds in results.items()}
    most = np.max([sizes for _, sizes in pooled.values()], axis=0)
    kept = most >= settings["least"]
    counts = {m: (c[kept], s[kept]) for m, (c, s) in pooled.items()}
    named = [name for name, keep in zip(names, kept, strict=True) if keep]

    def both(method: str, base: str) -> tuple[int, dict[str, Counts]]:
        """Return two methods' counts on the folds that both have, and how many these are."""
        shared = sorted(set(results[method]) & set(results[base]))
        pairs = {m: pool({s: results[m][s] for s in shared}) for m in (method, base)}
        return len(shared), {m: (c[kept], s[kept]) for m, (c, s) in pairs.items()}

    tables = {
        "methods": methods_table(counts, results, found.runs_of_rows()),
        "against": differences_table(counts, both, found.preferred),
        "left": left_table(counts, named),
        "choice": found.choice,
        "writers": writers_table(counts, named),
    }
    return Outcome(checks(counts, both, settings), tables, {"average-and-worst": drawn(counts)},
                   found.problems)  # fmt: skip


# -- measuring ------------------------------------------------------------------------------------


def alone(context: Context, fold: int) -> Task:
    """Return the task of every writer's own network on a fold, each trained by itself."""
    settings, path = context.settings, context.out / "runs" / f"alone-{fold}.json"
    algorithm = {"name": "fedavg", "local": settings["alone"]}
    more = {"data": {"fold": fold}, "seed": fold, "algorithm": algorithm}
    return Task(ALONE, "", merge_tables(settings["run"], more), fold, path)


def pool(folds: Mapping[int, Result]) -> Counts:
    """Return each writer's correct predictions and test images over all folds."""
    correct, sizes = 0.0, 0.0
    for one in folds.values():
        m = one.sizes["test"]
        correct = correct + np.where(m > 0, np.round(np.nan_to_num(one.accuracy["test"]) * m), 0.0)
        sizes = sizes + m
    return np.asarray(correct), np.asarray(sizes)


def shares(counts: Counts) -> Array:
    """Return accuracies in % of the writers that have test images."""
    correct, sizes = counts
    return 100 * correct[sizes > 0] / sizes[sizes > 0]


def floor(counts: Counts) -> float:
    """Return the worst 20 % in % if all writers were served equally."""
    sizes = counts[1][counts[1] > 0]
    return 100 * chance_floor(sizes, float(counts[0].sum() / sizes.sum()), TAIL)


def beyond_chance(counts: Counts) -> float:
    """Return the standard deviation of the true accuracies, in points."""
    known = counts[1] > 0
    return 100 * math.sqrt(max(0.0, variance_beyond_chance(counts[0][known], counts[1][known])))


MEASURES: dict[str, Callable[[Counts], float]] = {
    "average, %": lambda counts: float(shares(counts).mean()),
    "worst 20 %, %": lambda counts: float(
        worst_fraction(shares(counts), TAIL, higher_is_better=True)
    ),
    "its chance floor, %": floor,
    "standard deviation": lambda counts: float(shares(counts).std()),
    "spread beyond chance": beyond_chance,
}
COMPARED = ("average, %", "worst 20 %, %", "spread beyond chance")


def difference(counts: Mapping[str, Counts], method: str, base: str, measure: str) -> Array:
    """Return a measure's difference and its 95 % limits, writers drawn again with replacement."""
    draw, change = np.random.default_rng(0), MEASURES[measure]
    first, second = counts[method], counts[base]
    whole = change(first) - change(second)
    drawn = []
    for _ in range(DRAWS):
        rows = draw.integers(0, len(first[0]), len(first[0]))
        pair = [(c[rows], s[rows]) for c, s in (first, second)]
        drawn.append(change(pair[0]) - change(pair[1]))
    return np.array([whole, *np.quantile(drawn, [0.025, 0.975])])


# -- tables ---------------------------------------------------------------------------------------


def methods_table(
    counts: Mapping[str, Counts],
    results: Mapping[str, Mapping[int, Any]],
    runs: Mapping[str, tuple[int, int]],
) -> Table:
    """Return every method's measures, and how many runs they took."""
    rows: list[list[Cell]] = []
    for method, one in counts.items():
        values = [round(f(one), 2) for f in MEASURES.values()]
        known = one[1] > 0
        unequal = len(compare_to_chance(one[0][known], one[1][known]).underserved)
        begun, ended = runs.get(method, (0, 0))
        images = f"{int(one[1].min())} to {int(one[1].max())}"
        rows.append([method, len(results[method]), int(known.sum()), images, *values, unequal,
                     begun, ended])  # fmt: skip
    titles = ("method", "folds", "writers", "test images of a writer", *MEASURES,
              "writers below chance", "runs begun", "runs ended")  # fmt: skip
    return Table("Test accuracy of all folds together, writer by writer", titles, rows)


def differences_table(
    counts: Mapping[str, Counts], both: Both, preferred: Mapping[str, str]
) -> Table:
    """Return differences to FedAvg, what each part makes, and of ours to all without copies."""
    pairs = [(m, BASE) for m in counts if m != BASE and BASE in counts]
    explained = [(FAIR, MOMENTUM), (MEAN, MOMENTUM), (FAIR_MEAN, FAIR), (FAIR_MEAN, MEAN),
                 (PLAIN_OURS, MEAN),
                 (copied(FAIR_MEAN), copied(MEAN)), (COPIED_OURS, COPIED_BASE),
                 (COPIED_OURS, copied(PLAIN_OURS)), (COPIED_OURS, COPIED_TUNED)]  # fmt: skip
    explained += [(FAIR, m) for m in BESIDE] + [(MOMENTUM, m) for m in BESIDE]
    kinds = ("shares", "offsets", "all")
    explained += [(own_row(m, more, preferred), own_row(m, less, preferred))
                  for m in preferred for less, more in pairwise(kinds)]  # fmt: skip
    pairs += [pair for pair in explained if set(pair) <= set(counts)]
    pairs += [(OURS, m) for m in counts
              if OURS in counts and m not in (BASE, OURS) and COPIES not in m]  # fmt: skip
    rows: list[list[Cell]] = []
    for m, b in dict.fromkeys(pairs):
        folds, shared = both(m, b)
        if folds:
            told = (_told(difference(shared, m, b, k)) for k in COMPARED)
            rows.append([f"{m} minus {b}", folds, *told])
    title = "Differences in points on the folds that both have, 95 % limits over writers"
    return Table(title, ("methods", "folds", *COMPARED), rows)


def _told(limits: Array) -> str:
    return f"{limits[0]:+.1f} ({limits[1]:+.1f} to {limits[2]:+.1f})"


def left_table(counts: Mapping[str, Counts], names: list[str]) -> Table:
    """Name the writers that a method serves worse than chance explains."""
    rows: list[list[Cell]] = []
    for method in (m for m in (BASE, TUNED, MOMENTUM, PLAIN_OURS, FAIR, OURS, COPIED_OURS)
                   if m in counts):  # fmt: skip
        correct, sizes = counts[method]
        known = np.flatnonzero(sizes > 0)
        low = compare_to_chance(correct[known], sizes[known]).underserved
        for i in known[list(low)]:
            others = {m: c[i] / s[i] for m, (c, s) in counts.items() if s[i] > 0}
            best = max(others, key=lambda m: others[m])
            rows.append([method, names[i], int(sizes[i]), round(100 * correct[i] / sizes[i], 1),
                         f"{best}: {100 * others[best]:.1f}"])  # fmt: skip
    columns = ("method", "writer", "test images", "accuracy, %", "best method for this writer, %")
    return Table("Writers that are served worse than chance explains", columns, rows)


def writers_table(counts: Mapping[str, Counts], names: list[str]) -> Table:
    """Return every writer's accuracy with every method."""
    rows: list[list[Cell]] = []
    for i, name in enumerate(names):
        values: list[Cell] = [
            round(100 * float(c[i] / s[i]), 1) if s[i] else None for c, s in counts.values()
        ]
        rows.append([name, int(max(s[i] for _, s in counts.values())), *values])
    return Table("Every writer, accuracy in %", ("writer", "test images", *counts), rows)


def drawn(counts: Mapping[str, Counts]) -> str:
    """Draw average against the worst 20 % of the rows that a reader compares first.

    SCAFFOLD diverges and alone is far below: beside them the others would be one dot.
    """
    names = {BASE: BASE, MOMENTUM: "server momentum", FAIR: FAIR, OURS: OURS, "AFL": "AFL",
             "DRFA": "DRFA", "PropFair": "PropFair", "FedMGDA+": "FedMGDA+", "q-FFL": "q-FFL",
             TUNED: TUNED, COPIED_BASE: COPIED_BASE, COPIED_OURS: COPIED_OURS}  # fmt: skip
    lines = {
        words: Line([MEASURES["average, %"](counts[m])], [MEASURES["worst 20 %, %"](counts[m])],
                    dots=True)
        for m, words in names.items() if m in counts
    }  # fmt: skip
    return figure(lines, title="Test accuracy", x_label="average, %", y_label="worst 20 %, %")


def checks(counts: Mapping[str, Counts], both: Both, settings: Mapping[str, Any]) -> list[Check]:
    """Hold the aims against what came out."""
    means = {m: {k: f(c) for k, f in MEASURES.items()} for m, c in counts.items()}
    wanted, out = settings["wanted"], []
    best = max((m for m in (BASE, MOMENTUM) if m in means),
               key=lambda m: means[m]["average, %"], default=None)  # fmt: skip
    if best is not None:
        value = means[best]["average, %"]
        out.append(Check(f"FedAvg's average is at least {wanted['average']:g} %", "our aim",
                         f"{best} {value:.1f} %", value >= wanted["average"]))  # fmt: skip
    for ours, base in ((OURS, BASE), (COPIED_OURS, COPIED_BASE)):
        folds, shared = both(ours, base) if {base, ours} <= set(means) else (0, {})
        if folds:
            before, after = (beyond_chance(shared[m]) for m in (base, ours))
            less = 1 - after / before if before > 0 else 0.0
            out.append(Check(
                f"{ours} has a spread beyond chance at least {wanted['smaller']:.0%} below that of "
                f"{base}",
                "our aim",
                f"{base} {before:.2f}, {ours} {after:.2f} points, {less:.0%} less; "
                f"difference {_told(difference(shared, ours, base, 'spread beyond chance'))}",
                less >= wanted["smaller"],
            ))  # fmt: skip
    for method, base in ((FAIR, BASE), (FAIR, MOMENTUM), (OURS, PLAIN_OURS), (OURS, TUNED),
                         (COPIED_OURS, COPIED_TUNED)):  # fmt: skip
        folds, shared = both(method, base) if {method, base} <= set(counts) else (0, {})
        if folds:
            limits = difference(shared, method, base, "worst 20 %, %")
            out.append(Check(
                f"{method} does not serve the worst fifth worse than {base}", "our aim",
                f"{_told(limits)} points", limits[0] >= 0,
                "" if limits[2] < 0 or limits[1] > 0 else "writers do not tell the two apart",
            ))  # fmt: skip
    return out or [Check("aims", "our aim", "the methods compared have not run", False)]
