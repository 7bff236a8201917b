"""Every objective with every kind of dual step: it runs, or it is refused by name beforehand."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from tests.conformance.test_objectives import CATALOGUE, FREE
from tests.problems import least_squares, logistic

from equifed.algorithms import AFL, DRFA, AgnosticFedAvg, ScaffPD
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.objectives import Average, Entropic, Objective, Proportional, QFair, Tilted
from equifed.runs import catalogue
from equifed.steps.schedules import Problem, SignedWeightSteps
from equifed.training.loop import train

pytestmark = pytest.mark.long

PROBLEM = least_squares(4, n=6, d=3)
TAKERS = {
    name: entry.load()
    for name, entry in catalogue.ALGORITHMS.items()
    if "objective" in inspect.signature(entry.load()).parameters
}
WORK = LocalSGD(lr=0.02, steps=3)
OBJECTIVES = {**CATALOGUE, **FREE, "negative tilt": lambda order: Tilted(-1.0, scale=1.0)}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "primal-dual": ("scaff-pd", {}),
    "projected": ("drfa", {"clients_per_round": 3}),
    "entropic": ("afl", {"dual": Entropic()}),
    "best response": ("reweighted", {}),
    "second order": ("fair-newton", {}),
}
"""An algorithm for each way to the next weights; the others share its lines."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_it_runs_or_is_refused_at_construction(kind: str, objective: str) -> None:
    name, more = KINDS[kind]
    make, value = TAKERS[name], OBJECTIVES[objective](np.arange(6))
    given = {"local": WORK} if "local" in inspect.signature(make).parameters else {}
    try:
        algorithm = make(objective=value, **given, **more)
    except ValueError as refusal:
        assert type(value).__name__ in str(refusal)
        assert value.unfit is not None or not value.is_entropic
        return
    clients = PROBLEM.clients("stacked")
    state = algorithm.init(clients, PROBLEM.start())
    try:
        for r in range(2):
            state, info = algorithm.round(state, clients, Stream(0).at("round", r))
    except ValueError as refusal:  # known only when weights turn negative, or may
        if name == "fair-newton":
            assert value.l1_norm(6) > 1 and "Use ScaffPD" in str(refusal)  # signed, or a free sum
        else:
            assert "negative weights" in str(refusal) and "clients_per_round" in more
        return
    assert torch.isfinite(state.x).all() and np.isfinite(info.weights).all()
    assert info.weights.min() >= 0 or "Relative" in repr(value)


class Own(Objective):
    """An objective without weights."""

    def value(self, losses):
        return float(losses.sum())

    def weights(self, losses):
        return np.ones_like(losses)


@pytest.mark.parametrize("name", sorted(set(TAKERS) - {"reweighted"}))  # which takes any weights
def test_an_objective_that_is_no_maximum_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="a maximum over weights"):
        TAKERS[name](objective=Own())
    with pytest.raises(ValueError, match=r"Tilted\(tilt=-2.0.*tilted-erm"):
        TAKERS[name](objective=Tilted(-2.0, scale=1.0))


def test_an_algorithm_with_entropic_steps_names_the_cure() -> None:
    with pytest.raises(ValueError, match=r"QFair.*dual=Euclidean"):
        AgnosticFedAvg(objective=QFair(1.0))


def test_theory_steps_for_weights_of_sum_one_refuse_a_free_sum() -> None:
    clients, x = PROBLEM.clients(), PROBLEM.start()
    gradients = clients.value_and_gradient(x, Stream(0))[1]
    steps = SignedWeightSteps(1.0, 1.0, 1.0, 1)
    with pytest.raises(ValueError, match="sum to one"):
        steps.start(Problem(ScaffPD(QFair(1.0)), clients, x, gradients, Stream(0)))


def reference(problem: Any, objective: Any) -> Any:
    """Minimise Phi(l(x)) itself, by its gradient."""
    return minimize(
        lambda x: (
            objective.value(problem.losses(x)),
            objective.weights(problem.losses(x)) @ problem.gradients(x),
        ),
        np.zeros(problem.d), jac=True, method="BFGS", options={"gtol": 1e-11},
    )  # fmt: skip


@pytest.mark.parametrize(
    "objective",
    [QFair(0.0), QFair(0.5), QFair(1.0, (1, 2, 3, 4, 5)), QFair(3.0), Proportional(2.0, scale=1.0)],
    ids=repr,
)
@pytest.mark.parametrize("kind", [least_squares, logistic])
def test_a_free_sum_is_solved_and_certified(kind: Any, objective: Any) -> None:
    """SCAFF-PD with automatic steps, whatever the unit of the weights, to the same model."""
    problem = kind(8, n=5)
    best = reference(problem, objective)
    clients = problem.clients("stacked")
    history = train(ScaffPD(objective), clients, rounds=300, x=problem.start(), give_out="last")
    for record in history.rounds:
        assert record.numbers["gap"] >= record.objective - best.fun - 1e-12  # a true bound
    assert record.objective == pytest.approx(best.fun, rel=1e-7)
    assert record.numbers["gap"] < 1e-6 * abs(best.fun) and "distance" not in record.numbers
    np.testing.assert_allclose(clients.flatten(history.parameters), best.x, atol=1e-3)


STEP = LocalSGD(lr=0.1, steps=1)


@pytest.mark.parametrize(
    "algorithm",
    [
        AFL(STEP, 1.0, QFair(2.0)),
        DRFA(STEP, 1.0, Proportional(3.0, scale=1.0), ascent="full"),
        DRFA(STEP, 1.0, QFair(1.0)),
    ],
    ids=["afl", "drfa, full", "drfa"],
)
def test_descent_and_ascent_reach_the_solution_of_a_free_sum(algorithm: Any) -> None:
    objective = algorithm.objective
    best, clients = reference(PROBLEM, objective), PROBLEM.clients("stacked")
    state = algorithm.init(clients, PROBLEM.start())
    for r in range(500):
        state, _ = algorithm.round(state, clients, Stream(0).at("round", r))
    reached = objective.value(PROBLEM.losses(algorithm.model(state).numpy()))
    assert reached == pytest.approx(best.fun, rel=1e-4)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_the_unit_of_the_weights_does_not_matter(scale: float) -> None:
    """A prior of another size is normalised; weights p and c p draw and step alike."""
    algorithm = DRFA(WORK, 1.0, QFair(1.0), clients_per_round=3)
    clients = PROBLEM.clients()
    state = algorithm.init(clients, PROBLEM.start())
    one, _ = algorithm.round(state, clients, Stream(0))
    other, _ = algorithm.round(type(state)(state.x, scale * state.weights), clients, Stream(0))
    assert torch.allclose(one.x, other.x, rtol=0, atol=1e-14)
    assert algorithm.objective.total(scale * Average().start(6)) == pytest.approx(scale)
