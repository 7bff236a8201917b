"""Guarded: any algorithm, where no client gets more than its share by what it claims."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from typing_extensions import override

from equifed.algorithms.around import Wrapper, WrapperState, change_core, unwrap
from equifed.algorithms.remembering import refuse_memory
from equifed.contract import AnyAlgorithm, Clients, Index, Info, Losses, Stream, Vector, Weights
from equifed.contract.absence import bound_share, limit_shares
from equifed.contract.algorithm import as_run, layers
from equifed.contract.arrays import BlockMatrix, ClientVectors
from equifed.contract.clients import Moved
from equifed.contract.curvature import Curvature, CurvatureSum, Form
from equifed.contract.local import LocalSGD, LocalWork
from equifed.contract.settings import check_settings
from equifed.contract.views import ITERATES, ClientsView, VectorsView
from equifed.objectives import SaddleObjective
from equifed.objectives.capped import with_cap

LEAST, FEW = 3, 5
"""Among fewer clients there is nobody to compare with; of fewer vectors, if they are not all, the
usual length is that of the rounds before."""
USUAL, LEAST_LENGTH = 0.75, 0.4
"""Share of the vectors that are not longer than the usual one, and how much of the first round's
usual length it is at least: where most have nothing left to learn, the others are not too long."""
SHORTEST, FEWER = 4.0, 60
"""What is never too long, in usual lengths: honest ones of twenty clients come to 3.5. Of fewer
than 15 clients the usual length says less, and 60 / n of them are not too long."""

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
    rounding : float
        Losses enter as multiples of this number, so that they tell less; 0 leaves them as they are.
        On a federation with hidden sums the sites round before a loss leaves.
    """

    mode: Mode = "on"
    claims: float = 50.0
    updates: float = 15.0
    floor: float = 0.1
    samples: float = 1000.0
    cap: float = 0.2
    rounding: float = 0.0

    def __post_init__(self) -> None:
        check_settings(self, mode=get_args(Mode), updates="[1, inf)", cap="(0, 1]")
        check_settings(self, claims="(0, inf)", floor="(0, inf)", samples="(0, inf)")
        check_settings(self, rounding="[0, inf)")

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


def round_losses(losses: Losses, step: float) -> Losses:
    """Return losses as multiples of a step; those that are multiples stay as they are.

    >>> round_losses(np.array([0.62, 0.49]), 0.25).tolist()
    [0.5, 0.5]
    """
    return losses if step == 0 else np.rint(losses / step) * step


def find_usual(lengths: Losses) -> float:
    """Return the length that three quarters of some vectors do not exceed, one of them.

    >>> float(find_usual(np.array([1.0, 2.0, 3.0, 1e9])))
    3.0
    """
    return float(np.quantile(lengths, USUAL, method="lower"))


@dataclass(frozen=True)
class State(WrapperState):
    """The algorithm's state, the last claims, and what was usual: now and in the first round."""

    claims: Losses | None = None  # as they were accepted; None before the first ones
    first_claim: float = 0.0
    lengths: tuple[float, ...] = (0.0, 0.0)  # of updates and gradients; 0: there was none yet
    first_lengths: tuple[float, ...] = (0.0, 0.0)


class Watch:
    """What a guard knows, from the state before, and finds in one round."""

    def __init__(self, guard: Guard, bounds_sums: bool, state: State) -> None:
        self.guard, self.acts = guard, guard.mode == "on"
        self.bounds_sums = bounds_sums  # no objective bounds the weights
        self.claims, self.first_claim = state.claims, state.first_claim
        self.lengths, self.first_lengths = list(state.lengths), list(state.first_lengths)
        self.touches: dict[tuple[int, str], str] = {}
        self.notes: dict[str, None] = {}

    def usual_length(self, kind: int, lengths: Losses, n: int) -> float:
        """Return the length that those of n clients are measured by, and remember it."""
        known, now = self.lengths[kind], find_usual(lengths)
        usual = known if len(lengths) < min(FEW, n) and known > 0 else now
        if not np.isfinite(usual):
            return usual
        self.first_lengths[kind] = self.first_lengths[kind] or usual
        self.lengths[kind] = usual if usual == now else usual + 0.2 * (min(now, 2 * usual) - usual)
        return max(usual, LEAST_LENGTH * self.first_lengths[kind])

    def limits(self, claims: Losses, index: Index) -> tuple[float, float]:
        """Return the least and the largest claim that is not touched."""
        others = claims[:0] if self.claims is None else np.delete(self.claims, index)
        pool = np.concatenate([others, claims])
        centre = float(np.median(pool))
        self.first_claim = self.first_claim or abs(centre)
        spread = 1.4826 * float(np.median(np.abs(pool - centre)))
        reach = self.guard.claims * max(spread, self.guard.floor * self.first_claim, 1e-300)
        return centre - reach, centre + reach

    def remember(self, claims: Losses, index: Index, n: int) -> None:
        """Keep accepted claims; a client that made none so far has the median one."""
        old = self.claims
        self.claims = np.full(n, float(np.median(claims))) if old is None else old.copy()
        self.claims[index] = claims


class GuardedVectors(VectorsView):
    """Client vectors none of which is much longer than the others in a sum."""

    partner: GuardedVectors | None = None  # the steps that led to these models
    _found: tuple[Losses, Losses, Losses] | None = None

    @override
    def see_sum(self, weights: Weights, add: Callable[[Weights], Vector]) -> Vector:
        weights = self._bound(weights)
        factors = (self.partner or self).factors()
        if not self.clients.watch.acts or (factors == 1).all():
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

    @override
    def squared_norms(self, scale: BlockMatrix | None = None) -> Losses:
        # Corrected steps are how curvature is measured, where lengths differ by nature.
        if not self.clients.watch.acts or self.corrected or self.claimed or self.clients.few:
            return self.behind.squared_norms(scale)
        squares, lengths, counted = self._measure()
        if scale is not None:
            return self.behind.squared_norms(scale) * self.factors() ** 2
        return np.where(counted < lengths, counted**2, squares)

    def factors(self) -> Weights:
        """Return by what the weight of each client is multiplied."""
        watch: Watch = self.clients.watch
        ones = np.ones(len(self.clients.index))
        if self.claimed and watch.acts:
            watch.notes["sums are hidden: the lengths of updates are not guarded"] = None
        if self.claimed or self.clients.few or not (watch.acts or self.at_hand):
            return ones
        _, lengths, counted = self._measure()
        return np.divide(counted, lengths, out=ones, where=counted < lengths)

    def _bound(self, weights: Weights) -> Weights:
        """Return the weights cut at the cap, where sums are to be bounded."""
        watch: Watch = self.clients.watch
        if not (watch.acts and watch.bounds_sums and (weights >= 0).all()):
            return weights
        return limit_shares(weights, self.clients.weight_limits(weights))

    def _measure(self) -> tuple[Losses, Losses, Losses]:
        """Return squared lengths, lengths and as how long vectors count; note who is touched."""
        if self._found is not None:
            return self._found
        watch, n = self.clients.watch, len(self.clients.names)
        kind, what = (0, "update") if self.kind == "displacement" else (1, "gradient")
        squares = self.behind.squared_norms()
        lengths = np.sqrt(np.where(np.isnan(squares), np.inf, squares))
        usual = watch.usual_length(kind, lengths, n)
        counted = watch.guard.shorten(lengths, usual, n)
        for k in np.flatnonzero(counted < lengths):
            times = lengths[k] / usual if usual else np.inf
            told = f"{what} is {times:.3g} usual ones long"
            watch.touches[int(self.clients.index[k]), what] = told
        self._found = squares, lengths, counted
        return self._found


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
            return "a guard is on, and it cannot judge what a client says of its curvature"
        return super().curvature_sum(x, weights, form, thin)

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
            told = f"says that it has {said[i]:.4g} samples; it counts as the median client does"
            self.watch.touches[int(i), "samples"] = told
        counted = np.where(absurd, usual, said)
        most = 1.0 if guard.cap >= 1 else bound_share(guard.cap, n)
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
        cap, n, here = self.watch.guard.cap, len(self.names), int(np.count_nonzero(weights))
        sizes = self.sizes
        most, half = bound_share(cap, n, len(weights)), bound_share(cap / 2, n, max(1, here))
        limits: Weights = np.minimum(most, np.maximum(half, sizes / max(1, sizes.sum())))
        return limits

    @override
    def see_numbers(self, numbers: Losses, what: str, stream: Stream) -> Losses:
        if what == "loss":
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
    r"""Keeps a client that lies, or is broken, from leading the others.

    * A **claim** (a loss) far above or below all current claims enters clipped.
    * An **update** or gradient much longer than the others counts less, as if it were shorter.
    * No client has more than a **cap** of the weight. Where the algorithm has an objective this is
      part of it, exactly (:func:`equifed.objectives.capped.with_cap`); where its weights are shares
      of samples or functions of the losses, they are cut at the cap and the others keep their
      proportions.

    :class:`Guard` has the limits. Every claim or update that was touched is told by the round
    (``Info.touches``), and becomes an event. A sum in which one was touched is no gradient of the
    objective, so such a round has no certificate. Signs and labels that were flipped have honest
    lengths: against them only the cap helps. Under hidden sums lengths are the clients' own word,
    so updates are not guarded.

    Parameters
    ----------
    algorithm : Algorithm
        Any; in :func:`equifed.train` the guard is inside all other wrappers.
    guard : Guard
        The limits; on, if nothing else is said.
    """

    algorithm: AnyAlgorithm
    guard: Guard = Guard()

    def __post_init__(self) -> None:
        if self.guard.mode == "on":
            refuse_memory(self.algorithm, "A guard that acts judges")
        if self.guard.mode == "on" and self.guard.cap < 1:
            capped = change_core(self.algorithm, lambda core: _with_cap(core, self.guard.cap))
            object.__setattr__(self, "algorithm", capped)

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(self.algorithm.init(clients, x))

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round of the algorithm with guarded clients."""
        if self.guard.mode == "off":
            inner, info = self.algorithm.round(state.inner, clients, stream)
            return replace(state, inner=inner), info
        core = unwrap(self.algorithm)
        watch = Watch(self.guard, self.guard.cap < 1 and not _has_objective(core), state)
        guarded = GuardedClients(clients, watch)
        inner, info = self.algorithm.round(state.inner, guarded, stream)
        lengths = tuple(watch.lengths), tuple(watch.first_lengths)
        return State(inner, watch.claims, watch.first_claim, *lengths), _tell(info, guarded)

    @override
    def wrapped(self) -> Any:
        """Return the algorithm as training runs it, with the guard inside all other wrappers."""
        return change_core(as_run(self.algorithm), lambda core: Guarded(core, self.guard))


def _tell(info: Info, clients: GuardedClients) -> Info:
    """Return what there is to tell, with what was touched and who is at the cap."""
    watch, n = clients.watch, len(info.weights)
    verb = "guard" if watch.acts else "watch"
    touches = tuple((i, verb, reason) for (i, _), reason in sorted(watch.touches.items()))
    info = replace(info, touches=info.touches + touches)
    if not watch.acts:
        return info
    weights = info.weights.copy()
    most = np.full(n, bound_share(watch.guard.cap, n) if watch.guard.cap < 1 else 1.0)
    if watch.bounds_sums and not (weights < 0).any():  # as they were in the sums
        index = np.arange(n) if info.index is None else info.index
        most[index] = clients.subset(index).weight_limits(weights[index])
        weights[index] = limit_shares(weights[index], most[index])
    notes = [*info.notes, *watch.notes]
    for i in np.flatnonzero((np.abs(weights) >= most * (1 - 1e-9)) & (most < 1)):
        notes.append(f"client {clients.names[i]} is at the cap of {most[i]:.3g} of the weight")
    proof = None if touches else info.proof
    return replace(info, weights=weights, notes=tuple(notes), proof=proof)


def _has_objective(core: AnyAlgorithm) -> bool:
    """Tell whether an algorithm's weights are those of a saddle objective."""
    made = hasattr(core, "objective_at")
    return made or isinstance(getattr(core, "objective", None), SaddleObjective)


def _with_cap(core: Any, cap: float) -> Any:
    """Return an algorithm whose objective gives nobody more than the cap, if it has an objective.

    One that makes its objectives itself (SCAFF-PD-IA) has a setting ``cap``.
    """
    if isinstance(getattr(core, "objective", None), SaddleObjective):
        return replace(core, objective=with_cap(core.objective, cap))
    if not hasattr(core, "objective_at"):
        return core
    if "cap" not in {f.name for f in dataclasses.fields(core)}:
        raise ValueError(
            f"{type(core).__name__} makes its objectives itself and has no setting 'cap' "
            "for the largest weight; add one, or say cap = 1 in the guard."
        )
    return replace(core, cap=cap if core.cap is None else min(cap, core.cap))


def guard_algorithm(algorithm: AnyAlgorithm, guard: Guard) -> AnyAlgorithm:
    """Return an algorithm with a guard, unless that is off or there is one already."""
    there = guard.mode == "off" or any(isinstance(one, Guarded) for one in layers(algorithm))
    return algorithm if there else Guarded(algorithm, guard)
