"""The semi-variance of the losses: what lies above the mean costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from equifed.contract.arrays import Losses, Weights
from equifed.objectives.base import Objective, check_vector


@dataclass(frozen=True)
class SemiVariance(Objective):
    r"""Mean loss plus a multiple of the semi-variance (Semi-VRed).

    .. math:: \Phi(\ell) = \bar\ell + \frac{b}{n} \sum_i (\ell_i - \bar\ell)_+^2, \qquad
        w_i = \frac1n \Bigl(1 + 2b\bigl((\ell_i - \bar\ell)_+ - \tfrac1n
        \textstyle\sum_j (\ell_j - \bar\ell)_+\bigr)\Bigr)

    Only losses above the mean pay. The weights sum to one; those of clients below the mean are
    negative where b times the mean excess is above one half. Convex, but without a dual step in
    closed form: it is for algorithms that take the weights (:class:`equifed.Reweighted`).

    Parameters
    ----------
    strength
        b, at least 0, in the inverse unit of the loss.

    Examples
    --------
    >>> SemiVariance(1.0).value(np.array([1.0, 1.0, 4.0]))  # 2 + 4/3
    3.333333333333333
    """

    strength: float

    def __post_init__(self) -> None:
        if not 0 <= self.strength < np.inf:
            raise ValueError(f"SemiVariance strength must be at least 0, got {self.strength}.")

    @override
    def value(self, losses: Losses) -> float:
        losses = check_vector(losses, "losses")
        above = np.maximum(losses - losses.mean(), 0.0)
        return float(losses.mean() + self.strength * (above @ above) / losses.size)

    @override
    def weights(self, losses: Losses) -> Weights:
        losses = check_vector(losses, "losses")
        above = np.maximum(losses - losses.mean(), 0.0)
        return np.asarray((1 + 2 * self.strength * (above - above.mean())) / losses.size)
