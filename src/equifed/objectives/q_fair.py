"""The q-fair objective of q-FFL."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from equifed.contract.arrays import Losses, Weights
from equifed.objectives.base import FreeSum, check_numbers, check_step, check_vector, normalise
from equifed.objectives.roots import power_roots


@dataclass(frozen=True)
class QFair(FreeSum):
    r"""Sum of powers of the losses: larger losses count more as q grows.

    .. math:: \Phi(\ell) = \sum_i \frac{p_i \ell_i^{q+1}}{q + 1}
        = \max_{w \ge 0} \langle w, \ell\rangle
        - \frac{q}{q + 1} \sum_i p_i \Big(\frac{w_i}{p_i}\Big)^{1 + 1/q}, \qquad
        \nabla \Phi(\ell)_i = p_i \ell_i^q

    with p_i = 1 unless a prior is given. The weights are nonnegative but do **not** sum to one: a
    loss l has the price l^q. (SCAFF-PD Section 3 prints the penalty as |w|^{1 + 1/q} on the whole
    of R^n; the conjugate of the sum is the one above.) Losses must not be negative.

    Parameters
    ----------
    q
        >= 0; 0 is the sum of the losses.
    prior
        Positive numbers, one per client, normalised to sum one as in the paper; None is p = 1.

    Examples
    --------
    >>> QFair(q=1.0).value(np.array([1.0, 2.0]))
    2.5
    >>> QFair(q=2.0).weights(np.array([1.0, 2.0]))
    array([1., 4.])
    >>> QFair(q=2.0).prox(np.array([3.0, 6.0, -1.0]), step=1.0)  # w + sqrt(w) = 3, 6
    array([1.69722436, 4.        , 0.        ])

    References
    ----------
    Li et al. 2020 (q-FFL), equation (2); SCAFF-PD Section 3.
    """

    q: float
    prior: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.q < np.inf:
            raise ValueError(f"QFair q must be a finite number >= 0, got {self.q}.")
        object.__setattr__(self, "prior", check_numbers(self.prior, "QFair prior"))

    @override
    def value(self, losses: Losses) -> float:
        losses = self._checked(losses)
        powers = _power(losses, self.q + 1.0)
        return float(self.start(losses.size) @ powers) / (self.q + 1.0)

    @override
    def weights(self, losses: Losses) -> Weights:
        losses = self._checked(losses)
        return np.asarray(self.start(losses.size) * _power(losses, self.q))

    @override
    def penalty(self, weights: Weights) -> float:
        weights = check_vector(weights, "weights")
        if self.q == 0:
            return 0.0  # on the only weights there are
        share = weights / self.start(weights.size)
        return self.q / (self.q + 1.0) * float(weights @ share ** (1.0 / self.q))

    @override
    def prox(self, point: Weights, step: float) -> Weights:
        # w_i + s (w_i / p_i)^(1/q) = point_i, one monotone scalar root for each client
        point, step = check_vector(point, "point"), check_step(step)
        p = self.start(point.size)
        if self.q == 0:
            return p
        return power_roots(np.maximum(point, 0.0), step, p, self.q)

    @override
    def penalty_gradient(self, weights: Weights) -> Weights:
        if self.q == 0:
            return np.zeros_like(weights)
        return np.asarray((weights / self.start(weights.size)) ** (1.0 / self.q))

    @property
    @override
    def is_smooth(self) -> bool:
        return True

    @override
    def start(self, n: int) -> Weights:
        return np.ones(n) if self.prior is None else normalise(self.prior, n, "QFair prior")

    @override
    def strong_convexity(self, n: int) -> float:
        # psi'' = (w/p)^(1/q - 1) / (q p), which has an infimum above zero for q = 1 alone.
        return 1.0 / float(self.start(n).max()) if self.q == 1 else 0.0

    def _checked(self, losses: Losses) -> Losses:
        losses = check_vector(losses, "losses")
        if (losses < 0).any():
            where = int(np.argmin(losses))
            raise ValueError(
                f"QFair needs losses >= 0, got {losses[where]:g} at position {where}; "
                "use Tilted for losses that may be negative."
            )
        return losses


def _power(losses: Losses, exponent: float) -> Losses:
    with np.errstate(over="ignore"):
        powers = losses**exponent
    if not np.isfinite(powers).all():
        where = int(np.argmax(losses))
        raise ValueError(
            f"loss {losses[where]:g} at position {where} to the power {exponent:g} overflows; "
            "rescale the losses or lower q."
        )
    return np.asarray(powers)
