"""Runs that go on from one another: proofs are true in every set, and nothing is asked twice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.optima import interior_point
from tests.problems import Problem, least_squares, logistic

import equifed as ef
from equifed.algorithms.fair_newton import FairNewton
from equifed.objectives import KL, Average, ChiSquare, CVaR, SaddleObjective, WorstCase
from equifed.runs.path import Continued, Heard, Walk
from equifed.training.final_model import StopWhen
from equifed.training.history import History
from equifed.training.loop import train

GAP = 0.005
PENALISED = (KL(0.1, scale=1.0), ChiSquare(0.05, scale=1.0))
OBJECTIVES = (WorstCase(), CVaR(0.5), Average(), *PENALISED, CVaR(0.3), WorstCase())


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


PENALTIES = [ChiSquare(rho, scale=1.0) for rho in np.geomspace(1.0, 0.01, 12)]


@pytest.mark.long
@pytest.mark.parametrize("l2", [1e-2, 1e-3])
@pytest.mark.parametrize("name", ["heart-disease", "penguins", "fashion-three"])
def test_a_walk_costs_a_third_of_cold_runs_and_counts_every_exchange(name: str, l2: float) -> None:
    penguins = {"clients": "species", "target": "sex", "test": 0.3}
    more = {"penguins": penguins, "fashion-three": {"train": 60, "test": 20}}.get(name, {})
    clients = ef.simulate(ef.load(name, **more), "logistic", l2=l2)
    before = clients.traffic.totals()[0]
    walk = Walk(FairNewton(Average()), clients, GAP, {"rounds": 60, "progress": False})
    runs = [walk.train(objective) for objective in PENALTIES]
    spent = sum(r.exchanges for run in runs for r in run.rounds)
    assert spent == clients.traffic.totals()[0] - before
    cold = [go_on(objective, Heard(clients), None) for objective in PENALTIES[1::3]]
    assert spent < 4 * np.median([sum(r.exchanges for r in run.rounds) for run in cold])
    for run in runs:
        told = run.given_out
        assert told is not None and told.objective is not None and told.gap is not None
        assert told.gap <= GAP * told.objective


def test_a_walk_measures_the_unit_of_strengths_once() -> None:
    clients = logistic(1).clients()
    walk = Walk(FairNewton(Average()), clients, GAP, {"rounds": 20, "progress": False})
    first = walk.train(ChiSquare(0.5))
    before = clients.traffic.totals()[0]
    second = walk.train(ChiSquare(0.4))
    scales = [[e["scale"] for e in run.events if e["event"] == "scale"] for run in (first, second)]
    assert scales == [[walk.scale], []]
    assert clients.traffic.totals()[0] - before == sum(r.exchanges for r in second.rounds)
    assert second.rounds[0].numbers["continued"] == 1.0


def test_runs_of_others_begin_at_the_model_of_the_last_one() -> None:
    clients, x = logistic(1).clients(), None
    method = ef.ScaffPD(Average())
    walk = Walk(method, clients, GAP, {"rounds": 4, "progress": False})
    for objective in (Average(), ChiSquare(0.1), WorstCase()):
        walked, stop = walk.train(objective), StopWhen(at_relative_gap=GAP)
        run = replace(method, objective=objective)
        alone = train(run, clients, rounds=4, x=x, stop=stop, progress=False)
        x = alone.parameters
        assert x is not None and walked.parameters is not None
        assert all(bool((x[k] == walked.parameters[k]).all()) for k in x)
        assert walked.provenance["algorithm"]["objective"]["name"] == type(objective).__name__
