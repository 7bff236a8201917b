"""``equifed flower``: a new app, a federation on this machine, checks, and going on after a crash.

Nothing of Flower is imported here before a command needs it.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, NoReturn

import typer

app = typer.Typer(
    help="Run the same algorithms on a real federation, with Flower.",
    no_args_is_help=True,
)

INSTALL = (
    "This needs Flower, which is not installed. Install it with: pip install 'equifed[flower]'"
)
BAD_INPUT, FAILED = 2, 1

AppFolder = Annotated[Path, typer.Argument(help="Folder of the app.")]
RunConfig = Annotated[
    list[str] | None,
    typer.Option("--run-config", "-c", metavar="KEY=VALUE", help="Setting of the app, as TOML."),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="No TLS, no node keys. For trying out only.")
]


@app.callback()
def needs_flower() -> None:
    """Say what to install if Flower is missing."""
    if importlib.util.find_spec("flwr") is None:
        stop(INSTALL)


@app.command()
def new(
    folder: Annotated[Path, typer.Argument(help="Folder to write; its name is the app's name.")],
    data: Annotated[str, typer.Option(help="Embedded data set to try it on.")] = "heart-disease",
    publisher: Annotated[str, typer.Option(help="Publisher, as Flower wants one.")] = "local",
) -> None:
    """Write a ready Flower app, for simulation and deployment alike."""
    from equifed.flower.trial.new import write_app

    try:
        package = write_app(folder, data=data, publisher=publisher)
    except (ValueError, OSError) as error:
        stop(str(error))
    typer.echo(f"Wrote {folder}. What is trained: {package / 'equifed.toml'}.")
    typer.echo(f"Try it on this machine: equifed flower up {folder}")


@app.command()
def up(
    folder: AppFolder,
    nodes: Annotated[int | None, typer.Option(min=1, help="SuperNodes; the app's clients.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder to write.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep keys, logs and state here.")] = None,
    run_config: RunConfig = None,
    insecure: Insecure = False,
) -> None:
    """Start a SuperLink and SuperNodes here, run the app on them, and stop everything."""
    from equifed.flower.trial.deploy import CONNECTION, DeployError, Deployment
    from equifed.flower.trial.doctor import app_settings
    from equifed.training.tables import is_complete

    try:
        count = nodes or int(app_settings(folder)["clients"])
    except (OSError, ValueError, KeyError) as error:
        stop(f"{folder} is no app of equifed: {error}")
    if insecure:
        warn_insecure()
    settings = [f"clients={count}", *(run_config or [])]
    settings += [f'out="{out.absolute()}"'] if out is not None else []
    # A polite kill must clean up as well; the default would leave the processes behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="equifed-up-") as temporary:
        place = keep or Path(temporary)
        configs = [{"partition-id": i, "num-partitions": count} for i in range(count)]
        try:
            with Deployment(place, configs, insecure=insecure) as deployment:
                typer.echo(f"SuperLink and {count} SuperNodes are up ({place}).", err=True)
                code = follow(folder, CONNECTION, settings, deployment.env)
        except DeployError as error:
            stop(str(error), FAILED)
    if out is not None and code == 0 and not is_complete(out):
        code = FAILED  # Flower's own command succeeds whatever became of the run
    raise typer.Exit(code)


@app.command()
def resume(
    folder: AppFolder,
    superlink: Annotated[str, typer.Argument(help="Connection, as for flwr run.")],
    out: Annotated[Path, typer.Argument(help="Run folder on the server, absolute.")],
    run_config: RunConfig = None,
) -> None:
    """Go on with a run after its SuperLink or server process crashed, as a new Flower run."""
    if not out.is_absolute():
        stop(f"The run folder must be absolute, as the server sees it; got {out}.")
    settings = ["resume=true", f'out="{out}"', *(run_config or [])]
    raise typer.Exit(follow(folder, superlink, settings, dict(os.environ)))


@app.command()
def doctor(
    folder: Annotated[Path | None, typer.Argument(help="Folder of the app.")] = None,
    superlink: Annotated[str | None, typer.Option(help="HOST:PORT of the SuperLink.")] = None,
    root_certificates: Annotated[Path | None, typer.Option(help="CA certificate.")] = None,
    server_certificate: Annotated[Path | None, typer.Option(help="Of the SuperLink.")] = None,
    node_key: Annotated[Path | None, typer.Option(help="Private key of a SuperNode.")] = None,
) -> None:
    """Check versions, the app, certificates, keys and whether the SuperLink can be reached."""
    from equifed.flower.trial.doctor import findings

    bad = 0
    for finding in findings(folder, superlink, root_certificates, server_certificate, node_key):
        bad += not finding.good
        typer.echo(f"{'ok ' if finding.good else 'BAD'} {finding.text}")
    raise typer.Exit(FAILED if bad else 0)


def follow(folder: Path, superlink: str, settings: list[str], env: dict[str, str]) -> int:
    """Submit an app with Flower's own command and show its log until it ends."""
    from equifed.flower.trial.deploy import script

    options = [word for setting in settings for word in ("--run-config", setting)]
    command = [script("flwr"), "run", str(folder.absolute()), superlink, "--stream", *options]
    return subprocess.run(command, env=env, stdin=subprocess.DEVNULL, check=False).returncode


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
