"""SCAFF-PD: accelerated primal-dual steps with bias-corrected local steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from equifed.algorithms.accelerated import Accelerated, accelerate
from equifed.algorithms.attendance import PATIENCE, take_attendance
from equifed.algorithms.in_metric import MetricKind, check_metric, play_in_metric
from equifed.contract import Clients, Index, Info, Losses, Stream, Vector, Weights
from equifed.contract.local import LocalSGD
from equifed.contract.participation import carry_over, check_participation, sample_clients
from equifed.objectives.base import SaddleObjective, check_saddle
from equifed.steps.automatic import AutoSteps
from equifed.steps.schedule import Problem, Schedule, StepSizes, WeightChange


@dataclass(frozen=True)
class State:
    """Model, weights, last losses, step sizes in force, rounds since each client's last answer."""

    x: Vector
    weights: Weights
    losses: Losses | None = None  # None before the first round, as are the next two
    sizes: StepSizes | None = None
    away: Index | None = None


@dataclass(frozen=True)
class ScaffPD:
    r"""SCAFF-PD (Yu et al. 2023), Algorithms 1 and 2.

    .. math::

       \min_x\ &\max_{\lambda \in \Lambda} \textstyle\sum_i \lambda_i f_i(x) - \psi(\lambda) \\
       s &= l + \theta\,(l - l_{\text{prev}}) \\
       \lambda &\leftarrow \mathrm{prox}(\lambda + \sigma s, \sigma) && (4.1) \\
       c &= \textstyle\sum_i \lambda_i c_i, \quad c_i = \nabla f_i(x) \\
       u_i &\leftarrow u_i - \eta\,(g_i(u_i) - c_i + c) \quad J \text{ times from } u_i = x,
              \qquad d_i = (x - u_i)/(\eta J) \\
       x &\leftarrow x - \tau \textstyle\sum_i \lambda_i d_i && (4.2)

    The first :math:`l_\text{prev}`, open in the paper, is l, also for those who were away. Absent
    clients keep their last loss; others have w_i = lambda_i N/present, scaled once: (4.2) takes
    :math:`\sum w_i d_i - (\sum w_i - 1) c`. Where the sum S of lambda is free, lambda / S moves x.

    Parameters
    ----------
    objective : SaddleObjective
        Set Lambda and penalty psi of the weights; with ``RelativeFairness`` it is SCAFF-PD-IA.
    local, steps
        J steps of size eta, which the schedule may set; tau, sigma and theta of every round.
    gradient_batch_size, loss_batch_size, participation, patience, metric
        Samples for the c_i and for l (None: all); fraction of clients in a round; rounds without an
        answer after which one leaves Lambda; steps in a metric P (:mod:`.in_metric`), or "none".
    """

    objective: SaddleObjective
    local: LocalSGD = LocalSGD(lr=1.0, steps=8)  # noqa: RUF009 - a frozen value
    steps: Schedule = AutoSteps()  # noqa: RUF009 - a frozen value
    gradient_batch_size: int | None = None
    participation: float = 1.0
    loss_batch_size: int | None = None
    patience: int = PATIENCE
    metric: MetricKind = "auto"

    def __post_init__(self) -> None:
        check_participation(self.participation, self.patience)
        check_saddle(self.objective, "SCAFF-PD")
        check_metric(self)

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(x, self.objective.start(len(clients.names)))

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round: one line of code for one line of the paper."""
        if (done := play_in_metric(self, state, clients, stream)) is not None:
            return done  # in the metric P, where there is one
        clients, x = sample_clients(clients, self.participation, stream), state.x
        seen, c = clients.value_and_gradient(x, stream.at("gradient"), self.gradient_batch_size)
        if self.loss_batch_size != self.gradient_batch_size:
            seen = clients.losses(x, stream.at("losses"), self.loss_batch_size)
        size = state.sizes or self.steps.start(Problem(self, clients, x, c, stream.at("steps")))
        local = self.local if size.local is None else replace(self.local, lr=size.local)
        roll = take_attendance(self, state, clients)
        losses = carry_over(state.losses, clients.index, seen, len(clients.names))  # l
        ahead = losses + size.extrapolation * (losses - roll.previous(state.losses, losses))  # s
        weights = roll.objective.prox(roll.weights + size.dual * ahead, size.dual)  # (4.1)
        total = roll.objective.total(weights)  # 1, or S
        share, present = weights / total, roll.scale(weights / total)  # lambda, w
        target = c.weighted_sum(present)  # c
        moved = clients.local_steps(x, local, stream.at("local"), control=c, target=target)
        update = moved.displacement.weighted_sum(present / (local.lr * moved.steps))
        rest = local.correction * (present.sum() - share.sum())  # 0 if all are there
        new_x = x - size.primal * (update - rest * target)  # (4.2)
        turned = WeightChange(total * present - roll.scale(roll.weights), weights, c)
        said = (() if state.sizes else size.said()) + roll.notes
        value, told = roll.objective.value(losses), (clients.index, size.numbers(), said)
        whole = self.gradient_batch_size is None and self.loss_batch_size is None
        gradient = total * target if whole else None  # a proof needs both of all samples
        after = State(new_x, weights, losses, self.steps.next(size, turned), roll.away)
        return replace(state, **vars(after)), Info(weights, losses, value, *told, gradient)

    def model(self, state: State) -> Vector:
        """Return the last model."""
        return state.x

    def wrapped(self) -> Accelerated:
        """Return the algorithm as training runs it."""
        return accelerate(self)
