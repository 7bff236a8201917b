"""Methods side by side in Python: objects in, a comparison out, measured as the command does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from equifed.contract.algorithm import AnyAlgorithm
from equifed.contract.evaluation import SPLITS
from equifed.contract.names import show_text
from equifed.data.describe import Table
from equifed.data.federation import Federation
from equifed.metrics.metric import Metric
from equifed.report import (
    DASH,
    Method,
    Report,
    Target,
    as_methods,
    build,
    list_comparison,
    slug,
    write_report,
)
from equifed.runs.compare import write_comparison
from equifed.runs.python_tasks import Task, run_tasks
from equifed.training.files import RunFolderError, lock_folder
from equifed.training.history import History
from equifed.training.missing import TrainingError
from equifed.training.show import open_axes, tabulate_history

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Comparison", "compare"]

SPECIAL = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}",
    "±": r"$\pm$", "\N{MINUS SIGN}": "$-$", "∞": r"$\infty$", DASH: "--",
    "\N{NO-BREAK SPACE}": "~",
}  # fmt: skip


@dataclass(frozen=True, repr=False)
class Comparison:
    """What :func:`equifed.compare` returns.

    Attributes
    ----------
    histories : dict of lists of History
        The runs of every method, one for each seed.
    measured : Report
        Every measure with its interval, and the differences to the baseline within seeds.
    """

    histories: dict[str, list[History]]
    measured: Report

    def to_frame(self) -> Any:
        """Return a tidy data frame: method, seed, client, split, metric, round, value."""
        import pandas as pd

        runs = ((name, history) for name, found in self.histories.items() for history in found)
        return pd.concat(
            [tabulate_history(history, name, history.seed) for name, history in runs],
            ignore_index=True,
        )

    def plot(self, ax: Any = None) -> Any:
        """Draw every method's worst client (and its average, dashed) over the rounds.

        Lines are means over seeds, bands reach from the lowest to the highest seed. Returns the
        matplotlib axes.
        """
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

    def to_latex(self) -> str:
        """Return the comparison as a LaTeX table: a row per measure, a column per method.

        Where it is known, the half width of the 95 % interval over seeds stands behind ±.
        """
        table = self._table()
        lines = [r"\begin{tabular}{l" + "r" * (len(table.header) - 1) + "}", r"\hline"]
        rows = [" & ".join(map(_escape, row)) + r" \\" for row in (table.header, *table.rows)]
        lines += [rows[0], r"\hline", *rows[1:], r"\hline", r"\end{tabular}"]
        return "\n".join(lines) + "\n"

    def report(self, path: str | Path, *, per_client: bool = False) -> Path:
        """Write the HTML report (and, if asked, a page per participant); see ``write_report``."""
        return write_report(self.measured, path, per_client=per_client)

    def _table(self) -> Table:
        report = self.measured
        seeds = max(len(found) for found in self.histories.values())
        title = f"{report.title}, {seeds} seed{'' if seeds == 1 else 's'}"
        if report.scale is not None:
            title += f", {report.scale.split} {report.scale.kind.label}"
        rows = [
            (row["label"], *(_write_cell(cell) for cell in row["cells"]))
            for row in list_comparison(report)
        ]
        return Table(title, ("", *(show_text(m.name) for m in report.methods)), rows)

    def __repr__(self) -> str:
        return str(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()


def _write_cell(cell: Mapping[str, str]) -> str:
    value = cell["value"].removesuffix(" points")
    return f"{value} {cell['note']}" if cell["note"].startswith("±") else value


def _escape(text: str) -> str:
    return "".join(SPECIAL.get(character, character) for character in text)


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
    target: Target | None = None,
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
        Folder for the runs, ``comparison.json``, ``comparison.csv`` and ``report.html``. Runs that
        it holds complete are not run again; one with other settings is refused, and they are named.
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
    _check(methods, numbers, baseline, jobs)
    folder = None if out is None else Path(out)
    splits = list(evaluate) if evaluate is not None else [s for s in SPLITS if s in data.splits()]
    options = {"rounds": rounds, "evaluate": splits, "every": every, "metrics": metrics}
    tasks, titles = [], []
    for seed, (name, given) in itertools.product(numbers, methods.items()):
        algorithm, own = given if isinstance(given, tuple) else (given, {})
        alone = with_alone if seed == numbers[0] else False
        place = None if folder is None else folder / _name_folder(name, seed)
        more = {**engine, **own}
        tasks.append(Task(data, model, loss, more, options, algorithm, seed, alone, place))
        titles.append(f"{name}, seed {seed}")
    results = run_tasks(tasks, jobs, progress, overwrite)
    failed = [f"{t}: {r}" for t, r in zip(titles, results, strict=True) if isinstance(r, str)]
    histories: dict[str, list[History]] = {}
    for name, found in zip(itertools.cycle(methods), results, strict=False):
        if isinstance(found, History):
            histories.setdefault(name, []).append(found)
    if not histories:
        raise TrainingError("Every run failed:\n" + "\n".join(failed))
    base = baseline if baseline in histories else next(iter(histories))
    listed = [_name_folders(method) for method in as_methods(histories)]
    told: dict[str, Any] = {"baseline": base, "target": target, "title": title or data.name}
    report = build(listed, **told, problems=failed)
    if folder is not None:
        _write(report, folder)
    return Comparison(histories, report)


def _check(methods: Mapping[str, Any], seeds: Sequence[int], base: str | None, jobs: int) -> None:
    if not methods:
        raise ValueError("There is nothing to compare: methods is empty.")
    if base is not None and base not in methods:
        raise ValueError(f"there is no method {base!r}; choose from {', '.join(methods)}.")
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be at least one, each once; got {list(seeds)}.")
    folders = [slug(name) for name in methods]
    same = next((name for name in folders if folders.count(name) > 1), None)
    if same is not None:
        raise RunFolderError(f"Two methods would share the folder runs/{same}; rename one.")
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}.")


def _name_folder(name: str, seed: int | None) -> str:
    return f"runs/{slug(name)}/seed-{seed}"


def _name_folders(method: Method) -> Method:
    """Name the folders that runs would have in a comparison's folder."""
    runs = (replace(r, folder=_name_folder(method.name, r.seed)) for r in method.runs)
    return replace(method, runs=tuple(runs))


def _write(report: Report, out: Path) -> None:
    """Write what was measured, as ``equifed compare`` does."""
    plan: list[dict[str, Any]] = [
        {"name": m.name, "runs": [{"seed": r.seed, "folder": r.folder} for r in m.runs]}
        for m in report.methods
    ]
    with lock_folder(out):
        write_comparison(report, out, plan)
