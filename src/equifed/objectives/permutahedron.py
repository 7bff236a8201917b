"""Symmetric sets of weights: translated permutahedra.

The permutahedron of a vector c is the convex hull of all permutations of c. The simplex, the
capped simplex of CVaR and the integrated set of relative fairness are permutahedra,
and a single point (the average) is one with c = 0, translated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from equifed.contract.arrays import Losses, Weights
from equifed.objectives.projections import project_permutahedron, spread_evenly


@dataclass(frozen=True, eq=False)
class Permutahedron:
    """The set offset + conv{permutations of corner}.

    Parameters
    ----------
    corner
        The vector whose permutations span the set, in decreasing order.
    offset
        A translation; the zero vector for the sets that treat all clients alike.

    Examples
    --------
    >>> simplex = Permutahedron(corner=np.array([1.0, 0.0, 0.0]), offset=np.zeros(3))
    >>> simplex.project(np.array([0.5, 0.75, -1.0]))
    array([0.375, 0.625, 0.   ])
    """

    corner: Weights
    offset: Weights

    def project(self, point: Weights) -> Weights:
        """Return the nearest point of the set, in O(n log n)."""
        return self.offset + project_permutahedron(point - self.offset, self.corner)

    def value(self, losses: Losses) -> float:
        """Return the support function: max over the set of <w, losses>."""
        # Largest against largest (rearrangement inequality); no solver.
        return float(np.sort(losses)[::-1] @ self.corner + losses @ self.offset)

    def maximiser(self, losses: Losses) -> Weights:
        """Return the maximiser of <w, losses> that treats equal losses alike."""
        return self.offset + spread_evenly(losses, self.corner)

    def minimiser(self, losses: Losses) -> Weights:
        """Return the minimiser of <w, losses> that treats equal losses alike."""
        return self.maximiser(-losses)

    def l1_norm(self) -> float:
        """Return max |w|_1 over the set."""
        # |o + c| is a convex function of o + c, so pairing largest with largest maximises its sum.
        return float(np.abs(np.sort(self.offset)[::-1] + self.corner).sum())
