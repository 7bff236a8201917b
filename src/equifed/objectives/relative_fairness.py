"""Relative fairness: the gap between badly and well served clients."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import numpy as np
from typing_extensions import override

from equifed.contract.absence import bound_share
from equifed.contract.arrays import Index, Losses, Weights
from equifed.objectives.base import Adapted, SaddleObjective, SymmetricSet, check_vector
from equifed.objectives.chi_square import ChiSquare
from equifed.objectives.cvar import Average, CVaR, HeterogeneousCVaR, WorstCase
from equifed.objectives.projections import (
    Permutahedron,
    cut_corner,
    join_ties,
    project_capped_simplex,
    transfer,
)

Equal = Average | CVaR | WorstCase
Side = Equal | HeterogeneousCVaR


class SignedSet(SymmetricSet):
    """A set whose weights may be negative."""

    @override
    def start(self, n: int) -> Weights:
        return self.prox(np.full(n, 1.0 / n), 0.0)

    @override
    def l1_norm(self, n: int) -> float:
        return self.permutahedron(n).l1_norm()


@dataclass(frozen=True)
class IntegratedSet(SignedSet):
    """The set {(a - phi b) / (1 - phi) : a in upper, b in lower}, without a penalty."""

    phi: float
    upper: Equal
    lower: Equal

    @override
    def permutahedron(self, n: int) -> Permutahedron:
        """Return the set: a Minkowski sum of permutahedra adds their sorted corners."""
        a, b = self.upper.permutahedron(n), self.lower.permutahedron(n)
        scale = 1.0 / (1.0 - self.phi)
        corner = scale * (a.corner - self.phi * b.corner[::-1])  # -B has the reversed corner
        return Permutahedron(corner, offset=scale * (a.offset - self.phi * b.offset))


@dataclass(frozen=True)
class CutSet(SignedSet):
    """A set that treats all clients alike, cut where a weight is larger than the cap, in size."""

    whole: IntegratedSet
    cap: float

    @override
    def permutahedron(self, n: int) -> Permutahedron:
        whole, most = self.whole.permutahedron(n), bound_share(self.cap, n)
        corner = whole.corner + whole.offset  # equal shifts: the sides treat all clients alike
        down = -cut_corner(-cut_corner(corner, most)[::-1], most)[::-1]
        return Permutahedron(down, np.zeros(n))


@dataclass(frozen=True)
class UnequalIntegratedSet(SaddleObjective):
    """The same set, for sides that treat clients differently (by caps of their own)."""

    phi: float
    upper: Side
    lower: Side

    @override
    def value(self, losses: Losses) -> float:
        losses = check_vector(losses, "losses")
        high, low = self.upper.value(losses), -self.lower.value(-losses)
        return (high - self.phi * low) / (1.0 - self.phi)

    @override
    def weights(self, losses: Losses) -> Weights:
        losses = check_vector(losses, "losses")
        a, b = self.upper.weights(losses), self.lower.weights(-losses)
        return np.asarray((a - self.phi * b) / (1.0 - self.phi))

    @override
    def prox(self, point: Weights, step: float) -> Weights:
        point = check_vector(point, "point")
        return self.polytope(point.size).project(point)

    @override
    def start(self, n: int) -> Weights:
        return self.prox(np.full(n, 1.0 / n), 0.0)

    @override
    def l1_norm(self, n: int) -> float:
        """Return a bound, attained where the two sides can be on different clients."""
        return (1.0 + self.phi) / (1.0 - self.phi)

    def polytope(self, n: int) -> IntegratedCaps:
        """Return the set for n clients."""
        return IntegratedCaps(self.upper.caps(n), self.lower.caps(n), self.phi)


@dataclass(frozen=True)
class RelativeFairness(Adapted):
    r"""High losses against low ones: the objective of SCAFF-PD-IA.

    .. math:: \Phi(\ell) = \frac{\max_{a \in A} \langle a, \ell\rangle
        - \varphi \min_{b \in B} \langle b, \ell\rangle}{1 - \varphi}, \qquad
        \Lambda_\varphi(A, B) = \Big\{ \frac{a - \varphi b}{1 - \varphi} \Big\}

    Weights sum to one and **may be negative**: lowering the loss of a client that is already well
    served is then discouraged. ``phi = 0`` is the objective ``upper``. As phi grows, the relative
    unfairness max_A / min_B of the exact solution does not increase (Theorem 1 of the paper).

    Parameters
    ----------
    phi
        Weight of the well-served side, in [0, 1).
    upper, lower
        A and B: each ``Average``, ``CVaR``, ``WorstCase`` or, with caps of its own for each client,
        ``HeterogeneousCVaR``; the paper allows any convex sets, of which these have an exact
        projection. A lower side ``CVaR(beta)`` is the mean of the smallest beta fraction of losses.
        The Palma ratio is CVaR(0.1) over CVaR(0.4) (Example 2 of the paper prints the two swapped;
        its main text is right).
    rho
        Strength of an additional chi-square penalty to the uniform weights; 0 in the paper.
    cap
        Largest size of one weight, or two equal shares if these are more; None is the paper's set.

    Examples
    --------
    >>> objective = RelativeFairness(phi=0.5)
    >>> objective.value(np.array([1.0, 2.0, 3.0]))  # (3 - 0.5 * 1) / 0.5
    5.0
    >>> weights = objective.weights(np.array([1.0, 2.0, 3.0]))
    >>> weights
    array([-1.,  0.,  2.])
    >>> objective.split(weights)
    (array([0., 0., 1.]), array([1., 0., 0.]))

    References
    ----------
    SCAFF-PD-IA Definition 2, (4), (5), (6). Its projection by an inner solver over (a, b) is
    replaced by an exact one: the set is a permutahedron (``projections.py``), or with unequal caps
    the base polytope of a submodular function (:class:`IntegratedCaps`).
    """

    phi: float
    upper: Side = field(default_factory=WorstCase)
    lower: Side = field(default_factory=WorstCase)
    rho: float = 0.0
    cap: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.phi < 1:
            raise ValueError(f"RelativeFairness phi must lie in [0, 1), got {self.phi}.")
        for name, side in (("upper", self.upper), ("lower", self.lower)):
            if not isinstance(side, Side):
                raise ValueError(
                    f"RelativeFairness {name} must be Average, CVaR, WorstCase or "
                    f"HeterogeneousCVaR, got {side!r}; other sets have no exact dual step."
                )
        if self.cap is not None and not self.cap > 0:
            raise ValueError(f"RelativeFairness cap must be positive, got {self.cap}.")
        _ = self.inner  # refuses a wrong rho now

    @property
    @override
    def inner(self) -> ChiSquare:
        both = self._set
        if self.cap is None:
            return ChiSquare(self.rho, base=both)
        priors = [getattr(side, "prior", None) for side in (self.upper, self.lower)]
        if isinstance(both, UnequalIntegratedSet) or priors != [None, None]:
            raise ValueError(
                f"{both!r} has no exact cap, because a side treats clients differently; use CVaR "
                "or an Average without a prior, or say cap = 1 in the guard."
            )
        return ChiSquare(self.rho, base=CutSet(both, self.cap))

    @property
    def _set(self) -> IntegratedSet | UnequalIntegratedSet:
        if isinstance(self.upper, Equal) and isinstance(self.lower, Equal):
            return IntegratedSet(self.phi, self.upper, self.lower)
        return UnequalIntegratedSet(self.phi, self.upper, self.lower)

    def extremes(self, losses: Losses, within: float = 0.0) -> tuple[Weights, Weights]:
        """Return the a in A of the largest and the b in B of the smallest weighted loss.

        Losses that differ by no more than ``within`` are treated alike.
        """
        losses = join_ties(check_vector(losses, "losses"), within)
        return self.upper.weights(losses), self.lower.weights(-losses)

    def unfairness_bounds(self, losses: Losses, least: float, most: float) -> tuple[float, float]:
        r"""Return bounds on the relative unfairness max_A / min_B from the discrepancy alone.

        .. math:: \varphi + \frac{D}{M} \le \frac{\max_A}{\min_B} \le \varphi + \frac{D}{m},
            \qquad D = \max_A - \varphi \min_B

        for :math:`m \le \min_B \le M` (Proposition 9 of the paper). The lower bound does not fall
        with phi and the upper one does not rise: a larger phi ties the difference, which training
        minimises, closer to the ratio.

        >>> objective = RelativeFairness(phi=0.5)
        >>> objective.unfairness_bounds(np.array([2.0, 3.0, 6.0]), least=1.0, most=4.0)
        (1.75, 5.5)
        """
        a, b = self.extremes(losses)
        high, low = float(a @ losses), float(b @ losses)
        if high < 0 or not 0 < least <= low <= most:
            raise ValueError(
                f"the bounds need 0 < least <= {low:g} <= most and losses >= 0 over A, got least "
                f"{least:g}, most {most:g} and {high:g} over A."
            )
        gap = high - self.phi * low
        return self.phi + gap / most, self.phi + gap / least

    def split(self, weights: Weights) -> tuple[Weights, Weights]:
        """Return a in A and b in B with weights = (a - phi b) / (1 - phi).

        The sorted weights are majorised by the corner of the set, so at most n - 1 transfers
        between two entries lead from the corner to them (Hardy, Littlewood, Polya). The same
        transfers, done to the corners of A and B, give a and b. O(n log n).
        """
        weights = check_vector(weights, "weights")
        both = self._set
        if isinstance(both, UnequalIntegratedSet):
            return both.polytope(weights.size).split(weights)
        whole = both.permutahedron(weights.size)
        upper, lower = (side.permutahedron(weights.size) for side in (both.upper, both.lower))
        order = np.argsort(-(weights - whole.offset), kind="stable")
        target = (weights - whole.offset)[order]
        sides = transfer(whole.corner, target, (upper.corner, lower.corner[::-1]))
        a, b = np.empty_like(weights), np.empty_like(weights)
        a[order], b[order] = sides
        return a + upper.offset, b + lower.offset


@dataclass(frozen=True, eq=False)
class IntegratedCaps:
    r"""The same set from its caps: the base polytope of a submodular function.

    .. math:: W = \{(a - \varphi b) / (1 - \varphi) : 0 \le a_i \le \alpha_i,\
        0 \le b_i \le \beta_i, \text{ both of sum } 1\}

    A sum over a set S of clients is at most

    .. math:: f(S) = \frac{\min(1, \alpha(S)) - \varphi \max(0, 1 - \beta(S^c))}{1 - \varphi}

    The nearest point is found by decomposition (Fujishige 1980): shift the point to the right
    total; if some S is above f(S), the S that is most above has exactly f(S) at the answer, and
    both parts are solved alike. Each search is exact and linear in n, because f is the least of
    four sums over clients; there are at most n - 1 of them.

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

    def split(self, weights: Weights) -> tuple[Weights, Weights]:
        """Return a and b within their caps with weights = (a - phi b) / (1 - phi).

        Each b_i has an interval; all go the same part of the way through theirs, to sum one.
        """
        upper, lower, phi = self.upper, self.lower, self.phi
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

    def _solve(self, point: Weights, inside: Index, group: Index, weights: Weights) -> None:
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

    def _most(self, inside: Index, group: Index) -> float:
        """Return f(inside and group) - f(inside)."""
        return self._bound(np.concatenate([inside, group])) - self._bound(inside)

    def _bound(self, members: Index) -> float:
        outside = np.delete(self.lower, members)
        high = min(1.0, float(self.upper[members].sum())) if members.size else 0.0
        low = 1.0 - min(1.0, float(outside.sum())) if outside.size else 1.0
        return (high - self.phi * low) / (1.0 - self.phi)

    def _most_above(self, aim: Weights, inside: Index, group: Index) -> Index:
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
