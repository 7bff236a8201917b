"""A SuperLink and nodes on this machine, that go away again.

Every process gets a session of its own, free ports, a private ``FLWR_HOME`` and no telemetry; to
stop is to end every process of these sessions, also those that Flower started itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from equifed.flower.trial.certificates import make_certificates, make_node_key
from equifed.runs.run import free_port

HOST = "127.0.0.1"
CONNECTION = "local"
"""Name of the connection in the deployment's own Flower configuration."""


class DeployError(RuntimeError):
    """A process of the deployment did not start; says which, and where its log is."""


class Deployment:
    """A local SuperLink with nodes; use it in a ``with`` statement.

    Parameters
    ----------
    folder : Path
        Where keys, logs, state and client memories go.
    nodes : sequence of dict
        The settings of each node (``--node-config``).
    app : Path, optional
        The app that the sites installed: nodes of ours run it. Without it the nodes are stock
        SuperNodes, which run what a run brings along.
    insecure : bool
        No TLS and no node keys.
    database : bool
        Whether the SuperLink keeps its state in a file, and so survives a restart.
    env : dict, optional
        More environment variables for all processes.
    """

    def __init__(
        self,
        folder: Path,
        nodes: Sequence[Mapping[str, Any]],
        *,
        app: Path | None = None,
        insecure: bool = False,
        database: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.nodes, self.insecure = folder.absolute(), list(nodes), insecure
        self.app, self.database = app, database
        self.port = free_port()
        self.superlink: subprocess.Popen[bytes] | None = None
        self.supernodes: dict[int, subprocess.Popen[bytes]] = {}
        self.processes: list[subprocess.Popen[bytes]] = []
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
        if not self.insecure:
            make_certificates(self.folder / "keys", [HOST, "localhost"])
        self._write_connection()
        self.start_superlink()
        for i in range(len(self.nodes)):
            if not self.insecure:
                self.register(i)
            self.start_supernode(i) if self.app is None else self.start_node(i)
        if self.app is not None:
            self.wait_for_nodes()

    def start_superlink(self) -> None:
        """Start the SuperLink, again if it was killed; its state is in ``state.db``."""
        keys = self.folder / "keys"
        trust = ["--insecure"]
        if not self.insecure:
            trust = ["--ssl-ca-certfile", str(keys / "ca.pem")]
            trust += ["--ssl-certfile", str(keys / "server.pem")]
            trust += ["--ssl-keyfile", str(keys / "server.key"), "--enable-supernode-auth"]
        where = ["--host", HOST, "--port", str(self.port)]
        state = ["--database", str(self.folder / "state.db")] if self.database else []
        offline = "--disable-runtime-dependency-installation"
        self.superlink = self._spawn(
            "superlink", ["flower-superlink", *trust, *where, *state, offline]
        )
        self._wait_for_port("superlink", self.superlink)

    def register(self, i: int) -> None:
        """Make a key for a node and tell the SuperLink that it may take part."""
        _, public = make_node_key(self.folder / "keys", f"node{i}")
        self.flwr("supernode", "register", str(public), CONNECTION, timeout=60)

    def start_supernode(self, i: int, key: Path | None = None) -> subprocess.Popen[bytes]:
        """Start a SuperNode, by default with the key that was registered for it."""
        keys = self.folder / "keys"
        trust = ["--insecure"]
        if not self.insecure:
            trust = ["--root-certificates", str(keys / "ca.pem")]
            trust += ["--auth-supernode-private-key", str(key or keys / f"node{i}.key")]
        where = ["--superlink", f"{HOST}:{self.port}", "--host", HOST, "--port", str(free_port())]
        own = ["--node-config", format_settings(self.nodes[i])]
        process = self._spawn(f"supernode{i}", ["flower-supernode", *trust, *where, *own])
        self.supernodes[i] = process
        return process

    def start_node(
        self, i: int, app: Path | None = None, port: int | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a node of ours, which runs the site's own copy of the app."""
        keys = self.folder / "keys"
        trust = ["--insecure"]
        if not self.insecure:
            trust = ["--root-certificates", str(keys / "ca.pem")]
            trust += ["--node-key", str(keys / f"node{i}.key")]
        where = ["--superlink", f"{HOST}:{port or self.port}"]
        where += ["--audit", str(self.folder / "logs" / f"audit{i}.jsonl")]
        own = ["--node-config", format_settings(self.nodes[i])]
        what = ["-m", "equifed", "flower", "node", str(Path(app or self.app or ".").absolute())]
        process = self._spawn(f"node{i}", [sys.executable, *what, *trust, *where, *own])
        self.supernodes[i] = process
        return process

    def wait_for_nodes(self, seconds: float = 180) -> None:
        """Return when the nodes are connected; :class:`DeployError` if one ended or does not."""
        until = time.monotonic() + seconds
        for i, process in self.supernodes.items():
            name = f"node{i}"
            while "is connected to" not in self.log(name):
                if process.poll() is not None or time.monotonic() > until:
                    raise DeployError(f"The {name} did not start:\n{self.log(name)[-2000:]}")
                time.sleep(0.1)

    def run(
        self, app: Path, config: Mapping[str, Any], timeout: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Submit an app and follow it to its end."""
        command = ["run", str(app), CONNECTION, "--stream"]
        return self.flwr(*command, "--run-config", format_settings(config), timeout=timeout)

    def flwr(
        self, *arguments: str, timeout: float | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a ``flwr`` command against this deployment."""
        done = subprocess.run(
            [find_script("flwr"), *arguments],
            **self._surroundings,
            stdout=subprocess.PIPE,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check and done.returncode != 0:
            raise DeployError(f"flwr {' '.join(arguments[:2])} failed:\n{done.stdout[-2000:]}")
        return done

    def log(self, name: str) -> str:
        """Return the log of a process: "superlink", "node0", "supernode0", ..."""
        path = self.folder / "logs" / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """End a process and everything it started, at once (SIGKILL)."""
        for pid in list_session(process.pid):
            _send_signal(pid, signal.SIGKILL)
        process.wait(timeout=10)

    def stop(self) -> None:
        """End every process: nodes first, then the SuperLink; politely, then not."""
        sessions = [process.pid for process in self.processes]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for session in reversed(sessions):
                for pid in list_session(session):
                    _send_signal(pid, number)
            until = time.monotonic() + 5
            while time.monotonic() < until and any(map(list_session, sessions)):
                time.sleep(0.1)
        for process in self.processes:
            process.wait(timeout=10)
        self.processes.clear()

    @property
    def _surroundings(self) -> dict[str, Any]:
        streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        return {"env": self.env, "cwd": self.folder, **streams}

    def _spawn(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self.folder / "logs" / f"{name}.log").open("ab") as file:
            process = subprocess.Popen(
                command
                if command[0] == sys.executable
                else [find_script(command[0]), *command[1:]],
                **self._surroundings,
                stdout=file,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def _wait_for_port(self, name: str, process: subprocess.Popen[bytes]) -> None:
        until = time.monotonic() + 60
        while not is_reachable(HOST, self.port):
            if process.poll() is not None or time.monotonic() > until:
                raise DeployError(f"The {name} did not start:\n{self.log(name)[-2000:]}")
            time.sleep(0.1)

    def _write_connection(self) -> None:
        trust = "insecure = true"
        if not self.insecure:
            trust = f'root-certificates = "{self.folder / "keys" / "ca.pem"}"'
        text = f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
        text += f'address = "{HOST}:{self.port}"\n{trust}\n'
        (self.folder / "home" / "config.toml").write_text(text)


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


def find_script(name: str) -> str:
    """Return the path of a command that stands beside this Python."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise DeployError(
            f"{name} is not installed beside this Python; install it with: "
            "pip install 'equifed[flower]'"
        )
    return str(path)


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
        return [session] if _send_signal(session, 0) else []
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended since
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(path.parent.name))
    return found


def _send_signal(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except OSError:
        return False
    return True
