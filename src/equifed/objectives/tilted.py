"""Tilted empirical risk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from equifed.contract.arrays import Losses, Weights
from equifed.objectives.average import Average
from equifed.objectives.base import SaddleObjective, check_numbers
from equifed.objectives.kl import KL


@dataclass(frozen=True)
class Tilted(SaddleObjective):
    r"""Log-average of exponentials of the losses (TERM).

    .. math:: \Phi(\ell) = \frac1t \log \sum_i p_i e^{t \ell_i}, \qquad
        \nabla \Phi(\ell)_i \propto p_i e^{t \ell_i}

    t > 0 is ``KL`` with strength 1 / t, and has its penalty and its dual steps; t = 0 is the
    average. t < 0 magnifies *small* losses: it discounts outliers and is no maximum over weights,
    so that primal-dual algorithms refuse it; ``TiltedERM`` minimises it.

    Parameters
    ----------
    tilt
        Any finite number t.
    prior
        Positive numbers, one per client, normalised to sum one; None is uniform.

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

    def __post_init__(self) -> None:
        if not np.isfinite(self.tilt):
            raise ValueError(f"Tilted tilt must be a finite number, got {self.tilt}.")
        object.__setattr__(self, "prior", check_numbers(self.prior, "Tilted prior"))

    @override
    def value(self, losses: Losses) -> float:
        if self._is_average():
            return Average(self.prior).value(losses)
        return self._sign() * self._entropic().value(self._sign() * np.asarray(losses))

    @override
    def weights(self, losses: Losses) -> Weights:
        if self._is_average():
            return Average(self.prior).weights(losses)
        return self._entropic().weights(self._sign() * np.asarray(losses))

    @override
    def penalty(self, weights: Weights) -> float:
        return self._saddle.penalty(weights)

    @override
    def prox(self, point: Weights, step: float) -> Weights:
        return self._saddle.prox(point, step)

    @override
    def mirror(self, weights: Weights, losses: Losses, step: float) -> Weights:
        return self._saddle.mirror(weights, losses, step)

    @override
    def start(self, n: int) -> Weights:
        return Average(self.prior).start(n)

    @override
    def strong_convexity(self, n: int) -> float:
        return self._saddle.strong_convexity(n)

    @property
    @override
    def is_smooth(self) -> bool:
        return self._is_average()

    @property
    @override
    def is_entropic(self) -> bool:
        return True

    @property
    @override
    def unfit(self) -> str | None:
        if self.tilt >= 0 or self._is_average():
            return None
        return (
            "a negative tilt favours small losses, which is no maximum over weights; use the "
            "algorithm tilted-erm"
        )

    @property
    def _saddle(self) -> KL | Average:
        if self.unfit is not None:
            raise ValueError(f"{self!r} has no dual step: {self.unfit}.")
        return Average(self.prior) if self._is_average() else self._entropic()

    def _is_average(self) -> bool:
        return self.tilt == 0 or not np.isfinite(1.0 / self.tilt)

    def _sign(self) -> float:
        return 1.0 if self.tilt > 0 else -1.0

    def _entropic(self) -> KL:
        return KL(1.0 / abs(self.tilt), self.prior)
