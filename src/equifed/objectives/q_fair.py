"""The q-fair objective of q-FFL."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from equifed.contract.arrays import Losses, Weights
from equifed.objectives.base import Objective, check_numbers, check_vector, normalise


@dataclass(frozen=True)
class QFair(Objective):
    r"""Sum of powers of the losses: larger losses count more as q grows.

    .. math:: \Phi(\ell) = \sum_i \frac{p_i \ell_i^{q+1}}{q + 1}, \qquad
        \nabla \Phi(\ell)_i = p_i \ell_i^q

    with p_i = 1 unless a prior is given. The gradient is positive but does **not** sum to one, so
    this objective is no saddle objective over the simplex. SCAFF-PD Section 3 lists it with
    Lambda = R^n and psi = |w|^{1 + 1/q}; the conjugate of the sum above is
    psi(w) = q/(q+1) * sum of w_i^{1 + 1/q} over w >= 0, for p = 1.

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
        return float(self._shares(losses.size) @ powers) / (self.q + 1.0)

    @override
    def weights(self, losses: Losses) -> Weights:
        losses = self._checked(losses)
        return np.asarray(self._shares(losses.size) * _power(losses, self.q))

    def _shares(self, n: int) -> Weights:
        return np.ones(n) if self.prior is None else normalise(self.prior, n, "QFair prior")

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
