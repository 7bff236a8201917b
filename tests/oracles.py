"""Slow, obvious references: bisection, loops, a generic solver."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equifed.objectives import (
    KL,
    Average,
    ChiSquare,
    CVaR,
    ExcessRisk,
    HeterogeneousCVaR,
    L1Distance,
    L2Distance,
    LpDistance,
    Proportional,
    QFair,
    RelativeFairness,
    SaddleObjective,
    Tilted,
    Transport,
    WorstCase,
)
from equifed.objectives.capped import CappedTail

Array = NDArray[np.float64]


def shares(numbers: tuple[float, ...] | None, n: int) -> Array:
    """Normalise a prior the plain way."""
    return np.full(n, 1 / n) if numbers is None else np.array(numbers) / np.sum(numbers)


def capped_simplex_by_bisection(point: Array, caps: Array) -> Array:
    """Project onto {0 <= w <= caps, sum w = 1} by bisecting on the shift."""
    low, high = float(point.min() - caps.max() - 1.0), float(point.max())
    for _ in range(200):
        middle = 0.5 * (low + high)
        if np.clip(point - middle, 0.0, caps).sum() >= 1.0:
            low = middle
        else:
            high = middle
    return np.clip(point - 0.5 * (low + high), 0.0, caps)


def kl_prox_by_bisection(point: Array, temperature: float, prior: Array) -> Array:
    """Minimise |w - point|^2 / 2 + temperature KL(w, prior): a bisection inside a bisection."""

    def weight(target: Array) -> Array:  # w + temperature log(w / prior) = target
        low, high = np.full(point.size, -700.0), np.full(point.size, 1.0)  # of log w
        for _ in range(60):
            middle = 0.5 * (low + high)
            over = np.exp(middle) + temperature * (middle - np.log(prior)) > target
            low, high = np.where(over, low, middle), np.where(over, middle, high)
        return np.exp(low)

    low = float(point.min()) - 1.0 - temperature * 50
    high = float(point.max()) + temperature * 50
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if weight(point - middle).sum() > 1 else (low, middle)
    return weight(point - low)


def is_majorised(weights: Array, corner: Array, tolerance: float) -> bool:
    """Say whether weights lie in conv{permutations of corner}: prefix sums and equal totals."""
    prefix = np.cumsum(np.sort(weights)[::-1])
    bound = np.cumsum(np.sort(corner)[::-1])
    return bool((prefix <= bound + tolerance).all() and abs(prefix[-1] - bound[-1]) <= tolerance)


def violation(objective: SaddleObjective, weights: Array) -> float:
    """Return by how much weights leave the objective's set, from the definition of the set."""
    n = weights.size
    match objective:
        case ChiSquare() | ExcessRisk():
            return violation(objective.base, weights)
        case KL(cap=float()):
            over = float(weights.max()) - max(objective.cap or 0.0, 2 / n)
            return max(violation(replace(objective, cap=None), weights), over)
        case CappedTail():
            over = float(weights.max()) - max(objective.cap, 2 / n)
            return max(violation(objective.base, weights), over)
        case RelativeFairness(cap=float()):
            over = float(np.abs(weights).max()) - largest_signed(objective, n)
            return max(_violation_of_integrated_set(objective, weights), over)
        case RelativeFairness():
            return _violation_of_integrated_set(objective, weights)
        case Average():
            return float(np.abs(weights - shares(objective.prior, n)).max())
        case QFair(q=0.0) | Tilted(tilt=0.0):
            return violation(Average(objective.prior), weights)
        case QFair():
            return max(-float(weights.min()), 0.0)
        case Proportional():
            floor = objective.ceiling / 10 if objective.floor is None else objective.floor
            over = weights - shares(objective.prior, n) / floor
            return float(max(-weights.min(), over.max(), 0.0))
        case CVaR():
            caps = np.full(n, 1 / (objective.tail * n))
        case HeterogeneousCVaR():
            caps = shares(objective.sizes, n) / np.asarray(objective.tails)
        case _:
            caps = np.ones(n)
    return float(max(-weights.min(), (weights - caps).max(), abs(weights.sum() - 1), 0.0))


def _violation_of_integrated_set(objective: RelativeFairness, weights: Array) -> float:
    """Support functions: every sum of k weights lies below its maximum over vertices of A and B.

    For translated sets the order of the offsets matters, so all subsets of clients are tried.
    """
    n, phi = weights.size, objective.phi
    worst = abs(float(weights.sum()) - 1)
    for bits in range(1, 2**n - 1):
        subset = np.array([bits >> i & 1 for i in range(n)], dtype=np.float64)
        high = max_over_side(objective.upper, subset)
        low = -max_over_side(objective.lower, -subset)
        worst = max(worst, float(subset @ weights) - (high - phi * low) / (1 - phi))
    return worst


def largest_signed(objective: RelativeFairness, n: int) -> float:
    """Return the cap of relative fairness: the smaller, the more positive weights can sum to.

    The sets are symmetric, so the first k clients have the largest sum of k weights.
    """
    phi = objective.phi
    positive = max(
        (max_over_side(objective.upper, first) + phi * max_over_side(objective.lower, -first))
        / (1 - phi)
        for first in np.tril(np.ones((n, n)))
    )
    return max(max(objective.cap or 0.0, 2 / n) / positive, min(1.0, 1.5 / n))


def max_over_side(side: Any, losses: Array) -> float:
    """Maximise <w, losses> over Average, CVaR or WorstCase by filling caps one by one."""
    n = losses.size
    if isinstance(side, Average):
        return float(shares(side.prior, n) @ losses)
    caps = np.full(n, 1.0 if isinstance(side, WorstCase) else min(1.0, 1 / (side.tail * n)))
    left, total = 1.0, 0.0
    for i in np.argsort(-losses):
        total += min(caps[i], left) * losses[i]
        left -= min(caps[i], left)
    return float(total)


def max_over_permutations(corner: Array, losses: Array) -> float:
    """Maximise <w, losses> over the permutations of corner by trying them all."""
    return max(float(np.array(w) @ losses) for w in permutations(corner))


def solver_parts(objective: SaddleObjective, w: Any) -> tuple[list[Any], Any]:
    """State an objective's set and penalty for a cvxpy variable, from their definitions."""
    import cvxpy as cp

    n = w.shape[0]
    simplex = [w >= 0, cp.sum(w) == 1]
    match objective:
        case ExcessRisk():
            constraints, penalty = solver_parts(objective.base, w)
            return constraints, penalty + np.array(objective.baselines) @ w
        case ChiSquare():
            constraints, penalty = solver_parts(objective.base, w)
            away = n * w - n * shares(objective.centre, n)
            return constraints, penalty + objective.rho / (2 * n) * cp.sum_squares(away)
        case KL(cap=float()):
            constraints, penalty = solver_parts(replace(objective, cap=None), w)
            return [*constraints, w <= max(objective.cap or 0.0, 2 / n)], penalty
        case CappedTail():
            constraints, penalty = solver_parts(objective.base, w)
            return [*constraints, w <= max(objective.cap, 2 / n)], penalty
        case RelativeFairness(cap=float()):
            constraints, penalty = solver_parts(replace(objective, cap=None), w)
            return [*constraints, cp.abs(w) <= largest_signed(objective, n)], penalty
        case RelativeFairness():
            a, b = cp.Variable(n), cp.Variable(n)
            constraints = solver_parts(objective.upper, a)[0] + solver_parts(objective.lower, b)[0]
            constraints.append((1 - objective.phi) * w == a - objective.phi * b)
            return constraints, objective.rho / (2 * n) * cp.sum_squares(n * w - 1)
        case Average():
            return [w == shares(objective.prior, n)], 0.0
        case WorstCase():
            return simplex, 0.0
        case CVaR():
            return [*simplex, w <= 1 / (objective.tail * n)], 0.0
        case HeterogeneousCVaR():
            return [*simplex, w <= shares(objective.sizes, n) / np.asarray(objective.tails)], 0.0
        case KL():
            return simplex, objective.strength * cp.sum(cp.rel_entr(w, shares(objective.prior, n)))
        case L1Distance():
            return simplex, objective.strength * cp.norm1(w - shares(objective.prior, n))
        case L2Distance():
            away = w - shares(objective.prior, n)
            penalty = cp.sum_squares(away) / 2
            return simplex, objective.strength * penalty
        case LpDistance():
            away = cp.abs(w - shares(objective.prior, n))
            power = cp.sum(cp.power(away, objective.power)) / objective.power
            return simplex, objective.strength * power
        case Tilted(tilt=0.0):
            return solver_parts(Average(objective.prior), w)
        case Tilted():
            prior = shares(objective.prior, n)
            return simplex, cp.sum(cp.rel_entr(w, prior)) / objective.tilt
        case QFair(q=0.0):
            return [w == shares(objective.prior, n)], 0.0
        case QFair():
            p, r = (
                np.ones(n) if objective.prior is None else shares(objective.prior, n),
                objective.q,
            )
            return [w >= 0], r / (r + 1) * cp.sum(
                cp.multiply(p, cp.power(cp.multiply(w, 1 / p), 1 + 1 / r))
            )
        case Proportional():
            p, big = shares(objective.prior, n), objective.ceiling
            floor = big / 10 if objective.floor is None else objective.floor
            costs = big * cp.sum(w) - 1 - p @ (cp.log(w) - np.log(p))
            return [w <= p / floor], costs
        case Transport():
            plan = cp.Variable((n, n), nonneg=True)
            marginals = [
                cp.sum(plan, axis=1) == shares(objective.prior, n),
                cp.sum(plan, axis=0) == w,
            ]
            toll = cp.sum(cp.multiply(np.array(objective.cost), plan))
            return [*simplex, *marginals], objective.strength * toll
    raise NotImplementedError(objective)


def solver_prox(objective: SaddleObjective, point: Array, step: float) -> Array:
    """Return the prox by an interior-point solver."""
    import cvxpy as cp

    w = cp.Variable(point.size)
    constraints, penalty = solver_parts(objective, w)
    problem = cp.Problem(cp.Minimize(step * penalty + cp.sum_squares(w - point) / 2), constraints)
    solve(problem)
    return np.asarray(w.value)


def solver_value(objective: SaddleObjective, losses: Array) -> float:
    """Return max <w, losses> - psi(w) by an interior-point solver."""
    import cvxpy as cp

    w = cp.Variable(losses.size)
    constraints, penalty = solver_parts(objective, w)
    return float(solve(cp.Problem(cp.Maximize(losses @ w - penalty), constraints)))


def solve(problem: Any) -> float:
    """Solve a cvxpy problem to nine digits; a warning (an error here) if that fails."""
    import cvxpy as cp

    tight = {"tol_gap_abs": 1e-9, "tol_gap_rel": 1e-9, "tol_feas": 1e-9}
    return float(problem.solve(solver=cp.CLARABEL, **tight))
