"""What the commands of ``equifed flower`` share: submitting an app, here or to a deployment."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import typer

from equifed.cli.terminal import BAD_INPUT, FAILED, INTERRUPTED


def ask_sites(
    do: str, folder: Path, connection: str | None, out: Path | None, nodes: int | None,
    run_config: list[str] | None, insecure: bool,
) -> NoReturn:  # fmt: skip
    """Run an app that does something else than training, on a deployment or here."""
    settings = [f'do="{do}"', *(run_config or [])]
    if out is not None:
        if connection is not None and not out.is_absolute():
            stop(f"The folder must be absolute, as the server sees it; got {out}.")
        settings.append(f'out="{out.absolute()}"')
    if connection is not None:
        if nodes is not None or insecure:
            stop("--nodes and --insecure are for a federation here, not for a deployment.")
        raise typer.Exit(follow(folder, connection, settings, dict(os.environ)))
    count = count_nodes(folder, nodes)
    settings.append(f"clients={count}")
    raise typer.Exit(run_here(folder, count, settings, None, insecure, False))


def count_nodes(folder: Path, nodes: int | None) -> int:
    """Return how many nodes an app is for."""
    from equifed.flower.app_config import read_app_settings

    try:
        return nodes or int(read_app_settings(folder)["clients"])
    except (OSError, ValueError, KeyError) as error:
        stop(f"{folder} is no app of equifed: {error}")


def run_here(
    folder: Path, count: int, settings: list[str], keep: Path | None, insecure: bool, stock: bool
) -> int:
    """Start a SuperLink and nodes, run an app on them, and stop everything."""
    from equifed.flower.trial.deploy import CONNECTION, DeployError, Deployment

    if insecure:
        warn_insecure()
    # A polite kill must clean up as well; the default would leave the processes behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="equifed-up-") as temporary:
        place = keep or Path(temporary)
        configs = [{"partition-id": i, "num-partitions": count} for i in range(count)]
        try:
            own = None if stock else folder
            with Deployment(place, configs, app=own, insecure=insecure) as deployment:
                typer.echo(f"SuperLink and {count} nodes are up ({place}).", err=True)
                return follow(folder, CONNECTION, settings, deployment.env)
        except DeployError as error:
            stop(str(error), FAILED)


def follow(folder: Path, connection: str, settings: list[str], env: dict[str, str]) -> int:
    """Submit an app, show how it goes, and return the exit code: 0 for a run that completed."""
    from equifed.flower.trial.deploy import DeployError
    from equifed.flower.trial.submit import SubmitError, run_app

    try:
        ending = run_app(folder, connection, settings, env, typer.echo)
    except (SubmitError, DeployError) as error:
        stop(str(error))
    except KeyboardInterrupt:
        typer.echo("The run goes on; end it with: flwr stop", err=True)
        return INTERRUPTED
    if not ending.completed:
        typer.secho(f"The run ended: {ending.reason}", err=True, fg=typer.colors.RED)
        return FAILED
    return 0


def warn_insecure() -> None:
    """Say what insecure means."""
    typer.secho(
        "WARNING: --insecure: anybody who can reach the port can read the models, pretend to be a "
        "client and run code on the nodes. Use it on this machine only.",
        err=True,
        fg=typer.colors.RED,
    )


def stop(message: str, code: int = BAD_INPUT) -> NoReturn:
    """Print what is wrong and leave."""
    typer.secho(message, err=True, fg=typer.colors.RED)
    raise typer.Exit(code)
