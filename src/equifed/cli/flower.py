"""``equifed flower``: a new app, a federation on this machine, checks, and going on after a crash.

Nothing of Flower is imported here before a command needs it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Annotated

import typer

from equifed.cli.submit import ask_sites, count_nodes, follow, run_here, stop
from equifed.cli.terminal import FAILED

app = typer.Typer(
    help="Run the same algorithms on a real federation, with Flower.",
    no_args_is_help=True,
)

INSTALL = (
    "This needs Flower, which is not installed. Install it with: pip install 'equifed[flower]'"
)

FIXED = ("clients", "privacy", "out", "resume")
"""Settings of an app that a run keeps to its end."""

AppFolder = Annotated[Path, typer.Argument(help="Folder of the app.")]
Nodes = Annotated[int | None, typer.Option(min=1, help="Nodes; by default one for each client.")]
Keep = Annotated[Path | None, typer.Option(help="Keep keys, logs and clients' memories here.")]
RunConfig = Annotated[
    list[str] | None,
    typer.Option(
        "--run-config", "-c", metavar="KEY=VALUE", help="Setting of the app; may be repeated."
    ),
]
Deployed = Annotated[
    str | None,
    typer.Argument(help="Deployment to ask; by default one is started here, as by up."),
]
ServerFolder = Annotated[
    Path | None, typer.Option(help="Folder on the server for the answers (JSON), absolute.")
]
Authority = Annotated[Path | None, typer.Option(help="CA certificate.")]
NodeKey = Annotated[Path | None, typer.Option(help="Private key of the node.")]
Stock = Annotated[bool, typer.Option("--stock", help="Flower's own SuperNodes, which are slow.")]
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
    nodes: Nodes = None,
    out: Annotated[Path | None, typer.Option(help="Run folder.")] = None,
    keep: Keep = None,
    run_config: RunConfig = None,
    insecure: Insecure = False,
    stock: Stock = False,
) -> None:
    """Start a SuperLink and nodes here, run the app on them, and stop everything."""
    count = count_nodes(folder, nodes)
    settings = [f"clients={count}", *(run_config or [])]
    settings += [f'out="{out.absolute()}"'] if out is not None else []
    raise typer.Exit(run_here(folder, count, settings, keep, insecure, stock))


@app.command()
def run(
    folder: AppFolder,
    connection: Annotated[
        str, typer.Argument(help="Deployment to run on: a connection in $FLWR_HOME/config.toml.")
    ],
    run_config: RunConfig = None,
) -> None:
    """Submit an app to a deployment and follow it: one line per round, and how it ended."""
    raise typer.Exit(follow(folder, connection, run_config or [], dict(os.environ)))


@app.command()
def statistics(
    folder: AppFolder,
    connection: Deployed = None,
    out: ServerFolder = None,
    nodes: Nodes = None,
    run_config: RunConfig = None,
    insecure: Insecure = False,
) -> None:
    """Show rows, gaps, label shares and means of every site, and which site is unlike the others.

    Nothing is trained. A site whose policy says show_by_name = false shows its rows alone.
    """
    ask_sites("statistics", folder, connection, out, nodes, run_config, insecure)


@app.command(name="leave-one-out")
def leave_one_out(
    folder: AppFolder,
    connection: Deployed = None,
    out: ServerFolder = None,
    nodes: Nodes = None,
    run_config: RunConfig = None,
    insecure: Insecure = False,
) -> None:
    """Train without each site in turn, and let it measure the model of the others on its rows.

    Preparation and model are fitted as if the site were not there; the model of all is beside it.
    """
    ask_sites("leave-one-out", folder, connection, out, nodes, run_config, insecure)


@app.command()
def welcome(
    folder: AppFolder,
    connection: Annotated[str, typer.Argument(help="Deployment, as for run.")],
    run: Annotated[Path, typer.Option(help="Folder of a complete run on the server, absolute.")],
    site: Annotated[str, typer.Option(help="Name of the site that joins.")],
) -> None:
    """Let a site that was not in a finished run measure its model on own rows, and deliver it.

    The site's data are compared with those of the run and prepared as they were.
    """
    if not run.is_absolute():
        stop(f"The run folder must be absolute, as the server sees it; got {run}.")
    if not site.strip() or '"' in site:
        stop(f"{site!r} is no name of a site.")
    settings = ['do="welcome"', f'start="{run}"', f'site="{site}"']
    raise typer.Exit(follow(folder, connection, settings, dict(os.environ)))


@app.command()
def node(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="APP",
            help="The site's own copy of the app: its folder, or module:name of a ClientApp. "
            "Nothing else is run, whatever a run brings along.",
        ),
    ],
    superlink: Annotated[str, typer.Option(help="HOST:PORT of the SuperLink.")],
    root_certificates: Authority = None,
    node_key: NodeKey = None,
    node_config: Annotated[
        str,
        typer.Option(
            help="""Settings of this site, as for flower-supernode: 'name="north" """
            """data="/srv/data.npz" privacy="secure" memory="/var/lib/equifed"'."""
        ),
    ] = "",
    audit: Annotated[
        Path | None,
        typer.Option(help="Audit log; by default audit.jsonl in the memory folder."),
    ] = None,
    insecure: Insecure = False,
) -> None:
    """Take part as a site: one process that stays and runs the site's own app alone."""
    from equifed.flower.node import serve_site
    from equifed.flower.site import SiteError

    if insecure and (root_certificates or node_key):
        stop("--insecure goes with neither --root-certificates nor --node-key.")
    if not insecure and not (root_certificates and node_key):
        stop("A node needs --root-certificates and --node-key (or --insecure, for trying out).")
    try:
        serve_site(folder, node_config, superlink, root_certificates, node_key, audit)
    except (SiteError, ValueError, OSError) as error:
        stop(str(error))


@app.command()
def resume(
    folder: AppFolder,
    out: Annotated[Path, typer.Option(help="Run folder.")],
    connection: Annotated[
        str | None,
        typer.Option(
            help="Deployment to run on, a connection as for flwr run; the run folder is then an "
            "absolute path on its server. By default a federation is started here, as by up."
        ),
    ] = None,
    nodes: Nodes = None,
    keep: Keep = None,
    run_config: RunConfig = None,
    insecure: Insecure = False,
    stock: Stock = False,
) -> None:
    """Go on with a run that was interrupted, as a new Flower run; who takes part cannot change.

    A run that ended for an admitted site to join goes on with its next part.
    """
    from equifed.flower.hello import StartError
    from equifed.flower.joining import find_open_part

    given = re.findall(r"(?:^|\s)([\w-]+)\s*=", "\n".join(run_config or []))
    fixed = [key for key in FIXED if key in given]
    if fixed:
        stop(
            f"--run-config {', '.join(fixed)}: a run that goes on keeps its clients, privacy, out."
        )
    changes = f'resume="{" ".join(given)}"' if given else "resume=true"
    settings = [changes, f'out="{out.absolute()}"', *(run_config or [])]
    if connection is not None:
        if nodes is not None or keep is not None or insecure or stock:
            stop(
                "--nodes, --keep, --insecure and --stock are for a federation here, not for "
                "--connection."
            )
        if not out.is_absolute():
            stop(f"The run folder must be absolute, as the server sees it; got {out}.")
        raise typer.Exit(follow(folder, connection, settings, dict(os.environ)))
    try:
        part = find_open_part(out.absolute())
    except StartError as error:
        stop(str(error))
    if part is None:
        typer.echo(f"{out} is complete; there is nothing to go on with.", err=True)
        return
    count = len(part.names)
    if nodes not in (None, count):
        stop(f"The run in {out} has {count} clients; --nodes cannot change that to {nodes}.")
    code = run_here(folder, count, settings, keep, insecure, stock)
    raise typer.Exit(code if code or find_open_part(out.absolute()) is None else FAILED)


@app.command()
def doctor(
    folder: Annotated[Path | None, typer.Argument(help="Folder of the app.")] = None,
    superlink: Annotated[str | None, typer.Option(help="HOST:PORT of the SuperLink.")] = None,
    root_certificates: Authority = None,
    server_certificate: Annotated[
        Path | None, typer.Option(help="Certificate of the SuperLink.")
    ] = None,
    node_key: NodeKey = None,
    node_config: Annotated[
        str | None, typer.Option(help="Settings of a site, as for node: checks its data.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, and nothing else, for programs.")
    ] = False,
) -> None:
    """Check versions, the app, certificates, keys, a site's data, and that a SuperLink answers."""
    from equifed.flower.trial.doctor import examine

    given = (folder, superlink, root_certificates, server_certificate, node_key, node_config)
    found = list(examine(*given))
    good = all(finding.good for finding in found)
    if as_json:
        listed = [{"good": finding.good, "text": finding.text} for finding in found]
        typer.echo(json.dumps({"good": good, "findings": listed}, indent=1))
    else:
        for finding in found:
            typer.echo(f"{'ok ' if finding.good else 'BAD'} {finding.text}")
    raise typer.Exit(0 if good else FAILED)


# -- files: keys, memories, who may join, who withdraws ----------------------------------------


@app.command()
def certificates(
    folder: Annotated[Path, typer.Argument(help="Folder for certificates and keys.")],
    address: Annotated[
        list[str] | None,
        typer.Option(help="Host name or IP address of the SuperLink; may be repeated."),
    ] = None,
    node: Annotated[
        list[str] | None,
        typer.Option(help="Name of a node that gets a key pair; may be repeated."),
    ] = None,
    days: Annotated[
        float, typer.Option(min=1, max=365, help="How long the server's certificate is valid.")
    ] = 30.0,
) -> None:
    """Make an authority, a server certificate and node keys, for a trial.

    Nothing is overwritten. Private keys can be read by their owner alone; the key of the authority
    is not kept. For a federation that lasts, take the certificate of your usual authority.
    """
    from equifed.flower.trial.certificates import issue

    addresses, nodes = address or [], node or []
    if not addresses and not nodes:
        stop("Give the --address of the SuperLink, or a --node that needs a key.")
    try:
        until = issue(folder, addresses, nodes, days)
    except (ValueError, OSError) as error:
        stop(str(error))
    if until is not None:
        known = ", ".join(addresses)
        typer.echo(f"{folder}/server.pem and server.key are the SuperLink's, for {known}.")
        typer.echo(f"They expire on {until:%Y-%m-%d at %H:%M} UTC; make new ones before that.")
        typer.echo(f"{folder}/ca.pem goes to every site and to everybody who starts runs.")
    for name in nodes:
        typer.echo(f"{folder}/{name}.key goes to {name} alone; {name}.pub is what is registered.")


@app.command()
def clean(
    memory: Annotated[
        Path | None, typer.Argument(help="Memory folder of a site; by default the usual one.")
    ] = None,
    days: Annotated[
        float, typer.Option(min=0, help="Delete memories of runs that rested so many days.")
    ] = 30.0,
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without it they are listed.")] = False,
) -> None:
    """Delete what a site remembers of old runs: gradients of its data and secrets of its masks.

    Models that were delivered, and the audit log, stay.
    """
    from equifed.flower.memory import find_memories, find_root

    root = memory or find_root()
    if not root.is_dir():
        stop(f"{root} is no folder.")
    found = [one for one in find_memories(root) if one.days >= days]
    for one in found:
        if yes:
            one.delete()
        size = f"{one.bytes / 1e6:.1f} MB, rested {one.days:.0f} days"
        typer.echo(f"{'deleted' if yes else 'would delete'} {one.folder} ({size})")
    left = "" if yes or not found else "; add --yes to delete them"
    typer.echo(f"{len(found)} memories of runs that rested {days:g} days or more{left}")


@app.command()
def admit(
    run: Annotated[Path, typer.Argument(help="Folder of a run that is under way, on the server.")],
    sites: Annotated[list[str], typer.Argument(help="Names of the sites that may join.")],
) -> None:
    """Let a site join a run that is under way: it takes part from the next round.

    It must be connected, and its data, model and version are compared as in the first hello. The
    rounds that are left go on in a folder of their own, from the model that there is by then.
    """
    from equifed.flower.hello import StartError
    from equifed.flower.joining import admit as write_word
    from equifed.flower.kept import Kept
    from equifed.training.folder import is_complete

    try:
        kept = Kept.read(run)
    except StartError as error:
        stop(str(error))
    if is_complete(run):
        stop(f"The run in {run} is complete; a site joins it with: equifed flower welcome")
    for name in sites:
        if name in kept.names:
            stop(f"{name} takes part already, with {', '.join(kept.names)}.")
    write_word(run, sites)
    typer.echo(f"{', '.join(sites)} may join after the next round in which all others are there.")


@app.command()
def withdrawal(
    run: Annotated[Path, typer.Argument(help="Run folder, on the server.")],
    site: Annotated[str, typer.Argument(help="Name of the site that withdraws.")],
) -> None:
    """Write for a site that withdraws: what it took part in, what is deleted, what stays."""
    from equifed.flower.hello import StartError
    from equifed.flower.withdrawal import write_withdrawal

    try:
        path = write_withdrawal(run, site)
    except (ValueError, OSError, StartError) as error:
        stop(str(error))
    typer.echo(path.read_text(encoding="utf-8"))
    typer.echo(f"Wrote {path}.")
