"""Delta-FL: of the sampled clients, only those with large losses train."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from equifed.algorithms.fedavg import DEFAULT_WORK, Weighting, client_weights
from equifed.contract.algorithm import Info
from equifed.contract.arrays import Losses, Vector, Weights
from equifed.contract.clients import Clients
from equifed.contract.local import LocalSGD
from equifed.contract.participation import check_participation, sample_clients, scatter
from equifed.contract.streams import Stream

ROUNDING = 256.0
"""Units in the last place by which a loss may be off: a mean of many samples."""


@dataclass(frozen=True)
class State:
    """The model."""

    x: Vector


@dataclass(frozen=True)
class DeltaFL:
    r"""Federated averaging of the tail (Pillutla et al. 2021), for the superquantile (CVaR).

    .. math::

       \eta &= \max\{e : \textstyle\sum_{i \in S,\, F_i(x) \ge e} p_i \ge \text{level}\} \\
       T &= \{i \in S : F_i(x) \ge \eta\}, \qquad
       x \leftarrow \textstyle\sum_{i \in T} p_i u_i \,/\, \sum_{i \in T} p_i

    where S is a uniform sample of clients and :math:`u_i` the model after local steps from x. The
    paper's :math:`\eta` is the (1 - level)-quantile of the losses, which is not unique when level
    times the number of clients is whole; the largest is taken, so that with equal weights and
    distinct losses ceil(level m) of m sampled clients train. Losses that differ from it by rounding
    (:data:`ROUNDING` units in the last place) belong to the tail: at a first model that predicts
    the same for everybody all clients train, whatever the order of a sum. Level 1 is FedAvg. The
    paper also adds noise for privacy; that is left out.

    Absent clients are not sampled.

    Parameters
    ----------
    local : LocalSGD
        Local work, which the paper tunes for each data set.
    level : float
        Fraction of the weight that trains, in (0, 1]. The default is the middle one of the three
        that the paper tries (0.8, 0.5, 0.1).
    weighting : {"size", "uniform"}
        p_i.
    participation : float
        Fraction of clients in S.
    server_lr : float
        Step from x towards the average.
    """

    local: LocalSGD = DEFAULT_WORK
    level: float = 0.5
    weighting: Weighting = "size"
    participation: float = 1.0
    server_lr: float = 1.0

    def __post_init__(self) -> None:
        check_participation(self.participation)
        if not 0 < self.level <= 1:
            raise ValueError(f"DeltaFL level must lie in (0, 1], got {self.level}.")

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(x)

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round."""
        chosen = sample_clients(clients, self.participation, stream)  # S
        losses = chosen.losses(state.x, stream.at("losses"))
        threshold = upper_quantile(losses, client_weights(self.weighting, chosen.sizes), self.level)
        trains = losses >= threshold - rounding(threshold, state.x)
        tail = chosen.subset(chosen.index[trains])  # T
        weights = client_weights(self.weighting, tail.sizes)
        moved = tail.local_steps(state.x, self.local, stream.at("local"))
        x = state.x - self.server_lr * moved.displacement.weighted_sum(weights)
        info = Info(
            scatter(weights, tail.index, len(clients.names)),
            objective=float(weights @ losses[trains]),
            index=tail.index,
            numbers={"threshold": threshold},
        )
        return State(x), info

    def model(self, state: State) -> Vector:
        """Return the last model."""
        return state.x


def upper_quantile(losses: Losses, mass: Weights, level: float) -> float:
    """Return the largest loss that has at least ``level`` of the mass at or above it.

    >>> upper_quantile(np.array([3.0, 1.0, 4.0, 2.0]), np.full(4, 0.25), 0.5)
    3.0
    """
    order = np.argsort(-losses, kind="stable")
    above = np.cumsum(mass[order])
    enough = above >= level * (1 - 1e-12)  # rounding of the sum must not cost a client
    first = int(np.argmax(enough)) if enough.any() else len(order) - 1
    return float(losses[order[first]])


def rounding(loss: float, x: Vector) -> float:
    """Return by how much a loss in the precision of the model x may be off."""
    import torch

    return ROUNDING * torch.finfo(x.dtype).eps * abs(loss)
