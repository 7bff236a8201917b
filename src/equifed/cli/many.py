"""The commands about many runs: ``report``, ``compare``, ``demo``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from equifed.cli import terminal

if TYPE_CHECKING:
    from equifed.report import Report
    from equifed.runs.config import RunConfig


def report(
    folders: Annotated[list[Path], typer.Argument(help="Run folders or comparison folders.")],
    page: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
    per_client: Annotated[
        bool, typer.Option("--per-client", help="Also write a page for each client.")
    ] = False,
    baseline: terminal.Baseline = None,
    watch: Annotated[bool, typer.Option("--watch", help="Follow runs to their end.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="With --watch: seconds between.")] = 2.0,
    signed_by: terminal.SignedBy = None,
    quiet: terminal.Quiet = False,
) -> None:
    """Write one HTML page about runs: who is served how well, and what fairness cost."""
    from equifed.report import build, read_methods, write_report
    from equifed.training.folder import is_complete
    from equifed.training.play_round import TrainingError

    def write(refresh: float | None = None) -> Report:
        made = build(read_methods(folders), baseline=baseline)
        write_report(made, page, per_client=per_client, refresh=refresh)
        return made

    told = 0
    while watch and any(_is_running(folder) for folder in folders):
        runs = [run for method in write(every).methods for run in method.runs]
        played = max(len(run.rounds) for run in runs)
        if played > told and not quiet:
            typer.echo(f"round {played}: {page}")
        told = max(played, told)
        time.sleep(every)
    write()
    if not quiet:
        typer.echo(f"report: {page}")
    for folder in folders if watch else ():
        if not is_complete(folder):
            raise TrainingError(f"The run in {folder} was interrupted: equifed resume {folder}")


def _is_running(folder: Path) -> bool:
    """Tell whether a run continues; that of a federation, which has no lock, does until its end."""
    from equifed.training.files import RunFolderError, StoredRun, is_worked_on
    from equifed.training.folder import is_complete

    if not (folder / "rounds.csv").exists():
        raise RunFolderError(f"--watch is for folders of single runs; {folder} has no rounds.csv.")
    federated = "flower.json" in StoredRun(folder)
    return not is_complete(folder) and (is_worked_on(folder) or federated)


@terminal.resumable("the same command")
def compare(
    configs: Annotated[
        list[Path], typer.Argument(help="Configuration files, or one with tables variants.NAME.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for runs and report.")] = Path("comparison"),
    seeds: terminal.Seeds = 5,
    jobs: terminal.Jobs = 1,
    settings: terminal.Set = None,
    over: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V,V,...", help="Values to try of a setting; may be repeated."),
    ] = None,
    baseline: terminal.Baseline = None,
    target: Annotated[
        float | None, typer.Option(help="Worst client's value for rounds and bytes to a target.")
    ] = None,
    overwrite: terminal.Overwrite = False,
    quiet: terminal.Quiet = False,
    json: terminal.Json = False,
) -> None:
    """Run methods on the same data and seeds; only what is missing in the folder is run."""
    from equifed.report import read_plan
    from equifed.runs.comparison import compare_configs, read_variants
    from equifed.training.files import StoredRun

    made = compare_configs(
        read_variants(configs, settings or [], over or []), out, seeds=seeds, jobs=jobs,
        overwrite=overwrite, baseline=baseline, target=target, console=terminal.open_console(quiet),
    )  # fmt: skip
    if json:
        terminal.print_json(
            {"folder": str(out), **read_plan(StoredRun(out)), "problems": list(made.problems)}
        )
    _show_end(made, out / "report.html", quiet or json)


# -- demo ---------------------------------------------------------------------------------------

ROUNDS, LOCAL = 200, {"lr": 0.03, "steps": 5}
NEAR = 0.005  # the certified relative gap at which a method stops that has one
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
0.1, 0.2, 0.3 by the worst client's accuracy there.
"""


def configure(method: str, rounds: int | None = None) -> RunConfig:
    """Return the demo's run of one method; of FairNewton's few rounds each is evaluated."""
    from equifed.runs.config import RunConfig

    every = 1 if method == "fair-newton" else 10
    return RunConfig.from_dict({
        "rounds": rounds or ROUNDS, "threads": 1, "data": {"name": "fashion-three"},
        "model": {"name": "logistic", "l2": 1e-3}, "algorithm": METHODS[method],
        "evaluate": {"every": every, "splits": ["train", "test"]},
        "stop": {"at_relative_gap": NEAR},
    })  # fmt: skip


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the four runs.")] = Path("equifed-demo"),
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of every method.")] = None,
    overwrite: terminal.Overwrite = False,
    quiet: terminal.Quiet = False,
    json: terminal.Json = False,
) -> None:
    """Train FedAvg, SCAFFOLD, SCAFF-PD and FairNewton on three clients with real images."""
    from equifed.report import build, read_methods, write_headline, write_report
    from equifed.runs import run as runs
    from equifed.training.show import print_line, tabulate_clients
    from equifed.training.trackers import ProgressBar

    for method in METHODS:
        runs.refuse_existing(out / method, overwrite)
    found = {}
    for method in METHODS:
        with (
            terminal.resumable(f"equifed demo --out {out} --overwrite"),
            ProgressBar(terminal.open_console(quiet), method) as bar,
        ):
            config = configure(method, rounds)
            found[method] = runs.run(config, out / method, overwrite=overwrite, callbacks=[bar])
    made = build(read_methods(out / method for method in METHODS))
    page = write_report(made, out / "report.html")
    if json:
        served = {name: history.per_client("accuracy", "test") for name, history in found.items()}
        terminal.print_json(
            {"methods": {name: _summarise(clients) for name, clients in served.items()}}
        )
        return
    console = terminal.open_console(quiet, stdout=True)
    console.print(tabulate_clients(found))
    for key in ("result", "advice"):
        print_line(console, write_headline(made)[key])
    if proved := found["fair-newton"].describe_certificate():
        print_line(console, f"fair-newton: {proved}.")
    print_line(console, f"report: {page}")


def _summarise(clients: dict[str, float]) -> dict[str, Any]:
    values = clients.values()
    return {"average": sum(values) / len(values), "worst": min(values), "clients": clients}


# -- how a comparison ends ------------------------------------------------------------------------


def _show_end(made: Report, page: Path, quiet: bool) -> None:
    """Show the comparison and where its page is, and fail if some runs did."""
    from equifed.report import describe_warnings, write_headline
    from equifed.runs.comparison import tabulate_comparison
    from equifed.training.play_round import TrainingError
    from equifed.training.show import print_line

    console = terminal.open_console(quiet, stdout=True)
    if made.scale is not None:
        for differences in (False, True) if len(made.methods) > 1 else (False,):
            table = tabulate_comparison(made, differences)
            console.print(f"{table}\n", highlight=False, markup=False, soft_wrap=True)
        for key in ("result", "advice"):
            print_line(console, write_headline(made)[key])
    for sentence in describe_warnings(made.methods):
        print_line(console, f"warning: {sentence}", "yellow")
    print_line(console, f"report: {page}")
    if made.problems:
        raise TrainingError("\n".join(["Some runs failed:", *made.problems]))
