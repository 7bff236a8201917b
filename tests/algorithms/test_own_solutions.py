"""SCAFF-PD on profile losses: the optimum of the joint problem, and a certificate that is true."""

from __future__ import annotations

import numpy as np
import pytest
from scripts.own_problems import try_one
from tests.optima import interior_point
from tests.problems import drawn_objective, skewed_problem

from equifed.algorithms import FairNewton, ScaffPD
from equifed.training.loop import train

pytestmark = pytest.mark.long


@pytest.mark.parametrize("seed", [1, 2, 4, 9, 13])
def test_fair_newton_solves_the_joint_problem_and_its_certificate_is_true(seed: int) -> None:
    """Against an interior-point solver that has shared and own parameters as its unknowns."""
    problem = skewed_problem(seed)
    _, objective = drawn_objective(seed, problem.n)
    clients = problem.clients_with_own("stacked")
    assert clients.own is not None and clients.own.steps == "profile"
    best, _ = interior_point(problem, objective, clients.own.l2)
    history = train(FairNewton(objective), clients, rounds=120, x=problem.start())
    values = np.array([record.objective for record in history.rounds])
    gaps = np.array([record.numbers["gap"] for record in history.rounds])
    assert abs(values.min() - best) <= 1e-6 * abs(best)
    assert (gaps >= values - best - 1e-8 * abs(best)).all()
    assert gaps.min() <= 1e-5 * abs(best)


@pytest.mark.parametrize("method", [FairNewton, ScaffPD])
@pytest.mark.parametrize("seed", [2, 8, 28])
def test_a_few_of_the_problems_of_the_script(seed: int, method: type) -> None:
    """scripts/own_problems.py has forty of them."""
    found = try_one(seed, rounds=200, method=method)
    assert found.good, found
