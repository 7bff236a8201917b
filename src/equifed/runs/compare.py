"""Methods on the same data and seeds, and what fairness cost (``equifed compare``)."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equifed.metrics import Interval
from equifed.report import (
    PLAN,
    Measured,
    Method,
    Report,
    Target,
    as_json,
    build,
    csv_text,
    read_comparison,
    slug,
    write_report,
)
from equifed.runs.config import RunConfig, apply_override
from equifed.runs.jobs import Job, check_folders, make_job, run_jobs
from equifed.runs.schema import ConfigError, Table
from equifed.training.files import lock_folder
from equifed.training.missing import TrainingError

if TYPE_CHECKING:
    from rich.console import Console

VARIANTS = "variants"


def read_variants(
    paths: Sequence[str | Path], overrides: Iterable[str] = ()
) -> dict[str, RunConfig]:
    """Read configurations to compare: several files, named after them, or files with variants.

    A file with tables ``[variants.NAME]`` stands for one configuration per variant: the rest of the
    file with the variant's settings put in (see :func:`merge_tables`).
    """
    overrides, found = list(overrides), {}
    for path in map(Path, paths):
        table = read_table(path)
        variants = table.pop(VARIANTS, {path.stem: {}})
        if not isinstance(variants, dict) or not all(
            isinstance(v, dict) for v in variants.values()
        ):
            raise ConfigError([f"{path}: variants must be tables, as [variants.fedavg.algorithm]"])
        for name, variant in variants.items():
            if name in found:
                raise ConfigError([f"two configurations are called {name!r}; rename a file"])
            found[name] = configure(merge_tables(table, variant), overrides, path.parent, name)
    _check_data(found)
    return found


def read_table(path: Path) -> Table:
    """Read a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path} is not a TOML file: {error}"]) from error


def configure(table: Table, overrides: Iterable[str], base: Path, name: str) -> RunConfig:
    """Check a table with overrides put in; what is wrong is said of ``name``."""
    table = merge_tables(table, {})
    for override in overrides:
        apply_override(table, override)
    try:
        return RunConfig.from_dict(table, base=base)
    except ConfigError as error:
        raise ConfigError([f"{name}: {problem}" for problem in error.problems]) from error


def merge_tables(table: Mapping[str, Any], variant: Mapping[str, Any]) -> Table:
    """Return a new table with the settings of a variant in the place of its own.

    Tables are merged key by key, but one that names something (``name``) replaces the other: the
    settings of one algorithm mean nothing to another.

    >>> merge_tables({"rounds": 5, "model": {"name": "mlp", "l2": 0.1}}, {"model": {"l2": 0.2}})
    {'rounds': 5, 'model': {'name': 'mlp', 'l2': 0.2}}
    >>> merge_tables({"algorithm": {"name": "fedavg", "local": {}}}, {"algorithm": {"name": "afl"}})
    {'algorithm': {'name': 'afl'}}
    """
    out = {k: merge_tables(v, {}) if isinstance(v, Mapping) else v for k, v in table.items()}
    for key, value in variant.items():
        old = out.get(key)
        if isinstance(value, Mapping):
            shared = old if isinstance(old, Mapping) and "name" not in value else {}
            out[key] = merge_tables(shared, value)
        else:
            out[key] = value
    return out


def _check_data(found: Mapping[str, RunConfig]) -> None:
    """Refuse configurations on different data: a difference would mean nothing."""
    if not found:
        raise ConfigError(["there is nothing to compare; name configuration files"])
    first, base = next(iter(found.items()))
    problems = [
        f"{name}: its [data] is not that of {first}; compare methods on the same data"
        for name, config in found.items()
        if config.data != base.data
    ]
    if problems:
        raise ConfigError(problems)


def plan_jobs(variants: Mapping[str, RunConfig], seeds: int, out: Path) -> list[Job]:
    """Return the runs, seed by seed, so that an interrupted comparison is a smaller one.

    The seeds count up from the first configuration's.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}.")
    start = next(iter(variants.values())).seed
    folders: dict[str, str] = {}
    for name in variants:
        short = slug(name)
        folders[name] = short if short not in folders.values() else f"{short}-{len(folders)}"
    return [
        make_job(name, config, seed, out / "runs" / folders[name] / f"seed-{seed}")
        for seed in range(start, start + seeds)
        for name, config in variants.items()
    ]


def compare(
    variants: Mapping[str, RunConfig],
    out: str | Path,
    *,
    seeds: int = 5,
    jobs: int = 1,
    overwrite: bool = False,
    baseline: str | None = None,
    target: Target | None = None,
    title: str | None = None,
    console: Console | None = None,
) -> Report:
    """Run what is missing of a comparison, measure it, and write it down.

    Parameters
    ----------
    variants : mapping of RunConfig
        What to compare, by name; the first one is the baseline unless another is named.
    out : path
        Folder for the runs (``runs/NAME/seed-S``), ``comparison.json``, ``comparison.csv`` and
        ``report.html``. Complete runs in it are kept and begun ones are resumed.
    seeds : int
        How many seeds, the same for all.
    jobs : int
        How many runs side by side. The results do not depend on it.
    overwrite : bool
        Run everything again.
    target : Target, optional
        For rounds and bytes to a target; by default the worst client's final value under the
        baseline.

    Returns
    -------
    Report
        What was measured; ``problems`` says which runs failed.
    """
    from rich.console import Console

    out, console = Path(out), console or Console(quiet=True)
    if baseline is not None and baseline not in variants:
        raise ConfigError([f"there is no variant {baseline!r}; choose from {', '.join(variants)}"])
    planned = plan_jobs(variants, seeds, out)
    with lock_folder(out):
        check_folders(planned, overwrite)
        failed = run_jobs(planned, at_once=jobs, console=console)
        plan = _list_runs(planned, out)
        report = measure(out, plan, baseline=baseline, target=target, title=title, problems=failed)
        write_comparison(report, out, plan)
    return report


def _list_runs(jobs: Sequence[Job], out: Path) -> list[Table]:
    """Return which runs belong to which method, as the comparison's file has it."""
    plan: dict[str, list[Table]] = {}
    for job in jobs:
        folder = job.folder.relative_to(out).as_posix()
        plan.setdefault(job.name, []).append({"seed": job.config.seed, "folder": folder})
    return [{"name": name, "runs": runs} for name, runs in plan.items()]


def measure(out: Path, plan: list[Table], *, problems: Sequence[str], **options: Any) -> Report:
    """Read the complete runs of a comparison and measure them."""
    methods = [_name_folders(method, out) for method in read_comparison(out, plan)]
    if not methods:
        raise TrainingError("Every run failed:\n" + "\n".join(problems))
    names = [method.name for method in methods]
    if options.get("baseline") not in names:  # it failed; the first one left takes its place
        options["baseline"] = names[0]
    return build(methods, problems=problems, **options)


def _name_folders(method: Method, out: Path) -> Method:
    """Name run folders from the comparison's, so that its files do not depend on where it is."""
    folders = [Path(run.folder).relative_to(out).as_posix() for run in method.runs]
    runs = (replace(run, folder=name) for run, name in zip(method.runs, folders, strict=True))
    return replace(method, runs=tuple(runs))


def write_comparison(report: Report, out: Path, plan: list[Table]) -> None:
    """Write ``comparison.json``, ``comparison.csv`` and the report.

    The first two hold nothing that differs between two runs of the same comparison.
    """
    numbers = as_json(report)
    by_name = {entry["name"]: entry["runs"] for entry in plan}
    for entry in numbers["methods"]:
        del entry["events"]  # they have times
        entry["runs"] = by_name[entry["name"]]
    text = json.dumps(numbers, indent=1, allow_nan=False, default=str)
    (out / PLAN).write_text(text + "\n", encoding="utf-8")
    (out / "comparison.csv").write_text(format_comparison(report), encoding="utf-8")
    write_report(report, out / "report.html")


def format_comparison(report: Report) -> str:
    """Return the comparison as tidy CSV: one number, and its limits, to a line.

    ``quantity`` says which: of one ``seed``, the ``mean`` over seeds, the ``difference`` of the
    means to the baseline, or a number to hold a measure against (``beside``). What is not known,
    not defined or infinite is empty.
    """
    columns = ["method", "measure", "quantity", "seed", "value", "lower_95", "upper_95",
               "limits_about", "pairs"]  # fmt: skip
    rows: list[list[object]] = []
    for m, (method, found) in enumerate(zip(report.methods, report.estimates, strict=True)):
        for name, value in report.beside[m].items():
            rows.append([method.name, name, "beside", "", _finite(value), *[""] * 4])
        for key, estimate in found.items():
            rows += [[method.name, key, *line] for line in _list_numbers(method, estimate)]
    return csv_text(columns, rows)


def _list_numbers(method: Method, estimate: Measured) -> list[list[object]]:
    """Return a measure's lines, without method and measure."""
    seeds = zip(method.seeds, estimate.values, strict=True)
    lines: list[list[object]] = [
        ["seed", "" if seed is None else seed, _finite(value), *[""] * 4] for seed, value in seeds
    ]
    lines.append(["mean", "", *_ends(estimate.interval), estimate.source, ""])
    d = estimate.difference
    if d is not None:
        lines.append(["difference", "", *_ends(d.interval), d.about, d.pairs])
    return lines


def _ends(interval: Interval) -> list[object]:
    return [_finite(end) for end in (interval.estimate, interval.lower, interval.upper)]


def _finite(value: float) -> object:
    return value if math.isfinite(value) else ""
