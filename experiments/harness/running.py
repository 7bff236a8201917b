"""Running an experiment: variants over seeds, a choice on validation data, results in files.

What is no run of one configuration is a part, computed once, side by side: a call of a function in
the experiment's ``run.py`` with everything that its answer depends on. Its answer is kept in
``runs/PART.json`` beside what was given, so that a later call in the same folder computes what is
missing, and refuses answers that were given to another question.
"""

from __future__ import annotations

import copy
import json
import os
import platform
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from threadpoolctl import threadpool_limits

from equifed import History
from equifed.report import slug
from equifed.runs import (
    Job,
    Run,
    RunConfig,
    apply_override,
    build_run,
    check_folders,
    make_job,
    merge_tables,
    run_jobs,
    start,
)
from equifed.training import TrainingError, lock_folder
from experiments.harness.experiment import (
    EXPERIMENTS,
    REMAKING,
    ROOT,
    Context,
    Outcome,
    Settings,
    Table,
    definition,
)
from experiments.harness.kept import NAMES, keep, read_histories, read_names
from experiments.harness.plan import Standing, stand

if TYPE_CHECKING:
    from rich.console import Console

Histories = dict[str, dict[int, History]]
"""Complete runs by variant and seed."""

Prepare = Callable[[Run], Run]
"""Changes a run in a way that no configuration can say: another measure, another algorithm."""


def reproduce(
    name: str,
    out: str | Path,
    *,
    quick: bool = False,
    jobs: int = 1,
    console: Console | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Outcome:
    """Run an experiment, going on with what its folder holds, and write the results.

    Parameters
    ----------
    name : str
        Which experiment; see ``python -m experiments list``.
    out : path
        Folder for ``results/`` (JSON, CSV, summary), ``figures/`` and ``runs/``.
    quick : bool
        The short form: fewer seeds, rounds and values in the grids.
    jobs : int
        Runs at a time; the results do not depend on it.
    changes : mapping, optional
        Settings to put in the place of the definition's.
    """
    from rich.console import Console

    out = Path(out)
    settings = merge_tables(definition(name, quick), changes or {})
    context = Context(settings, out, console or Console(quiet=True), jobs)
    with lock_folder(out):
        started = time.perf_counter()
        standing = stand(name, out, full=not quick and not changes)
        outcome: Outcome = EXPERIMENTS[name].module.run(context)
        outcome = replace(outcome, problems=[*outcome.problems, *keep(out)])
        counted = count_runs(out, settings)
        if counted.rows:
            outcome = replace(outcome, tables={**outcome.tables, "runs": counted})
        command = f"python -m experiments run {name}" + (" --quick" if quick else "")
        if changes:
            command += f" with the settings {json.dumps(dict(changes))}"
        write(name, outcome, context, command, time.perf_counter() - started, standing)
    return outcome


# -- runs -------------------------------------------------------------------------------------


def configured(settings: Settings, variant: Mapping[str, Any], seed: int) -> RunConfig:
    """Return the configuration of a variant with a seed, which also draws or splits the data."""
    table = copy.deepcopy(merge_tables(settings["run"], variant))
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
    return run_by_seed(context, dict.fromkeys(seeds, variants), prepare)


def run_by_seed(
    context: Context,
    variants: Mapping[int, Mapping[str, Mapping[str, Any]]],
    prepare: Prepare | None = None,
) -> tuple[Histories, list[str]]:
    """Run what is missing of every seed's own variants, all together."""
    if REMAKING.get():
        return read_histories(context.out, variants), []
    jobs = [
        make_job(name, configured(context.settings, variant, seed), seed,
            context.out / "runs" / slug(name) / f"seed-{seed}")
        for seed, named in variants.items()
        for name, variant in named.items()
    ]  # fmt: skip
    jobs = [_as_it_ran(one) for one in jobs]
    check_folders(jobs)
    _remember(context.out, jobs)
    if prepare is None:
        failed = run_jobs(jobs, at_once=context.jobs, console=context.console)
    else:
        failed = _prepared(jobs, prepare, context.console)
    found: Histories = {name: {} for named in variants.values() for name in named}
    for one in jobs:
        if one.complete:
            found[one.name][one.config.seed] = History.load(one.folder, model=False)
    return found, failed


def _as_it_ran(job: Job) -> Job:
    """Return a finished job with its own engine: it counts, whatever machine it ran on."""
    if not job.complete:
        return job
    stored = RunConfig.read(job.folder / "config.toml")
    return replace(job, config=replace(job.config, engine=stored.engine))


def _prepared(jobs: Sequence[Job], prepare: Prepare, console: Console) -> list[str]:
    """Run jobs in turn, each prepared."""
    failed = []
    for one in jobs:
        if one.complete:
            continue
        try:
            start(prepare(build_run(one.config)), one.folder)
            console.print(f"{one.title}: done", highlight=False)
        except TrainingError as error:
            failed.append(f"{one.title}: {error}")
    return failed


def _remember(out: Path, jobs: Sequence[Job]) -> None:
    """Write down which run every folder is of, beside what is there: also runs of earlier grids."""
    known = read_names(out)
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(known | {one.folder.parent.name: one.name for one in jobs}, indent=0)
    (out / NAMES).write_text(text, encoding="utf-8")


def count_runs(out: Path, settings: Settings) -> Table:
    """Return how many runs every method has had in a folder, abandoned ones too.

    A run counts for the longest name of a method that its own name has in it. An experiment of
    several parts has them in folders of their own.
    """
    tables = [settings, *settings.get("protocols", {}).values()]
    methods = {m for one in tables for m in (*one.get("methods", ()), *one.get("variants", ()))}
    counts: dict[str, list[int]] = {}
    for part in (out, *sorted(file.parent for file in out.glob(f"*/{NAMES}"))):
        for folder, name in read_names(part).items():
            method = max((m for m in methods if m in name), key=len, default=name)
            title = method if part == out else f"{method}, {part.name}"
            runs = list((part / "runs" / folder).glob("seed-*/config.toml"))
            whole = sum((one.parent / "summary.json").exists() for one in runs)
            before = counts.get(title, [0, 0])
            counts[title] = [before[0] + len(runs), before[1] + len(runs) - whole]
    rows = [[method, *count] for method, count in counts.items()]
    return Table("Runs, also of tries that were abandoned", ("method", "runs", "not ended"), rows)


# -- results ----------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Return the versions that the numbers depend on."""
    packages = {name: _version(name) for name in ("equifed", "torch", "numpy", "scipy")}
    return {**packages, "python": platform.python_version()}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # run from a clone that was not installed
        if name != "equifed":
            return "not installed"
        text = (ROOT.parent / "pyproject.toml").read_text(encoding="utf-8")
        return str(tomllib.loads(text)["project"]["version"])


def write(
    name: str,
    outcome: Outcome,
    context: Context,
    command: str,
    seconds: float,
    standing: Standing,
) -> None:
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
        "standing": asdict(standing),
        "versions": versions(),
        "seconds_of_last_call": round(seconds, 1),
        "settings": context.settings,
        "checks": [asdict(one) for one in outcome.checks],
        "problems": list(outcome.problems),
        "tables": {key: f"{key}.csv" for key in outcome.tables},
    }
    text = json.dumps(record, indent=1, allow_nan=False, ensure_ascii=False, default=_plain)
    (results / "results.json").write_text(text + "\n", encoding="utf-8")
    (results / "summary.md").write_text(summary(name, outcome, command, standing), encoding="utf-8")


def _plain(value: Any) -> Any:
    """Turn NumPy numbers into plain ones."""
    return value.item()


def summary(name: str, outcome: Outcome, command: str, standing: Standing) -> str:
    """Return the outcome as Markdown: checks first, then the short tables."""
    made = f"Made by `{command}`; {standing.word}: {standing.reason}."
    parts = [f"# {name}: measured", made, checks_table(outcome).markdown()]
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


# -- parts that are no runs ------------------------------------------------------------------------

Call = tuple[Path, str, str, Settings]
"""File, experiment, function and arguments of a part."""


@dataclass(frozen=True)
class Part:
    """A function of an experiment's ``run.py`` and its arguments, of the types that JSON has."""

    function: Callable[..., Any]
    given: Settings


def compute_parts(context: Context, parts: Mapping[str, Part]) -> dict[str, Any]:
    """Return the answer of every part, by name: read from its file, or computed now.

    Missing parts are started in the order given, ``context.jobs`` at a time. Each has one processor
    thread, so that answers do not depend on how many there are.
    """
    if context.jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {context.jobs}.")
    files = {name: context.out / "runs" / f"{name}.json" for name in parts}
    left = [name for name, path in files.items() if not path.exists()]
    for name in parts.keys() - set(left) if not REMAKING.get() else ():
        if _read(files[name])["given"] != parts[name].given:
            raise ValueError(
                f"{files[name]} was computed with other settings; choose another folder, or "
                "delete that file."
            )
    if left and REMAKING.get():
        raise ValueError(f"Nothing is kept of {', '.join(left)}.")
    if left:
        (context.out / "runs").mkdir(parents=True, exist_ok=True)
    calls = [(files[n], _experiment(parts[n]), parts[n].function.__name__, parts[n].given)
             for n in left]  # fmt: skip
    done: Iterator[str]
    if context.jobs == 1 or len(left) <= 1:
        done = (_compute(*call) for call in calls)
    else:
        done = _side_by_side(calls, min(context.jobs, len(left)))
    for count, told in enumerate(done, 1):
        context.console.print(f"{told} ({count} of {len(left)})", highlight=False)
    return {name: _read(path)["answer"] for name, path in files.items()}


def _side_by_side(calls: Sequence[Call], at_once: int) -> Iterator[str]:
    # Spawned, not forked: a forked torch may hang in its thread pool.
    pool = ProcessPoolExecutor(at_once, get_context("spawn"), _watch_parent, (os.getpid(),))
    try:
        for future in as_completed([pool.submit(_compute, *call) for call in calls]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _watch_parent(parent: int) -> None:
    """End with the parent, so that nobody works on for a command that was stopped."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _experiment(part: Part) -> str:
    """Return the experiment of a part, whose module is loaded by path: nobody can import it."""
    return Path(part.function.__code__.co_filename).parent.name


def _compute(path: Path, experiment: str, function: str, given: Settings) -> str:
    """Compute one part and keep it; return a line about it."""
    started, threads = time.perf_counter(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            answer = getattr(EXPERIMENTS[experiment].module, function)(**given)
    finally:
        torch.set_num_threads(threads)
    seconds = round(time.perf_counter() - started, 1)
    beside = path.with_suffix(".part")
    kept = {"given": given, "seconds": seconds, "answer": answer}
    beside.write_text(json.dumps(kept) + "\n", encoding="utf-8")
    beside.replace(path)
    return f"{path.stem}: {seconds} s"


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
