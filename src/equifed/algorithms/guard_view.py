"""What a guard lets an algorithm see of its clients: claims clipped, updates and shares bounded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from typing_extensions import override

from equifed.contract.arrays import Index, Losses, Vector, Weights
from equifed.contract.clients import ClientVectors, Moved
from equifed.contract.curvature import Curvature, CurvatureSum, Form
from equifed.contract.local import LocalSGD
from equifed.contract.participation import bound_share, limit_shares
from equifed.contract.streams import Stream
from equifed.contract.views import ITERATES, ClientsView, VectorsView

FEW = 5
"""Of fewer vectors, if they are not all, the usual length is that of the rounds before."""
USUAL, LEAST_LENGTH = 0.75, 0.4
"""Share of the vectors that are not longer than the usual one, and how much of the first round's
usual length it is at least: where most have nothing left to learn, the others are not too long."""
SHORTEST, FEWER = 4.0, 60
"""What is never too long, in usual lengths: honest ones of twenty clients come to 3.5. Of fewer
than 15 clients the usual length says less, and 60 / n of them are not too long."""
LEAST = 3
"""Among fewer clients there is nobody to compare with."""

Mode = Literal["watch", "on", "off"]


@dataclass(frozen=True)
class Guard:
    r"""What a guard does, and when.

    A claimed loss :math:`l_i` and an update :math:`d_i` are touched beyond

    .. math:: |l_i - m| > k \max(1.4826\, \mathrm{MAD}, \beta m_0), \qquad
              |d_i| > c_n \max(u, 0.4\, u_0), \quad
              c_n = \min(c, \max(4, \gamma n, 60 / n))

    with m the median of all current claims, u the length that three quarters of the updates do not
    exceed, :math:`m_0` and :math:`u_0` those of the first round, and :math:`\gamma` the cap, of n
    clients. A claim enters clipped at the limit. So does an update, which is shortened by a smaller
    weight; one longer than c usual ones counts as if it had the usual length. A loss below the
    least that is possible is raised to it. A client that says it has more than ``samples`` times as
    many samples as the median one counts as that one.

    Parameters
    ----------
    mode : {"watch", "on", "off"}
        ``"watch"`` tells of claims and updates beyond these limits and changes nothing.
    claims, updates, floor, samples : float
        k, c, :math:`\beta`; and how many medians of samples one may have.
    cap : float
        :math:`\gamma`, largest share of the weight of one client (two equal shares if these are
        more); 1 is none.
    """

    mode: Mode = "on"
    claims: float = 50.0
    updates: float = 15.0
    floor: float = 0.1
    samples: float = 1000.0
    cap: float = 0.2

    def __post_init__(self) -> None:
        if self.mode not in ("watch", "on", "off"):
            raise ValueError(f"guard mode is 'watch', 'on' or 'off', got {self.mode!r}.")
        for name in ("claims", "updates", "floor", "samples", "cap"):
            value = getattr(self, name)
            if not 0 < value < np.inf:
                raise ValueError(f"guard {name} must be a finite number > 0, got {value}.")
        if self.updates < 1:
            raise ValueError(f"guard updates must be at least 1 usual length, got {self.updates}.")
        if self.cap > 1:
            raise ValueError(f"guard cap is a share of the weight, at most 1, got {self.cap}.")

    def longest(self, n: int) -> float:
        """Return how many usual lengths the update of one of n clients may have.

        >>> [Guard().longest(n) for n in (4, 10, 20, 40, 1000)]
        [15.0, 6.0, 4.0, 8.0, 15.0]
        """
        most = max(SHORTEST, self.cap * n, FEWER / n)
        return self.updates if self.cap == 1 else min(self.updates, most)

    def shorten(self, lengths: Losses, usual: float, n: int) -> Losses:
        """Return as how long vectors of these lengths count.

        >>> Guard().shorten(np.array([0.5, 3.0, 8.0, 16.0]), 1.0, 20)
        array([0.5, 3. , 4. , 1. ])
        """
        clipped = np.minimum(lengths, self.longest(n) * usual)
        return np.where(lengths > self.updates * usual, usual, clipped)


@dataclass
class Watch:
    """What a guard knows and finds in one round.

    Parameters
    ----------
    guard : Guard
        The limits.
    bounds_sums : bool
        Whether weights are bounded in sums, because no objective bounds them.
    claims : array, shape (N,), optional
        The last claims of all clients, as they were accepted.
    first_claim : float
        Size of the median claim when the first ones were made.
    lengths, first_lengths : dict
        The usual length of vectors by their kind: last, and when the first ones came.
    """

    guard: Guard
    bounds_sums: bool
    claims: Losses | None
    first_claim: float
    lengths: dict[str, float]
    first_lengths: dict[str, float]
    touches: dict[tuple[int, str], str] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)

    @property
    def acts(self) -> bool:
        """Whether it changes what it finds."""
        return self.guard.mode == "on"

    def usual_length(self, kind: str, lengths: Losses, n: int) -> float:
        """Return the length that those of n clients are measured by, and remember it."""
        known = self.lengths.get(kind, 0.0)
        now = find_usual(lengths)
        usual = known if len(lengths) < min(FEW, n) and known > 0 else now
        if not np.isfinite(usual):
            return usual
        self.first_lengths.setdefault(kind, usual)
        self.lengths[kind] = usual if usual == now else usual + 0.2 * (min(now, 2 * usual) - usual)
        return max(usual, LEAST_LENGTH * self.first_lengths[kind])

    def limits(self, claims: Losses, index: Index, n: int) -> tuple[float, float]:
        """Return the least and the largest claim that is not touched."""
        pool = claims if self.claims is None else np.delete(self.claims, index)
        pool = claims if self.claims is None else np.concatenate([pool, claims])
        centre = float(np.median(pool))
        self.first_claim = self.first_claim or abs(centre)
        spread = 1.4826 * float(np.median(np.abs(pool - centre)))
        reach = self.guard.claims * max(spread, self.guard.floor * self.first_claim, 1e-300)
        return centre - reach, centre + reach

    def remember(self, claims: Losses, index: Index, n: int) -> None:
        """Keep accepted claims; a client that made none so far has the median one."""
        if self.claims is None:
            self.claims = np.full(n, float(np.median(claims)))
        self.claims = self.claims.copy()
        self.claims[index] = claims


def find_usual(lengths: Losses) -> float:
    """Return the length that three quarters of some vectors do not exceed, one of them.

    >>> float(find_usual(np.array([1.0, 2.0, 3.0, 1e9])))
    3.0
    """
    return float(np.quantile(lengths, USUAL, method="lower"))


class GuardedVectors(VectorsView):
    """Client vectors none of which is much longer than the others in a sum."""

    partner: GuardedVectors | None = None  # the steps that led to these models
    _factors: Weights | None = None

    @override
    def weighted_sum(self, weights: Weights) -> Vector:
        watch: Watch = self.clients.watch
        weights = self._bound(weights)
        factors = self.factors() if self.partner is None else self.partner.factors()
        if not watch.acts or (factors == 1).all():
            return self.behind.weighted_sum(weights)
        if self.kind not in ITERATES:
            return self.behind.weighted_sum(weights * factors)
        honest = factors == 1  # where the step is not, neither is the model: x stands in for it
        assert self.x is not None
        total = self.behind.weighted_sum(np.where(honest, weights, 0.0))
        return total + float(weights[~honest].sum()) * self.x

    @override
    def weighted_difference(self, old: ClientVectors, weights: Weights) -> Vector:
        return super().weighted_difference(old, self._bound(weights) if self.claimed else weights)

    def _bound(self, weights: Weights) -> Weights:
        """Return the weights cut at the cap, where sums are to be bounded."""
        watch: Watch = self.clients.watch
        if not (watch.acts and watch.bounds_sums and (weights >= 0).all()):
            return weights
        bounded: Weights = self.clients.bounded(weights)
        return bounded

    @override
    def squared_norms(self) -> Losses:
        squares = self.behind.squared_norms()
        watch: Watch = self.clients.watch
        # Corrected steps are how curvature is measured, where lengths differ by nature.
        if not watch.acts or self.corrected or self.claimed or self.clients.few:
            return squares
        n = len(self.clients.names)
        lengths = np.sqrt(squares)
        counted = watch.guard.shorten(lengths, watch.usual_length(self._group, lengths, n), n)
        return np.where(counted < lengths, counted**2, squares)

    def factors(self) -> Weights:
        """Return by what the weight of each client is multiplied."""
        if self._factors is None:
            self._factors = self._find_factors()
        return self._factors

    def _find_factors(self) -> Weights:
        watch: Watch = self.clients.watch
        ones = np.ones(len(self.clients.index))
        if self.claimed and watch.acts:
            watch.notes["sums are hidden: the lengths of updates are not guarded"] = None
        if self.claimed or self.clients.few or not (watch.acts or self.at_hand):
            return ones
        squares = self.behind.squared_norms()
        lengths = np.sqrt(np.where(np.isnan(squares), np.inf, squares))
        n = len(self.clients.names)
        usual = watch.usual_length(self._group, lengths, n)
        counted = watch.guard.shorten(lengths, usual, n)
        factors = np.divide(counted, lengths, out=ones, where=counted < lengths)
        for k in np.flatnonzero(factors < 1):
            what = f"{self._group} is {lengths[k] / usual if usual else np.inf:.3g} usual ones long"
            watch.touches[int(self.clients.index[k]), self._group] = what
        return factors

    @property
    def _group(self) -> str:
        return "update" if self.kind == "displacement" else "gradient"


class GuardedClients(ClientsView):
    """Clients as a guard lets an algorithm see them."""

    Vectors = GuardedVectors

    def __init__(self, behind: Any, watch: Watch) -> None:
        super().__init__(behind)
        self.watch = watch

    @override
    def curvature_sum(
        self, x: Vector, weights: Weights, form: Form = "blocks", thin: Vector | None = None
    ) -> CurvatureSum | str:
        if self.watch.acts:
            return "a guard is on, and it cannot judge what a client says of its curvature"
        return super().curvature_sum(x, weights, form, thin)

    @property
    def few(self) -> bool:
        """Whether the federation is too small to compare its clients."""
        return len(self.names) < LEAST

    @property
    @override
    def sizes(self) -> Index:
        sizes = self.behind.sizes
        if not self.watch.acts or self.few:
            return sizes
        n = len(self.names)
        said = self.behind.subset(np.arange(n)).sizes.astype(np.float64)
        usual = float(np.median(said))
        absurd = said > self.watch.guard.samples * usual
        for i in np.flatnonzero(absurd):
            told = f"says that it has {said[i]:.4g} samples; it counts as the median client does"
            self.watch.touches[int(i), "samples"] = told
        counted = np.where(absurd, usual, said)
        return self._bounded_sizes(counted)[self.index]

    def _bounded_sizes(self, counted: Losses) -> Index:
        """Return the samples of all clients, of which none has more than the cap of the whole."""
        most = 1.0 if self.watch.guard.cap >= 1 else bound_share(self.watch.guard.cap, len(counted))
        allowed = limit_shares(counted, most)
        if allowed is not counted:
            scale = float((allowed[counted > 0] / counted[counted > 0]).max())
            counted = np.minimum(counted, most * float(counted.sum()) / scale)
        return np.maximum(np.floor(counted), np.minimum(counted, 1.0)).astype(np.int64)

    def bounded(self, weights: Weights) -> Weights:
        """Return weights of which none is above its limit."""
        return limit_shares(weights, self.weight_limits(weights))

    def weight_limits(self, weights: Weights) -> Weights:
        """Return how much of a sum each client may have: the cap by its samples, half of it else.

        Nobody gets there honestly by losses alone where no objective says so, and a liar would.
        """
        cap, n, here = self.watch.guard.cap, len(self.names), int(np.count_nonzero(weights))
        sizes = self.sizes
        most, half = bound_share(cap, n, len(weights)), bound_share(cap / 2, n, max(1, here))
        limits: Weights = np.minimum(most, np.maximum(half, sizes / max(1, sizes.sum())))
        return limits

    @override
    def see_numbers(self, numbers: Losses, what: str, stream: Stream) -> Losses:
        if what != "loss" or self.few:
            return numbers
        n = len(self.names)
        low, high = self.watch.limits(numbers, self.index, n)
        if numbers.min() < low:
            known = self.curvature()
            low = max(low, known.lowest) if isinstance(known, Curvature) else low
        clipped = np.clip(numbers, low, high)
        for k in np.flatnonzero(clipped != numbers):
            told = f"claims a loss of {numbers[k]:.4g}; claims between {low:.4g} and {high:.4g}"
            fate = "count as they are" if self.watch.acts else "are usual"
            self.watch.touches[int(self.index[k]), "loss"] = f"{told} {fate}"
        self.watch.remember(clipped, self.index, n)
        return clipped if self.watch.acts else numbers

    @override
    def local_steps(
        self,
        x: Vector,
        work: LocalSGD,
        stream: Stream,
        *,
        control: ClientVectors | None = None,
        target: Vector | None = None,
        slopes: Weights | None = None,
    ) -> Moved:
        moved = super().local_steps(x, work, stream, control=control, target=target, slopes=slopes)
        for kind in ITERATES:
            models = getattr(moved, kind)
            if isinstance(models, GuardedVectors) and isinstance(
                moved.displacement, GuardedVectors
            ):
                models.partner = moved.displacement
        if work.hinge is not None and moved.thresholds is not None and slopes is not None:
            possible = self._possible_thresholds(work, moved.steps, slopes)
            object.__setattr__(moved, "thresholds", self._clip(moved.thresholds, *possible))
        return moved

    def _possible_thresholds(
        self, work: LocalSGD, steps: Index, slopes: Weights
    ) -> tuple[Losses, Losses]:
        """Return between what each client's threshold can end: a step is -lr (1 - s slope)."""
        assert work.hinge is not None
        start, way = work.hinge.threshold, work.lr * steps
        slack = 1e-4 * (abs(start) + way * np.maximum(slopes, 1.0))
        return start - way - slack, start + way * np.maximum(slopes - 1.0, 0.0) + slack

    def _clip(self, thresholds: Losses, low: Losses, high: Losses) -> Losses:
        clipped = np.clip(thresholds, low, high)
        for k in np.flatnonzero(clipped != thresholds):
            told = f"claims a threshold of {thresholds[k]:.4g}, and {low[k]:.4g} to {high[k]:.4g}"
            self.watch.touches[int(self.index[k]), "threshold"] = f"{told} is possible"
        return clipped if self.watch.acts else thresholds
