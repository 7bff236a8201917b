"""Commands of ``equifed flower`` for the files of a federation: keys, memories."""

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
