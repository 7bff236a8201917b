"""The average client loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from equifed.contract.arrays import Losses, Weights
from equifed.objectives.checks import distribution, finite, frozen_numbers
from equifed.objectives.permutahedron import Permutahedron


@dataclass(frozen=True)
class Average:
    r"""Mean loss of the clients, uniform or weighted by a prior.

    .. math:: \Phi(\ell) = \sum_i p_i \ell_i, \qquad \Lambda = \{p\}, \quad \psi = 0

    Parameters
    ----------
    prior
        Positive numbers, one per client (sample counts, say), normalised to sum one; None is
        uniform.

    Examples
    --------
    >>> Average().value(np.array([1.0, 2.0, 6.0]))
    3.0
    >>> Average(prior=(100, 100, 200)).weights(np.array([1.0, 2.0, 6.0]))
    array([0.25, 0.25, 0.5 ])

    References
    ----------
    FedAvg and SCAFFOLD. The averages that the SCAFF-PD and SCAFF-PD-IA papers report are uniform.
    """

    prior: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "prior", frozen_numbers(self.prior, "Average prior"))

    def value(self, losses: Losses) -> float:
        """Return the mean loss."""
        losses = finite(losses, "losses")
        return float(self.start(losses.size) @ losses)

    def weights(self, losses: Losses) -> Weights:
        """Return the prior."""
        return self.start(finite(losses, "losses").size)

    def penalty(self, weights: Weights) -> float:
        """Return 0."""
        return 0.0

    def prox(self, point: Weights, step: float) -> Weights:
        """Return the prior: the set has one point."""
        return self.start(finite(point, "point").size)

    def start(self, n: int) -> Weights:
        """Return the prior."""
        return distribution(self.prior, n, "Average prior")

    def strong_convexity(self, n: int) -> float:
        """Return 0."""
        return 0.0

    def l1_norm(self, n: int) -> float:
        """Return 1."""
        return 1.0

    def permutahedron(self, n: int) -> Permutahedron:
        """Return the set {p}."""
        return Permutahedron(corner=np.zeros(n), offset=self.start(n))

    def caps(self, n: int) -> Weights:
        """Return the prior: with sum one, no other weights keep below it."""
        return self.start(n)
