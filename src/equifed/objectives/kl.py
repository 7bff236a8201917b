"""Relative entropy to a prior, and tilted losses, which are the same."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from equifed.contract.absence import bound_share, limit_shares
from equifed.contract.arrays import Losses, Weights, check_settings
from equifed.objectives.base import Adapted, PriorPenalty, Relative, WithPrior
from equifed.objectives.cvar import Average
from equifed.objectives.projections import entropic_prox, tilt


@dataclass(frozen=True)
class KL(PriorPenalty):
    r"""Worst weighted loss, where weights pay relative entropy for leaving a prior p.

    .. math:: \Phi(\ell) = \max_{w \in \Delta} \langle w, \ell\rangle
        - \tau \sum_i w_i \log\frac{w_i}{p_i} = \tau \log \sum_i p_i e^{\ell_i/\tau}

    The maximiser is the softmax of the losses at temperature tau. The penalty is tau-strongly
    convex on the simplex. A small ``strength`` is the worst case, a large one the average.

    Parameters
    ----------
    strength
        The temperature tau > 0.
    prior
        Positive numbers, one per client, normalised to sum one; None is uniform.
    cap
        Largest weight of one client, or two equal shares if these are more; None is the simplex.
    scale
        The loss that counts as one; see :class:`equifed.objectives.Relative`.

    Examples
    --------
    >>> KL(strength=1.0).weights(np.log([1.0, 2.0, 1.0]))
    array([0.25, 0.5 , 0.25])
    >>> KL(strength=1e-6).value(np.array([1.0, 4.0])).__round__(3)
    4.0

    References
    ----------
    DRFA Section 5, with g = -psi in (5).
    """

    strength: float
    prior: tuple[float, ...] | None = None
    cap: float | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, cap="(0, inf)")

    @override
    def value(self, losses: Losses) -> float:
        if self.cap is not None:
            return super().value(losses)
        with np.errstate(over="ignore"):  # a far smaller loss may leave no trace
            below = (losses - losses.max()) / self.price
        # log1p of expm1: exact also where the strength dwarfs the losses.
        prior = self._prior(losses.size)
        excess = float(prior @ np.expm1(below))
        exponent = np.log1p(excess) if excess > -0.5 else np.log(prior @ np.exp(below))
        return float(losses.max()) + self.price * float(exponent)

    @override
    def weights(self, losses: Losses) -> Weights:
        with np.errstate(over="ignore"):
            below = (losses - losses.max()) / self.price
        prior, caps = self._prior(losses.size), self._caps(losses.size)
        if self.cap is not None:
            return tilt(prior, np.maximum(below, -1e300), 1.0, caps)
        odds = prior * np.exp(below)
        return np.asarray(odds / odds.sum())

    @override
    def penalty(self, weights: Weights) -> float:
        from scipy.special import rel_entr

        return self.price * float(rel_entr(weights, self._prior(weights.size)).sum())

    @override
    def prox(self, point: Weights, step: float) -> Weights:
        # w_i + s tau log(w_i / p_i) = point_i - nu, by one monotone root
        n, temperature = point.size, step * self.price
        return entropic_prox(point, temperature, self._prior(n), self._caps(n))

    @override
    def mirror(self, weights: Weights, losses: Losses, step: float) -> Weights:
        # A geometric mean of the weights and the prior, tilted.
        pull = 1.0 / (1.0 + step * self.price)
        reference = weights**pull * self._prior(weights.size) ** (1.0 - pull)
        return tilt(reference, losses, step * pull, self._caps(weights.size))

    @override
    def start(self, n: int) -> Weights:
        prior = self._prior(n)
        return prior if self.cap is None else limit_shares(prior, bound_share(self.cap, n))

    @override
    def strong_convexity(self, n: int) -> float:
        return self.price  # the Hessian is diagonal with tau / w_i >= tau

    def _prior(self, n: int) -> Weights:
        return super().start(n)

    def _caps(self, n: int) -> Weights:
        return np.full(n, 1.0 if self.cap is None else bound_share(self.cap, n))


@dataclass(frozen=True)
class Tilted(Relative, WithPrior, Adapted):
    r"""Log-average of exponentials of the losses (TERM).

    .. math:: \Phi(\ell) = \frac1t \log \sum_i p_i e^{t \ell_i}, \qquad
        \nabla \Phi(\ell)_i \propto p_i e^{t \ell_i}

    t > 0 is ``KL`` with strength 1 / t, and has its penalty and its dual steps; t = 0 is the
    average. t < 0 magnifies *small* losses: it discounts outliers and is no maximum over weights,
    so that primal-dual algorithms refuse it; ``tilted_erm`` minimises it.

    Parameters
    ----------
    tilt
        Any finite number t, in the inverse unit of the loss.
    prior, scale
        As for :class:`KL`.

    Examples
    --------
    >>> Tilted(tilt=1.0).weights(np.log([1.0, 2.0, 1.0]))
    array([0.25, 0.5 , 0.25])
    >>> Tilted(tilt=-1.0).weights(np.log([1.0, 2.0, 1.0]))
    array([0.4, 0.2, 0.4])

    References
    ----------
    Li et al. 2021 (Tilted Empirical Risk Minimization), equation (2); cited by SCAFF-PD.
    """

    tilt: float
    prior: tuple[float, ...] | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        check_settings(self, scale="(0, inf)")
        if not np.isfinite(self.tilt):
            raise ValueError(f"Tilted tilt must be a finite number, got {self.tilt}.")
        super().__post_init__()

    @property
    @override
    def inner(self) -> KL | Average:
        if self.unfit is not None:
            raise ValueError(f"{self!r} has no dual step: {self.unfit}.")
        return self._same()

    @override
    def value(self, losses: Losses) -> float:
        return self._sign * self._same().value(self._sign * losses)

    @override
    def weights(self, losses: Losses) -> Weights:
        return self._same().weights(self._sign * losses)

    @override
    def l1_norm(self, n: int) -> float:
        return 1.0

    @property
    @override
    def is_smooth(self) -> bool:
        return self._is_average

    @property
    @override
    def is_entropic(self) -> bool:
        return True

    @property
    @override
    def unfit(self) -> str | None:
        if self._sign > 0:
            return None
        return (
            "a negative tilt favours small losses, which is not a maximum over weights; use the "
            "algorithm tilted-erm"
        )

    def _same(self) -> KL | Average:
        """Return the objective that this one is, of losses times their sign."""
        if self._is_average:
            return Average(self.prior)
        return KL(1.0 / abs(self.tilt), self.prior, scale=self.scale)

    @property
    def _is_average(self) -> bool:
        return self.tilt == 0 or not np.isfinite(self.unit / self.tilt)

    @property
    def _sign(self) -> float:
        return 1.0 if self.tilt > 0 or self._is_average else -1.0
