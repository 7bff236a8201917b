"""Delta-FL: of the sampled clients, only those with large losses train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from equifed.algorithms.absence import call_roll
from equifed.algorithms.fedavg import Weighting, all_sizes, client_weights
from equifed.contract import Clients, Federated, Index, Info, Losses, Stream, Vector, Weights
from equifed.contract.absence import PATIENCE, bound_share, sample_clients, scatter
from equifed.contract.local import DEFAULT_WORK, LocalSGD
from equifed.objectives.cvar import Average
from equifed.steps.schedules import epsilon

ROUNDING = 256.0  # units in the last place by which a loss may be off: a mean of many samples


@dataclass(frozen=True)
class State:
    """The model, the losses known so far, and the rounds since each client's last answer."""

    x: Vector
    losses: Losses | None = None  # None before the first round
    away: Index | None = None


@dataclass(frozen=True)
class DeltaFL(Federated):
    r"""Federated averaging of the tail (Pillutla et al. 2021), for the superquantile (CVaR).

    .. math::

       \eta &= \max\{e : \textstyle\sum_{i \in S,\, F_i(x) \ge e} p_i \ge \text{level}\} \\
       T &= \{i \in S : F_i(x) \ge \eta\}, \qquad
       x \leftarrow \textstyle\sum_{i \in T} p_i u_i \,/\, \sum_{i \in T} p_i

    where S is a uniform sample of clients and :math:`u_i` the model after local steps from x. The
    paper's :math:`\eta` is the (1 - level)-quantile of the losses; where that is not unique the
    largest is taken, so that with equal weights and distinct losses ceil(level m) of m sampled
    clients train. Losses that differ from it by rounding belong to the tail. Level 1 is FedAvg. The
    paper also adds noise for privacy; that is left out.

    Where everybody is asked (``participation=1``) absent clients count in the quantile with their
    last loss, all who are there train, and those of them in T have :math:`p_i N/|\text{present}|`.

    Parameters
    ----------
    local : LocalSGD
        Local work, which the paper tunes for each data set.
    level : float
        Fraction of the weight that trains, in (0, 1]. The default is the middle one of the three
        that the paper tries (0.8, 0.5, 0.1).
    weighting, participation, server_lr
        p_i; fraction of clients in S; step from x towards the average.
    patience : int
        Rounds without an answer after which a client does not count until it is back.
    cap : float, optional
        The tail is so wide that nobody needs a larger share of it, or than two equal shares.

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> fair = ef.DeltaFL(ef.LocalSGD(lr=0.02, steps=5), level=0.5)
    >>> history = ef.train(fair, clients, rounds=50, evaluate=["test"], every=50)
    >>> round(min(history.per_client().values()), 1)  # the worst-served client; FedAvg: 0.5
    0.7
    """

    local: LocalSGD = DEFAULT_WORK
    level: float = 0.5
    weighting: Weighting = "size"
    participation: float = 1.0
    server_lr: float = 1.0
    patience: int = PATIENCE
    cap: float | None = None

    allowed: ClassVar = {"level": "(0, 1]", "cap": "(0, 1]"}

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(x)

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round."""
        chosen = sample_clients(clients, self.participation, stream)  # S
        roll = call_roll(self, state, chosen, Average())
        losses = roll.losses(state.x, stream.at("losses"))
        pool = chosen.index if self.participation < 1 else roll.counted()
        sizes, known = all_sizes(clients)[pool], losses[pool]
        most = 1.0 if self.cap is None else bound_share(self.cap, len(losses), len(known))
        mass = client_weights(self.weighting, sizes)
        threshold = upper_quantile(known, mass, self.level, int(np.ceil(1 / most - 1e-9)))
        trains = known >= threshold - rounding(threshold, state.x)
        tail = client_weights(self.weighting, sizes[trains])  # p_i / sum over T
        weights = scatter(tail, pool[trains], len(losses))
        trained: Clients = roll
        share = weights
        if len(chosen.index) == len(pool):  # none of them is missing
            trained, share = chosen.subset(pool[trains]), tail  # T
        moved = trained.local_steps(state.x, self.local, stream.at("local"))
        x = state.x - self.server_lr * moved.displacement.step(share)
        value, told = float(tail @ known[trains]), {"threshold": threshold}
        notes = roll.notes if self.participation == 1 else ()
        info = Info(weights, None, value, trained.index, told, notes)
        return State(x, losses, roll.away), info


def upper_quantile(losses: Losses, mass: Weights, level: float, least: int = 1) -> float:
    """Return the largest loss that has ``level`` of the mass, and some clients, at or above it.

    >>> losses, mass = np.array([3.0, 1.0, 4.0, 2.0]), np.full(4, 0.25)
    >>> upper_quantile(losses, mass, 0.5), upper_quantile(losses, mass, 0.5, least=3)
    (3.0, 2.0)
    """
    order = np.argsort(-losses, kind="stable")
    above = np.cumsum(mass[order])
    enough = above >= level * (1 - 1e-12)  # rounding of the sum must not cost a client
    first = int(np.argmax(enough)) if enough.any() else len(order) - 1
    return float(losses[order[max(first, least - 1)]])


def rounding(loss: float, x: Vector) -> float:
    """Return by how much a loss in the precision of the model x may be off."""
    return ROUNDING * epsilon(x) * abs(loss)
