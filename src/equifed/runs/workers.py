"""A command in several processes of one machine, all of which end when one ends badly.

``torchrun`` starts the same group, on one machine or many; what is here in its place is for people
at a terminal: the first process keeps it (a progress bar), says what went wrong in its own words
even if another process fails before it, and its exit status is that of the command.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

POLL_SECONDS = 0.1
GRACE_SECONDS = 10.0


def is_first() -> bool:
    """Tell whether this process writes: alone, or the first of its group."""
    return os.environ.get("RANK", "0") == "0"


def drop_option(arguments: Sequence[str], option: str) -> list[str]:
    """Return a command's arguments without an option and its value.

    >>> drop_option(["run", "c.toml", "--workers", "2", "--seed=1"], "--workers")
    ['run', 'c.toml', '--seed=1']
    """
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument != option and not argument.startswith(f"{option}="):
            kept.append(argument)
        skip = not skip and argument == option
    return kept


def run_workers(count: int, arguments: Sequence[str]) -> int:
    """Run ``equifed ARGUMENTS`` in a group of processes and return the exit status.

    The first process keeps the terminal; the others are silent. When one ends with an error, the
    others are ended too, since they would wait for it.
    """
    threads = str(max(1, (os.cpu_count() or 1) // count))
    group = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = {"OMP_NUM_THREADS": threads} | os.environ | group
    command = [sys.executable, "-m", "equifed", *arguments]
    # A polite kill must end the workers as well; the default would leave them behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    running: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(count):
            own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            silent = subprocess.DEVNULL if rank else None
            running.append(subprocess.Popen(command, env=own, stdout=silent, stderr=silent))
        return _wait(running)
    finally:
        _end(running)


def _wait(running: Sequence[subprocess.Popen[bytes]]) -> int:
    """Return the exit status of the group: 0 when all ended well, else that of who failed."""
    while any(process.poll() is None for process in running):
        if any(process.returncode for process in running):
            break
        time.sleep(POLL_SECONDS)
    rank = next((r for r, process in enumerate(running) if process.poll()), None)
    if rank is None:
        return 0
    status = running[rank].returncode
    if rank:
        # The first process notices by itself and has the better words; it gets a moment for them.
        try:
            running[0].wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
            print(f"Error: worker {rank} of {len(running)} {how}.", file=sys.stderr)
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
