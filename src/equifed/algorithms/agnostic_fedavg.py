"""AgnosticFedAvg: federated averaging with multiplicative updates of the client weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from equifed.algorithms.absence import call_roll
from equifed.contract import Clients, Federated, Index, Info, Losses, Stream, Vector, Weights
from equifed.contract.absence import PATIENCE, sample_clients
from equifed.contract.local import DEFAULT_WORK, LocalSGD
from equifed.objectives import DualStep, Entropic, SaddleObjective, WorstCase


@dataclass(frozen=True)
class State:
    """Model and weights; losses known so far, and rounds since each client's last answer."""

    x: Vector
    weights: Weights
    losses: Losses | None = None  # None before the first round
    away: Index | None = None


@dataclass(frozen=True)
class AgnosticFedAvg(Federated):
    r"""Agnostic federated averaging (Ro et al. 2021), where every client is a domain.

    .. math::

       x &\leftarrow x - \text{server\_lr}\, \frac{N}{|S|}
              \textstyle\sum_{i \in S} \lambda_i (x - u_i) \\
       \lambda_i &\leftarrow \lambda_i e^{\gamma L_i} \,/\,
              \textstyle\sum_j \lambda_j e^{\gamma L_j}

    with :math:`u_i` after local steps from x, and :math:`L_i = f_i(x)` at that same x: unlike
    :class:`~equifed.algorithms.afl.AFL` here, both steps start from one point.

    Our reading of what the paper states for domains that are spread over clients. It divides the
    update by the sum of the weights over S; here the factor is what makes its mean right. It gives
    a domain that a round does not meet the loss 0, which lets its weight decay; here it keeps its
    last loss (at first the mean of the others).

    Parameters
    ----------
    local : LocalSGD
        Local work, which the paper tunes for each data set.
    dual_step : float
        gamma, in the inverse unit of the loss. The paper tunes it; the default is ours.
    objective : SaddleObjective
        Set and penalty of the weights; the simplex without a penalty is the original.
    participation, server_lr : float
        Fraction of clients in a round; step of the server.
    dual : DualStep
        Entropic, as in the paper (exponentiated gradient), or Euclidean.
    patience : int
        Rounds without an answer after which a client has no weight until it is back.

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> history = ef.train(ef.AgnosticFedAvg(), clients, rounds=20, evaluate=["test"], every=20)
    >>> round(min(history.per_client().values()), 1)  # the worst-served client; FedAvg: 0.4
    0.6
    """

    local: LocalSGD = DEFAULT_WORK
    dual_step: float = 0.3
    objective: SaddleObjective = WorstCase()  # noqa: RUF009 - a frozen value
    participation: float = 1.0
    server_lr: float = 1.0
    dual: DualStep = Entropic()  # noqa: RUF009 - a frozen value
    patience: int = PATIENCE

    one_sum: ClassVar = True

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(x, self.objective.start(len(clients.names)))

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round."""
        chosen = sample_clients(clients, self.participation, stream)
        roll = call_roll(self, state, chosen)
        losses = roll.losses(state.x, stream.at("losses"), self.local.batch_size)  # L_i
        moved = roll.local_steps(state.x, self.local, stream.at("local"))
        beta = roll.weights / self.objective.total(roll.weights)
        x = state.x - self.server_lr * moved.displacement.step(beta)
        weights = self.dual.ascend(roll.objective, roll.weights, losses, self.dual_step)
        value = roll.objective.value(losses)
        info = Info(roll.weights, losses, value, chosen.index, notes=roll.notes)
        return State(x, weights, losses, roll.away), info
