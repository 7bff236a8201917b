"""Methods on the same data and seeds, and what fairness cost: measured, shown, written down."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from torch import nn

from equifed.contract.algorithm import AnyAlgorithm
from equifed.contract.arrays import show_text
from equifed.contract.evaluation import SPLITS
from equifed.data.describe import Table
from equifed.data.federation import Federation
from equifed.metrics import Interval
from equifed.metrics.metric import Metric
from equifed.report import (
    PLAN,
    Method,
    Report,
    as_json,
    as_methods,
    build,
    csv_text,
    find_frontier,
    frontier_page,
    frontier_svg,
    list_comparison,
    read_comparison,
    write_report,
)
from equifed.runs.config import RunConfig
from equifed.runs.many import (
    Job,
    Planned,
    Task,
    check_folders,
    make_job,
    name_folders,
    name_points,
    read_grid,
    read_points,
    run_all,
    run_jobs,
    tell_kept,
)
from equifed.runs.schema import ConfigError
from equifed.training.files import lock_folder
from equifed.training.history import History
from equifed.training.play_round import TrainingError
from equifed.training.show import open_axes, tabulate_history

COLUMNS = ("average_by_client", "worst", "worst_20_percent", "spread", "gini")
"""Measures in the table of a sweep."""


@dataclass(frozen=True, repr=False)
class Comparison:
    """What :func:`equifed.compare` returns."""

    histories: dict[str, list[History]]  # one for each seed
    measured: Report  # every measure, and the differences to the baseline within seeds

    def to_frame(self) -> Any:
        """Return a tidy data frame: method, seed, client, split, metric, round, value."""
        import pandas as pd

        runs = ((name, history) for name, found in self.histories.items() for history in found)
        frames = [tabulate_history(history, name) for name, history in runs]
        return pd.concat(frames, ignore_index=True)

    def plot(self, ax: Any = None) -> Any:
        """Draw every method's worst client (and its average, dashed) over the rounds."""
        scale = self.measured.scale
        if scale is None:
            raise ValueError("There is nothing to draw: nothing was evaluated.")
        ax = open_axes(ax)
        pick = np.nanmin if scale.higher_is_better else np.nanmax
        for number, (name, found) in enumerate(self.histories.items()):
            series = [history.series(scale.metric, scale.split) for history in found]
            shared = sorted(set.intersection(*({*rounds.tolist()} for rounds, _ in series)))
            kept = [v[np.isin(r, shared)] for r, v in series]
            kept = [v[:, ~np.isnan(v).all(axis=0)] for v in kept]
            worst = np.array([pick(v, axis=1) for v in kept])
            average = np.array([np.nanmean(v, axis=1) for v in kept])
            colour = f"C{number}"
            ax.plot(shared, worst.mean(axis=0), "-", color=colour, label=f"{name}, worst client")
            ax.plot(shared, average.mean(axis=0), "--", color=colour, label=f"{name}, average")
            ends = worst.min(axis=0), worst.max(axis=0)
            ax.fill_between(shared, *ends, color=colour, alpha=0.2, linewidth=0)
        ax.set(xlabel="round", ylabel=f"{scale.split} {scale.kind.label}")
        ax.legend()
        return ax

    def report(self, path: str | Path, *, per_client: bool = False) -> Path:
        """Write the HTML report (and, if asked, a page per participant); see ``write_report``."""
        return write_report(self.measured, path, per_client=per_client)

    def __repr__(self) -> str:
        return str(tabulate_comparison(self.measured))

    def _repr_html_(self) -> str:
        return tabulate_comparison(self.measured)._repr_html_()


def tabulate_comparison(report: Report, differences: bool = False) -> Table:
    """Return every measure of every method, or how much it differs from the baseline's."""
    seeds = max(len(method.runs) for method in report.methods)
    title = f"{report.title}, {seeds} seed{'' if seeds == 1 else 's'}"
    if report.scale is not None:
        title += f", {report.scale.split} {report.scale.kind.label}"
    if differences:
        title = f"difference to {report.methods[report.baseline].name} within seeds"
    rows = [
        (row["label"], *(c["change"] if differences else _write_cell(c) for c in row["cells"]))
        for row in list_comparison(report)
    ]
    header = ("", *(show_text(method.name) for method in report.methods))
    return Table(show_text(title), header, [row for row in rows if any(row[1:])])


def _write_cell(cell: Mapping[str, str]) -> str:
    value = cell["value"].removesuffix(" points")
    return f"{value} {cell['note']}" if cell["note"].startswith("±") else value


def compare(
    methods: Mapping[str, AnyAlgorithm | str | Mapping[str, Any] | tuple[Any, Mapping[str, Any]]],
    data: Federation,
    model: nn.Module | str,
    *,
    rounds: int,
    seeds: int | Sequence[int] = 5,
    loss: Any = "auto",
    evaluate: Sequence[str] | None = None,
    every: int = 1,
    metrics: Sequence[str | Metric | Callable[[Any, Any], float]] = (),
    baseline: str | None = None,
    target: float | None = None,
    title: str | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    jobs: int = 1,
    progress: bool | None = None,
    with_alone: Literal["auto"] | bool = "auto",
    **engine: Any,
) -> Comparison:
    """Train methods on the same data and seeds, and measure them as ``equifed compare`` does.

    Parameters
    ----------
    methods : mapping
        What to compare, by name: an algorithm, its name in the catalogue, or its table as a
        configuration file has it; or a pair of one and arguments of :func:`equifed.simulate` for
        it alone, as ``("scaff-pd", {"own": "bias"})``. The first one is the baseline unless
        another is named.
    data : Federation
        The clients' data.
    model, loss : module or str, callable or str
        As for :func:`equifed.simulate`. A module starts from its own parameters with every seed.
    rounds, every, metrics
        As for :func:`equifed.train`.
    seeds : int or sequence of int
        How many, counted from 0; or which.
    evaluate : sequence of str, optional
        Splits to measure on; by default all that there are.
    baseline, target, title
        As for the report: to whom differences are, what "rounds to target" means, its headline.
    out : path, optional
        Folder for the runs, ``comparison.json`` and ``report.html``. Runs that it holds complete
        are not run again; one with other settings is refused, and they are named.
    overwrite : bool
        Run everything again.
    jobs : int
        How many runs side by side, in processes of their own: what is handed over must be
        picklable, and a script needs ``if __name__ == "__main__":``. Results do not depend on it.
    progress : bool, optional
        Show a bar for each run; by default in terminals and notebooks.
    with_alone : "auto" or bool
        Fit every client's own model beside the first seed's runs, as for :func:`equifed.run`.
    **engine
        Further arguments of :func:`equifed.simulate`, as ``l2``.

    Examples
    --------
    >>> import equifed as ef
    >>> data = ef.load("synthetic-regression", samples=5)
    >>> found = ef.compare({"plain": "fedavg", "fair": "afl"}, data, "linear", rounds=2, seeds=2)
    >>> sorted(found.to_frame()["method"].unique())
    ['fair', 'plain']
    """
    numbers = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    _check(methods, numbers, baseline)
    splits = list(evaluate) if evaluate is not None else [s for s in SPLITS if s in data.splits()]
    options = {"rounds": rounds, "evaluate": splits, "every": every, "metrics": metrics}
    planned = []
    for (name, seed), folder in name_folders(methods, numbers).items():
        given = methods[name]
        algorithm, more = given if isinstance(given, tuple) else (given, {})
        alone = with_alone if seed == numbers[0] else False
        what = (data, model, loss, {**engine, **more}, options, algorithm, alone)
        planned.append(Task(name, seed, None if out is None else Path(out) / folder, *what))
    histories, failed = _run_tasks(planned, jobs, progress, overwrite)
    told: dict[str, Any] = {"target": target, "title": title or data.name}
    if not histories or out is None:
        measured = _measure(as_methods(histories) if histories else [], failed, baseline, **told)
    else:
        with lock_folder(Path(out)):
            measured = _conclude(planned, failed, Path(out), baseline, **told)
    return Comparison(histories, measured)


def _check(methods: Mapping[str, Any], seeds: Sequence[int], base: str | None) -> None:
    if not methods:
        raise ValueError("There is nothing to compare: methods is empty.")
    if base is not None and base not in methods:
        raise ValueError(f"there is no method {base!r}; choose from {', '.join(methods)}.")
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be at least one, each once; got {list(seeds)}.")


def _run_tasks(
    tasks: Sequence[Task], jobs: int, progress: bool | None, overwrite: bool
) -> tuple[dict[str, list[History]], list[str]]:
    """Run what is not finished; return the histories of every method, and what failed."""
    found: list[Any] = [None if overwrite else task.load() for task in tasks]
    left = [i for i, history in enumerate(found) if history is None]
    console = Console(stderr=True, quiet=progress is False)
    tell_kept(len(tasks) - len(left), len(tasks), console)
    for i, made in zip(left, run_all([tasks[i] for i in left], jobs, progress), strict=True):
        found[i] = made
    histories: dict[str, list[History]] = {}
    for task, history in zip(tasks, found, strict=True):
        if isinstance(history, History):
            histories.setdefault(task.name, []).append(history)
    return histories, [reason for reason in found if isinstance(reason, str)]


def _conclude(
    planned: Sequence[Planned], failed: Sequence[str], out: Path, base: str | None, **told: Any
) -> Report:
    """Measure the complete runs in the folder of a comparison, and write it down."""
    plan: dict[str, list[dict[str, Any]]] = {}
    for job in planned:
        folder = job.folder.relative_to(out).as_posix()
        plan.setdefault(job.name, []).append({"seed": job.seed, "folder": folder})
    methods = read_comparison(out, [{"name": name, "runs": r} for name, r in plan.items()])
    # Folders are named from the comparison's, so that its files do not depend on where it is.
    report = _measure(methods, failed, base, root=out, **told)
    write_comparison(report, out, plan)
    return report


def _measure(
    methods: list[Method], failed: Sequence[str], baseline: str | None, **told: Any
) -> Report:
    """Measure complete runs; where the baseline failed, the first one left takes its place."""
    if not methods:
        raise TrainingError("Every run failed:\n" + "\n".join(failed))
    names = [method.name for method in methods]
    base = baseline if baseline in names else names[0]
    return build(methods, baseline=base, problems=failed, **told)


# -- configurations ---------------------------------------------------------------------------


def plan_jobs(variants: Mapping[str, RunConfig], seeds: int, out: Path) -> list[Job]:
    """Return the runs, seed by seed, so that an interrupted comparison is a smaller one."""
    start = next(iter(variants.values())).seed
    folders = name_folders(variants, range(start, start + seeds))
    return [make_job(n, variants[n], seed, out / path) for (n, seed), path in folders.items()]


def compare_configs(
    variants: Mapping[str, RunConfig], out: str | Path, *, seeds: int = 5, jobs: int = 1,
    overwrite: bool = False, baseline: str | None = None, target: float | None = None,
    title: str | None = None, console: Console | None = None,
) -> Report:  # fmt: skip
    """Run what is missing of a comparison of configurations, measure it, and write it down."""
    out, console = Path(out), console or Console(quiet=True)
    _check(variants, range(seeds), baseline)
    planned = plan_jobs(variants, seeds, out)
    with lock_folder(out):
        check_folders(planned, overwrite)
        failed = run_jobs(planned, at_once=jobs, console=console)
        return _conclude(planned, failed, out, baseline, target=target, title=title)


def sweep(
    path: str | Path, over: Sequence[str], out: str | Path, *, overrides: Sequence[str] = (),
    seeds: int = 1, **options: Any,
) -> tuple[Report, list[dict[str, Any]]]:  # fmt: skip
    """Compare a configuration with every combination of values (``key.path=value,value,...``)."""
    path, out, grid = Path(path), Path(out), read_grid(over)
    options |= {"seeds": seeds, "title": f"{path.stem} over {' and '.join(grid)}"}
    report = compare_configs(read_points(path, grid, overrides), out, **options)
    if report.scale is None:
        raise ConfigError(["nothing was evaluated; see [evaluate] and the splits of the data"])
    values, last = name_points(grid), [*grid.values()][-1]
    marks, points = find_frontier(report.told), []
    for told, mark in zip(report.told, marks, strict=True):
        method, found = told.method, told.estimates
        point: dict[str, Any] = dict(zip(grid, values[method.name], strict=True))
        for key in COLUMNS:
            e = found[key].interval if key in found else Interval(math.nan, math.nan, math.nan)
            limits = {key: e.estimate, f"{key}_lower_95": e.lower, f"{key}_upper_95": e.upper}
            point |= {name: None if math.isnan(value) else value for name, value in limits.items()}
        points.append({**point, "non_dominated": int(mark)})
    colours = [1] * len(points)  # or one for each value of the second setting
    if len(grid) > 1:
        colours = [1 + last.index(values[method.name][-1]) for method in report.methods]
    numbers = csv_text(list(points[0]), [list(point.values()) for point in points])
    (out / "frontier.csv").write_text(numbers, encoding="utf-8")
    (out / "frontier.svg").write_text(frontier_svg(report, colours), encoding="utf-8")
    page = frontier_page(report, colours, numbers)
    (out / "frontier.html").write_text(page, encoding="utf-8")
    return report, points


# -- files ------------------------------------------------------------------------------------


def write_comparison(report: Report, out: Path, plan: Mapping[str, list[dict[str, Any]]]) -> None:
    """Write the report and ``comparison.json``, which is the same for two runs of the same plan."""
    numbers = as_json(report)
    for entry in numbers["methods"]:
        del entry["events"]  # they have times
        entry["runs"] = plan[entry["name"]]
    text = json.dumps(numbers, indent=1, allow_nan=False, default=str)
    (out / PLAN).write_text(text + "\n", encoding="utf-8")
    write_report(report, out / "report.html")
