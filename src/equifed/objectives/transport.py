"""Optimal-transport distance to a prior."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from equifed.contract.arrays import Losses, Weights
from equifed.objectives.base import PriorPenalty, check_step, check_vector
from equifed.objectives.forests import transport_prox

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Transport(PriorPenalty):
    r"""Worst weighted loss, where weights pay for carrying mass from a prior p.

    .. math:: \psi(w) = \tau \min_{T \ge 0} \Big\{ \sum_{ij} C_{ij} T_{ij} :
        T \mathbf 1 = p,\ T^\top \mathbf 1 = w \Big\}, \qquad
        \Phi(\ell) = \sum_i p_i \max_j (\ell_j - \tau C_{ij})

    Mass moves only between clients that are near each other at cost C: a hospital in one region
    can stand for others of that region. C = 1 - identity gives ``L1Distance`` of half the strength.

    ``value`` and ``weights`` are closed forms in O(n^2). ``penalty`` is the transport linear
    programme, whose prices the simplex method of HiGHS finds in n^2 variables. ``prox`` is a
    quadratic programme solved by an active-set method on forests of routes (``forests.py``):
    finite, O(n^2) per pivot, and in practice a small multiple of n pivots. Meant for up to a few
    hundred clients.

    Parameters
    ----------
    strength
        tau > 0.
    cost
        The n by n matrix C: nonnegative, with a zero diagonal; need not be symmetric.
    prior
        Positive numbers, one per client, normalised to sum one; None is uniform.

    Examples
    --------
    >>> line = ((0, 1, 2), (1, 0, 1), (2, 1, 0))
    >>> Transport(strength=1.0, cost=line).weights(np.array([0.0, 0.5, 1.75]))
    array([0.33333333, 0.        , 0.66666667])
    >>> Transport(strength=3.0, cost=line).penalty(np.array([0.0, 1 / 3, 2 / 3])).__round__(12)
    2.0

    References
    ----------
    DRFA Section 5 ("optimal transport"), with g = -psi in (5).
    """

    strength: float
    cost: tuple[tuple[float, ...], ...]
    prior: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        cost = np.asarray(self.cost, dtype=np.float64)
        if cost.ndim != 2 or cost.shape[0] != cost.shape[1] or cost.size == 0:
            raise ValueError(f"Transport cost must be a square matrix, got shape {cost.shape}.")
        if not np.isfinite(cost).all() or (cost < 0).any() or np.diag(cost).any():
            raise ValueError("Transport cost must be finite, >= 0 and zero on the diagonal.")
        object.__setattr__(self, "cost", tuple(tuple(map(float, row)) for row in cost))

    @override
    def value(self, losses: Losses) -> float:
        losses = check_vector(losses, "losses")
        reach = losses - self.strength * self._cost(losses.size)
        return float(self.start(losses.size) @ reach.max(axis=1))

    @override
    def weights(self, losses: Losses) -> Weights:
        losses = check_vector(losses, "losses")
        reach = losses - self.strength * self._cost(losses.size)
        best = reach == reach.max(axis=1, keepdims=True)
        return np.asarray((self.start(losses.size) / best.sum(axis=1)) @ best)

    @override
    def penalty(self, weights: Weights) -> float:
        """Return the cost of the best plan, by its prices (the dual linear programme)."""
        weights = np.maximum(check_vector(weights, "weights"), 0.0)
        n = weights.size
        cost, prior, target = self._cost(n), self.start(n), weights / weights.sum()
        scale = float(cost.max())
        if scale == 0.0:
            return 0.0
        prices = _prices(cost / scale, prior, target)
        least = (cost / scale - prices).min(axis=1)  # the best reply: any prices bound from below
        return max(0.0, self.strength * scale * float(prior @ least + target @ prices))

    @override
    def prox(self, point: Weights, step: float) -> Weights:
        point = check_vector(point, "point")
        cost = check_step(step) * self.strength * self._cost(point.size)
        return transport_prox(point, cost, self.start(point.size))

    def _cost(self, n: int) -> Matrix:
        if len(self.cost) != n:
            raise ValueError(f"Transport cost is for {len(self.cost)} clients, not {n}.")
        return np.asarray(self.cost)


def _prices(cost: Matrix, prior: Weights, target: Weights) -> Weights:
    """Return what a unit is worth at each place when the prior goes to the target at least cost.

    The place with the largest target takes what the others leave: so there is a plan however the
    two sums are rounded, which a constraint for every place may deny.
    """
    from scipy.optimize import linprog
    from scipy.sparse import eye_array, kron, vstack

    n = prior.size
    kept = np.arange(n) != target.argmax()
    rows, columns = kron(eye_array(n), np.ones((1, n))), kron(np.ones((1, n)), eye_array(n))
    plan = linprog(
        cost.ravel(),
        A_eq=vstack([rows, columns.tocsr()[kept]]),
        b_eq=np.concatenate([prior, target[kept]]),
        method="highs-ds",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    if plan.status != 0:
        raise ArithmeticError(f"the transport programme was not solved: {plan.message}")
    prices = np.zeros(n)
    prices[kept] = plan.eqlin.marginals[n:]
    return prices
