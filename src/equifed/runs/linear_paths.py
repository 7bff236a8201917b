r"""Many linear models of one output at once: Newton's method along paths of strengths.

The step is that of :class:`equifed.FairNewton` with a new sum of Hessians in every round,

.. math:: \lambda \leftarrow \arg\max_{\lambda \in \Lambda}\
    \langle\lambda, l\rangle - \psi(\lambda)
    - \tfrac12 \bigl|\textstyle\sum_i \lambda_i c_i\bigr|^2_{P^{-1}}, \qquad
    x \leftarrow x - P^{-1} \textstyle\sum_i \lambda_i c_i

on arrays, without rounds, records and proofs: some fifty candidates take the time of a few runs.
What is chosen is solved by :class:`equifed.FairNewton`, with a proof.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular
from scipy.special import expit, xlog1py, xlogy

from equifed.contract.arrays import Losses, Weights
from equifed.data.federation import Federation
from equifed.objectives import Average, ChiSquare, SaddleObjective
from equifed.steps.dual_step import Products, step_exactly

Array: TypeAlias = NDArray[Any]

MOST_COLUMNS = 1000  # beyond this the matrices take longer than a run
# Newton steps at most; they end where one gains less than this share of the objective. Lengths of
# a step that are tried
STEPS, GAIN, LENGTHS = 100, 1e-9, 0.5 ** np.arange(22)
INNER, SETTLED = 100, 1e-13


@dataclass(frozen=True, eq=False)
class Answers:
    """What all clients say about one model."""

    x: Array
    own: Array | None  # their best offsets
    losses: Losses
    slopes: Array  # of every row
    bends: Array


class LinearPaths:
    """Training rows of a federation, solved for one strength after the other."""

    def __init__(self, data: Federation) -> None:
        train = data.train
        self.binary = data.classes is not None
        self.inputs = train.inputs.reshape(len(train), -1).astype(np.float64)
        self.targets = train.targets.reshape(-1).astype(np.float64)
        self.starts, self.sizes = train.offsets[:-1], train.sizes.astype(np.float64)
        self.owners = train.owners()

    @classmethod
    def serves(cls, data: Federation) -> bool:
        """Tell whether the data are for it: one output, not too many columns."""
        one = data.classes == 2 if data.classes is not None else data.train.targets.ndim == 1
        return one and int(np.prod(data.input_shape)) <= MOST_COLUMNS

    def solve(
        self, l2: float, own_l2: float | None, rho: float | None, start: Answers | None = None
    ) -> Answers:
        """Return the best model for one choice of strengths."""
        rows = self.inputs
        if own_l2 is None:
            rows = np.column_stack([rows, np.ones(len(rows))])
        x = np.zeros(rows.shape[1])
        if start is not None:
            both = min(len(x), len(start.x))  # one of them may have no intercept
            x[:both] = start.x[:both]
        at = self._ask(rows, x, l2, own_l2, None if start is None else start.own)
        objective: SaddleObjective = Average()
        if rho is not None:
            objective = ChiSquare(rho, scale=self.scale(own_l2))
        weights = objective.weights(at.losses)
        for _ in range(STEPS):
            value = objective.value(at.losses)
            step, weights, gain = self._step(rows, at, l2, own_l2, objective, weights)
            if gain <= GAIN * abs(value):
                break
            for length in LENGTHS:
                there = self._ask(rows, at.x - length * step, l2, own_l2, at.own)
                if objective.value(there.losses) <= value - 0.1 * length * gain:
                    break
            else:
                break
            at = there
        return at

    def scale(self, own_l2: float | None) -> float:
        """Return the mean loss of the clients without features; see ``equifed.training.units``.

        1 where all targets are the same, as in a fold of few rows: any strength will do.
        """
        if own_l2 is not None:
            nothing = np.zeros(self.inputs.shape[1])
            found = float(self._ask(self.inputs, nothing, 0.0, own_l2, None).losses.mean())
            return found if found > 0 else 1.0
        mean = float(self._mean(self.targets).mean())
        found = float(self._mean((self.targets - mean) ** 2).mean())
        if self.binary:
            found = -float(xlogy(mean, mean) + xlog1py(1 - mean, -mean))
        return found if found > 0 else 1.0

    def _mean(self, values: Array) -> Array:
        """Return every client's mean over its rows."""
        sizes = self.sizes.reshape(-1, *[1] * (values.ndim - 1))
        return np.asarray(np.add.reduceat(values, self.starts, axis=0) / sizes)

    def _ask(
        self, rows: Array, x: Array, l2: float, own_l2: float | None, own: Array | None
    ) -> Answers:
        outputs, penalty = rows @ x, np.asarray(0.5 * l2 * float(x @ x))
        own = None if own_l2 is None else self._fit_own(outputs, own_l2, own)
        if own_l2 is not None and own is not None:
            outputs, penalty = outputs + own[self.owners], penalty + 0.5 * own_l2 * own**2
        losses, slopes, bends = differentiate(outputs, self.targets, self.binary)
        return Answers(x, own, self._mean(losses) + penalty, slopes, bends)

    def _fit_own(self, outputs: Array, own_l2: float, start: Array | None) -> Array:
        """Return the clients' best offsets, by damped Newton steps that never overshoot."""
        if not self.binary:
            return 2 * self._mean(self.targets - outputs) / (2 + own_l2)
        own = np.zeros(len(self.sizes)) if start is None else start
        for _ in range(INNER):
            _, slopes, bends = differentiate(outputs + own[self.owners], self.targets, True)
            step = (self._mean(slopes) + own_l2 * own) / (self._mean(bends) + own_l2)
            size = np.abs(step)
            step = step * np.log1p(size) / np.maximum(size, 1e-300)
            own = own - step
            if size.max() <= SETTLED * max(1.0, float(np.abs(own).max())):
                break
        return own

    def _step(
        self, rows: Array, at: Answers, l2: float, own_l2: float | None,
        objective: SaddleObjective, weights: Weights,
    ) -> tuple[Array, Weights, float]:  # fmt: skip
        """Return the step of the model, the weights it is for, and what it should gain."""
        gradients = self._mean(rows * at.slopes[:, None]) + l2 * at.x
        share = (weights / self.sizes)[self.owners] * at.bends
        metric = rows.T @ (share[:, None] * rows)
        if own_l2 is not None:  # the Schur complement of the own offsets
            mixed = self._mean(rows * at.bends[:, None])
            root = mixed * np.sqrt(weights / (self._mean(at.bends) + own_l2))[:, None]
            metric -= root.T @ root
        metric[np.diag_indices(len(metric))] += l2 * float(weights.sum())
        if isinstance(objective, Average):
            gradient = weights @ gradients
            step = np.linalg.solve(metric, gradient)
            return step, weights, 0.5 * float(gradient @ step)
        products: Any
        try:
            factor = np.linalg.cholesky(metric)
            products = Products(solve_triangular(factor, gradients.T, lower=True).T)
        except np.linalg.LinAlgError:  # no full rank, to rounding
            products = gradients @ np.linalg.solve(metric, gradients.T)
        weights, gain = step_exactly(objective, at.losses, products, weights, 1.0)
        return np.linalg.solve(metric, weights @ gradients), weights, gain

    def walk(self, points: Any) -> Iterator[Answers]:
        """Return the best models of points (``l2``, ``own_l2``, ``rho``), each from the last."""
        at: Answers | None = None
        for point in points:
            at = self.solve(point.l2, point.own_l2, point.rho, at)
            yield at


def predict_split(data: Federation, at: Answers, split: str) -> Array:
    """Return the model's output for every row of a split."""
    part = data.splits()[split]
    rows = part.inputs.reshape(len(part), -1).astype(np.float64)
    own = at.x[-1] if at.own is None else at.own[part.owners()]
    return np.asarray(rows @ at.x[: rows.shape[1]] + own)


def measure(data: Federation, at: Answers, split: str) -> tuple[Losses, Losses]:
    """Return loss, and accuracy or squared error in the target's unit, of every client."""
    part, binary = data.splits()[split], data.classes is not None
    owners, outputs = part.owners(), predict_split(data, at, split)
    targets = part.targets.reshape(-1).astype(np.float64)
    losses, _, _ = differentiate(outputs, targets, binary)
    right = (outputs > 0) == (targets > 0)
    shown = right if binary else (data.in_units(outputs) - data.in_units(targets)) ** 2
    count = np.bincount(owners, minlength=len(data))
    with np.errstate(invalid="ignore", divide="ignore"):
        each = (np.bincount(owners, v, len(data)) / count for v in (losses, shown))
        return tuple(each)  # type: ignore[return-value]


def differentiate(outputs: Array, targets: Array, binary: bool) -> tuple[Array, Array, Array]:
    """Return loss and its first two derivatives of every row: logistic, or squared."""
    if not binary:
        away = outputs - targets
        return away**2, 2 * away, np.full(len(outputs), 2.0)
    p = expit(outputs)
    return np.logaddexp(0.0, outputs) - targets * outputs, p - targets, p * (1 - p)
