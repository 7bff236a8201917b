"""Reweighted: local steps, then a mean by the weights that an objective gives the losses."""

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
from equifed.objectives.base import Objective
from equifed.objectives.chi_square import SemiVariance
from equifed.objectives.free_sums import Proportional


@dataclass(frozen=True)
class State:
    """The model, the losses known so far, and the rounds since each client's last answer."""

    x: Vector
    losses: Losses | None = None  # None before the first round
    away: Index | None = None


@dataclass(frozen=True)
class Reweighted:
    r"""Descent on any objective of the client losses, with local steps.

    .. math::

       w = \nabla\Phi(f_1(x), \dots, f_N(x)) \,/\, \textstyle\sum_i \nabla_i\Phi, \qquad
       x \leftarrow x - \text{server\_lr} \sum_i w_i (x - u_i)

    One local step is a gradient step on the objective; several are FedAvg's, weighted. The weights
    are divided by their sum (which only objectives with a free sum, such as PropFair's, change), so
    that the step size is that of FedAvg. An objective that is no smooth function of the losses (the
    worst case, CVaR) makes this swing: use SCAFF-PD or AFL.

    Clients that take no part keep their last loss (at first the mean of the others), and the
    weights of those present are :math:`w_i N/|\text{present}|`.

    Parameters
    ----------
    objective : Objective
        Phi; one with a dual step or without.
    local : LocalSGD
        Local work.
    participation : float
        Fraction of clients in a round.
    server_lr : float
        Step of the server.
    patience : int
        Rounds without an answer after which a client has no weight until it is back.
    """

    objective: Objective
    local: LocalSGD = DEFAULT_WORK
    participation: float = 1.0
    server_lr: float = 1.0
    patience: int = PATIENCE

    def __post_init__(self) -> None:
        check_participation(self.participation, self.patience)

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(x)

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round."""
        chosen = sample_clients(clients, self.participation, stream)
        roll = call_roll(self, state, chosen)
        losses = roll.losses(state.x, stream.at("losses"), self.local.batch_size)
        weights = roll.objective.weights(losses)
        weights = weights / weights.sum()
        moved = roll.local_steps(state.x, self.local, stream.at("local"))
        x = state.x - self.server_lr * moved.displacement.step(weights)
        info = Info(weights, losses, roll.objective.value(losses), chosen.index, notes=roll.notes)
        return State(x, losses, roll.away), info

    def model(self, state: State) -> Vector:
        """Return the last model."""
        return state.x


def propfair(
    ceiling: float = 5.0,
    floor: float = 0.2,
    local: LocalSGD = DEFAULT_WORK,
    participation: float = 1.0,
    server_lr: float = 1.0,
    patience: int = PATIENCE,
) -> Reweighted:
    r"""Return PropFair (Zhang et al. 2022): weights :math:`1/(M - f_i)`, M the ``ceiling``.

    It minimises :math:`-\sum_i \log(M - f_i)`, continued by its tangent where M - f_i is below
    ``floor``. The paper transforms the loss of every minibatch; here the weight is that of the
    client's loss at the beginning of the round. The ceiling is a loss that is bad for everybody.

    >>> propfair(ceiling=3.0).objective
    Proportional(ceiling=3.0, floor=0.2, prior=None)
    """
    return Reweighted(Proportional(ceiling, floor), local, participation, server_lr, patience)


def semi_vred(
    strength: float = 0.5,
    local: LocalSGD = DEFAULT_WORK,
    participation: float = 1.0,
    server_lr: float = 1.0,
    patience: int = PATIENCE,
) -> Reweighted:
    """Return Semi-VRed: mean loss plus ``strength`` times the semi-variance of the losses.

    >>> semi_vred(1.0).objective
    SemiVariance(strength=1.0)
    """
    return Reweighted(SemiVariance(strength), local, participation, server_lr, patience)
