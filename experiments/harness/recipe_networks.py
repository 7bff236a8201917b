"""Verdicts on networks, from the tables that their own experiments have stored.

An experiment with networks has its own protocol (folds pooled writer by writer, or seeds), and its
limits are taken as stored. A published method without all folds or seeds, or without a stored
difference to ours, is named, and such a network is not counted.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from equifed.metrics import Interval
from experiments.harness.experiment import ROOT, Cell, Settings, Table
from experiments.harness.measures import with_interval, with_limits
from experiments.harness.recipe_trials import ALONE, BASE, OURS

WORST, AVERAGE, SPREAD = "worst 20 %", "average", "spread beyond chance"
OWN_BIAS = "FedAvg, server momentum, own bias"
NO_TABLE = "no table of methods with FedAvg and ours is stored"
Row = Mapping[str, str]


@dataclass(frozen=True)
class Network:
    """What is stored of one experiment with networks."""

    name: str
    protocol: str = ""
    values: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By measure and published method (of those with all folds or seeds); ours too."""
    against: Mapping[str, Mapping[str, Interval]] = field(default_factory=dict)
    """Ours minus every other method, by measure."""
    spread: Interval | None = None
    below: int | None = None
    """How many clients FedAvg serves worse than chance explains, where the table says so."""
    absent: Sequence[str] = (NO_TABLE,)
    """What keeps it from being counted."""

    @property
    def known(self) -> bool:
        """Whether there is a table to judge."""
        return bool(self.values)

    @property
    def is_spread(self) -> bool:
        """Whether FedAvg serves clients unequally beyond chance: limits above 0, or clients named.

        A table of pooled folds has no limits over seeds; it names clients instead.
        """
        if self.spread is not None and math.isfinite(self.spread.lower):
            return self.spread.lower > 0
        return bool(self.below)

    def best(self, measure: str = WORST) -> str:
        """Return the published method that is best on test samples, which flatters it."""
        published = {m: v for m, v in self.values[measure].items() if m != OURS}
        return max(published, key=lambda m: published[m])

    def lead(self, other: str, measure: str = WORST) -> Interval:
        """Return ours minus a published method: as stored, else of the means, without limits."""
        if (told := self.against[measure].get(other)) is not None:
            return told
        values = self.values[measure]
        return Interval(values[OURS] - values[other], math.nan, math.nan, 0.95)

    @property
    def is_first(self) -> bool:
        """Whether ours serves the worst best of those that ran."""
        return self.lead(self.best()).estimate > 0

    @property
    def is_ahead(self) -> bool:
        """Whether ours is beyond the limits of every published method that ran."""
        return all(self.lead(m).lower > 0 for m in self.values[WORST] if m != OURS)


# -- reading ----------------------------------------------------------------------------------


def read_networks(settings: Settings, root: Path = ROOT) -> list[Network]:
    """Return what the experiments with networks have stored."""
    return [read_network(name, settings["published"], root) for name in settings["experiments"]]


def read_network(name: str, published: Sequence[str], root: Path = ROOT) -> Network:
    """Return what one experiment has stored; nothing but its name where it cannot be judged."""
    rows = {row["method"]: row for row in _rows(root / name / "results" / "methods.csv")}
    if not {BASE, OURS} <= rows.keys():
        return Network(name)
    against = {m: _against(root / name / "results" / "against.csv", m) for m in (WORST, AVERAGE)}
    unit = next(k for k in rows[OURS] if k in ("folds", "seeds"))
    whole = max((row[unit] for row in rows.values()), key=int)
    all_there = {m for m, row in rows.items() if row[unit] == whole and all(map(row.get, against))}
    complete = [m for m in (*published, OURS) if m in all_there]
    short = {m: f" ({row[unit]} of {whole} {unit})" for m, row in rows.items()}
    reasons = {
        "not run": [m + short.get(m, "") for m in (*published, OURS) if m not in complete],
        "no stored difference": [m for m in complete if m not in (OURS, *against[WORST])],
    }
    absent = [f"{why}: {', '.join(names)}" for why, names in reasons.items() if names]
    if not {BASE, OURS} <= set(complete):
        return Network(name, absent=absent)
    below = next((v for k, v in rows[BASE].items() if k.endswith("below chance")), "")
    return Network(
        name,
        f"{whole} {unit}",
        {k: {m: _number(rows[m][k]).estimate for m in complete} for k in against},
        against,
        _number(rows[BASE][SPREAD]) if rows[BASE].get(SPREAD) else None,
        int(below) if below else None,
        absent,
    )


def _rows(path: Path) -> list[Row]:
    """Return the lines of a stored table; units at the end of titles are taken away."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [{k.removesuffix(", %"): v.removeprefix("'") for k, v in line.items()}
                for line in csv.DictReader(file)]  # fmt: skip


def _against(path: Path, measure: str) -> dict[str, Interval]:
    start = f"{OURS} minus "
    lines = [row for row in _rows(path) if row["methods"].startswith(start)]
    return {row["methods"].removeprefix(start): _number(row[measure]) for row in lines}


def _number(text: str) -> Interval:
    """Return a number and its limits, as tables write them.

    >>> _number("+0.7 (-0.2 to +1.6)")
    Interval(estimate=0.7, lower=-0.2, upper=1.6, level=0.95)
    >>> _number("36.5 ± 24.5"), _number("5.11")
    (Interval(estimate=36.5, lower=12.0, upper=61.0, level=0.95), \
Interval(estimate=5.11, lower=nan, upper=nan, level=0.95))
    """
    if "(" in text:
        first, _, limits = text.rstrip(")").partition(" (")
        low, _, high = limits.partition(" to ")
        return Interval(float(first), float(low), float(high), 0.95)
    first, _, width = text.partition(" ± ")
    middle, half = float(first), float(width or math.nan)
    return Interval(middle, middle - half, middle + half, 0.95)


# -- tables -----------------------------------------------------------------------------------


def network_verdicts(networks: Iterable[Network]) -> Table:
    """Return one line per experiment with networks."""
    rows: list[list[Cell]] = []
    for one in networks:
        if not one.known:
            rows.append([one.name, *[None] * 10, "; ".join(one.absent)])
            continue
        best, average = one.best(), one.best(AVERAGE)
        beside = (one.against[WORST].get(m) for m in (OWN_BIAS, ALONE))
        rows.append([
            one.name, one.protocol, with_interval(one.spread) if one.spread else None,
            _yes(one.is_spread), best, with_limits(one.lead(best)), _yes(one.is_first),
            _yes(one.is_ahead), *(with_limits(told) if told else None for told in beside),
            f"{with_limits(one.lead(average, AVERAGE))} against {average}",
            "; ".join(one.absent) or None,
        ])  # fmt: skip
    titles = ("experiment", "protocol", f"{SPREAD} of {BASE}", "beyond chance",
              "best published for the worst", "ours minus it, worst 20 %", "ours first",
              "beyond 95 % of every published method that ran",
              f"ours minus {OWN_BIAS}, worst 20 %", "ours minus alone, worst 20 %",
              "ours minus the best published average, average",
              "why it is not counted")  # fmt: skip
    return Table("Verdicts on networks, from stored tables (95 % over writers for folds, else over "
                 "seeds)", titles, rows)  # fmt: skip


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def networks_table(names: Sequence[str]) -> Table:
    """Return the rows that the experiments with networks have stored, to be read beside."""
    rows: list[list[Cell]] = []
    for name in names:
        for table in ("methods", "accuracy"):
            for row in _rows(ROOT / name / "results" / f"{table}.csv"):
                rows.append([name, row["method"], row[AVERAGE], row[WORST]])
    titles = ("experiment", "method", "average, %", "worst 20 %, %")
    return Table("Networks: as stored by their own experiments, with their own tries and seeds",
                 titles, rows)  # fmt: skip
