"""Tilted empirical risk: clients weighted by the exponential of their losses."""

from __future__ import annotations

from dataclasses import dataclass

from equifed.algorithms.absence import PATIENCE, call_roll
from equifed.algorithms.fedavg import DEFAULT_WORK
from equifed.contract.absence import check_participation, sample_clients
from equifed.contract.algorithm import Info
from equifed.contract.arrays import Index, Losses, Vector
from equifed.contract.clients import Clients
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.objectives.kl import Tilted


@dataclass(frozen=True)
class State:
    """The model, the losses known so far, and the rounds since each client's last answer."""

    x: Vector
    losses: Losses | None = None  # None before the first round
    away: Index | None = None


@dataclass(frozen=True)
class TiltedERM:
    r"""Descent on the tilted risk of the clients (TERM, Li et al. 2021), with local steps.

    .. math::

       w_i = \frac{p_i e^{t f_i(x)}}{\sum_j p_j e^{t f_j(x)}}, \qquad
       x \leftarrow x - \text{server\_lr} \textstyle\sum_i w_i (x - u_i)

    w is the gradient of :math:`\frac1t \log \sum_i p_i e^{t f_i}` with respect to the losses (their
    Lemma 1), so one local step is a gradient step on it (their batch method); clients take the role
    of their groups, and several local steps are ours. Large t approaches the worst case, t = 0 is
    FedAvg, t < 0 discounts clients with large losses.

    Their stochastic method keeps a moving average of the normaliser for the losses it does not see
    in a step. Here clients that take no part keep their last loss in the sum (at first the mean of
    the others), and the weights of those present are :math:`w_i N/|\text{present}|`.

    Parameters
    ----------
    local : LocalSGD
        Local work, which the paper tunes.
    tilt : float
        t, in the inverse unit of the loss. The paper tunes it; the default is ours.
    prior : tuple of float, optional
        Positive numbers, one per client, normalised to the p_i; None is uniform.
    participation : float
        Fraction of clients in a round.
    server_lr : float
        Step of the server.
    patience : int
        Rounds without an answer after which a client has no weight until it is back.
    """

    local: LocalSGD = DEFAULT_WORK
    tilt: float = 1.0
    prior: tuple[float, ...] | None = None
    participation: float = 1.0
    server_lr: float = 1.0
    patience: int = PATIENCE

    def __post_init__(self) -> None:
        check_participation(self.participation, self.patience)
        Tilted(self.tilt, self.prior)  # refuses what is no number

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(x)

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round."""
        chosen = sample_clients(clients, self.participation, stream)
        roll = call_roll(self, state, chosen, Tilted(self.tilt, self.prior))
        losses = roll.losses(state.x, stream.at("losses"), self.local.batch_size)
        weights = roll.objective.weights(losses)
        moved = roll.local_steps(state.x, self.local, stream.at("local"))
        x = state.x - self.server_lr * moved.displacement.step(weights)
        info = Info(weights, losses, roll.objective.value(losses), chosen.index, notes=roll.notes)
        return State(x, losses, roll.away), info

    def model(self, state: State) -> Vector:
        """Return the last model."""
        return state.x
