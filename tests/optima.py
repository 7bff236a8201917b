"""Optima of the problems by other means: an interior-point solver, and Newton's method."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import replace
from typing import Any

import cvxpy as cp
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from tests.problems import Problem

from equifed.data.federation import Federation
from equifed.objectives import (
    KL,
    Average,
    ChiSquare,
    CVaR,
    HeterogeneousCVaR,
    L1Distance,
    L2Distance,
    LpDistance,
    RelativeFairness,
    SaddleObjective,
    Tilted,
    Transport,
    WorstCase,
)
from equifed.objectives.capped import CappedTail

Array = NDArray[np.float64]


def interior_point(
    problem: Problem, objective: SaddleObjective, own_l2: float | None = None
) -> tuple[float, Array]:
    """Return the minimum of Phi(l(x)) and a minimiser, by Clarabel on the epigraph form.

    With ``own_l2`` every client has an intercept of its own, with that penalty, among the unknowns.
    """
    x, own = cp.Variable(problem.d), cp.Variable(problem.n)
    scale = _scale(problem)  # numbers of order one, for the solver's sake
    given = [own[i] if own_l2 is not None else None for i in range(problem.n)]
    held = [(own_l2 or 0.0) / (2 * scale) * cp.square(own[i]) for i in range(problem.n)]
    losses = [_loss(problem, i, x, scale, given[i]) + held[i] for i in range(problem.n)]
    return _solve_epigraph(losses, objective, x, problem.l2, scale)


def smooth_optimum(problem: Problem, objective: SaddleObjective) -> float:
    """Return the minimum of a differentiable Phi(l(x)), whatever the sum of its weights."""

    def value(x: Array) -> tuple[float, Array]:
        losses = problem.losses(x)
        return objective.value(losses), objective.weights(losses) @ problem.gradients(x)

    start = np.zeros(problem.d)
    found = minimize(
        value, start, jac=True, method="BFGS", options={"gtol": 1e-10, "maxiter": 5000}
    )
    return float(found.fun)


def softmax_optimum(
    data: Federation, objective: SaddleObjective, l2: float, own_l2: float
) -> tuple[float, Array]:
    """Return the same for softmax regression in which every client has offsets of its own."""
    n, k, (d,) = len(data.names), data.classes or 0, data.input_shape
    x, own, scale = cp.Variable((d, k)), cp.Variable((n, k)), math.log(k)
    losses = []
    for i in range(n):
        a, y = data.train.client(i)
        scores = a @ x + np.ones((len(y), 1)) @ cp.reshape(own[i], (1, k), order="C")
        wanted = cp.sum(cp.multiply(scores, np.eye(k)[y]), axis=1)
        each = cp.sum(cp.log_sum_exp(scores, axis=1) - wanted) / (len(y) * scale)
        losses.append(each + own_l2 / (2 * scale) * cp.sum_squares(own[i]))
    return _solve_epigraph(losses, objective, x, l2, scale)


def _solve_epigraph(
    losses: list[cp.Expression], objective: SaddleObjective, x: cp.Variable, l2: float, scale: float
) -> tuple[float, Array]:
    """Return the minimum of Phi of losses (divided by ``scale``) and the best x."""
    n = len(losses)
    bounds = cp.Variable(n)
    value, more = _value(_rescaled(objective, scale), bounds, n)
    ridge = l2 / (2 * scale) * cp.sum_squares(x)
    constraints = [bounds[i] >= losses[i] for i in range(n)]
    task = cp.Problem(cp.Minimize(value + ridge), constraints + more)
    for tolerance, fraction in itertools.product((1e-10, 1e-9, 1e-8), (0.99, 0.9)):
        options = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), tolerance)
        options["max_step_fraction"] = fraction  # shorter steps, where the solver loses its way
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it complains where it stops at a larger tolerance
            try:
                task.solve(solver=cp.CLARABEL, **options)
            except cp.SolverError:
                continue
        if x.value is not None:
            return float(task.value) * scale, np.asarray(x.value)
    raise RuntimeError("The interior-point solver failed.")


def _scale(problem: Problem) -> float:
    if problem.loss == "logistic":
        return math.log(2)
    return float(np.mean([np.mean(y**2) for y in problem.targets]))


def _loss(
    problem: Problem, i: int, x: cp.Expression, scale: float, own: cp.Expression | None = None
) -> cp.Expression:
    """Return the loss of client i without its penalty; squares of few rows, by QR."""
    a, y = problem.inputs[i], problem.targets[i]
    if own is not None:
        a, x = np.column_stack([a, np.ones(len(a))]), cp.hstack([x, own])
    if problem.loss == "logistic":
        signs = np.where(y > 0, 1.0, -1.0)
        return cp.sum(cp.logistic(-cp.multiply(signs, a @ x))) / (len(y) * scale)
    q, r = np.linalg.qr(a)
    inside = q.T @ y
    outside = max(0.0, float(y @ y - inside @ inside)) / (len(y) * scale)
    return cp.sum_squares((r @ x - inside) / math.sqrt(len(y) * scale)) + outside


def _rescaled(objective: Any, scale: float) -> Any:
    """Return the objective of losses divided by ``scale``."""
    if isinstance(objective, ChiSquare):
        return replace(objective, rho=objective.rho / scale)
    if isinstance(objective, Tilted):
        return replace(objective, tilt=objective.tilt * scale)
    if hasattr(objective, "strength"):
        return replace(objective, strength=objective.strength / scale)
    return objective


def _value(
    objective: Any, losses: cp.Variable, n: int
) -> tuple[cp.Expression, list[cp.Constraint]]:
    """Return Phi as a minimum over further variables: written down anew, not the library's."""
    match objective:
        case Average():
            shares = np.ones(n) if objective.prior is None else np.array(objective.prior)
            return losses @ (shares / shares.sum()), []
        case WorstCase():
            return cp.max(losses), []
        case RelativeFairness(phi=0.0):
            return _value(objective.upper, losses, n)
        case CVaR() | HeterogeneousCVaR() | CappedTail():
            level = cp.Variable()
            return level + objective.caps(n) @ cp.pos(losses - level), []
        case KL(cap=float()):
            excess = cp.Variable(n, nonneg=True)
            value, more = _value(replace(objective, cap=None), losses - excess, n)
            return value + max(objective.cap or 0.0, 2 / n) * cp.sum(excess), more
        case KL():
            return objective.strength * cp.log_sum_exp(
                losses / objective.strength - math.log(n)
            ), []
        case Tilted():
            return _value(KL(1 / objective.tilt), losses, n)
        case L1Distance():
            raised = cp.maximum(losses, cp.max(losses) - 2 * objective.strength)
            return cp.sum(raised) / n, []
        case Transport():
            reach = [cp.max(losses - objective.strength * np.array(row)) for row in objective.cost]
            return cp.sum(cp.hstack(reach)) / n, []
        case L2Distance():
            return _value(ChiSquare(objective.strength / n), losses, n)
        case LpDistance():  # the conjugate of a power is a power
            slack, level = cp.Variable(n, nonneg=True), cp.Variable()
            away, s = losses - level + slack, objective.power / (objective.power - 1)
            powers = objective.strength ** (1 - s) / s * cp.sum(cp.power(cp.abs(away), s))
            return level + cp.sum(away) / n + powers, []
        case ChiSquare():
            return _chi_square(objective, losses, n)
    raise TypeError(f"no oracle for {objective!r}")


def _chi_square(
    objective: ChiSquare, losses: cp.Variable, n: int
) -> tuple[cp.Expression, list[cp.Constraint]]:
    """Dualise sum w = 1 (level) and w <= caps (excess); w >= 0 gives the positive part."""
    modulus = objective.rho * n
    level, excess = cp.Variable(), cp.Variable(n, nonneg=True)
    pull = cp.pos(losses - level - excess + modulus / n)
    value = level + cp.sum_squares(pull) / (2 * modulus) - modulus / (2 * n)
    if isinstance(objective.base, CVaR | CappedTail):
        return value + objective.base.caps(n) @ excess, []
    return value, [excess == 0]


def saddle_point(problem: Problem, rho: float = 0.0, tail: float | None = None) -> tuple[Any, Any]:
    """Return (x*, lambda*) of min_x max_lambda sum lambda_i f_i(x) - rho n/2 |lambda - 1/n|^2.

    lambda ranges over the simplex, with lambda_i <= 1/(tail n) if a tail is given. A generic
    interior-point solver finds the active set; Newton's method then solves the optimality
    conditions on it to machine precision.
    """
    n, d = problem.n, problem.d
    cap = 1.0 if tail is None else 1 / (tail * n)
    x, level, nu = cp.Variable(d), cp.Variable(n), cp.Variable()
    if rho == 0:  # max over the capped simplex, by duality
        value = nu + cap * cp.sum(cp.pos(level - nu))
    else:
        assert tail is None
        value = nu + cp.sum(cp.square(cp.pos(level - nu + rho))) / (2 * rho * n) - rho / 2
    ridge = problem.l2 / 2 * cp.sum_squares(x)
    above = [_loss(problem, i, x, 1.0) + ridge <= level[i] for i in range(n)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "may be inaccurate": Newton's method comes next
        cp.Problem(cp.Minimize(value), above).solve(solver=cp.CLARABEL)
    weights = np.array([np.asarray(c.dual_value).item() for c in above])
    return _polished(problem, np.asarray(x.value), weights, rho, cap)


def _polished(problem: Problem, x: Array, weights: Array, rho: float, cap: float) -> Any:
    """Newton's method for grad = 0, f_i - rho n (lambda_i - 1/n) = nu on the free i, sum = 1."""
    n, d = problem.n, problem.d
    free = np.flatnonzero((weights > 1e-5) & (weights < cap - 1e-5))
    weights = np.where(weights >= cap - 1e-5, cap, np.where(weights <= 1e-5, 0.0, weights))
    k, nu = len(free), float(np.mean(problem.losses(x)[free])) if len(free) else 0.0
    for _ in range(20):
        gradients = problem.gradients(x)
        slack = problem.losses(x)[free] - rho * n * (weights[free] - 1 / n) - nu
        residual = np.concatenate([weights @ gradients, slack, [weights.sum() - 1]])
        system = np.zeros((d + k + 1, d + k + 1))
        system[:d, :d] = sum(weights[i] * problem.hessian_of(i, x) for i in range(n))
        system[:d, d : d + k] = gradients[free].T
        system[d : d + k, :d] = gradients[free]
        system[d : d + k, d : d + k] = -rho * n * np.eye(k)
        system[d : d + k, -1] = -1
        system[-1, d : d + k] = 1
        change = np.linalg.lstsq(system, -residual)[0]
        x, nu = x + change[:d], nu + change[-1]
        weights[free] += change[d : d + k]
    assert np.abs(residual).max() < 1e-11, f"not a saddle point: residual {np.abs(residual).max()}"
    return x, weights
