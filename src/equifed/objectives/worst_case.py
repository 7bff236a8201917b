"""The largest client loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from equifed.contract.arrays import Losses, Weights
from equifed.objectives.checks import finite
from equifed.objectives.permutahedron import Permutahedron


@dataclass(frozen=True)
class WorstCase:
    r"""Loss of the client that is served worst (agnostic federated learning).

    .. math:: \Phi(\ell) = \max_i \ell_i, \qquad
        \Lambda = \{w \ge 0, \textstyle\sum_i w_i = 1\}, \quad \psi = 0

    One client that reports a large loss takes the whole weight; ``CVaR`` caps what one can take.

    Examples
    --------
    >>> WorstCase().value(np.array([1.0, 4.0, 2.0]))
    4.0
    >>> WorstCase().prox(np.array([0.2, 1.4, 0.0]), step=1.0)
    array([0., 1., 0.])

    References
    ----------
    Mohri et al. 2019 (AFL); SCAFF-PD (3.3) with rho = 0.
    """

    def value(self, losses: Losses) -> float:
        """Return the largest loss."""
        return float(finite(losses, "losses").max())

    def weights(self, losses: Losses) -> Weights:
        """Return the uniform weights on the clients with the largest loss."""
        losses = finite(losses, "losses")
        worst = losses == losses.max()
        return np.asarray(worst / worst.sum())

    def penalty(self, weights: Weights) -> float:
        """Return 0."""
        return 0.0

    def prox(self, point: Weights, step: float) -> Weights:
        """Project onto the simplex."""
        point = finite(point, "point")
        return self.permutahedron(point.size).project(point)

    def start(self, n: int) -> Weights:
        """Return uniform weights."""
        return np.full(n, 1.0 / n)

    def strong_convexity(self, n: int) -> float:
        """Return 0."""
        return 0.0

    def l1_norm(self, n: int) -> float:
        """Return 1."""
        return 1.0

    def permutahedron(self, n: int) -> Permutahedron:
        """Return the simplex."""
        return Permutahedron(corner=np.eye(1, n)[0], offset=np.zeros(n))

    def caps(self, n: int) -> Weights:
        """Return 1 for every client."""
        return np.ones(n)
