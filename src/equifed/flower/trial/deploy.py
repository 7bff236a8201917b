"""A SuperLink and nodes on this machine, that go away again; certificates and keys to try out.

Every process gets a session of its own, free ports, a private ``FLWR_HOME`` and no telemetry; to
stop is to end every process of these sessions, also those that Flower started itself. A SuperLink
needs a server certificate whose subject alternative name holds its address. A SuperNode proves who
it is with an elliptic-curve key in OpenSSH format (PKCS8 is refused by Flower).
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from equifed.flower.memory import write_private
from equifed.flower.trial.apps import call_flwr, find_script
from equifed.training.keys import make_key

HOST = "127.0.0.1"
CONNECTION = "local"  # its name in the deployment's own Flower configuration

Process = subprocess.Popen[bytes]


class DeployError(RuntimeError):
    """A process of the deployment did not start; says which, and where its log is."""

    exit_code = 1


class Deployment:
    """A local SuperLink with nodes; use it in a ``with`` statement.

    Keys, logs, state and client memories go to ``folder``; ``nodes`` are the settings of each node
    (``--node-config``). Nodes of ours run ``app``, as the sites installed it; without it they are
    stock SuperNodes, which run what a run brings along. With a ``database`` the SuperLink survives
    a restart. If it is ``signed``, nodes answer the runs of its own operator's key alone.
    """

    host = HOST

    def __init__(
        self,
        folder: Path,
        nodes: Sequence[Mapping[str, Any]],
        *,
        app: Path | None = None,
        database: bool = True,
        env: Mapping[str, str] | None = None,
        signed: bool = False,
    ) -> None:
        from equifed.runs.run import free_port  # which loads torch

        self.folder, self.nodes = folder.absolute(), list(nodes)
        self.app, self.database = app, database
        self.port, self.keys, self.signed = free_port(), self.folder / "keys", signed
        self.operator = self.keys / "operator.key"
        self.superlink: Process | None = None
        self.supernodes: dict[int, Process] = {}
        self.processes: list[Process] = []
        self.env = {**os.environ, **flower_environment(self.folder), **(env or {})}

    def __enter__(self) -> Deployment:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def start(self) -> None:
        """Write keys and configuration, start the SuperLink, register and start the nodes."""
        for name in ("home", "logs", "memory", "keys"):
            (self.folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        make_certificates(self.keys, [self.host, "localhost"])
        if self.signed:
            if not self.operator.exists():
                make_key(self.keys, "operator")
            told = (self.keys / "operator.pub").read_text().strip()
            (self.keys / "policy.toml").write_text(f'operators = ["{told}"]\n')
        self.start_superlink()
        for i in range(len(self.nodes)):
            self.register(i)
            self.start_node(i, stock=self.app is None)
        for i, process in self.supernodes.items() if self.app is not None else ():
            self._wait(f"node{i}", process, partial(self._is_connected, i), 180)

    def start_superlink(self) -> None:
        """Start the SuperLink, again if it was killed; its state is in ``state.db``."""
        (self.folder / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f'address = "{self.host}:{self.port}"\nroot-certificates = "{self.keys / "ca.pem"}"\n'
        )
        files = {"ca-certfile": "ca.pem", "certfile": "server.pem", "keyfile": "server.key"}
        trust = [w for k, name in files.items() for w in (f"--ssl-{k}", str(self.keys / name))]
        where = ["--host", self.host, "--port", str(self.port), "--enable-supernode-auth"]
        state = ["--database", str(self.folder / "state.db")] if self.database else []
        offline = "--disable-runtime-dependency-installation"
        command = [find_script("flower-superlink"), *trust, *where, *state, offline]
        self.superlink = self._spawn("superlink", command)
        self._wait("superlink", self.superlink, lambda: is_reachable(self.host, self.port), 60)

    def register(self, i: int) -> None:
        """Make a key for a node and tell the SuperLink that it may take part."""
        _, public = make_node_key(self.keys, f"node{i}")
        self.flwr("supernode", "register", str(public), CONNECTION, timeout=60)

    def start_node(
        self, i: int, *, stock: bool = False, key: Path | None = None, port: int | None = None
    ) -> Process:
        """Start a node of ours, which runs the site's own copy of the app, or a stock SuperNode.

        ``key`` is by default the one that was registered for it, ``port`` that of the SuperLink.
        """
        policy = {"policy": str(self.keys / "policy.toml")} if self.signed else {}
        own = [
            "--node-config", format_settings({**policy, **self.nodes[i]}),
            "--superlink", f"{self.host}:{port or self.port}",
            "--root-certificates", str(self.keys / "ca.pem"),
            "--auth-supernode-private-key" if stock else "--node-key",
            str(key or self.keys / f"node{i}.key"),
        ]  # fmt: skip
        app, audit = Path(self.app or ".").absolute(), self.folder / "logs" / f"audit{i}.jsonl"
        anybody = [] if self.signed else ["--any-operator"]
        command = [sys.executable, "-m", "equifed", "flower", "node", str(app)]
        command += ["--audit", str(audit), *anybody]
        if stock:
            from equifed.runs.run import free_port

            command = [find_script("flower-supernode"), "--host", HOST, "--port", str(free_port())]
        name = f"{'super' if stock else ''}node{i}"
        self.supernodes[i] = self._spawn(name, [*command, *own])
        return self.supernodes[i]

    def run(
        self, app: Path, config: Mapping[str, Any], timeout: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Submit an app and follow it to its end."""
        command = ["run", str(app), CONNECTION, "--stream"]
        return self.flwr(*command, "--run-config", format_settings(config), timeout=timeout)

    def flwr(
        self, *arguments: str, timeout: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a ``flwr`` command against this deployment."""
        done = call_flwr(arguments, self.env, cwd=self.folder, timeout=timeout)
        if done.returncode != 0:
            raise DeployError(f"flwr {' '.join(arguments[:2])} failed:\n{done.stdout[-2000:]}")
        return done

    def log(self, name: str) -> str:
        """Return the log of a process: "superlink", "node0", "supernode0", ..."""
        path = self.folder / "logs" / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def kill(self, process: Process) -> None:
        """End a process and everything it started, at once (SIGKILL)."""
        _end_session(process.pid, signal.SIGKILL)
        process.wait(timeout=10)

    def stop(self) -> None:
        """End every process: nodes first, then the SuperLink; politely, then not."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in reversed(self.processes):
                _end_session(process.pid, number)
            until = time.monotonic() + 5
            while time.monotonic() < until and any(list_session(p.pid) for p in self.processes):
                time.sleep(0.1)
        for process in self.processes:
            process.wait(timeout=10)
        self.processes.clear()

    def _is_connected(self, i: int) -> bool:
        return "is connected to" in self.log(f"node{i}")

    def _spawn(self, name: str, command: Sequence[str]) -> Process:
        with (self.folder / "logs" / f"{name}.log").open("ab") as file:
            process = subprocess.Popen(
                command, env=self.env, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def _wait(self, name: str, process: Process, ready: Callable[[], bool], seconds: float) -> None:
        """Return when a process is ready; :class:`DeployError` if it ended or never is."""
        until = time.monotonic() + seconds
        while not ready():
            if process.poll() is not None or time.monotonic() > until:
                raise DeployError(f"The {name} did not start:\n{self.log(name)[-2000:]}")
            time.sleep(0.1)


def flower_environment(folder: Path) -> dict[str, str]:
    """Return the environment of Flower's processes: own home, no telemetry, this Python."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {
        "PATH": path,
        "FLWR_HOME": str(folder / "home"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "EQUIFED_MEMORY": str(folder / "memory"),
    }


def is_reachable(host: str, port: int, timeout: float = 1.0) -> bool:
    """Tell whether somebody listens."""
    try:
        with socket.create_connection((host, port), timeout=timeout):
            return True
    except OSError:
        return False


def format_settings(values: Mapping[str, Any]) -> str:
    """Return settings as Flower's command lines take them.

    >>> format_settings({"partition-id": 0, "name": "north", "resume": True})
    'partition-id=0 name="north" resume=true'
    """

    def toml(value: Any) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        return f'"{value}"' if isinstance(value, str | Path) else repr(value)

    return " ".join(f"{key}={toml(value)}" for key, value in values.items())


def list_session(session: int) -> list[int]:
    """Return the living processes of a session (Linux; elsewhere the leader alone)."""
    if not Path("/proc").exists():
        with contextlib.suppress(OSError):
            os.kill(session, 0)
            return [session]
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended since
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(path.parent.name))
    return found


def _end_session(session: int, number: int) -> None:
    for pid in list_session(session):
        with contextlib.suppress(OSError):
            os.kill(pid, number)


# -- its certificates and keys ---------------------------------------------------------------------

PEM, AUTHORITY = Encoding.PEM, "equifed trial authority"
VALID_DAYS = 30  # certificates made here are for trying out and do not last

HOSTNAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9-]+)*")
NODE_NAME = re.compile(r"(?!(ca|server)\Z)[A-Za-z0-9][A-Za-z0-9._-]*")


def issue(
    folder: Path, addresses: Sequence[str], nodes: Sequence[str], days: float = VALID_DAYS
) -> datetime.datetime | None:
    """Write what a trial federation needs; return until when the server's certificate is valid.

    That is what :func:`make_certificates` writes, where there are addresses, and a key pair for
    every node. Files that are there are not overwritten: nothing is written then.
    """
    wrong = [
        f"{address!r} is neither a host name nor an IP address; give the address alone, as "
        "fl.example.org, without port or https://."
        for address in addresses
        if not HOSTNAME.fullmatch(address) and isinstance(_general_name(address), x509.DNSName)
    ]
    wrong += [
        f"{name!r} cannot be the name of a node's key: letters, digits, '-', '_' and '.' are "
        "possible, 'ca' and 'server' are taken."
        for name in nodes
        if not NODE_NAME.fullmatch(name)
    ]
    wrong += ["Two nodes have the same name."] * (len(set(nodes)) < len(nodes))
    if wrong:
        raise ValueError(wrong[0])
    wanted = ["ca.pem", "server.pem", "server.key"] if addresses else []
    wanted += [f"{name}.{end}" for name in nodes for end in ("key", "pub")]
    if there := [name for name in wanted if (folder / name).exists()]:
        raise FileExistsError(
            f"{folder} holds {', '.join(there)} already, which are not overwritten; choose another "
            "folder, or move them away."
        )
    until = make_certificates(folder, addresses, days) if addresses else None
    for name in nodes:
        make_node_key(folder, name)
    return until


def make_certificates(
    folder: Path, addresses: Sequence[str], days: float = VALID_DAYS
) -> datetime.datetime:
    """Write ``ca.pem``, ``server.pem`` and ``server.key`` for a SuperLink at these addresses.

    The server's certificate is valid for ``days``, with a negative number it has expired; until
    when is returned. The authority's key is not kept: nobody can issue another certificate that
    these nodes trust.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca = _issue((), ca_key, ca_key, max(days, VALID_DAYS))
    server = _issue(addresses, key, ca_key, days)
    private = key.private_bytes(PEM, PrivateFormat.PKCS8, NoEncryption())
    write_private(folder / "server.key", private)
    for name, certificate in {"ca.pem": ca, "server.pem": server}.items():
        (folder / name).write_bytes(certificate.public_bytes(PEM))
    return server.not_valid_after_utc


def _issue(addresses: Sequence[str], key: Any, by: Any, days: float) -> x509.Certificate:
    """Return the certificate of a server at these addresses; without any, of the authority."""
    signs = not addresses
    names = [x509.NameAttribute(NameOID.COMMON_NAME, n) for n in (AUTHORITY, *addresses[:1])]
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    begin, number = min(now, end) - datetime.timedelta(minutes=5), x509.random_serial_number()
    about = x509.Name(names[:1]), x509.Name(names[-1:]), key.public_key(), number, begin, end
    others = "content_commitment key_encipherment data_encipherment key_agreement encipher_only"
    unused = dict.fromkeys([*others.split(), "decipher_only"], False)
    extensions: list[tuple[x509.ExtensionType, bool]] = [
        (x509.BasicConstraints(signs, 0 if signs else None), True),
        (x509.KeyUsage(
            digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, **unused
        ), True),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()), False),
    ]  # fmt: skip
    if signs:
        extensions.append((x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False))
    else:
        found = x509.SubjectAlternativeName([_general_name(address) for address in addresses])
        serves = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        extensions += [(found, False), (serves, False)]
    made = x509.CertificateBuilder(*about)
    for extension, critical in extensions:
        made = made.add_extension(extension, critical)
    return made.sign(by, SHA256())


def _general_name(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)


def make_node_key(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a SuperNode's key pair, ``name.key`` and ``name.pub``, in OpenSSH format."""
    secret, public = folder / f"{name}.key", folder / f"{name}.pub"
    secret.unlink(missing_ok=True)
    make_key(folder, name, ec.generate_private_key(ec.SECP384R1()))
    return secret, public
