"""Who counts in a round, and how those who answered stand for everybody.

An algorithm calls the roll once and goes on with :class:`Everyone`: arrays have an entry for every
client of the federation, and sums are over all of them, whoever is there. With everybody there both
are those of the engine, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from typing_extensions import override

from equifed.contract import Clients, Index, LocalSGD, Losses, Moved, Stream, Vector, Weights
from equifed.contract.absence import (
    PATIENCE,
    carry_over,
    count_absence,
    draw_clients,
    scale_to_present,
    scatter,
)
from equifed.contract.views import ITERATES, ClientsView, VectorsView
from equifed.objectives.base import Adapted, Objective

BLEND = 0.05  # share of a round in the running mean of how far snapshots lie off the straight way


class EveryoneVectors(VectorsView):
    """Vectors of those who are there, whose sums are over everybody.

    Weights are those of all clients. A sum is scaled so that its mean is right whoever is missing:
    steps and gradients by N / |present|; models are the present one plus such a step; and of local
    steps with a correction only what a client adds to the shared ``target`` is scaled.
    """

    shared: Vector | None = None  # what every client's displacement has per step

    @override
    def see_sum(self, weights: Weights, add: Callable[[Weights], Vector]) -> Vector:
        present: Weights = self.clients.scale(weights)
        total = add(present)
        if self.clients.complete:
            return total
        if self.kind in ITERATES and self.x is not None:
            lacking: float = self.clients.lacking(weights, present)
            return total + lacking * self.x
        if self.shared is not None:
            steps = self.clients.steps
            over = float(present @ steps[self.clients.index]) - float(weights @ steps)
            return total - over * self.shared
        return total

    @override
    def step(self, weights: Weights, everyone: Weights | None = None) -> Vector:
        return super().step(weights, weights)

    @override
    def allows(self, weights: Weights) -> bool:
        return super().allows(self.clients.scale(weights))


class Everyone(ClientsView):
    """All clients in a round, as those who are there let them be seen.

    ``objective`` is that over those who count (``members``; None: all do), ``weights`` are the last
    ones, in which those who count again have an equal share, ``away`` the rounds since each
    client's last answer, after this round, and ``notes`` say who left and who is back.
    """

    Vectors = EveryoneVectors

    def __init__(self, behind: Clients, state: Any, objective: Any, patience: float) -> None:
        super().__init__(behind)
        n = len(behind.names)
        self._losses: Losses | None = getattr(state, "losses", None)
        self._before: Index | None = getattr(state, "away", None)
        self.away = count_absence(self._before, behind.index, n)
        self.objective, self.members = over_members(objective, self.away, patience)
        old = np.zeros(n, dtype=bool) if self._before is None else self._before >= patience
        left = np.flatnonzero((self.away >= patience) & ~old).tolist()
        back = np.flatnonzero(old & (self.away < patience)).tolist()
        self.weights: Any = getattr(state, "weights", None)
        if back and self.weights is not None:
            size, total = len(self.counted()), self.weights.sum()  # 1 but where the sum is free
            self.weights = self.weights * (1 - len(back) / size)
            self.weights[back] = total / size
        self.notes = tuple(self._told(objective, left, back))
        self.steps = np.ones(n)
        self._drawn: float | None = None

    @property
    def complete(self) -> bool:
        """Whether everybody is there."""
        return len(self.index) == len(self.names)

    def counted(self) -> Index:
        """Return who counts, there or not."""
        return np.arange(len(self.names)) if self.members is None else self.members

    def scale(self, weights: Weights) -> Weights:
        """Return the weights of those who are there, from those of all: w_i N / |present|."""
        if self._drawn is not None:
            return self._drawn * weights[self.index]
        return scale_to_present(weights, self.index, self.members)

    def lacking(self, weights: Weights, present: Weights) -> float:
        """Return what the scaled weights lack to the sum of all; negative: they have more."""
        whole = float(weights.sum())
        return whole * (1 - self._drawn) if self._drawn is not None else whole - present.sum()

    def draw(self, weights: Weights, size: int | None, stream: Stream) -> tuple[Everyone, Weights]:
        """Return ``size`` draws by ``weights`` and the weights in their sums; None: everybody."""
        if size is None:
            return self, weights
        there, counts = draw_clients(self.behind, weights, size, stream)
        part = self.over(there)
        part._drawn = float(self.scale(weights).sum() / weights.sum())  # 1 if everybody is there
        return part, scatter(counts, there.index, len(self.names))

    def over(self, clients: Clients) -> Everyone:
        """Return the same roll for others who stand for everybody."""
        return self._of(clients)

    def snapshot(
        self,
        moved: Moved,
        share: Weights,
        ends: tuple[Vector, Vector],
        part: float,
        bend: Vector | None,
    ) -> tuple[Vector, Vector | None]:
        """Return the mean model after ``part`` of the local steps, and how far off it usually lies.

        Where somebody is missing it is taken on the straight way between the ``ends`` of the round,
        plus a running mean of how far snapshots lie off it (``bend``): the average of those who are
        there would favour them. Without a snapshot it is the model at the beginning.
        """
        x, new = ends
        if moved.snapshot is None:
            return x, None
        at = moved.snapshot.weighted_sum(share)
        if self.complete:
            return at, None
        off = at - (x - part * moved.displacement.weighted_sum(share))
        bend = off if bend is None else bend + BLEND * (off - bend)
        return x + part * (new - x) + bend, bend

    @override
    def see_numbers(self, numbers: Losses, what: str, stream: Stream) -> Losses:
        if what != "loss":
            return numbers
        return carry_over(self._losses, self.index, numbers, len(self.names))

    def previous(self, losses: Losses) -> Losses:
        """Return the losses of the last round; the present ones of those who were away then."""
        last = losses if self._losses is None else self._losses
        known = self._before is None or self._before == 0  # longer changes are no slope
        return np.where(known, last, losses)

    def estimate(
        self, here: Index, x: Vector, stream: Stream, batch_size: int | None
    ) -> tuple[Losses, Losses]:
        """Return the last known losses of all, and an estimate of all whose mean is right.

        Those who were asked stand for all who are ``here``; the others keep their last.
        """
        known = self.losses(x, stream, batch_size)
        estimate = known.copy()
        estimate[here] = 0
        estimate[self.index] = len(here) / len(self.index) * known[self.index]
        return known, estimate

    @override
    def local_steps(
        self, x: Vector, local: LocalSGD, stream: Stream, *, target: Vector | None = None,
        slopes: Weights | None = None, **more: Any,
    ) -> Moved:  # fmt: skip
        work, given = local.work(), None if slopes is None else slopes[self.index]
        moved = super().local_steps(x, work, stream, target=target, slopes=given, **more)
        if self.complete:
            return moved
        self.steps = np.ones(len(self.names))
        self.steps[self.index] = moved.steps
        if target is not None and isinstance(moved.displacement, EveryoneVectors):
            moved.displacement.shared = work.correction * work.lr * target
        thresholds = moved.thresholds
        if thresholds is not None and work.hinge is not None:  # a number is a step from the last
            old, scaled = work.hinge.threshold, self.scale(np.ones(len(self.names)))
            moves = np.where(scaled == 1, thresholds, old + scaled * (thresholds - old))
            thresholds = np.full(len(self.names), old)
            thresholds[self.index] = moves
        return replace(moved, steps=self.steps.astype(np.int64), thresholds=thresholds)

    def _told(self, objective: Any, left: list[int], back: list[int]) -> list[str]:
        fate = "its weight is shared among the others until it is back"
        if self.members is None:
            name = type(objective).__name__
            fate = f"it keeps its weight, since {name} has numbers for each client"
        names, away = self.names, self.away
        told = [f"client {names[i]} has been away for {away[i]} rounds: {fate}" for i in left]
        return told + [f"client {names[i]} is back and counts again" for i in back]


def call_roll(
    algorithm: Any, state: Any, clients: Clients, objective: Objective | None = None
) -> Everyone:
    """Return everybody, in a round in which ``clients`` take part.

    A client that gave no answer for the algorithm's ``patience`` leaves the objective (its
    ``objective`` unless another is given) until it answers. One with settings for each client (a
    prior, tails) keeps everybody.
    """
    chosen = algorithm.objective if objective is None else objective
    return Everyone(clients, state, chosen, rounds_of_patience(algorithm, len(clients.names)))


def rounds_of_patience(algorithm: Any, n: int) -> float:
    """Return the rounds without an answer after which a client does not count.

    They are ``patience`` where everybody is asked in a round, and more where a sample is.
    """
    drawn = getattr(algorithm, "clients_per_round", None)
    fraction = min(drawn / n, 1.0) if drawn else getattr(algorithm, "participation", 1.0)
    return float(getattr(algorithm, "patience", PATIENCE) / fraction)


def over_members(objective: Any, away: Index | None, limit: float) -> tuple[Any, Index | None]:
    """Return the objective over those who count, and who they are; None: everybody does."""
    if away is None or not (away >= limit).any():
        return objective, None
    members: Index = np.flatnonzero(away < limit)
    try:
        objective.value(np.zeros(len(members)))
    except ValueError:  # it has numbers for each client
        return objective, None
    return Among(objective, tuple(members.tolist())), members


@dataclass(frozen=True)
class Among(Adapted):
    """Another objective, over its ``members`` alone; the other clients have weight zero.

    ``members`` are positions, increasing; the ``base`` must not have settings for each client.

    >>> from equifed.objectives import WorstCase
    >>> Among(WorstCase(), (0, 2)).weights(np.array([1.0, 9.0, 2.0]))
    array([0., 0., 1.])
    """

    base: Any
    members: tuple[int, ...]

    @override
    def value(self, losses: Losses) -> float:
        return self.inner.value(losses[self._here])

    @override
    def weights(self, losses: Losses) -> Weights:
        return scatter(self.inner.weights(losses[self._here]), self._here, losses.size)

    @override
    def penalty(self, weights: Weights) -> float:
        return self.inner.penalty(weights[self._here])

    @override
    def prox(self, point: Weights, step: float) -> Weights:
        return scatter(self.inner.prox(point[self._here], step), self._here, point.size)

    @override
    def mirror(self, weights: Weights, losses: Losses, step: float) -> Weights:
        here, old = self._here, weights[self._here]
        if not old.any():  # all weight was with clients that do not count now
            old = self.inner.start(len(here))
        return scatter(self.inner.mirror(old, losses[here], step), here, losses.size)

    @override
    def start(self, n: int) -> Weights:
        return scatter(self.inner.start(len(self.members)), self._here, n)

    @override
    def strong_convexity(self, n: int) -> float:
        return self.inner.strong_convexity(len(self.members))

    @override
    def l1_norm(self, n: int) -> float:
        return self.inner.l1_norm(len(self.members))

    @override
    def penalty_gradient(self, weights: Weights) -> Weights:
        return scatter(self.inner.penalty_gradient(weights[self._here]), self._here, weights.size)

    @property
    def _here(self) -> Index:
        return np.array(self.members)
