"""FedAvg and FedProx: local steps, then the average."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from equifed.contract import Clients, Federated, Index, Info, LocalSGD, Stream, Vector, Weights
from equifed.contract.absence import sample_clients, scatter
from equifed.contract.local import DEFAULT_WORK

Weighting = Literal["size", "uniform"]


@dataclass(frozen=True)
class State:
    """The model."""

    x: Vector


@dataclass(frozen=True)
class FedAvg(Federated):
    r"""Average of the clients' models after local steps.

    .. math:: x \leftarrow x - \text{server\_lr} \sum_{i \in S} p_i (x - u_i)

    where S is a uniform sample of the clients and p_i is proportional to the number of samples
    (``weighting="size"``, McMahan et al. 2017) or equal (``"uniform"``, the average that fairness
    papers report). FedProx (Li et al. 2020) is the same algorithm with ``local.proximal > 0``.

    Examples
    --------
    >>> FedAvg(LocalSGD(lr=0.1, epochs=1, batch_size=32), participation=0.1).weighting
    'size'
    """

    local: LocalSGD = DEFAULT_WORK
    weighting: Weighting = "size"
    participation: float = 1.0
    server_lr: float = 1.0

    averages: ClassVar = True
    one_sum: ClassVar = True

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(x)

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round."""
        chosen = sample_clients(clients, self.participation, stream)
        weights = client_weights(self.weighting, chosen.sizes)
        moved = chosen.local_steps(state.x, self.local, stream.at("local"))
        everyone = client_weights(self.weighting, all_sizes(clients))
        x = state.x - self.server_lr * moved.displacement.step(weights, everyone)
        return State(x), Info(
            scatter(weights, chosen.index, len(clients.names)), index=chosen.index
        )


def client_weights(weighting: Weighting, sizes: Index) -> Weights:
    """Return weights that sum to one: by number of samples, or equal.

    >>> client_weights("size", np.array([30, 10]))
    array([0.75, 0.25])
    """
    raw = sizes.astype(np.float64) if weighting == "size" else np.ones(len(sizes))
    return np.asarray(raw / raw.sum(), dtype=np.float64)


def all_sizes(clients: Clients) -> Index:
    """Return the training samples of all clients of the federation, there or not."""
    n = len(clients.names)
    return clients.sizes if len(clients.index) == n else clients.subset(np.arange(n)).sizes


def fedprox(
    mu: float = 0.1,
    local: LocalSGD = DEFAULT_WORK,
    weighting: Weighting = "size",
    participation: float = 1.0,
    server_lr: float = 1.0,
) -> FedAvg:
    """Return FedProx: FedAvg whose local steps pay ``mu / 2 |u - x|^2`` for leaving x.

    The paper tunes mu between 0.001 and 1 for each data set; the default is ours.

    >>> fedprox(0.1, LocalSGD(lr=0.1, steps=5)).local.proximal
    0.1
    """
    return FedAvg(replace(local, proximal=mu), weighting, participation, server_lr)
