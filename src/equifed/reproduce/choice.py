"""Settings chosen on validation samples, and tables of what the chosen ones reach on test samples.

A definition names methods and a grid for each. Either one choice is made on seeds of its own and
used for all reported seeds, or, where a seed draws the test samples too, every trial makes its own
choice: validation samples of one trial may be test samples of another.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equifed.history import History
from equifed.metrics import mean_interval, worst_fraction
from equifed.reproduce.experiment import Cell, Context, Settings, Table
from equifed.reproduce.running import Histories, chosen, combinations, run_variants

Array = NDArray[np.float64]
Score = Callable[[History], float]
Measure = Callable[[Array], Array]
"""Maps accuracies (seeds, clients) to one number for each seed."""

Adapt = Callable[[Settings, Mapping[str, History]], Settings]
"""Changes a variant in the light of what other methods of the same trial gave."""


def validation_score(history: History) -> float:
    """Return minus the mean of worst and average accuracy on the validation samples."""
    record = history.last("accuracy", "validation")
    assert record is not None
    return -float(record.values.min() + record.values.mean()) / 2


def tail_score(history: History) -> float:
    """Return minus the mean of worst-quarter and average accuracy on the validation samples.

    For clients with few validation samples, where the accuracy of a single one is nearly a coin.
    """
    record = history.last("accuracy", "validation")
    assert record is not None
    worst = worst_fraction(record.values, 0.25, higher_is_better=True)
    return -float(worst + record.values.mean()) / 2


def chosen_methods(
    context: Context, score: Score = validation_score
) -> tuple[dict[str, Settings], Table]:
    """Return every method with its best settings on the tuning seeds, and all that was tried."""
    settings, best, lines = context.settings, {}, []
    axes, methods = settings["grid"], settings["methods"]
    everything = {
        title: one
        for method, variant in methods.items()
        for title, one in combinations(method, variant, axes[method]).items()
    }
    run_variants(context, everything, settings["tuning_seeds"])  # all at once, for many processes
    for method, variant in methods.items():
        best[method], rows = chosen(
            context, method, variant, axes[method], score, settings["tuning_seeds"]
        )
        for row in rows:
            value = -row[-2] if math.isfinite(row[-2]) else None
            lines.append([method, in_words(axes[method], row[1:-2]), value, row[-1]])
    columns = ("method", "settings", "validation score (high is good)", "")
    return best, Table("Choice on validation samples", columns, lines)


def chosen_in_each_trial(
    context: Context, score: Score, adapt: Adapt = lambda variant, _: variant
) -> tuple[Histories, Table, list[str]]:
    """Choose every method's settings anew in each trial, on that trial's validation samples.

    Returns the chosen runs, how often each setting was chosen, and what failed. Methods are taken
    in the order of the definition; ``adapt`` sees the chosen runs of those before.
    """
    settings, lines, problems = context.settings, [], []
    found: Histories = {method: {} for method in settings["methods"]}
    for method, variant in settings["methods"].items():
        axes = settings["grid"][method]
        tried = combinations(method, variant, axes)
        scores: dict[str, list[float]] = {title: [] for title in tried}
        times = dict.fromkeys(tried, 0)
        for seed in settings["seeds"]:
            before = {name: runs[seed] for name, runs in found.items() if seed in runs}
            fitted = {title: adapt(one, before) for title, one in tried.items()}
            runs, failed = run_variants(context, fitted, [seed])
            problems += failed
            ended = {title: score(runs[title][seed]) for title in tried if seed in runs[title]}
            if not ended:
                raise ValueError(f"{method}, trial {seed}: every value of the grid failed.")
            best = min(ended, key=lambda title: ended[title])
            found[method][seed] = runs[best][seed]
            times[best] += 1
            for title, value in ended.items():
                scores[title].append(-value)
        for title, values in zip(tried, itertools.product(*axes.values()), strict=True):
            mean = float(np.mean(scores[title])) if scores[title] else None
            lines.append([method, in_words(axes, values), mean, times[title]])
    columns = (
        "method",
        "settings",
        "validation score (high is good), mean",
        "trials that chose it",
    )
    return found, Table("Choice on validation samples, in each trial", columns, lines), problems


def in_words(axes: Mapping[str, Any], values: Sequence[Any]) -> str:
    """Return a combination of a grid as text.

    >>> in_words({"algorithm.local.lr": [0.1], "algorithm.q": [1, 2]}, (0.1, 2))
    'lr = 0.1, q = 2'
    """
    return ", ".join(
        f"{path.rpartition('.')[2]} = {value}" for path, value in zip(axes, values, strict=True)
    )


def percentages(runs: Mapping[int, History], split: str = "test") -> Array:
    """Return the accuracies at the end in %, shape (seeds, clients)."""
    records = [history.last("accuracy", split) for history in runs.values()]
    return 100 * np.array([record.values for record in records if record is not None])


def with_interval(values: Sequence[float] | Array) -> str:
    """Return the mean over seeds and half the width of its 95 % interval.

    >>> with_interval([1.0, 2.0, 3.0]), with_interval([2.0])
    ('2.0 ± 2.5', '2.0')
    """
    limits = mean_interval(values)
    half = (limits.upper - limits.lower) / 2
    return f"{limits.estimate:.1f}" + (f" ± {half:.1f}" if len(values) > 1 else "")


def accuracy_table(
    found: Histories, measures: Mapping[str, Measure], by_client: bool = False
) -> Table:
    """Return measures of the test accuracies of every method, with intervals over seeds."""
    names = next(h.names for runs in found.values() for h in runs.values()) if by_client else ()
    rows: list[list[Cell]] = []
    for method, runs in found.items():
        values = percentages(runs)
        per_seed = [*(values.T if by_client else ()), *(f(values) for f in measures.values())]
        rows.append([method, len(values), *map(with_interval, per_seed)])
    columns = ("method", "seeds", *names, *measures)
    return Table("Test accuracy in %, mean over seeds ± 95 %", columns, rows)
