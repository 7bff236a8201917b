r"""Exact solutions of small robust problems with quadratic losses, without any step size to tune.

.. math:: \min_x \max_{\lambda \in \Lambda} \sum_i \lambda_i f_i(x) - \psi(\lambda), \qquad
          f_i(x) = \tfrac12 x^\top H_i x - g_i^\top x + c_i

by proximal steps in the weights (the method of multipliers), each of which is an unconstrained
smooth problem in x that Newton's method solves: the derivative of the projection onto a
permutahedron is a projection too. It needs every client's Hessian, so it serves as the yardstick of
the experiments and is no federated algorithm.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equifed.contract import Losses, Weights
from equifed.data import Federation
from equifed.objectives import IntegratedSet, RelativeFairness

Array = NDArray[np.float64]
OUTER, INNER = 60, 60
"""Most proximal steps, and most Newton steps in each; a dozen and a handful are usual."""

LARGEST_STEP = 1e4
ROUNDING, SHORTEST, STALLED = 1e-14, 1e-9, 1e-7


@dataclass(frozen=True, eq=False)
class Quadratics:
    """Quadratic losses of N clients in d unknowns: H (N, d, d), g (N, d), c (N,)."""

    hessians: Array
    linear: Array
    constants: Array

    @classmethod
    def of_regression(
        cls, federation: Federation, l2: float = 0.0, intercept: bool = False
    ) -> Quadratics:
        """Return the mean squared errors of linear regression, plus l2/2 |x|^2."""
        hessians, linear, constants = [], [], []
        for i in range(len(federation.names)):
            a, y = (np.asarray(part, dtype=np.float64) for part in federation.train.client(i))
            a = np.hstack([a, np.ones((len(a), 1))]) if intercept else a
            hessians.append(2 * a.T @ a / len(y) + l2 * np.eye(a.shape[1]))
            linear.append(2 * a.T @ y / len(y))
            constants.append(y @ y / len(y))
        return cls(np.array(hessians), np.array(linear), np.array(constants))

    def losses(self, x: Array) -> Losses:
        """Return f_i(x)."""
        return np.asarray(
            0.5 * np.einsum("a,iab,b->i", x, self.hessians, x) - self.linear @ x + self.constants
        )

    def gradients(self, x: Array) -> Array:
        """Return the gradients, one row per client."""
        return np.asarray(self.hessians @ x - self.linear)


@dataclass(frozen=True, eq=False)
class Solution:
    """A saddle point: model, weights, value, and how exactly it is one.

    ``gradient`` is the norm of the weighted gradient; ``slack`` is how far the weights are from the
    best ones for these losses. Both are 0 at a saddle point.
    """

    x: Array
    weights: Weights
    value: float
    gradient: float
    slack: float


def solve(problem: Quadratics, objective: RelativeFairness, tolerance: float = 1e-12) -> Solution:
    """Return the saddle point, to about ``tolerance`` relative to the losses' scale."""
    n = len(problem.constants)
    weights = objective.start(n)
    x = np.linalg.solve(
        np.einsum("i,iab->ab", np.full(n, 1 / n), problem.hessians), problem.linear.mean(0)
    )
    scale = max(float(np.abs(problem.losses(x)).mean()), 1e-12)
    step, last = 1.0 / scale, math.inf
    for _ in range(OUTER):
        x = _newton(problem, objective, x, weights, step)
        new = objective.prox(weights + step * problem.losses(x), step)
        moved = float(np.abs(new - weights).max())
        weights = new
        if moved <= tolerance or (moved <= STALLED and moved > last / 2):
            break
        last = moved
        step = min(3 * step, LARGEST_STEP / scale)  # larger steps: faster, and less smooth
    losses = problem.losses(x)
    value = objective.value(losses)
    slack = value - (float(weights @ losses) - objective.penalty(weights))
    gradient = float(np.linalg.norm(weights @ problem.gradients(x)))
    return Solution(x, weights, value, gradient, slack)


def _newton(
    problem: Quadratics, objective: RelativeFairness, x: Array, centre: Weights, step: float
) -> Array:
    """Minimise max_w <w, l(x)> - psi(w) - |w - centre|^2 / (2 step) over x."""

    def merit(at: Array) -> tuple[float, Weights]:
        losses = problem.losses(at)
        w = objective.prox(centre + step * losses, step)
        away = float((w - centre) @ (w - centre)) / (2 * step)
        return float(w @ losses) - objective.penalty(w) - away, w

    value, w = merit(x)
    for _ in range(INNER):
        rows = problem.gradients(x)
        gradient = w @ rows
        hessian = np.einsum("i,iab->ab", w, problem.hessians)
        turn = projection_slope(objective, centre + step * problem.losses(x), w)
        slope = step / (1 + step * objective.strong_convexity(len(w)))
        move = _descent(hessian + slope * rows.T @ turn @ rows, gradient)
        decrease = float(gradient @ move)
        if decrease <= ROUNDING * abs(value):  # too small to be seen in the value: Newton's last
            return np.asarray(x - move)
        length = 1.0
        while length > SHORTEST:
            new_value, new_w = merit(x - length * move)
            if new_value <= value - 1e-4 * length * decrease:
                break
            length /= 2
        else:
            return x
        x, value, w = x - length * move, new_value, new_w
    return x


def _descent(hessian: Array, gradient: Array) -> Array:
    """Return Newton's step, with the signs of the curvature turned where it is negative."""
    values, vectors = np.linalg.eigh(hessian)
    floor = 1e-14 * max(float(np.abs(values).max()), 1e-300)
    return np.asarray(vectors @ ((vectors.T @ gradient) / np.maximum(np.abs(values), floor)))


def projection_slope(objective: RelativeFairness, point: Weights, projected: Weights) -> Array:
    """Return the derivative of the projection onto the objective's set: I less block means.

    Blocks are the groups of clients, in decreasing order of the point, whose cumulated weight lies
    strictly below the largest that the set allows.
    """
    n = len(point)
    corner = IntegratedSet(objective.phi, objective.upper, objective.lower).permutahedron(n).corner
    order = np.argsort(-point, kind="stable")
    room = np.cumsum(corner) - np.cumsum(projected[order])
    ends = room <= 1e-12 * max(1.0, float(np.abs(corner).max()))
    block = np.concatenate([[0], np.cumsum(ends)[:-1]])
    same = block[:, None] == block[None, :]
    slope = np.zeros((n, n))
    slope[np.ix_(order, order)] = np.eye(n) - same / same.sum(1, keepdims=True)
    return slope


def solve_in_box(
    problem: Quadratics, objective: RelativeFairness, low: Array, high: Array
) -> Solution:
    """Return the best point with low <= x <= high: the best of all faces' own solutions.

    If the objective is convex its minimiser in the box is the minimiser in the affine hull of the
    face that it lies in. There are 3^d faces, so d must be small.
    """
    best: Solution | None = None
    for face in itertools.product((None, low, high), repeat=len(low)):
        x = np.array([0.0 if side is None else side[i] for i, side in enumerate(face)])
        free = np.array([i for i, side in enumerate(face) if side is None], dtype=np.int64)
        inner = problem.gradients(x)[:, free]  # of the loss as a function of the free unknowns
        if len(free):
            part = Quadratics(problem.hessians[:, free][:, :, free], -inner, problem.losses(x))
            x[free] = solve(part, objective).x
        if (x < low - 1e-9).any() or (x > high + 1e-9).any():
            continue
        losses = problem.losses(x)
        value = objective.value(losses)
        if best is None or value < best.value:
            best = Solution(x, objective.weights(losses), value, math.nan, math.nan)
    assert best is not None  # a corner of the box is always feasible
    return best
