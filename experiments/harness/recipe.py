"""One method against all others on many data sets: what was chosen, and paired differences.

Verdicts on networks come from the tables that their own experiments have stored. An experiment with
networks has its own protocol (folds pooled writer by writer, or seeds), and its limits are taken as
stored: over writers, or over seeds. Two methods are compared on the folds or seeds that both have.
A published method that has not run, or has no stored difference to ours, is named, and its network
is not counted.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equifed.metrics import (
    Interval,
    chance_floor,
    mean_interval,
    paired_difference,
    variance_beyond_chance,
    worst_fraction,
)
from experiments.harness.experiment import ROOT, Cell, Settings, Table
from experiments.harness.measures import for_new_samples, with_limits

Array = NDArray[np.float64]
OURS, BASE, OWN, ALONE = "ours", "FedAvg", "FedAvg, own part", "alone"
OWN_SOLVED, SOLVED = "own part, solved for the average", "solved for the average"
"""Ours without its fair objective, and that without an own part."""
NEWTON = "FairNewton"
"""Ours without an own part. It solves SCAFF-PD's problem, so it counts as a published method."""
FIFTH, FEW = 0.2, 10
"""The worst fifth, and below how many clients the worst one stands for it."""


def worst(values: Array) -> float:
    """Return the accuracy of the worst fifth, or of the worst client where there are few."""
    if len(values) < FEW:
        return float(values.min())
    return float(worst_fraction(values, FIFTH, higher_is_better=True))


def score(told: Mapping[str, Any], split: str = "validation") -> float:
    """Return the mean of average and worst accuracy in a split; minus infinity after a failure."""
    if "failed" in told:
        return -math.inf
    values = np.array([v for v in told[split] if v is not None])
    return (float(values.mean()) + worst(values)) / 2


@dataclass(frozen=True)
class Trial:
    """A method in one split: what validation samples chose, and how the clients are served."""

    place: int
    settings: str
    failed: int
    accuracy: Array
    sizes: Array
    ratio: float
    gap: float | None = None
    tried: tuple[str, ...] = ()

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Trial | None:
        """Return the chosen one of the tries, of equals the middle one; None if all failed."""
        tries = answer["tries"]
        middle = (len(tries) - 1) / 2
        place = max(range(len(tries)), key=lambda k: (score(tries[k]), -abs(k - middle)))
        best = tries[place]
        failed = sum("failed" in one for one in tries)
        if "failed" in best:
            return None
        known = [k for k, v in enumerate(best["test"]) if v is not None]
        ratio = sum(best["test samples"]) / sum(best["train samples"])
        return cls(
            place, best["settings"], failed, np.array([best["test"][k] for k in known]),
            np.array([best["test samples"][k] for k in known], dtype=np.float64), ratio,
            best.get("gap"), tuple(one.get("settings", "") for one in tries),
        )  # fmt: skip

    @property
    def average(self) -> float:
        """Average accuracy over clients, %."""
        return 100 * float(self.accuracy.mean())

    @property
    def worst(self) -> float:
        """Accuracy of the worst fifth or of the worst of few clients, %."""
        return 100 * worst(self.accuracy)

    @property
    def floor(self) -> float:
        """What the worst would have if all were served equally, %."""
        n = len(self.accuracy)
        pooled = float(self.accuracy @ self.sizes / self.sizes.sum())
        return 100 * chance_floor(self.sizes, pooled, FIFTH if n >= FEW else 1 / n)

    @property
    def variance(self) -> float:
        """Variance of the true accuracies, in squared points; an unbiased estimate."""
        return 1e4 * variance_beyond_chance(np.round(self.accuracy * self.sizes), self.sizes)


Found = dict[str, dict[str, dict[int, Trial | None]]]
"""By data set, method and seed."""

Runs = Mapping[int, Trial | None]


# -- numbers ----------------------------------------------------------------------------------


def column(runs: Runs, measure: str) -> Array:
    """Return a measure of a method, seed by seed."""
    return np.array([getattr(one, measure) for one in runs.values() if one is not None])


def difference(
    methods: Mapping[str, Runs], other: str, measure: str, first: str = OURS
) -> tuple[Interval, Interval]:
    """Return ours minus another method over the seeds of both: 95 % over seeds, and for new data.

    Random splits share samples, and the second interval is widened for that.
    """
    mine, theirs = methods[first], methods[other]
    pairs = [(a, b) for s, a in mine.items() if a is not None and (b := theirs.get(s)) is not None]
    told = paired_difference(*([getattr(one[k], measure) for one in pairs] for k in (0, 1)))
    ratio = float(np.mean([a.ratio for a, _ in pairs]))
    return told, for_new_samples(told, len(pairs), ratio)


def published(methods: Mapping[str, Runs]) -> list[str]:
    """Return the methods as published: without an own part, not solved by us, and not alone."""
    others = (OURS, OWN, OWN_SOLVED, SOLVED, ALONE)
    return [m for m in methods if m not in others and len(column(methods[m], "worst"))]


def without_fairness(methods: Mapping[str, Runs], own: bool) -> str | None:
    """Return what ours is without its fair objective, where that was run.

    Where clients have no own part it is one model for all, solved for the average.
    """
    other = OWN_SOLVED if own else SOLVED
    return other if other in methods else None


def best_published(methods: Mapping[str, Runs], measure: str = "worst") -> str:
    """Return the published method with the highest mean on test samples, which flatters it."""
    return max(published(methods), key=lambda m: float(column(methods[m], measure).mean()))


def spread(runs: Runs) -> Interval:
    """Return the variance beyond chance, its mean over seeds and limits."""
    return mean_interval(column(runs, "variance"))


def is_ahead(methods: Mapping[str, Runs], new: bool = False) -> bool:
    """Tell whether ours serves the worst better than every published method, beyond 95 %."""
    return all(difference(methods, m, "worst")[new].lower > 0 for m in published(methods))


# -- networks --------------------------------------------------------------------------------------

WORST, AVERAGE = "worst 20 %", "average"
WITHOUT_FAIRNESS = ("ours with FedAvg", "FedAvg, server momentum, averaged, own bias")
"""Ours without the fair objective: the first that is stored."""
DRAWS = 2000
Rows = list[dict[str, str]]


@dataclass(frozen=True)
class Network:
    """What is stored of one experiment with networks."""

    name: str
    absent: Sequence[str]
    """What keeps it from being counted."""
    protocol: str = ""
    spread: Interval | None = None
    """Variance of FedAvg's accuracies beyond chance, in squared points."""
    against: Mapping[str, Mapping[str, Interval]] = field(default_factory=dict)
    """Ours minus every other method, by measure."""
    published: Sequence[str] = ()
    """Those with a stored difference."""
    fewer: Sequence[str] = ()
    """Those with fewer folds or seeds than the others."""

    @property
    def is_spread(self) -> bool:
        """Whether FedAvg is known to serve clients unequally beyond chance."""
        return self.spread is not None and self.spread.lower > 0

    def best(self, measure: str = WORST) -> str:
        """Return the published method nearest to ours, or most ahead, on test samples."""
        return min(self.published, key=lambda m: self.against[measure][m].estimate)

    def lead(self, measure: str = WORST) -> Interval:
        """Return ours minus the best published method."""
        return self.against[measure][self.best(measure)]

    @property
    def own(self) -> Interval | None:
        """Ours minus FedAvg with the same own part, for the worst; None if it is not stored."""
        return next(
            (self.against[WORST][m] for m in WITHOUT_FAIRNESS if m in self.against[WORST]), None
        )

    @property
    def is_ahead(self) -> bool:
        """Whether ours is beyond the limits of every published method with a difference."""
        return all(self.against[WORST][m].lower > 0 for m in self.published)


# -- reading ----------------------------------------------------------------------------------


def read_networks(settings: Settings, root: Path = ROOT) -> list[Network]:
    """Return what the experiments with networks have stored."""
    names = settings["experiments"]
    return [read_network(n, settings["published"], root / n / "results") for n in names]


def read_network(name: str, published: Sequence[str], folder: Path) -> Network:
    """Return what one experiment has stored, and what it lacks."""
    rows = {row["method"]: row for row in _rows(folder / "methods.csv")}
    if not {BASE, OURS} <= rows.keys():
        return Network(name, ["no table of methods with FedAvg and ours is stored"])
    unit = next(k for k in rows[OURS] if k in ("folds", "seeds"))
    whole = max(int(row[unit]) for row in rows.values())
    against = {m: read_against(folder / "against.csv", m) for m in (WORST, AVERAGE)}
    known = [m for m in published if m in rows and m in against[WORST]]
    spread = read_spread(folder)
    reasons = {
        "not run": [m for m in published if m not in rows],
        "no stored difference": [m for m in published if m in rows and m not in known],
        "no stored accuracies of": [BASE] if spread is None else [],
    }
    absent = [f"{why}: {', '.join(names)}" for why, names in reasons.items() if names]
    fewer = [f"{m} ({n})" for m in (*known, OURS) if (n := int(rows[m][unit])) < whole]
    return Network(name, absent, f"{whole} {unit}", spread, against, known, fewer)


def read_against(path: Path, measure: str) -> dict[str, Interval]:
    """Return ours minus every other method, as stored."""
    start = f"{OURS} minus "
    lines = [row for row in _rows(path) if row["methods"].startswith(start)]
    return {row["methods"].removeprefix(start): _limits(row[measure]) for row in lines}


def read_spread(folder: Path) -> Interval | None:
    """Return the variance of FedAvg's accuracies beyond chance, in squared points.

    From every client's accuracy: its mean over seeds; where folds are pooled, with limits over
    writers, who are drawn again with replacement.
    """
    clients = [r for r in _rows(folder / "clients.csv") if r["method"] == BASE]
    if clients and "test images" in clients[0]:
        seeds = dict.fromkeys(row["seed"] for row in clients)
        of_seed = [[r for r in clients if r["seed"] == seed] for seed in seeds]
        return mean_interval([_variance(*_columns(rs, "test accuracy", 1)) for rs in of_seed])
    writers = [row for row in _rows(folder / "writers.csv") if row.get(BASE)]
    if not writers:
        return None
    correct, sizes = _columns(writers, BASE, 100)
    draw, n = np.random.default_rng(0), len(sizes)
    drawn = [_variance(correct[k], sizes[k]) for k in draw.integers(0, n, (DRAWS, n))]
    return Interval(_variance(correct, sizes), *map(float, np.quantile(drawn, [0.025, 0.975])))


def _columns(rows: Rows, accuracy: str, whole: float) -> tuple[Array, Array]:
    sizes = np.array([float(row["test images"]) for row in rows])
    return np.round(np.array([float(row[accuracy]) for row in rows]) / whole * sizes), sizes


def _variance(correct: Array, sizes: Array) -> float:
    return 1e4 * variance_beyond_chance(correct, sizes)


def _rows(path: Path) -> Rows:
    """Return the lines of a stored table; units at the end of titles are taken away."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [{k.removesuffix(", %"): v.removeprefix("'") for k, v in line.items()}
                for line in csv.DictReader(file)]  # fmt: skip


def _limits(text: str) -> Interval:
    """Return a difference and its limits, as tables write them; one seed has no limits.

    >>> _limits("+0.7 (-0.2 to +1.6)"), _limits("+2.1")
    (Interval(estimate=0.7, lower=-0.2, upper=1.6), \
Interval(estimate=2.1, lower=nan, upper=nan))
    """
    first, _, rest = text.rstrip(")").partition(" (")
    low, _, high = rest.partition(" to ")
    return Interval(float(first), float(low or math.nan), float(high or math.nan))


# -- tables -----------------------------------------------------------------------------------


def network_verdicts(networks: Iterable[Network]) -> Table:
    """Return one line per experiment with networks."""
    titles = ("experiment", "protocol", f"variance of {BASE} beyond chance", "beyond chance",
              "best published for the worst", "ours minus it, worst 20 %", "ours first",
              "beyond 95 % of every published method",
              "ours minus FedAvg with the same own part, worst 20 %",
              "ours minus the best published average, average", "ours minus alone, worst 20 %",
              "with fewer folds or seeds", "why it is not counted")  # fmt: skip
    rows: list[list[Cell]] = []
    for one in networks:
        cells: dict[str, Cell] = {titles[0]: one.name, titles[1]: one.protocol or None}
        if one.spread is not None:
            cells[titles[2]] = with_limits(one.spread, form=".1f")
            cells[titles[3]] = _yes(one.is_spread)
        if one.published:
            beside = [one.own, one.against[WORST].get(ALONE)]
            own, alone = (with_limits(told) if told else None for told in beside)
            average = f"{with_limits(one.lead(AVERAGE))} against {one.best(AVERAGE)}"
            told = (one.best(), with_limits(one.lead()), _yes(one.lead().estimate > 0),
                    _yes(one.is_ahead), own, average, alone)  # fmt: skip
            cells |= dict(zip(titles[4:11], told, strict=True))
        cells |= {
            titles[11]: ", ".join(one.fewer) or None,
            titles[12]: "; ".join(one.absent) or None,
        }
        rows.append([cells.get(title) for title in titles])
    return Table("Verdicts on networks, from stored tables (95 % over writers for folds, else over "
                 "seeds)", titles, rows)  # fmt: skip


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def networks_table(names: Sequence[str]) -> Table:
    """Return the rows that the experiments with networks have stored, to be read beside."""
    rows: list[list[Cell]] = []
    for name in names:
        folder = ROOT / name / "results"
        for row in _rows(folder / "methods.csv") or _rows(folder / "accuracy.csv"):
            rows.append([name, row["method"], row[AVERAGE], row[WORST]])
    titles = ("experiment", "method", "average, %", "worst 20 %, %")
    return Table("Networks: as stored by their own experiments, with their own tries and seeds",
                 titles, rows)  # fmt: skip
