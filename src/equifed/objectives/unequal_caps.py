"""The integrated set of relative fairness for sides that treat clients differently.

    W = {(a - phi b) / (1 - phi) : 0 <= a_i <= alpha_i, 0 <= b_i <= beta_i, both of sum 1}

A sum over a set S of clients is at most

    f(S) = (min(1, alpha(S)) - phi max(0, 1 - beta(outside S))) / (1 - phi),

a submodular function, and W is its base polytope. The nearest point is found by decomposition
(Fujishige 1980): shift the point to the right total; if some S is above f(S), the S that is most
above has exactly f(S) at the answer, and both parts are solved alike. Each search is exact and
linear in n, because f is the least of four sums over clients; there are at most n - 1 of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from equifed.contract.arrays import Weights
from equifed.objectives.projections import project_capped_simplex

Members = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class IntegratedCaps:
    """W, from its caps.

    Examples
    --------
    >>> half = IntegratedCaps(np.array([0.5, 1.0, 1.0]), np.array([1.0, 1.0, 0.25]), phi=0.5)
    >>> half.project(np.array([9.0, 0.0, -1.0]))
    array([ 1. ,  0.25, -0.25])
    """

    upper: Weights
    lower: Weights
    phi: float

    def project(self, point: Weights) -> Weights:
        """Return the nearest point of W."""
        order = np.argsort(-point, kind="stable")
        weights = np.empty_like(point)
        largest, least = 1.0 / (1.0 - self.phi), -self.phi / (1.0 - self.phi)
        with np.errstate(over="ignore"):
            gaps = point[order][:-1] - point[order][1:] > 2.0 * (largest - least)
        # No client can be that far from another: those above a gap take all they may.
        inside = np.empty(0, dtype=np.int64)
        for group in np.split(order, np.flatnonzero(gaps) + 1):
            with np.errstate(over="ignore"):  # of the others, which are not looked at
                near = point - point[group[0]]
            self._solve(near, inside, group, weights)
            inside = np.concatenate([inside, group])
        return weights

    def _solve(self, point: Weights, inside: Members, group: Members, weights: Weights) -> None:
        """Set the weights of a group, of which those ``inside`` have the largest total."""
        work = [(inside, group)]
        while work:
            inside, group = work.pop()
            whole = self._most(inside, group)
            shift = (float(point[group].sum()) - whole) / group.size
            aim = point[group] - shift
            above = self._most_above(aim, inside, group)
            if above.size in (0, group.size):
                weights[group] = aim
            else:
                taken = np.isin(group, above)
                work.append((inside, group[taken]))
                work.append((np.concatenate([inside, group[taken]]), group[~taken]))

    def _most(self, inside: Members, group: Members) -> float:
        """Return f(inside and group) - f(inside)."""
        return self._bound(np.concatenate([inside, group])) - self._bound(inside)

    def _bound(self, members: Members) -> float:
        outside = np.delete(self.lower, members)
        high = min(1.0, float(self.upper[members].sum())) if members.size else 0.0
        low = 1.0 - min(1.0, float(outside.sum())) if outside.size else 1.0
        return (high - self.phi * low) / (1.0 - self.phi)

    def _most_above(self, aim: Weights, inside: Members, group: Members) -> Members:
        """Return the part of a group that exceeds its bound most; nobody if none does."""
        scale, best, answer = 1.0 / (1.0 - self.phi), 0.0, group[:0]
        for full, empty in product((True, False), repeat=2):  # which of the four sums f is
            price = np.zeros(group.size) if full else scale * self.upper[group]
            price = price - (0.0 if empty else self.phi * scale * self.lower[group])
            part = group[aim - price > 0]
            excess = float(aim[np.isin(group, part)].sum()) - self._most(inside, part)
            if excess > best + 1e-14 * scale * group.size:
                best, answer = excess, part
        return answer


def split_by_caps(
    weights: Weights, upper: Weights, lower: Weights, phi: float
) -> tuple[Weights, Weights]:
    """Return a and b within their caps with weights = (a - phi b) / (1 - phi).

    Each b_i has an interval; all go the same part of the way through theirs, to sum one.
    """
    if phi == 0:
        return weights, lower / lower.sum()
    net = (1.0 - phi) * weights
    with np.errstate(over="ignore"):
        least = np.clip(-net / phi, 0.0, lower)  # so that a >= 0
        most = np.clip((upper - net) / phi, least, lower)  # so that a is within its cap
    room = float((most - least).sum())
    part = np.clip((1.0 - float(least.sum())) / room, 0.0, 1.0) if room > 0 else 0.0
    # For tiny phi the rounding of the weights is all that b sees; the projection keeps it in B.
    b = project_capped_simplex(least + part * (most - least), lower)
    return np.asarray(net + phi * b), np.asarray(b)
