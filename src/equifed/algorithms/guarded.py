"""Guarded: any algorithm, where no client gets more than its share by what it claims."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from equifed.algorithms.around import Wrapper, WrapperState, unwrap
from equifed.algorithms.guard import Guard, Watch
from equifed.algorithms.guard_view import GuardedClients
from equifed.contract import AnyAlgorithm, Clients, Info, Losses, Stream, Vector, Weights
from equifed.contract.absence import bound_share
from equifed.contract.algorithm import Wrappable
from equifed.objectives.base import SaddleObjective
from equifed.objectives.capped import with_cap

KINDS = ("update", "gradient")


@dataclass(frozen=True)
class State(WrapperState):
    """The algorithm's state, the last claims, and what was usual: now and in the first round."""

    claims: Losses | None = None  # None before the first claims
    first_claim: float = 0.0
    lengths: Losses | None = None  # of updates and gradients; 0 where there was none yet
    first_lengths: Losses | None = None


@dataclass(frozen=True)
class Guarded(Wrapper):
    r"""Keeps a client that lies, or is broken, from leading the others.

    * A **claim** (a loss) far above or below all current claims enters clipped.
    * An **update** or gradient much longer than the others counts less, as if it were shorter.
    * No client has more than a **cap** of the weight. Where the algorithm has an objective this is
      part of it, exactly (:func:`equifed.objectives.capped.with_cap`); where its weights are shares
      of samples or functions of the losses, they are cut at the cap and the others keep their
      proportions.

    :class:`equifed.algorithms.guard.Guard` has the limits. Every claim or update that was
    touched is told by the round (``Info.touches``), and becomes an event. A sum in which one was
    touched is no gradient of the objective, so such a round has no certificate. Signs and labels
    that were flipped have honest lengths: against them only the cap helps. Under hidden sums
    lengths are the clients' own word, so updates are not guarded.

    Parameters
    ----------
    algorithm : Algorithm
        Any; in :func:`equifed.train` the guard is inside all other wrappers.
    guard : Guard
        The limits; on, if nothing else is said.
    """

    algorithm: AnyAlgorithm
    guard: Guard = Guard()  # noqa: RUF009 - a frozen value

    def __post_init__(self) -> None:
        if self.guard.mode == "on" and self.guard.cap < 1:
            object.__setattr__(self, "algorithm", cap_weights(self.algorithm, self.guard.cap))

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(self.algorithm.init(clients, x))

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round of the algorithm with guarded clients."""
        if self.guard.mode == "off":
            inner, info = self.algorithm.round(state.inner, clients, stream)
            return replace(state, inner=inner), info
        watch = self._watch(state)
        guarded = GuardedClients(clients, watch)
        inner, info = self.algorithm.round(state.inner, guarded, stream)
        after = State(
            inner,
            watch.claims,
            watch.first_claim,
            np.array([watch.lengths.get(kind, 0.0) for kind in KINDS]),
            np.array([watch.first_lengths.get(kind, 0.0) for kind in KINDS]),
        )
        return after, self._told(info, watch, guarded)

    def wrapped(self) -> AnyAlgorithm:
        """Return the algorithm as training runs it, with the guard inside all other wrappers."""
        inner = self.algorithm
        return guard_core(inner.wrapped() if isinstance(inner, Wrappable) else inner, self.guard)

    def _watch(self, state: State) -> Watch:
        def known(values: Losses | None) -> dict[str, float]:
            pairs = zip(KINDS, () if values is None else values.tolist(), strict=False)
            return {kind: value for kind, value in pairs if value > 0}

        return Watch(
            self.guard,
            self._bounds_sums,
            state.claims,
            state.first_claim,
            known(state.lengths),
            known(state.first_lengths),
        )

    @property
    def _bounds_sums(self) -> bool:
        return self.guard.cap < 1 and not has_objective(self.algorithm)

    def _told(self, info: Info, watch: Watch, clients: GuardedClients) -> Info:
        """Return what there is to tell, with what was touched and who is at the cap."""
        verb = "guard" if watch.acts else "watch"
        touches = tuple((i, verb, reason) for (i, _), reason in sorted(watch.touches.items()))
        info = replace(info, touches=info.touches + touches)
        if not watch.acts:
            return info
        if touches:
            info = replace(info, proof=None)
        weights, most = self._bounded(info, clients)
        notes = list(watch.notes)
        for i in np.flatnonzero((np.abs(weights) >= most * (1 - 1e-9)) & (most < 1)):
            name = clients.names[int(i)]
            notes.append(f"client {name} is at the cap of {most[i]:.3g} of the weight")
        return replace(info, weights=weights, notes=info.notes + tuple(notes))

    def _bounded(self, info: Info, clients: GuardedClients) -> tuple[Weights, Weights]:
        """Return the weights as they were in the sums, and what the largest may be."""
        weights = info.weights.copy()
        most = np.full(len(weights), bound_share(self.guard.cap, len(weights)))
        if not self._bounds_sums or (weights < 0).any():
            return info.weights, most if self.guard.cap < 1 else np.ones(len(weights))
        index = np.arange(len(clients.names)) if info.index is None else info.index
        here = clients.subset(index)
        most[index] = here.weight_limits(weights[index])
        weights[index] = here.bounded(weights[index])
        return weights, most


def has_objective(algorithm: AnyAlgorithm) -> bool:
    """Tell whether an algorithm's weights are those of a saddle objective."""
    core = unwrap(algorithm)
    return hasattr(core, "objective_at") or isinstance(
        getattr(core, "objective", None), SaddleObjective
    )


def cap_weights(algorithm: AnyAlgorithm, cap: float) -> AnyAlgorithm:
    """Return an algorithm whose objective gives nobody more than the cap, if it has an objective.

    One that makes its objectives itself (SCAFF-PD-IA) has a setting ``cap``.
    """
    changed: Any = algorithm
    inner = getattr(algorithm, "algorithm", None)
    if inner is not None:
        return replace(changed, algorithm=cap_weights(inner, cap))  # type: ignore[no-any-return]
    if isinstance(getattr(algorithm, "objective", None), SaddleObjective):
        return replace(changed, objective=with_cap(changed.objective, cap))  # type: ignore[no-any-return]
    if hasattr(algorithm, "objective_at"):
        if "cap" not in {f.name for f in dataclasses.fields(changed)}:
            raise ValueError(
                f"{type(algorithm).__name__} makes its objectives itself and has no setting 'cap' "
                "for the largest weight; add one, or say cap = 1 in the guard."
            )
        least = cap if changed.cap is None else min(cap, changed.cap)
        return replace(changed, cap=least)  # type: ignore[no-any-return]
    return algorithm


def guard_algorithm(algorithm: AnyAlgorithm, guard: Guard) -> AnyAlgorithm:
    """Return an algorithm with a guard, unless that is off or there is one already."""
    inner: Any = algorithm
    while inner is not None:
        if isinstance(inner, Guarded):
            return algorithm
        inner = getattr(inner, "algorithm", None)
    return algorithm if guard.mode == "off" else Guarded(algorithm, guard)


def guard_core(algorithm: AnyAlgorithm, guard: Guard) -> AnyAlgorithm:
    """Return an algorithm with the guard around what is inside all wrappers."""
    inner: Any = getattr(algorithm, "algorithm", None)
    if inner is None:
        return Guarded(algorithm, guard)
    holder: Any = algorithm
    return replace(holder, algorithm=guard_core(inner, guard))  # type: ignore[no-any-return]
