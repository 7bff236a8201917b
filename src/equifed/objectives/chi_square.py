"""A chi-square penalty on any other saddle objective, and the variances of losses."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from typing_extensions import override

from equifed.contract.arrays import Losses, Weights, check_settings
from equifed.objectives.base import (
    Adapted,
    CappedSet,
    Objective,
    Relative,
    SaddleObjective,
    check_numbers,
    normalise,
)
from equifed.objectives.cvar import WorstCase
from equifed.objectives.projections import entropic_prox, tilt

_FAR = 1e300  # scaled losses beyond this are treated as equal, so that no claim overflows
_FEEBLE = 1e-200  # a penalty this small changes no digit


@dataclass(frozen=True)
class ChiSquare(Relative, Adapted):
    r"""A saddle objective whose weights also pay for leaving a centre.

    .. math:: \psi(w) = \psi_0(w) + \frac{\rho n}{2} |w - c|^2, \qquad
        \frac{\rho n}{2} |w - \tfrac1n|^2 = \frac{\rho}{2n} \sum_i (n w_i - 1)^2

    The penalty is (rho n)-strongly convex. Its dual step is one of the base at another point,

    .. math:: \mathrm{prox}(z, s) =
        \mathrm{prox}_0\Big(\frac{z + s\rho n\, c}{1 + s\rho n}, \frac{s}{1 + s\rho n}\Big),

    so it is exact on every base that has one. ``rho = 0`` is the base; as ``rho`` grows the
    weights tend to the centre (or its projection).

    Parameters
    ----------
    rho
        The strength, >= 0.
    base
        The set (and further penalty, psi_0) underneath; the simplex unless another is given.
    centre
        Nonnegative numbers, one per client, normalised to sum one; None is uniform, as in the
        paper.
    scale
        The loss that counts as one; see :class:`equifed.objectives.Relative`.

    Examples
    --------
    >>> ChiSquare(rho=1.0).weights(np.array([1.0, 2.0, 3.0]))
    array([0.        , 0.33333333, 0.66666667])
    >>> ChiSquare(rho=1.0).penalty(np.array([0.0, 0.5, 0.5]))
    0.25

    References
    ----------
    SCAFF-PD (3.3); strong convexity mu_lambda = rho n: its Section 5.
    """

    rho: float
    base: SaddleObjective = field(default_factory=WorstCase)
    centre: tuple[float, ...] | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        check_settings(self, rho="[0, inf)", scale="(0, inf)")
        numbers = check_numbers(self.centre, "ChiSquare centre", zeros=True)
        object.__setattr__(self, "centre", numbers)

    @property
    def price(self) -> float:
        """The strength in the unit of the loss."""
        return self.rho * self.unit

    @override
    def weights(self, losses: Losses) -> Weights:
        modulus = self.price * losses.size
        if modulus == 0:
            return self.base.weights(losses)
        return self.base.prox(self._target(losses), 1.0 / modulus)

    @override
    def penalty(self, weights: Weights) -> float:
        away = weights - self._centre(weights.size)
        return self.base.penalty(weights) + self.price * weights.size / 2 * float(away @ away)

    @override
    def prox(self, point: Weights, step: float) -> Weights:
        shrink = 1.0 + step * self.price * point.size
        kept = 1.0 / shrink  # 0 where shrink overflows: the centre's projection, as it should be
        target = kept * point + (1.0 - kept) * self._centre(point.size)
        return self.base.prox(target, step * kept)

    @override
    def penalty_gradient(self, weights: Weights) -> Weights:
        away = weights - self._centre(weights.size)
        return self.base.penalty_gradient(weights) + self.price * weights.size * away

    @property
    @override
    def is_entropic(self) -> bool:
        return isinstance(self.base, CappedSet)

    @override
    def mirror(self, weights: Weights, losses: Losses, step: float) -> Weights:
        if not isinstance(self.base, CappedSet):
            return super().mirror(weights, losses, step)  # refuses
        strength = step * self.price * losses.size
        caps = self.base.caps(losses.size)
        if strength < _FEEBLE:
            return tilt(weights, losses, step, caps)
        return entropic_prox(self._target(losses), 1.0 / strength, weights, caps)

    @override
    def strong_convexity(self, n: int) -> float:
        return self.price * n + self.base.strong_convexity(n)

    def _target(self, losses: Losses) -> Weights:
        """Return c + losses / (rho n): where the penalty alone would put the weights."""
        with np.errstate(over="ignore"):
            pull = np.clip(losses / (self.price * losses.size), -_FAR, _FAR)
        return np.asarray(pull + self._centre(losses.size))

    def _centre(self, n: int) -> Weights:
        return normalise(self.centre, n, "ChiSquare centre")


def mean_variance(strength: float, scale: float | None = None) -> ChiSquare:
    r"""Return mean loss plus ``strength`` times its variance, as chi-square (VRed).

    .. math:: \bar\ell + b \operatorname{Var}\ell
        = \max_w \langle w, \ell\rangle - \frac{\rho n}{2} |w - \tfrac1n|^2, \qquad
        \rho = \frac{1}{2b}

    over weights of any sign that sum to one, with
    :math:`w_i = (1 + 2b(\ell_i - \bar\ell))/n`; here they stay in the simplex, so that the value
    is the same where these are nonnegative and less where not (a loss far below the mean is no
    merit). ``strength`` is in the inverse unit of the loss; ``scale`` as for :class:`ChiSquare`.

    >>> losses = np.array([1.0, 1.5, 2.0])
    >>> bool(mean_variance(0.5).value(losses) == losses.mean() + 0.5 * losses.var())
    True
    """
    if not 0 < strength < np.inf:
        raise ValueError(
            f"mean_variance strength must be a positive number, got {strength}; for 0 use "
            "Average()."
        )
    return ChiSquare(1 / (2 * strength), scale=scale)


@dataclass(frozen=True)
class SemiVariance(Relative, Objective):
    r"""Mean loss plus a multiple of the semi-variance (Semi-VRed).

    .. math:: \Phi(\ell) = \bar\ell + b \sum_i p_i (\ell_i - \bar\ell)_+^2, \quad
        \bar\ell = \sum_i p_i \ell_i, \qquad
        w_i = p_i \Bigl(1 + 2b\bigl((\ell_i - \bar\ell)_+ -
        \textstyle\sum_j p_j (\ell_j - \bar\ell)_+\bigr)\Bigr)

    Only losses above the mean pay. The weights sum to one; those of clients below the mean are
    negative where b times the mean excess is above one half. Convex, but without a dual step in
    closed form: it is for algorithms that take the weights (:class:`equifed.Reweighted`).

    Parameters
    ----------
    strength
        b, at least 0, in the inverse unit of the loss.
    prior
        Positive numbers, one per client, normalised to the p_i; None is uniform. The numbers of
        samples make the mean that of all samples.
    scale
        The loss that counts as one; see :class:`equifed.objectives.Relative`.

    Examples
    --------
    >>> SemiVariance(1.0).value(np.array([1.0, 1.0, 4.0]))  # 2 + 4/3
    3.333333333333333
    """

    strength: float
    prior: tuple[float, ...] | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        check_settings(self, strength="[0, inf)", scale="(0, inf)")
        object.__setattr__(self, "prior", check_numbers(self.prior, "SemiVariance prior"))

    @override
    def value(self, losses: Losses) -> float:
        p, above = self._above(losses)
        return float(p @ losses + self.strength / self.unit * (p @ above**2))

    @override
    def weights(self, losses: Losses) -> Weights:
        p, above = self._above(losses)
        return np.asarray(p * (1 + 2 * self.strength / self.unit * (above - p @ above)))

    def _above(self, losses: Losses) -> tuple[Weights, Losses]:
        """Return the p_i, and what each loss has above their mean."""
        p = normalise(self.prior, losses.size, "SemiVariance prior")
        return p, np.maximum(losses - p @ losses, 0.0)
