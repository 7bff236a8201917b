"""SCAFF-PD: accelerated primal-dual steps with bias-corrected local steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from equifed.algorithms.absence import call_roll
from equifed.algorithms.safeguarded import Automatic
from equifed.contract import Clients, Index, LocalSGD, Losses, Stream, Vector, Weights
from equifed.contract.absence import PATIENCE, sample_clients
from equifed.contract.algorithm import Federated, Info, Proof
from equifed.objectives.base import SaddleObjective, check_saddle
from equifed.steps.automatic import AutoSteps
from equifed.steps.schedules import Problem, Schedule, StepSizes, WeightChange


@dataclass(frozen=True)
class State:
    """Model, weights, last losses, step sizes in force, rounds since each client's last answer."""

    x: Vector
    weights: Weights
    losses: Losses | None = None  # None before the first round, as are the next two
    sizes: StepSizes | None = None
    away: Index | None = None


@dataclass(frozen=True)
class ScaffPD(Automatic, Federated):
    r"""SCAFF-PD (Yu et al. 2023), Algorithms 1 and 2.

    .. math::

       \min_x\ &\max_{\lambda \in \Lambda} \textstyle\sum_i \lambda_i f_i(x) - \psi(\lambda) \\
       s &= l + \theta\,(l - l_{\text{prev}}) \\
       \lambda &\leftarrow \mathrm{prox}(\lambda + \sigma s, \sigma) && (4.1) \\
       c &= \textstyle\sum_i \lambda_i c_i, \quad c_i = \nabla f_i(x) \\
       u_i &\leftarrow u_i - \eta\,(g_i(u_i) - c_i + c) \quad J \text{ times from } u_i = x,
              \qquad d_i = (x - u_i)/(\eta J) \\
       x &\leftarrow x - \tau \textstyle\sum_i \lambda_i d_i && (4.2)

    The server's step of Lemma D.2 is :math:`\eta_g = \tau / (J \eta)`: the last line is
    :math:`x - \eta_g \sum_i \lambda_i (x - u_i)`. A local step below :math:`\tau / J` is
    :math:`\eta_g > 1`.

    The first :math:`l_\text{prev}`, open in the paper, is l, also for those who were away. Where
    the sum S of lambda is free (q-fair), lambda / S moves x. Absent clients: :mod:`.absence`.

    Automatic steps can be too bold for a network; training then adds :class:`.Safeguarded`, which
    goes back and halves them.

    Parameters
    ----------
    objective : SaddleObjective
        Set Lambda and penalty psi of the weights; with ``RelativeFairness`` it is SCAFF-PD-IA.
    local, steps
        J steps of size eta, which the schedule may set; tau, sigma and theta of every round.
    gradient_batch_size, loss_batch_size
        Samples for the c_i and for l; None: all.
    participation, patience
        Fraction of clients in a round; rounds without an answer after which one leaves Lambda.

    References
    ----------
    Yu, Karimireddy, Ma, Jordan. "SCAFF-PD: communication efficient fair and robust federated
    learning." 2023.

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> fair = ef.ScaffPD(ef.objectives.ChiSquare(rho=0.1))
    >>> history = ef.train(fair, clients, rounds=20, evaluate=["test"], every=20)
    >>> round(min(history.per_client().values()), 1)  # the worst-served client; FedAvg: 0.4
    0.7
    """

    objective: SaddleObjective
    local: LocalSGD = LocalSGD(lr=1.0, steps=8)  # noqa: RUF009 - a frozen value
    steps: Schedule = AutoSteps()  # noqa: RUF009 - a frozen value
    gradient_batch_size: int | None = None
    participation: float = 1.0
    loss_batch_size: int | None = None
    patience: int = PATIENCE

    one_sum: ClassVar = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_saddle(self.objective, "SCAFF-PD")

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(x, self.objective.start(len(clients.names)))

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round: one line of code for one line of the paper."""
        x, batches = state.x, (self.gradient_batch_size, self.loss_batch_size)
        clients = sample_clients(clients, self.participation, stream)
        everyone = call_roll(self, state, clients)
        losses, c = everyone.value_and_gradient(x, stream.at("gradient"), batches[0])  # l, c_i
        if batches[0] != batches[1]:
            losses = everyone.losses(x, stream.at("losses"), batches[1])
        size = state.sizes or self.steps.start(Problem(self, clients, x, c, stream.at("steps")))
        local = self.local if size.local is None else replace(self.local, lr=size.local)
        objective, old = everyone.objective, everyone.weights
        ahead = losses + size.extrapolation * (losses - everyone.previous(losses))  # s
        weights = objective.prox(old + size.dual * ahead, size.dual)  # (4.1)
        share = weights / objective.total(weights)  # lambda, or lambda / S
        target = c.step(share)  # c
        moved = everyone.local_steps(x, local, stream.at("local"), control=c, target=target)
        update = moved.displacement.weighted_sum(share / (local.lr * moved.steps))
        new_x = x - size.primal * update  # (4.2)
        sizes = self.steps.next(size, WeightChange(weights - old, weights, c))
        proof: Proof | str = "losses or gradients are of minibatches"
        if batches == (None, None):
            gradient = objective.total(weights) * target
            proof = Proof(x, losses, weights, gradient, objective)
        notes = (() if state.sizes else size.said()) + everyone.notes
        told = everyone.index, size.numbers(), notes, proof
        info = Info(weights, losses, objective.value(losses), *told)
        after = State(new_x, weights, losses, sizes, everyone.away)
        return replace(state, **vars(after)), info
