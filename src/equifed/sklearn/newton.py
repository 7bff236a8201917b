"""Newton's method for the client weights and the model together: few rounds, exact solutions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from equifed.contract.algorithm import Info, Proof
from equifed.contract.arrays import ClientVectors, Losses, Vector, Weights
from equifed.contract.clients import Clients, MissingClients
from equifed.contract.streams import Stream
from equifed.models.newton import inverse_root
from equifed.objectives.base import SaddleObjective, check_saddle

ARMIJO = 1e-4
"""Share of the decrease that the model of the objective promises and a step must keep."""
SHORTEST = 2.0**-40
"""Steps shorter than this are not tried: rounding decides about them."""
DUAL_STEPS = 5000
"""Most steps of the inner problem, which costs no exchange."""


@dataclass(frozen=True)
class State:
    """Model and weights."""

    x: Vector
    weights: Weights


@dataclass(frozen=True)
class Newton:
    r"""Newton's method on :math:`\min_x \max_{\lambda \in \Lambda} F(x, \lambda)`.

    .. math::

       H &= \textstyle\sum_i \lambda_i \nabla^2 f_i(x), \qquad G = (\nabla f_1(x), \ldots) \\
       \lambda &\leftarrow \arg\max_{\lambda \in \Lambda}\ \langle \lambda, l\rangle - \psi(\lambda)
                 - \tfrac12 |G \lambda|^2_{H^{-1}} \\
       x &\leftarrow x - t H^{-1} G \lambda

    The second line is the dual of :math:`\min_\Delta \Phi(l + G^\top \Delta) + \frac12
    \Delta^\top H \Delta` and has one variable per client; t is halved until the objective falls.
    With the average it is Newton's method (IRLS for logistic regression), which is as quick on
    features of very different scales. It asks for a d x d matrix and every client's gradient, so it
    is for data in one place and models of some hundred parameters; a federation that may not show
    these runs SCAFF-PD. Directions in which nothing is known (H is zero) are left alone.

    ``numbers`` of a round: ``decrement`` = the length of the step in the norm of H and of what the
    weights could still gain, zero at the solution; ``step`` = t, 0 if rounding allows no step.

    Parameters
    ----------
    objective : SaddleObjective
        With weights that are never negative and sum to one.
    """

    objective: SaddleObjective

    def __post_init__(self) -> None:
        check_saddle(self.objective, "Newton's method")
        if not self.objective.l1_norm(2) <= 1 + 1e-9:
            raise ValueError(
                "Newton's method needs weights >= 0 that sum to one, which "
                f"{self.objective!r} does not promise; use SCAFF-PD."
            )

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(x, self.objective.start(len(clients.names)))

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one step."""
        if len(clients.index) < len(clients.names):
            raise ValueError("Newton's method needs an answer of every client; use SCAFF-PD.")
        x = state.x
        losses, gradients = clients.value_and_gradient(x, stream.at("gradient"))
        hessian = clients.hessian(x, state.weights)
        if isinstance(hessian, str):
            raise ValueError(f"Newton's method needs second derivatives: {hessian}; use SCAFF-PD.")
        root = inverse_root(hessian)
        weights = self._weights(losses, gradients, root, state.weights)
        gradient = gradients.weighted_sum(weights)
        inside = root.T @ gradient
        direction, length = root @ inside, float(inside @ inside)
        value = self.objective.value(losses)
        slack = value - float(weights @ losses) + self.objective.penalty(weights)
        slack = slack if slack > 8 * np.finfo(np.float64).eps * abs(value) else 0.0
        promised = slack + 0.5 * length
        t = self._step(clients, x, direction, value, promised, stream)
        numbers = {"decrement": float(np.sqrt(2 * promised)), "step": t}
        proof = Proof(x, losses, weights, gradient, self.objective)
        info = Info(weights, losses, value, numbers=numbers, proof=proof)
        return State(x - t * direction if t else x, weights), info

    def model(self, state: State) -> Vector:
        """Return the last model."""
        return state.x

    def _weights(
        self, losses: Losses, gradients: ClientVectors, root: Vector, start: Weights
    ) -> Weights:
        """Return the weights of the second line, by accelerated proximal steps with restarts."""
        n = len(losses)
        if n == 1:
            return start
        inside = torch.stack([gradients.weighted_sum(row) for row in np.eye(n)]) @ root
        coupling = (inside @ inside.T).cpu().numpy()
        steepest = float(np.linalg.eigvalsh(coupling)[-1])
        if not steepest > 0:
            return self.objective.weights(losses)
        step, w, ahead, momentum = 1 / steepest, start, start, 1.0
        for _ in range(DUAL_STEPS):
            new = self.objective.prox(ahead + step * (losses - coupling @ ahead), step)
            if float((ahead - new) @ (new - w)) > 0:
                momentum, ahead = 1.0, new  # it has overshot
            else:
                following = 0.5 + np.sqrt(0.25 + momentum**2)
                ahead = new + (momentum - 1) / following * (new - w)
                momentum = following
            w, moved = new, float(np.abs(new - w).max())
            if moved <= 1e-14:
                break
        return w

    def _step(
        self, clients: Clients, x: Vector, direction: Vector, value: float, promised: float,
        stream: Stream,
    ) -> float:  # fmt: skip
        """Return how far to go: 1, 1/2, 1/4, ... until the objective falls as promised."""
        t, rounding = 1.0, 8 * np.finfo(np.float64).eps * abs(value)
        while t > SHORTEST and promised > 0:
            try:
                there = self.objective.value(clients.losses(x - t * direction, stream.at("step")))
                if there <= value - ARMIJO * t * promised + rounding:
                    return t
            except MissingClients:  # too far: the numbers overflowed
                pass
            t /= 2
        return 0.0
