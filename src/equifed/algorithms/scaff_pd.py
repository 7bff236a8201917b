"""SCAFF-PD: accelerated primal-dual steps with bias-corrected local steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from equifed.algorithms.certified import Certified
from equifed.algorithms.safeguarded import Safeguarded
from equifed.contract.algorithm import Info
from equifed.contract.arrays import Losses, Vector, Weights
from equifed.contract.clients import Clients
from equifed.contract.local import LocalSGD
from equifed.contract.participation import (
    carry_over,
    check_participation,
    sample_clients,
    scale_to_present,
)
from equifed.contract.streams import Stream
from equifed.objectives.base import SaddleObjective, check_saddle
from equifed.steps.automatic import AutoSteps
from equifed.steps.schedule import Problem, Schedule, StepSizes, WeightChange


@dataclass(frozen=True)
class State:
    """The model, the client weights, the last losses and the step sizes in force."""

    x: Vector
    weights: Weights
    losses: Losses | None = None  # None before the first round, as are the sizes
    sizes: StepSizes | None = None


@dataclass(frozen=True)
class ScaffPD:
    r"""SCAFF-PD (Yu et al. 2023), Algorithms 1 and 2.

    .. math:: \min_x \max_{\lambda \in \Lambda} \sum_i \lambda_i f_i(x) - \psi(\lambda)

    .. math::

       s &= l + \theta\,(l - l_{\text{prev}}) \\
       \lambda &\leftarrow \mathrm{prox}(\lambda + \sigma s, \sigma) && (4.1) \\
       c &= \textstyle\sum_i \lambda_i c_i, \quad c_i = \nabla f_i(x) \\
       u_i &\leftarrow u_i - \eta\,(g_i(u_i) - c_i + c) \quad J \text{ times from } u_i = x,
              \qquad d_i = (x - u_i)/(\eta J) \\
       x &\leftarrow x - \tau \textstyle\sum_i \lambda_i d_i && (4.2)

    The paper leaves the first l_prev open: here it is l. Absent clients keep their last loss; those
    present share the whole weight. Where the sum S of lambda is free, c and (4.2) have lambda / S.

    Parameters
    ----------
    objective : SaddleObjective
        Set Lambda and penalty psi of the weights; with ``RelativeFairness`` it is SCAFF-PD-IA.
    local : LocalSGD
        J steps of size eta, which the schedule may set (the automatic one does).
    steps : Schedule
        tau, sigma and theta of every round; automatic unless given.
    gradient_batch_size : int, optional
        Samples for the losses and the control variates; None means all of them.
    participation : float
        Fraction of clients in a round.
    """

    objective: SaddleObjective
    local: LocalSGD = LocalSGD(lr=1.0, steps=8)  # noqa: RUF009 - a frozen value
    steps: Schedule = AutoSteps()  # noqa: RUF009 - a frozen value
    gradient_batch_size: int | None = None
    participation: float = 1.0

    def __post_init__(self) -> None:
        check_participation(self.participation)
        check_saddle(self.objective, "SCAFF-PD")

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(x, self.objective.start(len(clients.names)))

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round: one line of code for one line of the paper."""
        clients, x = sample_clients(clients, self.participation, stream), state.x
        seen, c = clients.value_and_gradient(x, stream.at("gradient"), self.gradient_batch_size)
        size = state.sizes or self.steps.start(Problem(self, clients, x, c, stream.at("steps")))
        local = self.local if size.local is None else replace(self.local, lr=size.local)
        losses = carry_over(state.losses, clients.index, seen, len(clients.names))  # l
        before = losses if state.losses is None else state.losses
        ahead = losses + size.extrapolation * (losses - before)  # s
        weights = self.objective.prox(state.weights + size.dual * ahead, size.dual)  # (4.1)
        total = self.objective.total(weights)  # 1, or S
        present = scale_to_present(weights / total, clients.index)
        target = c.weighted_sum(present)  # c
        moved = clients.local_steps(x, local, stream.at("local"), control=c, target=target)
        update = moved.displacement.weighted_sum(present / (local.lr * moved.steps))
        new_x = x - size.primal * update  # (4.2)
        change = total * present - scale_to_present(state.weights, clients.index)
        value, notes = self.objective.value(losses), size.said() if state.sizes is None else ()
        gradient = total * target if self.gradient_batch_size is None else None
        info = Info(weights, losses, value, clients.index, size.numbers(), notes, gradient)
        sizes = self.steps.next(size, WeightChange(change, weights, c))
        return replace(state, x=new_x, weights=weights, losses=losses, sizes=sizes), info

    def model(self, state: State) -> Vector:
        """Return the last model."""
        return state.x

    def wrapped(self) -> Safeguarded:
        """Return the algorithm as training runs it."""
        return Safeguarded(Certified(self))
