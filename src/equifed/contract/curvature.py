"""Bounds on how curved the client losses are: an engine's answer, on which a proof may rest."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from equifed.contract.arrays import Losses, Weights


@dataclass(frozen=True, eq=False)
class Curvature:
    """Bounds on the Hessians of the client losses that hold at every model.

    Parameters
    ----------
    smoothness, strong_convexity : array, shape (N,)
        L_i and mu_i with mu_i I <= Hess f_i <= L_i I; L_i may be infinite, mu_i zero.
    tight : bool
        Whether some model attains the smoothness, so that it makes good step sizes.
    lowest : float
        No client's loss is below this at any model; minus infinity where that is not known.
    """

    smoothness: Losses
    strong_convexity: Losses
    tight: bool = False
    lowest: float = -math.inf

    def modulus(self, weights: Weights) -> float:
        r"""Return a strong-convexity modulus of the weighted loss; one above zero means something.

        .. math:: \mu(w) = \sum_{w_i > 0} w_i \mu_i - \sum_{w_i < 0} |w_i| L_i

        >>> bounds = Curvature(np.array([4.0, 4.0]), np.array([1.0, 1.0]))
        >>> bounds.modulus(np.array([0.5, 0.5])), bounds.modulus(np.array([1.25, -0.25]))
        (1.0, 0.25)
        """
        up, down = np.maximum(weights, 0.0), np.maximum(-weights, 0.0)
        lost = float(down[down > 0] @ self.smoothness[down > 0])
        return float(up @ self.strong_convexity) - lost

    def least_modulus(self, l1_norm: float) -> float:
        """Return a lower bound of mu(w) over all w that sum to one with |w|_1 <= ``l1_norm``.

        The positive parts of such w sum to (l1_norm + 1) / 2, the negative ones to
        (l1_norm - 1) / 2 (SCAFF-PD-IA, Lemma 7).
        """
        up, down = (l1_norm + 1) / 2, (l1_norm - 1) / 2
        least = float(self.strong_convexity.min())
        return up * least - (down * float(self.smoothness.max()) if down > 0 else 0.0)
