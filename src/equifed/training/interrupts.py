"""SIGTERM and SIGHUP end a run as Ctrl-C does, after a checkpoint of the round that goes on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


def interrupt(*_: Any) -> None:
    """Interrupt at once."""
    raise KeyboardInterrupt


@contextmanager
def handle_signals(handler: Callable[..., None] = interrupt) -> Iterator[None]:
    """Let a function take the signals, unless the caller handles or ignores them.

    Processes of a group are ended by the one that started them, and other threads take no signals.
    """
    alone = threading.current_thread() is threading.main_thread() and "RANK" not in os.environ
    free = [s for s in SIGNALS if signal.getsignal(s) in (signal.SIG_DFL, interrupt)]
    before = {s: signal.signal(s, handler) for s in (free if alone else ())}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def wait_for_round() -> Iterator[Callable[[], bool]]:
    """Let a signal wait for the end of a round, and say whether one came; a second one does not."""
    came: list[int] = []

    def take(number: int, *_: Any) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)
        name = signal.Signals(number).name
        os.write(2, f"equifed: {name}: the run ends after this round, and saves.\n".encode())

    with handle_signals(take):
        yield lambda: bool(came)
