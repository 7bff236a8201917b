"""The frontier between average and worst-served clients, walked as one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from equifed.contract.algorithm import AnyAlgorithm
from equifed.contract.clients import Clients
from equifed.data.describe import Table
from equifed.metrics import Interval, accuracy_intervals, find_metric, summary
from equifed.objectives.base import SaddleObjective
from equifed.report import csv_text
from equifed.runs.build import build_run, limit_threads
from equifed.runs.config import RunConfig
from equifed.runs.path import Walk, objective_of_strength, objectives_between
from equifed.runs.schema import ConfigError
from equifed.training.files import RunFolderError, lock_folder
from equifed.training.history import History
from equifed.training.show import open_axes
from equifed.training.tables import RoundRecord

AVERAGE, TAIL = "average_by_client", "worst_20_percent"
TABLE, PICTURE, CHOSEN = "frontier.csv", "frontier.png", "chosen"


@dataclass(frozen=True)
class FrontierPoint:
    """One strength of fairness: the run, and what it gives on the split that is looked at."""

    strength: float
    objective: SaddleObjective
    history: History
    average: Interval
    tail: Interval
    way: tuple[RoundRecord, ...] = ()  # rounds for objectives between the point before and this one

    @property
    def rounds(self) -> int:
        """Rounds that the point took; the round that proved the point before it is not another."""
        return sum("continued" not in r.numbers for r in (*self.way, *self.history.rounds))

    @property
    def exchanges(self) -> int:
        """Exchanges with the clients that the point took."""
        return sum(r.exchanges for r in (*self.way, *self.history.rounds))

    @property
    def gap(self) -> float | None:
        """How far the objective is at most from its minimum; None: nothing was proved."""
        told = self.history.certificate()
        return told["gap"] if isinstance(told, dict) else None


@dataclass(frozen=True, repr=False)
class Frontier:
    """What :func:`frontier` returns."""

    points: tuple[FrontierPoint, ...]
    chosen: FrontierPoint
    metric: str
    split: str
    rule: str

    @property
    def rounds(self) -> int:
        """Rounds of the whole path."""
        return sum(point.rounds for point in self.points)

    @property
    def exchanges(self) -> int:
        """Exchanges with the clients of the whole path."""
        return sum(point.exchanges for point in self.points)

    def table(self) -> Table:
        """Return a row for every point."""
        header = ("strength", "average", "worst fifth", "rounds", "certified", "")
        rows = [
            (
                f"{p.strength:.2f}", _show(p.average), _show(p.tail), str(p.rounds),
                "" if p.gap is None else f"{p.gap:.2g}", "chosen" if p is self.chosen else "",
            )
            for p in self.points
        ]  # fmt: skip
        return Table(f"{self.split} {self.metric}; {self.rule}", header, rows)

    def rows(self) -> list[dict[str, Any]]:
        """Return the numbers of every point."""
        return [
            {
                "strength": p.strength, "average": p.average.estimate,
                "average_lower": p.average.lower, "average_upper": p.average.upper,
                "worst_20": p.tail.estimate, "worst_20_lower": p.tail.lower,
                "worst_20_upper": p.tail.upper, "rounds": p.rounds, "gap": p.gap,
                "chosen": p is self.chosen,
            }
            for p in self.points
        ]  # fmt: skip

    def plot(self, ax: Any = None) -> Any:
        """Draw the average against the worst fifth, with intervals; returns matplotlib's axes."""
        ax = open_axes(ax)
        xs, ys = ([getattr(p, name) for p in self.points] for name in ("average", "tail"))
        ax.errorbar(
            [x.estimate for x in xs], [y.estimate for y in ys],
            xerr=_arms(xs), yerr=_arms(ys), fmt="o-", elinewidth=0.6, capsize=2,
        )  # fmt: skip
        ax.plot(
            self.chosen.average.estimate, self.chosen.tail.estimate, "s", ms=11, mfc="none",
            mec="black", label=f"chosen: strength {self.chosen.strength:.2f}",
        )  # fmt: skip
        ax.set(xlabel=f"{self.split} {self.metric}, average over clients")
        ax.set(ylabel=f"{self.split} {self.metric}, worst fifth of the clients")
        ax.legend()
        return ax

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write the table, the picture (with matplotlib) and the chosen run into a folder."""
        out, rows = Path(folder), self.rows()
        refuse_frontier(out, overwrite)
        out.mkdir(parents=True, exist_ok=True)
        with lock_folder(out):
            self.chosen.history.save(out / CHOSEN, overwrite=True)
            self._draw(out / PICTURE)
            numbers = csv_text(list(rows[0]), [list(row.values()) for row in rows])
            (out / TABLE).write_text(numbers, encoding="utf-8")
        return out

    def _draw(self, path: Path) -> None:
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError:  # an extra
            return
        figure = Figure(figsize=(6, 4.5), layout="constrained")
        self.plot(figure.subplots())
        figure.savefig(path, dpi=150)

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def frontier(
    algorithm: AnyAlgorithm,
    clients: Clients,
    *,
    points: int | Sequence[float] = 12,
    rounds: int = 200,
    gap: float = 0.005,
    split: str = "validation",
    metric: str | None = None,
    give_up: float = 0.01,
    seed: int = 0,
    progress: bool | None = False,
) -> Frontier:
    """Walk from the average to the worst case with warm starts, and pick a point.

    The point that is picked is the fairest (best worst fifth of the clients) whose average is not
    more than ``give_up`` below the best average, both on the split: never on test data.

    Parameters
    ----------
    algorithm : Algorithm
        One with an ``objective``, as :class:`equifed.ScaffPD`; its objective is replaced.
    clients : Clients
        On whom, as :func:`equifed.simulate` gives them.
    points : int or sequence of float
        How many strengths from 0 to 1, or which, in rising order.
    rounds : int
        Rounds of a point at most.
    gap : float
        A point ends when its objective is certified to be within this fraction of its minimum;
        models without a certificate take all their rounds.
    split : {"validation", "train"}
        Samples that points are judged by.
    metric : str, optional
        Accuracy for classes and MSE for numbers, if not given.
    give_up : float
        How much of the average may be given up: 0.01 is one point of accuracy; of other metrics
        one per cent.
    seed : int
        Of every draw.
    progress : bool, optional
        Show a bar for each point.

    Examples
    --------
    >>> import equifed as ef
    >>> data = ef.load("fashion-three", train=40, test=20).split(validation=0.3)
    >>> clients = ef.simulate(data, "logistic", l2=0.1)
    >>> path = ef.frontier(ef.ScaffPD(ef.objectives.Average()), clients, points=3)
    >>> [point.strength for point in path.points]
    [0.0, 0.5, 1.0]
    """
    strengths = _check(algorithm, points, split, give_up)
    walk = Walk(algorithm, clients, gap, {"rounds": rounds, "seed": seed})
    measured: dict[str, Any] = {"evaluate": (split,), "every": rounds, "progress": progress}
    found: list[FrontierPoint] = []
    objective, spread = None, 0.0
    for strength in strengths:
        last, objective = objective, objective_of_strength(strength, spread)
        way = walk.pass_by(objectives_between(last, objective))
        history = walk.train(objective, fresh=bool(way), **measured)
        if metric is None:
            metric = (history.main_metric() or ("loss", split))[0]
        average, tail = _measure(history, metric, split)
        found.append(FrontierPoint(strength, objective, history, average, tail, way))
        if strength == 0:
            losses = np.array(list(history.per_client("loss", split).values()))
            spread = float(np.nanstd(losses))
    assert metric is not None
    chosen, rule = _pick(found, metric, give_up)
    return Frontier(tuple(found), chosen, metric, split, rule)


def walk_config(
    config: str | Path, overrides: Sequence[str], out: Path, overwrite: bool, **options: Any
) -> Frontier:
    """Walk the frontier of a configuration's algorithm, data and model into a folder."""
    refuse_frontier(out, overwrite)
    built = build_run(RunConfig.read(config, overrides))
    if "validation" not in built.federation.splits():
        raise ConfigError(
            ["data.holdout.validation: points are picked on validation samples; say 0.2"]
        )
    options |= {"rounds": built.config.rounds, "seed": built.config.seed}
    with limit_threads(built.config.threads):
        try:
            found = frontier(built.algorithm, built.clients, **options)
        except ValueError as error:
            raise ConfigError([str(error)]) from error
    found.save(out, overwrite=True)
    return found


def refuse_frontier(out: Path, overwrite: bool) -> None:
    """Refuse a folder that holds a frontier, unless it is to be replaced."""
    if (out / TABLE).exists() and not overwrite:
        raise RunFolderError(
            f"{out} holds a frontier; choose another, or pass --overwrite (overwrite=True)."
        )


def _check(
    algorithm: AnyAlgorithm, points: int | Sequence[float], split: str, give_up: float
) -> list[float]:
    given: Any = algorithm
    if not is_dataclass(given) or "objective" not in {f.name for f in fields(given)}:
        raise ValueError(
            f"{type(algorithm).__name__} has no objective whose strength could be walked; take one "
            "that has, as ScaffPD or AFL."
        )
    if split not in ("validation", "train"):
        raise ValueError(
            f"split must be validation or train, got {split!r}: what is chosen on test samples is "
            "not tested by them. Hold some back: data.split(validation=0.2)."
        )
    if not 0 <= give_up < 1:
        raise ValueError(f"give_up must lie between 0 and 1, got {give_up}.")
    if isinstance(points, int):
        if points < 2:
            raise ValueError(f"A frontier has at least two points, got {points}.")
        return [k / (points - 1) for k in range(points)]
    strengths = [float(t) for t in points]
    rising = strengths == sorted(set(strengths))
    if not strengths or not rising or strengths[0] != 0 or strengths[-1] > 1:
        raise ValueError(f"points must rise from 0 to at most 1, got {list(points)}.")
    return strengths


def _measure(history: History, metric: str, split: str) -> tuple[Interval, Interval]:
    """Return the average over clients and the worst fifth."""
    record = history.last(metric, split)
    if record is None:
        raise ValueError(
            f"{metric} was not measured on {split}: the data have no such split, or no such metric."
            " Hold samples back with data.split(validation=0.2)."
        )
    there = ~np.isnan(record.values)
    known, sizes = record.values[there], record.sizes[there]
    if metric == "accuracy":
        found = accuracy_intervals(np.rint(known * sizes), sizes, names=(AVERAGE, TAIL))
    else:
        better = find_metric(metric).higher_is_better
        numbers = summary(known, higher_is_better=better)
        found = {name: Interval(numbers[name], np.nan, np.nan) for name in (AVERAGE, TAIL)}
    return found[AVERAGE], found[TAIL]


def _pick(
    points: Sequence[FrontierPoint], metric: str, give_up: float
) -> tuple[FrontierPoint, str]:
    """Return the fairest point that does not give up too much of the average, and the rule."""
    up = 1.0 if find_metric(metric).higher_is_better else -1.0
    best = max(up * p.average.estimate for p in points)
    loss = give_up if metric == "accuracy" else give_up * abs(best)
    allowed = [p for p in points if up * p.average.estimate >= best - loss]
    said = f"{100 * give_up:g} point{'' if give_up == 0.01 else 's'}"
    said = said if metric == "accuracy" else f"{give_up:.3g} of it"
    rule = f"the best worst fifth whose average is within {said} of the best"
    return max(allowed, key=lambda p: (up * p.tail.estimate, -p.strength)), rule


def _show(interval: Interval) -> str:
    if np.isnan(interval.lower):
        return f"{interval.estimate:.4g}"
    return f"{interval.estimate:.4g} ({interval.lower:.4g} to {interval.upper:.4g})"


def _arms(intervals: Sequence[Interval]) -> Any:
    ends = [(i.estimate - i.lower, i.upper - i.estimate) for i in intervals]
    return np.nan_to_num(np.clip(np.transpose(ends), 0, None))
