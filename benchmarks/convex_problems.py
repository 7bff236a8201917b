"""Random convex federations, every saddle objective, and optima by an interior-point solver."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import cvxpy as cp
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from equifed.data.federation import Federation
from equifed.engines.in_process import InProcessClients
from equifed.engines.simulate import simulate
from equifed.objectives import (
    KL,
    Average,
    ChiSquare,
    CVaR,
    HeterogeneousCVaR,
    RelativeFairness,
    SaddleObjective,
    WorstCase,
)
from equifed.objectives.distances import L1Distance, L2Distance
from equifed.objectives.transport import Transport

Array = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], SaddleObjective]


@dataclass(frozen=True)
class ConvexProblem:
    """Clients with samples ``inputs[i]``, ``targets[i]``; linear model, loss and L2 penalty."""

    loss: str
    inputs: tuple[Array, ...]
    targets: tuple[Array, ...]
    l2: float

    @property
    def n(self) -> int:
        """Number of clients."""
        return len(self.inputs)

    @property
    def d(self) -> int:
        """Number of parameters."""
        return self.inputs[0].shape[1]

    def clients(self, dtype: torch.dtype = torch.float64) -> InProcessClients:
        """Return the problem as an engine presents it."""
        pairs = zip(self.inputs, self.targets, strict=True)
        federation = Federation.from_clients({f"client {i}": pair for i, pair in enumerate(pairs)})
        module = nn.Linear(self.d, 1, bias=False)
        return simulate(federation, module, self.loss, l2=self.l2, dtype=dtype)

    def start(self) -> torch.Tensor:
        """Return the model zero."""
        return torch.zeros(self.d, dtype=torch.float64)


def convex_problem(seed: int) -> ConvexProblem:
    """Draw a problem: least squares for even seeds, logistic regression for odd ones.

    2 to 30 clients, 2 to 20 parameters, 7 to 149 samples a client. Feature scales differ within
    and between clients, half of the clients see rotated features, and true models differ between
    clients by 0.1 to 3 times the size of the common one. Condition numbers reach some thousands.
    """
    draw = np.random.default_rng(seed)
    n, d = int(draw.integers(2, 31)), int(draw.integers(2, 21))
    spread, shift = 10 ** draw.uniform(0, 1.2), 10 ** draw.uniform(-1, 0.5)
    l2, common = 10 ** draw.uniform(-3, -1), draw.standard_normal(d)
    inputs, targets = [], []
    for _ in range(n):
        samples = int(draw.integers(d + 5, 150))
        scale = spread ** (draw.uniform(-0.5, 0.5) * draw.uniform(0, 1, d))
        rotated = draw.random() < 0.5
        turn = np.linalg.qr(draw.standard_normal((d, d)))[0] if rotated else np.eye(d)
        a = (draw.standard_normal((samples, d)) * scale * 10 ** draw.uniform(-0.15, 0.15)) @ turn
        signal = a @ (common + shift * draw.standard_normal(d))
        noise = 10 ** draw.uniform(-1, 0) * draw.standard_normal(samples)
        chance = 1 / (1 + np.exp(-signal))
        labels = (draw.random(samples) < chance).astype(np.int64)
        labels[:2] = (0, 1)  # both classes everywhere
        inputs.append(a)
        targets.append(labels if seed % 2 else signal + noise)
    return ConvexProblem("logistic" if seed % 2 else "squared", tuple(inputs), tuple(targets), l2)


def _transport(draw: np.random.Generator, n: int) -> Transport:
    places = draw.random((n, 2))
    cost = np.linalg.norm(places[:, None] - places[None], axis=2)
    return Transport(10 ** draw.uniform(-1, 0), tuple(map(tuple, cost)))


OBJECTIVES: dict[str, Draw] = {
    "average": lambda draw, n: Average(),
    "worst case": lambda draw, n: WorstCase(),
    "CVaR": lambda draw, n: CVaR(draw.uniform(1 / n, 1)),
    "chi-square": lambda draw, n: ChiSquare(10 ** draw.uniform(-2, 0)),
    "heterogeneous CVaR": lambda draw, n: HeterogeneousCVaR(tuple(draw.uniform(1 / n, 1, n))),
    "KL": lambda draw, n: KL(10 ** draw.uniform(-1, 1)),
    "l1 distance": lambda draw, n: L1Distance(10 ** draw.uniform(-1, 0)),
    "l2 distance squared": lambda draw, n: L2Distance(10 ** draw.uniform(-1, 1)),
    "l2 distance": lambda draw, n: L2Distance(10 ** draw.uniform(-1, 0), squared=False),
    "transport": _transport,
    "relative fairness, phi=0": lambda draw, n: RelativeFairness(
        0.0, CVaR(max(0.3, 1 / n)), CVaR(max(0.3, 1 / n))
    ),
    "chi-square on CVaR": lambda draw, n: ChiSquare(0.1, base=CVaR(max(0.4, 1 / n))),
}
"""Every saddle objective, with parameters to be drawn."""


def drawn_objective(seed: int, n: int) -> tuple[str, SaddleObjective]:
    """Return the objective of a problem: each in turn with least squares, then logistic."""
    name = list(OBJECTIVES)[seed // 2 % len(OBJECTIVES)]
    return name, OBJECTIVES[name](np.random.default_rng(10**6 + seed), n)


# -- the oracle -----------------------------------------------------------------------------------


def interior_point(problem: ConvexProblem, objective: SaddleObjective) -> tuple[float, Array]:
    """Return the minimum of Phi(l(x)) and a minimiser, by Clarabel on the epigraph form."""
    x, bounds = cp.Variable(problem.d), cp.Variable(problem.n)
    scale = _scale(problem)  # numbers of order one, for the solver's sake
    constraints = [
        bounds[i] >= _loss(problem.loss, a, y, x, scale)
        for i, (a, y) in enumerate(zip(problem.inputs, problem.targets, strict=True))
    ]
    value, more = _value(_rescaled(objective, scale), bounds, problem.n)
    ridge = problem.l2 / (2 * scale) * cp.sum_squares(x)
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


def _scale(problem: ConvexProblem) -> float:
    if problem.loss == "logistic":
        return math.log(2)
    return float(np.mean([np.mean(y**2) for y in problem.targets]))


def _loss(loss: str, a: Array, y: Array, x: cp.Variable, scale: float) -> cp.Expression:
    if loss == "logistic":
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
    if hasattr(objective, "strength"):
        return replace(objective, strength=objective.strength / scale)
    return objective


def _value(
    objective: Any, losses: cp.Variable, n: int
) -> tuple[cp.Expression, list[cp.Constraint]]:
    """Return Phi as a minimum over further variables: written down anew, not the library's."""
    match objective:
        case Average():
            return cp.sum(losses) / n, []
        case WorstCase():
            return cp.max(losses), []
        case RelativeFairness(phi=0.0):
            return _value(objective.upper, losses, n)
        case CVaR() | HeterogeneousCVaR():
            level = cp.Variable()
            return level + objective.caps(n) @ cp.pos(losses - level), []
        case KL():
            return objective.strength * cp.log_sum_exp(
                losses / objective.strength - math.log(n)
            ), []
        case L1Distance():
            raised = cp.maximum(losses, cp.max(losses) - 2 * objective.strength)
            return cp.sum(raised) / n, []
        case Transport():
            reach = [cp.max(losses - objective.strength * np.array(row)) for row in objective.cost]
            return cp.sum(cp.hstack(reach)) / n, []
        case L2Distance(squared=True):
            return _value(ChiSquare(objective.strength / n), losses, n)
        case L2Distance():
            slack, level = cp.Variable(n, nonneg=True), cp.Variable()
            away = losses - level + slack
            return level + cp.sum(away) / n, [cp.norm(away) <= objective.strength]
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
    if isinstance(objective.base, CVaR):
        return value + objective.base.caps(n) @ excess, []
    return value, [excess == 0]
