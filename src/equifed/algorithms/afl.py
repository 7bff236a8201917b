"""AFL and AgnosticFedAvg: descent in the model, ascent in the client weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from equifed.algorithms.absence import Everyone, call_roll
from equifed.contract import Clients, Index, LocalSGD, Losses, Stream, Vector, Weights
from equifed.contract.absence import PATIENCE, running_mean, sample_clients
from equifed.contract.algorithm import Federated, Info
from equifed.contract.clients import Moved
from equifed.contract.local import DEFAULT_WORK
from equifed.objectives import DualStep, Entropic, Euclidean, SaddleObjective, WorstCase
from equifed.steps.automatic import LARGEST, TINY

# The product of both step sizes and the squared coupling, where the dual step follows it
COUPLING = 0.3


@dataclass(frozen=True)
class State:
    """Model and weights, losses and absences known so far, the dual step, the means (if wanted)."""

    x: Vector
    weights: Weights
    losses: Losses | None = None  # None before the first round, as is the dual step
    dual_step: float | None = None
    steepest: float = 0.0  # the coupling of weights and model, its largest in what is remembered
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
    local step and full participation. (The original takes both steps from the same point: its
    weights lag by one round.) Several local steps strengthen this baseline, as SCAFF-PD's appendix
    F.1 does.

    Parameters
    ----------
    local : LocalSGD
        Local work; ``LocalSGD(lr=eta, steps=1)`` is the original.
    dual_step : float, optional
        gamma. None follows the coupling of weights and model where the weights turn, so that it
        suits any unit of the loss: in round r, with T the length of its local steps, :math:`d_i`
        what client i moved and S who took part,

        .. math:: K \leftarrow \max\Bigl(\frac{|\sum_{i \in S} \delta_i d_i|^2}{T^2 |\delta|^2},\
                  \frac{r}{r + 2}\, K\Bigr), \qquad \gamma \leftarrow \frac{0.3}{T K}, \qquad
                  \gamma_0 = \frac{0.3\, T}{\sum_i |d_i|^2},

        :math:`\delta` being what the weights of S turned, less its mean; at most a factor of two a
        round, for one more weighted sum. On quadratics inside the set, single steps with T at most
        1/L settle if gamma is constant and :math:`\gamma T K < 2` for every direction, so K must
        outlast the time that weights take to turn into another: a share of the rounds so far is
        remembered (round s counts :math:`s^2 / r^2`). The rule is ours; a number is the paper's.
    objective : SaddleObjective
        Set and penalty of the weights; the simplex without a penalty is the original.
    participation : float
        Fraction of clients in a round; those absent keep their last loss, and the weights of the
        others are :math:`\lambda_i N/|\text{present}|`.
    dual : DualStep
        Euclidean as in the formula, or entropic (multiplicative weights).
    clients_per_round : int, optional
        Clients that move the model: so many draws by lambda, with replacement (the original's
        stochastic variant). None lets every client do so. The losses are those of all who take
        part in either case.
    output : {"last", "average"}
        Model and weights to give out: the last, or the means over the rounds, as proved.
    patience : int
        Rounds without an answer after which a client has no weight until it is back.

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> history = ef.train(ef.AFL(), clients, rounds=20, evaluate=["test"], every=20)
    >>> round(min(history.per_client().values()), 1)  # the worst-served client; FedAvg: 0.4
    0.6
    """

    local: LocalSGD = DEFAULT_WORK
    dual_step: float | None = None
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
        turned = np.zeros(len(weights))
        if state.losses is not None:
            assert state.dual_step is not None
            weights = self.dual.ascend(objective, weights, losses, state.dual_step)
            turned = weights - everyone.weights
        share = weights / objective.total(weights)  # the sum is 1, or free
        chosen, share = everyone.draw(share, self.clients_per_round, stream.at("drawn"))
        moved = chosen.local_steps(state.x, self.local, stream.at("local"))
        x, t = state.x - moved.displacement.step(share), state.rounds + 1
        sizes = self._next_dual_step(state, chosen, moved, turned)
        value, notes, numbers = objective.value(losses), everyone.notes, {"dual_step": sizes[0]}
        info = Info(weights, losses, value, everyone.index, numbers, notes)
        if self.output == "last":
            return State(x, weights, losses, *sizes, everyone.away, t), info
        means = running_mean(state.mean_x, x, t), running_mean(state.mean_weights, weights, t)
        return State(x, weights, losses, *sizes, everyone.away, t, *means), info

    def _next_dual_step(
        self, state: State, chosen: Everyone, moved: Moved, turned: Weights
    ) -> tuple[float, float]:
        """Return the dual step of the next round, and the coupling to remember."""
        if self.dual_step is not None:
            return self.dual_step, 0.0
        length = self.local.lr * float(moved.steps.max())  # T
        share = len(chosen.index) / len(chosen.names)
        if state.dual_step is None:
            squares = float(moved.displacement.squared_norms().sum()) / share
            return min(COUPLING * length / max(squares, TINY), LARGEST), 0.0
        change = np.zeros(len(turned))
        change[chosen.index] = turned[chosen.index] - turned[chosen.index].mean()
        size = float(change @ change)
        if size <= 1e-24 or not moved.displacement.allows(change):
            return state.dual_step, state.steepest
        total = moved.displacement.weighted_sum(change * share)  # which is scaled to everybody
        kept = (state.rounds + 1) / (state.rounds + 3)  # a memory for a share of all rounds
        steepest = max(float(total @ total) / (length**2 * size), kept * state.steepest)
        wanted, old = COUPLING / max(length * steepest, TINY), state.dual_step
        return float(np.clip(wanted, old / 2, min(2 * old, LARGEST))), steepest

    def weights(self, state: State) -> Weights:
        """Return the last weights, or the mean of all."""
        return state.weights if state.mean_weights is None else state.mean_weights


@dataclass(frozen=True)
class AgnosticFedAvg(Federated):
    r"""Agnostic federated averaging (Ro et al. 2021), where every client is a domain.

    .. math::

       x &\leftarrow x - \text{server\_lr}\, \frac{N}{|S|}
              \textstyle\sum_{i \in S} \lambda_i (x - u_i) \\
       \lambda_i &\leftarrow \lambda_i e^{\gamma L_i} \,/\,
              \textstyle\sum_j \lambda_j e^{\gamma L_j}

    with :math:`u_i` after local steps from x, and :math:`L_i = f_i(x)` at that same x: unlike
    :class:`AFL` here, both steps start from one point.

    Our reading of what the paper states for domains that are spread over clients. It divides the
    update by the sum of the weights over S; here the factor is what makes its mean right. A domain
    that a round does not meet keeps its last loss here, and has the loss 0 in the paper.

    Parameters
    ----------
    local, objective, patience
        As for :class:`AFL`.
    dual_step : float
        gamma, in the inverse unit of the loss. The paper tunes it; the default is ours.
    participation, server_lr : float
        Fraction of clients in a round; step of the server.
    dual : DualStep
        Entropic, as in the paper (exponentiated gradient), or Euclidean.

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
        return State(x, weights, losses, away=roll.away), info
