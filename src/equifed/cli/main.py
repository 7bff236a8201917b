"""The command line: parse, build, train, show. No logic of its own.

Whatever a command needs is imported inside it, so that ``equifed --help`` answers at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from equifed.cli.flower import app as flower_app
from equifed.cli.terminal import clear_errors, console, show_end, show_written

app = typer.Typer(
    help="Train one model across unequal data owners so that the worst-off are served too.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Look at data sets, or get them.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(flower_app, name="flower")

Out = Annotated[Path | None, typer.Option(help="Run folder; by default runs/CONFIG-SEED.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting; may be repeated."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a run that is there.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, no table.")]
Processes = Annotated[int, typer.Option(min=1, help="How many runs at a time.")]
Workers = Annotated[int, typer.Option(min=1, help="Spread the clients over processes.")]
Baseline = Annotated[str | None, typer.Option(help="What to compare with; the first by default.")]


def main() -> None:
    """Run the command line; models and losses of this folder's modules can be named too."""
    sys.path.append(str(Path.cwd()))  # last, so that nothing installed is hidden by a file here
    app()


def _in_processes(processes: int, *more: str) -> None:
    """Run this very command in several processes instead, and leave with their status."""
    from equifed.runs.workers import drop_option, run_workers

    arguments = [*drop_option(sys.argv[1:], "--processes"), *more]
    raise typer.Exit(run_workers(processes, arguments))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the three runs.")] = Path("equifed-demo"),
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of every method.")] = None,
    overwrite: Overwrite = False,
    json: Annotated[bool, typer.Option("--json", help="Print numbers as JSON only.")] = False,
) -> None:
    """Train FedAvg, SCAFFOLD and SCAFF-PD on three clients with real images, and compare."""
    from equifed.runs.demo import run_demo

    with clear_errors():
        run_demo(out, rounds=rounds, overwrite=overwrite, json_only=json, console=console())


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="Configuration file (TOML).")],
    out: Out = None,
    settings: Set = None,
    seed: Annotated[int | None, typer.Option(help="Same as --set seed=N.")] = None,
    engine: Annotated[str | None, typer.Option(help="Same as --set engine.name=NAME.")] = None,
    device: Annotated[str | None, typer.Option(help="Same as --set engine.device=D.")] = None,
    processes: Workers = 1,
    track: Annotated[
        list[str] | None, typer.Option(help="Follow the run elsewhere; see: equifed list trackers.")
    ] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Train what a configuration file describes."""
    if processes > 1:
        _in_processes(processes, "--engine", "distributed")
    shortcuts = {"seed": seed, "engine.name": engine, "engine.device": device}
    overrides = [f"{key}={value}" for key, value in shortcuts.items() if value is not None]
    with clear_errors(out) as place:
        from equifed.runs import run as runs
        from equifed.runs.config import RunConfig
        from equifed.training.progress import ProgressBar

        parsed = RunConfig.read(config, [*(settings or []), *overrides])
        folder = place[0] = out or Path("runs") / f"{config.stem}-{parsed.seed}"
        runs.refuse_existing(folder, overwrite)
        followers = runs.start_trackers(track or [], folder, parsed.to_dict())
        with ProgressBar(console(quiet), config.stem) as bar:
            history = runs.run(parsed, folder, overwrite=overwrite, callbacks=[bar, *followers])
        show_end(history, folder, quiet)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="Run folder.")],
    processes: Workers = 1,
    quiet: Quiet = False,
) -> None:
    """Go on with a run that was interrupted, to the same end that it would have had."""
    if processes > 1:
        _in_processes(processes)
    with clear_errors(folder):
        from equifed.runs import run as runs
        from equifed.training.progress import ProgressBar
        from equifed.training.tables import is_complete

        if is_complete(folder) and (folder / runs.CONFIG).exists():
            typer.echo(f"{folder} is complete; there is nothing to go on with.", err=True)
            return
        with ProgressBar(console(quiet), folder.name) as bar:
            history = runs.resume(folder, callbacks=[bar])
        show_end(history, folder, quiet)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or comparison folders.")],
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
    per_client: Annotated[
        bool, typer.Option("--per-client", help="Also write a page for each participant.")
    ] = False,
    baseline: Baseline = None,
) -> None:
    """Write one HTML page about runs: who is served how well, and what fairness cost."""
    with clear_errors():
        from equifed.report import build, read_methods, write_report

        made = build(read_methods(folders), baseline=baseline)
        typer.echo(f"report: {write_report(made, out, per_client=per_client)}")


@app.command()
def compare(
    configs: Annotated[
        list[Path], typer.Argument(help="Configuration files, or one with [variants.NAME] tables.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for runs and report.")] = Path("comparison"),
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds each.")] = 5,
    processes: Processes = 1,
    settings: Set = None,
    baseline: Baseline = None,
    target: Annotated[
        float | None, typer.Option(help="Worst client's value for rounds and bytes to a target.")
    ] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Run methods on the same data and seeds; only what is missing in the folder is run."""
    with clear_errors():
        from equifed.report import Target
        from equifed.runs import compare as comparing

        made = comparing.compare(
            comparing.read_variants(configs, settings or []),
            out,
            seeds=seeds,
            processes=processes,
            overwrite=overwrite,
            baseline=baseline,
            target=None if target is None else Target(target),
            console=console(quiet),
        )
        console(quiet, stdout=True).print(comparing.comparison_table(made))
        show_written(out / "report.html", made.problems)


@app.command()
def sweep(
    config: Annotated[Path, typer.Argument(help="Configuration file (TOML).")],
    over: Annotated[
        list[str],
        typer.Option(metavar="KEY=V,V,...", help="Setting and its values; once or twice."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for runs and figures.")] = Path("sweep"),
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds each.")] = 1,
    processes: Processes = 1,
    settings: Set = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Try values of one or two settings and draw average against worst client."""
    with clear_errors():
        from equifed.runs import sweep as sweeping

        made = sweeping.sweep(
            config,
            [sweeping.Over.parse(text) for text in over],
            out,
            overrides=settings or [],
            seeds=seeds,
            processes=processes,
            overwrite=overwrite,
            console=console(quiet),
        )
        show_written(out / "frontier.html", made.problems)


@app.command(name="list")
def list_(
    section: Annotated[str | None, typer.Argument(help="Which section; all by default.")] = None,
) -> None:
    """List algorithms, objectives, schedules, engines, data sets, models and losses."""
    from rich.table import Table

    from equifed.runs.catalogue import SECTIONS, unknown

    with clear_errors():
        if section is not None and section not in SECTIONS:
            raise ValueError(unknown("section", section, SECTIONS))
        for name in [section] if section else SECTIONS:
            table = Table(title=name, title_justify="left", box=None, show_header=False)
            for key, entry in SECTIONS[name].entries().items():
                source = f" ({entry.paper})" if entry.paper else ""
                table.add_row(key, entry.summary + source)
            console(stdout=True).print(table)


@data_app.command(name="show")
def data_show(name: Annotated[str, typer.Argument(help="Data set.")], settings: Set = None) -> None:
    """Show who has how many samples of what."""
    with clear_errors():
        from equifed.runs.config import read_data
        from equifed.runs.run import load_data

        federation = load_data(read_data(name, settings or []))
        out = console(stdout=True)
        out.print(federation.table() if out.is_terminal else str(federation.table()))


@data_app.command(name="fetch")
def data_fetch(name: Annotated[str, typer.Argument(help="Data set.")]) -> None:
    """Get the files of a data set from its publisher, checked by their SHA-256."""
    with clear_errors():
        from equifed.datasets.registry import DATASETS, fetch

        paths = fetch(name)
        if DATASETS[name].embedded:
            typer.echo(f"{name} is part of the package.")
        for path in paths:
            typer.echo(path)


@app.command()
def doctor() -> None:
    """Say what is installed, what is found and what is missing."""
    from equifed.runs.doctor import report

    for line in report():
        typer.echo(line)
