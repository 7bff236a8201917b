"""What wrappers of algorithms share: the way to the algorithm inside, its model, its objective."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from equifed.algorithms.attendance import over_members, rounds_of_patience
from equifed.contract.algorithm import AnyAlgorithm, GivesWeights, Info
from equifed.contract.arrays import Vector, Weights
from equifed.objectives.base import SaddleObjective
from equifed.objectives.cvar import Average


@dataclass(frozen=True)
class WrapperState:
    """The state of the algorithm inside; wrappers add what they remember."""

    inner: Any

    @property
    def x(self) -> Vector:
        """The model, from which the next round starts."""
        return self.inner.x  # type: ignore[no-any-return]


class Wrapper:
    """An algorithm around another one, whose model it gives out."""

    algorithm: AnyAlgorithm

    def model(self, state: Any) -> Vector:
        """Return the algorithm's model."""
        return self.algorithm.model(state.inner)


class WeightedWrapper(Wrapper):
    """The same, giving out the algorithm's weights, too."""

    def weights(self, state: Any) -> Weights | None:
        """Return the weights that the algorithm gives out, if it does."""
        inner = self.algorithm
        return inner.weights(state.inner) if isinstance(inner, GivesWeights) else None


def unwrap(algorithm: AnyAlgorithm) -> AnyAlgorithm:
    """Return the algorithm inside all wrappers."""
    inner = getattr(algorithm, "algorithm", None)
    return algorithm if inner is None else unwrap(inner)


def inner_state(state: Any) -> Any:
    """Return the state of the algorithm inside all wrappers."""
    return inner_state(state.inner) if hasattr(state, "inner") else state


def with_inner_state(state: Any, inner: Any) -> Any:
    """Return the wrappers' state with another state of the algorithm inside."""
    if not hasattr(state, "inner"):
        return inner
    return replace(state, inner=with_inner_state(state.inner, inner))


def objective_at(algorithm: AnyAlgorithm, state: Any, info: Info) -> SaddleObjective:
    """Return what an algorithm minimises in a state; the average by its weights if it has none.

    An algorithm whose objective changes (SCAFF-PD-IA chooses phi) has a method ``objective_at``.
    Clients that are away for good are left out of it.
    """
    core, inner = unwrap(algorithm), inner_state(state)
    objective = (
        core.objective_at(inner)
        if hasattr(core, "objective_at")
        else getattr(core, "objective", None) or Average(prior=tuple(map(float, info.weights)))
    )
    away = getattr(inner, "away", None)
    if away is not None:
        objective, _ = over_members(objective, away, rounds_of_patience(core, len(away)))
    return objective


def changes_objective(algorithm: AnyAlgorithm, before: Any, after: Any) -> bool:
    """Tell whether an algorithm minimises something else in one state than in the other."""
    core = unwrap(algorithm)
    if not hasattr(core, "objective_at"):
        return False
    return bool(core.objective_at(inner_state(before)) != core.objective_at(inner_state(after)))
