"""The command line: parse, build, train, show. No logic of its own.

Whatever a command needs is imported inside it, so that ``equifed --help`` answers at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from equifed.cli import comparing, looking, predicting, watching
from equifed.cli.flower import app as flower_app
from equifed.cli.starting import init, show_estimate
from equifed.cli.terminal import (
    EXIT_CODES,
    Config,
    Json,
    Overwrite,
    Quiet,
    Set,
    Trust,
    Workers,
    complete_names,
    explain_errors,
    open_console,
    print_json,
)

if TYPE_CHECKING:
    from equifed.training.history import History

app = typer.Typer(
    help="Train one model across unequal data owners so that the worst-off are served too.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"equifed {version('equifed')}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
]

Engine = Annotated[
    str | None,
    typer.Option(help="Same as --set engine.name=NAME.", autocompletion=complete_names("engines")),
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        help="Follow the run elsewhere; see: equifed list trackers.",
        autocompletion=complete_names("trackers"),
    ),
]


@app.callback()
def start(version: Version = False) -> None:
    """Take the options that come before a command."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the three runs.")] = Path("equifed-demo"),
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of every method.")] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Train FedAvg, SCAFFOLD and SCAFF-PD on three clients with real images, and compare."""
    with explain_errors(f"equifed demo --out {out} --overwrite"):
        from equifed.cli.demo import print_demo, run_demo, summarise

        found = run_demo(out, rounds, overwrite, open_console(quiet))
        if json:
            print_json(summarise(found))
        else:
            print_demo(found, out, open_console(quiet, stdout=True))


@app.command()
def run(
    config: Config,
    out: Annotated[Path | None, typer.Option(help="Folder for the run; runs/CONFIG-SEED.")] = None,
    settings: Set = None,
    seed: Annotated[int | None, typer.Option(help="Same as --set seed=N.")] = None,
    engine: Engine = None,
    device: Annotated[str | None, typer.Option(help="Same as --set engine.device=D.")] = None,
    workers: Workers = 1,
    track: Track = None,
    report: Annotated[
        bool, typer.Option("--report", help="Also write report.html and a page per participant.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it will take, and write nothing.")
    ] = False,
    with_alone: Annotated[
        bool | None,
        typer.Option(
            "--with-alone/--no-alone",
            help="Fit every client's own model, to compare; by default for small linear models.",
            show_default=False,
        ),
    ] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Train what a configuration file describes."""
    if with_alone and workers > 1:
        raise typer.BadParameter("own models are fitted in one process; leave out --workers.")
    if workers > 1 and not dry_run:
        _run_in_processes(workers, "--engine", "distributed")
    alone = None if with_alone is None else str(with_alone).lower()
    shortcuts = {"seed": seed, "engine.name": engine, "engine.device": device, "with_alone": alone}
    overrides = [f"{key}={value}" for key, value in shortcuts.items() if value is not None]
    with explain_errors():
        from equifed.runs import run as runs
        from equifed.runs.config import RunConfig
        from equifed.runs.run import is_first
        from equifed.training.trackers import ProgressBar

        parsed = RunConfig.read(config, [*(settings or []), *overrides])
        for address, file in parsed.loaded_code:
            typer.echo(f"loads {address} from {file}", err=True)
        if dry_run:
            show_estimate(parsed, workers, json)
            return
        folder = out or Path("runs") / f"{config.stem}-{parsed.seed}"
        runs.refuse_existing(folder, overwrite)
    with explain_errors(run=folder):
        followers = runs.open_trackers(track or [], folder, parsed.to_dict())
        with ProgressBar(open_console(quiet), config.stem) as bar:
            history = runs.run(
                parsed, folder, overwrite=overwrite, callbacks=[bar, *followers]
            )  # fmt: skip
        if report and is_first():
            comparing.write_run_report(folder)
        _show_end(history, folder, quiet, json)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="Folder of the run.")],
    workers: Workers = 1,
    accept_config: Annotated[
        bool, typer.Option("--accept-config", help="Go on under a config.toml that was changed.")
    ] = False,
    trust: Trust = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Go on with a run that was interrupted, to the same end that it would have had."""
    if not trust and sys.stdin.isatty():
        trust = _ask_for_trust(folder)
    if workers > 1:
        _run_in_processes(workers, *(["--trust"] if trust else []))
    with explain_errors(run=folder):
        from equifed.runs import run as runs
        from equifed.training.folder import is_complete
        from equifed.training.trackers import ProgressBar

        complete = is_complete(folder)
        with ProgressBar(open_console(quiet), folder.name) as bar:
            history = runs.resume(folder, callbacks=[bar], accept_config=accept_config, trust=trust)
        if complete and not quiet:
            typer.echo(f"{folder} is complete; there is nothing to go on with.", err=True)
        _show_end(history, folder, quiet, json)


def _ask_for_trust(folder: Path) -> bool:
    """Show what code a run's configuration names, and ask whether to load it."""
    from equifed.training.files import refuse_links
    from equifed.training.folder import find_code

    with explain_errors(run=folder):
        refuse_links(folder)
        code = find_code(folder)
    for address in code:
        typer.echo(f"{folder} loads {address}", err=True)
    return bool(code) and typer.confirm("Load and run it?", err=True)


def _run_in_processes(workers: int, *more: str) -> None:
    """Run this very command in several processes instead, and leave with their status."""
    from equifed.runs.run import drop_option, run_workers

    arguments = [*drop_option(sys.argv[1:], "--workers"), *more]
    raise typer.Exit(run_workers(workers, arguments))


def _show_end(history: History, folder: Path, quiet: bool, json: bool) -> None:
    """Show the clients, what happened to them, and where the run is."""
    from equifed.training.show import describe_events, print_line, tabulate_clients

    if json:
        measured = {(record.split, record.metric) for record in history.metrics}
        clients: dict[str, dict[str, dict[str, float]]] = {}
        for split, metric in sorted(measured):
            clients.setdefault(split, {})[metric] = history.per_client(metric, split)
        print_json({"folder": str(folder), "summary": history.summary(), "clients": clients})
        return
    out = open_console(quiet, stdout=True)
    if history.main_metric() is not None:
        out.print(tabulate_clients({folder.name: history}))
    for line in describe_events(history):
        print_line(out, line, "yellow")
    print_line(out, f"run folder: {folder}")


for function in (
    init,
    comparing.report,
    comparing.compare,
    comparing.sweep,
    comparing.frontier,
    looking.doctor,
):
    app.command()(function)
for about_models in (
    predicting.predict, predicting.evaluate, predicting.personalise, predicting.export
):  # fmt: skip
    app.command()(about_models)
for about_runs in (watching.watch, watching.evidence):
    app.command()(about_runs)
app.command(name="list")(looking.list_names)
app.add_typer(looking.data_app, name="data")
app.add_typer(watching.examples_app, name="examples")
app.add_typer(flower_app, name="flower")
