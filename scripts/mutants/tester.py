"""Runs tests in a copy of the tree, again and again, without importing what stays the same.

    python -m scripts.mutants.tester < requests     # in the copy

A request is a line ``{"arguments": [...], "output": PATH, "limit": SECONDS}``; the answer is the
exit status, or ``null`` for tests that needed more processor time than the limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch

STAYS = (np, scipy.optimize, torch)
PATIENCE = 20
"""Seconds by the clock for a second of processor time, on a machine with other work."""


def run_apart(arguments: Sequence[str], output: str, limit: float) -> int | None:
    """Return the exit status of pytest in a process of its own."""
    child = os.fork()
    if child == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 5))
        written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(written, stream)
        code = 1
        try:
            code = int(pytest.main(list(arguments)))
        finally:
            sys.stdout.flush()
            os._exit(code)
    ends, done, status = time.monotonic() + PATIENCE * limit, 0, 0
    while not done and time.monotonic() < ends:
        time.sleep(0.02)
        done, status = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # with what it left running
    if not done:
        os.waitpid(child, 0)
        return None
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else None if -code in (signal.SIGXCPU, signal.SIGKILL) else 1


def main() -> None:
    """Answer requests until there are no more."""
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        print(json.dumps(run_apart(**asked)), flush=True)


if __name__ == "__main__":
    main()
