"""How much weight the gap between clients should get: SCAFF-PD-IA's choice of phi.

``choose_phi`` looks at the model of phi = 0 and predicts what a larger phi would do to both sides
of the trade-off; :class:`equifed.algorithms.scaff_pd_ia.ScaffPDIA` is the whole recipe.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from equifed.contract import Clients, Curvature, Index, Stream, Vector, Weights
from equifed.contract.absence import carry_over
from equifed.objectives.relative_fairness import RelativeFairness
from equifed.steps.automatic import hessian_product

LARGEST_PHI = 0.9
"""Weights grow as 1 / (1 - phi): here the sum of their sizes is 19, at 0.99 it would be 199."""

TOLERANCE, PRODUCTS = 1e-6, 200
"""Relative residual at which conjugate gradients stop, and Hessian-vector products at most."""

UNSOLVED = 1e-3
"""Part of the objective still to be gained beyond which a model is not that of phi = 0."""


@dataclass(frozen=True)
class PhiChoice:
    r"""A phi, and what a second-order expansion at the model of phi = 0 predicts for any phi.

    .. math:: \max_A \approx a + \tfrac12 c\, \varphi^2, \qquad
              \min_B \approx b + c\, \varphi, \qquad
              \varphi = \frac{\sqrt{b^2 + \tfrac32 a c} - b}{\tfrac32 c}

    (SCAFF-PD-IA (8), (9)). It minimises :math:`\max_A\, (\min_B)^{-1/2}`, the geometric mean of
    absolute and relative unfairness: the root of
    :math:`\tfrac34 c \varphi^2 + b \varphi - \tfrac12 a`.
    """

    phi: float  # the choice, at most LARGEST_PHI
    high: float  # a: the weighted loss over A at the model of phi = 0
    low: float  # b: the same over B
    bend: float  # c: how readily the low losses rise
    products: int  # Hessian-vector products that c took, two exchanges each
    unsolved: float = 0.0  # part of the losses that weights and a Newton step would still gain

    def predicted(self, phi: float) -> tuple[float, float]:
        """Return the predicted weighted losses over A and over B at some phi."""
        return self.high + self.bend * phi**2 / 2, self.low + self.bend * phi

    def notes(self) -> tuple[str, ...]:
        """Return the choice in words, and what is doubtful about it."""
        high, low = self.predicted(self.phi)
        said = [
            f"phi = {self.phi:.4g}: predicted high losses {self.high:.4g} -> {high:.4g}, low "
            f"losses {self.low:.4g} -> {low:.4g}, ratio {_ratio(self.high, self.low):.4g} -> "
            f"{_ratio(high, low):.4g}"
        ]
        if self.phi >= LARGEST_PHI:
            said.append(f"equation (8) asks for a phi of {LARGEST_PHI} or more, which is cut there")
        if self.unsolved > UNSOLVED:
            said.append(
                f"phi was chosen at a model that does not solve phi = 0 yet (about "
                f"{self.unsolved:.1%} to gain); a longer warmup would make the choice better"
            )
        return tuple(said)


def best_phi(high: float, low: float, bend: float) -> float:
    """Return equation (8), clipped; as ``bend`` goes to zero it tends to high / (2 low).

    >>> round(best_phi(high=1.0, low=2.0, bend=1e-12), 6)
    0.25
    >>> phi = best_phi(high=1.0, low=2.0, bend=1.5)
    >>> abs(0.75 * 1.5 * phi**2 + 2.0 * phi - 0.5) < 1e-12
    True
    """
    root = math.sqrt(low**2 + 1.5 * high * bend) + low
    # The same root without the difference of near numbers: a / (sqrt(b^2 + 1.5 a c) + b).
    return min(LARGEST_PHI, max(0.0, high / root)) if root > 0 else LARGEST_PHI


def choose_phi(
    clients: Clients, x: Vector, weights: Weights, objective: RelativeFairness, stream: Stream
) -> PhiChoice:
    r"""Choose phi from the saddle point (x, a) of phi = 0 (SCAFF-PD-IA, Section 5.3).

    :math:`c = \langle H^{-1} g, g\rangle` with :math:`H = \sum_i a_i \nabla^2 f_i(x)` and
    :math:`g = \sum_i b_i \nabla f_i(x)` is found by conjugate gradients on Hessian-vector products
    through the clients; no matrix is formed. After :data:`PRODUCTS` of them c is a lower bound and
    phi a little too large.

    a is the dual solution, which training has found with x. The weights that maximise the losses at
    x will not do: where clients tie, as they do at most solutions, those are any of many, and the
    expansion needs :math:`\sum_i a_i \nabla f_i(x) = 0`. b minimises the losses at x; clients that
    tie, as far as x is a solution, share its weight equally (the paper leaves that open).

    Parameters
    ----------
    weights : array, shape (N,)
        a, of all clients. For an absent one the mean loss stands, and its gradient is left out.
    objective : RelativeFairness
        With phi = 0; its sets A and B are used.

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> history = ef.train(ef.ScaffPDIA(phi="auto", warmup=20), clients, rounds=21)
    >>> round(history.rounds[-1].numbers["phi"], 1)  # chosen in round 21
    0.4
    """
    seen, gradients = clients.value_and_gradient(x, stream.at("gradient"))
    losses = carry_over(None, clients.index, seen, len(clients.names))
    high, size = float(weights @ losses), float(np.abs(losses).max())
    slack = objective.value(losses) - high + objective.penalty(weights)  # zero at the solution
    _, lower = objective.extremes(losses, within=10.0 * max(slack, 1e-9 * size))
    a, b = (_among(w, clients.index) for w in (weights, lower))
    left = gradients.weighted_sum(a)  # zero, too
    if not gradients.allows(b):
        raise ValueError(
            "phi cannot be chosen where sums are hidden: the sums of the gradients of those served "
            "worst and best would show single clients. Give phi a number."
        )
    g = gradients.weighted_sum(b)

    def hessian(v: Vector) -> Vector:
        return hessian_product(clients, x, a, v, stream.at("product"))

    bend, used = inverse_product(hessian, g, TOLERANCE, PRODUCTS)
    low = float(lower @ losses)
    # What a Newton step would gain, <H^-1 left, left> / 2, at the curvature that g has met.
    gain = 0.5 * bend * float(left @ left) / max(float(g @ g), 1e-300)
    unsolved = (slack + gain) / max(size, 1e-300)
    return PhiChoice(best_phi(high, low, bend), high, low, bend, used, unsolved)


def _among(weights: Weights, index: Index) -> Weights:
    """Return the weights of those present, scaled to sum one; equal ones if they have none."""
    present = weights[index]
    total = float(present.sum())
    return present / total if total > 0 else np.full(len(index), 1 / len(index))


def beyond_theory(objective: RelativeFairness, clients: Clients) -> tuple[str, ...]:
    r"""Say so where the weights are larger than any proof of convergence covers.

    .. math:: |\Lambda_\varphi|_1 \ge 1 + m / (2 M)

    for the strong convexity m and the smoothness M of the clients' losses (Assumption 8); where
    none is known, m = 0 and only weights >= 0 are covered.
    """
    known, size = clients.curvature(), objective.l1_norm(len(clients.names))
    bound, why = 1.0, "no strong convexity is known"
    if isinstance(known, Curvature):
        least, largest = float(known.strong_convexity.min()), float(known.smoothness.max())
        if least > 0:
            bound, why = 1.0 + least / (2.0 * largest), f"m = {least:.3g}, M = {largest:.3g}"
    if size <= 1.0 + 1e-9 or size < bound:
        return ()
    return (
        f"|Lambda|_1 = {size:.4g} for phi = {objective.phi:.4g}: convergence is proved only below "
        f"1 + m/(2M) = {bound:.4g} ({why})",
    )


def inverse_product(
    matrix: Callable[[Vector], Vector], g: Vector, tolerance: float, most: int
) -> tuple[float, int]:
    """Return <H^-1 g, g> by conjugate gradients, and how many products with H it took.

    Stops where H shows no positive curvature: the expansion that asks for it holds no further.
    """
    residual, direction = g.clone(), g.clone()
    size = first = float(g @ g)
    total, used = 0.0, 0
    while used < most and size > tolerance**2 * first:
        product = matrix(direction)
        used += 1
        curvature = float(direction @ product)
        if curvature <= 1e-12 * float(direction @ direction):
            break
        step = size / curvature
        total += step * size  # <H^-1 g, g> grows by exactly this: the steps are conjugate
        residual = residual - step * product
        before, size = size, float(residual @ residual)
        direction = residual + (size / before) * direction
    return total, used


def _ratio(high: float, low: float) -> float:
    return high / low if low > 0 else math.inf
