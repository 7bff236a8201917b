"""The average client loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from equifed.contract.arrays import Losses, Weights
from equifed.objectives.base import CappedSet, SymmetricSet, check_numbers, check_vector, normalise
from equifed.objectives.projections import Permutahedron


@dataclass(frozen=True)
class Average(SymmetricSet, CappedSet):
    r"""Mean loss of the clients, uniform or weighted by a prior.

    .. math:: \Phi(\ell) = \sum_i p_i \ell_i, \qquad \Lambda = \{p\}, \quad \psi = 0

    Parameters
    ----------
    prior
        Positive numbers, one per client (sample counts, say), normalised to sum one; None is
        uniform.

    Examples
    --------
    >>> Average().value(np.array([1.0, 2.0, 6.0]))
    3.0
    >>> Average(prior=(100, 100, 200)).weights(np.array([1.0, 2.0, 6.0]))
    array([0.25, 0.25, 0.5 ])

    References
    ----------
    FedAvg and SCAFFOLD. The averages that the SCAFF-PD and SCAFF-PD-IA papers report are uniform.
    """

    prior: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "prior", check_numbers(self.prior, "Average prior"))

    @override
    def value(self, losses: Losses) -> float:
        losses = check_vector(losses, "losses")
        return float(self.start(losses.size) @ losses)

    @override
    def weights(self, losses: Losses) -> Weights:
        return self.start(check_vector(losses, "losses").size)

    @override
    def prox(self, point: Weights, step: float) -> Weights:
        return self.start(check_vector(point, "point").size)

    @override
    def start(self, n: int) -> Weights:
        return normalise(self.prior, n, "Average prior")

    @override
    def permutahedron(self, n: int) -> Permutahedron:
        return Permutahedron(corner=np.zeros(n), offset=self.start(n))

    @override
    def caps(self, n: int) -> Weights:  # with sum one, no other weights keep below the prior
        return self.start(n)
