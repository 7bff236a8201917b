"""``equifed fit`` of a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from equifed.cli.terminal import open_console, print_json, repeat, resumable

if TYPE_CHECKING:
    from equifed.runs.fit import Served


def fit_config(
    file: Path, settings: list[str] | None, out: Path | None, quiet: bool, json: bool,
    more: dict[str, bool],
) -> None:  # fmt: skip
    """Fit what a configuration describes; ``more`` is as for :func:`equifed.fit`."""
    from equifed.runs.config import RunConfig
    from equifed.runs.fit_config import fit_config as choose

    config = RunConfig.read(file, settings or [])
    for address, code in config.loaded_code:
        typer.echo(f"loads {address} from {code}", err=True)
    folder = out or Path("runs") / f"fit-{file.stem}-{config.seed}"
    console = open_console(quiet or json)
    with resumable(repeat()), console.status("reading the data") as status:
        served = choose(config, folder, tell=lambda what: status.update(f"solving: {what}"), **more)
    show_served(served, folder, quiet, json, {})


def show_served(
    served: Served, folder: Path, quiet: bool, json: bool, told: dict[str, Any]
) -> None:
    """Show what was chosen, and where it is."""
    from equifed.runs.fit import REPORT

    if json:
        print_json({"folder": str(folder), **told, **served.to_dict()})
    elif not quiet:
        typer.echo(f"{served!r}\n\nfolder: {folder}; page: {folder / REPORT}")
        typer.echo(f"next: equifed predict {folder} new.csv --out predictions.csv")
