"""Powers of the distance to a prior, client by client."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from equifed.contract.arrays import Losses, Weights
from equifed.objectives.base import PriorPenalty, check_step, check_vector
from equifed.objectives.roots import balance, power_roots


@dataclass(frozen=True)
class LpDistance(PriorPenalty):
    r"""Worst weighted loss, where weights pay a power of their distance from a prior p.

    .. math:: \psi(w) = \frac{\tau}{r} \sum_i |w_i - p_i|^r, \qquad \Lambda = \Delta, \quad r > 1

    the r-th power of the l_r distance, as DRFA's "l_p distance" is read here. ``power = 2`` is
    ``L2Distance``. A power near 1 keeps the weights of most clients near the prior and moves a few
    (as ``L1Distance`` does, for which it is a smooth stand-in); a large one moves all by about the
    same amount. The penalty is tau (r - 1)-strongly convex on the simplex for r <= 2.

    Both steps have one multiplier, a monotone scalar root, in which every client's weight is
    another one.

    Parameters
    ----------
    power
        r > 1.
    strength
        tau > 0.
    prior
        Positive numbers, one per client, normalised to sum one; None is uniform.

    Examples
    --------
    >>> LpDistance(power=2.0, strength=4.0).weights(np.array([1.0, 2.0]))
    array([0.375, 0.625])
    >>> LpDistance(power=3.0, strength=4.0).weights(np.array([1.0, 1.5]))  # tau 0.25^2 = 0.25
    array([0.25, 0.75])

    References
    ----------
    DRFA Section 5 ("l_p distance"), with g = -psi in (5).
    """

    power: float
    strength: float = 1.0
    prior: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 < self.power < np.inf:
            raise ValueError(
                f"LpDistance power must be a finite number > 1, got {self.power}; for 1 use "
                "L1Distance."
            )

    @override
    def weights(self, losses: Losses) -> Weights:
        losses = check_vector(losses, "losses")
        q, prior = 1.0 / (self.power - 1.0), self.start(losses.size)

        def reply(pull: Weights) -> Weights:  # tau |d|^(r-1) = |pull|
            return np.copysign(np.minimum(np.abs(pull) / self.strength, 1.0) ** q, pull)

        with np.errstate(over="ignore"):
            return balance(reply, losses.max() - losses, prior, reach=self.strength)

    @override
    def penalty(self, weights: Weights) -> float:
        weights = check_vector(weights, "weights")
        away = np.abs(weights - self.start(weights.size))
        return self.strength / self.power * float((away**self.power).sum())

    @override
    def prox(self, point: Weights, step: float) -> Weights:
        point = check_vector(point, "point")
        q, prior = 1.0 / (self.power - 1.0), self.start(point.size)
        price, ones = check_step(step) * self.strength, np.ones(point.size)

        def reply(pull: Weights) -> Weights:  # |d| + s tau |d|^(r-1) = |pull|
            return np.copysign(power_roots(np.abs(pull), price, ones, q), pull)

        with np.errstate(over="ignore"):
            away = point - prior
            return balance(reply, away.max() - away, prior, reach=1.0 + price)

    @override
    def penalty_gradient(self, weights: Weights) -> Weights:
        away = weights - self.start(weights.size)
        return np.asarray(self.strength * np.copysign(np.abs(away) ** (self.power - 1.0), away))

    @property
    @override
    def is_smooth(self) -> bool:
        return True

    @override
    def strong_convexity(self, n: int) -> float:
        # tau (r - 1) |w - p|^(r - 2) with |w - p| <= 1
        return self.strength * (self.power - 1.0) if self.power <= 2 else 0.0
