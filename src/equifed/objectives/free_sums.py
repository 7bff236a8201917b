"""Sums of functions of the losses, whose weights are prices: q-fair and proportional fairness."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from equifed.contract.arrays import Losses, Weights, check_settings
from equifed.objectives.base import FreeSum, Relative, WithPrior, check_vector
from equifed.objectives.projections import power_roots


@dataclass(frozen=True)
class QFair(WithPrior, FreeSum):
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
        check_settings(self, q="[0, inf)")
        super().__post_init__()

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
        if self.q == 0:
            return 0.0  # on the only weights there are
        share = weights / self.start(weights.size)
        return self.q / (self.q + 1.0) * float(weights @ share ** (1.0 / self.q))

    @override
    def prox(self, point: Weights, step: float) -> Weights:
        # w_i + s (w_i / p_i)^(1/q) = point_i, one monotone scalar root for each client
        p = self.start(point.size)
        if self.q == 0:
            return p
        return power_roots(np.maximum(point, 0.0), step, p, self.q)

    @override
    def penalty_gradient(self, weights: Weights) -> Weights:
        if self.q == 0:
            return np.zeros_like(weights)
        return np.asarray((weights / self.start(weights.size)) ** (1.0 / self.q))

    @override
    def start(self, n: int) -> Weights:
        return np.ones(n) if self.prior is None else super().start(n)

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


@dataclass(frozen=True)
class Proportional(Relative, WithPrior, FreeSum):
    r"""Minus the mean logarithm of what clients gain over a bad loss M (Nash bargaining).

    .. math:: \Phi(\ell) = -\sum_i p_i \log(M - \ell_i), \qquad
        \Lambda = \Big\{0 \le w_i \le \frac{p_i}{\epsilon}\Big\}, \quad
        \psi(w) = \sum_i M w_i - p_i - p_i \log\frac{w_i}{p_i}

    The weights p_i / (M - l_i) do not sum to one: a loss is worth lowering by its share of what is
    left to its client. No other model raises the gains M - l_i by more per cent for some than it
    lowers them for others, on average. Where less than epsilon is left, the logarithm goes on
    as its tangent, which caps the weights; so losses above M are allowed.

    Its dual step solves one quadratic equation for each client.

    Parameters
    ----------
    ceiling
        M, a loss that counts as no gain at all, in the unit of the loss: that of a constant
        prediction, say (log of the number of classes).
    floor
        epsilon, between 0 and M; None is M / 10. Ours: the larger, the less one client can claim.
    prior
        Positive numbers, one per client, normalised to sum one; None is uniform.
    scale
        The loss that counts as one; see :class:`equifed.objectives.Relative`.

    Examples
    --------
    >>> objective = Proportional(ceiling=5.0)
    >>> objective.weights(np.array([1.0, 3.0]))  # 1/4 and 1/2, halved
    array([0.125, 0.25 ])
    >>> objective.value(np.array([1.0, 3.0])) == -(np.log(4) + np.log(2)) / 2
    np.True_

    References
    ----------
    Zhang et al. 2022 (Proportional fairness in federated learning), which SCAFF-PD names as an
    instance (Section 2); Nash 1950.
    """

    ceiling: float
    floor: float | None = None
    prior: tuple[float, ...] | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        check_settings(self, ceiling="(0, inf)", scale="(0, inf)")
        if self.floor is not None and not 0 < self.floor < self.ceiling:
            raise ValueError(
                f"Proportional floor must lie between 0 and the ceiling {self.ceiling}, got "
                f"{self.floor}."
            )
        super().__post_init__()

    @override
    def value(self, losses: Losses) -> float:
        left = np.maximum(self._ceiling - losses, self._floor)
        beyond = np.maximum(losses - (self._ceiling - self._floor), 0.0) / self._floor
        return float(self._prior(losses.size) @ (beyond - np.log(left)))

    @override
    def weights(self, losses: Losses) -> Weights:
        left = np.maximum(self._ceiling - losses, self._floor)
        return np.asarray(self._prior(losses.size) / left)

    @override
    def penalty(self, weights: Weights) -> float:
        prior = self._prior(weights.size)
        with np.errstate(divide="ignore"):  # infinite at weight zero, which no step reaches
            costs = self._ceiling * weights - prior - prior * np.log(weights / prior)
        return float(costs.sum())

    @override
    def prox(self, point: Weights, step: float) -> Weights:
        # w - point + s (M - p/w) = 0: the positive root, in the form that does not cancel
        prior = self._prior(point.size)
        half = 0.5 * (point - step * self._ceiling)
        room = np.sqrt(step * prior)
        root = np.hypot(half, room)
        with np.errstate(divide="ignore", invalid="ignore"):
            weights = np.where(half > 0, half + root, room * (room / (root - half)))
        least = np.finfo(np.float64).tiny  # where the root underflows, and for no step at all
        return np.asarray(np.clip(np.nan_to_num(weights, nan=0.0), least, prior / self._floor))

    @override
    def start(self, n: int) -> Weights:
        return self._prior(n) / self._ceiling  # the weights at losses of zero

    @override
    def strong_convexity(self, n: int) -> float:
        return self._floor**2 / float(self._prior(n).max())  # psi'' = p / w^2, w <= p / epsilon

    @property
    def _ceiling(self) -> float:
        return self.ceiling * self.unit

    @property
    def _floor(self) -> float:
        floor = self.ceiling / 10.0 if self.floor is None else self.floor
        return floor * self.unit

    def _prior(self, n: int) -> Weights:
        return super().start(n)
