"""A local step size from the clients' smoothness, for algorithms without a rule of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from equifed.contract import Clients, LocalSGD, Stream, Vector
from equifed.steps.smoothness import measured_smoothness

A = TypeVar("A")


def with_measured_step(
    algorithm: A, clients: Clients, x: Vector, stream: Stream, horizon: float = 2.0
) -> A:
    r"""Return the algorithm with a local step size that suits these clients.

    .. math:: \text{lr} = \min(\text{horizon}, J) / (L J)

    for J local steps (the most that a client takes) and the smoothness L of the least smooth client
    at x, measured (:func:`equifed.steps.smoothness.measured_smoothness`, about 12 exchanges).
    Without a correction clients drift towards their own optima for J lr; 2/L keeps that short
    enough even for clients that hold one class each, and is long enough to make progress on the
    embedded data. It is a rule of ours, with no guarantee; SCAFF-PD has better ones
    (:mod:`equifed.steps.automatic`).
    """
    holder: Any = algorithm  # any frozen dataclass with local work
    local: LocalSGD = holder.local
    steps = int(local.steps_for(clients.sizes).max())
    smoothness = measured_smoothness(clients, x, stream)
    if smoothness <= 0:  # flat here: nothing to go by
        return algorithm
    lr = min(horizon, steps) / (smoothness * steps)
    changed: A = replace(holder, local=replace(local, lr=lr))
    return changed
