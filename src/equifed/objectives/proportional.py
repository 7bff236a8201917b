"""Proportional fairness: the product of what clients gain (Nash)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from equifed.contract.arrays import Losses, Weights
from equifed.objectives.base import (
    FreeSum,
    check_numbers,
    check_positive,
    check_step,
    check_vector,
    normalise,
)


@dataclass(frozen=True)
class Proportional(FreeSum):
    r"""Minus the mean logarithm of what clients gain over a bad loss M (Nash bargaining).

    .. math:: \Phi(\ell) = -\sum_i p_i \log(M - \ell_i), \qquad
        \Lambda = \Big\{0 \le w_i \le \frac{p_i}{\epsilon}\Big\}, \quad
        \psi(w) = \sum_i M w_i - p_i - p_i \log\frac{w_i}{p_i}

    The weights p_i / (M - l_i) do not sum to one: a loss is worth lowering by its share of what is
    left to its client. No other model raises the gains M - l_i by more per cent for some than it
    lowers them for others, on average. Where less than epsilon is left, the logarithm goes on
    as its tangent, which caps the weights; so losses above M are allowed.

    Its dual step solves one quadratic equation for each client.

    Parameters
    ----------
    ceiling
        M, a loss that counts as no gain at all, in the unit of the loss: that of a constant
        prediction, say (log of the number of classes).
    floor
        epsilon, between 0 and M; None is M / 10. Ours: the larger, the less one client can claim.
    prior
        Positive numbers, one per client, normalised to sum one; None is uniform.

    Examples
    --------
    >>> objective = Proportional(ceiling=5.0)
    >>> objective.weights(np.array([1.0, 3.0]))  # 1/4 and 1/2, halved
    array([0.125, 0.25 ])
    >>> objective.value(np.array([1.0, 3.0])) == -(np.log(4) + np.log(2)) / 2
    np.True_

    References
    ----------
    Zhang et al. 2022 (Proportional fairness in federated learning), which SCAFF-PD names as an
    instance (Section 2); Nash 1950.
    """

    ceiling: float
    floor: float | None = None
    prior: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_positive(self.ceiling, "Proportional ceiling")
        if self.floor is not None and not 0 < self.floor < self.ceiling:
            raise ValueError(
                f"Proportional floor must lie between 0 and the ceiling {self.ceiling}, got "
                f"{self.floor}."
            )
        object.__setattr__(self, "prior", check_numbers(self.prior, "Proportional prior"))

    @override
    def value(self, losses: Losses) -> float:
        losses = check_vector(losses, "losses")
        left = np.maximum(self.ceiling - losses, self._floor)
        beyond = np.maximum(losses - (self.ceiling - self._floor), 0.0) / self._floor
        return float(self._prior(losses.size) @ (beyond - np.log(left)))

    @override
    def weights(self, losses: Losses) -> Weights:
        losses = check_vector(losses, "losses")
        left = np.maximum(self.ceiling - losses, self._floor)
        return np.asarray(self._prior(losses.size) / left)

    @override
    def penalty(self, weights: Weights) -> float:
        weights = check_vector(weights, "weights")
        prior = self._prior(weights.size)
        with np.errstate(divide="ignore"):  # infinite at weight zero, which no step reaches
            costs = self.ceiling * weights - prior - prior * np.log(weights / prior)
        return float(costs.sum())

    @override
    def prox(self, point: Weights, step: float) -> Weights:
        # w - point + s (M - p/w) = 0: the positive root, in the form that does not cancel
        point, step = check_vector(point, "point"), check_step(step)
        prior = self._prior(point.size)
        half = 0.5 * (point - step * self.ceiling)
        room = np.sqrt(step * prior)
        root = np.hypot(half, room)
        with np.errstate(divide="ignore", invalid="ignore"):
            weights = np.where(half > 0, half + root, room * (room / (root - half)))
        least = np.finfo(np.float64).tiny  # where the root underflows, and for no step at all
        return np.asarray(np.clip(np.nan_to_num(weights, nan=0.0), least, prior / self._floor))

    @override
    def start(self, n: int) -> Weights:
        return self._prior(n) / self.ceiling  # the weights at losses of zero

    @override
    def strong_convexity(self, n: int) -> float:
        return self._floor**2 / float(self._prior(n).max())  # psi'' = p / w^2, w <= p / epsilon

    @property
    def _floor(self) -> float:
        return self.ceiling / 10.0 if self.floor is None else self.floor

    def _prior(self, n: int) -> Weights:
        return normalise(self.prior, n, "Proportional prior")
