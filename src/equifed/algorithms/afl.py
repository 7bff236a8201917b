"""AFL: gradient descent in the model, projected ascent in the client weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

from equifed.algorithms.attendance import PATIENCE, take_attendance
from equifed.algorithms.fedavg import DEFAULT_WORK
from equifed.algorithms.relaxed import Relaxed
from equifed.contract.algorithm import Info
from equifed.contract.arrays import Index, Losses, Vector, Weights
from equifed.contract.clients import Clients
from equifed.contract.local import LocalSGD
from equifed.contract.participation import carry_over, check_participation, sample_clients
from equifed.contract.streams import Stream
from equifed.objectives.base import SaddleObjective
from equifed.objectives.dual_steps import DualStep, Euclidean
from equifed.objectives.worst_case import WorstCase


@dataclass(frozen=True)
class State:
    """Model and weights; losses known so far, and rounds since each client's last answer."""

    x: Vector
    weights: Weights
    losses: Losses | None = None  # None before the first round
    away: Index | None = None


@dataclass(frozen=True)
class AFL:
    r"""Agnostic federated learning (Mohri et al. 2019), with or without local steps.

    .. math:: \lambda \leftarrow \mathrm{prox}(\lambda + \gamma\, l(x), \gamma), \qquad
              x \leftarrow x - \eta \sum_i \lambda_i \nabla f_i(x)

    The weights see the losses of the newest model, as in DRFA, of which this is the case of one
    local step and full participation; the first round uses the starting weights as they are. (The
    original takes both steps from the same point: its weights lag by one round.) With ``local`` of
    several steps the gradient is replaced by what local SGD makes of it, as SCAFF-PD's appendix F.1
    does to strengthen this baseline.

    Parameters
    ----------
    local : LocalSGD
        Local work; ``LocalSGD(lr=eta, steps=1)`` is the original.
    dual_step : float
        gamma. The default is what DRFA's experiments use for ten local steps, 10 times 0.008.
    objective : SaddleObjective
        Set and penalty of the weights; the simplex without a penalty is the original.
    participation : float
        Fraction of clients in a round; those absent keep their last loss, and the weights of the
        others are :math:`\lambda_i N/|\text{present}|`.
    dual : DualStep
        Euclidean as in the formula, or entropic (multiplicative weights).
    patience : int
        Rounds without an answer after which a client has no weight until it is back.
    """

    local: LocalSGD = DEFAULT_WORK
    dual_step: float = 0.08
    objective: SaddleObjective = WorstCase()  # noqa: RUF009 - a frozen value
    participation: float = 1.0
    dual: DualStep = Euclidean()  # noqa: RUF009 - a frozen value
    patience: int = PATIENCE

    def __post_init__(self) -> None:
        check_participation(self.participation, self.patience)
        if not self.dual_step > 0:
            raise ValueError(f"AFL dual_step must be positive, got {self.dual_step}.")

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(x, self.objective.start(len(clients.names)))

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round."""
        clients = sample_clients(clients, self.participation, stream)
        seen = clients.losses(state.x, stream.at("losses"), self.local.batch_size)
        losses = carry_over(state.losses, clients.index, seen, len(clients.names))
        roll = take_attendance(self, state, clients)
        weights = roll.weights
        if state.losses is not None:
            weights = self.dual.ascend(roll.objective, weights, losses, self.dual_step)
        moved = clients.local_steps(state.x, self.local, stream.at("local"))
        step = moved.displacement.weighted_sum(roll.scale(weights))
        info = Info(weights, losses, roll.objective.value(losses), clients.index, notes=roll.notes)
        if self.local == LocalSGD(lr=self.local.lr, steps=1):  # one plain step on all samples
            info = replace(info, gradient=step / self.local.lr)
        return State(state.x - step, weights, losses, roll.away), info

    def model(self, state: State) -> Vector:
        """Return the last model."""
        return state.x

    def wrapped(self) -> Relaxed:
        """Return the algorithm as training runs it."""
        return Relaxed(self)
