"""The command line: one file per group of commands, and no logic of its own.

Whatever a command needs is loaded when it is used, so that ``equifed --help`` answers at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from equifed import cli
from equifed.cli import data, many, model, run
from equifed.cli.flower import app as flower_app
from equifed.cli.terminal import EXIT_CODES, Explaining, option

app = typer.Typer(
    help="Train one model across unequal data owners so that the worst-off are served too.",
    epilog=EXIT_CODES,
    cls=Explaining,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (
    many.demo, run.fit, run.run, run.resume, run.init, many.report, many.compare,
    model.predict, model.evaluate, model.personalise, model.export, model.evidence,
    model.sign, model.verify,
    data.privacy,
):  # fmt: skip
    app.command()(command)
app.command(name="list")(data.list_names)
app.command()(data.schema)
app.add_typer(data.data_app, name="data")
app.add_typer(flower_app, name="flower")


def main() -> None:
    """Run the command line."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        for name, number in cli.training.tables.package_versions().items():
            typer.echo(f"{name} {number}")
        raise typer.Exit


ABOUT = "Show the versions of equifed and its dependencies."
Version = Annotated[bool, option(ABOUT, "--version", callback=_print_version, is_eager=True)]


@app.callback()
def start(version: Version = False) -> None:
    """Take the options that come before a command."""
