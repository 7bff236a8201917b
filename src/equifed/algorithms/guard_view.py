"""What a guard lets an algorithm see of its clients: claims clipped, updates and shares bounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from typing_extensions import override

from equifed.algorithms.guard import Watch
from equifed.contract import ClientVectors, Index, LocalSGD, Losses, Moved, Stream, Vector, Weights
from equifed.contract.absence import bound_share, limit_shares
from equifed.contract.curvature import Curvature, CurvatureSum, Form
from equifed.contract.local import LocalWork
from equifed.contract.views import ITERATES, ClientsView, VectorsView

LEAST = 3
"""Among fewer clients there is nobody to compare with."""


class GuardedVectors(VectorsView):
    """Client vectors none of which is much longer than the others in a sum."""

    partner: GuardedVectors | None = None  # the steps that led to these models
    _factors: Weights | None = None

    @override
    def see_sum(self, weights: Weights, add: Callable[[Weights], Vector]) -> Vector:
        watch: Watch = self.clients.watch
        weights = self._bound(weights)
        factors = self.factors() if self.partner is None else self.partner.factors()
        if not watch.acts or (factors == 1).all():
            return add(weights)
        if self.kind not in ITERATES:
            return add(weights * factors)
        honest = factors == 1  # where the step is not, neither is the model: x stands in for it
        assert self.x is not None
        total = add(np.where(honest, weights, 0.0))
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
        local: LocalSGD,
        stream: Stream,
        *,
        control: ClientVectors | None = None,
        target: Vector | None = None,
        slopes: Weights | None = None,
    ) -> Moved:
        work = local.work()
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
        self, work: LocalWork, steps: Index, slopes: Weights
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
