"""Settings chosen on validation samples.

A definition names its methods and what is tried for each: a ``[grid.METHOD]``, all combinations of
whose values are tried, or ``[tried.METHOD]`` and ``places``, where values at the same place belong
together (a minibatch and the steps of a pass). An axis of a grid is a list, or ``{ from, to, count
}`` for values with equal ratios; settings that go together are one axis, ``"a, b" = [[1, 2], [3,
4]]``. Either one choice is made on seeds of its own and used for all reported seeds, or, where a
seed draws the test samples too, every trial makes its own choice: validation samples of one trial
may be test samples of another.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from equifed import History
from equifed.runs import apply_override, merge_tables
from experiments.harness.experiment import Cell, Context, Settings, Table
from experiments.harness.running import Histories, Prepare, run_by_seed, run_variants

Score = Callable[[History], float]
"""Maps a run to a number that says how good it is on validation samples: high is good."""

Adapt = Callable[[Settings, Mapping[str, History]], Settings]
"""Changes a variant in the light of what other methods of the same trial gave."""


Axes = Mapping[str, Sequence[Any] | Mapping[str, Any]]


def values_of(axis: Sequence[Any] | Mapping[str, Any]) -> Sequence[Any]:
    """Return the values of an axis, those with equal ratios to two digits.

    >>> values_of({"from": 0.01, "to": 1.0, "count": 5})
    [0.01, 0.032, 0.1, 0.32, 1.0]
    """
    if isinstance(axis, Mapping):
        return [float(f"{v:.2g}") for v in np.geomspace(axis["from"], axis["to"], axis["count"])]
    return axis


def combinations(axes: Axes) -> list[dict[str, Any]]:
    """Return every combination of the values of all axes, by path; keys may name several.

    >>> combinations({"rounds": [5, 6], "lr, primal": [[0.1, 1.0]]})
    [{'rounds': 5, 'lr': 0.1, 'primal': 1.0}, {'rounds': 6, 'lr': 0.1, 'primal': 1.0}]
    """
    out = []
    for values in itertools.product(*map(values_of, axes.values())):
        one: dict[str, Any] = {}
        for key, value in zip(axes, values, strict=True):
            paths = key.split(", ")
            one |= zip(paths, value if len(paths) > 1 else [value], strict=True)
        out.append(one)
    return out


def variant_of(one: Mapping[str, Any]) -> Settings:
    """Return a combination as a table; keys are paths as ``--set`` has them.

    >>> variant_of({"rounds": 5, "algorithm.local.lr": 0.1})
    {'rounds': 5, 'algorithm': {'local': {'lr': 0.1}}}
    """
    table: Settings = {}
    for path, value in one.items():
        apply_override(table, f"{path}={json.dumps(value)}")
    return table


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
    variant, out = settings["methods"][method], {}
    if "grid" in settings:
        tried = combinations(settings["grid"][method])
    else:
        columns = settings["tried"][method]
        tried = [{path: one[k] for path, one in columns.items()} for k in settings["places"]]
    for one in tried:
        words = in_words(one)
        out[f"{method}, {words}"] = (words, merge_tables(variant, variant_of(one)))
    return out


def choose(
    context: Context,
    score: Score,
    title: str = "validation score (high is good)",
    prepare: Prepare | None = None,
) -> tuple[dict[str, Settings], Table]:
    """Return every method's best variant by a score on validation samples, and all that was tried.

    The score is the mean over the seeds of validation; a try of which a run fails is not chosen,
    and of equal ones the one in the middle is. All runs are started together, so that they share
    processes. ``[tries]`` changes the runs of the choice alone (how often they are evaluated). With
    one try for each method there is nothing to choose, and nothing is run.
    """
    settings, seeds = context.settings, context.settings["tuning_seeds"]
    tried = {method: alternatives(settings, method) for method in settings["methods"]}
    columns = ("method", "settings", title, "")
    if all(len(tries) == 1 for tries in tried.values()):
        only = {method: next(iter(tries.values())) for method, tries in tried.items()}
        rows: list[list[Cell]] = [[m, words, None, "given"] for m, (words, _) in only.items()]
        return {m: one for m, (_, one) in only.items()}, Table("Nothing was chosen", columns, rows)
    everything = {
        name: merge_tables(one, settings.get("tries", {}))
        for tries in tried.values()
        for name, (_, one) in tries.items()
    }
    found, _ = run_variants(context, everything, seeds, prepare)
    variants, rows = {}, []
    for method, tries in tried.items():
        scores = {name: _mean(found[name], score, len(seeds)) for name in tries}
        best = take_best(scores)
        if not math.isfinite(scores[best]):
            raise ValueError(f"{method}: every value that was tried failed; try others.")
        variants[method] = tries[best][1]
        for name, (words, _) in tries.items():
            known = scores[name] if math.isfinite(scores[name]) else None
            rows.append([method, words, known, "chosen" if name == best else ""])
    title = f"Choice on validation samples, {count_tries(tried)} for each method"
    return variants, Table(title, columns, rows)


def take_best(scores: Mapping[str, float]) -> str:
    """Return the name with the highest score; of several, the one in the middle of their order.

    With few validation samples many tries are equally good; the first would be at an edge.

    >>> take_best({"0.01": 0.7, "0.1": 0.8, "1": 0.8, "10": 0.8})
    '1'
    """
    highest = max(scores.values())
    best = [name for name, value in scores.items() if value == highest]
    return best[len(best) // 2]


def count_tries(tried: Mapping[str, Mapping[str, Any]]) -> str:
    """Return how many tries a method has, in words: a comparison is fair if it is one number.

    >>> count_tries({"A": {"x": 1}, "B": {"x": 1, "y": 2}})
    '1 to 2 tries'
    """
    counts = sorted({len(tries) for tries in tried.values()})
    return f"{' to '.join(map(str, counts[:: max(1, len(counts) - 1)]))} tries"


def _mean(runs: Mapping[int, History], score: Score, wanted: int) -> float:
    """Return the mean score of a try's runs, or minus infinity if one is missing."""
    values = [score(history) for history in runs.values()]
    complete = len(values) == wanted and all(map(math.isfinite, values))
    return sum(values) / wanted if complete else -math.inf


def chosen_in_each_trial(
    context: Context, score: Score, adapt: Adapt = lambda variant, _: variant
) -> tuple[Histories, dict[str, dict[int, Settings]], Table, list[str]]:
    """Choose every method's settings anew in each trial, on that trial's validation samples.

    Returns the chosen runs and variants, how often each was chosen, and what failed. Methods are
    taken in the order of the definition; ``adapt`` sees the chosen runs of those before.
    """
    settings, lines, problems = context.settings, [], []
    found: Histories = {method: {} for method in settings["methods"]}
    chosen: dict[str, dict[int, Settings]] = {method: {} for method in found}
    for method in settings["methods"]:
        tried, fitted = alternatives(settings, method), {}
        for seed in settings["seeds"]:
            before = {name: runs[seed] for name, runs in found.items() if seed in runs}
            fitted[seed] = {name: adapt(one, before) for name, (_, one) in tried.items()}
        runs, failed = run_by_seed(context, fitted)
        problems += failed
        scores: dict[str, list[float]] = {name: [] for name in tried}
        times = dict.fromkeys(tried, 0)
        for seed in settings["seeds"]:
            ended = {name: score(runs[name][seed]) for name in tried if seed in runs[name]}
            if not ended:
                raise ValueError(f"{method}, trial {seed}: every value that was tried failed.")
            best = take_best(ended)
            found[method][seed], chosen[method][seed] = runs[best][seed], fitted[seed][best]
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
    counted = count_tries({m: alternatives(settings, m) for m in settings["methods"]})
    title = f"Choice on validation samples, in each trial, {counted} for each method"
    return found, chosen, Table(title, columns, lines), problems


def in_words(one: Mapping[str, Any]) -> str:
    """Return what is tried as text.

    >>> in_words({"algorithm.local.lr": 0.1, "algorithm.q": 2})
    'lr = 0.1, q = 2'
    """
    shown = {path.rpartition(".")[2]: value for path, value in one.items()}
    return ", ".join(
        f"{name} = {value:g}" if isinstance(value, float) else f"{name} = {value}"
        for name, value in shown.items()
    )
