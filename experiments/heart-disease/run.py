"""All methods on four hospitals.

There is no published number to match. Every method has the same number of tries, all chosen by the
mean of average and worst-20 % accuracy on validation samples; local steps, minibatch and rounds are
the same for all. What the papers claim in general is checked, and may come out as no. Methods as
published are compared with each other; those with an own part stand beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from experiments.harness.choice import choose
from experiments.harness.drawing import Line, figure
from experiments.harness.experiment import Check, Context, Outcome, Table
from experiments.harness.measures import (
    ALONE,
    Answers,
    answers,
    beyond_chance,
    fit_alone,
    floor,
    is_published,
    own_checks,
    per_client,
    validation_score,
    with_interval,
    with_limits,
)
from experiments.harness.running import Histories, run_variants
from numpy.typing import NDArray

from equifed import History
from equifed.metrics import (
    average_by_client,
    best_fraction,
    gini,
    mean_interval,
    standard_deviation,
    twenty_twenty,
    worst_fraction,
)

Array = NDArray[np.float64]
MEASURES = (
    *("average, %", "worst 20 %, %", "best 20 %, %", "standard deviation"),
    *("floor of the worst 20 %", "spread beyond chance", "R of losses", "Gini of losses"),
)
AVERAGE, WORST_FIFTH, UNFAIRNESS = 0, 1, 6
OF_LOSSES = 2
"""Measures of losses, the last ones."""
BASELINE = "FedAvg"
UNFAIR = ("FedAvg", "FedProx", "SCAFFOLD")
"""Methods for the average alone."""

TAIL = 0.2
DIGITS = (".4g", ".3g")


def of_accuracies(accuracy: Array, sizes: Array) -> list[float]:
    """Return the measures of accuracies on so many test samples each."""
    return [
        100 * average_by_client(accuracy),
        100 * worst_fraction(accuracy, TAIL, higher_is_better=True),
        100 * best_fraction(accuracy, TAIL, higher_is_better=True),
        100 * standard_deviation(accuracy),
        floor(accuracy, sizes, TAIL),
        beyond_chance(accuracy, sizes),
    ]


def measured(history: History) -> Array:
    """Return the measures of a run on test samples."""
    loss = per_client(history, "loss", "test")
    return np.array([*of_accuracies(*answers({0: history})[0]), twenty_twenty(loss), gini(loss)])


def run(context: Context) -> Outcome:
    """Choose every method's settings on validation samples, run all seeds, and compare."""
    title, seeds = "average and worst-20 % validation accuracy, mean", context.settings["seeds"]
    variants, choice = choose(context, lambda h: validation_score(h, TAIL), title)
    found, problems = run_variants(context, variants, seeds)
    found = {name: runs for name, runs in found.items() if runs}
    values = columns(found)
    alone, failed = fit_alone(context, variants[BASELINE])
    values[ALONE] = {
        seed: np.array([*of_accuracies(*one), *[np.nan] * OF_LOSSES]) for seed, one in alone.items()
    }
    sizes = np.concatenate([one for _, one in answers(next(iter(found.values()))).values()])
    tables = {"methods": _table(values, sizes), "against-fedavg": _differences(values)}
    tables |= {"clients": _clients(found, alone), "choice": choice}
    out = checks({m: one for m, one in values.items() if is_published(m)})
    out += own_checks(found, alone, TAIL)
    return Outcome(out, tables, {"average-and-worst": _drawn(values)}, problems + failed)


def columns(found: Histories) -> dict[str, dict[int, Array]]:
    """Return the measures of every method by seed."""
    return {m: {seed: measured(h) for seed, h in runs.items()} for m, runs in found.items()}


Values = Mapping[str, Mapping[int, Array]]


def _column(values: Values, method: str, column: int) -> Array:
    return np.array([one[column] for one in values[method].values()])


def _table(values: Values, sizes: Array) -> Table:
    rows: list[list[Any]] = [
        [
            m,
            len(runs),
            *(_shown(_column(values, m, k)) for k in range(len(MEASURES))),
        ]
        for m, runs in values.items()
    ]
    title = (
        "Test samples: mean over seeds ± 95 %; floor: if all were served equally "
        f"({sizes.min():g} to {sizes.max():g} test samples a client)"
    )
    return Table(title, ("method", "seeds", *MEASURES), rows)


def _shown(numbers: Array) -> str | None:
    return None if np.isnan(numbers).any() or not len(numbers) else with_interval(numbers, *DIGITS)


def paired(values: Values, method: str, other: str, column: int) -> Array:
    """Return the differences of two methods in a measure, over the seeds that both have."""
    ours, theirs = values[method], values[other]
    return np.array([ours[s][column] - theirs[s][column] for s in ours if s in theirs])


def _differences(values: Values) -> Table:
    shown, rows = (AVERAGE, WORST_FIFTH, UNFAIRNESS), []
    for method in (m for m in values if m != BASELINE and BASELINE in values):
        changes = [paired(values, method, BASELINE, k) for k in shown]
        rows.append([method, *map(_shown, changes)])
    title = f"Less {BASELINE} within seeds: mean ± 95 %"
    return Table(title, ("method", *(MEASURES[k] for k in shown)), rows)


def _clients(found: Histories, alone: Answers) -> Table:
    names = next(h.names for runs in found.values() for h in runs.values())
    told = {method: answers(runs) for method, runs in found.items()} | {ALONE: alone}
    rows = [
        [m, *(with_interval(100 * np.array(one), *DIGITS)
              for one in zip(*(values for values, _ in each.values()), strict=True))]
        for m, each in told.items()
    ]  # fmt: skip
    return Table("Test accuracy of each client in %, mean ± 95 %", ("method", *names), rows)


def _drawn(values: Values) -> str:
    lines = {
        m: Line([_column(values, m, AVERAGE).mean()], [_column(values, m, WORST_FIFTH).mean()],
                dots=True)
        for m in values
    }  # fmt: skip
    return figure(lines, title="Test accuracy, mean over seeds",
                  x_label="average, %", y_label="worst 20 %, %")  # fmt: skip


# -- checks -----------------------------------------------------------------------------------


def checks(values: Values) -> list[Check]:
    """Hold what the papers claim in general against these data."""
    out = [
        _first(values, "SCAFF-PD", WORST_FIFTH, 1.0, "the best worst-20 % accuracy of all methods",
               "PD, Section 6, for its data"),
        _first(values, "SCAFF-PD-IA", UNFAIRNESS, -1.0, "the lowest relative unfairness of all",
               "IA, Section 7, for its data"),
        _fair_ones(values),
    ]  # fmt: skip
    return [one for one in out if one is not None]


def _first(
    values: Values, method: str, column: int, sign: float, words: str, source: str
) -> Check | None:
    """Check that a method comes first, and say whether the seeds tell it from the next one."""
    if method not in values:
        return None
    means = {m: float(_column(values, m, column).mean()) for m in values}
    rival = max((m for m in means if m != method), key=lambda m: sign * means[m])
    change = paired(values, method, rival, column)
    limits = mean_interval(change) if len(change) else None
    told = with_limits(limits, form="+.2f") if limits else "unknown"
    sure = limits is not None and 0 not in limits
    return Check(
        f"{method} has {words}",
        source,
        f"{method} {means[method]:.4g}, best other {rival} {means[rival]:.4g}; difference within "
        f"seeds {told}",
        sign * means[method] > sign * means[rival],  # a tie is not a lead
        "" if sure else "the seeds do not tell the two apart",
    )


def _fair_ones(values: Values) -> Check | None:
    """Check that every method for fairness serves the worst 20 % better than FedAvg does."""
    fair = [m for m in values if m not in UNFAIR]
    if BASELINE not in values or not fair:
        return None
    changes = {m: float(paired(values, m, BASELINE, WORST_FIFTH).mean()) for m in fair}
    shown = ", ".join(f"{m} {v:+.1f}" for m, v in changes.items())
    return Check(
        f"every method for fairness has a better worst-20 % accuracy than {BASELINE}",
        "the aim of all these papers",
        f"points more than {BASELINE} within seeds, mean: {shown}",
        all(v > 0 for v in changes.values()),
    )
