"""Which way of computing is the fastest for this model, here: measured, and remembered.

Modules that are not fully connected have no best engine: batching over clients wins on a GPU and
for many small operations, a core for each client wins for convolutions on a CPU. A few gradients of
a few clients tell. What was found is kept beside fetched data (``engines.json`` in the cache
folder), so that repeats, seeds and comparisons on one machine compute the same way.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from equifed.contract.clients import Traffic
from equifed.contract.streams import Stream
from equifed.data.mapped import cache_folder
from equifed.engines.in_process import InProcessClients

BATCH, TURNS = 20, 3
MOST_CLIENTS = {"cpu": 16, "cuda": 256}
MOST_NUMBERS = 1 << 26
"""Of all gradients that are measured at once: a few hundred megabytes."""

BETTER = 0.97
"""A later way must take less than this share of the first one's time."""

WAYS = 2
"""Another number when an engine computes in another way: what was measured before is then void."""

HOPELESS = 4.0
"""A way whose first gradients take so many times another's is not measured again."""


@dataclass(frozen=True)
class Choice:
    """The engine that was chosen, and the seconds that each took for its gradients."""

    name: str
    seconds: Mapping[str, float]
    clients: int

    def describe(self) -> str:
        """Return the choice as one sentence.

        >>> Choice("loop", {"stacked": 0.5, "loop": 0.25}, 16).describe()
        'engine: loop, measured on gradients of 16 clients (stacked 500 ms, loop 250 ms).'
        """
        each = ", ".join(f"{name} {1e3 * value:.3g} ms" for name, value in self.seconds.items())
        return f"engine: {self.name}, measured on gradients of {self.clients} clients ({each})."


def choose_fastest(engines: Mapping[str, InProcessClients], x: Tensor) -> Choice:
    """Return the engine whose gradients take the least time, the first one on ties.

    Parameters
    ----------
    engines : mapping of name to clients
        The same clients in several ways.
    x : Tensor
        A model to differentiate at.
    """
    first = next(iter(engines.values()))
    key = _describe(first, tuple(engines))
    known = _read(_place()).get(key)
    if known is not None:
        return known
    count = _count(first)
    seconds = measure({n: _gradients(e, x, count) for n, e in engines.items()}, first.model.device)
    names = list(engines)
    best = min(names, key=lambda n: seconds[n])
    name = best if seconds[best] < BETTER * seconds[names[0]] else names[0]
    choice = Choice(name, seconds, count)
    _keep(key, choice)
    return choice


def measure(ways: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Return the shortest time of each way; they take turns, hopeless ones only once."""
    best: dict[str, float] = {}
    for turn in range(1 + TURNS):
        for name, way in ways.items():
            if turn > 1 and best[name] > HOPELESS * min(best.values()):
                continue
            start = time.perf_counter()
            way()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds = time.perf_counter() - start
            # The first turn pays for tracing and allocation.
            best[name] = seconds if turn <= 1 else min(best[name], seconds)
    return best


def _count(clients: InProcessClients) -> int:
    most = min(MOST_CLIENTS[clients.model.device.type], MOST_NUMBERS // clients.model.size)
    return max(1, min(len(clients.names), most))


def _gradients(clients: InProcessClients, x: Tensor, count: int) -> Callable[[], object]:
    some = clients.subset(range(count))
    some.traffic = Traffic(len(clients.names))  # nothing of this is an exchange

    def call() -> object:
        return some.value_and_gradient(x, Stream(0), BATCH)

    return call


def _describe(clients: InProcessClients, names: tuple[str, ...]) -> str:
    """Return what the answer depends on, as a digest."""
    model, device = clients.model, clients.model.device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    facts = [
        WAYS, names, str(model.module), tuple(model.all_shapes.items()),
        tuple(clients._inputs.shape[1:]), str(model.dtype), where, torch.get_num_threads(),
        torch.__version__, _count(clients),
    ]  # fmt: skip
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _place() -> Path:
    return cache_folder() / "engines.json"


def _read(path: Path) -> dict[str, Choice]:
    """Return the choices that are known; a file that cannot be read knows none."""
    try:
        table = json.loads(path.read_text())
        return {
            str(key): Choice(
                str(told["name"]),
                {str(n): float(s) for n, s in told["seconds"].items()},
                int(told["clients"]),
            )
            for key, told in table.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _keep(key: str, choice: Choice) -> None:
    """Write the choice down, if there is a place to write to."""
    path = _place()
    known = {**_read(path), key: choice}
    table = {k: {"name": c.name, "seconds": dict(c.seconds), "clients": c.clients}
             for k, c in known.items()}  # fmt: skip
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{time.monotonic_ns()}")
        draft.write_text(json.dumps(table, indent=1) + "\n")
        draft.replace(path)
    except OSError:
        return  # measured again next time
