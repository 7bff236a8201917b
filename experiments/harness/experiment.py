"""What an experiment is: a folder with a definition and a run, whose outcome can disagree."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from equifed.report import csv_text
from equifed.runs import merge_tables, unknown

if TYPE_CHECKING:
    from rich.console import Console

ROOT = Path(__file__).parents[1]
Settings = dict[str, Any]
Cell = str | float | int | bool | None
REMAKING: ContextVar[bool] = ContextVar("remaking", default=False)
"""Whether tables are made again of what is kept: nothing is loaded, prepared or run."""


@dataclass(frozen=True)
class Table:
    """Numbers under titles: a CSV file, and a table in a text.

    >>> print(Table("Losses", ("client", "loss"), [("a", 0.25)]).markdown())
    | client | loss |
    |---|---|
    | a | 0.25 |
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def csv(self) -> str:
        """Return the table as CSV."""
        return csv_text(self.columns, [list(row) for row in self.rows])

    def markdown(self) -> str:
        """Return the table as Markdown."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        shown = ["| " + " | ".join(map(_shown, line)) + " |" for line in lines]
        shown[1] = shown[1].replace(" ", "")
        return "\n".join(shown)


def _shown(cell: Cell) -> str:
    if cell is None:
        return "-"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


@dataclass(frozen=True)
class Check:
    """A published statement, what we measured, and whether the two agree.

    Parameters
    ----------
    claim : str
        What the paper says, in its numbers where it prints any.
    source : str
        Where it says so.
    measured : str
        What came out here.
    agrees : bool
        Whether it is what the paper says.
    why : str
        Why not, as far as it is known, or what to bear in mind.
    """

    claim: str
    source: str
    measured: str
    agrees: bool
    why: str = ""


@dataclass(frozen=True)
class Outcome:
    """What an experiment gives: checks against the paper, tables, and figures as SVG."""

    checks: Sequence[Check]
    tables: Mapping[str, Table] = field(default_factory=dict)
    figures: Mapping[str, str] = field(default_factory=dict)
    problems: Sequence[str] = ()


@dataclass(frozen=True)
class Context:
    """Where and how an experiment runs.

    Parameters
    ----------
    settings : dict
        The experiment's definition, in its full or its quick form.
    out : path
        Folder of the results; run folders are below ``runs``.
    console : Console
        Where progress is shown.
    jobs : int
        Runs at a time.
    """

    settings: Settings
    out: Path
    console: Console
    jobs: int = 1


@dataclass(frozen=True)
class Experiment:
    """A folder with ``definition.toml`` and ``run.py``."""

    name: str
    title: str
    paper: str

    @property
    def module(self) -> ModuleType:
        """What is special about the experiment: its ``run.py``, loaded by path.

        The name of a folder may have a hyphen, so it is no name of a package.
        """
        name = f"experiments.run_{self.name.replace('-', '_')}"
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, ROOT / self.name / "run.py")
            assert spec is not None and spec.loader is not None
            sys.modules[name] = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(sys.modules[name])
            except BaseException:
                del sys.modules[name]
                raise
        return sys.modules[name]


def _read(name: str) -> Settings:
    return tomllib.loads((ROOT / name / "definition.toml").read_text(encoding="utf-8"))


def _experiments() -> dict[str, Experiment]:
    names = sorted(path.parent.name for path in ROOT.glob("*/definition.toml"))
    return {n: Experiment(n, t["title"], t["paper"]) for n in names for t in [_read(n)]}


EXPERIMENTS = _experiments()
"""All experiments, by name: the folders that have a definition."""


def definition(name: str, quick: bool = False) -> Settings:
    """Return the settings of an experiment; the quick form changes some of the full one's.

    >>> definition("ia-penguins")["phi"]
    [0.0, 0.01, 0.02, 0.03, 0.04, 0.05]
    """
    if name not in EXPERIMENTS:
        raise ValueError(unknown("experiment", name, EXPERIMENTS))
    table = _read(name)
    for key in ("title", "paper"):
        del table[key]
    changes = table.pop("quick", {})
    return merge_tables(table, changes) if quick else table
