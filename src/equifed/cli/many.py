"""The commands about many runs: ``report``, ``compare``, ``demo``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from equifed import cli
from equifed.cli import terminal
from equifed.cli.terminal import Count, Json, Number, Overwrite, Quiet, Texts, argument, option


def report(
    folders: Annotated[list[Path], argument("Run folders or comparison folders.")],
    page: Annotated[Path, option("HTML file to write.")] = Path("report.html"),
    per_client: Annotated[bool, option("Also write a page per client.", "--per-client")] = False,
    baseline: terminal.Baseline = None,
    watch: Annotated[bool, option("Follow runs to their end.", "--watch")] = False,
    every: Annotated[float, option("With --watch: seconds between.", min=0.1)] = 2.0,
    signed_by: terminal.SignedBy = None,
    quiet: Quiet = False,
) -> None:
    """Write one HTML page about runs: who is served how well, and what fairness cost."""

    def write(refresh: float | None = None) -> Any:
        made = cli.reports.build(cli.reports.read_methods(folders), baseline=baseline)
        cli.reports.write_report(made, page, per_client=per_client, refresh=refresh)
        return made

    def continues(run: Path) -> bool:
        # that of a federation has no lock: it continues until its end
        single = (run / "rounds.csv").exists()
        cli.files.refuse_folder(
            (not single, f"{run} has no rounds.csv; --watch is for single runs.")
        )
        federated = "flower.json" in cli.training.StoredRun(run)
        return not cli.training.is_complete(run) and (cli.files.is_worked_on(run) or federated)

    told = 0
    while watch and any(map(continues, folders)):
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
        if not cli.training.is_complete(folder):
            raise cli.training.TrainingError(
                f"The run in {folder} was interrupted: equifed resume {folder}"
            )


@terminal.resumable("the same command")
def compare(
    configs: Annotated[list[Path], argument("Configuration files, or one with tables variants.*.")],
    out: Annotated[Path, option("Folder for runs and report.")] = Path("comparison"),
    seeds: Annotated[int, option("Number of seeds per configuration.", min=1)] = 5,
    jobs: Annotated[int, option("Number of runs in parallel.", min=1)] = 1,
    settings: terminal.Set = None,
    over: Annotated[Texts, option("Values to try; may be repeated.", metavar="KEY=V,V,...")] = None,
    baseline: terminal.Baseline = None,
    target: Annotated[Number, option("Worst client's value: rounds and bytes until then.")] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Run methods on the same data and seeds; only what is missing in the folder is run."""
    variants = cli.comparison.read_variants(configs, settings or [], over or [])
    made = cli.comparison.compare_configs(
        variants, out, seeds=seeds, jobs=jobs, overwrite=overwrite, baseline=baseline,
        target=target, console=terminal.open_console(quiet),
    )  # fmt: skip
    if json:
        plan = cli.reports.read_plan(cli.training.StoredRun(out))
        terminal.print_json({"folder": str(out), **plan, "problems": [*made.problems]})
    console = terminal.open_console(quiet or json, stdout=True)
    if made.scale is not None:
        for differences in (False, True) if len(made.methods) > 1 else (False,):
            table = cli.comparison.tabulate_comparison(made, differences)
            console.print(f"{table}\n", highlight=False, markup=False, soft_wrap=True)
        for key in ("result", "advice"):
            cli.shown.print_line(console, cli.reports.write_headline(made)[key])
    for sentence in cli.reports.describe_warnings(made.methods):
        cli.shown.print_line(console, f"warning: {sentence}", "yellow")
    cli.shown.print_line(console, f"report: {out / 'report.html'}")
    if made.problems:
        raise cli.training.TrainingError("\n".join(["Some runs failed:", *made.problems]))


# -- demo ---------------------------------------------------------------------------------------

ROUNDS, LOCAL = 200, {"lr": 0.03, "steps": 5}
NEAR = 0.005  # the certified relative gap at which a method stops that has one
# The first two do five full gradient steps per round, with the best step size of lr = 0.01, 0.02,
# 0.03, 0.04 by average accuracy on a fifth of the training images, held out
# (data.holdout.validation = 0.2). The other two choose their steps themselves; rho is the best of
# 0.1, 0.2, 0.3 by the worst client's accuracy there.
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg", "local": LOCAL},
    "scaffold": {"name": "scaffold", "local": LOCAL},
    "scaff-pd": {"name": "scaff-pd", "objective": {"name": "chi-square", "rho": 0.1}},
    "fair-newton": {"name": "fair-newton", "objective": {"name": "chi-square", "rho": 0.1}},
}


def configure(method: str, rounds: int | None = None) -> Any:
    """Return the demo's run of one method; of FairNewton's few rounds each is evaluated."""
    every = 1 if method == "fair-newton" else 10
    return cli.configs.RunConfig.from_dict({
        "rounds": rounds or ROUNDS, "threads": 1, "data": {"name": "fashion-three"},
        "model": {"name": "logistic", "l2": 1e-3}, "algorithm": METHODS[method],
        "evaluate": {"every": every, "splits": ["train", "test"]},
        "stop": {"at_relative_gap": NEAR},
    })  # fmt: skip


def demo(
    out: Annotated[Path, option("Folder for the four runs.")] = Path("equifed-demo"),
    rounds: Annotated[Count, option("Rounds of every method.", min=1)] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Train FedAvg, SCAFFOLD, SCAFF-PD and FairNewton on three clients with real images."""
    for method in METHODS:
        cli.runs.refuse_existing(out / method, overwrite)
    found = {}
    for method in METHODS:
        with (
            terminal.resumable(f"equifed demo --out {out} --overwrite"),
            cli.training.trackers.ProgressBar(terminal.open_console(quiet), method) as bar,
        ):
            config = configure(method, rounds)
            found[method] = cli.runs.run(config, out / method, overwrite=overwrite, callbacks=[bar])
    made = cli.reports.build(cli.reports.read_methods(out / method for method in METHODS))
    page = cli.reports.write_report(made, out / "report.html")
    if json:
        served = {name: history.per_client("accuracy", "test") for name, history in found.items()}
        terminal.print_json({"methods": {
            name: {"average": sum(clients.values()) / len(clients), "worst": min(clients.values()),
                   "clients": clients}
            for name, clients in served.items()
        }})  # fmt: skip
        return
    console = terminal.open_console(quiet, stdout=True)
    console.print(cli.shown.tabulate_clients(found))
    for key in ("result", "advice"):
        cli.shown.print_line(console, cli.reports.write_headline(made)[key])
    if proved := found["fair-newton"].describe_certificate():
        cli.shown.print_line(console, f"fair-newton: {proved}.")
    cli.shown.print_line(console, f"report: {page}")
