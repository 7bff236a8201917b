"""Settings chosen on validation samples, and tables of what the chosen ones reach on test samples.

A definition names its methods and what is tried for each: a ``[grid.METHOD]``, all combinations of
whose values are tried, or ``[tried.METHOD]`` and ``places``, where values at the same place belong
together (a minibatch and the steps of a pass). Either one choice is made on seeds of its own and
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

from equifed.metrics import mean_interval, worst_fraction
from equifed.runs.compare import merged
from equifed.training.history import History
from experiments.harness.experiment import Cell, Context, Settings, Table
from experiments.harness.running import Histories, combinations, grid, run_variants

Array = NDArray[np.float64]
Score = Callable[[History], float]
"""Maps a run to a number that says how good it is on validation samples: high is good."""

Measure = Callable[[Array], Array]
"""Maps accuracies (seeds, clients) to one number for each seed."""

Adapt = Callable[[Settings, Mapping[str, History]], Settings]
"""Changes a variant in the light of what other methods of the same trial gave."""


def validation_score(history: History) -> float:
    """Return the mean of worst and average accuracy on the validation samples."""
    record = history.last("accuracy", "validation")
    assert record is not None
    return float(record.values.min() + record.values.mean()) / 2


def tail_score(history: History) -> float:
    """Return the mean of worst-quarter and average accuracy on the validation samples.

    For clients with few validation samples, where the accuracy of a single one is nearly a coin.
    """
    record = history.last("accuracy", "validation")
    assert record is not None
    worst = worst_fraction(record.values, 0.25, higher_is_better=True)
    return float(worst + record.values.mean()) / 2


def alternatives(settings: Settings, method: str) -> dict[str, tuple[str, Settings]]:
    """Return what is tried for a method by the name of its runs: in words, and the variant.

    >>> settings = {
    ...     "places": [0, 2],
    ...     "methods": {"A": {"algorithm": {"name": "fedavg"}}},
    ...     "tried": {"A": {"algorithm.local.lr": [0.1, 0.2, 0.3]}},
    ... }
    >>> alternatives(settings, "A")["A, lr = 0.3"]
    ('lr = 0.3', {'algorithm': {'name': 'fedavg', 'local': {'lr': 0.3}}})
    """
    variant = settings["methods"][method]
    if "grid" in settings:
        axes = settings["grid"][method]
        shown = [in_words(axes, values) for values in itertools.product(*axes.values())]
        named = combinations(method, variant, axes).items()
        return {name: (words, one) for words, (name, one) in zip(shown, named, strict=True)}
    axes, out = settings["tried"][method], {}
    for place in settings["places"]:
        values = {path: [column[place]] for path, column in axes.items()}
        words = in_words(values, [one[0] for one in values.values()])
        out[f"{method}, {words}"] = (words, merged(variant, grid(values)[0]))
    return out


def choose(
    context: Context, score: Score, title: str = "validation score (high is good)"
) -> tuple[dict[str, Settings], Table]:
    """Return every method's best variant by a score on validation samples, and all that was tried.

    The score is the mean over the seeds of validation; a try of which a run fails is not chosen,
    and of equal ones the first is. All runs are started together, so that they share processes.
    With one try for each method there is nothing to choose, and nothing is run.
    """
    settings, seeds = context.settings, context.settings["tuning_seeds"]
    tried = {method: alternatives(settings, method) for method in settings["methods"]}
    columns = ("method", "settings", title, "")
    if all(len(tries) == 1 for tries in tried.values()):
        only = {method: next(iter(tries.values())) for method, tries in tried.items()}
        rows: list[list[Cell]] = [[m, words, None, "given"] for m, (words, _) in only.items()]
        return {m: one for m, (_, one) in only.items()}, Table("Nothing was chosen", columns, rows)
    everything = {name: one for tries in tried.values() for name, (_, one) in tries.items()}
    found, _ = run_variants(context, everything, seeds)
    variants, rows = {}, []
    for method, tries in tried.items():
        scores = {name: _mean(found[name], score, len(seeds)) for name in tries}
        best = max(scores, key=lambda name: scores[name])
        if not math.isfinite(scores[best]):
            raise ValueError(f"{method}: every value that was tried failed; try others.")
        variants[method] = tries[best][1]
        for name, (words, _) in tries.items():
            known = scores[name] if math.isfinite(scores[name]) else None
            rows.append([method, words, known, "chosen" if name == best else ""])
    return variants, Table("Choice on validation samples", columns, rows)


def _mean(runs: Mapping[int, History], score: Score, wanted: int) -> float:
    """Return the mean score of a try's runs, or minus infinity if one is missing."""
    values = [score(history) for history in runs.values()]
    complete = len(values) == wanted and all(map(math.isfinite, values))
    return sum(values) / wanted if complete else -math.inf


def chosen_in_each_trial(
    context: Context, score: Score, adapt: Adapt = lambda variant, _: variant
) -> tuple[Histories, Table, list[str]]:
    """Choose every method's settings anew in each trial, on that trial's validation samples.

    Returns the chosen runs, how often each setting was chosen, and what failed. Methods are taken
    in the order of the definition; ``adapt`` sees the chosen runs of those before.
    """
    settings, lines, problems = context.settings, [], []
    found: Histories = {method: {} for method in settings["methods"]}
    for method in settings["methods"]:
        tried = alternatives(settings, method)
        scores: dict[str, list[float]] = {name: [] for name in tried}
        times = dict.fromkeys(tried, 0)
        for seed in settings["seeds"]:
            before = {name: runs[seed] for name, runs in found.items() if seed in runs}
            fitted = {name: adapt(one, before) for name, (_, one) in tried.items()}
            runs, failed = run_variants(context, fitted, [seed])
            problems += failed
            ended = {name: score(runs[name][seed]) for name in tried if seed in runs[name]}
            if not ended:
                raise ValueError(f"{method}, trial {seed}: every value that was tried failed.")
            best = max(ended, key=lambda name: ended[name])
            found[method][seed] = runs[best][seed]
            times[best] += 1
            for name, value in ended.items():
                scores[name].append(value)
        for name, (words, _) in tried.items():
            mean = float(np.mean(scores[name])) if scores[name] else None
            lines.append([method, words, mean, times[name]])
    columns = (
        "method",
        "settings",
        "validation score (high is good), mean",
        "trials that chose it",
    )
    return found, Table("Choice on validation samples, in each trial", columns, lines), problems


def in_words(axes: Mapping[str, Any], values: Sequence[Any]) -> str:
    """Return what is tried as text.

    >>> in_words({"algorithm.local.lr": [0.1], "algorithm.q": [1, 2]}, (0.1, 2))
    'lr = 0.1, q = 2'
    """
    shown = [f"{value:g}" if isinstance(value, float) else value for value in values]
    names = [path.rpartition(".")[2] for path in axes]
    return ", ".join(f"{name} = {value}" for name, value in zip(names, shown, strict=True))


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
