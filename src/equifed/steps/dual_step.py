"""The step in the weights that is exact against the model's best answer in a metric."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from equifed.contract import Losses, Weights
from equifed.objectives.base import SaddleObjective

MANY, MOST_RANK = 1000, 200
"""Of more clients than this, products of up to this rank are kept as so many numbers per client."""

SMALL, STILL = 1e-10, 1e-12
"""Difference of objectives, relative, that may be rounding; move of the weights that is none."""


@dataclass(frozen=True, eq=False)
class Products:
    """Inner products of the clients' gradients, as those of a few numbers per client."""

    rows: Losses  # (N, r)

    def __matmul__(self, weights: Weights) -> Losses:
        return np.asarray(self.rows @ (self.rows.T @ weights))

    def __rmul__(self, factor: float) -> Products:
        return Products(math.sqrt(factor) * self.rows)

    @classmethod
    def of(cls, products: Losses) -> Losses | Products:
        """Return products of many clients in this form if their rank is low: pivoted Cholesky.

        >>> rows = np.random.default_rng(0).normal(size=(2000, 3))
        >>> Products.of(rows @ rows.T).rows.shape, Products.of(np.eye(2000)).shape
        ((2000, 3), (2000, 2000))
        """
        n, rest = len(products), products.diagonal().copy()
        rows, least = np.empty((n, MOST_RANK)), 1e-14 * float(rest.sum())
        for k in range(MOST_RANK if n > MANY else 0):
            i = int(rest.argmax())
            if float(rest.sum()) <= least:
                return cls(rows[:, :k])
            rows[:, k] = (products[:, i] - rows[:, :k] @ rows[i, :k]) / math.sqrt(rest[i])
            rest = np.maximum(rest - rows[:, k] ** 2, 0.0)
        return products


def largest_coupling(products: Losses | Products) -> float:
    """Return a number that no eigenvalue of inner products exceeds: the smaller of two norms."""
    if isinstance(products, Products):
        return float(np.linalg.norm(products.rows.T @ products.rows))
    return min(float(np.linalg.norm(products)), float(np.abs(products).sum(0).max()))


def step_exactly(
    objective: SaddleObjective,
    losses: Losses,
    products: Losses | Products,
    weights: Weights,
    tau: float,
    accuracy: float = 1e-2,
    most: int = 500,
) -> tuple[Weights, float]:
    r"""Return the weights that are best against the model's best answer, and that answer's gain.

    .. math:: \max_{\lambda \in \Lambda}\ \langle\lambda, l\rangle - \psi(\lambda)
              - \tfrac\tau2 \lambda^\top Q \lambda, \qquad Q_{ij} = \langle c_i, P^{-1} c_j\rangle

    is the dual of the step :math:`\min_\delta \Phi(l + c\,\delta) + |\delta|_P^2 / (2\tau)`, whose
    solution is :math:`\delta = -\tau P^{-1} \sum_i \lambda_i c_i`. Accelerated proximal steps with
    restarts, until the two values differ by ``accuracy`` of the gain; where the gain is so small
    that the values' rounding decides, until the weights stand still.
    """
    curvature = tau * products
    step = 1 / max(tau * largest_coupling(products), 1e-300)
    value, point, momentum = objective.value(losses), weights, 1.0
    new, gain = weights, 0.0
    for k in range(most):
        old, start, slope = new, point, losses - curvature @ point
        new = objective.prox(start + step * slope, step)
        if float((point - new) @ (new - old)) > 0:
            point, momentum = new, 1.0  # the momentum leads astray
        else:
            after = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
            point, momentum = new + (momentum - 1) / after * (new - old), after
        if k % 5 == 4 or k == most - 1:
            pull = curvature @ new
            half = 0.5 * float(new @ pull)
            dual = float(new @ losses) - objective.penalty(new) - half
            answer = objective.value(losses - pull) + half
            gain, wanted = value - answer, accuracy * (value - dual)
            certain = wanted > SMALL * abs(value)
            if (certain and answer - dual <= wanted) or np.abs(new - start).max() <= STILL:
                break
    return new, max(gain, 0.0)
