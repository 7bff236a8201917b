"""Starting a command in several processes of one machine, and ending all when one ends badly."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

POLL_SECONDS = 0.1
GRACE_SECONDS = 10.0


def without(arguments: Sequence[str], option: str) -> list[str]:
    """Return a command's arguments without an option and its value.

    >>> without(["run", "c.toml", "--workers", "2", "--seed=1"], "--workers")
    ['run', 'c.toml', '--seed=1']
    """
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument == option:
            skip = True
        elif not argument.startswith(f"{option}="):
            kept.append(argument)
    return kept


def launch(arguments: Sequence[str], processes: int) -> int:
    """Run ``equifed ARGUMENTS`` in a group of processes and return the exit status.

    The first process keeps the terminal; the others are silent. When one ends with an error, the
    others are ended too, since they would wait for it.
    """
    environment = os.environ | {
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": os.environ.get(
            "OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes))
        ),
    }
    command = [sys.executable, "-m", "equifed", *arguments]
    running = []
    for rank in range(processes):
        own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        silent = subprocess.DEVNULL if rank else None
        running.append(subprocess.Popen(command, env=own, stdout=silent, stderr=silent))
    try:
        return _wait(running)
    finally:
        _end(running)


def _wait(running: Sequence[subprocess.Popen[bytes]]) -> int:
    while True:
        states = [process.poll() for process in running]
        failed = [rank for rank, state in enumerate(states) if state]
        if failed:
            return _report(running, failed[0])
        if all(state == 0 for state in states):
            return 0
        time.sleep(POLL_SECONDS)


def _report(running: Sequence[subprocess.Popen[bytes]], rank: int) -> int:
    """Say which process failed, unless the first one is about to say why itself."""
    status = running[rank].returncode
    if rank:
        # The first process notices by itself and has the better words; it gets a moment for them.
        try:
            running[0].wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
            print(f"Error: process {rank} of {len(running)} {how}.", file=sys.stderr)
    return status if status > 0 else 1


def _end(running: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in running:
        if process.poll() is None:
            process.terminate()
    for process in running:
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


def free_port() -> int:
    """Return a port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
