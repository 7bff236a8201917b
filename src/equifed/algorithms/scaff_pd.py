"""SCAFF-PD: accelerated primal-dual steps with bias-corrected local steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from equifed.algorithms.base import Info, check_participation, sampled
from equifed.arrays import Losses, Vector, Weights
from equifed.clients import Clients, merged, shares
from equifed.local import LocalSGD
from equifed.objectives.base import SaddleObjective
from equifed.steps import Schedule, StepSizes
from equifed.streams import Stream


@dataclass(frozen=True)
class State:
    """The model, the client weights, the step sizes in force, the last losses (None at first)."""

    x: Vector
    weights: Weights
    sizes: StepSizes
    losses: Losses | None = None


@dataclass(frozen=True)
class ScaffPD:
    r"""SCAFF-PD (Yu et al. 2023), Algorithms 1 and 2.

    .. math:: \min_x \max_{\lambda \in \Lambda} \sum_i \lambda_i f_i(x) - \psi(\lambda)

    Each round extrapolates the losses, takes an exact dual step, and moves the model by
    bias-corrected local steps:

    .. math::

       s &= l + \theta\,(l - l_{\text{prev}}) \\
       \lambda &\leftarrow \mathrm{prox}(\lambda + \sigma s, \sigma) && (4.1) \\
       c &= \textstyle\sum_i \lambda_i c_i, \quad c_i = \nabla f_i(x) \\
       u_i &\leftarrow u_i - \eta\,(g_i(u_i) - c_i + c) \quad J \text{ times from } u_i = x,
              \qquad d_i = (x - u_i)/(\eta J) \\
       x &\leftarrow x - \tau \textstyle\sum_i \lambda_i d_i && (4.2)

    The paper leaves the first extrapolation open: the previous losses are taken to be the first
    ones. SCAFF-PD-IA (relative fairness) is this algorithm with the objective ``RelativeFairness``,
    whose weights may be negative.

    Clients that do not take part keep their last loss, which the dual step uses as if it were new,
    and the weights of those present are scaled up to the total of all. With everybody present this
    is the paper's algorithm; with fewer its convergence guarantees no longer apply.

    Parameters
    ----------
    objective : SaddleObjective
        Set and penalty of the weights.
    local : LocalSGD
        J steps of size eta; the schedule may set the size.
    steps : Schedule
        tau, sigma and theta of every round.
    gradient_batch : int, optional
        Samples for the losses and the control variates; None means all of them.
    participation : float
        Fraction of clients in a round.
    """

    objective: SaddleObjective
    local: LocalSGD
    steps: Schedule
    gradient_batch: int | None = None
    participation: float = 1.0

    def __post_init__(self) -> None:
        check_participation(self.participation)

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(x, self.objective.start(len(clients.names)), self.steps.start())

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round: one line of code for one line of the paper."""
        clients, size = sampled(clients, self.participation, stream), state.sizes
        local = self.local if size.local is None else replace(self.local, lr=size.local)
        seen, gradients = clients.value_and_gradient(
            state.x, stream.at("gradient"), self.gradient_batch
        )
        losses = merged(state.losses, clients.index, seen, len(clients.names))
        before = losses if state.losses is None else state.losses
        ahead = losses + size.extrapolation * (losses - before)  # s
        weights = self.objective.prox(state.weights + size.dual * ahead, size.dual)  # (4.1)
        present = shares(weights, clients.index)
        target = gradients.weighted_sum(present)  # c
        moved = clients.local_steps(
            state.x, local, stream.at("local"), control=gradients, target=target
        )
        update = moved.displacement.weighted_sum(
            present / (local.lr * moved.steps)
        )  # sum of lambda_i d_i
        x = state.x - size.primal * update  # (4.2)
        info = Info(weights, losses, self.objective.value(losses), clients.index, size.numbers())
        return State(x, weights, self.steps.next(size), losses), info

    def answer(self, state: State) -> Vector:
        """Return the last model."""
        return state.x
