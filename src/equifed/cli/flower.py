"""``equifed flower``: a new app, a federation on this machine, checks, and resuming after a crash.

Nothing of Flower is imported here before a command needs it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from equifed.cli import terminal
from equifed.cli.terminal import Count, File, Json, Text, Texts, argument, option

app = typer.Typer(
    help="Run the same algorithms on a real federation, with Flower.", cls=terminal.Explaining,
    no_args_is_help=True,
)  # fmt: skip

FIXED = ("clients", "privacy", "out", "resume")  # settings of an app that a run keeps to its end

SUPERLINK, AUTHORITY, NODE_KEY = (
    "HOST:PORT of the SuperLink.", "CA certificate.", "Private key of the node."
)  # fmt: skip
SETTING = "Setting of the app; may be repeated."
MEMBERS = "Public keys of the sites, one on a line with the name; no other site joins."
AppFolder = Annotated[Path, argument("Folder of the app.")]
Nodes = Annotated[Count, option("Number of nodes; default: one per client.", min=1)]
Keep = Annotated[File, option("Keep keys, logs and clients' memories here.")]
RunConfig = Annotated[Texts, option(SETTING, "--run-config", "-c", metavar="KEY=VALUE")]
Connection = Annotated[str, argument("Deployment: a connection in $FLWR_HOME/config.toml.")]
Key = Annotated[File, option("Private key of the operator, which signs the plan of the run.")]
MembersFile = Annotated[File, option(MEMBERS)]
Memory = Annotated[File, argument("Memory folder of the site; by default the usual one.")]


@app.callback()
def needs_flower() -> None:
    """Say what to install if Flower is missing."""
    if importlib.util.find_spec("flwr") is None:
        raise ValueError("Flower is not installed; install it: pip install 'equifed[flower]'")


# -- submitting an app, here or to a deployment -------------------------------------------------


def _run_here(
    folder: Path, count: int, settings: list[str], keep: Path | None, earlier: Path | None = None
) -> int:
    """Start a SuperLink and nodes, run an app or go on with an ``earlier`` run, stop everything."""
    from equifed.flower.rehearsal import sign_more_rounds, sign_run
    from equifed.flower.trial.deploy import CONNECTION, Deployment

    # A polite kill must clean up as well; the default would leave the processes behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="equifed-up-") as temporary:
        place = keep or Path(temporary)
        configs = [{"partition-id": i, "num-partitions": count} for i in range(count)]
        with Deployment(place, configs, app=folder, signed=True) as deployment:
            typer.echo(f"SuperLink and {count} nodes are up ({place}).", err=True)
            if earlier is None:
                plan, _ = sign_run(folder, settings, deployment.operator, None)
            else:
                plan = sign_more_rounds(folder, earlier, settings, deployment.operator)
            plans = [*settings, f'plan="{plan}"']
            return _follow(folder, CONNECTION, plans, deployment.env)


def _follow(
    folder: Path, connection: str, settings: list[str], env: dict[str, str] | None = None,
    json: bool = False,
) -> int:  # fmt: skip
    """Submit an app, show how it goes, and return the exit code: 0 for a run that completed."""
    from equifed.flower.trial.apps import run_app

    told: list[Any] = [partial(typer.echo, err=True), typer.echo] if json else [typer.echo]
    try:
        ending = run_app(folder, connection, settings, env or dict(os.environ), *told)
    except KeyboardInterrupt:
        typer.echo("The run continues; end it with: flwr stop", err=True)
        return terminal.INTERRUPTED
    if not ending.completed:
        typer.secho(f"The run ended: {ending.reason}", err=True, fg=typer.colors.RED)
    return 0 if ending.completed else terminal.FAILED


def _submit(
    folder: Path, connection: str, settings: list[str], key: Path | None = None,
    members: Path | None = None, out: Path | None = None, json: bool = False,
) -> NoReturn:  # fmt: skip
    """Sign the plan of a run, show it, and submit the app to a deployment."""
    if out is not None and not out.is_absolute():
        raise ValueError(f"The folder must be absolute, as the server sees it; got {out}.")
    if key is None and members is not None:
        raise ValueError("--members is a part of the plan, which --key signs; give both.")
    if key is not None:
        from equifed.flower.rehearsal import sign_run

        word, told = sign_run(folder, settings, key, members)
        typer.echo("\n".join(told))
        settings = [*settings, f'plan="{word}"']
    raise typer.Exit(_follow(folder, connection, settings, json=json))


# -- commands -----------------------------------------------------------------------------------


@app.command()
def new(
    folder: Annotated[Path, argument("Folder to write; its name is the app's name.")],
    data: Annotated[str, option("Embedded data set to try it on.")] = "heart-disease",
) -> None:
    """Write a ready Flower app, for simulation and deployment alike."""
    from equifed.flower.trial.apps import write_app

    package = write_app(folder, data=data)
    typer.echo(f"Wrote {folder}. What is trained: {package / 'equifed.toml'}.")
    typer.echo(f"Try it on this machine: equifed flower up {folder}")


@app.command()
def up(
    folder: AppFolder,
    nodes: Nodes = None,
    out: Annotated[File, option("Run folder.")] = None,
    keep: Keep = None,
    run_config: RunConfig = None,
) -> None:
    """Start a SuperLink and nodes here, run the app on them, and stop everything."""
    from equifed.flower.app_config import read_app_settings

    try:
        count = nodes or int(read_app_settings(folder)["clients"])
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} is not an app of equifed: {error}") from None
    settings = [f"clients={count}", *(run_config or [])]
    settings += [f'out="{out.absolute()}"'] if out is not None else []
    raise typer.Exit(_run_here(folder, count, settings, keep))


@app.command()
def run(
    folder: AppFolder,
    connection: Connection,
    run_config: RunConfig = None,
    key: Key = None,
    members: MembersFile = None,
) -> None:
    """Submit an app to a deployment and follow it: one line per round, and how it ended."""
    _submit(folder, connection, run_config or [], key, members)


@app.command()
def fit(
    folder: AppFolder,
    connection: Connection,
    out: Annotated[File, option("Run folder on the server, absolute; to resume it.")] = None,
    run_config: RunConfig = None,
    key: Key = None,
    members: MembersFile = None,
    json: Json = False,
) -> None:
    """Choose the model that serves all sites best, as equifed fit does: one plan for all of it."""
    settings = ['do="fit"', *(run_config or []), *([] if out is None else [f'out="{out}"'])]
    _submit(folder, connection, settings, key, members, out, json)


@app.command()
def statistics(
    folder: AppFolder,
    connection: Connection,
    out: Annotated[File, option("Folder on the server for the answers (JSON), absolute.")] = None,
    run_config: RunConfig = None,
    key: Key = None,
    members: MembersFile = None,
) -> None:
    """Show rows, gaps, label shares and means of every site, and which site is unlike the others.

    Nothing is trained. A site whose policy says show_by_name = false shows its rows alone.
    """
    told = [] if out is None else [f'out="{out}"']
    settings = ['do="statistics"', *(run_config or []), *told]
    _submit(folder, connection, settings, key, members, out)


@app.command()
def node(
    folder: Annotated[
        str,
        argument(
            "The site's own copy of the app: its folder, or module:name of a ClientApp. Nothing "
            "else is run, whatever a run brings along.",
            metavar="APP",
        ),
    ],
    superlink: Annotated[str, option(SUPERLINK)],
    root_certificates: Annotated[Path, option(AUTHORITY)],
    node_key: Annotated[Path, option(NODE_KEY)],
    node_config: Annotated[
        str,
        option(
            """Settings of this site, as for flower-supernode: 'name="north" """
            """data="/srv/data.npz" privacy="secure" memory="/var/lib/equifed"'."""
        ),
    ] = "",
    audit: Annotated[File, option("Audit log; default: audit.jsonl in the memory folder.")] = None,
    any_operator: Annotated[
        bool, option("Answer runs of any operator; see the threat model.", "--any-operator")
    ] = False,
) -> None:
    """Take part as a site: one process that stays and runs the site's own app alone."""
    from equifed.flower.node import serve_site

    if any_operator:
        warning = "Any user who may submit a run can query this site's data row by row."
        typer.secho(warning, err=True, fg=typer.colors.RED)
    serve_site(folder, node_config, superlink, root_certificates, node_key, audit, any_operator)


@app.command()
def resume(
    folder: AppFolder,
    out: Annotated[Path, option("Run folder.")],
    connection: Annotated[
        Text,
        option(
            "Deployment to run on, a connection as for flwr run; the run folder is then an "
            "absolute path on its server. By default a federation is started here, as by up."
        ),
    ] = None,
    nodes: Nodes = None,
    keep: Keep = None,
    run_config: RunConfig = None,
    key: Key = None,
) -> None:
    """Resume an interrupted run, as a new Flower run with the same clients."""
    from equifed.flower.app_config import Kept
    from equifed.training.folder import is_complete

    given = re.findall(r"(?:^|\s)([\w-]+)\s*=", "\n".join(run_config or []))
    fixed = [key for key in FIXED if key in given]
    if fixed:
        raise ValueError(
            f"--run-config {', '.join(fixed)}: a resumed run keeps its clients, privacy and out."
        )
    changes = f'resume="{" ".join(given)}"' if given else "resume=true"
    settings = [changes, f'out="{out.absolute()}"', *(run_config or [])]
    if key is not None:
        from equifed.flower.rehearsal import sign_more_rounds

        plan = sign_more_rounds(folder, out, run_config or [], key)
        settings.append(f'plan="{plan}"')
    if connection is not None:
        if nodes is not None or keep is not None:
            raise ValueError("--nodes and --keep are for a federation here, not for a deployment.")
        _submit(folder, connection, settings, out=out)
    count = len(Kept(out).names)
    if is_complete(out):
        typer.echo(f"{out} is complete; there is nothing to resume.", err=True)
        return
    if nodes not in (None, count):
        raise ValueError(
            f"The run in {out} has {count} clients; --nodes cannot change that to {nodes}."
        )
    code = _run_here(folder, count, settings, keep, out)
    raise typer.Exit(code if code or is_complete(out) else terminal.FAILED)


@app.command()
def doctor(
    folder: Annotated[File, argument("Folder of the app.")] = None,
    superlink: Annotated[Text, option(SUPERLINK)] = None,
    root_certificates: Annotated[File, option(AUTHORITY)] = None,
    node_key: Annotated[File, option(NODE_KEY)] = None,
    node_config: Annotated[Text, option("Settings of a site, as for node: tries its data.")] = None,
    json: Json = False,
) -> None:
    """Check versions, the app, certificates, keys, a site's data, and that a SuperLink answers."""
    from equifed.flower.trial.doctor import examine

    found = list(examine(folder, superlink, root_certificates, node_key, node_config))
    good = all(finding.good for finding in found)
    if json:
        terminal.print_json({"good": good, "findings": [asdict(finding) for finding in found]})
    else:
        for finding in found:
            typer.echo(f"{'ok ' if finding.good else 'BAD'} {finding.text}")
    raise typer.Exit(0 if good else terminal.FAILED)


# -- files: keys and memories -----------------------------------------------------------------


@app.command()
def certificates(
    folder: Annotated[Path, argument("Folder for certificates and keys.")],
    address: Annotated[Texts, option("Host or IP of the SuperLink; may be repeated.")] = None,
    node: Annotated[Texts, option("Name of a node that gets a key pair; may be repeated.")] = None,
    days: Annotated[float, option("Days of the server's certificate.", min=1, max=365)] = 30.0,
) -> None:
    """Make an authority, a server certificate and node keys, for a trial.

    Nothing is overwritten. Private keys can be read by their owner alone; the key of the authority
    is not kept. For a federation that lasts, take the certificate of your usual authority.
    """
    from equifed.flower.trial.deploy import issue

    addresses, nodes = address or [], node or []
    if not addresses and not nodes:
        raise ValueError("Give the --address of the SuperLink, or a --node that needs a key.")
    until = issue(folder, addresses, nodes, days)
    if until is not None:
        known = ", ".join(addresses)
        typer.echo(f"{folder}/server.pem and server.key are the SuperLink's, for {known}.")
        typer.echo(f"They expire on {until:%Y-%m-%d at %H:%M} UTC; make new ones before that.")
        typer.echo(f"{folder}/ca.pem goes to every site and to all who start runs.")
    for name in nodes:
        typer.echo(f"{folder}/{name}.key goes to {name} alone; {name}.pub is what is registered.")


@app.command()
def keys(
    folder: Annotated[Path, argument("Folder for the keys.")],
    name: Annotated[str, argument("Name of the operator.")],
) -> None:
    """Make the key of an operator, who signs the plans of runs; sites list its public half."""
    from equifed.training.keys import make_key

    try:
        public = make_key(folder, name)
    except FileExistsError:
        raise ValueError(f"{folder / name}.key exists, and is not overwritten.") from None
    typer.echo(f"{folder / name}.key stays with {name}. Sites write into policy.toml:")
    typer.echo(f'operators = ["{public.line} {name}"]')
    typer.echo(f"Compare its fingerprint by telephone: {public.fingerprint}")


@app.command()
def approve(
    memory: Memory = None,
    plan: Annotated[Text, argument("Beginning of a plan; without it, plans are listed.")] = None,
) -> None:
    """Show the plans that a site was asked to take part in, and approve one."""
    from equifed.flower.account import approve, list_plans
    from equifed.flower.memory import find_root

    root = memory or find_root()
    found = {k: told for k, told in list_plans(root).items() if k.startswith(plan or "")}
    for name, told in found.items():
        typer.echo(f"{name}: {told['state']}, signed by {told['operator'] or 'no operator'}")
        for line in told["words"]:
            typer.echo(f"    {line}")
    waiting = [name for name, told in found.items() if told["state"] == "waiting"]
    if plan is None:
        typer.echo(f"{len(waiting)} plans wait for approval")
    elif len(found) != 1:
        raise ValueError(f"{len(found)} plans in {root} begin with {plan!r}; name one of them.")
    elif waiting:
        approve(root, waiting[0])
        typer.echo(f"approved {waiting[0]}; a waiting run continues by itself")


@app.command()
def clean(
    memory: Memory = None,
    days: Annotated[float, option("Days for which the runs have rested.", min=0)] = 30.0,
    yes: Annotated[bool, option("Delete them; default: only list.", "--yes")] = False,
) -> None:
    """Delete what a site remembers of old runs: gradients of its data and secrets of its masks.

    Models that were delivered, and the audit log, stay.
    """
    from equifed.flower.memory import find_memories, find_root

    root = memory or find_root()
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder.")
    found = [one for one in find_memories(root) if one.days >= days]
    for one in found:
        if yes:
            shutil.rmtree(one.folder)
        size = f"{one.bytes / 1e6:.1f} MB, rested {one.days:.0f} days"
        typer.echo(f"{'deleted' if yes else 'would delete'} {one.folder} ({size})")
    left = "" if yes or not found else "; add --yes to delete them"
    typer.echo(f"{len(found)} memories of runs that rested {days:g} days or more{left}")
