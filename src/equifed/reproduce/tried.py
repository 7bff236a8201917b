"""Choosing settings on validation samples, where those of one try belong together.

A definition lists under ``[tried.METHOD]`` the values of each path, and ``places`` which of them
are tried: those at the same place make one try. So every method has the same number of tries, and
settings that depend on each other (a minibatch and the steps of a pass) change together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from equifed.compare import merged
from equifed.history import History
from equifed.reproduce.experiment import Context, Settings, Table
from equifed.reproduce.running import grid, run_variants

Score = Callable[[History], float]


def alternatives(settings: Settings, method: str) -> list[tuple[str, Settings]]:
    """Return what is tried for a method: a description, and the variant with these values.

    >>> settings = {
    ...     "places": [0, 2],
    ...     "variants": {"A": {"algorithm": {"name": "fedavg"}}},
    ...     "tried": {"A": {"algorithm.local.lr": [0.1, 0.2, 0.3]}},
    ... }
    >>> alternatives(settings, "A")[1]
    ('lr = 0.3', {'algorithm': {'name': 'fedavg', 'local': {'lr': 0.3}}})
    """
    axes, out = settings["tried"][method], []
    for place in settings["places"]:
        values = {path: [column[place]] for path, column in axes.items()}
        shown = ", ".join(f"{p.rpartition('.')[2]} = {v[0]:g}" for p, v in values.items())
        out.append((shown, merged(settings["variants"][method], grid(values)[0])))
    return out


def choose(context: Context, score: Score, title: str) -> tuple[dict[str, Settings], Table]:
    """Return every method's best variant by a score on validation samples (high is good).

    The score is the mean over the seeds of validation; a try of which a run fails is not chosen,
    and of equal ones the first is. All runs are started together, so that they share processes.
    With one try there is nothing to choose, and nothing is run.
    """
    settings, seeds = context.settings, context.settings["tuning_seeds"]
    tried = {m: alternatives(settings, m) for m in settings["variants"]}
    columns = ("method", "settings", title, "")
    if len(settings["places"]) == 1:
        rows = [[m, shown, None, "given"] for m, [(shown, _)] in tried.items()]
        given = {m: one for m, [(_, one)] in tried.items()}
        return given, Table("Nothing was chosen", columns, rows)
    runs = {f"{m}, {shown}": one for m, pairs in tried.items() for shown, one in pairs}
    found, _ = run_variants(context, runs, seeds)
    variants, rows = {}, []
    for method, pairs in tried.items():
        scores = [_mean(found[f"{method}, {shown}"], score, len(seeds)) for shown, _ in pairs]
        best = int(np.argmax(scores))
        if not math.isfinite(scores[best]):
            raise ValueError(f"{method}: every value that was tried failed; try others.")
        variants[method] = pairs[best][1]
        for i, (shown, _) in enumerate(pairs):
            known = scores[i] if math.isfinite(scores[i]) else None
            rows.append([method, shown, known, "chosen" if i == best else ""])
    return variants, Table("Choice on validation samples", columns, rows)


def _mean(runs: Mapping[int, History], score: Score, wanted: int) -> float:
    values = [score(history) for history in runs.values()]
    complete = len(values) == wanted and all(map(math.isfinite, values))
    return sum(values) / wanted if complete else -math.inf
