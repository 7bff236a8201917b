"""Euclidean distance to a prior, squared or plain."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equifed.contract.arrays import Losses, Weights
from equifed.objectives.checks import distribution, finite, frozen_numbers, step_size, strength_of
from equifed.objectives.chi_square import ChiSquare
from equifed.objectives.projections import project_capped_simplex


@dataclass(frozen=True)
class L2Distance:
    r"""Worst weighted loss, where weights pay their Euclidean distance from a prior p.

    .. math:: \psi(w) = \tfrac{\tau}{2} |w - p|^2 \ \text{(squared)}, \qquad
        \psi(w) = \tau |w - p| \ \text{(plain)}, \qquad \Lambda = \Delta

    DRFA names "l_p distance" without a power. Squared is the default: it is tau-strongly convex,
    which DRFA's Section 5.2 requires, and is chi-square with rho = tau / n around p. The plain
    norm keeps the weights *at* the prior until the losses differ by more than tau.

    Parameters
    ----------
    strength
        tau > 0.
    prior
        Positive numbers, one per client, normalised to sum one; None is uniform.
    squared
        Which of the two.

    Examples
    --------
    >>> L2Distance(strength=4.0).weights(np.array([1.0, 2.0]))
    array([0.375, 0.625])
    >>> L2Distance(strength=4.0, squared=False).weights(np.array([1.0, 2.0]))
    array([0.5, 0.5])

    References
    ----------
    DRFA Section 5 and 5.2, with g = -psi in (5).
    """

    strength: float
    prior: tuple[float, ...] | None = None
    squared: bool = True

    def __post_init__(self) -> None:
        strength_of(self.strength, "L2Distance strength")
        object.__setattr__(self, "prior", frozen_numbers(self.prior, "L2Distance prior"))

    def value(self, losses: Losses) -> float:
        """Return max over the simplex of <w, l> - psi(w)."""
        losses = finite(losses, "losses")
        weights = self.weights(losses)
        return float(weights @ losses) - self.penalty(weights)

    def weights(self, losses: Losses) -> Weights:
        """Return the maximiser."""
        losses = finite(losses, "losses")
        if self.squared:
            return self._chi_square(losses.size).weights(losses)
        return _follow(self.start(losses.size), losses, self.strength, limit=np.inf)

    def penalty(self, weights: Weights) -> float:
        """Return psi(w)."""
        weights = finite(weights, "weights")
        away = float(np.linalg.norm(weights - self.start(weights.size)))
        return self.strength * (away**2 / 2 if self.squared else away)

    def prox(self, point: Weights, step: float) -> Weights:
        """Return the dual step; for the plain norm by one monotone root."""
        point = finite(point, "point")
        if self.squared:
            return self._chi_square(point.size).prox(point, step)
        prior = self.start(point.size)
        return _follow(prior, point - prior, step_size(step) * self.strength, limit=1.0)

    def mirror(self, weights: Weights, losses: Losses, step: float) -> Weights:
        """Return the entropic step; the plain norm has none."""
        if not self.squared:
            raise ValueError(
                "L2Distance(squared=False) has no exact entropic step; use squared=True or the "
                "Euclidean step."
            )
        return self._chi_square(weights.size).mirror(weights, losses, step)

    def start(self, n: int) -> Weights:
        """Return the prior."""
        return distribution(self.prior, n, "L2Distance prior")

    def strong_convexity(self, n: int) -> float:
        """Return tau if squared, else 0."""
        return self.strength if self.squared else 0.0

    def l1_norm(self, n: int) -> float:
        """Return 1."""
        return 1.0

    def _chi_square(self, n: int) -> ChiSquare:
        return ChiSquare(self.strength / n, centre=self.prior)


def _follow(prior: Weights, direction: Weights, price: float, limit: float) -> Weights:
    r"""Go from the prior along a direction, projected, until the pull falls to the price.

    Let Q(u) be the projection of prior + u direction onto the simplex and R(u) = |Q(u) - prior|.
    The answer is Q(u) at the root of

        R(u) / u = price / (1 - u / limit)

    or the prior if the left side starts below. With limit 1 and direction point - prior that is
    the prox of price |w - prior|; with limit infinite and direction l the maximiser of
    <w, l> - price |w - prior|.

    While the same clients keep a positive weight, (R/u)^2 = V + K x with x = 1 / u^2: a concave,
    increasing, piecewise linear function of x. Newton's method from its far end solves one piece
    exactly at a time, never passes the root and meets no piece twice.
    """
    direction = direction - direction.max()
    size = float(-direction.min())
    if size == 0.0:
        return prior
    direction, price, limit = direction / size, price / size, limit * size  # u in units of 1/size
    if np.linalg.norm(direction - direction.mean()) <= price:
        return prior

    def walk(u: float) -> Weights:
        return project_capped_simplex(prior + u * direction, np.ones(prior.size))

    kept, u = (walk(limit) > 0 if limit < np.inf else direction == 0.0), limit
    while True:
        root = _root_of_piece(prior, direction, kept, price, limit)
        answer = walk(root)
        if root >= u or np.array_equal(answer > 0, kept):
            return answer
        kept, u = answer > 0, root


def _root_of_piece(
    prior: Weights, direction: Weights, kept: NDArray[np.bool_], price: float, limit: float
) -> float:
    """Return the u of ``_follow`` if exactly the clients ``kept`` have positive weight."""
    along = direction[kept] - direction[kept].mean()
    pull = float(np.linalg.norm(along))  # sqrt V
    lost = prior[~kept]
    still = float(np.hypot(lost.sum() / np.sqrt(kept.sum()), np.linalg.norm(lost)))  # sqrt K
    low, high = 1e-300, min(limit, 1e300)
    while True:  # bisection, by ratios until the ends are within a factor of two
        u = float(np.sqrt(low) * np.sqrt(high)) if high > 2.0 * low else 0.5 * (low + high)
        if not low < u < high:
            return low
        too_far = (1.0 - u / limit) * float(np.hypot(pull, still / u)) <= price
        low, high = (low, u) if too_far else (u, high)
