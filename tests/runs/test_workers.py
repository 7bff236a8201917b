"""A command in several processes: one error, its exit status, and nobody left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

START = "import sys; from equifed.runs.run import run_workers; "
CONFIG = """
rounds = 1000000
data = "heart-disease"
model = "logistic"
algorithm = {name = "fedavg", local = {lr = 0.1, steps = 1}}
engine = "distributed"
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", f"{START}sys.exit(run_workers(2, {list(arguments)!r}))"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def alive(pid: int) -> bool:
    try:  # a zombie has ended; only its parent has not asked yet
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_one_error_with_its_exit_status(tmp_path: Path) -> None:
    running = start("run", str(tmp_path / "missing.toml"))
    _, told = running.communicate(timeout=60)
    assert running.returncode == 2
    assert told.count("missing.toml") == 1


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at Linux's processes")
def test_a_polite_kill_leaves_nobody_behind(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(CONFIG)
    out = tmp_path / "run"
    running = start("run", str(tmp_path / "c.toml"), "--out", str(out), "--quiet")
    until = time.monotonic() + 60
    while not (out / "rounds.csv").exists() and time.monotonic() < until:
        time.sleep(0.1)
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    assert len(children) == 2 and all(alive(int(pid)) for pid in children)
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGTERM
    assert not any(alive(int(pid)) for pid in children)
