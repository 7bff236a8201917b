"""What ``equifed flower doctor`` checks before a run."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import socket
import ssl
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from logging.handlers import BufferingHandler
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, Message, RecordDict

from equifed.flower.app_config import AppConfig, FederationSettings, read_app_settings
from equifed.flower.flwr_private import (
    Fleet,
    explain_transport,
    find_changes,
    parse_node_config,
    set_identity,
)
from equifed.flower.site import Policy, Site
from equifed.flower.wire import VERBS, Reply, Request
from equifed.training.keys import KeyProblem, read_private
from equifed.training.tables import package_versions

SUPPORTED = ((1, 41), (1, 43))  # versions of Flower: from the first up to, without, the second


@dataclass(frozen=True)
class Finding:
    """One line: something that is in order, or something that is not and what to do."""

    good: bool
    text: str


def examine(
    app: Path | None = None,
    superlink: str | None = None,
    root_certificates: Path | None = None,
    node_key: Path | None = None,
    node_config: str | None = None,
) -> Iterator[Finding]:
    """Return all findings; what is not given is not checked."""
    yield from _check_flower()
    if app is not None:
        yield _attempt(partial(_describe_app, app), f"{app / 'pyproject.toml'}: ")
        for path in [*app.glob("*/equifed.toml")] or [app / "PACKAGE" / "equifed.toml"]:
            yield _attempt(partial(_describe_config, path), f"{path}: ")
    if node_key is not None:
        problems = [Finding(False, problem) for problem in find_key_problems(node_key)]
        yield from problems or [Finding(True, f"{node_key} is a key that Flower takes")]
    if superlink is not None:
        yield (reached := check_superlink(superlink, root_certificates))
        if reached.good and node_key is not None and root_certificates is not None:
            known = partial(_check_registration, superlink, root_certificates, node_key)
            yield _attempt(known, f"whether {node_key} is registered is not known: ")
    if node_config is not None:
        yield from _check_site(app, node_config)


def _attempt(check: Callable[[], str | Finding], what: str) -> Finding:
    """Return what a check finds, or what it failed with."""
    try:
        found = check()
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        return Finding(False, f"{what}{error}".rstrip("."))
    return found if isinstance(found, Finding) else Finding(True, found)


def _check_flower() -> Iterator[Finding]:
    """Check the version, and that commands on PATH are of this Python: a mixed node looks alive."""
    versions = package_versions(["flwr", "equifed"])
    numbers = tuple(int(part) for part in re.findall(r"\d+", versions["flwr"])[:2])
    good = SUPPORTED[0] <= numbers < SUPPORTED[1]
    wanted = ", ".join(".".join(map(str, bound)) for bound in SUPPORTED)
    extra = "" if good else f"; equifed works with versions in [{wanted})"
    yield Finding(good, f"flwr {versions['flwr']}, equifed {versions['equifed']}{extra}")
    for line in find_changes():  # stock SuperNodes can be used in any case
        cure = "take part with flower-supernode, or install another flwr"
        yield Finding(False, f"equifed flower node: {line}; {cure}")
    here = Path(sys.executable).parent
    for name in ("flower-superlink", "flower-supernode", "flower-superexec"):
        found = shutil.which(name)
        same = found is not None and Path(found).parent.resolve() == here.resolve()
        where = f"on PATH is {found}, not that of this Python; put {here} first"
        told = "is that of this Python" if same else where if found else f"is not there; add {here}"
        yield Finding(same, f"{name} {told}")
    off = os.environ.get("FLWR_TELEMETRY_ENABLED") == "0"
    yield Finding(off, f"telemetry is {'off' if off else 'on; set FLWR_TELEMETRY_ENABLED=0'}")


def _describe_app(app: Path) -> str:
    settings = FederationSettings.from_run_config(read_app_settings(app))
    return f"{app}: {settings.clients} clients, privacy {settings.privacy!r}"


def _describe_config(path: Path) -> str:
    config = AppConfig.read(path)
    return f"{path}: {config.algorithm['name']}, {config.rounds} rounds"


def check_superlink(superlink: str, root_certificates: Path | None) -> Finding:
    """Check that somebody answers there, with a certificate that is trusted."""
    host, _, port = superlink.rpartition(":")
    if not host or not port.isdigit():
        return Finding(False, f"--superlink is HOST:PORT, got {superlink!r}")
    try:
        context = ssl.create_default_context(cafile=root_certificates)
    except OSError as error:
        kind = type(error).__name__
        return Finding(False, f"{root_certificates} is not a PEM certificate ({kind})")
    try:
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            if root_certificates is None:
                unchecked = "give --root-certificates to check TLS"
                return Finding(True, f"{superlink} answers; {unchecked}")
            with context.wrap_socket(connection, server_hostname=host) as secured:
                return Finding(True, f"{superlink} answers with {secured.version()}, trusted")
    except ssl.SSLError as error:
        return Finding(False, explain_transport(superlink, str(error)))
    except OSError as error:
        return Finding(False, f"{superlink} cannot be reached ({type(error).__name__})")


def find_key_problems(path: Path) -> Iterator[str]:
    """Say what is wrong with a SuperNode's private key: format, kind, or who may read it."""
    try:
        key = read_private(path)
    except KeyProblem as error:
        yield str(error)
        return
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        yield f"{path} is not an elliptic-curve key; make one with: ssh-keygen -t ecdsa -b 384"
    if os.name == "posix" and path.stat().st_mode & 0o077:
        yield f"{path} can be read by others; run: chmod 600 {path}"


def _check_registration(superlink: str, root_certificates: Path, node_key: Path) -> Finding:
    """Ask the SuperLink whether it knows the key, without becoming a node."""
    fleet = Fleet(superlink, root_certificates.read_bytes(), read_private(node_key))
    if fleet.is_registered():
        return Finding(True, f"{superlink} knows the key {node_key}")
    public = f"send its public half to the operator of {superlink}, for flwr supernode register"
    return Finding(False, f"{superlink} does not know the key {node_key} (code 2004): {public}")


def _check_site(app: Path | None, node_config: str) -> Iterator[Finding]:
    """Check a site's settings and, with its app, that it can say hello with its own data."""
    try:
        given = parse_node_config(node_config)
    except Exception as error:  # whatever Flower's reader makes of it
        yield Finding(False, f"--node-config cannot be read: {error}")
        return
    try:
        site = Site(str(app or ""), given)
        policy = Policy.of(site.settings)
    except ValueError as error:
        yield Finding(False, str(error).rstrip("."))
        return
    told = site.settings
    if "policy" in told:
        yield Finding(True, f"the policy {told['policy']}: privacy {policy.privacy!r}")
    yield _attempt(partial(_check_memory, site.memory), f"the memory folder {site.memory}: ")
    if "data" in told and not Path(str(told["data"])).exists():
        yield Finding(False, f"the data {told['data']} are not there")
    elif app is not None:
        yield _attempt(partial(_say_hello, site), "the site's app cannot be used: ")


def _check_memory(folder: Path) -> Finding:
    """Check that a site can keep what it must."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    tempfile.TemporaryFile(dir=folder).close()
    shared = os.name == "posix" and folder.stat().st_mode & 0o007
    told = f"; other users can read it: chmod o-rwx {folder}" if shared else ""
    return Finding(not shared, f"the memory folder {folder} can be written{told}")


def _say_hello(site: Site) -> Finding:
    """Let the site's own app answer a hello, with nothing kept; the site may read what failed."""
    log, seen = logging.getLogger("equifed"), BufferingHandler(1 << 30)
    set_identity(1, 1)
    message = Message(
        Request("hello", "doctor", "hello", -1).to_records(), 1, VERBS["hello"].message
    )
    message.metadata.__dict__["_message_id"] = "hello"
    log.addHandler(seen)
    try:
        with tempfile.TemporaryDirectory(prefix="equifed-") as temporary:
            app, own = site.load()
            # what it answers whom is no question of its data
            asked = {k: v for k, v in site.settings.items() if k not in ("site", "policy")}
            about = secrets.randbits(60), 1, {**asked, "memory": temporary}, RecordDict(), own
            reply = Reply.from_records(app(message, Context(*about)).content)
    finally:
        log.removeHandler(seen)
    if reply.error:
        errors = [record.exc_info[1] for record in seen.buffer if record.exc_info]
        reason = " ".join(str(errors[-1]).split()) if errors else reply.text
        return Finding(False, f"{site.name} cannot take part: {reason}")
    told = ", ".join(f"{count} {split}" for split, count in reply.numbers["sizes"].items())
    return Finding(True, f"{reply.numbers['name']} can take part with its data ({told} samples)")
