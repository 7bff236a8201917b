"""What a run will take, from its first rounds: rounds, bytes, memory, minutes."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace

from equifed.contract.arrays import Vector
from equifed.contract.evaluation import Evaluation
from equifed.runs.build import Run, build_run
from equifed.runs.config import RunConfig
from equifed.training.stopping import StopWhen

TRIED = 3
"""Rounds that are run, and thrown away, to measure."""


@dataclass(frozen=True)
class Estimate:
    """What a run will take; times and bytes per round are measured in its first ones.

    ``rounds`` is the most: stop rules may end it earlier. ``memory`` is the largest that the
    process has needed so far, in bytes; None where the system does not tell. ``tried`` is how many
    rounds were measured.
    """

    clients: int
    samples: dict[str, int]
    parameters: int
    rounds: int
    exchanges: int
    bytes_up: int
    bytes_down: int
    memory: int | None
    device_memory: int | None
    seconds_to_build: float
    seconds: float
    tried: int

    def describe(self) -> list[str]:
        """Return the lines that a person reads."""
        held = ", ".join(f"{label} {count:,}" for label, count in self.samples.items())
        memory = "not known here" if self.memory is None else _write_bytes(self.memory)
        if self.device_memory:
            memory += f", and {_write_bytes(self.device_memory)} on the device"
        return [
            f"clients     {self.clients}; samples: {held}",
            f"model       {self.parameters:,} parameters",
            f"rounds      {self.rounds} at most, {self.exchanges:,} exchanges with the clients",
            f"traffic     {_write_bytes(self.bytes_up)} up, {_write_bytes(self.bytes_down)} down, "
            "all clients and rounds together, in a real federation",
            f"memory      {memory} of this process, its largest so far",
            f"time        {_write_seconds(self.seconds)}, measured in {self.tried} round(s) here; "
            f"loading took {_write_seconds(self.seconds_to_build)}",
        ]


def estimate(config: RunConfig) -> Estimate:
    """Build a run, try its first rounds, and return what all of it will take. Nothing is written.

    Traffic is that of the first round and, for all others, that of the last one tried; an algorithm
    that changes what it asks later is not foreseen. Evaluations are counted as often as the
    configuration has them.
    """
    import torch

    start = time.perf_counter()
    built = build_run(config)
    loaded = time.perf_counter() - start
    tried = min(TRIED, config.rounds)
    short = replace(
        built.config, rounds=tried, evaluate=replace(config.evaluate, every=1), stop=StopWhen()
    )
    watch = _Watch(built)
    history = replace(built, config=short, evaluate=watch).train()
    first, *others = history.rounds
    usual = others[-1] if others else first  # the first may have measured step sizes
    left = config.rounds - 1
    seconds = first.seconds + left * min(r.seconds for r in others or [first])
    seconds += min(watch.seconds) * (1 + config.rounds // config.evaluate.every)
    parameters = history.parameters or {}
    return Estimate(
        clients=len(built.federation),
        samples={label: len(split) for label, split in built.federation.splits().items()},
        parameters=sum(p.numel() for p in parameters.values()),
        rounds=config.rounds,
        exchanges=first.exchanges + left * usual.exchanges,
        bytes_up=first.bytes_up + left * usual.bytes_up,
        bytes_down=first.bytes_down + left * usual.bytes_down,
        memory=_read_memory(),
        device_memory=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        seconds_to_build=loaded,
        seconds=seconds,
        tried=tried,
    )


class _Watch:
    """Evaluates as the run would, and looks at the clock."""

    def __init__(self, built: Run) -> None:
        self.built, self.seconds = built, [0.0]

    def __call__(self, x: Vector) -> list[Evaluation]:
        start, given = time.perf_counter(), self.built.evaluate
        found = given(x) if callable(given) else self.built.clients.evaluate(x, given)
        self.seconds = [*(s for s in self.seconds if s), time.perf_counter() - start]
        return found


def _read_memory() -> int | None:
    """Return the largest memory that this process has had, in bytes."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(largest) * (1 if sys.platform == "darwin" else 1024)


def _write_bytes(count: float) -> str:
    """Return bytes in a unit that people read.

    >>> _write_bytes(1536), _write_bytes(12)
    ('1.5 kB', '12 B')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def _write_seconds(seconds: float) -> str:
    """Return a time in a unit that people read.

    >>> _write_seconds(42.3), _write_seconds(600)
    ('42 s', '10 min')
    """
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
