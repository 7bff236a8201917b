"""SCAFF-PD's Tables 1, 2 and 4 on CIFAR-100: ten methods, a linear model on frozen features.

The parts are those of ``scaff-pd-cifar10``; ``plan.md`` was committed before the first run and says
which comparison decides. Accuracies of every client, split and seed are stored.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from experiments.harness.experiment import EXPERIMENTS, Check, Context, Outcome, Settings
from experiments.harness.measures import clients_table, with_limits
from experiments.harness.networks import prepared
from experiments.harness.running import Histories
from numpy.typing import NDArray

from equifed.metrics import paired_difference
from equifed.report import slug
from equifed.runs import merge_tables

Array = NDArray[np.float64]
CIFAR = EXPERIMENTS["scaff-pd-cifar10"].module
OURS, BEYOND = "SCAFF-PD", "FairNewton"
"""FairNewton is not in the paper; no claim of the paper is about it."""


def run(context: Context) -> Outcome:
    """Compute the features, choose every method's settings once, compare test accuracies."""
    settings = context.settings
    files = {k: prepared(k, one, context.console) for k, one in settings["features"].items()}
    best, grid = CIFAR.choose_all(context, files)
    found: dict[str, Histories] = {}
    problems: list[str] = []
    for title in settings["scenarios"]:
        scenario = settings["scenario"][title]
        variants = {
            method: merge_tables(best[scenario["features"], method], scenario.get("change", {}))
            for method in settings["methods"]
        }
        found[title], failed = CIFAR.run_titled(context, title, variants)
        problems += failed
    results = {title: CIFAR.ends(one) for title, one in found.items()}
    tables = {slug(t): CIFAR.write_scenario(t, results[t], found[t], settings) for t in results} | {
        "grid": grid,
        "clients": clients_table(found),
    }
    return Outcome([decide(results, settings), *compare(results, settings)], tables, {}, problems)


def decide(results: Mapping[str, Mapping[str, Array]], settings: Settings) -> Check:
    """Return the one comparison that the plan says decides."""
    title, rival, margin = (settings["decides"][key] for key in ("setting", "rival", "margin"))
    ours, theirs = (results[title][name][:, 1] for name in (OURS, rival))
    limits = paired_difference(ours, theirs)
    agrees = bool(limits.estimate >= margin and limits.lower > 0)
    why = "" if agrees or limits.upper < margin else "the interval includes the margin: undecided"
    return Check(
        f"{OURS} serves the worst 20 % better than {rival} by at least {margin:g} point at {title}",
        "SCAFF-PD, Table 1 (29.30 against 26.77); decides, by plan.md",
        f"{ours.mean():.1f} against {theirs.mean():.1f}; paired over {len(ours)} partitions "
        f"{with_limits(limits, ' points')}",
        agrees,
        why,
    )


def compare(results: Mapping[str, Mapping[str, Array]], settings: Settings) -> list[Check]:
    """Return whether ours has the best worst-20 % of the paper's methods, in every setting."""
    out = []
    for title, by_method in results.items():
        scenario = settings["scenario"][title]
        others = {m: v[:, 1].mean() for m, v in by_method.items() if m not in (OURS, BEYOND)}
        second = max(others, key=others.__getitem__)
        ours = by_method[OURS][:, 1]
        limits = paired_difference(ours, by_method[second][:, 1])
        printed = scenario["published"]
        out.append(
            Check(
                f"{title}: {OURS} has the best worst-20 % ({printed[OURS][1]:.2f} printed)",
                scenario["source"],
                f"{OURS} {ours.mean():.1f}, best other {second} {others[second]:.1f}; paired "
                f"{with_limits(limits, ' points')}",
                bool(ours.mean() > others[second]),
                "the interval includes 0" if limits.lower < 0 < limits.upper else "",
            )
        )
    return out
