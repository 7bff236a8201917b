"""DRFA on clients that nobody had to make: two of Adult, and roles of Shakespeare.

DRFA's Section 6 names both data sets and leaves the results to an appendix that is not in the text
we have. What it claims in general is compared: the worst accuracy of the baselines in fewer rounds,
and the average accuracy of FedAvg kept. Models, step sizes and sizes are ours and are said in
``experiments/NAME/README.md``; every method's settings are chosen on validation samples.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from equifed import History
from equifed.metrics import Interval, paired_difference
from experiments.harness.choice import choose
from experiments.harness.drawing import draw_rounds
from experiments.harness.experiment import Cell, Check, Context, Outcome, Table
from experiments.harness.measures import (
    Answers,
    accuracy_table,
    rounds_to,
    series,
    validation_score,
    with_limits,
)
from experiments.harness.own_rows import fit_alone, own_checks
from experiments.harness.running import Histories, run_variants

SOURCE = "DRFA, Section 6 and Fig. 2 (on Fashion-MNIST; no result on this data set in the text)"
ROUNDING = 1e-9
"""Of a share that was a percentage: a method is at the level that it has itself."""
SAME_LEVEL = 1.0
"""Points of accuracy by which DRFA may be behind and still be said to keep a level."""


def run(context: Context) -> Outcome:
    """Compare the methods and nothing else."""
    return compare(context)[0]


def compare(context: Context) -> tuple[Outcome, Histories]:
    """Choose settings on validation samples, then compare rounds and accuracies on test samples."""
    variants, searched = choose(context, lambda history: validation_score(history, tail=0))
    found, problems = run_variants(context, variants, context.settings["seeds"])
    found = {name: runs for name, runs in found.items() if runs}
    alone: Answers = {}
    if (like := context.settings.get("alone")) is not None:
        alone, failed = fit_alone(context, variants[like])
        problems += failed
    measures = {
        "worst": lambda values: values.min(1),
        "average": lambda values: values.mean(1),
        "standard deviation": lambda values: values.std(1),
    }
    clients = len(next(h.names for runs in found.values() for h in runs.values()))
    shown = {"by_client": clients <= 5, "fraction": 1 / clients, "alone": alone}
    tables = {
        "accuracy": accuracy_table(found, measures, **shown),
        "rounds": rounds_table(found),
        "grid": searched,
    }
    figures = {
        "worst-accuracy": draw_rounds(found, list(found), "worst", "Worst client"),
        "average-accuracy": draw_rounds(found, list(found), "average", "Average over clients"),
        "standard-deviation": draw_rounds(found, list(found), "deviation", "Spread over clients"),
    }
    out = [*checks(found), *(own_checks(found, alone, 1 / clients) if alone else [])]
    return Outcome(out, tables, figures, problems), found


def rounds_to_level(ours: History, theirs: History) -> tuple[float, float]:
    """Return when both first have the worst test accuracy that ``theirs`` has at its end."""
    level = series(theirs, "worst")[1][-1] / 100 - ROUNDING
    return rounds_to(ours, level), rounds_to(theirs, level)


def _rounds(found: Histories, other: str) -> dict[int, tuple[float, float]]:
    """Return, for each seed, the rounds of DRFA and of the other method to the other's level."""
    both = sorted(set(found["DRFA"]) & set(found[other]))
    return {seed: rounds_to_level(found["DRFA"][seed], found[other][seed]) for seed in both}


def rounds_table(found: Histories) -> Table:
    """Return how soon DRFA has the worst accuracy that each other method has at its end."""
    rows: list[list[Cell]] = []
    for other in found:
        if other != "DRFA":
            for seed, (ours, theirs) in _rounds(found, other).items():
                level = float(series(found[other][seed], "worst")[1][-1])
                reached = None if np.isinf(ours) else ours
                rows.append([other, seed, level, reached, theirs])
    columns = ("method", "seed", "its worst accuracy at the end, %", "DRFA has it in round",
               "the method first had it in round")  # fmt: skip
    return Table("Rounds to the worst accuracy of the other methods", columns, rows)


def checks(found: Histories) -> list[Check]:
    """Compare with what the paper says of DRFA in general."""
    out = [_sooner(found, other) for other in ("AFL", "q-FedAvg") if other in found]
    for other in [name for name in ("AFL", "q-FedAvg", "FedAvg") if name in found]:
        change = _end(found, other, "worst")
        more = other == "FedAvg"
        out.append(
            Check(
                f"DRFA ends {'above' if more else 'at the level of'} the worst accuracy of {other}",
                SOURCE,
                _points(change, other, found),
                change.estimate > (0 if more else -SAME_LEVEL),
            )
        )
    change = _end(found, "FedAvg", "average")
    out.append(
        Check(
            "DRFA keeps the level of FedAvg's average accuracy",
            "DRFA, Fig. 3 (training accuracy on Fashion-MNIST there, test accuracy here)",
            _points(change, "FedAvg", found),
            change.estimate > -SAME_LEVEL,
        )
    )
    return out


def _sooner(found: Histories, other: str) -> Check:
    pairs = np.array(list(_rounds(found, other).values()))
    ours, theirs = np.median(pairs, axis=0)
    last = max(h.rounds[-1].round for h in found["DRFA"].values())
    said = f"round {ours:g}" if np.isfinite(ours) else f"not in {last} rounds"
    return Check(
        f"DRFA needs fewer rounds than {other} for the same worst accuracy",
        SOURCE,
        f"the worst accuracy that {other} has at its end: DRFA {said}, {other} round {theirs:g} "
        f"(medians of {len(pairs)} seeds)",
        bool(ours < theirs),
    )


def _end(found: Mapping[str, Mapping[int, History]], other: str, what: str) -> Interval:
    """Return DRFA's accuracy at the end less the other method's, within seeds."""
    both = sorted(set(found["DRFA"]) & set(found[other]))
    ours, theirs = (
        [float(series(found[name][seed], what)[1][-1]) for seed in both] for name in ("DRFA", other)
    )
    return paired_difference(ours, theirs)


def _points(change: Interval, other: str, found: Histories) -> str:
    return f"DRFA less {other} within {len(found[other])} seeds: {with_limits(change, ' points')}"
