"""Safeguarded: any algorithm with step sizes in its state goes back when they were too bold."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from typing_extensions import override

from equifed.algorithms.around import (
    Wrapper,
    WrapperState,
    change_state,
    check_sizes,
    inner_state,
    objective_at,
    unwrap,
)
from equifed.contract import AnyAlgorithm, Clients, Info, Losses, Proof, Stream, Vector, Weights
from equifed.contract.absence import sample_clients
from equifed.contract.arrays import check_settings
from equifed.contract.clients import MissingClients
from equifed.contract.curvature import Curvature
from equifed.steps.automatic import AutoSteps
from equifed.steps.certificate import gap_of_round
from equifed.steps.schedules import Schedule

# Rounds after a step back in which nothing is judged: the best point may have been a lucky one
GRACE = 10

# A measure that vanishes at the solution is much worse when it is this many times the best
MUCH_WORSE = 100.0

Measure = Literal["gap", "residual", "value", "mean"]


@dataclass(frozen=True, eq=False)
class BestPoint:
    """The best model so far with its weights and losses, and what it was worth."""

    x: Vector
    weights: Weights
    losses: Losses
    merit: float  # smaller is better
    value: float  # the objective


@dataclass(frozen=True)
class State(WrapperState):
    """The algorithm's state, and what the safeguard remembers.

    Rounds are judged by the ``"gap"`` (certified), the ``"residual"`` (how far from a saddle
    point), the ``"value"`` of the objective, or its running ``"mean"`` where minibatches make it
    noisy.
    """

    best: BestPoint | None = None
    measure: Measure | None = None
    first: float | None = None  # what the first point was worth
    stale: int = 0  # rounds since the best point; negative in the rounds of grace
    mean: float | None = None  # of the objective, running
    curvature: Curvature | str | None = None  # of the losses, or why unknown; None before round 1

    @property
    def vanishes(self) -> bool:
        """Whether what rounds are judged by is zero at the solution."""
        return self.measure in ("gap", "residual")

    def limit(self, best: float) -> float:
        """Return what is much worse than the best."""
        if self.vanishes:
            return MUCH_WORSE * best
        assert self.first is not None
        return max(best + abs(best), (self.first + best) / 2)


@dataclass(frozen=True)
class Safeguarded(Wrapper):
    r"""Returns to the best point and halves the step sizes where these were too large.

    Where a round is much worse than the best one (its certified gap 100 times the best; or, without
    a certificate, its objective more than doubled *and* more than half of what was gained lost
    again), or local steps overflow for everybody, training goes back to the best point, the step
    sizes are halved, and nothing is judged for ten rounds. Where nothing improved for ``patience``
    rounds, they are halved. Strongly convex clients with signed weights, which have no certificate,
    are judged by the distance from a saddle point,
    :math:`\Phi(x) - F(x, \lambda) + \tau |\nabla_x F(x, \lambda)|^2 / 2`, with twice the patience;
    noisy objectives (minibatches) by their running mean, about ten rounds long. Step sizes that are
    not automatic stay as they are.

    Parameters
    ----------
    algorithm : Algorithm
        SCAFF-PD or SCAFF-PD-IA.
    patience : int
        Rounds without improvement after which the step sizes are halved.

    Examples
    --------
    >>> import equifed as ef
    >>> clients = ef.simulate(ef.load("fashion-three"), "logistic", l2=1e-3)
    >>> bold = ef.steps.AutoSteps(smoothness=5.0)  # the losses are more than ten times as steep
    >>> plain = ef.ScaffPD(ef.objectives.ChiSquare(rho=0.1), steps=bold)
    >>> history = ef.train(ef.Safeguarded(plain), clients, rounds=60)
    >>> history.rounds[-1].numbers["halvings"]
    1
    """

    algorithm: AnyAlgorithm
    patience: int = 60

    def __post_init__(self) -> None:
        check_settings(self, patience="[1, inf]")

    @override
    def wrapped(self) -> Safeguarded:
        """Return itself: it is what training would add."""
        return self

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        inner = self.algorithm.init(clients, x)
        check_sizes(inner, self.algorithm, "Safeguarded")
        return State(inner)

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round, or after a step back."""
        try:
            inner, info = self.algorithm.round(state.inner, clients, stream)
        except MissingClients as lost:
            if state.best is None or not self._overflowed(lost, clients, stream):
                raise
            after, best = _back(state, state.best), state.best
            note = "local steps overflowed: back to the best model with half the step size"
            numbers = inner_state(after).sizes.numbers()
            return after, Info(best.weights, best.losses, best.value, None, numbers, (note,))
        chosen = inner_state(inner).sizes.halved() is None  # step sizes that somebody chose
        if chosen or clients.adds_noise():
            return replace(state, inner=inner), info
        known = clients.curvature() if state.curvature is None else state.curvature
        state = replace(state, curvature=known)
        minimised = (objective_at(self.algorithm, s, info.weights) for s in (state.inner, inner))
        if next(minimised) != next(minimised):
            state = State(state.inner, curvature=known)  # another problem
        return self._judged(state, inner, info), info

    def _judged(self, state: State, inner: Any, info: Info) -> State:
        """Return the state after a round, which may send it back or halve its step sizes."""
        assert info.losses is not None and info.objective is not None
        start = state.x
        state = replace(state, inner=inner, measure=state.measure or self._measure(state, info))
        if state.measure == "mean":
            value, mean = info.objective, state.mean
            state = replace(state, mean=value if mean is None else 0.9 * mean + 0.1 * value)
        merit, best = self._merit(state, info), state.best
        if merit is None:  # somebody is missing: nothing to compare with
            return state
        here = BestPoint(start, info.weights, info.losses, merit, info.objective)
        if best is None:
            return replace(state, best=here, first=merit)
        if merit < best.merit:
            return replace(state, best=here, stale=0)
        if state.vanishes and best.merit <= 1e-12 * abs(info.objective):
            return state  # converged to rounding
        if state.stale >= 0 and merit > state.limit(best.merit):
            return _back(state, best)
        if state.stale + 1 >= self.patience * (1 + (state.measure == "residual")):
            return replace(_halved(state), stale=0)
        return replace(state, stale=state.stale + 1)

    def _measure(self, state: State, info: Info) -> Measure:
        """Return what to judge the rounds by, from what the first one has shown."""
        n, known = len(info.weights), state.curvature
        if not isinstance(info.proof, Proof):
            return "mean"
        if not isinstance(known, Curvature) or not float(known.strong_convexity.min()) > 0:
            return "value"
        if info.index is not None and len(info.index) < n:
            return "value"
        signed = 1 + 1e-9 < info.proof.objective.l1_norm(n) < math.inf
        return "residual" if signed else "gap"

    def _merit(self, state: State, info: Info) -> float | None:
        """Return what a round is judged by; smaller is better."""
        proof, known = info.proof, state.curvature
        if state.measure == "mean":
            return state.mean
        if state.measure == "value":
            return info.objective
        if not isinstance(proof, Proof) or info.objective is None:
            return None
        if state.measure == "gap":
            return None if known is None else gap_of_round(info, known)
        slack = info.objective - float(proof.weights @ proof.losses)
        slack += proof.objective.penalty(proof.weights)
        primal = inner_state(state.inner).sizes.primal
        return float(slack + 0.5 * primal * float(proof.gradient @ proof.gradient))

    def _overflowed(self, lost: MissingClients, clients: Clients, stream: Stream) -> bool:
        """Tell whether the numbers of all who were asked grew out of bounds, none being away."""
        fraction = getattr(unwrap(self.algorithm), "participation", 1.0)
        asked = len(sample_clients(clients, fraction, stream).index)
        reasons = lost.reasons.values()
        return len(reasons) == asked and all(r.endswith(("inf", "nan")) for r in reasons)


class Automatic:
    """An algorithm whose automatic steps have a safeguard in training."""

    steps: Schedule

    def wrapped(self) -> Any:
        """Return the algorithm as training runs it."""
        return Safeguarded(cast(Any, self)) if isinstance(self.steps, AutoSteps) else self


def _back(state: State, best: BestPoint) -> State:
    """Return to the best point with half the step sizes; nothing is judged for a while."""
    state = replace(_halved(state), stale=-GRACE)
    there: State = change_state(state, x=best.x, weights=best.weights, losses=best.losses)
    return there


def _halved(state: State) -> State:
    halved: State = change_state(state, sizes=inner_state(state).sizes.halved())
    return halved
