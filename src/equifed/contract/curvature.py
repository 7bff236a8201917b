"""How curved the client losses are: bounds on which a proof may rest, and weighted sums."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from equifed.contract.arrays import BlockMatrix, Losses, Vector, Weights

Form = Literal["full", "blocks", "diagonal", "mean", "projected"]
"""What of the Hessians is summed: all of them, one block for each output, or of these blocks the
diagonals, the mean, or what they are in a few directions (T' H T, T being thin)."""


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

    Examples
    --------
    >>> import equifed as ef
    >>> data = ef.Federation.from_clients({"north": ([[2.0]], [1.0]), "south": ([[1.0]], [1.0])})
    >>> ef.simulate(data, "linear", l2=0.1).curvature().smoothness.round(2)
    array([10.1,  4.1])
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
        """Bound mu(w) from below over w that sum to 1, |w|_1 <= ``l1_norm`` (IA, Lemma 7)."""
        up, down = (l1_norm + 1) / 2, (l1_norm - 1) / 2
        least = float(self.strong_convexity.min())
        return up * least - (down * float(self.smoothness.max()) if down > 0 else 0.0)


@dataclass(frozen=True, eq=False)
class Inexactness:
    """By how much answers at a model may be off, because own parts are found numerically."""

    losses: Losses  # told losses are above the exact ones by at most this, never below
    gradients: Losses  # distance of told gradients from the exact ones, at most

    def of_value(self, weights: Weights) -> float:
        """Return how far the weighted loss may be below what was told."""
        return float(np.maximum(weights, 0.0) @ self.losses)

    def of_gradient(self, weights: Weights) -> float:
        """Return how far the weighted gradient may be from what was told."""
        return float(np.abs(weights) @ self.gradients)


@dataclass(frozen=True, eq=False)
class CurvatureSum(BlockMatrix):
    r"""A weighted sum :math:`P = \sum_i w_i H_i(x)` of the clients' Hessians, in float64 blocks.

    H_i has the L2 penalty in it, and may be an upper bound of the Hessian of f_i at x. Blocks are
    (b, q, r) where they were multiplied with a thin matrix, (b, r, r) where they were projected on
    it, (1, q, q) where they are a mean, and (b, q) where they are diagonals.
    """

    penalty: float  # the L2 penalty's part of the diagonal; 0 where it is not the same everywhere
    exact: bool  # the H_i are the Hessians themselves
    constant: bool  # they are the same at every model

    def dense(self, size: int) -> Vector:
        """Return P as one matrix; blocks must be whole."""
        out = self.blocks.new_zeros(size, size)
        each = self.blocks.expand(len(self.places), -1, -1)
        for places, block in zip(self.places, each, strict=True):
            out[places[:, None], places] = block
        return out


def check_curvature(blocks: Vector, thin: Vector | None = None) -> str | None:
    """Return what is wrong with one client's Hessian, or None; the engine names the client.

    It is finite, symmetric and has no negative eigenvalue; ``thin' H thin`` is a Hessian, too.
    """
    import torch

    if not torch.isfinite(blocks).all():
        return "its curvature is not finite"
    if blocks.numel() == 0:
        return None
    blocks, rounding = blocks.double(), 1e-5 if blocks.dtype == torch.float32 else 1e-9
    if blocks.dim() == 2:
        values = blocks
    else:
        square = blocks if thin is None else thin.double().T @ blocks
        if float((square - square.mT).abs().max()) > rounding * float(square.abs().max()):
            return "its curvature is not symmetric"
        values = torch.linalg.eigvalsh(square)
    least, most = float(values.min()), float(values.max())
    if least < -rounding * max(most, 0.0) or (least < 0 and most <= 0):
        return f"its curvature has the negative eigenvalue {least:.3g}"
    return None
