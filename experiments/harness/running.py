"""Running an experiment: variants over seeds, a choice on validation data, results in files."""

from __future__ import annotations

import copy
import itertools
import json
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equifed.report.page import slug
from equifed.runs.compare import merged
from equifed.runs.config import RunConfig, apply_override
from equifed.runs.jobs import Job, Overall, check, job, only_one, run_jobs
from equifed.training.history import History
from experiments.harness.experiment import (
    EXPERIMENTS,
    Context,
    Outcome,
    Settings,
    Table,
    definition,
)

if TYPE_CHECKING:
    from rich.console import Console

    from equifed.runs.run import Run

Histories = dict[str, dict[int, History]]
"""Complete runs by variant and seed."""

Prepare = Callable[["Run"], "Run"]
"""Changes a run in a way that no configuration can say: another measure, another algorithm."""


def reproduce(
    name: str,
    out: str | Path,
    *,
    quick: bool = False,
    processes: int = 1,
    console: Console | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Outcome:
    """Run an experiment, going on with what its folder holds, and write the results.

    Parameters
    ----------
    name : str
        Which experiment; see ``equifed reproduce --list``.
    out : path
        Folder for ``results/`` (JSON, CSV, summary), ``figures/`` and ``runs/``.
    quick : bool
        The short form: fewer seeds, rounds and values in the grids.
    changes : mapping, optional
        Settings to put in the place of the definition's.
    """
    from rich.console import Console

    out = Path(out)
    settings = merged(definition(name, quick), changes or {})
    context = Context(settings, out, console or Console(quiet=True), processes)
    with only_one(out):
        started = time.perf_counter()
        outcome = EXPERIMENTS[name].load()(context)
        command = f"equifed reproduce {name}" + (" --quick" if quick else "")
        if changes:
            command += f" with the settings {json.dumps(dict(changes))}"
        write(name, outcome, context, command, time.perf_counter() - started)
    return outcome


# -- runs -------------------------------------------------------------------------------------


def configured(settings: Settings, variant: Mapping[str, Any], seed: int) -> RunConfig:
    """Return the configuration of a variant with a seed, which also draws or splits the data."""
    table = copy.deepcopy(merged(settings["run"], variant))
    for path in settings.get("seeded", []):
        apply_override(table, f"{path}={seed}")
    return RunConfig.from_dict(table)


def run_variants(
    context: Context,
    variants: Mapping[str, Mapping[str, Any]],
    seeds: Sequence[int],
    prepare: Prepare | None = None,
) -> tuple[Histories, list[str]]:
    """Run what is missing of variants over seeds; return the complete runs, and what failed."""
    jobs = [
        job(name, configured(context.settings, variant, seed), seed,
            context.out / "runs" / slug(name) / f"seed-{seed}")
        for seed in seeds
        for name, variant in variants.items()
    ]  # fmt: skip
    check(jobs)
    if prepare is None:
        failed = run_jobs(jobs, processes=context.processes, console=context.console)
    else:
        failed = _prepared(jobs, prepare, context.console)
    found: Histories = {name: {} for name in variants}
    for one in jobs:
        if one.complete:
            found[one.name][one.config.seed] = History.load(one.folder, model=False)
    return found, failed


def _prepared(jobs: Sequence[Job], prepare: Prepare, console: Console) -> list[str]:
    """Run jobs in turn, each prepared."""
    from equifed.runs.run import build, start
    from equifed.training.loop import TrainingError

    failed = []
    with Overall(console, jobs) as overall:
        for one in jobs:
            if one.complete:
                continue
            overall.running = [one]
            try:
                start(prepare(build(one.config)), one.folder)
            except TrainingError as error:
                failed.append(f"{one.title}: {error}")
            overall.finish(one)
    return failed


def grid(axes: Mapping[str, Sequence[Any]]) -> list[Settings]:
    """Return a variant for every combination of values; keys are paths as ``--set`` has them.

    >>> grid({"rounds": [5], "algorithm.local.lr": [0.1, 1.0]})
    [{'rounds': 5, 'algorithm': {'local': {'lr': 0.1}}}, {'rounds': 5, ...: {'lr': 1.0}}}]
    """
    out = []
    for values in itertools.product(*axes.values()):
        table: Settings = {}
        for path, value in zip(axes, values, strict=True):
            apply_override(table, f"{path}={json.dumps(value)}")
        out.append(table)
    return out


def combinations(
    name: str, variant: Mapping[str, Any], axes: Mapping[str, Sequence[Any]]
) -> dict[str, Settings]:
    """Return a variant with every combination of a grid's values, under numbered names."""
    return {f"{name} grid {i:03d}": merged(variant, one) for i, one in enumerate(grid(axes))}


def chosen(
    context: Context,
    name: str,
    variant: Mapping[str, Any],
    axes: Mapping[str, Sequence[Any]],
    score: Callable[[History], float],
    seeds: Sequence[int],
    prepare: Prepare | None = None,
) -> tuple[Settings, list[list[Any]]]:
    """Return the variant with the best values of a grid, and every value's score (low is good).

    The score is the mean over the seeds of validation; a run that fails has the score infinity.
    Seeds or samples of validation are never those that results are reported on: the caller sees
    to that.
    """
    tried = combinations(name, variant, axes)
    found, _ = run_variants(context, tried, seeds, prepare)
    scores = {}
    for title in tried:
        values = [score(h) for h in found[title].values()]
        complete = len(values) == len(seeds) and all(map(math.isfinite, values))
        scores[title] = sum(values) / len(values) if complete else math.inf
    best = min(scores, key=lambda title: scores[title])
    if not math.isfinite(scores[best]):
        raise ValueError(f"{name}: every value of the grid failed; widen it.")
    rows = [
        [name, *values, scores[title], "chosen" if title == best else ""]
        for title, values in zip(tried, itertools.product(*axes.values()), strict=True)
    ]
    return tried[best], rows


# -- results ----------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Return the versions that the numbers depend on."""
    packages = {name: version(name) for name in ("equifed", "torch", "numpy", "scipy")}
    return {**packages, "python": platform.python_version()}


def write(name: str, outcome: Outcome, context: Context, command: str, seconds: float) -> None:
    """Write ``results/results.json``, a CSV file per table, a summary, and the figures."""
    results, figures = context.out / "results", context.out / "figures"
    for folder in (results, figures):
        folder.mkdir(parents=True, exist_ok=True)
    for key, table in outcome.tables.items():
        (results / f"{key}.csv").write_text(table.csv(), encoding="utf-8")
    for key, drawing in outcome.figures.items():
        (figures / f"{key}.svg").write_text(drawing, encoding="utf-8")
    record = {
        "experiment": name,
        "command": command,
        "versions": versions(),
        "seconds_of_last_call": round(seconds, 1),
        "settings": context.settings,
        "checks": [asdict(one) for one in outcome.checks],
        "problems": list(outcome.problems),
        "tables": {key: f"{key}.csv" for key in outcome.tables},
    }
    text = json.dumps(record, indent=1, allow_nan=False, ensure_ascii=False, default=_plain)
    (results / "results.json").write_text(text + "\n", encoding="utf-8")
    (results / "summary.md").write_text(summary(name, outcome, command), encoding="utf-8")


def _plain(value: Any) -> Any:
    """Turn NumPy numbers into plain ones."""
    return value.item()


def summary(name: str, outcome: Outcome, command: str) -> str:
    """Return the outcome as Markdown: checks first, then the short tables."""
    parts = [f"# {name}: measured", f"Made by `{command}`.", checks_table(outcome).markdown()]
    for key, table in outcome.tables.items():
        if len(table.rows) <= 40:
            parts += [f"## {table.title}", f"`{key}.csv`", table.markdown()]
        else:
            parts += [f"## {table.title}", f"{len(table.rows)} lines in `{key}.csv`."]
    return "\n\n".join(parts) + "\n"


def checks_table(outcome: Outcome) -> Table:
    """Return published and measured side by side."""
    rows = [
        (one.claim, one.source, one.measured, "yes" if one.agrees else "no", one.why)
        for one in outcome.checks
    ]
    return Table("Published and measured", ("published", "where", "measured", "agree", "why"), rows)
