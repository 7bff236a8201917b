"""``equifed demo``: what the average hides, and what fairness costs, on three clients."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from equifed.report import as_methods, build, read_methods, write_report, write_span
from equifed.runs import run as runs
from equifed.runs.config import RunConfig
from equifed.training.history import History
from equifed.training.show import print_line, tabulate_clients
from equifed.training.trackers import ProgressBar

if TYPE_CHECKING:
    from rich.console import Console

ROUNDS, PAGE = 200, "report.html"
LOCAL = {"lr": 0.03, "steps": 5}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg", "local": LOCAL},
    "scaffold": {"name": "scaffold", "local": LOCAL},
    "scaff-pd": {"name": "scaff-pd", "objective": {"name": "chi-square", "rho": 0.1}},
    "fair-newton": {"name": "fair-newton", "objective": {"name": "chi-square", "rho": 0.1}},
}
"""The methods and their settings.

The first two do five full gradient steps per round, with the best step size of lr = 0.01, 0.02,
0.03, 0.04 by average accuracy on a fifth of the training images, held out
(``data.holdout.validation = 0.2``). The other two choose their steps themselves; rho is the best of
0.1, 0.2, 0.3 by the worst client's accuracy there. FairNewton stops when it is proved to be near
its optimum.
"""

TITLES = {"fedavg": "FedAvg", "scaffold": "SCAFFOLD", "scaff-pd": "SCAFF-PD"}

EVERY = {"fair-newton": 1}
"""Rounds between two evaluations; FairNewton has so few that each is shown."""

NEAR = 0.005
"""The certified relative gap at which a method stops that has one."""


def configure(method: str, rounds: int | None = None) -> RunConfig:
    """Return the run of one method."""
    return RunConfig.from_dict(
        {
            "rounds": rounds or ROUNDS,
            "threads": 1,
            "data": {"name": "fashion-three"},
            "model": {"name": "logistic", "l2": 1e-3},
            "algorithm": METHODS[method],
            "evaluate": {"every": EVERY.get(method, 10), "splits": ["train", "test"]},
            "stop": {"at_relative_gap": NEAR},
        }
    )


def run_demo(
    out: Path, rounds: int | None, overwrite: bool, console: Console
) -> dict[str, History]:
    """Run all methods, each into its folder under ``out``, and write their report."""
    for method in METHODS:
        runs.refuse_existing(out / method, overwrite)
    histories = {}
    for method in METHODS:
        with ProgressBar(console, method) as bar:
            config = configure(method, rounds)
            histories[method] = runs.run(config, out / method, overwrite=overwrite, callbacks=[bar])
    write_report(build(read_methods(out / method for method in METHODS)), out / PAGE)
    return histories


def summarise(histories: dict[str, History]) -> dict[str, Any]:
    """Return average, worst and per-client test accuracy of every method."""
    methods = {}
    for method, history in histories.items():
        clients = history.per_client("accuracy", "test")
        average = sum(clients.values()) / len(clients)
        methods[method] = {"average": average, "worst": min(clients.values()), "clients": clients}
    return {"methods": methods}


def print_demo(histories: dict[str, History], out: Path, console: Console) -> None:
    """Print who is served how well by which method, and what that cost."""
    found = summarise(histories)["methods"]
    console.print(tabulate_clients(histories))
    fair = found["fair-newton"]
    for name, title in TITLES.items():
        plain = found[name]
        gain, cost = _write_differences(histories[name], histories["fair-newton"])
        print_line(
            console,
            f"FairNewton against {title}: worst client {plain['worst']:.1%} -> {fair['worst']:.1%} "
            f"({gain}), average {plain['average']:.1%} -> {fair['average']:.1%} ({cost}).",
        )
    for name, history in histories.items():
        proved = history.describe_certificate()
        if proved is not None:
            print_line(console, f"{name}: {proved}.")
    seconds = sum(record.seconds for history in histories.values() for record in history.rounds)
    print_line(console, f"One seed, {seconds:.0f} s of training; run folders in {out}.")
    print_line(console, f"report: {out / PAGE}")


def _write_differences(plain: History, fair: History) -> list[str]:
    """Return what the worst client and the average gained, with intervals over test samples."""
    report = build(as_methods({"plain": plain, "fair": fair}))
    assert report.scale is not None
    found = [report.told[1].estimates[key].difference for key in ("worst", "average_by_client")]
    return [
        f"{report.scale.change(d.interval.estimate)}, {write_span(d.interval, report.scale)}"
        for d in found
        if d is not None
    ]
