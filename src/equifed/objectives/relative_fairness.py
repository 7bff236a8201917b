"""Relative fairness: the gap between badly and well served clients."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from typing_extensions import override

from equifed.contract.absence import bound_share
from equifed.contract.arrays import Losses, Weights, check_settings
from equifed.objectives.base import Adapted, Relative, SaddleObjective, SymmetricSet, check_vector
from equifed.objectives.chi_square import ChiSquare
from equifed.objectives.cvar import WorstCase
from equifed.objectives.projections import Permutahedron, cut_corner, join_ties, transfer

TOLERANCE = 1e-6
"""How exact projections onto sets of the user's are, at least (:class:`GeneralIntegratedSet`)."""

_MOST = 10_000


@dataclass(frozen=True)
class IntegratedSet(SymmetricSet):
    """The set {(a - phi b) / (1 - phi) : a in upper, b in lower}, without a penalty.

    With a cap it is cut where a weight is larger, in size, than the cap divided by the sum of the
    positive ones, or one and a half equal shares; both sides must treat all clients alike.

    >>> from equifed.objectives import CVaR, WorstCase
    >>> losses = np.array([1.0, 2.0, 4.0])
    >>> IntegratedSet(0.5, WorstCase(), WorstCase()).value(losses)  # (4 - phi 1) / (1 - phi)
    7.0
    """

    phi: float
    upper: SymmetricSet
    lower: SymmetricSet
    cap: float | None = None

    @override
    def permutahedron(self, n: int) -> Permutahedron:
        """Return the set: a Minkowski sum of permutahedra adds their sorted corners."""
        a, b = self.upper.permutahedron(n), self.lower.permutahedron(n)
        scale = 1.0 / (1.0 - self.phi)
        corner = scale * (a.corner - self.phi * b.corner[::-1])  # -B has the reversed corner
        offset = scale * (a.offset - self.phi * b.offset)
        if self.cap is None:
            return Permutahedron(corner, offset)
        whole = corner + offset  # equal offsets
        most = cap_signed(self.cap, n, whole)
        down = -cut_corner(-cut_corner(whole, most)[::-1], most)[::-1]
        return Permutahedron(down, np.zeros(n))

    @override
    def start(self, n: int) -> Weights:
        return self.prox(np.full(n, 1.0 / n), 0.0)

    @override
    def l1_norm(self, n: int) -> float:
        return self.permutahedron(n).l1_norm()


def cap_signed(cap: float, n: int, corner: Weights) -> float:
    """Return the largest size of a weight: a cap divided by the sum of the positive ones.

    Negative weights stretch what clients differ in, so less moves the model as far. Nobody is
    denied one and a half equal shares.

    >>> cap_signed(0.2, 20, np.array([2.0] + 18 * [0.0] + [-1.0]))
    0.1
    """
    return max(bound_share(cap, n) / float(corner.clip(min=0).sum()), min(1.0, 1.5 / n))


@dataclass(frozen=True)
class GeneralIntegratedSet(SaddleObjective):
    r"""The same set for any convex A and B, from their projections and maximisers.

    The maximiser is exact: that of A minus phi times the minimiser of B. The nearest point to z is
    found by projecting onto A and B in turn, until the proof

    .. math:: |w - \Pi(z)|^2 \le \max_{s \in \Lambda} \langle z - w, s - w\rangle
        \le \epsilon^2 \max(1, |z - w|)

    holds for ``TOLERANCE`` epsilon; else it is refused. What it returns lies in the set.

    >>> from equifed.objectives import Average, HeterogeneousCVaR
    >>> unequal = GeneralIntegratedSet(0.5, HeterogeneousCVaR((0.5, 1.0)), Average())
    >>> unequal.weights(np.array([2.0, 1.0]))  # ((1, 0) - 0.5 (0.5, 0.5)) / 0.5
    array([ 1.5, -0.5])
    """

    phi: float
    upper: SaddleObjective
    lower: SaddleObjective

    @override
    def weights(self, losses: Losses) -> Weights:
        return self._mix(self.upper.weights(losses), self.lower.weights(-losses))

    @override
    def prox(self, point: Weights, step: float) -> Weights:
        return self._mix(*self.pair(point))

    def pair(self, point: Weights) -> tuple[Weights, Weights]:
        """Return a in A and b in B whose (a - phi b) / (1 - phi) is nearest to a point."""
        z, b = point, self.lower.start(point.size)
        target = (1.0 - self.phi) * z
        if self.phi == 0:
            return self.upper.prox(z, 0.0), b
        for _ in range(_MOST):
            a = self.upper.prox(target + self.phi * b, 0.0)
            b = self.lower.prox((a - target) / self.phi, 0.0)
            w = self._mix(a, b)
            gap = float((z - w) @ (self.weights(z - w) - w))
            if gap <= TOLERANCE**2 * max(1.0, float(np.linalg.norm(z - w))):
                return a, b
        raise ValueError(
            f"{_MOST} projections onto {self.upper!r} and {self.lower!r} in turn are still "
            f"{gap**0.5:.2g} from the nearest weights; at most {TOLERANCE:g} is allowed. Check "
            "that prox is the projection onto the set of which weights is the maximiser."
        )

    @override
    def start(self, n: int) -> Weights:
        return self._mix(self.upper.start(n), self.lower.start(n))

    @override
    def l1_norm(self, n: int) -> float:
        """Return a bound on |Lambda|_1, by the triangle inequality."""
        both = self.upper.l1_norm(n) + self.phi * self.lower.l1_norm(n)
        return both / (1.0 - self.phi)

    def _mix(self, a: Weights, b: Weights) -> Weights:
        return np.asarray((a - self.phi * b) / (1.0 - self.phi))


@dataclass(frozen=True)
class RelativeFairness(Relative, Adapted):
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
        A and B: ``Average``, ``CVaR`` or ``WorstCase``, whose dual step is exact; or any other
        convex set, a saddle objective without a penalty whose ``prox`` is the projection that you
        give and whose ``weights`` is its maximiser, within ``TOLERANCE``. A lower side
        ``CVaR(beta)`` is the mean of the smallest beta fraction of losses. The Palma ratio is
        CVaR(0.1) over CVaR(0.4) (Example 2 of the paper prints the two swapped; its main text is
        right).
    rho
        Strength of an additional chi-square penalty to the uniform weights; 0 in the paper.
    cap
        Largest size of one weight where none is negative, or two equal shares if these are more; it
        is divided by the sum of the positive ones. None is the paper's set.
    scale
        The loss that counts as one; see :class:`equifed.objectives.Relative`.

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
    replaced by an exact one where the set is a permutahedron (``projections.py``).
    """

    phi: float
    upper: SaddleObjective = field(default_factory=WorstCase)
    lower: SaddleObjective = field(default_factory=WorstCase)
    rho: float = 0.0
    cap: float | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        check_settings(self, phi="[0, 1)", cap="(0, inf]")
        for name, side in (("upper", self.upper), ("lower", self.lower)):
            if getattr(type(side), "penalty", None) is not SaddleObjective.penalty:
                raise ValueError(
                    f"RelativeFairness {name} must be a set of weights: Average, CVaR, WorstCase "
                    f"or another saddle objective without a penalty, got {side!r}."
                )
        priors = [getattr(side, "prior", None) for side in (self.upper, self.lower)]
        if self.cap is not None and (priors != [None, None] or self.sides is None):
            raise ValueError(
                f"{self!r} has no exact cap, because a side treats clients differently; use an "
                "Average without a prior, or set cap = 1 in the guard."
            )
        _ = self.inner  # refuses a wrong rho now

    @property
    @override
    def inner(self) -> ChiSquare:
        if self.sides is None:
            mixed: SaddleObjective = GeneralIntegratedSet(self.phi, self.upper, self.lower)
        else:
            mixed = IntegratedSet(self.phi, *self.sides, self.cap)
        return ChiSquare(self.rho, mixed, scale=self.scale)

    @property
    def sides(self) -> tuple[SymmetricSet, SymmetricSet] | None:
        """A and B where both are permutahedra, so that all is exact; else None."""
        upper, lower = self.upper, self.lower
        if isinstance(upper, SymmetricSet) and isinstance(lower, SymmetricSet):
            return upper, lower
        return None

    def largest(self, n: int) -> float:
        """Return the largest size of a weight of n clients, where all are treated alike.

        >>> RelativeFairness(0.5).largest(8), RelativeFairness(0.5, cap=0.4).largest(8)
        (2.0, 0.2)
        """
        whole = self.inner.base.permutahedron(n)  # type: ignore[attr-defined]
        return float(np.abs(whole.corner + whole.offset).max())

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
        transfers, done to the corners of A and B, give a and b. O(n log n). Other sets than
        permutahedra: within ``TOLERANCE``.
        """
        weights = check_vector(weights, "weights")
        if self.sides is None:
            return GeneralIntegratedSet(self.phi, self.upper, self.lower).pair(weights)
        upper, lower = (side.permutahedron(weights.size) for side in self.sides)
        whole = IntegratedSet(self.phi, *self.sides).permutahedron(weights.size)
        order = np.argsort(-(weights - whole.offset), kind="stable")
        target = (weights - whole.offset)[order]
        a, b = np.empty_like(weights), np.empty_like(weights)
        a[order], b[order] = transfer(whole.corner, target, (upper.corner, lower.corner[::-1]))
        return a + upper.offset, b + lower.offset
