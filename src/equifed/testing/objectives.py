"""The conformance suite for objectives; a check takes one and :class:`Points` to try it at."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equifed.objectives.base import Objective, SaddleObjective
from equifed.objectives.dual_steps import Euclidean

Array = NDArray[np.float64]
Saddle = Any  # A SaddleObjective; what it lacks is found out by the checks

PLAIN_CHECKS: dict[str, Callable[[Any, Points], None]] = {}  # of every objective
SADDLE_CHECKS: dict[str, Callable[[Any, Points], None]] = {}  # of saddle objectives, too
SCALES = (1e-300, 1e-150, 1e-9, 1e9, 1e150, 1e300)


def run_check(value: object, name: str, check: Callable[[], None]) -> None:
    """Run a check; whatever goes wrong becomes an AssertionError that names it."""
    try:
        check()
    except Exception as error:
        reason = str(error).strip()
        if not isinstance(error, AssertionError):
            reason = f"{type(error).__name__}: {reason}"
        raise AssertionError(f"{value!r} fails the check {name!r}: {reason}") from error


def register(checks: dict[str, Any], name: str) -> Callable[[Any], Any]:
    """Return a decorator that puts a check into a suite, under a name."""
    return lambda check: checks.setdefault(name, check)


def ensure(holds: object, message: str) -> None:
    """Raise AssertionError with a message unless something holds."""
    if not holds:
        raise AssertionError(message)


@dataclass(frozen=True)
class Points:
    """Losses, two points of the space of weights, and the length of a dual step."""

    losses: Array
    point: Array
    other: Array
    step: float

    @property
    def n(self) -> int:
        """Number of clients."""
        return len(self.losses)


def check_objective(
    objective: Objective, clients: Sequence[int] = (1, 2, 6), trials: int = 12
) -> None:
    """Raise AssertionError, with the name of the check, unless an objective keeps the contract.

    Parameters
    ----------
    objective : Objective
        The objective; a saddle objective (one with ``prox``) is asked more.
    clients : sequence of int
        Numbers of clients to try; say ``(n,)`` if it holds numbers for n clients.
    trials : int
        Random points for each number of clients and check, many of them with ties.

    Examples
    --------
    >>> from equifed.objectives import CVaR
    >>> check_objective(CVaR(tail=0.3), trials=5)  # says nothing: all is well
    """
    saddle = hasattr(objective, "prox")
    if saddle:
        ensure(isinstance(objective, SaddleObjective), f"{objective!r} is not a SaddleObjective")
        # Weights without a bound, or no weights for these settings: asked as a plain function.
        fit = isinstance(objective, SaddleObjective) and objective.unfit is None
        saddle = fit and bool(np.isfinite(objective.l1_norm(1)))  # type: ignore[attr-defined]
    for name, check in (OBJECTIVE_CHECKS if saddle else PLAIN_CHECKS).items():
        for n in clients:
            for points in draw_points(n, 1 if check in POINTLESS else trials):
                run_check(objective, name, partial(check, objective, points))


def draw_points(n: int, trials: int, seed: int = 0) -> Iterator[Points]:
    """Draw points to try objectives at: half of them on a few levels, so that there are ties."""
    rng = np.random.default_rng(seed)
    for trial in range(trials):
        draws = rng.uniform(-3, 3, (3, n))
        if trial % 2:
            draws = rng.choice([0.0, 0.5, 1.0, 2.0, -1.0], (3, n))
        losses, point, other = draws
        yield Points(np.abs(losses), point, other, float(rng.choice([0.01, 0.3, 1.0, 20.0])))


@register(PLAIN_CHECKS, "it is a frozen value")
def _check_value(objective: Objective, at: Points) -> None:
    same = copy.deepcopy(objective)
    ensure(objective == same and hash(objective) == hash(same), "it does not equal its copy")
    try:
        objective.anything = 1  # type: ignore[attr-defined]
    except AttributeError:
        return
    raise AssertionError("it can be changed: make it a frozen dataclass")


@register(PLAIN_CHECKS, "weights are finite differences of the value")
def _check_slopes(objective: Objective, at: Points) -> None:
    rng = np.random.default_rng(at.n)
    losses = rng.uniform(0.1, 2, at.n)
    slopes = [
        (objective.value(losses + 1e-6 * e) - objective.value(losses - 1e-6 * e)) / 2e-6
        for e in np.eye(at.n)
    ]
    np.testing.assert_allclose(objective.weights(losses), slopes, rtol=0, atol=1e-5)


@register(PLAIN_CHECKS, "arrays of any kind are taken")
def _check_arrays(objective: Objective, at: Points) -> None:
    narrow: Any = at.losses.astype(np.float32)
    before = narrow.copy()
    weights = objective.weights(narrow)
    ensure(weights.dtype == np.float64 and weights.shape == (at.n,), "weights: float64, one each")
    np.testing.assert_array_equal(narrow, before, err_msg="weights changed its argument")
    listed, wide = objective.value(narrow.tolist()), objective.value(narrow.astype(float))
    ensure(listed == wide, "lists are not taken")


@register(PLAIN_CHECKS, "numbers that are not finite are named")
def _check_refusal(objective: Objective, at: Points) -> None:
    bad, place = at.losses.copy(), at.n - 1
    bad[place] = np.nan
    calls: list[Callable[[Any], Any]] = [objective.value, objective.weights]
    if isinstance(objective, SaddleObjective) and objective.unfit is None:
        calls.append(partial(objective.prox, step=1.0))
    for call in calls:
        try:
            call(bad)
        except ValueError as error:
            named = f"nan at position {place}" in str(error)
            ensure(named, f"the message must say 'nan at position {place}', but is: {error}")
        else:
            raise AssertionError(f"{call} accepts nan")


def _ensure_weights(weights: Array, n: int, size: float, what: str) -> None:
    ensure(weights.dtype == np.float64 and weights.shape == (n,), f"{what}: float64, one each")
    ensure(abs(weights.sum() - 1) <= 1e-12 * size, f"{what}: {weights} does not sum to one")
    ensure(np.abs(weights).sum() <= size * (1 + 1e-12), f"{what}: {weights} exceeds l1_norm")


@register(SADDLE_CHECKS, "every answer is feasible")
def _check_feasibility(objective: Saddle, at: Points) -> None:
    size = objective.l1_norm(at.n)
    answers = {
        "prox": objective.prox(at.point, at.step),
        "weights": objective.weights(at.losses),
        "start": objective.start(at.n),
    }
    for name, weights in answers.items():
        _ensure_weights(weights, at.n, size, name)
        np.testing.assert_allclose(
            objective.prox(weights, 0.0), weights, rtol=0, atol=1e-9 * size, err_msg=name
        )


@register(SADDLE_CHECKS, "Fenchel-Young")
def _check_conjugacy(objective: Saddle, at: Points) -> None:
    value, best = objective.value(at.losses), objective.weights(at.losses)
    for other in (objective.prox(at.point, 1.0), objective.weights(at.losses + at.other)):
        above = float(other @ at.losses) - objective.penalty(other) - value
        ensure(above <= 1e-9, f"feasible weights {other} exceed the value by {above:.1e}")
    attained = float(best @ at.losses) - objective.penalty(best)
    ensure(abs(value - attained) <= 1e-9, f"value {value}, but its weights attain {attained}")


@register(SADDLE_CHECKS, "the prox is optimal")
def _check_prox(objective: Saddle, at: Points) -> None:
    best = objective.prox(at.point, at.step)
    others = (objective.prox(at.other, at.step), objective.weights(at.other), objective.start(at.n))
    for other in others:
        rise = at.step * (objective.penalty(other) - objective.penalty(best))
        slope = rise + float((best - at.point) @ (other - best))
        ensure(slope >= -1e-8 * (1 + at.step), f"{other} is better than {best} by {-slope:.1e}")


@register(SADDLE_CHECKS, "a common shift changes nothing")
def _check_shift(objective: Saddle, at: Points) -> None:
    point = np.round(at.point * 64) / 64  # so that the shift is exact
    here, there = objective.prox(point, at.step), objective.prox(point + 1024.0, at.step)
    np.testing.assert_allclose(here, there, rtol=0, atol=1e-9)


@register(SADDLE_CHECKS, "the prox contracts")
def _check_contraction(objective: Saddle, at: Points) -> None:
    moved = objective.prox(at.point, at.step) - objective.prox(at.other, at.step)
    bound = np.linalg.norm(at.point - at.other) / (1 + at.step * objective.strong_convexity(at.n))
    ensure(np.linalg.norm(moved) <= bound + 1e-9, "prox contracts less than strong_convexity says")


@register(SADDLE_CHECKS, "the maximiser is a fixed point")
def _check_fixed_point(objective: Saddle, at: Points) -> None:
    best = objective.weights(at.losses)
    for step in (0.1, 3.0):
        after = Euclidean().ascend(objective, best, at.losses, step)
        np.testing.assert_allclose(after, best, rtol=0, atol=1e-8)


@register(SADDLE_CHECKS, "any scale with ties")
def _check_scales(objective: Saddle, at: Points) -> None:
    pattern, size = np.resize([1.0, 0.25, 1.0, 0.25, -0.5, 0.0], at.n), objective.l1_norm(at.n)
    for scale in SCALES:
        losses = scale * np.abs(pattern)
        best = objective.weights(losses)
        proxes = [objective.prox(scale * pattern, step) for step in (1e-3, 1.0, 1e3)]
        for weights in (best, *proxes):
            _ensure_weights(weights, at.n, size, f"weights at scale {scale:g}")
        value, attained = objective.value(losses), best @ losses - objective.penalty(best)
        np.testing.assert_allclose(value, attained, rtol=1e-9, atol=1e-12, err_msg=f"{scale:g}")


@register(SADDLE_CHECKS, "one client has all the weight")
def _check_one_client(objective: Saddle, at: Points) -> None:
    charge = objective.penalty(np.ones(1)) if at.n == 1 else 0.0
    for number in (-1e300, 0.0, 1e-300, 3.0, 1e300) if at.n == 1 else ():
        array = np.array([number])
        for weights in (objective.prox(array, 0.7), objective.weights(array)):
            np.testing.assert_allclose(weights, 1.0, rtol=0, atol=1e-12)
        np.testing.assert_allclose(objective.value(array), number - charge, rtol=1e-12, atol=1e-12)


OBJECTIVE_CHECKS = PLAIN_CHECKS | SADDLE_CHECKS  # what check_objective asks of saddle objectives
POINTLESS = (_check_value, _check_slopes, _check_refusal, _check_scales, _check_one_client)
"""Checks that choose their own numbers."""
