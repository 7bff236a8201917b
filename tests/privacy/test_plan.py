"""Plans are what a run then spends; a private run's end says what that was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.problems import classification, regression

import equifed as ef
from equifed.algorithms import FairNewton, FedAvg, ServerOptimised
from equifed.contract.local import LocalSGD
from equifed.objectives import ChiSquare
from equifed.privacy.clients import plan_answers
from equifed.privacy.ledger import Bounds, Ledger, compose, list_entries
from equifed.training.events import PRIVACY

SIZES = (12, 30)


def run(algorithm: Any, rounds: int) -> Any:
    data = classification(sizes=SIZES, classes=2)
    privacy = ef.Privacy(epsilon=3.0, rows=2.0, loss=1.5, rounds=rounds)
    clients = ef.simulate(data, "logistic", "logistic", privacy=privacy)
    return ef.train(algorithm, clients, rounds=rounds)


def ledgers_of(history: Any) -> list[Ledger]:
    (event,) = [e for e in history.events if e["event"] == PRIVACY]
    assert "publish epsilon 3 at delta 1e-05 for every record" in event["reason"]
    return [Ledger.from_dict(told) for told in event["ledgers"]]


@pytest.mark.parametrize(
    ("name", "algorithm", "settings"),
    [
        ("fair-newton", FairNewton(ChiSquare(1.0, scale=1.0)), {}),
        ("fedavg", FedAvg(LocalSGD(lr=0.1, steps=2)), {"steps": 2}),
        ("fedavg", FedAvg(LocalSGD(lr=0.1, steps=2, batch_size=6)), {"steps": 2, "batch_size": 6}),
    ],
)
def test_a_run_spends_what_was_planned(name, algorithm, settings):
    bounds = Bounds(epsilon=3.0, rows=2.0, loss=1.5, rounds=3)
    planned = plan_answers(bounds, name, SIZES, **settings)
    for found, ledger in zip(planned, ledgers_of(run(algorithm, 3)), strict=True):
        spent = {e.kind: e for e in ledger.entries}
        assert {e.kind for e in found} == set(spent)
        for e in found:
            told = spent[e.kind]
            assert (e.steps, e.q) == (told.steps, pytest.approx(told.q))
            assert e.sigma == pytest.approx(told.sigma, rel=1e-9)
            assert e.sensitivity == pytest.approx(told.sensitivity, rel=1e-9)
        assert compose(found, 1e-5) <= 3.0 * (1 + 1e-9)


def test_shares_add_up_to_the_budget():
    (ledger, _) = ledgers_of(run(FairNewton(ChiSquare(1.0, scale=1.0)), 2))
    listed = list_entries(ledger)
    assert sum(e["share"] for e in listed) == pytest.approx(1.0)
    assert all(0 < e["alone"] < 3.0 for e in listed)


def test_the_servers_ledger_is_in_the_run_below_wrappers():
    clients = ef.simulate(regression(), "linear", "squared")
    private = ef.PrivateFedAvg(3.0, 4, 0.5, LocalSGD(lr=0.1, steps=1))
    history = ef.train(ServerOptimised(private, "adam"), clients, rounds=3)
    (event,) = [e for e in history.events if e["event"] == PRIVACY]
    (told,) = event["ledgers"]
    assert (told["unit"], told["entries"][0]["steps"]) == ("client", 3)
    assert 0 < Ledger.from_dict(told).spent < 3.0


def test_larger_sites_add_less_noise_and_more_rounds_more():
    few, many = (
        plan_answers(Bounds(3.0, 8.0, 3.0, r), "fair-newton", [46, 300, 10_000]) for r in (6, 25)
    )
    sigmas = np.array([[[e.sigma for e in site] for site in plan] for plan in (few, many)])
    assert (np.diff(sigmas, axis=1) < 0).all()
    assert (sigmas[1, :, 1:] > sigmas[0, :, 1:]).all()
    assert sigmas[1, :, 0] == pytest.approx(sigmas[0, :, 0])  # moments are told once


def test_an_unknown_algorithm_is_refused():
    with pytest.raises(ValueError, match=r"one of fair-newton, .* got 'afl'"):
        plan_answers(Bounds(3.0, 8.0, 3.0, 6), "afl", [46])
