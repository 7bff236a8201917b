"""Which engine is the fastest for this model, here: measured on a few gradients.

Modules that are not fully connected have no best engine: batching over clients wins on a GPU and
for many small operations, a core for each client wins for convolutions on a CPU. What was found
holds for all federations of the same kind in this process, so that seeds and comparisons compute
the same way; a run folder names the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from equifed.contract.clients import Traffic
from equifed.contract.streams import Stream
from equifed.engines.in_process import InProcessClients

BATCH, TURNS = 20, 3
MOST_CLIENTS = {"cpu": 16, "cuda": 256}
MOST_NUMBERS = 1 << 26
"""Of all gradients that are measured at once: a few hundred megabytes."""

BETTER = 0.97
"""A later way must take less than this share of the first one's time."""

HOPELESS = 4.0
"""A way whose first gradients take so many times another's is not measured again."""


@dataclass(frozen=True)
class EngineChoice:
    """The engine that was chosen, and the seconds that each took for its gradients."""

    name: str
    seconds: Mapping[str, float]
    clients: int

    def describe(self) -> str:
        """Return the choice as one sentence.

        >>> EngineChoice("loop", {"stacked": 0.5, "loop": 0.25}, 16).describe()
        'engine: loop, measured on gradients of 16 clients (stacked 500 ms, loop 250 ms).'
        """
        each = ", ".join(f"{name} {1e3 * value:.3g} ms" for name, value in self.seconds.items())
        return f"engine: {self.name}, measured on gradients of {self.clients} clients ({each})."


_KNOWN: dict[str, EngineChoice] = {}


def choose_fastest(engines: Mapping[str, InProcessClients], x: Tensor) -> EngineChoice:
    """Return the engine whose gradients take the least time, the first one on ties.

    Parameters
    ----------
    engines : mapping of name to clients
        The same clients in several ways.
    x : Tensor
        A model to differentiate at.
    """
    first, names = next(iter(engines.values())), list(engines)
    kind = _describe(first, names)
    if kind not in _KNOWN:
        count, device = _count(first), first.model.device
        seconds = measure({n: _gradients(e, x, count) for n, e in engines.items()}, device)
        best = min(names, key=lambda n: seconds[n])
        name = best if seconds[best] < BETTER * seconds[names[0]] else names[0]
        _KNOWN[kind] = EngineChoice(name, seconds, count)
    return _KNOWN[kind]


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


def _describe(clients: InProcessClients, names: list[str]) -> str:
    """Return what the answer depends on."""
    model = clients.model
    shapes = [*model.all_shapes.items()], clients._inputs.shape[1:]
    where = model.dtype, model.device, torch.get_num_threads(), _count(clients)
    return repr((names, str(model.module), shapes, where))
