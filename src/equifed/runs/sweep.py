"""One method over one or two settings: what the average pays for the worst (``equifed sweep``)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from equifed.report import Report, csv_text, find_frontier, frontier_page, frontier_svg
from equifed.runs.comparison import compare_configs
from equifed.runs.config import RunConfig, read_table
from equifed.runs.many import configure
from equifed.runs.schema import ConfigError, Table

MOST_SETTINGS = 2
COLUMNS = ("average_by_client", "worst", "worst_20_percent", "spread", "gini")


@dataclass(frozen=True)
class Over:
    """A setting and the values to try."""

    key: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Over:
        """Read ``key.path=value,value,...``.

        >>> Over.parse("algorithm.objective.rho=0.01,0.1")
        Over(key='algorithm.objective.rho', values=('0.01', '0.1'))
        """
        key, equals, rest = text.partition("=")
        values = tuple(value.strip() for value in rest.split(","))
        if not equals or not key.strip() or not all(values):
            raise ConfigError([f"--over takes key.path=value,value,...; got {text!r}"])
        if len(set(values)) < len(values):
            raise ConfigError([f"--over {text}: a value is there twice"])
        return cls(key.strip(), values)

    @property
    def short(self) -> str:
        """The last word of the key."""
        return self.key.rpartition(".")[2]


def read_points(
    path: Path, over: Sequence[Over], overrides: Sequence[str] = ()
) -> dict[str, RunConfig]:
    """Return a configuration for every combination of values, by the combination's name."""
    if not 1 <= len(over) <= MOST_SETTINGS:
        raise ConfigError([f"a sweep goes over one or two settings, got {len(over)}"])
    if len({one.key for one in over}) < len(over):
        raise ConfigError([f"--over names {over[0].key} twice"])
    if any(one.key == "seed" for one in over):
        raise ConfigError(
            ["--over seed: seeds are no setting to choose; say how many with --seeds"]
        )
    table, found = read_table(path), {}
    for name, values in _name_points(over).items():
        chosen = [f"{one.key}={value}" for one, value in zip(over, values, strict=True)]
        found[name] = configure(table, [*overrides, *chosen], path.parent, name)
    return found


def _name_points(over: Sequence[Over]) -> dict[str, tuple[str, ...]]:
    """Return the combinations of values by their names."""
    products = itertools.product(*(one.values for one in over))
    return {name_point(over, values): values for values in products}


def name_point(over: Sequence[Over], values: Sequence[str]) -> str:
    """Return the name of a combination: settings by their last word, or by all if that is the same.

    >>> name_point([Over("algorithm.q", ("1", "2")), Over("seed", ("3",))], ["1", "3"])
    'q = 1, seed = 3'
    """
    same = len({one.short for one in over}) < len(over)
    names = [one.key if same else one.short for one in over]
    return ", ".join(f"{name} = {value}" for name, value in zip(names, values, strict=True))


def sweep(
    path: str | Path,
    over: Sequence[Over],
    out: str | Path,
    *,
    overrides: Sequence[str] = (),
    seeds: int = 1,
    jobs: int = 1,
    overwrite: bool = False,
    console: Console | None = None,
) -> Report:
    """Run every combination (what is missing of it) and draw average against worst.

    Writes ``frontier.svg``, ``frontier.csv`` and ``frontier.html`` into ``out``, beside what
    ``equifed compare`` writes; ``seeds``, ``jobs`` and ``overwrite`` are as there.
    """
    path, out = Path(path), Path(out)
    title = f"{path.stem} over {' and '.join(one.key for one in over)}"
    options: dict[str, Any] = {"seeds": seeds, "jobs": jobs, "overwrite": overwrite}
    variants = read_points(path, over, overrides)
    report = compare_configs(variants, out, title=title, console=console, **options)
    if report.scale is None:
        raise ConfigError(["nothing was evaluated; see [evaluate] and the splits of the data"])
    colours, points = colour_points(report, over), list_points(report, over)
    numbers = csv_text(list(points[0]), [list(point.values()) for point in points])
    (out / "frontier.csv").write_text(numbers, encoding="utf-8")
    (out / "frontier.svg").write_text(frontier_svg(report, colours), encoding="utf-8")
    page = frontier_page(report, colours, numbers)
    (out / "frontier.html").write_text(page, encoding="utf-8")
    return report


def colour_points(report: Report, over: Sequence[Over]) -> list[int]:
    """Return a colour for each point: one for each value of the second setting."""
    if len(over) == 1:
        return [1] * len(report.methods)
    by_name, last = _name_points(over), over[1].values
    return [1 + last.index(by_name[method.name][1]) for method in report.methods]


def list_points(report: Report, over: Sequence[Over]) -> list[Table]:
    """Return the points: settings as given, measures with intervals, whether any is better."""
    assert report.scale is not None
    by_name, marks = _name_points(over), find_frontier(report.estimates, report.scale)
    points = []
    for method, found, mark in zip(report.methods, report.estimates, marks, strict=True):
        keys = (one.key for one in over)
        point: Table = dict(zip(keys, by_name[method.name], strict=True))
        for key in COLUMNS:
            e = found[key].interval if key in found else None
            limits = (None, None, None) if e is None else (e.estimate, e.lower, e.upper)
            names = (key, f"{key}_lower_95", f"{key}_upper_95")
            point |= dict(zip(names, limits, strict=True))
        points.append({**point, "non_dominated": int(mark)})
    return points
