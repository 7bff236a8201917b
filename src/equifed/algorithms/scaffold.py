"""SCAFFOLD: local steps corrected for the difference between a client and the average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from equifed.algorithms.fedavg import Weighting, all_sizes, client_weights
from equifed.contract import Clients, Federated, Info, LocalSGD, Proof, Stream, Vector, Weights
from equifed.contract.absence import sample_clients, scale_to_present, scatter
from equifed.contract.arrays import ClientVectors
from equifed.contract.local import DEFAULT_WORK
from equifed.objectives.cvar import Average


@dataclass(frozen=True)
class State:
    """The model, the server's variate, and the clients' variates (stored variant only)."""

    x: Vector
    variate: Vector | None = None
    variates: ClientVectors | None = None


@dataclass(frozen=True)
class Scaffold(Federated):
    r"""Local steps :math:`u \leftarrow u - \text{lr}\,(g_i(u) - c_i + c)`, then the average.

    Three readings of the control variates :math:`c_i` go by this name:

    * ``variates="stored"``: Karimireddy et al. 2020, option II. A client keeps :math:`c_i` between
      rounds; after its local steps :math:`c_i^+ = c_i - c + (x - u_i)/(J\,\text{lr})`, which is the
      mean of its plain gradients along the way, and
      :math:`c \leftarrow c + \sum_{i \in S} p_i (c_i^+ - c_i)`. One exchange a round.
    * ``variates="stored-gradient"``: the same with option I, :math:`c_i^+ = g_i(x)` at the model
      that the round starts from. Two exchanges a round.
    * ``variates="fresh"``: :math:`c_i = \nabla f_i(x)` in every round and
      :math:`c = \sum_i p_i c_i`; this is SCAFF-PD with the average objective (the sense of the
      SCAFF-PD and SCAFF-PD-IA papers). Two exchanges a round.

    The paper has equal weights, :math:`p_i = 1/N`; ``weighting="size"`` shares of the samples. The
    :math:`p_i` of c are those over **all** clients, so that c stays the p-weighted sum of all
    :math:`c_i`; the step of x is the average over those present.

    **Variates of option II remember.** Near x, where a client's curvature in some direction is h
    and a is the part of the correction that counts (``local.correction``),

    .. math:: c_i^+ = (1 - b)\, \nabla f_i(x) + a\, b\, (c_i - c), \qquad
              b = 1 - \frac1J \sum_{j < J} (1 - \text{lr}\, h)^j,

    so a deviation is multiplied by a b in every round, whatever the other clients do: with a = 1
    it dies out for lr h < 2 alone (J even; 2.96 for J = 5), with all samples as with minibatches.
    FedAvg and gradients at x have no such memory. Networks are trained best with longer steps,
    beyond 2/h for single clients and below it for their average; there option II diverges, and
    ``"fresh"`` or SCAFF-PD with a ``gradient_batch_size`` and a part of the correction do not.

    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> history = ef.train(ef.Scaffold(), clients, rounds=20, evaluate=["test"], every=20)
    >>> round(min(history.per_client().values()), 1)  # the worst-served client; FedAvg: 0.3
    0.4
    """

    local: LocalSGD = DEFAULT_WORK
    variates: Literal["stored", "stored-gradient", "fresh"] = "stored"
    weighting: Weighting = "uniform"
    participation: float = 1.0
    server_lr: float = 1.0
    gradient_batch_size: int | None = None

    averages: ClassVar = True
    allowed: ClassVar = {"variates": ("stored", "stored-gradient", "fresh")}

    @property
    def remembers(self) -> bool:
        """Whether sampling leaves no noise, because clients' last variates are kept."""
        return self.variates != "fresh"

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round; stored variates start at zero."""
        return State(x, None if self.variates == "fresh" else torch.zeros_like(x))

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round."""
        everyone = client_weights(self.weighting, all_sizes(clients))  # p
        chosen = sample_clients(clients, self.participation, stream)
        run = self._fresh if state.variate is None else self._stored
        return run(state, everyone, chosen, stream)

    def _stored(
        self, state: State, p: Weights, clients: Clients, stream: Stream
    ) -> tuple[State, Info]:
        assert state.variate is not None
        own = clients.remembered(state.variates, clients.index)
        new = None
        if self.variates == "stored-gradient":  # option I: c_i+ = g_i(x)
            _, new = clients.value_and_gradient(
                state.x, stream.at("gradient"), self.gradient_batch_size
            )
        work = self.local.work(mean_gradient=new is None)
        moved = clients.local_steps(
            state.x, work, stream.at("local"), control=own, target=state.variate
        )
        new = moved.mean_gradient if new is None else new  # option II
        assert new is not None
        weights, share = client_weights(self.weighting, clients.sizes), p[clients.index]
        x = state.x - self.server_lr * moved.displacement.weighted_sum(weights)
        change = new.weighted_difference(own, share)  # sum over S of p_i (c_i+ - c_i)
        variates = clients.remember(state.variates, clients.index, new)
        info = Info(scatter(weights, clients.index, len(p)), index=clients.index)
        return State(x, state.variate + change, variates), info

    def _fresh(
        self, state: State, p: Weights, clients: Clients, stream: Stream
    ) -> tuple[State, Info]:
        weights = client_weights(self.weighting, clients.sizes)
        losses, gradients = clients.value_and_gradient(
            state.x, stream.at("gradient"), self.gradient_batch_size
        )
        target = gradients.step(scale_to_present(p, clients.index))  # scaled here, not below
        moved = clients.local_steps(
            state.x, self.local, stream.at("local"), control=gradients, target=target
        )
        x = state.x - self.server_lr * moved.displacement.weighted_sum(weights)
        everyone, value = scatter(weights, clients.index, len(p)), float(weights @ losses)
        if self.gradient_batch_size is not None or len(clients.index) < len(p):
            return State(x), Info(everyone, None, value, clients.index)
        proof = Proof(state.x, losses, p, target, Average(prior=tuple(p.tolist())))
        return State(x), Info(everyone, losses, value, clients.index, proof=proof)
