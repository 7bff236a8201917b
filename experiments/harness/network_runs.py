"""Runs of a network table: small result files, the most important methods first, cut off any time.

Each run leaves one file with its accuracies and nothing else (a table has hundreds of them, on
machines that are lent for minutes), and all are kept with the tables. A run that was cut off is
begun again; ``begun.csv`` counts them all. Tries are short runs with validation samples, in which
step sizes that decay do so in fewer rounds, so that they tell of the end of training, too; the
chosen settings run in full.

The definition has ``groups`` of methods, most important first: while the chosen runs of one group
are carried out, the tries of the next one wait behind them. Methods of a group run seed by seed.
With ``order = "seeds"`` all groups have the first seed before any has the second, with ``"first
group"`` the first group has all seeds before the next one begins. ``finish = false`` runs nothing
and makes the tables from what is there. The chosen runs of methods named in ``personalise`` also
fit own parts after training, of the kinds named there.

``runs/`` is where runs leave their files, and is no part of the repository. ``results/kept.jsonl``
is, with one line for each run: a later call, on another machine too, begins with what it holds, so
that a table can be made again, or gets one more row, without what a lent machine computed before.
"""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from equifed.metrics import worst_fraction
from equifed.report import slug
from equifed.runs import apply_override, merge_tables
from experiments.harness.choice import alternatives
from experiments.harness.experiment import Cell, Context, Settings, Table
from experiments.harness.network_task import (
    BEGUN,
    MEASURED,
    OWN_KINDS,
    Result,
    Task,
    carry_out,
    own_row,
    read_result,
)
from experiments.harness.plan import KEPT, STARTED


@dataclass
class Found:
    """All that is known: results by method and seed, what was chosen, and how many runs it took."""

    results: dict[str, dict[int, Result]]
    choice: Table
    runs: dict[str, tuple[int, int]]
    preferred: dict[str, str] = field(default_factory=dict)
    """The kind of own part that validation samples prefer, by method."""
    problems: list[str] = field(default_factory=list)

    def runs_of_rows(self) -> dict[str, tuple[int, int]]:
        """Return the runs begun and ended of every row; own parts after training train nothing."""
        fitted = {own_row(method, kind, self.preferred): counts
                  for method, counts in self.runs.items() for kind in OWN_KINDS}  # fmt: skip
        return {**fitted, **self.runs}


# -- all runs -------------------------------------------------------------------------------------


def run_all(context: Context, more: Sequence[Task] = ()) -> Found:
    """Carry out what is missing, group by group, and return what is there.

    ``more`` are other tasks, which come after the tries of the first group.
    """
    settings = context.settings
    methods = [m for group in settings["groups"] for m in group]
    strange = [m for m in methods if m not in settings["methods"]]
    if strange:
        raise ValueError(f"groups name no method: {', '.join(strange)}.")
    restore(context.out)
    problems = _carry_out(context, more) if settings["finish"] else []
    keep(context.out)
    results: dict[str, dict[int, Result]] = {}
    for method in methods:
        tasks = _chosen_runs(context, [method], settings["seeds"])
        known = {task.seed: read_result(task.path) for task in tasks if task.complete}
        problems += [f"{method}, seed {s}: {r.failed}" for s, r in known.items() if r.failed]
        results[method] = {s: r for s, r in known.items() if not r.failed}
    found = {m: r for m, r in results.items() if r}
    preferred = {m: kind for m in found if (kind := _preferred(context, m))}
    table = _choice_table(context, methods)
    return Found(found, table, count_runs(context.out), preferred, problems)


def _carry_out(context: Context, more: Sequence[Task]) -> list[str]:
    """Carry out what is missing; return what failed."""
    groups, seeds = context.settings["groups"], context.settings["seeds"]
    early = {"seeds": 0, "first group": 1}[context.settings["order"]]  # groups with all seeds
    first = [seeds if k < early else seeds[:1] for k in range(len(groups))]
    problems: list[str] = []
    with _pool(context.jobs) as submit:
        tries, chosen = _submit(submit, [*_tries(context, groups[0]), *more], context), []
        for following, group, now in zip([*groups[1:], []], groups, first, strict=True):
            problems += _wait(tries)
            chosen += _submit(submit, _chosen_runs(context, group, now), context)
            tries = _submit(submit, _tries(context, following), context)
        for seed in seeds:
            for group, done in zip(groups, first, strict=True):
                if seed not in done:
                    chosen += _submit(submit, _chosen_runs(context, group, [seed]), context)
        return problems + _wait(chosen)


@contextmanager
def _pool(jobs: int) -> Iterator[Any]:
    """Yield a function that starts a task, here or in one of several processes."""
    if jobs == 1:
        yield lambda task: _done(task)
        return
    pool = ProcessPoolExecutor(jobs, get_context("spawn"))  # a forked CUDA does not work
    try:
        yield lambda task: pool.submit(carry_out, task)
    finally:
        pool.shutdown(cancel_futures=True)


def _done(task: Task) -> Future[None]:
    future: Future[None] = Future()
    try:
        carry_out(task)
        future.set_result(None)
    except Exception as error:
        future.set_exception(error)
    return future


def _submit(submit: Any, tasks: list[Task], context: Context) -> list[tuple[Task, Future[None]]]:
    started = [(task, submit(task)) for task in tasks if not task.complete]
    for task, future in started:
        future.add_done_callback(partial(_tell, context, task))
    return started


def _tell(context: Context, task: Task, future: Future[None]) -> None:
    if not future.cancelled():
        said = f"{task}: {_problem(future) or f'{read_result(task.path).seconds:.0f} s'}"
        context.console.print(said, highlight=False, markup=False, soft_wrap=True)


def _wait(waiting: list[tuple[Task, Future[None]]]) -> list[str]:
    """Wait for runs; return what failed: one broken run does not take the others along."""
    return [f"{task}: {said}" for task, future in waiting if (said := _problem(future))]


def _problem(future: Future[None]) -> str:
    error = future.exception()
    return "" if error is None else f"failed: {type(error).__name__}: {error}"


def _table(settings: Settings, variant: Settings, seed: int, more: Settings) -> Settings:
    table = copy.deepcopy(merge_tables(merge_tables(settings["run"], variant), more))
    for path in settings["seeded"]:
        apply_override(table, f"{path}={seed}")
    return table


def hasten(table: Settings, factor: float) -> Settings:
    """Return settings whose step sizes decay in so many times fewer rounds.

    These are tables with ``decay`` per round and ``every``, the rounds between two changes.

    >>> hasten({"steps": {"decay": 0.5, "every": 4}, "lr": 1.0}, 2.0)
    {'steps': {'decay': 0.25, 'every': 2}, 'lr': 1.0}
    """
    out: Settings = {k: hasten(v, factor) if isinstance(v, dict) else v for k, v in table.items()}
    if {"decay", "every"} <= set(out):
        out |= {"decay": out["decay"] ** factor, "every": max(1, round(out["every"] / factor))}
    return out


def _tries(context: Context, methods: list[str]) -> list[Task]:
    """Return the short runs on validation samples; none where there is nothing to choose."""
    settings, out = context.settings, context.out / "runs"
    factor, tasks = settings["run"]["rounds"] / settings["tries"]["rounds"], []
    for method in methods:
        tried, kinds = alternatives(settings, method), _kinds(context, method)
        for words, variant in tried.values() if len(tried) > 1 or kinds else ():
            seed = settings["tuning_seed"]
            table = hasten(_table(settings, variant, seed, settings["tries"]), factor)
            name = slug(f"{method} try {words}")
            tasks.append(Task(method, words, table, seed, out / f"{name}.json", kinds,
                              fit=settings.get("fit")))  # fmt: skip
    return tasks


def _kinds(context: Context, method: str) -> tuple[str, ...]:
    """Return the kinds of own parts that are fitted after training; tries choose what they need."""
    return tuple(context.settings.get("personalise", {}).get(method, ()))


def _chosen_runs(context: Context, methods: Sequence[str], seeds: Sequence[int]) -> list[Task]:
    """Return the full runs with the chosen settings; none where nothing could be chosen."""
    settings, out, tasks = context.settings, context.out / "runs", []
    chosen = {method: best for method in methods if (best := _best(context, method)) is not None}
    for seed in seeds:
        for method, (words, variant) in chosen.items():
            table = _table(settings, variant, seed, {"evaluate": {"splits": ["test"]}})
            name = slug(f"{method} {words} seed {seed}")
            kinds = _kinds(context, method)
            tuned = (
                _of_the_try(context, method, words).tuned if set(kinds) & set(MEASURED) else None
            )
            tasks.append(Task(method, words, table, seed, out / f"{name}.json", kinds, tuned,
                              settings.get("fit")))  # fmt: skip
    return tasks


def _of_the_try(context: Context, method: str, words: str) -> Result:
    (path,) = (task.path for task in _tries(context, [method]) if task.words == words)
    return read_result(path)


# -- the choice -----------------------------------------------------------------------------------


def score(result: Result, split: str = "validation") -> float:
    """Return the mean of average and worst-20 % accuracy on validation samples."""
    if result.failed or split not in result.accuracy:
        return -math.inf
    values = result.accuracy[split]
    known = values[~np.isnan(values)]
    return float(known.mean() + worst_fraction(known, 0.2, higher_is_better=True)) / 2


def _scores(context: Context, method: str) -> dict[str, float]:
    """Return the score of each try that has ended."""
    tries = _tries(context, [method])
    return {task.words: score(read_result(task.path)) for task in tries if task.complete}


def _best(context: Context, method: str) -> tuple[str, Settings] | None:
    """Return the best try in words and as a variant; None while tries are missing or all failed."""
    tried = dict(alternatives(context.settings, method).values())
    if len(tried) == 1 and not _kinds(context, method):
        return next(iter(tried.items()))
    scores = _scores(context, method)
    if len(scores) < len(tried) or max(scores.values()) == -math.inf:
        return None
    words = max(scores, key=lambda one: scores[one])
    return words, tried[words]


def _preferred(context: Context, method: str) -> str | None:
    """Return the kind of own part that scores best in the chosen try; of equals the first."""
    kinds, best = _kinds(context, method), _best(context, method)
    if not kinds or best is None:
        return None
    result = _of_the_try(context, method, best[0])
    return max(kinds, key=lambda kind: score(result, f"validation, {OWN_KINDS[kind]}"))


def _choice_table(context: Context, methods: list[str]) -> Table:
    rows: list[list[Cell]] = []
    for method in methods:
        scores, best = _scores(context, method), _best(context, method)
        for words, value in scores.items():
            known = round(value, 4) if math.isfinite(value) else None
            rows.append([method, words, known, "chosen" if best and words == best[0] else ""])
    title = "average and worst-20 % validation accuracy, mean"
    return Table("Choice on validation samples", ("method", "settings", title, ""), rows)


# -- what is kept ----------------------------------------------------------------------------------


def restore(out: Path) -> None:
    """Put the files of kept runs back where they are missing."""
    if not (out / KEPT).exists():
        return
    first, *lines = (out / KEPT).read_text(encoding="utf-8").splitlines()
    runs = out / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    for line in lines:
        record = json.loads(line)
        path = runs / f"{record.pop('file')}.json"
        if not path.exists():
            path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    if not (runs / BEGUN).exists():
        begun = json.loads(first)["begun"]
        text = "".join(f"{method}\tkept\n" * count for method, count in begun.items())
        (runs / BEGUN).write_text(text, encoding="utf-8")


def keep(out: Path) -> None:
    """Write all runs of a folder into one file, in the order of their names."""
    begun = {method: count for method, (count, _) in sorted(count_runs(out).items())}
    records = [{"file": path.stem, **json.loads(path.read_text(encoding="utf-8"))}
               for path in sorted((out / "runs").glob("*.json"))
               if path.name != STARTED]  # fmt: skip
    if records:
        (out / KEPT).parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(one, ensure_ascii=False) for one in ({"begun": begun}, *records)]
        (out / KEPT).write_text("\n".join(lines) + "\n", encoding="utf-8")


def count_runs(out: Path) -> dict[str, tuple[int, int]]:
    """Return for each method how many runs were begun, and how many of them ended."""
    path = out / "runs" / BEGUN
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    begun = Counter(line.partition("\t")[0] for line in lines)
    files = (file for file in (out / "runs").glob("*.json") if file.name != STARTED)
    ended = Counter(json.loads(file.read_text(encoding="utf-8"))["method"] for file in files)
    return {m: (begun[m], ended[m]) for m in {**begun, **ended}}
