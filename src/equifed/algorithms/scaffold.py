"""SCAFFOLD: local steps corrected for the difference between a client and the average."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from equifed.algorithms.fedavg import DEFAULT_WORK, Weighting, client_weights
from equifed.contract.algorithm import Info
from equifed.contract.arrays import Vector
from equifed.contract.clients import Clients, ClientVectors
from equifed.contract.local import LocalSGD
from equifed.contract.participation import check_participation, sample_clients, scatter
from equifed.contract.streams import Stream


@dataclass(frozen=True)
class State:
    """The model, the server's variate, and the clients' variates (stored variant only)."""

    x: Vector
    variate: Vector | None = None
    variates: ClientVectors | None = None


@dataclass(frozen=True)
class Scaffold:
    r"""Local steps :math:`u \leftarrow u - \text{lr}\,(g_i(u) - c_i + c)`, then the average.

    Two readings of the control variates :math:`c_i` go by this name:

    * ``variates="stored"``: Karimireddy et al. 2020, option II. A client keeps :math:`c_i` between
      rounds; after its local steps :math:`c_i^+ = c_i - c + (x - u_i)/(J\,\text{lr})`, which is the
      mean of its plain gradients along the way, and
      :math:`c \leftarrow c + \frac{1}{N} \sum_{i \in S} (c_i^+ - c_i)`. One exchange a round.
    * ``variates="fresh"``: :math:`c_i = \nabla f_i(x)` in every round and
      :math:`c = \sum_i p_i c_i`; this is SCAFF-PD with the average objective (the sense of the
      SCAFF-PD and SCAFF-PD-IA papers). Two exchanges a round.

    The stored variant is stated for equal weights. With ``weighting="size"`` the update uses p_i
    and the server's variate is the p-weighted sum, so that the corrections still cancel at the
    solution.
    """

    local: LocalSGD = DEFAULT_WORK
    variates: Literal["stored", "fresh"] = "stored"
    weighting: Weighting = "uniform"
    participation: float = 1.0
    server_lr: float = 1.0
    gradient_batch_size: int | None = None

    def __post_init__(self) -> None:
        check_participation(self.participation)
        if self.variates not in ("stored", "fresh"):
            raise ValueError(f"variates must be 'stored' or 'fresh', got {self.variates!r}.")

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round; stored variates start at zero."""
        return State(x, torch.zeros_like(x) if self.variates == "stored" else None)

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round."""
        chosen = sample_clients(clients, self.participation, stream)
        return (
            self._stored(state, chosen, stream)
            if state.variate is not None
            else self._fresh(state, chosen, stream)
        )

    def _stored(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        assert state.variate is not None
        n, share = len(clients.names), len(clients.index) / len(clients.names)
        weights = client_weights(self.weighting, clients.sizes)
        own = clients.remembered(state.variates, clients.index)
        work = replace(self.local, mean_gradient=True)
        moved = clients.local_steps(
            state.x, work, stream.at("local"), control=own, target=state.variate
        )
        assert moved.mean_gradient is not None
        x = state.x - self.server_lr * moved.displacement.weighted_sum(weights)
        change = moved.mean_gradient.weighted_sum(weights) - own.weighted_sum(weights)
        variates = clients.remember(state.variates, clients.index, moved.mean_gradient)
        state = State(x, state.variate + share * change, variates)  # c + |S|/N mean(c_i+ - c_i)
        return state, Info(scatter(weights, clients.index, n), index=clients.index)

    def _fresh(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        n = len(clients.names)
        weights = client_weights(self.weighting, clients.sizes)
        losses, gradients = clients.value_and_gradient(
            state.x, stream.at("gradient"), self.gradient_batch_size
        )
        target = gradients.weighted_sum(weights)
        moved = clients.local_steps(
            state.x, self.local, stream.at("local"), control=gradients, target=target
        )
        x = state.x - self.server_lr * moved.displacement.weighted_sum(weights)
        everyone, value = scatter(weights, clients.index, n), float(weights @ losses)
        full = self.gradient_batch_size is None and len(clients.index) == n
        info = Info(everyone, losses if full else None, value, clients.index)
        return State(x), replace(info, gradient=target if full else None)

    def model(self, state: State) -> Vector:
        """Return the last model."""
        return state.x
