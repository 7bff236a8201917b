"""Distances to a prior: absolute, squared, and to any power."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from equifed.contract.arrays import Losses, Weights, check_settings
from equifed.objectives.base import PriorPenalty
from equifed.objectives.chi_square import ChiSquare
from equifed.objectives.projections import clipped_difference, piecewise_root, power_roots


@dataclass(frozen=True)
class L1Distance(PriorPenalty):
    r"""Worst weighted loss, where weights pay their absolute distance from a prior p.

    .. math:: \Phi(\ell) = \max_{w \in \Delta} \langle w, \ell\rangle - \tau \sum_i |w_i - p_i|
        = \sum_i p_i \max(\ell_i,\ \max_j \ell_j - 2\tau)

    Moving mass from one client to another costs twice its amount, so the worst client takes the
    mass of every client whose loss is more than 2 tau below: the penalty is twice tau times the
    total-variation distance.

    Parameters
    ----------
    strength
        tau > 0.
    prior, scale
        As for :class:`KL`.

    Examples
    --------
    >>> L1Distance(strength=0.5).weights(np.array([1.0, 3.5, 4.0, 0.0]))
    array([0.  , 0.25, 0.75, 0.  ])
    >>> L1Distance(strength=0.5).value(np.array([1.0, 3.5, 4.0, 0.0]))
    3.375

    References
    ----------
    DRFA Section 5 ("l_p distance"), with g = -psi in (5).
    """

    strength: float
    prior: tuple[float, ...] | None = None
    scale: float | None = None

    @override
    def value(self, losses: Losses) -> float:
        raised = np.maximum(losses, losses.max() - 2.0 * self.price)
        return float(self.start(losses.size) @ raised)

    @override
    def weights(self, losses: Losses) -> Weights:
        prior = self.start(losses.size)
        gives = losses < losses.max() - 2.0 * self.price
        worst = losses == losses.max()
        return np.asarray(np.where(gives, 0.0, prior) + worst * (prior[gives].sum() / worst.sum()))

    @override
    def penalty(self, weights: Weights) -> float:
        return self.price * float(np.abs(weights - self.start(weights.size)).sum())

    @override
    def prox(self, point: Weights, step: float) -> Weights:
        r"""Balance what the raised clients gain with what the lowered ones give.

        With u = point - p and c = step tau, the shift nu = max u - c - theta has theta in [0, 1];
        with a = max u - u, client i gains (theta - a_i)_+ and gives min(p_i, (a_i - 2c - theta)_+).
        theta is found exactly by sorting the 3n break points: O(n log n).
        """
        prior = self.start(point.size)
        u = point - prior
        with np.errstate(over="ignore"):
            a = u.max() - u
            beyond = clipped_difference(a, 2.0 * step * self.price, 2.0)
        a = np.minimum(a, 2.0)

        def excess(theta: float) -> float:
            gained = np.maximum(theta - a, 0.0).sum()
            return float(np.clip(beyond - theta, 0.0, prior).sum() - gained)

        breaks = np.concatenate([[0.0, 1.0], np.clip([a, beyond, beyond - prior], 0, 1).ravel()])
        theta = piecewise_root(excess, breaks)
        return np.asarray(prior - np.clip(beyond - theta, 0.0, prior) + np.maximum(theta - a, 0.0))


@dataclass(frozen=True)
class L2Distance(PriorPenalty):
    r"""Worst weighted loss, where weights pay their squared Euclidean distance from a prior p.

    .. math:: \psi(w) = \tfrac{\tau}{2} |w - p|^2, \qquad \Lambda = \Delta

    DRFA names "l_p distance" without a power. The square is tau-strongly convex, which DRFA's
    Section 5.2 requires, and is chi-square with rho = tau / n around p.

    Parameters
    ----------
    strength
        tau > 0.
    prior, scale
        As for :class:`KL`.

    Examples
    --------
    >>> L2Distance(strength=4.0).weights(np.array([1.0, 2.0]))
    array([0.375, 0.625])

    References
    ----------
    DRFA Section 5 and 5.2, with g = -psi in (5).
    """

    strength: float
    prior: tuple[float, ...] | None = None
    scale: float | None = None

    @override
    def weights(self, losses: Losses) -> Weights:
        return self._chi_square(losses.size).weights(losses)

    @override
    def penalty(self, weights: Weights) -> float:
        return self.price * float(np.linalg.norm(weights - self.start(weights.size))) ** 2 / 2

    @override
    def prox(self, point: Weights, step: float) -> Weights:
        return self._chi_square(point.size).prox(point, step)

    @override
    def penalty_gradient(self, weights: Weights) -> Weights:
        return self.price * (weights - self.start(weights.size))

    @override
    def mirror(self, weights: Weights, losses: Losses, step: float) -> Weights:
        return self._chi_square(weights.size).mirror(weights, losses, step)

    @override
    def strong_convexity(self, n: int) -> float:
        return self.price

    def _chi_square(self, n: int) -> ChiSquare:
        return ChiSquare(self.price / n, centre=self.prior, scale=1.0)


@dataclass(frozen=True)
class LpDistance(PriorPenalty):
    r"""Worst weighted loss, where weights pay a power of their distance from a prior p.

    .. math:: \psi(w) = \frac{\tau}{r} \sum_i |w_i - p_i|^r, \qquad \Lambda = \Delta, \quad r > 1

    the r-th power of the l_r distance, as DRFA's "l_p distance" is read here. ``power = 2`` is
    ``L2Distance``. A power near 1 keeps the weights of most clients near the prior and moves a few
    (as ``L1Distance`` does, for which it is a smooth stand-in); a large one moves all by about the
    same amount. The penalty is tau (r - 1)-strongly convex on the simplex for r <= 2.

    Parameters
    ----------
    power
        r > 1.
    strength
        tau > 0.
    prior, scale
        As for :class:`KL`.

    Examples
    --------
    >>> LpDistance(power=2.0, strength=4.0).weights(np.array([1.0, 2.0]))
    array([0.375, 0.625])
    >>> LpDistance(power=3.0, strength=4.0).weights(np.array([1.0, 1.5]))  # tau 0.25^2 = 0.25
    array([0.25, 0.75])

    References
    ----------
    DRFA Section 5 ("l_p distance"), with g = -psi in (5).
    """

    power: float
    strength: float = 1.0
    prior: tuple[float, ...] | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, "for 1 use L1Distance", power="(1, inf)")

    @override
    def weights(self, losses: Losses) -> Weights:
        q, prior = 1.0 / (self.power - 1.0), self.start(losses.size)

        def reply(pull: Weights) -> Weights:  # tau |d|^(r-1) = |pull|
            return np.copysign(np.minimum(np.abs(pull) / self.price, 1.0) ** q, pull)

        with np.errstate(over="ignore"):
            return _balance(reply, losses.max() - losses, prior, reach=self.price)

    @override
    def penalty(self, weights: Weights) -> float:
        away = np.abs(weights - self.start(weights.size))
        return self.price / self.power * float((away**self.power).sum())

    @override
    def prox(self, point: Weights, step: float) -> Weights:
        q, prior = 1.0 / (self.power - 1.0), self.start(point.size)
        price, ones = step * self.price, np.ones(point.size)

        def reply(pull: Weights) -> Weights:  # |d| + s tau |d|^(r-1) = |pull|
            return np.copysign(power_roots(np.abs(pull), price, ones, q), pull)

        with np.errstate(over="ignore"):
            away = point - prior
            return _balance(reply, away.max() - away, prior, reach=1.0 + price)

    @override
    def penalty_gradient(self, weights: Weights) -> Weights:
        away = weights - self.start(weights.size)
        return np.asarray(self.price * np.copysign(np.abs(away) ** (self.power - 1.0), away))

    @override
    def strong_convexity(self, n: int) -> float:
        # tau (r - 1) |w - p|^(r - 2) with |w - p| <= 1
        return self.price * (self.power - 1.0) if self.power <= 2 else 0.0


def _balance(
    reply: Callable[[Weights], Weights], behind: Weights, prior: Weights, reach: float
) -> Weights:
    """Return w_i = max(0, prior_i + reply(theta - behind_i)) for the theta at which they sum to 1.

    ``reply`` says how far each client is from its prior when it is pulled so hard: odd and
    nondecreasing. ``behind`` is >= 0 and 0 for the first client; theta lies in [0, reach]. A reply
    may be steep at zero, so theta is searched as a distance from the nearest ``behind``: there the
    differences that matter are exact.
    """

    def spread(anchor: float, further: float) -> Weights:
        pull = np.clip(anchor - behind, -2.0 * reach, reach) + further
        return np.asarray(np.maximum(prior + reply(pull), 0.0))

    def enough(anchor: float, further: float) -> bool:
        return bool(spread(anchor, further).sum() >= 1.0)

    ladder = np.unique(np.r_[behind[behind < reach], reach])
    low, high = 0, ladder.size - 1  # enough at the last, by the choice of reach
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(ladder[middle], 0.0) else (middle, high)
    if low == 0 and enough(0.0, 0.0):
        return spread(0.0, 0.0)
    half = 0.5 * (ladder[high] - ladder[low])
    from_above = not enough(ladder[low], half)
    anchor, sign = (ladder[high], -1.0) if from_above else (ladder[low], 1.0)
    # theta = anchor + sign * a length
    near, far, length = 1e-300, half, half
    while True:  # bisection, by ratios until the ends are within a factor of two
        length = float(np.sqrt(near) * np.sqrt(far)) if far > 2.0 * near else 0.5 * (near + far)
        if not near < length < far:
            break
        beyond = enough(anchor, sign * length) != from_above
        near, far = (near, length) if beyond else (length, far)
    both = [spread(anchor, sign * length) for length in (near, far)]
    return min(both, key=lambda w: abs(w.sum() - 1.0))
