"""Convex federations with known losses, gradients, Hessians and solutions, in plain NumPy."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import cvxpy as cp
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.engines.in_process import InProcessClients
from equifed.engines.loop import LoopClients
from equifed.engines.simulate import simulate

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Problem(ABC):
    """Clients with samples ``inputs[i]``, ``targets[i]`` and a linear model x without bias."""

    inputs: tuple[Array, ...]
    targets: tuple[Array, ...]
    l2: float

    loss = ""

    @property
    def n(self) -> int:
        return len(self.inputs)

    @property
    def d(self) -> int:
        return self.inputs[0].shape[1]

    @property
    def sizes(self) -> Array:
        return np.array([float(len(a)) for a in self.inputs])

    @abstractmethod
    def loss_of(self, i: int, x: Array) -> float:
        """f_i(x), penalty included."""

    @abstractmethod
    def gradient_of(self, i: int, x: Array) -> Array:
        """grad f_i(x)."""

    @abstractmethod
    def hessian_of(self, i: int, x: Array) -> Array:
        """The Hessian of f_i at x."""

    @abstractmethod
    def expression(self, i: int, x: cp.Variable) -> cp.Expression:
        """f_i for a generic solver."""

    def losses(self, x: Array) -> Array:
        return np.array([self.loss_of(i, x) for i in range(self.n)])

    def gradients(self, x: Array) -> Array:
        return np.stack([self.gradient_of(i, x) for i in range(self.n)])

    def federation(self) -> Federation:
        pairs = zip(self.inputs, self.targets, strict=True)
        return Federation.from_clients({f"client {i}": pair for i, pair in enumerate(pairs)})

    def clients(self, engine: str = "loop", **options: Any) -> InProcessClients:
        make = {"loop": LoopClients, "stacked": simulate}[engine]
        model = nn.Linear(self.d, 1, bias=False)
        return make(self.federation(), model, self.loss, l2=self.l2, dtype=torch.float64, **options)


class LeastSquares(Problem):
    """f_i(x) = mean of (<a, x> - y)^2 + l2/2 |x|^2."""

    loss = "squared"

    def loss_of(self, i: int, x: Array) -> float:
        return float(np.mean((self.inputs[i] @ x - self.targets[i]) ** 2) + self.l2 / 2 * x @ x)

    def gradient_of(self, i: int, x: Array) -> Array:
        a = self.inputs[i]
        return 2 / len(a) * a.T @ (a @ x - self.targets[i]) + self.l2 * x

    def hessian_of(self, i: int, x: Array) -> Array:
        a = self.inputs[i]
        return 2 / len(a) * a.T @ a + self.l2 * np.eye(self.d)

    def expression(self, i: int, x: cp.Variable) -> cp.Expression:
        a = self.inputs[i]
        fit = cp.sum_squares(a @ x - self.targets[i]) / len(a)
        return fit + self.l2 / 2 * cp.sum_squares(x)


class Logistic(Problem):
    """f_i(x) = mean of log(1 + exp(-s <a, x>)) + l2/2 |x|^2, with s = +1 or -1 for labels 1, 0."""

    loss = "logistic"

    def loss_of(self, i: int, x: Array) -> float:
        return float(np.mean(np.logaddexp(0, -self._signed(i) @ x)) + self.l2 / 2 * x @ x)

    def gradient_of(self, i: int, x: Array) -> Array:
        a = self._signed(i)
        return -a.T @ (1 / (1 + np.exp(a @ x))) / len(a) + self.l2 * x

    def hessian_of(self, i: int, x: Array) -> Array:
        a = self._signed(i)
        s = 1 / (1 + np.exp(a @ x))
        return (a * (s * (1 - s))[:, None]).T @ a / len(a) + self.l2 * np.eye(self.d)

    def expression(self, i: int, x: cp.Variable) -> cp.Expression:
        a = self._signed(i)
        return cp.sum(cp.logistic(-a @ x)) / len(a) + self.l2 / 2 * cp.sum_squares(x)

    def _signed(self, i: int) -> Array:
        return self.inputs[i] * np.where(self.targets[i] > 0, 1.0, -1.0)[:, None]


def least_squares(
    seed: int, n: int = 4, d: int = 3, samples: int | None = None, l2: float = 0.1
) -> LeastSquares:
    """Random regression whose clients differ in size, scale and true model."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(4, 12, size=n) if samples is None else np.full(n, samples)
    inputs = tuple(rng.normal(size=(m, d)) * rng.uniform(0.5, 1.5) for m in sizes)
    truth = rng.normal(size=d)
    targets = tuple(
        a @ (truth + 0.5 * rng.normal(size=d)) + 0.3 * rng.normal(size=len(a)) for a in inputs
    )
    return LeastSquares(inputs, targets, l2)


def logistic(seed: int, n: int = 4, d: int = 3, l2: float = 0.1) -> Logistic:
    """Random classification whose clients differ in size and true model."""
    rng = np.random.default_rng(seed)
    inputs = tuple(rng.normal(size=(m, d)) for m in rng.integers(6, 14, size=n))
    truth = rng.normal(size=d)
    targets = tuple(
        (a @ (truth + rng.normal(size=d)) + 0.5 * rng.normal(size=len(a)) > 0).astype(np.int64)
        for a in inputs
    )
    for labels in targets:
        labels[:2] = (0, 1)  # both classes everywhere
    return Logistic(inputs, targets, l2)


PROBLEMS: dict[str, Problem] = {
    "least squares": least_squares(1),
    "more clients": least_squares(2, n=7, d=2),
    "logistic": logistic(3, n=5),
}
"""Three random convex problems."""


def start(problem: Problem, seed: int = 0) -> Array:
    """Return a random first model."""
    return np.random.default_rng(seed).normal(size=problem.d)


def rounds(
    algorithm: Any, clients: Any, x: Array, count: int, seed: int = 0
) -> tuple[Any, list[Any]]:
    """Return the state after ``count`` rounds as the training loop plays them, and their infos."""
    state, infos = algorithm.init(clients, torch.as_tensor(x)), []
    for r in range(1, count + 1):
        state, info = algorithm.round(state, clients, Stream(seed).at("round", r))
        infos.append(info)
    return state, infos


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
    above = [problem.expression(i, x) <= level[i] for i in range(n)]
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
