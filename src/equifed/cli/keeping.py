"""Commands of ``equifed flower`` for files: keys, memories, who may join, who withdraws."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equifed.cli.federations import stop


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
