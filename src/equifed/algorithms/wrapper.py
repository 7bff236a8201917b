"""What wrappers of algorithms share: the way to the algorithm inside, and its objective."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from equifed.contract.algorithm import AnyAlgorithm, Info
from equifed.objectives.average import Average
from equifed.objectives.base import SaddleObjective


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
    """
    core = unwrap(algorithm)
    if hasattr(core, "objective_at"):
        return core.objective_at(inner_state(state))  # type: ignore[no-any-return]
    return getattr(core, "objective", None) or Average(prior=tuple(map(float, info.weights)))


def changes_objective(algorithm: AnyAlgorithm, before: Any, after: Any) -> bool:
    """Tell whether an algorithm minimises something else in one state than in the other."""
    core = unwrap(algorithm)
    if not hasattr(core, "objective_at"):
        return False
    return bool(core.objective_at(inner_state(before)) != core.objective_at(inner_state(after)))
