"""The largest client loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from equifed.contract.arrays import Losses, Weights
from equifed.objectives.base import CappedSet, SymmetricSet, check_vector
from equifed.objectives.projections import Permutahedron


@dataclass(frozen=True)
class WorstCase(SymmetricSet, CappedSet):
    r"""Loss of the client that is served worst (agnostic federated learning).

    .. math:: \Phi(\ell) = \max_i \ell_i, \qquad
        \Lambda = \{w \ge 0, \textstyle\sum_i w_i = 1\}, \quad \psi = 0

    One client that reports a large loss takes the whole weight; ``CVaR`` caps what one can take.

    Examples
    --------
    >>> WorstCase().value(np.array([1.0, 4.0, 2.0]))
    4.0
    >>> WorstCase().prox(np.array([0.2, 1.4, 0.0]), step=1.0)
    array([0., 1., 0.])

    References
    ----------
    Mohri et al. 2019 (AFL); SCAFF-PD (3.3) with rho = 0.
    """

    @override
    def value(self, losses: Losses) -> float:
        return float(check_vector(losses, "losses").max())

    @override
    def weights(self, losses: Losses) -> Weights:
        losses = check_vector(losses, "losses")
        worst = losses == losses.max()
        return np.asarray(worst / worst.sum())

    @override
    def permutahedron(self, n: int) -> Permutahedron:
        return Permutahedron(corner=np.eye(1, n)[0], offset=np.zeros(n))

    @override
    def caps(self, n: int) -> Weights:
        return np.ones(n)
