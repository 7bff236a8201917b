"""Objectives in which no single client has more than a cap of the weight.

The cap of n clients is ``max(cap, 2 / n)``: nobody is denied twice an equal share. It is part of
the objective, with exact dual steps: the set of weights is cut by |w_i| <= cap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from typing_extensions import override

from equifed.contract.absence import bound_share, limit_shares
from equifed.contract.arrays import Weights
from equifed.objectives.base import CappedSet, Objective, SaddleObjective, SymmetricSet, normalise
from equifed.objectives.chi_square import ChiSquare
from equifed.objectives.cvar import Average, CVaR, HeterogeneousCVaR, WorstCase
from equifed.objectives.kl import KL, Tilted
from equifed.objectives.projections import Permutahedron, cut_corner
from equifed.objectives.relative_fairness import RelativeFairness


@dataclass(frozen=True)
class CappedTail(SymmetricSet, CappedSet):
    """The worst case or CVaR where no client has more than a cap of the weight: a wider CVaR.

    Examples
    --------
    >>> CappedTail(WorstCase(), cap=0.4).weights(np.array([1.0, 2.0, 3.0, 9.0, 5.0]))
    array([0. , 0. , 0.2, 0.4, 0.4])
    """

    base: WorstCase | CVaR
    cap: float

    @override
    def permutahedron(self, n: int) -> Permutahedron:
        whole = self.base.permutahedron(n)
        return replace(whole, corner=cut_corner(whole.corner, bound_share(self.cap, n)))

    @override
    def caps(self, n: int) -> Weights:
        return np.minimum(self.base.caps(n), bound_share(self.cap, n))


def with_cap(objective: Objective, cap: float) -> SaddleObjective:
    """Return the objective with every weight at most ``max(cap, 2 / n)``.

    It is exact, or the objective is refused.

    >>> with_cap(ChiSquare(0.1), 0.2)
    ChiSquare(rho=0.1, base=CappedTail(base=WorstCase(), cap=0.2), centre=None, scale=None)
    """
    if isinstance(objective, CappedTail):
        return replace(objective, cap=min(cap, objective.cap))
    if isinstance(objective, WorstCase | CVaR):
        return CappedTail(objective, cap)
    if isinstance(objective, Average):
        return objective if objective.prior is None else Average(_cut(objective.prior, cap))
    if isinstance(objective, ChiSquare):
        return replace(objective, base=with_cap(objective.base, cap))
    if isinstance(objective, RelativeFairness | KL):
        return replace(objective, cap=cap if objective.cap is None else min(cap, objective.cap))
    if isinstance(objective, Tilted) and objective.unfit is None:
        return with_cap(objective.inner, cap)
    if isinstance(objective, HeterogeneousCVaR):
        return _cut_tails(objective, cap)
    raise ValueError(
        f"{objective!r} has no exact form in which no client has more than {cap:g} of the weight, "
        "which guards need; use cvar, worst-case, chi-square, kl or relative-fairness, or set "
        "cap = 1 in the guard, which lets one client have all of it."
    )


def _cut(prior: tuple[float, ...], cap: float) -> tuple[float, ...]:
    n = len(prior)
    return tuple(limit_shares(normalise(prior, n, "Average prior"), bound_share(cap, n)).tolist())


def _cut_tails(objective: HeterogeneousCVaR, cap: float) -> SaddleObjective:
    """Return shares within the cap, and tails so wide that p_i / alpha_i is, too."""
    tails, sizes = objective.tails, objective.sizes
    if sizes is None and not isinstance(tails, tuple):
        return CappedTail(CVaR(tails), cap)
    n = len(sizes) if sizes is not None else len(np.atleast_1d(tails))
    most = bound_share(cap, n)
    shares = limit_shares(objective.start(n), most)
    wide = np.minimum(np.maximum(np.asarray(tails), shares / most), 1.0)
    return HeterogeneousCVaR(tuple(wide.tolist()), tuple(shares.tolist()))
