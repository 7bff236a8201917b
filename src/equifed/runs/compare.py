"""``equifed compare``: methods on the same data and seeds, and what fairness cost."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equifed.report import Report, Target, as_json, build, write_report
from equifed.report.figures import csv_text
from equifed.report.methods import PLAN, Method, read_comparison
from equifed.report.page import slug
from equifed.report.tables import list_comparison
from equifed.runs.config import RunConfig, apply_override
from equifed.runs.jobs import Job, check, job, only_one, run_jobs
from equifed.runs.settings import ConfigError
from equifed.training.loop import TrainingError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

Table = dict[str, Any]
VARIANTS = "variants"


def read_variants(
    paths: Sequence[str | Path], overrides: Iterable[str] = ()
) -> dict[str, RunConfig]:
    """Read configurations to compare: several files, named after them, or files with variants.

    A file with tables ``[variants.NAME]`` stands for one configuration per variant: the rest of the
    file with the variant's settings put in (see :func:`merged`).
    """
    found: dict[str, RunConfig] = {}
    for path in map(Path, paths):
        for name, table in _tables(path, list(overrides)).items():
            if name in found:
                raise ConfigError([f"two configurations are called {name!r}; rename a file"])
            try:
                found[name] = RunConfig.from_dict(table, base=path.parent)
            except ConfigError as error:
                raise ConfigError([f"{name}: {p}" for p in error.problems]) from error
    _comparable(found)
    return found


def _tables(path: Path, overrides: Sequence[str]) -> dict[str, Table]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path} is not a TOML file: {error}"]) from error
    variants = table.pop(VARIANTS, {path.stem: {}})
    if not isinstance(variants, dict) or not all(isinstance(v, dict) for v in variants.values()):
        raise ConfigError([f"{path}: variants must be tables, as [variants.fedavg.algorithm]"])
    names = {name: merged(table, variant) for name, variant in variants.items()}
    for one in names.values():
        for override in overrides:
            apply_override(one, override)
    return names


def merged(table: Mapping[str, Any], variant: Mapping[str, Any]) -> Table:
    """Return a table with the settings of a variant in the place of its own.

    Tables are merged key by key, but one that names something (``name``) replaces the other: the
    settings of one algorithm mean nothing to another.

    >>> merged({"rounds": 5, "model": {"name": "logistic", "l2": 0.1}}, {"model": {"l2": 0.2}})
    {'rounds': 5, 'model': {'name': 'logistic', 'l2': 0.2}}
    >>> merged({"algorithm": {"name": "fedavg", "local": {}}}, {"algorithm": {"name": "afl"}})
    {'algorithm': {'name': 'afl'}}
    """
    out = dict(table)
    for key, value in variant.items():
        old = out.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping) and "name" not in value
        out[key] = merged(old, value) if both and isinstance(old, Mapping) else value
    return out


def _comparable(found: Mapping[str, RunConfig]) -> None:
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


def jobs_for(variants: Mapping[str, RunConfig], seeds: int, out: Path) -> list[Job]:
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
        job(name, config, seed, out / "runs" / folders[name] / f"seed-{seed}")
        for seed in range(start, start + seeds)
        for name, config in variants.items()
    ]


def compare(
    variants: Mapping[str, RunConfig],
    out: str | Path,
    *,
    seeds: int = 5,
    processes: int = 1,
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
        ``report.html``. Complete runs in it are kept and begun ones are gone on with.
    seeds : int
        How many seeds, the same for all.
    processes : int
        How many runs at a time. The results do not depend on it.
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
    jobs = jobs_for(variants, seeds, out)
    with only_one(out):
        check(jobs, overwrite)
        failed = run_jobs(jobs, processes=processes, console=console)
        plan = plan_of(jobs, out)
        report = measure(out, plan, baseline=baseline, target=target, title=title, problems=failed)
        write_comparison(report, out, plan)
    return report


def plan_of(jobs: Sequence[Job], out: Path) -> list[Table]:
    """Return which runs belong to which method, as the comparison's file has it."""
    plan: dict[str, list[Table]] = {}
    for one in jobs:
        folder = one.folder.relative_to(out).as_posix()
        plan.setdefault(one.name, []).append({"seed": one.config.seed, "folder": folder})
    return [{"name": name, "runs": runs} for name, runs in plan.items()]


def measure(out: Path, plan: list[Table], *, problems: Sequence[str], **options: Any) -> Report:
    """Read the complete runs of a comparison and measure them."""
    methods = [_relative(method, out) for method in read_comparison(out, plan)]
    if not methods:
        raise TrainingError("Every run failed:\n" + "\n".join(problems))
    names = [method.name for method in methods]
    if options.get("baseline") not in names:  # it failed; the first one left takes its place
        options["baseline"] = names[0]
    return build(methods, problems=problems, **options)


def _relative(method: Method, out: Path) -> Method:
    """Name run folders from the comparison's, so that its files do not depend on where it is."""
    runs = [
        replace(run, folder=Path(run.folder).relative_to(out).as_posix()) for run in method.runs
    ]
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
    (out / "comparison.csv").write_text(comparison_csv(report), encoding="utf-8")
    write_report(report, out / "report.html")


def comparison_csv(report: Report) -> str:
    """Return one line per method and measure."""
    columns = ["method", "measure", "mean", "lower_95", "upper_95", "limits_about", "difference",
               "difference_lower_95", "difference_upper_95", "pairs", "seeds"]  # fmt: skip
    rows = []
    for method, found in zip(report.methods, report.estimates, strict=True):
        for key, e in found.items():
            d = e.difference
            paired = [""] * 3 if d is None else [d.estimate, d.lower, d.upper]
            values = " ".join(f"{value:.8g}" for value in e.values)
            limits = [e.interval.estimate, e.interval.lower, e.interval.upper, e.source]
            rows.append([method.name, key, *limits, *paired, e.pairs, values])
    return csv_text(columns, rows)


TERMINAL = {
    "average_by_client": "average",
    "worst": "worst",
    "spread": "spread",
    "gini": "Gini",
    "rounds_to_target": "to target",
}
"""What fits into a terminal; the report has the rest."""


def comparison_table(report: Report) -> RichTable:
    """Return the comparison for a terminal: a row per method, differences below."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    seeds = max(len(method.runs) for method in report.methods)
    about = f"{seeds} seeds, ± 95 %" if seeds > 1 else "one seed"
    base = report.methods[report.baseline].name
    table = Table(
        title=f"{report.title}, {about}; below: difference to {base} within seeds",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    rows = dict(zip((m.key for m in report.measures), list_comparison(report), strict=True))
    table.add_column("")
    for label in TERMINAL.values():
        table.add_column(label, justify="right")
    for m, method in enumerate(report.methods):
        cells = []
        for key in TERMINAL:
            cell = rows[key]["cells"][m]
            note = cell["note"] if cell["note"].startswith("±") else ""
            value = Text(" ".join(filter(None, [cell["value"].removesuffix(" points"), note])))
            colour = {"better": "green", "worse": "red"}.get(cell["tone"], "dim")
            cells.append(value.append("\n" + cell["change"], colour) if cell["change"] else value)
        table.add_row(Text(method.name), *cells)
    return table
