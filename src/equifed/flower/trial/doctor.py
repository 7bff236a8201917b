"""What ``equifed flower doctor`` checks before a run."""

from __future__ import annotations

import os
import re
import shutil
import socket
import ssl
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from equifed.flower.app_config import AppConfig, FederationSettings, read_app_settings
from equifed.flower.trial.certificates import find_certificate_problems, find_key_problems
from equifed.training.versions import package_versions

SUPPORTED = ((1, 41), (1, 43))
"""Flower versions that this library works with: from the first up to, not including, the second."""


@dataclass(frozen=True)
class Finding:
    """One line: something that is in order, or something that is not and what to do."""

    good: bool
    text: str


def examine(
    app: Path | None = None,
    superlink: str | None = None,
    root_certificates: Path | None = None,
    server_certificate: Path | None = None,
    node_key: Path | None = None,
) -> Iterator[Finding]:
    """Return all findings; what is not given is not checked."""
    yield _check_version()
    yield from _check_commands()
    yield _check_telemetry()
    if app is not None:
        yield from _check_app(app)
    host = superlink.rpartition(":")[0] if superlink else None
    if server_certificate is not None:
        problems = find_certificate_problems(server_certificate, host, root_certificates)
        yield from _list(problems, f"{server_certificate} is valid")
    if root_certificates is not None:
        problems = find_certificate_problems(root_certificates, None)
        yield from _list(problems, f"{root_certificates} is valid")
    if node_key is not None:
        fine = f"{node_key} is a key that Flower takes"
        yield from _list(find_key_problems(node_key), fine)
    if superlink is not None:
        yield _check_superlink(superlink, root_certificates)


def _list(problems: Iterator[str], fine: str) -> list[Finding]:
    return [Finding(False, problem) for problem in problems] or [Finding(True, fine)]


def _check_version() -> Finding:
    versions = package_versions(["flwr", "equifed"])
    found = versions["flwr"]
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    good = SUPPORTED[0] <= numbers < SUPPORTED[1]
    wanted = ", ".join(".".join(map(str, bound)) for bound in SUPPORTED)
    extra = "" if good else f"; equifed works with versions in [{wanted})"
    return Finding(good, f"flwr {found}, equifed {versions['equifed']}{extra}")


def _check_commands() -> Iterator[Finding]:
    """Check that Flower's commands on PATH are those of this Python: a mixed node looks alive."""
    here = Path(sys.executable).parent
    for name in ("flower-superlink", "flower-supernode", "flower-superexec"):
        found = shutil.which(name)
        if found is None:
            yield Finding(False, f"{name} is not on PATH; add {here}")
        elif Path(found).parent.resolve() != here.resolve():
            where = f"{name} on PATH is {found}, not that of this Python"
            yield Finding(False, f"{where}; put {here} first")
        else:
            yield Finding(True, f"{name} is that of this Python")


def _check_telemetry() -> Finding:
    off = os.environ.get("FLWR_TELEMETRY_ENABLED") == "0"
    return Finding(off, f"telemetry is {'off' if off else 'on; set FLWR_TELEMETRY_ENABLED=0'}")


def _check_app(app: Path) -> Iterator[Finding]:
    try:
        settings = FederationSettings.from_run_config(read_app_settings(app))
        yield Finding(True, f"{app}: {settings.clients} clients, privacy {settings.privacy!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield Finding(False, f"{app / 'pyproject.toml'}: {error}")
    configs = list(app.glob("*/equifed.toml"))
    if not configs:
        yield Finding(False, f"{app} has no equifed.toml in its package")
    for path in configs:
        try:
            config = AppConfig.read(path)
        except (OSError, ValueError) as error:
            yield Finding(False, f"{path}: {error}")
        else:
            yield Finding(True, f"{path}: {config.algorithm['name']}, {config.rounds} rounds")


def _check_superlink(superlink: str, root_certificates: Path | None) -> Finding:
    host, _, port = superlink.rpartition(":")
    if not host or not port.isdigit():
        return Finding(False, f"--superlink is HOST:PORT, got {superlink!r}")
    try:
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            if root_certificates is None:
                unchecked = "give --root-certificates to check TLS"
                return Finding(True, f"{superlink} answers; {unchecked}")
            context = ssl.create_default_context(cafile=str(root_certificates))
            with context.wrap_socket(connection, server_hostname=host) as secured:
                return Finding(True, f"{superlink} answers with {secured.version()}, trusted")
    except ssl.SSLError as error:
        why = f"not with a trusted certificate: {error.reason}"
        return Finding(False, f"{superlink} answers, but {why}")
    except OSError as error:
        return Finding(False, f"{superlink} cannot be reached ({type(error).__name__})")
