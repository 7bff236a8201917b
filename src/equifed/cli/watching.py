"""``equifed watch``, ``equifed evidence``, ``equifed examples``, and reports that follow a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from equifed.cli.terminal import Overwrite, Quiet, Trust, explain_errors, open_console

if TYPE_CHECKING:
    from rich.table import Table

    from equifed.runs.watching import Look

Folder = Annotated[Path, typer.Argument(help="Folder of the run.")]
Every = Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")]

examples_app = typer.Typer(help="Configurations and a table to start from.", no_args_is_help=True)


def watch(run: Folder, every: Every = 1.0) -> None:
    """Follow a run that another process does: rounds, worst client, gap, who is missing."""
    with explain_errors():
        from equifed.runs.watching import follow

        console = open_console(stdout=True)
        if console.is_terminal:
            last = show_live(run, every)
        else:
            last = None
            for look in follow(run, every):
                if last is None or look.round != last.round or look.stage != last.stage:
                    typer.echo(look.to_line())
                last = look
        _tell_end(run, last)


def show_live(run: Path, every: float) -> Look | None:
    """Draw the looks over each other, and return the last one."""
    from rich.live import Live

    from equifed.runs.watching import follow

    last = None
    with Live(console=open_console(stdout=True), auto_refresh=False) as live:
        for look in follow(run, every):
            live.update(tabulate_look(run, look), refresh=True)
            last = look
    return last


def tabulate_look(run: Path, look: Look) -> Table:
    """Return a look as a terminal shows it."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    from equifed.contract.names import show_text
    from equifed.training.show import describe_events

    of = "" if look.planned is None else f" of {look.planned}"
    rows = {
        "round": f"{look.round}{of}, {look.stage}",
        "objective": look.describe_objective(),
        "certified gap": look.describe_gap(),
        "worst client": look.describe_worst(),
        "missing": look.describe_missing(),
    }
    table = Table(title=Text(show_text(str(run))), box=SIMPLE, show_header=False)
    for name, value in rows.items():
        loud = name == "missing" and look.list_missing()
        table.add_row(name, Text(show_text(value), style="bold yellow" if loud else ""))
    for line in describe_events(look.history)[-5:]:
        table.add_row("", Text(show_text(line), style="dim"))
    return table


def _tell_end(run: Path, look: Look | None) -> None:
    from equifed.training.missing import TrainingError

    if look is not None and look.stage == "interrupted":
        raise TrainingError(
            f"Nobody works on {run} any more, and it has not ended; go on with: equifed resume "
            f"{run}"
        )


def follow_report(
    folders: Sequence[Path],
    write: Callable[[float | None], Path],
    every: float,
    quiet: bool = False,
) -> Path:
    """Write a report again and again while runs go on; the page reloads itself until the last."""
    page: Path | None = None
    for going in _watch_all(folders, every):
        page = write(every if going else None)
        if going and not quiet:
            typer.echo(f"report: {page}; written again every {every:g} s until the run has ended")
            quiet = True  # said once
    assert page is not None
    return page


def _watch_all(folders: Sequence[Path], every: float) -> Iterator[bool]:
    """Tell at every look whether any of the runs goes on; the last answer is no."""
    from equifed.runs.watching import look_at
    from equifed.training.files import RunFolderError

    for folder in folders:
        if not (folder / "rounds.csv").exists():
            raise RunFolderError(
                f"{folder} is not the folder of one run, which --watch follows: rounds.csv is "
                "missing."
            )
    while True:
        looks = [look_at(folder) for folder in folders]
        going = any(look.stage == "running" for look in looks)
        yield going
        if not going:
            for folder, look in zip(folders, looks, strict=True):
                _tell_end(folder, look)
            return
        time.sleep(every)


def evidence(
    run: Folder,
    out: Annotated[Path | None, typer.Option(help="Zip file to write; RUN-evidence.zip.")] = None,
    without_model: Annotated[
        bool, typer.Option("--without-model", help="Leave out the model's parameters.")
    ] = False,
    overwrite: Overwrite = False,
    trust: Trust = False,
    quiet: Quiet = False,
) -> None:
    """Pack what an auditor asks about a run into one zip: files, and which answers what."""
    with explain_errors():
        from equifed.runs.evidence import pack_evidence

        path = pack_evidence(
            run, out, with_model=not without_model, overwrite=overwrite, trust=trust
        )
        if not quiet:
            typer.echo(f"evidence: {path}")


@examples_app.command(name="copy")
def copy_examples(
    out: Annotated[Path, typer.Option(help="Folder to write into.")] = Path("examples"),
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Copy the examples: configurations to run, and a table of hospitals to begin with."""
    with explain_errors():
        from equifed.cli.examples import copy

        for path in copy(out, overwrite):
            if not quiet:
                typer.echo(path)
