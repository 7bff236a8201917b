"""Certified: any algorithm whose rounds prove how far they are from the optimum."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from equifed.algorithms.wrapper import Wrapper, WrapperState, changes_objective, objective_at
from equifed.contract.algorithm import AnyAlgorithm, Info
from equifed.contract.arrays import Vector
from equifed.contract.clients import Clients, may_sum
from equifed.contract.curvature import Curvature
from equifed.contract.streams import Stream
from equifed.steps.certificate import Certificate, certificate, with_best_bound


@dataclass(frozen=True)
class State(WrapperState):
    """The algorithm's state, and what is known of the losses' curvature, or why nothing is.

    ``lower`` is the largest value that the objective was proved not to fall below.
    """

    curvature: Curvature | str | None = None  # None before the first round
    round: int = 0
    lower: float | None = None


@dataclass(frozen=True)
class Certified(Wrapper):
    """Adds to every round a bound on how far the model it started from is from the best one.

    It needs an algorithm whose rounds tell the clients' losses and a weighted full gradient at the
    model they start from, as SCAFF-PD, SCAFF-PD-IA, SCAFFOLD with fresh variates and AFL with one
    local step on all samples do; then it costs no exchange. The bound is valid where everybody took
    part and the weighted loss is strongly convex; where it is not the reason is recorded instead
    (:func:`equifed.steps.certificate.certificate` has the formula). What the optimum is proved not
    to be below holds for good, so the best bound of all rounds counts; where that is not the
    round's own, its own gap is the number ``own_gap``. The round in which an algorithm changes its
    objective (SCAFF-PD-IA chooses phi) has a number ``new_objective``: what was proved before is
    about another problem.

    Nothing need be given for linear models with the losses of :mod:`equifed.models.losses`. The
    numbers given here are taken on trust: a certificate is a proof as far as they are right.

    Parameters
    ----------
    algorithm : Algorithm
        What to certify.
    strong_convexity : float, optional
        mu of every client's loss, L2 penalty included.
    smoothness : float, optional
        L of every client's loss; wanted when weights may be negative.
    every : int, optional
        Where rounds tell no full gradient (minibatches): evaluate all samples every so many rounds,
        at the price of one more exchange, and certify that model.
    """

    algorithm: AnyAlgorithm
    strong_convexity: float | None = None
    smoothness: float | None = None
    every: int | None = None

    def __post_init__(self) -> None:
        for name in ("strong_convexity", "smoothness", "every"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}; leave it out instead.")

    def init(self, clients: Clients, x: Vector) -> State:
        """Return the state before the first round."""
        return State(self.algorithm.init(clients, x))

    def round(self, state: State, clients: Clients, stream: Stream) -> tuple[State, Info]:
        """Return the state after one round of the algorithm, which is recorded with its proof."""
        inner, info = self.algorithm.round(state.inner, clients, stream)
        known = self._known(clients) if state.curvature is None else state.curvature
        changed = changes_objective(self.algorithm, state.inner, inner)
        lower = None if changed else state.lower
        proof = self._proof(state, inner, info, known, clients, stream)
        if self._is_complete(info, clients) and info.objective is not None:
            proof, lower = with_best_bound(proof, info, lower)
        after = State(inner, known, state.round + 1, lower)
        numbers = info.numbers | ({"new_objective": 1.0} if changed else {})
        if isinstance(proof, Certificate):
            return after, replace(info, numbers=numbers | proof.numbers())
        notes = () if proof is None else (f"no certificate: {proof}",)
        return after, replace(info, numbers=numbers, notes=info.notes + notes)

    def _known(self, clients: Clients) -> Curvature | str:
        """Return what is certain, or stated, about the clients' curvature."""
        known, n = clients.curvature(), len(clients.names)
        if self.strong_convexity is None and self.smoothness is None:
            return known
        if isinstance(known, str):
            known = Curvature(np.full(n, math.inf), np.zeros(n))
        least = max(float(known.strong_convexity.min()), self.strong_convexity or 0.0)
        largest = min(float(known.smoothness.max()), self.smoothness or math.inf)
        return Curvature(np.full(n, largest), np.full(n, least), known.tight, known.lowest)

    def _is_complete(self, info: Info, clients: Clients) -> bool:
        """Tell whether everybody took part in the round."""
        asked = clients.index if info.index is None else info.index
        return min(len(clients.index), len(asked)) == len(clients.names)

    def _proof(
        self, state: State, inner: Any, info: Info, known: Curvature | str, clients: Clients,
        stream: Stream,
    ) -> Certificate | str | None:  # fmt: skip
        """Return a round's certificate, why there is none, or None if its turn has not come."""
        if isinstance(known, str):
            return known
        if not self._is_complete(info, clients):
            return "not all clients took part"
        losses, gradient = info.losses, info.gradient
        if losses is None or gradient is None:
            if self.every is None:
                return "gradients of minibatches (certify.every evaluates all samples at times)"
            if state.round % self.every:
                return None
            losses, vectors = clients.value_and_gradient(state.x, stream.at("certificate"))
            if not may_sum(vectors, info.weights):
                return "the sum of the gradients, beside that of the round, would show too much"
            gradient = vectors.weighted_sum(info.weights)
        inexact = clients.inexactness(state.x)
        if isinstance(inexact, str):
            return inexact
        objective = objective_at(self.algorithm, inner, info)
        return certificate(objective, known, losses, info.weights, gradient, inexact)
