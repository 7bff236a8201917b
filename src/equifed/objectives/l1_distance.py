"""Absolute distance to a prior."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from equifed.contract.arrays import Losses, Weights
from equifed.objectives.checks import distribution, finite, frozen_numbers, step_size, strength_of
from equifed.objectives.projections import clipped_difference, piecewise_root


@dataclass(frozen=True)
class L1Distance:
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

    def __post_init__(self) -> None:
        strength_of(self.strength, "L1Distance strength")
        object.__setattr__(self, "prior", frozen_numbers(self.prior, "L1Distance prior"))

    def value(self, losses: Losses) -> float:
        """Return the mean loss after every loss is raised to the largest less 2 tau."""
        losses = finite(losses, "losses")
        raised = np.maximum(losses, losses.max() - 2.0 * self.strength)
        return float(self.start(losses.size) @ raised)

    def weights(self, losses: Losses) -> Weights:
        """Return the prior with the mass of well-served clients moved to the worst."""
        losses = finite(losses, "losses")
        prior = self.start(losses.size)
        gives = losses < losses.max() - 2.0 * self.strength
        worst = losses == losses.max()
        return np.asarray(np.where(gives, 0.0, prior) + worst * (prior[gives].sum() / worst.sum()))

    def penalty(self, weights: Weights) -> float:
        """Return tau |w - p|_1."""
        weights = finite(weights, "weights")
        return self.strength * float(np.abs(weights - self.start(weights.size)).sum())

    def prox(self, point: Weights, step: float) -> Weights:
        r"""Balance what the raised clients gain with what the lowered ones give.

        With u = point - p and c = step tau, the shift nu = max u - c - theta has theta in [0, 1];
        with a = max u - u, client i gains (theta - a_i)_+ and gives min(p_i, (a_i - 2c - theta)_+).
        theta is found exactly by sorting the 3n break points: O(n log n).
        """
        point = finite(point, "point")
        prior = self.start(point.size)
        u = point - prior
        with np.errstate(over="ignore"):
            a = u.max() - u
            beyond = clipped_difference(a, 2.0 * step_size(step) * self.strength, 2.0)
        a = np.minimum(a, 2.0)

        def excess(theta: float) -> float:
            gained = np.maximum(theta - a, 0.0).sum()
            return float(np.clip(beyond - theta, 0.0, prior).sum() - gained)

        breaks = np.concatenate([[0.0, 1.0], np.clip([a, beyond, beyond - prior], 0, 1).ravel()])
        theta = piecewise_root(excess, breaks)
        return np.asarray(prior - np.clip(beyond - theta, 0.0, prior) + np.maximum(theta - a, 0.0))

    def start(self, n: int) -> Weights:
        """Return the prior."""
        return distribution(self.prior, n, "L1Distance prior")

    def strong_convexity(self, n: int) -> float:
        """Return 0."""
        return 0.0

    def l1_norm(self, n: int) -> float:
        """Return 1."""
        return 1.0
