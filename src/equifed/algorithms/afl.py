"""AFL: gradient descent in the model, projected ascent in the client weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from equifed.algorithms.absence import PATIENCE, call_roll
from equifed.algorithms.fedavg import DEFAULT_WORK
from equifed.contract import Clients, Index, LocalSGD, Losses, Stream, Vector, Weights
from equifed.contract.absence import running_mean, sample_clients
from equifed.contract.algorithm import Federated, Info
from equifed.objectives import DualStep, Euclidean, SaddleObjective, WorstCase


@dataclass(frozen=True)
class State:
    """Model and weights, losses and absences known so far, and the means (if wanted)."""

    x: Vector
    weights: Weights
    losses: Losses | None = None  # None before the first round
    away: Index | None = None  # rounds since each client's last answer
    rounds: int = 0
    mean_x: Vector | None = None
    mean_weights: Weights | None = None


@dataclass(frozen=True)
class AFL(Federated):
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
    clients_per_round : int, optional
        Clients that move the model: so many draws by lambda, with replacement, whose mean step is
        that of all (the original's stochastic variant). None lets every client do so. The losses
        are those of all who take part in either case.
    output : {"last", "average"}
        Model and weights to give out: the last, or the means over the rounds, which is what is
        proved about the original.
    patience : int
        Rounds without an answer after which a client has no weight until it is back.
    """

    local: LocalSGD = DEFAULT_WORK
    dual_step: float = 0.08
    objective: SaddleObjective = WorstCase()  # noqa: RUF009 - a frozen value
    participation: float = 1.0
    dual: DualStep = Euclidean()  # noqa: RUF009 - a frozen value
    clients_per_round: int | None = None
    output: Literal["last", "average"] = "last"
    patience: int = PATIENCE

    one_sum: ClassVar = True

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(x, self.objective.start(len(clients.names)))

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round."""
        there = sample_clients(clients, self.participation, stream)
        everyone = call_roll(self, state, there)
        objective, weights = everyone.objective, everyone.weights
        losses = everyone.losses(state.x, stream.at("losses"), self.local.batch_size)
        if state.losses is not None:
            weights = self.dual.ascend(objective, weights, losses, self.dual_step)
        share = weights / self.objective.total(weights)  # the sum is 1, or free
        chosen, share = everyone.draw(share, self.clients_per_round, stream.at("drawn"))
        moved = chosen.local_steps(state.x, self.local, stream.at("local"))
        x, t = state.x - moved.displacement.step(share), state.rounds + 1
        value, notes = objective.value(losses), everyone.notes
        info = Info(weights, losses, value, everyone.index, notes=notes)
        if self.output == "last":
            return State(x, weights, losses, everyone.away, t), info
        means = running_mean(state.mean_x, x, t), running_mean(state.mean_weights, weights, t)
        return State(x, weights, losses, everyone.away, t, *means), info

    def model(self, state: State) -> Vector:
        """Return the last model, or the mean of all."""
        return state.x if state.mean_x is None else state.mean_x

    def weights(self, state: State) -> Weights:
        """Return the last weights, or the mean of all."""
        return state.weights if state.mean_weights is None else state.mean_weights
