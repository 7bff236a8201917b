"""A CNN on CIFAR-10 under label skew: all network methods, with and without an own output bias.

Measures are of one seed's clients, those with test images; tables show means over seeds, and
differences within seeds. An own bias after training is fitted to held-out outputs of a network
that was trained without one (``history.personalise``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from experiments.harness.drawing import Line, figure
from experiments.harness.experiment import Cell, Check, Context, Outcome, Settings, Table
from experiments.harness.measures import beyond_chance, floor, with_limits
from experiments.harness.network_parts import image_pool
from experiments.harness.network_runs import run_all
from experiments.harness.network_task import (
    ALONE,
    BASE,
    BESIDE,
    FAIR,
    FAIR_MEAN,
    MAJORITY,
    MEAN,
    MOMENTUM,
    OURS,
    OWN_KINDS,
    PLAIN_OURS,
    Result,
    add_own_rows,
    with_samples,
)
from experiments.harness.shards_table import clients_table
from numpy.typing import NDArray

from equifed.metrics import Interval, mean_interval, paired_difference, worst_fraction

Array = NDArray[np.float64]
Found = Mapping[str, Mapping[int, Result]]
MOST_FREQUENT, TAIL = "majority class", 0.2
MEASURES: dict[str, Callable[[Array, Array], float]] = {
    "average, %": lambda values, sizes: 100 * float(values.mean()),
    "worst 20 %, %": lambda values, sizes: 100 * float(
        worst_fraction(values, TAIL, higher_is_better=True)
    ),
    "its chance floor, %": lambda values, sizes: floor(values, sizes, TAIL),
    "standard deviation": lambda values, sizes: 100 * float(values.std()),
    "spread beyond chance": beyond_chance,
}  # fmt: skip
AVERAGE, WORST = "average, %", "worst 20 %, %"
COMPARED = (AVERAGE, WORST, "spread beyond chance")


def run(context: Context) -> Outcome:
    """Carry out the runs, and compare."""
    if context.settings["finish"]:
        store_images(context.settings)
    found = run_all(context)
    results: dict[str, dict[int, Result]] = {}
    for method, runs in add_own_rows(found.results, found.preferred).items():
        results[method] = {seed: with_samples(one) for seed, one in runs.items()}
    runs = found.results.get(MOMENTUM, {})
    known = {s: with_samples(r, MAJORITY) for s, r in runs.items() if MAJORITY in r.accuracy}
    results |= {MOST_FREQUENT: known} if known else {}
    if not results:
        raise ValueError("No method has a complete run yet; run it again to go on.")
    counted = {**found.runs_of_rows(), MOST_FREQUENT: found.runs.get(MOMENTUM, (0, 0))}
    tables = {
        "methods": methods_table(results, counted),
        "against": differences_table(results),
        "choice": found.choice,
        "clients": clients_table(results),
    }
    drawn = {"average-and-worst": draw(results)}
    return Outcome(checks(results, context.settings), tables, drawn, found.problems)


# -- measuring ------------------------------------------------------------------------------------


def store_images(settings: Settings) -> None:
    """Make the file that all runs read, of standardised images, if it is not there."""
    path = Path(settings["run"]["data"]["path"])
    if path.exists():
        return
    stored: dict[str, Any] = {"about": f"the first of {settings['images']}, colours standardised"}
    for (x, y), split in zip(image_pool(settings["images"]), ("train", "test"), strict=True):
        count = settings[f"{split}_images"]
        if len(y) < count:
            raise ValueError(f"{settings['images']} has {len(y)} {split} images, not {count}.")
        stored |= {f"x_{split}": x[:count], f"y_{split}": y[:count]}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **stored)


def column(runs: Mapping[int, Result], measure: str) -> dict[int, float]:
    """Return a measure by seed."""
    change = MEASURES[measure]
    return {s: change(one.accuracy["test"], one.sizes["test"]) for s, one in runs.items()}


def difference(found: Found, method: str, base: str, measure: str) -> tuple[int, Interval]:
    """Return on how many seeds two methods have run, and a measure's difference within them."""
    first, second = column(found[method], measure), column(found[base], measure)
    both = [seed for seed in first if seed in second]
    return len(both), paired_difference([first[s] for s in both], [second[s] for s in both])


# -- tables ---------------------------------------------------------------------------------------


def methods_table(found: Found, runs: Mapping[str, tuple[int, int]]) -> Table:
    """Return every method's measures, how sure they are, and how many runs they took."""
    rows: list[list[Cell]] = []
    for method, results in found.items():
        told = {m: mean_interval(list(column(results, m).values())) for m in MEASURES}
        half = [(told[m].upper - told[m].lower) / 2 for m in (AVERAGE, WORST)]
        sizes = np.concatenate([one.sizes["test"] for one in results.values()])
        clients = sorted({len(one.names) for one in results.values()})
        rows.append([
            method, len(results), " or ".join(map(str, clients)),
            f"{int(sizes.min())} to {int(sizes.max())}",
            *(round(told[m].estimate, 2) for m in MEASURES),
            *(round(h, 2) if np.isfinite(h) else None for h in half),
            *runs.get(method, (0, 0)),
        ])  # fmt: skip
    titles = ("method", "seeds", "clients", "test images of a client", *MEASURES,
              "average, ± 95 %", "worst 20 %, ± 95 %", "runs begun", "runs ended")  # fmt: skip
    return Table("Test accuracy, mean over seeds", titles, rows)


def differences_table(found: Found) -> Table:
    """Return what ours has more than every other method, then what explains it."""
    pairs = [(OURS, m) for m in found if m != OURS]
    pairs += [(FAIR, BASE), (FAIR, MOMENTUM), (MEAN, MOMENTUM), (FAIR_MEAN, FAIR)]
    pairs += [(FAIR, m) for m in BESIDE] + [(MOMENTUM, m) for m in BESIDE]
    joint = f"{MEAN}, own bias"
    pairs += [(FAIR_MEAN, MEAN), (PLAIN_OURS, MEAN), (PLAIN_OURS, ALONE), (joint, MEAN)]
    after = f"{MOMENTUM}, {OWN_KINDS['bias']}"
    pairs += [(PLAIN_OURS, joint), (f"{FAIR_MEAN}, own bias", joint), (after, MOMENTUM)]
    rows: list[list[Cell]] = []
    for method, base in pairs:
        if {method, base} <= set(found):
            told = [difference(found, method, base, m) for m in COMPARED]
            if told[0][0]:
                shown = [with_limits(change) for _, change in told]
                rows.append([f"{method} minus {base}", told[0][0], *shown])
    title = "Differences in points within the seeds that both have, 95 % limits over seeds"
    return Table(title, ("methods", "seeds", *COMPARED), rows)


def draw(found: Found) -> str:
    """Draw average against the worst 20 %."""
    lines = {}
    for method, results in found.items():
        x, y = (float(np.mean(list(column(results, m).values()))) for m in (AVERAGE, WORST))
        lines[method] = Line([x], [y], dots=True)
    return figure(lines, title="Test accuracy, mean over seeds", x_label=AVERAGE, y_label=WORST)


# -- checks ---------------------------------------------------------------------------------------


def checks(found: Found, settings: Settings) -> list[Check]:
    """Hold the aims against what came out: first what the own bias alone explains."""
    out = []
    shared = [m for group in settings["groups"] for m in group
              if m in found and "own" not in settings["methods"][m].get("model", {})
              and m != ALONE]  # fmt: skip
    if {OURS, PLAIN_OURS} <= set(found):
        change = difference(found, OURS, PLAIN_OURS, WORST)[1]
        out.append(Check(f"ours does not serve the worst fifth worse than {PLAIN_OURS}, "
                         "beyond 95 %", "our aim", f"{with_limits(change)} points",
                         not change.upper < 0, _doubt(change)))  # fmt: skip
    if OURS in found and shared:
        means = {m: np.mean(list(column(found[m], WORST).values())) for m in shared}
        best = max(means, key=lambda m: means[m])
        change = difference(found, OURS, best, WORST)[1]
        out.append(Check(f"ours exceeds every method without an own part, {WORST[:-3]}", "our aim",
                         f"best: {best}; {with_limits(change)} points", change.estimate > 0,
                         _doubt(change)))  # fmt: skip
    for base in (BASE, MOMENTUM):
        if {FAIR, base} <= set(found):
            change = difference(found, FAIR, base, WORST)[1]
            out.append(Check(f"{FAIR} does not serve the worst fifth worse than {base}",
                             "our aim", f"{with_limits(change)} points", change.estimate >= 0,
                             _doubt(change)))  # fmt: skip
    if {PLAIN_OURS, MEAN} <= set(found):
        wanted, change = (
            settings["wanted"]["own bias"],
            difference(found, PLAIN_OURS, MEAN, WORST)[1],
        )
        out.append(Check(f"an own bias gains at least {wanted:g} points, {WORST[:-3]}", "our aim",
                         f"{with_limits(change)} points", change.estimate >= wanted))  # fmt: skip
    if {OURS, ALONE} <= set(found):
        changes = [difference(found, OURS, ALONE, m)[1] for m in (AVERAGE, WORST)]
        out.append(Check("ours exceeds networks of the clients' own, average and worst 20 %",
                         "our aim", " and ".join(map(with_limits, changes)),
                         all(c.estimate > 0 for c in changes)))  # fmt: skip
    return out or [Check("aims", "our aim", "the methods compared have not run", False)]


def _doubt(change: Interval) -> str:
    return "" if change.lower > 0 or change.upper < 0 else "seeds do not tell the two apart"
