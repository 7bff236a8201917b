"""Federations and convex problems that tests and benchmarks share; losses in plain NumPy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.data.split import Split
from equifed.engines.in_process import InProcessClients
from equifed.engines.simulate import simulate
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
    Transport,
    WorstCase,
)

Array = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], SaddleObjective]
SIZES = (1, 4, 7, 2, 9)
"""Ragged, one sample among them."""


# -- federations: data alone -----------------------------------------------------------------------


def classification(
    sizes: Sequence[int] = SIZES,
    shape: tuple[int, ...] = (3,),
    classes: int = 3,
    seed: int = 0,
    dtype: type = np.float64,
) -> Federation:
    """Clients of these sizes with random features; a random linear map gives the labels."""
    draw, offsets = np.random.default_rng(seed), np.concatenate([[0], np.cumsum(sizes)])
    inputs = draw.standard_normal((offsets[-1], *shape), dtype=dtype)
    truth = draw.standard_normal((int(np.prod(shape)), classes), dtype=dtype)
    targets = (inputs.reshape(len(inputs), -1) @ truth).argmax(1)
    names = tuple(f"client {i}" for i in range(len(sizes)))
    return Federation("random", names, Split(inputs, targets, offsets), classes=classes)


def regression(
    sizes: Sequence[int] = SIZES, features: int = 3, outputs: int = 1, seed: int = 0
) -> Federation:
    """Clients of these sizes with random features, a linear map of them, and noise."""
    draw, offsets = np.random.default_rng(seed), np.concatenate([[0], np.cumsum(sizes)])
    inputs = draw.standard_normal((offsets[-1], features))
    truth = draw.standard_normal((features,) if outputs == 1 else (features, outputs))
    targets = inputs @ truth
    targets += 0.1 * draw.standard_normal(targets.shape)
    names = tuple(f"client {i}" for i in range(len(sizes)))
    return Federation("random", names, Split(inputs, targets, offsets))


# -- convex problems -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem(ABC):
    """Clients with samples ``inputs[i]``, ``targets[i]`` and a linear model x without bias."""

    inputs: tuple[Array, ...]
    targets: tuple[Array, ...]
    l2: float
    engine: Literal["loop", "stacked"] = "loop"

    loss: ClassVar[str] = ""

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

    def losses(self, x: Array) -> Array:
        return np.array([self.loss_of(i, x) for i in range(self.n)])

    def gradients(self, x: Array) -> Array:
        return np.stack([self.gradient_of(i, x) for i in range(self.n)])

    def federation(self) -> Federation:
        pairs = zip(self.inputs, self.targets, strict=True)
        return Federation.from_clients({f"client {i}": pair for i, pair in enumerate(pairs)})

    def start(self) -> torch.Tensor:
        """Return the model zero."""
        return torch.zeros(self.d, dtype=torch.float64)

    def clients_with_own(self, engine: str | None = None, **options: Any) -> InProcessClients:
        """Return the problem with an intercept of every client's own."""
        given = {"l2": self.l2, "dtype": torch.float64, "own": "bias", **options}
        return simulate(
            self.federation(), "linear", self.loss, engine=engine or self.engine, **given
        )

    def clients(
        self, engine: str | None = None, dtype: torch.dtype = torch.float64, **options: Any
    ) -> InProcessClients:
        """Return the problem as an engine presents it: its own, or another one."""
        model, given = nn.Linear(self.d, 1, bias=False), {"l2": self.l2, "dtype": dtype, **options}
        return simulate(self.federation(), model, self.loss, engine=engine or self.engine, **given)


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


def convex_problem(seed: int) -> Problem:
    """Draw a problem: least squares for even seeds, logistic regression for odd ones.

    2 to 30 clients, 2 to 20 parameters, 7 to 149 samples per client. Feature scales differ within
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
    kind = Logistic if seed % 2 else LeastSquares
    return kind(tuple(inputs), tuple(targets), l2, engine="stacked")


def skewed_problem(seed: int) -> Problem:
    """Draw a problem whose clients differ in level: shifted targets, classes rare or absent.

    Some clients of a classification have one class only.
    """
    problem, draw = convex_problem(seed), np.random.default_rng(seed + 10**7)
    if isinstance(problem, LeastSquares):
        moved = tuple(y + 3 * draw.standard_normal() for y in problem.targets)
        return replace(problem, targets=moved)
    targets = []
    for y in problem.targets:
        flipped = np.where(draw.random(len(y)) < draw.random(), int(draw.integers(2)), y)
        targets.append(np.full_like(y, int(draw.integers(2))) if draw.random() < 0.2 else flipped)
    if len(np.unique(np.concatenate(targets))) < 2:
        targets[0][:2] = (0, 1)
    return replace(problem, targets=tuple(targets))


def _transport(draw: np.random.Generator, n: int) -> Transport:
    places = draw.random((n, 2))
    cost = np.linalg.norm(places[:, None] - places[None], axis=2)
    return Transport(10 ** draw.uniform(-1, 0), tuple(map(tuple, cost)), scale=1.0)


OBJECTIVES: dict[str, Draw] = {
    "average": lambda draw, n: Average(),
    "worst case": lambda draw, n: WorstCase(),
    "CVaR": lambda draw, n: CVaR(draw.uniform(1 / n, 1)),
    "chi-square": lambda draw, n: ChiSquare(10 ** draw.uniform(-2, 0), scale=1.0),
    "heterogeneous CVaR": lambda draw, n: HeterogeneousCVaR(tuple(draw.uniform(1 / n, 1, n))),
    "KL": lambda draw, n: KL(10 ** draw.uniform(-1, 1), scale=1.0),
    "l1 distance": lambda draw, n: L1Distance(10 ** draw.uniform(-1, 0), scale=1.0),
    "l2 distance": lambda draw, n: L2Distance(10 ** draw.uniform(-1, 1), scale=1.0),
    "lp distance": lambda draw, n: LpDistance(1.5, 10 ** draw.uniform(-1, 0), scale=1.0),
    "transport": _transport,
    "relative fairness, phi=0": lambda draw, n: RelativeFairness(
        0.0, CVaR(max(0.3, 1 / n)), CVaR(max(0.3, 1 / n))
    ),
    "chi-square on CVaR": lambda draw, n: ChiSquare(0.1, base=CVaR(max(0.4, 1 / n)), scale=1.0),
}
"""Every saddle objective, with parameters to be drawn."""


def drawn_objective(seed: int, n: int) -> tuple[str, SaddleObjective]:
    """Return the objective of a problem: each in turn with least squares, then logistic."""
    name = list(OBJECTIVES)[seed // 2 % len(OBJECTIVES)]
    return name, OBJECTIVES[name](np.random.default_rng(10**6 + seed), n)


# -- playing ---------------------------------------------------------------------------------------


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
