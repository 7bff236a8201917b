"""The mean loss of the worst-served fraction of clients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from equifed.contract.arrays import Losses, Weights
from equifed.objectives.checks import finite
from equifed.objectives.permutahedron import Permutahedron
from equifed.objectives.projections import capped_corner


@dataclass(frozen=True)
class CVaR:
    r"""Mean loss of the worst ``tail`` fraction of clients (superquantile).

    .. math:: \Phi(\ell) = \max_w \langle w, \ell\rangle, \quad
        0 \le w_i \le \frac{1}{\mathrm{tail}\cdot n}, \ \textstyle\sum_i w_i = 1, \qquad \psi = 0

    ``tail = 1`` is the average; ``tail <= 1/n`` is the worst case. A fraction that is not a whole
    number of clients takes a share of the next one. For a cap per client see
    ``HeterogeneousCVaR``, of which the size-weighted CVaR is the case of equal tails.

    Parameters
    ----------
    tail
        The fraction alpha in (0, 1].

    Examples
    --------
    >>> CVaR(tail=0.5).value(np.array([1.0, 2.0, 3.0, 4.0]))
    3.5
    >>> CVaR(tail=0.5).weights(np.array([1.0, 2.0, 3.0, 4.0]))
    array([0. , 0. , 0.5, 0.5])

    References
    ----------
    SCAFF-PD-IA Example 1; Delta-FL (Pillutla et al. 2021); Rockafellar and Uryasev 2000.
    """

    tail: float

    def __post_init__(self) -> None:
        if not 0 < self.tail <= 1:
            raise ValueError(
                f"CVaR tail must lie in (0, 1], got {self.tail}; for the limit at 0 use WorstCase."
            )

    def value(self, losses: Losses) -> float:
        """Return the mean of the worst ``tail`` fraction."""
        losses = finite(losses, "losses")
        return self.permutahedron(losses.size).value(losses)

    def weights(self, losses: Losses) -> Weights:
        """Return the weights of the tail; equal losses share evenly."""
        losses = finite(losses, "losses")
        return self.permutahedron(losses.size).maximiser(losses)

    def penalty(self, weights: Weights) -> float:
        """Return 0."""
        return 0.0

    def prox(self, point: Weights, step: float) -> Weights:
        """Project onto the capped simplex."""
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
        """Return the capped simplex."""
        return Permutahedron(corner=capped_corner(n, self.tail), offset=np.zeros(n))

    def caps(self, n: int) -> Weights:
        """Return 1 / (tail n) for every client, or 1 where that is less."""
        return np.full(n, min(1.0, 1.0 / (self.tail * n)))
