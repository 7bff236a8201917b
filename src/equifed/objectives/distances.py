"""Distances to a prior: absolute and squared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from equifed.contract.arrays import Losses, Weights
from equifed.objectives.base import PriorPenalty, check_step, check_vector
from equifed.objectives.chi_square import ChiSquare
from equifed.objectives.projections import clipped_difference, piecewise_root


@dataclass(frozen=True)
class L1Distance(PriorPenalty):
    r"""Worst weighted loss, where weights pay their absolute distance from a prior p.

    .. math:: \Phi(\ell) = \max_{w \in \Delta} \langle w, \ell\rangle - \tau \sum_i |w_i - p_i|
        = \sum_i p_i \max(\ell_i,\ \max_j \ell_j - 2\tau)

    Moving mass from one client to another costs twice its amount, so the worst client takes the
    mass of every client whose loss is more than 2 tau below: the penalty is twice tau times the
    total-variation distance.

    Parameters
    ----------
    strength
        tau > 0.
    prior
        Positive numbers, one per client, normalised to sum one; None is uniform.

    Examples
    --------
    >>> L1Distance(strength=0.5).weights(np.array([1.0, 3.5, 4.0, 0.0]))
    array([0.  , 0.25, 0.75, 0.  ])
    >>> L1Distance(strength=0.5).value(np.array([1.0, 3.5, 4.0, 0.0]))
    3.375

    References
    ----------
    DRFA Section 5 ("l_p distance"), with g = -psi in (5).
    """

    strength: float
    prior: tuple[float, ...] | None = None

    @override
    def value(self, losses: Losses) -> float:
        losses = check_vector(losses, "losses")
        raised = np.maximum(losses, losses.max() - 2.0 * self.strength)
        return float(self.start(losses.size) @ raised)

    @override
    def weights(self, losses: Losses) -> Weights:
        losses = check_vector(losses, "losses")
        prior = self.start(losses.size)
        gives = losses < losses.max() - 2.0 * self.strength
        worst = losses == losses.max()
        return np.asarray(np.where(gives, 0.0, prior) + worst * (prior[gives].sum() / worst.sum()))

    @override
    def penalty(self, weights: Weights) -> float:
        weights = check_vector(weights, "weights")
        return self.strength * float(np.abs(weights - self.start(weights.size)).sum())

    @override
    def prox(self, point: Weights, step: float) -> Weights:
        r"""Balance what the raised clients gain with what the lowered ones give.

        With u = point - p and c = step tau, the shift nu = max u - c - theta has theta in [0, 1];
        with a = max u - u, client i gains (theta - a_i)_+ and gives min(p_i, (a_i - 2c - theta)_+).
        theta is found exactly by sorting the 3n break points: O(n log n).
        """
        point = check_vector(point, "point")
        prior = self.start(point.size)
        u = point - prior
        with np.errstate(over="ignore"):
            a = u.max() - u
            beyond = clipped_difference(a, 2.0 * check_step(step) * self.strength, 2.0)
        a = np.minimum(a, 2.0)

        def excess(theta: float) -> float:
            gained = np.maximum(theta - a, 0.0).sum()
            return float(np.clip(beyond - theta, 0.0, prior).sum() - gained)

        breaks = np.concatenate([[0.0, 1.0], np.clip([a, beyond, beyond - prior], 0, 1).ravel()])
        theta = piecewise_root(excess, breaks)
        return np.asarray(prior - np.clip(beyond - theta, 0.0, prior) + np.maximum(theta - a, 0.0))


@dataclass(frozen=True)
class L2Distance(PriorPenalty):
    r"""Worst weighted loss, where weights pay their squared Euclidean distance from a prior p.

    .. math:: \psi(w) = \tfrac{\tau}{2} |w - p|^2, \qquad \Lambda = \Delta

    DRFA names "l_p distance" without a power. The square is tau-strongly convex, which DRFA's
    Section 5.2 requires, and is chi-square with rho = tau / n around p.

    Parameters
    ----------
    strength
        tau > 0.
    prior
        Positive numbers, one per client, normalised to sum one; None is uniform.

    Examples
    --------
    >>> L2Distance(strength=4.0).weights(np.array([1.0, 2.0]))
    array([0.375, 0.625])

    References
    ----------
    DRFA Section 5 and 5.2, with g = -psi in (5).
    """

    strength: float
    prior: tuple[float, ...] | None = None

    @override
    def weights(self, losses: Losses) -> Weights:
        return self._chi_square(len(losses)).weights(losses)

    @override
    def penalty(self, weights: Weights) -> float:
        weights = check_vector(weights, "weights")
        return self.strength * float(np.linalg.norm(weights - self.start(weights.size))) ** 2 / 2

    @override
    def prox(self, point: Weights, step: float) -> Weights:
        return self._chi_square(len(point)).prox(point, step)

    @override
    def penalty_gradient(self, weights: Weights) -> Weights:
        return self.strength * (weights - self.start(weights.size))

    @override
    def mirror(self, weights: Weights, losses: Losses, step: float) -> Weights:
        return self._chi_square(weights.size).mirror(weights, losses, step)

    @override
    def strong_convexity(self, n: int) -> float:
        return self.strength

    def _chi_square(self, n: int) -> ChiSquare:
        return ChiSquare(self.strength / n, centre=self.prior)
