"""SCAFF-PD: accelerated primal-dual steps with bias-corrected local steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from equifed.contract.algorithm import Info
from equifed.contract.arrays import Losses, Vector, Weights
from equifed.contract.clients import Clients, ClientVectors, MissingClients
from equifed.contract.curvature import Curvature
from equifed.contract.local import LocalSGD
from equifed.contract.participation import (
    carry_over,
    check_participation,
    sample_clients,
    scale_to_present,
)
from equifed.contract.streams import Stream
from equifed.objectives.base import SaddleObjective
from equifed.steps.automatic import AutoSizes, AutoSteps
from equifed.steps.certificate import Certificate, Certify, Place
from equifed.steps.schedule import Point, Problem, Schedule, Seen, StepSizes

__all__ = ["AutoSizes", "Curvature", "Point", "ScaffPD", "State", "StepSizes"]  # a state holds them


@dataclass(frozen=True)
class State:
    """The model, the client weights, the last losses, the step sizes in force, what is known.

    Before the first round there are no losses, no step sizes, and nothing is known of the losses'
    curvature; if nothing can be known it is the reason.
    """

    x: Vector
    weights: Weights
    losses: Losses | None = None
    sizes: StepSizes | None = None
    curvature: Curvature | str | None = None
    round: int = 0


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

    With full gradients, everybody present and strongly convex losses every round proves how far it
    is from the optimum (:mod:`equifed.steps.certificate`), at no further exchange.

    Parameters
    ----------
    objective : SaddleObjective
        Set and penalty of the weights.
    local : LocalSGD
        J steps of size eta, which the schedule may set (the automatic one does).
    steps : Schedule
        tau, sigma and theta of every round; automatic unless given.
    gradient_batch_size : int, optional
        Samples for the losses and the control variates; None means all of them.
    participation : float
        Fraction of clients in a round.
    certify : Certify
        What to state about the losses for the certificate, where it cannot be found out.
    """

    objective: SaddleObjective
    local: LocalSGD = LocalSGD(lr=1.0, steps=8)  # noqa: RUF009 - a frozen value
    steps: Schedule = AutoSteps()  # noqa: RUF009 - a frozen value
    gradient_batch_size: int | None = None
    participation: float = 1.0
    certify: Certify = Certify()  # noqa: RUF009 - a frozen value

    def __post_init__(self) -> None:
        check_participation(self.participation)

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(x, self.objective.start(len(clients.names)))

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round, or after stepping back if everybody overflowed."""
        clients = sample_clients(clients, self.participation, stream)
        try:
            return self._round(state, clients, stream)
        except MissingClients as lost:
            sizes = None if state.sizes is None else state.sizes.retreat()
            if sizes is None or not _overflow(lost, len(clients.index)):
                raise
            return self._back(state, sizes)

    def _round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """One line of code for one line of the paper."""
        x, n = state.x, len(clients.names)
        seen, gradients = clients.value_and_gradient(
            x, stream.at("gradient"), self.gradient_batch_size
        )
        state = self._prepared(state, clients, gradients, stream)
        size, local = self._sizes(state)
        losses = carry_over(state.losses, clients.index, seen, n)
        before = losses if state.losses is None else state.losses
        ahead = losses + size.extrapolation * (losses - before)  # s
        weights = self.objective.prox(state.weights + size.dual * ahead, size.dual)  # (4.1)
        present = scale_to_present(weights, clients.index)
        target = gradients.weighted_sum(present)  # c
        moved = clients.local_steps(x, local, stream.at("local"), control=gradients, target=target)
        update = moved.displacement.weighted_sum(present / (local.lr * moved.steps))
        point = Point(x - size.primal * update, weights, losses)  # (4.2)

        value = self.objective.value(losses)
        place = Place(x, losses, weights, target, self.gradient_batch_size is None, state.round)
        proof = self.certify(self.objective, state.curvature, clients, place, stream)
        gap = proof.gap if isinstance(proof, Certificate) else None
        turn = present - scale_to_present(state.weights, clients.index)
        slack = value - float(weights @ losses) + self.objective.penalty(weights)
        residual = slack + 0.5 * size.primal * float(target @ target)
        here = Point(x, weights, losses)
        after = self.steps.next(size, Seen(here, value, gap, residual, turn, gradients))
        numbers = size.numbers() | (proof.numbers() if isinstance(proof, Certificate) else {})
        notes = size.said() if state.round == 0 else ()
        notes += (f"no certificate: {proof}",) if isinstance(proof, str) else ()
        info = Info(weights, losses, value, clients.index, numbers, notes)
        return _moved(state, after.back or point, after), info

    def _prepared(
        self, state: State, clients: Clients, gradients: ClientVectors, stream: Stream
    ) -> State:
        """Return the state with step sizes, which the first round has to choose."""
        if state.sizes is not None:
            return state
        curvature = self.certify.curvature(clients)
        problem = Problem(
            clients, state.x, self.objective, self.local, self.gradient_batch_size, curvature,
            gradients, stream.at("steps"),
        )  # fmt: skip
        return replace(state, sizes=self.steps.start(problem), curvature=curvature)

    def _sizes(self, state: State) -> tuple[StepSizes, LocalSGD]:
        assert state.sizes is not None
        own = state.sizes.local
        return state.sizes, self.local if own is None else replace(self.local, lr=own)

    def _back(self, state: State, sizes: StepSizes) -> tuple[State, Info]:
        """Go back to the best point after a round in which everybody overflowed."""
        best = sizes.back
        assert best is not None and best.losses is not None
        value = self.objective.value(best.losses)
        note = "local steps overflowed: back to the best model with half the step size"
        info = Info(best.weights, best.losses, value, None, sizes.numbers(), (note,))
        return _moved(state, best, sizes), info

    def model(self, state: State) -> Vector:
        """Return the last model."""
        return state.x


def _overflow(lost: MissingClients, present: int) -> bool:
    """Tell whether everybody's numbers grew out of bounds, rather than clients being away."""
    reasons = lost.reasons.values()
    return len(reasons) == present and all(r.endswith(("inf", "nan")) for r in reasons)


def _moved(state: State, point: Point, sizes: StepSizes) -> State:
    return State(
        point.x, point.weights, point.losses, replace(sizes, back=None), state.curvature,
        state.round + 1,
    )  # fmt: skip
