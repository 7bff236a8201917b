"""``equifed sweep``: one method over one or two settings; what the average pays for the worst."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equifed.report import Report
from equifed.report.figures import csv_text, find_frontier
from equifed.report.page import frontier_page, frontier_svg
from equifed.runs.compare import compare
from equifed.runs.config import RunConfig, apply_override
from equifed.runs.settings import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

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


def variants(
    path: Path, over: Sequence[Over], overrides: Sequence[str] = ()
) -> dict[str, RunConfig]:
    """Return a configuration for every combination of values."""
    if not 1 <= len(over) <= MOST_SETTINGS:
        raise ConfigError([f"a sweep goes over one or two settings, got {len(over)}"])
    if len({one.key for one in over}) < len(over):
        raise ConfigError([f"--over names {over[0].key} twice"])
    text = path.read_text(encoding="utf-8")
    found = {}
    for values in itertools.product(*(one.values for one in over)):
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError([f"{path} is not a TOML file: {error}"]) from error
        for override in overrides:
            apply_override(table, override)
        for one, value in zip(over, values, strict=True):
            apply_override(table, f"{one.key}={value}")
        found[point_name(over, values)] = RunConfig.from_dict(table, base=path.parent)
    return found


def point_name(over: Sequence[Over], values: Sequence[str]) -> str:
    """Return the name of a combination: settings by their last word, or by all if that is the same.

    >>> point_name([Over("algorithm.q", ("1", "2")), Over("seed", ("3",))], ["1", "3"])
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
    processes: int = 1,
    overwrite: bool = False,
    console: Console | None = None,
) -> Report:
    """Run every combination (what is missing of it) and draw average against worst.

    Writes ``frontier.svg``, ``frontier.csv`` and ``frontier.html`` into ``out``, beside what
    :func:`equifed.runs.compare.compare` writes.
    """
    out, found = Path(out), variants(Path(path), over, overrides)
    report = compare(
        found,
        out,
        seeds=seeds,
        processes=processes,
        overwrite=overwrite,
        title=f"{Path(path).stem} over {' and '.join(one.key for one in over)}",
        console=console,
    )
    if report.scale is None:
        raise ConfigError(["nothing was evaluated; see [evaluate] and the splits of the data"])
    colours = point_colours(report, over)
    (out / "frontier.csv").write_text(frontier_csv(report, over), encoding="utf-8")
    (out / "frontier.svg").write_text(frontier_svg(report, colours), encoding="utf-8")
    page = frontier_page(report, colours, frontier_csv(report, over))
    (out / "frontier.html").write_text(page, encoding="utf-8")
    return report


def point_colours(report: Report, over: Sequence[Over]) -> list[int]:
    """Return a colour for each point: one for each value of the second setting."""
    if len(over) == 1:
        return [1] * len(report.methods)
    by_name = _values(over)
    last = over[1].values
    return [1 + last.index(by_name[method.name][1]) for method in report.methods]


def _values(over: Sequence[Over]) -> Mapping[str, tuple[str, ...]]:
    products = itertools.product(*(one.values for one in over))
    return {point_name(over, values): values for values in products}


def frontier_csv(report: Report, over: Sequence[Over]) -> str:
    """Return one line per point, with the settings, the measures and whether it is dominated."""
    columns = [one.key for one in over]
    for key in COLUMNS:
        columns += [key, f"{key}_lower_95", f"{key}_upper_95"]
    assert report.scale is not None
    by_name, marks = _values(over), find_frontier(report.estimates, report.scale)
    rows = []
    for method, found, mark in zip(report.methods, report.estimates, marks, strict=True):
        row: list[Any] = list(by_name[method.name])
        for key in COLUMNS:
            e = found[key].interval if key in found else None
            row += ["", "", ""] if e is None else [e.estimate, e.lower, e.upper]
        rows.append([*row, int(mark)])
    return csv_text([*columns, "non_dominated"], rows)
