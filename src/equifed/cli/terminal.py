"""What the commands share: consoles, closing tables, and errors as one message and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from equifed.training.history import History

BAD_INPUT, STOPPED, INTERRUPTED = 2, 1, 130
"""Exit codes."""


def console(quiet: bool = False, stdout: bool = False) -> Console:
    """Return a console; everything but results goes to standard error."""
    from rich.console import Console

    return Console(stderr=not stdout, quiet=quiet)


def show_end(history: History, folder: Path, quiet: bool) -> None:
    """Show the clients, what happened to them, and where the run is."""
    from equifed.training.progress import clients_table, event_lines

    out = console(quiet, stdout=True)
    if history.main_metric() is not None:
        out.print(clients_table({folder.name: history}))
    for line in event_lines(history):
        out.print(line, style="yellow", markup=False, soft_wrap=True)
    out.print(f"run folder: {folder}", markup=False, highlight=False, soft_wrap=True)


def show_written(path: Path, problems: Sequence[str]) -> None:
    """Say where the result is, and fail if some runs did."""
    from equifed.training.loop import TrainingError

    typer.echo(f"report: {path}")
    if problems:
        raise TrainingError("\n".join(["Some runs failed:", *problems]))


@contextmanager
def clear_errors(folder: Path | None = None) -> Iterator[list[Path | None]]:
    """Turn an error into one message and an exit code; EQUIFED_TRACEBACK=1 shows the rest.

    ``folder`` is the run that an interrupted command can go on with; the block may set it by
    putting another into the list that it gets.
    """
    place = [folder]
    try:
        yield place
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt:
        hint = f" Go on with: equifed resume {place[0]}" if place[0] else ""
        _fail(f"Interrupted.{hint}", INTERRUPTED)
    except Exception as error:
        if os.environ.get("EQUIFED_TRACEBACK"):
            raise
        _fail(*_explained(error))


def _explained(error: Exception) -> tuple[str, int]:
    from equifed.training.checkpoints import CheckpointError
    from equifed.training.folder import RunFolderError
    from equifed.training.loop import TrainingError

    if isinstance(error, TrainingError | CheckpointError):
        return str(error), STOPPED
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}.", BAD_INPUT
    if isinstance(error, ValueError | RunFolderError | OSError):
        return str(error), BAD_INPUT
    unexpected = f"{type(error).__name__}: {error}"
    return f"{unexpected}\nThis should not happen; EQUIFED_TRACEBACK=1 shows where.", STOPPED


def _fail(message: str, code: int) -> None:
    for line in message.splitlines():
        print(f"equifed: {line}", file=sys.stderr)
    raise typer.Exit(code)
