"""What a schedule of step sizes is, what it may look at, and what it says.

A schedule yields the step sizes of the first round and turns those of one round into those of the
next, so that the current ones are part of the algorithm's state and a run can be resumed anywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from equifed.contract.arrays import Losses, Vector, Weights
from equifed.contract.clients import Clients, ClientVectors
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.objectives.base import SaddleObjective

if TYPE_CHECKING:
    from equifed.contract.curvature import Curvature


@dataclass(frozen=True, eq=False)
class Point:
    """A model, client weights, the losses there, and what it was worth (smaller is better)."""

    x: Vector
    weights: Weights
    losses: Losses | None = None
    merit: float = math.inf


@dataclass(frozen=True)
class StepSizes:
    """Step sizes of one round.

    Parameters
    ----------
    primal : float
        tau, of the model.
    dual : float
        sigma, of the weights.
    extrapolation : float
        theta, of the losses.
    local : float, optional
        eta, of the local steps; None leaves it to the local work.
    gamma, rate : float, optional
        Memory of the accelerated schedules: sigma / tau, and how fast it grows.
    round : int
        Rounds before this one.
    back : Point, optional
        Where to start this round from, if not where the last one ended.
    """

    primal: float
    dual: float
    extrapolation: float
    local: float | None = None
    gamma: float | None = None
    round: int = 0
    rate: float | None = None
    back: Point | None = None

    def numbers(self) -> dict[str, float]:
        """Return the step sizes for the round's record."""
        out = {
            "primal_step": self.primal,
            "dual_step": self.dual,
            "extrapolation": self.extrapolation,
        }
        return out if self.local is None else {**out, "local_step": self.local}

    def said(self) -> tuple[str, ...]:
        """Return what to tell about the choice of these sizes, if they were chosen."""
        return ()

    def retreat(self) -> StepSizes | None:
        """Return how to go on if no client could answer; None gives up."""
        return None


@dataclass(frozen=True, eq=False)
class Problem:
    """What a schedule may look at in the first round, after the first gradients."""

    clients: Clients
    x: Vector
    objective: SaddleObjective
    local: LocalSGD
    gradient_batch_size: int | None
    curvature: Curvature | str
    gradients: ClientVectors
    stream: Stream


@dataclass(frozen=True, eq=False)
class Seen:
    r"""What a round has shown when it ends.

    Parameters
    ----------
    point : Point
        The model the round started from, the weights it chose, the losses there.
    value : float
        The objective there.
    gap : float, optional
        The certified gap there.
    residual : float
        How far model and weights are from a saddle point:
        :math:`\Phi(x) - F(x, \lambda) + \tfrac{\tau}{2} |\nabla_x F(x, \lambda)|^2`.
    turn : Weights
        How far the weights of those present turned in this round.
    gradients : ClientVectors
        Their gradients.
    """

    point: Point
    value: float
    gap: float | None
    residual: float
    turn: Weights
    gradients: ClientVectors

    def coupling(self) -> float | None:
        r"""Return :math:`|\sum_i \Delta\lambda_i c_i|^2 / |\Delta\lambda|^2`; None without a turn.

        One more weighted sum of the gradients, in the exchange that asks for their first.
        """
        turned = float(self.turn @ self.turn)
        if turned <= 1e-24 * float(self.point.weights @ self.point.weights):
            return None
        moved = self.gradients.weighted_sum(self.turn)
        return float(moved @ moved) / turned


class Schedule(Protocol):
    """Step sizes, round after round."""

    def start(self, problem: Problem) -> StepSizes:
        """Return the step sizes of the first round; may ask the clients."""
        ...

    def next(self, sizes: StepSizes, seen: Seen) -> StepSizes:
        """Return the step sizes of the round after the one that used ``sizes``."""
        ...
