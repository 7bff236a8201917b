"""What the commands share: options, consoles, JSON, and errors as a message and an exit code."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import format_exception
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typing_extensions import override

from equifed import cli

FAILED, BAD_INPUT, INTERRUPTED, LONGEST = 1, 2, 130, 4000
# What the parser raises: click's ClickException; newer versions of typer have their own.
COMMAND_LINE: type[Exception] = typer.BadParameter.__mro__[2]
# The only place that says them; every command keeps to it.
EXIT_CODES = (
    "Exit codes: 0 done; 1 a run failed or cannot continue; 2 wrong options, settings, data or "
    "folders, and nothing was run; 130 interrupted."
)
TRACEBACK = "EQUIFED_TRACEBACK=1 shows"
FRAME = re.compile(r'File "(.+)", line (\d+), in (.+)\n +(.+)')

File = Path | None
Text = str | None
Texts = list[str] | None
Number = float | None
Count = int | None


# -- options: their help, and their name where it is not that of the parameter ------------------


def option(text: str, *names: str, **more: Any) -> Any:
    """Return an option of a command."""
    return typer.Option(*names, help=text, **more)


def argument(text: str, **more: Any) -> Any:
    """Return an argument of a command."""
    return typer.Argument(help=text, **more)


def complete_names(section: str) -> Callable[[str], list[str]]:
    """Return what a shell asks for the names of a section of the catalogue."""

    def complete(incomplete: str) -> list[str]:
        return [
            name
            for name in cli.catalogue.SECTIONS[section].entries()
            if name.startswith(incomplete)
        ]

    return complete


def _require_signature(context: typer.Context, given: Path | None) -> Path | None:
    """Let the command open no folder that none of these keys has signed."""
    if given is not None:
        context.with_resource(cli.keys.signed_by(given))
    return given


OVERRIDE = "Override a setting, as --set algorithm.local.lr=0.1; may be repeated."
SIGNED = "File of public keys: read no folder that none of them has signed (equifed sign)."
Set = Annotated[Texts, option(OVERRIDE, "--set", metavar="KEY=VALUE")]
Overwrite = Annotated[bool, option("Replace existing output.", "--overwrite")]
Quiet = Annotated[bool, option("Print nothing but errors.", "--quiet")]
Json = Annotated[bool, option("Print JSON only.", "--json")]
Workers = Annotated[int, option("Processes that share the clients of the run.", min=1)]
Config = Annotated[Path, argument("Configuration file (TOML).")]
Baseline = Annotated[Text, option("Baseline; the first by default.")]
Folder = Annotated[Path, argument("Folder of the run.")]
Trust = Annotated[bool, option("Run code named in the folder; only if you trust it.", "--trust")]
SignedBy = Annotated[File, option(SIGNED, callback=_require_signature)]


# -- output -----------------------------------------------------------------------------------


def open_console(quiet: bool = False, stdout: bool = False) -> Any:
    """Return a console; everything but results goes to standard error."""
    from rich.console import Console

    return Console(stderr=not stdout, quiet=quiet)


def print_json(document: Mapping[str, Any]) -> None:
    """Print a document that every reader of JSON accepts: null for what is no finite number."""
    print(json.dumps(cli.files.as_plain(document), indent=1))


def tell(document: Mapping[str, Any], lines: Iterable[str], json: bool, quiet: bool) -> None:
    """Print what came of a command: JSON, or lines for a person, or nothing."""
    if json:
        print_json(document)
    elif not quiet:
        typer.echo("\n".join(lines))


def print_records(title: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Print records of the same fields as a table."""
    from equifed.data.describe import Table

    def show(value: Any) -> str:
        known = value is not None and value == value
        text = f"{value:.4g}" if isinstance(value, float) else cli.arrays.show_text(str(value))
        return text if known else ""

    header = tuple(name.replace("_", " ") for name in records[0])
    rows = [tuple(map(show, record.values())) for record in records]
    typer.echo(str(Table(title, header, rows)))


# -- errors -----------------------------------------------------------------------------------


class Explaining(TyperGroup):
    """Commands whose errors are a message and an exit code; EQUIFED_TRACEBACK=1 shows the rest."""

    @override
    def invoke(self, ctx: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except (typer.Exit, typer.Abort, COMMAND_LINE, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            _fail("Interrupted.", INTERRUPTED)
        except Exception as error:
            if os.environ.get("EQUIFED_TRACEBACK"):
                raise
            _fail(*_explain(error))


@contextmanager
def resumable(again: str, run: Path | None = None) -> Iterator[None]:
    """Say how to resume what was interrupted: of a run, once there is something to resume."""
    try:
        with cli.checkpoint.handle_signals():
            yield
    except KeyboardInterrupt:
        if run is not None and not (run / cli.training.tables.CONFIG).exists():
            raise
        _fail(f"Interrupted. Resume with: {again}", INTERRUPTED)


def repeat() -> str:
    """Return the command as it was typed: with the same folder it resumes."""
    return shlex.join(["equifed", *sys.argv[1:]])


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    # as errors are printed: the line of code that gave it helps nobody here
    print(f"equifed: warning: {message}", file=sys.stderr)


def _explain(error: Exception) -> tuple[str, int]:
    """Return a message and an exit code."""
    own, message = _find_own_line(error), str(error)
    code: int = getattr(error, "exit_code", BAD_INPUT)
    of_flower = type(error).__module__.startswith("equifed.flower.")
    if isinstance(
        error, cli.training.TrainingError | cli.checkpoint.CheckpointError | cli.files.Changed
    ):
        code = FAILED
    elif isinstance(error, OSError) and error.filename is not None:
        a_file = isinstance(error, FileExistsError | NotADirectoryError)
        what = "there is a file in the place of a folder" if a_file else error.strerror
        message, code = f"{error.filename}: {what}.", BAD_INPUT
    elif not (of_flower or isinstance(error, ValueError | cli.files.RunFolderError | OSError)):
        message, code = f"{type(error).__name__}: {error}", FAILED
        message += "" if own else f"\nThis should not happen; {TRACEBACK} where."
    if own:  # where it went wrong; else the line that led there
        message = f"{message or type(error).__name__}\n{own}\n{TRACEBACK} the rest."
    return message, code


def _find_own_line(error: Exception) -> str:
    """Return where code that is neither ours nor a package's was last at work; "" if none was.

    It is looked for in the text, which also has what another process or an earlier error said.
    """
    ours = Path(__file__).parents[1]
    library = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
    for file, line, name, source in reversed(FRAME.findall("".join(format_exception(error)))):
        path = Path(file)
        if path.is_file() and not any(path.is_relative_to(place) for place in (ours, *library)):
            return f"{path}, line {line}, in {name}: {source}"
    return ""


def _fail(message: str, code: int) -> None:
    for line in map(cli.arrays.show_text, message.split("\n")):  # a name may have a million letters
        print(f"equifed: {line[:LONGEST]}{'...' * (len(line) > LONGEST)}", file=sys.stderr)
    raise typer.Exit(code)
