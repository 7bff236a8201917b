"""What an experiment is: a definition, a function, and an outcome that can disagree."""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

Settings = dict[str, Any]
Cell = str | float | int | bool | None


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
        from equifed.report.figures import csv_text

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
    processes : int
        Runs at a time.
    """

    settings: Settings
    out: Path
    console: Console
    processes: int = 1


@dataclass(frozen=True)
class Experiment:
    """A published experiment, by the address of the function that runs it."""

    address: str
    title: str
    paper: str

    def load(self) -> Callable[[Context], Outcome]:
        """Import the function."""
        module, _, name = self.address.partition(":")
        function: Callable[[Context], Outcome] = getattr(importlib.import_module(module), name)
        return function


PD = "SCAFF-PD (Yu et al. 2023)"
DRFA = "DRFA (Deng et al. 2020)"
RC = "RC-FL"
IA = "SCAFF-PD-IA"

EXPERIMENTS = {
    "scaff-pd-synthetic": Experiment(
        "experiments.harness.synthetic:run",
        "Linear convergence of SCAFF-PD on robust regression, against DRFA",
        f"{PD}, Fig. 2 and 5",
    ),
    "scaff-pd-cifar10": Experiment(
        "experiments.harness.scaff_pd_cifar:run",
        "Worst-20 % accuracy of nine methods on CIFAR-10, a linear model on frozen features",
        f"{PD}, Table 3, Fig. 3 and 4",
    ),
    "ia-points": Experiment(
        "experiments.harness.points:run",
        "Absolute against relative fairness on eight points of the plane",
        f"{IA}, Fig. 1",
    ),
    "ia-penguins": Experiment(
        "experiments.harness.penguins:run",
        "Relative unfairness falls in phi on three species of penguins",
        f"{IA}, Fig. 3",
    ),
    "drfa-fashion": Experiment(
        "experiments.harness.drfa_fashion:run",
        "Rounds to 50 % worst accuracy on ten clients with one class each",
        f"{DRFA}, Fig. 1 to 3",
    ),
    "rc-fashion": Experiment(
        "experiments.harness.rc_fashion:run",
        "Accuracy of three clients (T-shirt, pullover, shirt) under four objectives",
        f"{RC}, Fig. 1",
    ),
    "drfa-adult": Experiment(
        "experiments.harness.drfa_natural:run",
        "Worst accuracy on Adult with two clients, doctorate or not",
        f"{DRFA}, Adult",
    ),
    "drfa-shakespeare": Experiment(
        "experiments.harness.drfa_natural:run",
        "Worst accuracy of an LSTM on 20 roles of Shakespeare",
        f"{DRFA}, Shakespeare",
    ),
    "rc-vehicle": Experiment(
        "experiments.harness.rc_natural:vehicle",
        "Spread of test accuracies of a linear SVM over 23 vehicle sensors",
        f"{RC}, Table 1",
    ),
    "rc-shakespeare": Experiment(
        "experiments.harness.rc_natural:shakespeare",
        "Spread of test accuracies of an LSTM over roles, ten of which train in a round",
        f"{RC}, Table 1, Shakespeare in the place of Sent140",
    ),
    "ia-mnist": Experiment(
        "experiments.harness.ia_networks:run",
        "Relative unfairness of six methods on MNIST with 100 clients",
        f"{IA}, Table 1 and Fig. 4",
    ),
    "ia-cifar10": Experiment(
        "experiments.harness.ia_networks:run",
        "Relative unfairness of six methods on CIFAR-10 with 100 clients",
        f"{IA}, Table 1 and Fig. 4",
    ),
    "heart-disease": Experiment(
        "experiments.harness.all_methods:run", "All methods on four hospitals", "ours"
    ),
    "femnist": Experiment(
        "experiments.harness.all_methods:run", "All methods on 105 writers", "ours"
    ),
}


def definition(name: str, quick: bool = False) -> Settings:
    """Return the settings of an experiment; the quick form changes some of the full one's.

    >>> definition("ia-penguins")["phi"]
    [0.0, 0.01, 0.02, 0.03, 0.04, 0.05]
    """
    from equifed.runs.catalogue import unknown
    from equifed.runs.compare import merged

    if name not in EXPERIMENTS:
        raise ValueError(unknown("experiment", name, EXPERIMENTS))
    file = resources.files("experiments.harness") / "definitions" / f"{name}.toml"
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    changes = table.pop("quick", {})
    return merged(table, changes) if quick else table
