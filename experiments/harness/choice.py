"""Settings chosen on validation samples, and which of them lie at the edge of what was tried.

A definition names its methods and what is tried for each: a ``[grid.METHOD]``, all combinations of
whose values are tried, or ``[tried.METHOD]`` and ``places``, where values at the same place belong
together (a minibatch and the steps of a pass). An axis of a grid is a list, or ``{ from, to, count
}`` for values with equal ratios; settings that go together are one axis, ``"a, b" = [[1, 2], [3,
4]]``. Either one choice is made on seeds of its own and used for all reported seeds, or, where a
seed draws the test samples too, every trial makes its own choice: validation samples of one trial
may be test samples of another.

Beyond an edge there may be a better value. Edges are read from the stored tables of tries, so that
it can be told of results whose runs are gone. A setting is judged by the value of the chosen try;
where every trial chose for itself, by the median trial. Values at a natural limit have nothing
beyond them: a proximal term of 0 is FedAvg. So have those that a definition names under ``limits``:
a tail of one client in four is the worst case. Settings that go together, a minibatch and the steps
of a pass, are judged by the first; words and lists have no order and are not judged.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from equifed import History
from equifed.runs import apply_override, merge_tables
from experiments.harness.experiment import EXPERIMENTS, ROOT, Cell, Context, Settings, Table
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


# -- the edge of what was tried --------------------------------------------------------------------

Limits = Mapping[str, Sequence[float | None]]

LIMITS: Limits = {
    "mu": (0.0, None), "q": (0.0, None), "tilt": (0.0, None), "phi": (0.0, None),
    "l2": (0.0, None), "tails": (None, 1.0), "level": (None, 1.0), "tail": (None, 1.0),
    "extrapolation": (0.0, 1.0), "batch": (1.0, 100_000.0), "batch_size": (1.0, 100_000.0),
    "steps": (1.0, None),
}  # fmt: skip
"""Smallest and largest value that a setting can have; a minibatch of 100,000 is all samples."""

Try = tuple[str, Mapping[str, str], int]
"""A method, its settings as they were written, and how often it was chosen."""


@dataclass(frozen=True)
class Edge:
    """A chosen value with nothing tried beyond it."""

    experiment: str
    method: str
    setting: str
    value: float
    tried: tuple[float, ...]

    def __str__(self) -> str:
        side = "smallest" if self.value == self.tried[0] else "largest"
        return (f"{self.experiment}: {self.method}, {self.setting} = {self.value:g} is the {side} "
                f"of {', '.join(f'{v:g}' for v in self.tried)}")  # fmt: skip


def read_tries(path: Path) -> list[Try]:
    """Return the tries of a table, or none if it is no table of tries."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = list(csv.reader(file))
    columns = lines[0] if lines else []
    paths = {k: name.rpartition(".")[2] for k, name in enumerate(columns) if "." in name}
    if not columns or columns[0] != "method" or columns[-1] not in ("", "trials that chose it"):
        return []
    out: list[Try] = []
    for line in lines[1:]:
        if "settings" in columns:
            given = dict(_settings(line[columns.index("settings")]))
        else:
            given = {name: line[k] for k, name in paths.items() if line[k]}
        draw = f", draw {line[columns.index('draw')]}" if "draw" in columns else ""
        times = int(line[-1]) if line[-1].isdigit() else int(line[-1] == "chosen")
        out.append((line[0] + draw, given, times))
    return out


def _settings(words: str) -> list[tuple[str, str]]:
    """Return the settings that a text names.

    >>> dict(_settings("lr = 0.1, tails = [0.5, 1.0], q = 2"))
    {'lr': '0.1', 'tails': '[0.5, 1.0]', 'q': '2'}
    """
    return re.findall(r"(\w+) = (\[[^\]]*\]|[^,]*)", words)


def find_edges(experiment: str, tries: Sequence[Try], limits: Limits = LIMITS) -> list[Edge]:
    """Return the chosen values of every method that lie at the edge of its tries."""
    out = []
    for method in dict.fromkeys(one[0] for one in tries):
        mine = [one for one in tries if one[0] == method]
        names = list(dict.fromkeys(name for _, given, _ in mine for name in given))
        for k, name in enumerate(names):
            if not any(_go_together(mine, name, other) for other in names[:k]):
                out += _edge(experiment, method, name, mine, limits)
    return out


def _go_together(tries: Sequence[Try], one: str, other: str) -> bool:
    pairs = {(given.get(one), given.get(other)) for _, given, _ in tries}
    return len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs}) > 1


def _edge(
    experiment: str, method: str, name: str, tries: Sequence[Try], limits: Limits
) -> list[Edge]:
    picked: list[float] = []
    try:
        tried = sorted({_number(given[name]) for _, given, _ in tries if name in given})
        for _, given, times in tries:
            picked += [_number(given[name])] * times if name in given else []
    except ValueError:  # words and lists
        return []
    if len(tried) < 2 or not picked:
        return []
    value = sorted(picked)[len(picked) // 2]
    low, high = limits.get(name, (None, None))
    beyond = (value == tried[0] and value != low) or (value == tried[-1] and value != high)
    return [Edge(experiment, method, name, value, tuple(tried))] if beyond else []


def _number(text: str) -> float:
    """Return a value as a number; "3/n" is 3 for each sample of a client's.

    >>> _number("3/n")
    3.0
    """
    return float(text.removesuffix("/n"))


def stored_edges(names: Iterable[str] = (), root: Path = ROOT) -> list[Edge]:
    """Return the edges in the stored results of some experiments, or of all."""
    out = []
    for name in names or EXPERIMENTS:
        results = root / name / "results"
        limits = {**LIMITS, **_own_limits(results / "results.json")}
        for path in sorted(results.glob("*.csv")):
            out += find_edges(name, read_tries(path), limits)
    return out


def _own_limits(record: Path) -> Limits:
    """Return the limits that the definition of the stored results names."""
    if not record.exists():
        return {}
    named: Limits = json.loads(record.read_text(encoding="utf-8"))["settings"].get("limits", {})
    return named
