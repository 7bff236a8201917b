"""How much weight the gap between clients should get: SCAFF-PD-IA's choice of phi.

``choose_phi`` looks at the model of phi = 0 and predicts what a larger phi would do to both sides
of the trade-off; :class:`equifed.algorithms.scaff_pd_ia.ScaffPDIA` is the whole recipe.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from equifed.contract.arrays import Vector
from equifed.contract.clients import Clients
from equifed.contract.streams import Stream
from equifed.objectives.relative_fairness import RelativeFairness
from equifed.steps.curvature import hessian_product

LARGEST_PHI = 0.99
"""Weights grow as 1 / (1 - phi); beyond this they would be hundreds."""


@dataclass(frozen=True)
class PhiChoice:
    r"""A phi, and what a second-order expansion at the model of phi = 0 predicts for any phi.

    .. math:: \max_A \approx a + \tfrac12 c\, \varphi^2, \qquad
              \min_B \approx b + c\, \varphi, \qquad
              \varphi = \frac{\sqrt{b^2 + \tfrac32 a c} - b}{\tfrac32 c}

    (SCAFF-PD-IA (8), (9)). It minimises :math:`\max_A\, (\min_B)^{-1/2}`, the geometric mean of
    absolute and relative unfairness: the root of
    :math:`\tfrac34 c \varphi^2 + b \varphi - \tfrac12 a`.

    Parameters
    ----------
    phi : float
        The choice, clipped to [0, 0.99].
    high, low : float
        a and b: the weighted loss over A and over B at the model of phi = 0.
    bend : float
        c: how readily the low losses rise.
    products : int
        Hessian-vector products that c took, two exchanges each.
    """

    phi: float
    high: float
    low: float
    bend: float
    products: int

    def predicted(self, phi: float) -> tuple[float, float]:
        """Return the predicted weighted losses over A and over B at some phi."""
        return self.high + self.bend * phi**2 / 2, self.low + self.bend * phi

    def __str__(self) -> str:
        high, low = self.predicted(self.phi)
        return (
            f"phi = {self.phi:.4g}: predicted high losses {self.high:.4g} -> {high:.4g}, low "
            f"losses {self.low:.4g} -> {low:.4g}, ratio {_ratio(self.high, self.low):.4g} -> "
            f"{_ratio(high, low):.4g}"
        )


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
    clients: Clients,
    x: Vector,
    objective: RelativeFairness,
    stream: Stream,
    *,
    tolerance: float = 1e-6,
    products: int = 200,
) -> PhiChoice:
    r"""Choose phi from the model x that was trained with phi = 0 (SCAFF-PD-IA, Section 5.3).

    :math:`c = \langle H^{-1} g, g\rangle` with :math:`H = \sum_i a_i \nabla^2 f_i(x)` and
    :math:`g = \sum_i b_i \nabla f_i(x)` is found by conjugate gradients on Hessian-vector products
    through the clients; no matrix is formed. a and b are the extreme weights at x.

    Parameters
    ----------
    objective : RelativeFairness
        Its sets A and B are used; its phi is not.
    tolerance : float
        Relative residual at which the conjugate gradients stop.
    products : int
        Hessian-vector products at most; c is then a lower bound and phi a little too large.
    """
    losses, gradients = clients.value_and_gradient(x, stream.at("gradient"))
    upper, lower = objective.extremes(losses)
    g = gradients.weighted_sum(lower)

    def hessian(v: Vector) -> Vector:
        return hessian_product(clients, x, upper, v, stream.at("product"))

    bend, used = inverse_product(hessian, g, tolerance, products)
    high, low = float(upper @ losses), float(lower @ losses)
    return PhiChoice(best_phi(high, low, bend), high, low, bend, used)


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
