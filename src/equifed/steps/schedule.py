"""What a schedule of step sizes is, what it may look at, and what it says.

A schedule yields the step sizes of the first round and turns those of one round into those of the
next, so that the current ones are part of the algorithm's state and a run can be resumed anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from equifed.contract import Clients, ClientVectors, LocalSGD, Stream, Vector, Weights
from equifed.objectives.base import SaddleObjective


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
    """

    primal: float
    dual: float
    extrapolation: float
    local: float | None = None
    gamma: float | None = None
    round: int = 0
    rate: float | None = None

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

    def halved(self) -> StepSizes | None:
        """Return half the step sizes; None where they were chosen by somebody and stay."""
        return None


class PrimalDual(Protocol):
    """The algorithm that the step sizes are for, as far as a schedule may look at it."""

    @property
    def objective(self) -> SaddleObjective:
        """Set and penalty of the weights."""
        ...

    @property
    def local(self) -> LocalSGD:
        """Local work."""
        ...

    @property
    def gradient_batch_size(self) -> int | None:
        """Samples for losses and gradients; None means all."""
        ...


@dataclass(frozen=True, eq=False)
class Problem:
    """What a schedule may look at in the first round, after the first gradients."""

    algorithm: PrimalDual
    clients: Clients
    x: Vector
    gradients: ClientVectors
    stream: Stream


@dataclass(frozen=True, eq=False)
class WeightChange:
    """How the weights turned in a round, and what shows what that does to the model.

    Parameters
    ----------
    change : Weights
        How far the weights of those present turned.
    weights : Weights
        The weights of all.
    gradients : ClientVectors
        Gradients of those present.
    """

    change: Weights
    weights: Weights
    gradients: ClientVectors

    def coupling(self) -> float | None:
        r"""Return :math:`|\sum_i \Delta\lambda_i c_i|^2 / |\Delta\lambda|^2`; None without a turn.

        Where sums are hidden and this one beside the first would show too much, None as well.
        One more weighted sum of the gradients, in the exchange that asks for their first.
        """
        turned = float(self.change @ self.change)
        if turned <= 1e-24 * float(self.weights @ self.weights):
            return None
        if not self.gradients.allows(self.change):
            return None
        moved = self.gradients.weighted_sum(self.change)
        return float(moved @ moved) / turned


class Schedule(Protocol):
    """Step sizes, round after round."""

    def start(self, problem: Problem) -> StepSizes:
        """Return the step sizes of the first round; may ask the clients."""
        ...

    def next(self, sizes: StepSizes, turned: WeightChange) -> StepSizes:
        """Return the step sizes of the round after the one that used ``sizes``."""
        ...


def share_of_latest(t: int, decay: float = 3.0) -> float:
    r"""Return what the last of t values counts in their mean, in which later ones count more.

    .. math:: \bar x_t = \bar x_{t-1} + \frac{\eta + 1}{t + \eta} (x_t - \bar x_{t-1})

    (polynomial-decay averaging, Shamir and Zhang 2013, Section 4). Value s counts about as
    :math:`s^\eta`: all alike for 0, those of the last half about 94 % for 3.

    >>> share_of_latest(1), share_of_latest(4, decay=0)
    (1.0, 0.25)
    """
    return (decay + 1) / (t + decay)
