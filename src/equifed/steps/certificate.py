"""How far a round is from the optimum, proved from what the round communicates anyway."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from equifed.contract import Curvature, Info, Losses, Proof, Vector, Weights
from equifed.contract.curvature import Inexactness
from equifed.objectives.base import SaddleObjective
from equifed.steps.schedules import epsilon

ROUNDING = 8.0
"""Units in the last place by which computed losses are allowed to be off."""


@dataclass(frozen=True)
class Certificate:
    """An upper bound on the suboptimality of a model and on its distance from the best one.

    Parameters
    ----------
    gap : float
        Phi(l(x)) is above its minimum by at most this.
    distance : float
        |x - x*| is at most this; infinite where no bound is known.
    uncapped : float, optional
        The formula's bound where it is above the gap, which then only says that no objective is
        below the smallest value there can be: nothing is proved yet.
    own : float, optional
        The formula's bound where another round proved a better one.
    """

    gap: float
    distance: float
    uncapped: float | None = None
    own: float | None = None

    def numbers(self) -> dict[str, float]:
        """Return the numbers of the round's record."""
        found = {"gap": self.gap, "distance": self.distance, "uncapped_gap": self.uncapped}
        found["own_gap"] = self.own
        return {k: v for k, v in found.items() if v is not None and math.isfinite(v)}


def certificate(
    objective: SaddleObjective,
    curvature: Curvature,
    losses: Losses,
    weights: Weights,
    gradient: Vector,
    inexact: Inexactness | None = None,
) -> Certificate | str:
    r"""Return the certificate of a model x, or why there is none.

    .. math:: \text{gap}(x, \lambda) = \Phi(l(x)) - F(x, \lambda)
              + \frac{|\sum_i \lambda_i \nabla f_i(x)|^2}{2 \mu(\lambda)}
              \ \ge\ \Phi(l(x)) - \min_y \Phi(l(y)), \qquad
              F(x, \lambda) = \langle \lambda, l(x)\rangle - \psi(\lambda)

    for any feasible :math:`\lambda` (docs/mathematics.md): :math:`\mu(\lambda)`-strong convexity
    gives :math:`\min_y F(y, \lambda) \ge F(x, \lambda) - |\nabla_x F|^2 / (2 \mu(\lambda))`, and no
    model has an objective below that. If every :math:`F(\cdot, \lambda)` is mu-strongly convex, so
    is :math:`\Phi(l(\cdot))`, and :math:`|x - x^\star|^2 \le 2\, \text{gap} / \mu`.

    Losses with a smallest value (``curvature.lowest``, mostly 0) and weights that are never
    negative have an objective with a smallest value, too; the gap is at most the distance to it.

    It is a proof when the bounds of ``curvature`` are true (``clients.curvature()``) and up to
    rounding: :data:`ROUNDING` units in the last place of the losses are added, which covers float64
    in practice and makes float32 certificates honest but no better than 1e-6 of the losses.

    Parameters
    ----------
    losses, weights : array, shape (N,)
        l(x) on all samples of all clients, and feasible weights.
    gradient : Vector
        The weighted sum of the clients' full gradients at x.
    inexact : Inexactness, optional
        By how much losses and gradients may be off, where clients have an own part: F is below what
        was told by that of the losses, and the gradient longer by that of the gradients.

    Examples
    --------
    Two clients with losses (x - 1)^2 / 2 and (x + 1)^2 / 2 at x = 0.1, whose average is best at 0:

    >>> import torch
    >>> from equifed.objectives import Average
    >>> bounds = Curvature(np.ones(2), np.ones(2))
    >>> losses, weights = np.array([0.405, 0.605]), np.array([0.5, 0.5])
    >>> gradient = torch.tensor([0.1], dtype=torch.float64)
    >>> proof = certificate(Average(), bounds, losses, weights, gradient)
    >>> round(proof.gap, 9), round(proof.distance, 9)
    (0.005, 0.1)
    """
    modulus = curvature.modulus(weights)
    if not modulus > 0:
        if np.min(weights) < 0:
            return "weights are negative and the weighted loss is not known to be convex"
        return "the losses are not known to be strongly convex; add an L2 penalty on all parameters"
    value = objective.value(losses)
    bound = float(weights @ losses) - objective.penalty(weights)
    size = max(float(np.abs(weights) @ np.abs(losses)), -value)  # a penalty may be most of it
    rounding = ROUNDING * epsilon(gradient) * size
    squared = float(gradient.double() @ gradient.double())
    if inexact is not None:
        bound -= inexact.of_value(weights)
        squared = (math.sqrt(squared) + inexact.of_gradient(weights)) ** 2
        if not math.isfinite(squared - bound):
            return "own parts of clients are not known well enough"
    gap = max(value - bound, 0.0) + squared / (2 * modulus) + rounding
    norm = objective.l1_norm(len(weights))
    most = value - _smallest_value(objective, norm, curvature.lowest, losses) + rounding
    uncapped, gap = gap if gap > most else None, min(gap, most)
    least = curvature.least_modulus(norm) if math.isfinite(norm) else 0.0  # free sums reach zero
    return Certificate(gap, math.sqrt(2 * gap / least) if least > 0 else math.inf, uncapped)


def gap_of_round(info: Info, curvature: Curvature | str) -> float | None:
    """Return the formula's bound of a round by itself, to judge it by; None where it has none.

    What a run records is made by :func:`certify` of what the clients said.
    """
    proof = info.proof
    complete = info.index is None or len(info.index) == len(info.weights)
    if not isinstance(proof, Proof) or isinstance(curvature, str) or not complete:
        return None
    told = proof.losses, proof.weights, proof.gradient
    found = certificate(proof.objective, curvature, *told)
    if isinstance(found, str):
        return None
    return found.gap if found.uncapped is None else found.uncapped


def find_feasible(objective: Any, weights: Weights, losses: Losses) -> Weights:
    """Return the nearest weights that an objective allows: a dual step of next to nothing."""
    return np.asarray(objective.prox(weights, 1e-14 / max(1.0, float(np.abs(losses).max()))))


def certify(
    proof: Proof, curvature: Curvature | str, inexact: Inexactness | str | None, lower: float | None
) -> tuple[Certificate | str, float | None]:
    """Return what a confirmed proof proves, or why nothing, and the best bound on the optimum.

    ``lower`` is what earlier rounds proved the same objective not to fall below: it holds for good,
    so the best bound of all rounds counts. A round may have found one in its own way
    (``proof.bound``), also where it has no certificate.
    """
    if isinstance(curvature, str):
        return curvature, lower
    if isinstance(inexact, str):
        return inexact, lower
    objective, weights = proof.objective, proof.weights
    nearest = find_feasible(objective, weights, proof.losses)
    if not np.abs(nearest - weights).max() <= 1e-7 * max(1.0, float(np.abs(weights).max())):
        return "the weights are not feasible for the objective", lower
    found = certificate(objective, curvature, proof.losses, weights, proof.gradient, inexact)
    value = objective.value(proof.losses)
    best = max(
        -math.inf if lower is None else lower, proof.bound.lower if proof.bound else -math.inf
    )
    if isinstance(found, Certificate) and found.uncapped is None:
        best = max(best, value - found.gap)
    eps = epsilon(proof.gradient)
    size = max(float(np.abs(proof.losses).max()), abs(value))
    gap = max(value - best, 0.0) + ROUNDING * eps * size
    if not math.isfinite(gap):
        return found, lower
    if isinstance(found, str):
        return Certificate(gap, math.inf), best
    if gap >= found.gap:
        return found, best
    own = found.gap if found.uncapped is None else found.uncapped
    return Certificate(gap, found.distance * math.sqrt(gap / found.gap), own=own), best


def _smallest_value(
    objective: SaddleObjective, norm: float, lowest: float, losses: Losses
) -> float:
    """Return a value that Phi never falls below; Phi is monotone where no weight is negative."""
    signed = 1 + 1e-9 < norm < math.inf
    if not math.isfinite(lowest) or signed or np.min(losses) < lowest:
        return -math.inf
    return objective.value(np.full(len(losses), lowest))
