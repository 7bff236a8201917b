"""Comparisons of methods on the same data and seeds, from files or from objects."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from torch import nn

import equifed.report as reports
from equifed.contract.algorithm import AnyAlgorithm
from equifed.contract.arrays import show_text
from equifed.contract.evaluation import SPLITS
from equifed.data.describe import Table
from equifed.data.federation import Federation
from equifed.data.split import refuse_any
from equifed.metrics.metric import Metric
from equifed.runs.config import RunConfig, apply_override, read_table
from equifed.runs.many import Job, Task, check_folders, make_job, run_missing
from equifed.runs.schema import ConfigError, blame, refuse_settings
from equifed.training import History, TrainingError, lock_folder
from equifed.training.show import open_axes, tabulate_history

VARIANTS = "variants"


@dataclass(frozen=True, repr=False)
class Comparison:
    """What :func:`equifed.compare` returns.

    >>> import equifed as ef
    >>> data, methods = ef.load("fashion-three"), {"plain": ef.FedAvg(), "fair": ef.AFL()}
    >>> found = ef.compare(methods, data, "logistic", rounds=20, seeds=2)
    >>> last = found.to_frame().query("metric == 'accuracy' and split == 'test' and round == 20")
    >>> last.groupby("method")["value"].min().round(1).to_dict()  # the worst client
    {'fair': 0.6, 'plain': 0.3}
    """

    histories: dict[str, list[History]]  # one for each seed
    measured: reports.Report  # every measure, and the differences to the baseline within seeds

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
        return reports.write_report(self.measured, path, per_client=per_client)

    def __repr__(self) -> str:
        return str(tabulate_comparison(self.measured))

    def _repr_html_(self) -> str:
        return tabulate_comparison(self.measured)._repr_html_()


def tabulate_comparison(report: reports.Report, differences: bool = False) -> Table:
    """Return every measure of every method, or how much it differs from the baseline's."""
    seeds = max(len(method.runs) for method in report.methods)
    title = f"{report.title}, {seeds} seed{'' if seeds == 1 else 's'}"
    if report.scale is not None:
        title += f", {report.scale.split} {report.scale.kind.label}"
    if differences:
        title = f"difference to {report.methods[report.baseline].name} within seeds"
    rows = []
    for row in reports.list_comparison(report):
        cells = [cell["change"] for cell in row["cells"]]
        if not differences:
            notes = (f" {c['note']}" if c["note"].startswith("±") else "" for c in row["cells"])
            values = (c["value"].removesuffix(" points") for c in row["cells"])
            cells = [value + note for value, note in zip(values, notes, strict=True)]
        if any(cells):
            rows.append((row["label"], *cells))
    header = ("", *(show_text(method.name) for method in report.methods))
    return Table(show_text(title), header, rows)


def compare(
    methods: Mapping[str, AnyAlgorithm | str | Mapping[str, Any] | tuple[Any, Mapping[str, Any]]],
    data: Federation, model: nn.Module | str, *, rounds: int, seeds: int | Sequence[int] = 5,
    loss: Any = "auto", evaluate: Sequence[str] | None = None, every: int = 1,
    metrics: Sequence[str | Metric | Callable[[Any, Any], float]] = (), baseline: str | None = None,
    target: float | None = None, title: str | None = None, out: str | Path | None = None,
    overwrite: bool = False, jobs: int = 1, progress: bool | None = None,
    with_alone: Literal["auto"] | bool = "auto", **engine: Any,
) -> Comparison:  # fmt: skip
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
    planned, place = list[Task](), None if out is None else Path(out)
    for (name, seed), folder in name_folders(methods, numbers).items():
        method = methods[name]
        algorithm, more = method if isinstance(method, tuple) else (method, {})
        alone = with_alone if seed == numbers[0] else False
        what = (data, model, loss, {**engine, **more}, options, algorithm, alone)
        planned.append(Task(name, seed, None if place is None else place / folder, *what))
    console = Console(stderr=True, quiet=progress is False)
    told: Any = {"target": target, "title": title or data.name}
    found = _run_and_measure(planned, place, jobs, overwrite, console, progress, baseline, **told)
    return Comparison(*found)


# -- configurations ---------------------------------------------------------------------------


def read_variants(
    paths: Sequence[str | Path], overrides: Iterable[str] = (), over: Sequence[str] = ()
) -> dict[str, RunConfig]:
    """Read configurations to compare: several files, named after them, or files with variants.

    Each of them is taken with every combination of the values in ``over``
    (``key.path=value,value,...``).
    """
    points, overrides, found = read_grid(over), list(overrides), dict[str, RunConfig]()
    for path in map(Path, paths):
        table = read_table(path)
        alone = over and len(paths) == 1 and VARIANTS not in table
        variants = table.pop(VARIANTS, {path.stem: {}})
        tables = variants.values() if isinstance(variants, dict) else [None]
        if not all(isinstance(variant, dict) for variant in tables):
            raise ConfigError([f"{path}: variants must be tables, as [variants.fedavg.algorithm]"])
        for (variant, more), (point, chosen) in itertools.product(variants.items(), points.items()):
            name = point if alone else ", ".join(filter(None, (variant, point)))
            if name in found:
                raise ConfigError([f"two configurations are called {name!r}; rename a file"])
            merged = merge_tables(table, more)
            for override in (*overrides, *chosen):
                apply_override(merged, override)
            with blame(f"{name}: "):
                found[name] = RunConfig.from_dict(merged, base=path.parent)
    if not found:
        raise ConfigError(["there is nothing to compare; name configuration files"])
    first, base = next(iter(found.items()))
    if other := [name for name, config in found.items() if config.data != base.data]:
        why = f"its [data] is not that of {first}; compare methods on the same data"
        raise ConfigError([f"{name}: {why}" for name in other])
    return found


def read_grid(texts: Sequence[str]) -> dict[str, list[str]]:
    """Return the overrides of every combination of values, ``key.path=value,value,...`` each.

    >>> read_grid(["algorithm.objective.rho=0.1,1"])
    {'rho = 0.1': ['algorithm.objective.rho=0.1'], 'rho = 1': ['algorithm.objective.rho=1']}
    """
    grid: dict[str, list[str]] = {}
    for text in texts:
        key, _, rest = (part.strip() for part in text.partition("="))
        values = [value.strip() for value in rest.split(",")]
        whole, twice = key and all(values), key in grid or len(set(values)) < len(values)
        refuse_settings(
            (not whole, f"--over takes key.path=value,value,...; got {text!r}"),
            (twice, f"--over {text}: the key or a value appears twice"),
            (key == "seed", "--over seed: seeds are not a setting; use --seeds"),
        )
        grid[key] = values
    short = [key.rpartition(".")[2] for key in grid]  # settings are named by their last word
    names = short if len(set(short)) == len(grid) else list(grid)
    return {
        ", ".join(f"{name} = {value}" for name, value in zip(names, values, strict=True)): [
            f"{key}={value}" for key, value in zip(grid, values, strict=True)
        ]
        for values in itertools.product(*grid.values())
    }


def merge_tables(table: Mapping[str, Any], variant: Mapping[str, Any]) -> dict[str, Any]:
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


def plan_jobs(variants: Mapping[str, RunConfig], seeds: int, out: Path) -> list[Job]:
    """Return the runs, seed by seed, so that an interrupted comparison is a smaller one."""
    start = next(iter(variants.values())).seed
    folders = name_folders(variants, range(start, start + seeds))
    return [make_job(n, variants[n], seed, out / path) for (n, seed), path in folders.items()]


def compare_configs(
    variants: Mapping[str, RunConfig], out: str | Path, *, seeds: int = 5, jobs: int = 1,
    overwrite: bool = False, baseline: str | None = None, target: float | None = None,
    console: Console | None = None,
) -> reports.Report:  # fmt: skip
    """Run what is missing of a comparison of configurations, measure it, and write it down."""
    _check(variants, range(seeds), baseline)
    planned, console = plan_jobs(variants, seeds, Path(out)), console or Console(quiet=True)
    given = (jobs, overwrite, console, False if console.quiet else None, baseline)
    return _run_and_measure(planned, Path(out), *given, target=target)[1]


# -- both -------------------------------------------------------------------------------------


def _check(methods: Mapping[str, Any], seeds: Sequence[int], base: str | None) -> None:
    strange, once = base not in (None, *methods), seeds and len(set(seeds)) == len(seeds)
    refuse_any(
        (not methods, "There is nothing to compare: methods is empty."),
        (strange, f"there is no method {base!r}; choose from {', '.join(methods)}."),
        (not once, f"seeds must be at least one, each once; got {list(seeds)}."),
    )


def name_folders(names: Iterable[str], seeds: Sequence[int]) -> dict[tuple[str, int], str]:
    """Return the folder of every run in that of a comparison, seed by seed."""
    short: dict[str, str] = {}
    for name in names:
        own = reports.slug(name)
        short[name] = own if own not in short.values() else f"{own}-{len(short)}"
    pairs = itertools.product(seeds, short)
    return {(name, seed): f"runs/{short[name]}/seed-{seed}" for seed, name in pairs}


def _run_and_measure(
    planned: Sequence[Job | Task], out: Path | None, jobs: int, overwrite: bool, console: Console,
    progress: bool | None, baseline: str | None, **told: Any,
) -> tuple[dict[str, list[History]], reports.Report]:  # fmt: skip
    """Run what is missing; return the histories that are in memory, and the report.

    ``comparison.json`` is the same for two runs of the same plan.
    """
    histories, plan = dict[str, list[History]](), dict[str, list[dict[str, Any]]]()
    with lock_folder(out) if out is not None else nullcontext():
        check_folders(planned, overwrite)
        found = run_missing(planned, jobs, console, progress)
        failed = [reason for reason in found if isinstance(reason, str)]
        for job, history in zip(planned, found, strict=True):
            if history is None and isinstance(job, Task):
                history = History.load(job.folder)
            if isinstance(history, History):
                histories.setdefault(job.name, []).append(history)
            if out is not None:
                folder = job.folder.relative_to(out).as_posix()
                plan.setdefault(job.name, []).append({"seed": job.seed, "folder": folder})
        if out is None:
            methods = reports.as_methods(histories) if histories else []
        else:
            runs = [{"name": name, "runs": runs} for name, runs in plan.items()]
            methods = reports.read_comparison(out, runs)
        if not methods:
            raise TrainingError("Every run failed:\n" + "\n".join(failed))
        if baseline not in [method.name for method in methods]:  # it failed
            baseline = methods[0].name
        report = reports.build(methods, baseline=baseline, problems=failed, root=out, **told)
        if out is not None:
            numbers = reports.as_json(report)
            for entry in numbers["methods"]:
                del entry["events"]  # they have times
                entry["runs"] = plan[entry["name"]]
            text = json.dumps(numbers, indent=1, allow_nan=False, default=str)
            (out / reports.PLAN).write_text(text + "\n", encoding="utf-8")
            reports.write_report(report, out / "report.html")
    return histories, report
