"""Guarded: any algorithm, where no client gets more than its share by what it claims."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from typing_extensions import override

from equifed.algorithms.around import Wrapper, change_core, inner_state, unwrap
from equifed.algorithms.guard_limits import LEAST, Guard, State, Watch, round_losses
from equifed.algorithms.remembering import refuse_memory
from equifed.contract import AnyAlgorithm, Clients, Index, Info, Losses, Stream, Vector, Weights
from equifed.contract.absence import bound_share, limit_shares
from equifed.contract.algorithm import as_run, layers
from equifed.contract.arrays import BlockMatrix, ClientVectors
from equifed.contract.clients import Moved
from equifed.contract.curvature import Curvature, CurvatureSum, Form
from equifed.contract.local import LocalSGD, LocalWork
from equifed.contract.views import ITERATES, ClientsView, VectorsView
from equifed.objectives import SaddleObjective
from equifed.objectives.capped import with_cap
from equifed.objectives.relative_fairness import RelativeFairness

# Among fewer clients a cap defends nothing, which is said; of how many clients at the cap a round
# asks whether their vectors point against the others: whether the cosine is below this
MANY, LEADERS, AGAINST = 4, 5, -0.5
OPPOSES = "has the largest weight allowed, and its vector opposes the others'"
TOO_FEW = "too few clients to detect a dishonest one"


class GuardedVectors(VectorsView):
    """Client vectors none of which has more than its share of a sum, by weight times length."""

    partner: GuardedVectors | None = None  # the steps that led to these models

    @override
    def see_sum(self, weights: Weights, add: Callable[[Weights], Vector]) -> Vector:
        weights = self._bound(weights)
        factors = (self.partner or self).factors(weights)
        shorter = bool((factors < 1).any())
        total = add(weights * factors if shorter else weights)
        if self.kind not in ITERATES:
            self._tell_who_opposes(weights, factors, total)
        elif shorter:
            assert self.x is not None  # it stands in for what is cut off of the way to a model
            total = total + float((weights * (1 - factors)).sum()) * self.x
        return total

    @override
    def weighted_difference(self, old: ClientVectors, weights: Weights) -> Vector:
        return super().weighted_difference(old, self._bound(weights) if self.claimed else weights)

    @override
    def squared_norms(self, scale: BlockMatrix | None = None) -> Losses:
        # Corrected steps are how curvature is measured, where lengths differ by nature.
        if not self.clients.watch.acts or self.corrected or self.claimed or self.clients.few:
            return self.behind.squared_norms(scale)
        alike = np.ones(len(self.clients.index))  # before weights are known
        squares, lengths, counted = self._count(alike)
        if scale is not None:
            ratio = np.divide(counted, lengths, out=alike, where=counted < lengths)
            return np.asarray(self.behind.squared_norms(scale) * ratio**2)
        return np.where(counted < lengths, counted**2, squares)

    def factors(self, weights: Weights) -> Weights:
        """Return by what the weight of each client is multiplied, so that none has too much."""
        watch: Watch = self.clients.watch
        ones = np.ones(len(self.clients.index))
        if self.claimed and watch.acts:
            watch.notes["sums are hidden: the lengths of updates are not guarded"] = None
        if self.claimed or self.clients.few or not (watch.acts or self.at_hand):
            return ones
        _, lengths, counted = self._count(weights)
        if not watch.acts:
            return ones
        short = counted < lengths * (1 - 1e-9)
        watch.shortened.update(dict.fromkeys(self.clients.index[short].tolist()))
        return np.divide(counted, lengths, out=ones, where=short)

    def _bound(self, weights: Weights) -> Weights:
        """Return the weights cut at the cap, where sums are to be bounded."""
        if not (self.clients.watch.bounds_sums and (weights >= 0).all()):
            return weights
        return limit_shares(weights, self.clients.weight_limits(weights))

    def _count(self, weights: Weights) -> tuple[Losses, Losses, Losses]:
        """Return squared lengths, lengths, and as how long the vectors count."""
        squares, lengths, usual = self._measured
        share = self.clients.share(len(lengths))
        counted = self.clients.watch.guard.shorten(lengths, weights, usual, share)
        return squares, lengths, counted

    @cached_property
    def _measured(self) -> tuple[Losses, Losses, float]:
        """Squared lengths, lengths and the usual one; whose vectors are too long is noted."""
        watch, n = self.clients.watch, len(self.clients.names)
        kind, what = (0, "update") if self.kind == "displacement" else (1, "gradient")
        squares = self.behind.squared_norms()
        lengths = np.sqrt(np.where(np.isnan(squares), np.inf, squares))
        usual = watch.usual_length(kind, lengths, n)
        for k in np.flatnonzero(lengths > watch.guard.updates * usual):
            times = lengths[k] / usual if usual else np.inf
            told = f"{what} is {times:.3g} times the usual length"
            watch.touches[int(self.clients.index[k]), what] = told
        return squares, lengths, usual

    def _tell_who_opposes(self, weights: Weights, factors: Weights, total: Vector) -> None:
        """Note clients at the cap whose vectors point against the sum of the others."""
        watch: Watch = self.clients.watch
        if not (watch.guard.bounds and self.at_hand and not self.claimed) or self.clients.few:
            return
        most = self.clients.share(len(weights)) * (1 - 1e-9)
        leaders = np.flatnonzero((weights >= most * np.abs(weights).sum()) & (weights > 0))
        for k in leaders[:LEADERS]:
            alone = np.zeros(len(weights))
            alone[k] = weights[k] * factors[k]
            mine = self.behind.weighted_sum(alone)
            others = total - mine
            cosine = float(mine @ others) / max(float(mine.norm() * others.norm()), 1e-300)
            if cosine < AGAINST:
                watch.opposed[int(self.clients.index[k])] = cosine


class GuardedClients(ClientsView):
    """Clients as a guard lets an algorithm see them."""

    Vectors = GuardedVectors

    def __init__(self, behind: Clients, watch: Watch) -> None:
        super().__init__(behind)
        self.watch = watch

    @override
    def curvature_sum(
        self, x: Vector, weights: Weights, form: Form = "blocks", thin: Vector | None = None
    ) -> CurvatureSum | str:
        if self.watch.acts:
            return "a guard is on, and it cannot check the curvature that a client sends"
        return super().curvature_sum(x, weights, form, thin)

    def share(self, here: int) -> float:
        """Return the cap in a sum over so many clients: of those who made claims in this round.

        A sum over fewer of them is over those with the largest, and liars are among them.
        """
        return self.watch.guard.share(len(self.names), max(here, len(self.watch.heard)))

    @property
    def few(self) -> bool:
        """Whether the federation is too small to compare its clients."""
        return len(self.names) < LEAST

    @property
    @override
    def sizes(self) -> Index:
        guard = self.watch.guard
        if not self.watch.acts or self.few:
            return self.behind.sizes
        n = len(self.names)
        said = self.behind.subset(np.arange(n)).sizes.astype(np.float64)
        usual = float(np.median(said))
        absurd = said > guard.samples * usual
        for i in np.flatnonzero(absurd):
            told = f"claims {said[i]:.4g} samples; it counts as the median client"
            self.watch.touches[int(i), "samples"] = told
        counted = np.where(absurd, usual, said)
        most = guard.share(n)
        allowed = limit_shares(counted, most)
        if allowed is not counted:  # nobody has more than the cap of all samples
            scale = float((allowed[counted > 0] / counted[counted > 0]).max())
            counted = np.minimum(counted, most * float(counted.sum()) / scale)
        whole = np.maximum(np.floor(counted), np.minimum(counted, 1.0)).astype(np.int64)
        return np.asarray(whole[self.index])

    def weight_limits(self, weights: Weights) -> Weights:
        """Return how much of a sum each client may have: the cap by its samples, half of it else.

        Nobody gets there honestly by losses alone where no objective says so, and a liar would.
        """
        n, here, sizes = len(self.names), max(1, int(np.count_nonzero(weights))), self.sizes
        half = bound_share(self.watch.guard.among(n).limit / 2, n, here)
        most = np.maximum(half, sizes / max(1, sizes.sum()))
        return np.asarray(np.minimum(self.share(len(weights)), most), dtype=np.float64)

    @override
    def see_numbers(self, numbers: Losses, what: str, stream: Stream) -> Losses:
        if what == "loss":
            self.watch.heard.update(self.index.tolist())
            numbers = round_losses(numbers, self.watch.guard.rounding)
        if what != "loss" or self.few:
            return numbers
        low, high = self.watch.limits(numbers, self.index)
        if numbers.min() < low:
            known = self.curvature()
            low = max(low, known.lowest) if isinstance(known, Curvature) else low
        fate = "count as they are" if self.watch.acts else "are usual"
        clipped = self._clip(numbers, low, high, "loss", fate)
        self.watch.remember(clipped, self.index, len(self.names))
        return clipped if self.watch.acts else numbers

    @override
    def local_steps(
        self, x: Vector, local: LocalSGD, stream: Stream, *, slopes: Weights | None = None,
        **more: Any,
    ) -> Moved:  # fmt: skip
        work = local.work()
        moved = super().local_steps(x, work, stream, slopes=slopes, **more)
        for kind in ITERATES:
            if (models := getattr(moved, kind)) is not None:
                models.partner = moved.displacement
        if work.hinge is not None and moved.thresholds is not None and slopes is not None:
            return replace(moved, thresholds=self._thresholds(moved, work, slopes))
        return moved

    def _thresholds(self, moved: Moved, work: LocalWork, slopes: Weights) -> Losses:
        """Return thresholds where the local steps can lead: a step is -lr (1 - s slope)."""
        assert work.hinge is not None and moved.thresholds is not None
        start, way = work.hinge.threshold, work.lr * moved.steps
        slack = 1e-4 * (abs(start) + way * np.maximum(slopes, 1.0))
        low, high = start - way - slack, start + way * np.maximum(slopes - 1.0, 0.0) + slack
        clipped = self._clip(moved.thresholds, low, high, "threshold", "are possible")
        return clipped if self.watch.acts else moved.thresholds

    def _clip(self, said: Losses, low: Any, high: Any, what: str, fate: str) -> Losses:
        """Return claims within limits, and note whose were not."""
        clipped = np.clip(said, low, high)
        ends = np.broadcast_arrays(said, low, high)
        for k in np.flatnonzero(clipped != said):
            claim, least, most = (f"{end[k]:.4g}" for end in ends)
            told = f"claims a {what} of {claim}; claims between {least} and {most} {fate}"
            self.watch.touches[int(self.index[k]), what] = told
        return clipped


@dataclass(frozen=True)
class Guarded(Wrapper):
    r"""Bounds the influence of dishonest or broken clients on any algorithm.

    * A **claim** (a loss) far above or below all current claims enters clipped.
    * No client has more than a **cap** of the weight. Where the algorithm has an objective this is
      part of it, exactly (:func:`equifed.objectives.capped.with_cap`); where its weights are shares
      of samples or functions of the losses, they are cut and the others keep their proportions.
    * No client moves a sum by more than the cap times the usual length: at the cap an **update** or
      gradient counts with one usual length at most.

    :class:`Guard` has the limits, which follow from how many dishonest clients are to be borne.
    Touched claims and vectors far too long become events, as does, once, a client at the cap whose
    vector points against the others: a liar's does, and a hard client's near the optimum. A round
    in which somebody counted as shorter has no certificate. Flipped signs and labels have honest
    lengths: against them only the cap helps. Under hidden sums lengths are the clients' own word,
    so there the cap and the claims are what is left.

    Parameters
    ----------
    algorithm : Algorithm
        Any; in :func:`equifed.train` the guard is inside all other wrappers.
    guard : Guard
        The limits; on, if nothing else is said.

    Examples
    --------
    >>> import equifed as ef
    >>> sites = {f"site {i}": ([[0.0], [1.0]], [0.0, 1.0]) for i in range(9)}
    >>> data = ef.Federation.from_clients(sites | {"liar": ([[0.0], [1.0]], [0.0, 1e6])})
    >>> clients = ef.simulate(data, "linear")
    >>> plain = ef.FedAvg(ef.LocalSGD(lr=0.1, steps=5))
    >>> for one in plain, ef.Guarded(plain):  # what they predict where nine of ten say 1
    ...     round(float(ef.train(one, clients, rounds=20).predictor().predict([[1.0]])[0]), 0)
    99438.0
    1.0
    """

    algorithm: AnyAlgorithm
    guard: Guard = Guard()  # noqa: RUF009 - a frozen value

    def __post_init__(self) -> None:
        if self.guard.mode == "on":
            refuse_memory(self.algorithm, "A guard that acts judges")
        if self.guard.mode == "on" and self.guard.cap < 1:
            capped = change_core(self.algorithm, lambda core: _with_cap(core, self.guard.limit))
            object.__setattr__(self, "algorithm", capped)

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(self.among(len(clients.names)).algorithm.init(clients, x))

    def among(self, n: int) -> Guarded:
        """Return it for n clients, of whom the guard bears a number that is said."""
        guard = self.guard.among(n)
        return self if guard == self.guard else replace(self, guard=guard)

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round of the algorithm with guarded clients."""
        if self.guard.dishonest is None:
            return self.among(len(clients.names)).round(state, clients, stream)
        if self.guard.mode == "off":
            inner, info = self.algorithm.round(state.inner, clients, stream)
            return replace(state, inner=inner), info
        core = unwrap(self.algorithm)
        watch = Watch(self.guard, _has_objective(core), state)
        guarded = GuardedClients(clients, watch)
        inner, info = self.algorithm.round(state.inner, guarded, stream)
        known = watch.claims, watch.first_claim, tuple(watch.lengths)
        made = getattr(core, "objective_at", lambda _: getattr(core, "objective", None))
        return State(inner, *known), _tell(info, guarded, made(inner_state(inner)))

    @override
    def wrapped(self) -> Any:
        """Return the algorithm as training runs it, with the guard inside all other wrappers."""
        return change_core(as_run(self.algorithm), lambda core: Guarded(core, self.guard))


def _tell(info: Info, clients: GuardedClients, objective: Any) -> Info:
    """Return what there is to tell, with what was touched and who is at the cap."""
    watch, n = clients.watch, len(info.weights)
    verb = "guard" if watch.acts else "watch"
    touches = [(i, verb, told) for (i, _), told in sorted(watch.touches.items())]
    touches += [(i, "watch", f"{OPPOSES} (cosine {c:.2f})") for i, c in watch.opposed.items()]
    info = replace(info, touches=(*info.touches, *touches))
    if not watch.acts:
        return info
    weights, guard = info.weights.copy(), watch.guard
    most = np.full(n, guard.share(n))
    if guard.bounds and isinstance(objective, RelativeFairness):
        most[:] = objective.largest(n)
    if watch.bounds_sums and not (weights < 0).any():  # as they were in the sums
        index = np.arange(n) if info.index is None else info.index
        most[index] = clients.subset(index).weight_limits(weights[index])
        weights[index] = limit_shares(weights[index], most[index])
    notes = [*info.notes, *watch.notes]
    if guard.bounds and n < MANY:
        notes.append(f"the cap is {guard.share(n):.2g} of the weight: {n} are {TOO_FEW}")
    for i in np.flatnonzero((np.abs(weights) >= most * (1 - 1e-9)) & (most < 1)):
        notes.append(f"client {clients.names[i]} is at the cap of {most[i]:.3g} of the weight")
    for k in watch.shortened:
        notes.append(f"client {clients.names[k]} counted with a shorter vector than it sent")
    touched = bool(watch.shortened or watch.touches)
    return replace(info, weights=weights, notes=tuple(notes), proof=None if touched else info.proof)


def _has_objective(core: AnyAlgorithm) -> bool:
    """Tell whether an algorithm's weights are those of a saddle objective."""
    made = hasattr(core, "objective_at")
    return made or isinstance(getattr(core, "objective", None), SaddleObjective)


def _with_cap(core: Any, cap: float) -> Any:
    """Return an algorithm whose objective gives nobody more than the cap, if it has an objective.

    One that makes its objectives itself (SCAFF-PD-IA), or sums over a tail (Delta-FL), has a
    setting ``cap``.
    """
    if isinstance(getattr(core, "objective", None), SaddleObjective):
        return replace(core, objective=with_cap(core.objective, cap))
    if "cap" in {f.name for f in dataclasses.fields(core)}:
        return replace(core, cap=cap if core.cap is None else min(cap, core.cap))
    if not hasattr(core, "objective_at"):
        return core
    raise ValueError(
        f"{type(core).__name__} makes its objectives itself and has no setting 'cap' "
        "for the largest weight; add one, or set cap = 1 in the guard."
    )


def guard_algorithm(algorithm: AnyAlgorithm, guard: Guard) -> AnyAlgorithm:
    """Return an algorithm with a guard, unless that is off or there is one already."""
    there = guard.mode == "off" or any(isinstance(one, Guarded) for one in layers(algorithm))
    return algorithm if there else Guarded(algorithm, guard)
