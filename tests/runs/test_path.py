"""Runs that go on from one another: proofs are true in every set, and nothing is asked twice."""

from __future__ import annotations

import numpy as np
import pytest
from tests.optima import interior_point
from tests.problems import Problem, least_squares, logistic

from equifed.algorithms.fair_newton import FairNewton
from equifed.objectives import KL, Average, ChiSquare, CVaR, SaddleObjective, WorstCase
from equifed.runs.path import Continued, Heard
from equifed.training.final_model import StopWhen
from equifed.training.history import History
from equifed.training.loop import train

GAP = 0.005
OBJECTIVES = (WorstCase(), CVaR(0.5), Average(), KL(0.1), ChiSquare(0.05), CVaR(0.3), WorstCase())


def go_on(objective: SaddleObjective, heard: Heard, x: object) -> History:
    """Run FairNewton for one objective from where the last run ended."""
    run, stop = Continued(FairNewton(objective), GAP, heard), StopWhen(at_relative_gap=GAP)
    return train(run, heard, rounds=60, x=x, stop=stop, progress=False)  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("problem", [logistic(1, n=5), least_squares(2, n=7, d=2)])
def test_proofs_hold_where_the_weights_set_changes(problem: Problem) -> None:
    heard, x = Heard(problem.clients()), None
    for objective in OBJECTIVES:
        history = go_on(objective, heard, x)
        x, told = history.parameters, history.given_out
        assert x is not None
        assert told is not None and told.objective is not None and told.gap is not None
        assert told.gap <= GAP * told.objective
        best = interior_point(problem, objective)[0]
        assert -1e-6 * best <= told.objective - best <= told.gap + 1e-6 * best
        final = next(reversed(history.weights.values()))
        assert np.abs(objective.prox(final, 1e-14) - final).max() < 1e-9  # in the set


def test_what_is_proved_already_costs_nothing() -> None:
    heard = Heard(logistic(1).clients())
    first = go_on(CVaR(0.5), heard, None)
    again = go_on(CVaR(0.5), heard, first.parameters)
    assert [r.exchanges for r in again.rounds] == [0]
    assert first.given_out is not None and again.given_out is not None
    assert again.given_out.gap is not None and first.given_out.gap is not None
    assert again.given_out.objective == first.given_out.objective
    assert first.parameters is not None and again.parameters is not None
    assert all(bool((v == again.parameters[k]).all()) for k, v in first.parameters.items())


def test_another_model_begins_anew() -> None:
    problem = logistic(1)
    clients = problem.clients()
    heard = Heard(clients)
    go_on(Average(), heard, None)
    away = problem.start() + 1.0
    fresh, led = (go_on(WorstCase(), h, away) for h in (Heard(clients), heard))
    assert "continued" not in led.rounds[0].numbers
    assert [r.objective for r in led.rounds] == [r.objective for r in fresh.rounds]
