"""What the faults share: a run as an operator follows it, and looking at processes and logs."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.flower.deployment import Trial

from equifed.flower.trial.deploy import CONNECTION, Deployment, format_settings


class Follower:
    """``equifed flower run`` as an operator starts it, in the background."""

    def __init__(self, deployment: Deployment, app: Path, **settings: Any) -> None:
        words = [sys.executable, "-m", "equifed", "flower", "run", str(app), CONNECTION]
        words += ["--run-config", format_settings(settings)]
        self.process = subprocess.Popen(
            words,
            env=deployment.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(line.rstrip() for line in self.process.stdout)

    def end(self, timeout: float = 300) -> tuple[int, list[str]]:
        """Return the exit code and the lines that are not about rounds that went well."""
        code = self.process.wait(timeout=timeout)
        self._thread.join()
        return code, [line for line in self.lines if ": objective" not in line]


def start(root: Path, rounds: int = 6) -> Trial:
    """Return a trial of two nodes; its deployment is not started."""
    return Trial(root, 2, rounds, "penguins")


def words(process: subprocess.Popen[bytes]) -> list[str]:
    """Return the command line of a process."""
    assert isinstance(process.args, list)
    return [str(word) for word in process.args]


def wait_for_line(deployment: Deployment, log: str, words: str, seconds: float = 90) -> str:
    """Return the first line of a log with these words, nothing if it does not come."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for line in deployment.log(log).splitlines():
            if words in line:
                return line
        time.sleep(0.3)
    return ""


def wait_for_nodes(deployment: Deployment) -> None:
    """Return when all nodes are connected."""
    for i in range(len(deployment.nodes)):
        wait_for_line(deployment, f"node{i}", "is connected to")


def list_children(pid: int) -> list[int]:
    """Return the processes that a node started to do its work."""
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        fields = path.read_text().rpartition(")")[2].split()
        words = (path.parent / "cmdline").read_bytes()
        if int(fields[1]) == pid and b"spawn_main" in words:
            children.append(int(path.parent.name))
    return children


def read_audit(deployment: Deployment, i: int) -> list[dict[str, Any]]:
    """Return the audit log of a node."""
    text = (deployment.folder / "logs" / f"audit{i}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def find_server_app(deployment: Deployment) -> int:
    """Return the process of a deployment that runs the server app."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended since, or not ours
            command, home = (path / "cmdline").read_bytes(), (path / "environ").read_bytes()
            if b"flwr-serverapp" in command and str(deployment.folder).encode() in home:
                return int(path.name)
    raise RuntimeError("no server app is running")
