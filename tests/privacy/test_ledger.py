"""What answers cost: the formula against other means, the budget, and the file on the disk."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from equifed.privacy.ledger import (
    Entry,
    Ledger,
    NoAccountant,
    OverBudget,
    compose,
    delta_of,
    epsilon_of,
    mu_of,
)


def integrate_delta(epsilon: float, mu: float) -> float:
    """The definition: the integral of max(0, p - e^epsilon q), p = N(mu, 1), q = N(0, 1)."""
    start = epsilon / mu + mu / 2  # where the ratio of the densities is e^epsilon

    def excess(t: float) -> float:
        return float(norm.pdf(t - mu) - math.exp(epsilon) * norm.pdf(t))

    return float(quad(excess, start, start + 40, epsabs=1e-15, limit=500)[0])


@settings(max_examples=30)
@given(st.floats(0.01, 8.0), st.floats(0.05, 4.0))
def test_delta_is_the_integral_of_its_definition(epsilon, mu):
    assert delta_of(epsilon, mu) == pytest.approx(integrate_delta(epsilon, mu), abs=1e-11)


@settings(max_examples=30)
@given(st.floats(0.01, 20.0), st.sampled_from([1e-3, 1e-5, 1e-9]))
def test_mu_and_epsilon_are_inverses(epsilon, delta):
    mu = mu_of(epsilon, delta)
    assert epsilon_of(mu, delta) == pytest.approx(epsilon, rel=1e-9)
    assert delta_of(epsilon, mu) <= delta


def test_squares_of_answers_add_up_as_one_answer_of_several_coordinates():
    # independent answers D_i / sigma_i are one Gaussian in several coordinates at that distance
    entries = [Entry("a", 1.0, 2.0, steps=3), Entry("b", 3.0, 4.0)]
    distance = np.linalg.norm([0.5, 0.5, 0.5, 0.75])
    assert compose(entries, 1e-5) == pytest.approx(epsilon_of(distance, 1e-5), rel=1e-12)


@pytest.mark.parametrize("mu", [0.2, 0.7, 1.5])
def test_composition_agrees_with_dp_accounting(mu):
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    one = pld.from_gaussian_mechanism(2.0 / mu, value_discretization_interval=1e-4)
    both = one.self_compose(4)  # four answers of mu / 2
    found = compose([Entry("a", 0.5 * mu, 1.0, steps=4)], 1e-5)
    assert found == pytest.approx(both.get_epsilon_for_delta(1e-5), rel=2e-3)
    assert found <= both.get_epsilon_for_delta(1e-5) + 1e-9  # that one rounds upwards


@pytest.mark.parametrize("mu", [0.2, 0.7, 1.5])
def test_composition_agrees_with_opacus(mu):
    """Its Gaussian accountant takes mu and has no unit; that of samples counts rows added."""
    gdp = pytest.importorskip("opacus.accountants.analysis.gdp")
    rdp = pytest.importorskip("opacus.accountants.analysis.rdp")
    found = compose([Entry("a", 0.5 * mu, 1.0, steps=4)], 1e-5)
    assert found == pytest.approx(gdp.eps_from_mu(mu=mu, delta=1e-5), rel=1e-6)
    spent = rdp.compute_rdp(q=1.0, noise_multiplier=2 / mu, steps=4, orders=[*range(2, 129)])
    above, _ = rdp.get_privacy_spent(orders=[*range(2, 129)], rdp=spent, delta=1e-5)
    assert found <= above <= 1.3 * found  # Renyi divergences bound the exact price


def test_two_that_hold_one_file_spend_one_budget(tmp_path):
    """As two processes may: what the other has written since counts, and stays."""
    path, mu = tmp_path / "north.json", mu_of(1.0, 1e-5)
    one, other = Ledger(1.0, 1e-5, path=path), Ledger(1.0, 1e-5, path=path)
    one.spend(Entry("loss", 0.6 * mu, 1.0))
    other.spend(Entry("gradient", 0.6 * mu, 1.0))
    with pytest.raises(OverBudget):
        one.spend(Entry("loss", 0.6 * mu, 1.0))
    assert {e.kind: e.steps for e in Ledger(1.0, 1e-5, path=path).entries} == {
        "loss": 1, "gradient": 1
    }  # fmt: skip


def test_sampled_rows_cost_less_than_all_rows_and_more_than_nothing():
    pytest.importorskip("dp_accounting")
    sampled = compose([Entry("steps", 1.0, 2.0, q=0.01, steps=100)], 1e-5)
    assert 0 < sampled < compose([Entry("steps", 1.0, 2.0, steps=100)], 1e-5) / 5
    whole = [Entry("steps", 1.0, 2.0, steps=4)]
    nearly = [Entry("steps", 1.0, 2.0, q=0.999, steps=4)]
    assert compose(nearly, 1e-5) >= compose(whole, 1e-5)  # an upper bound beside the exact one


def test_sampled_rows_are_refused_without_an_accountant(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    ledger = Ledger(3.0, 1e-5)
    with pytest.raises(NoAccountant, match=r"equifed\[dp\]"):
        ledger.spend(Entry("steps", 1.0, 2.0, q=0.1))
    assert ledger.entries == []


def test_a_budget_is_spent_to_its_end_and_refuses_by_name():
    mu = mu_of(3.0, 1e-5)
    ledger = Ledger(3.0, 1e-5, name="north")
    for _ in range(12):
        ledger.spend(Entry("gradient", mu, math.sqrt(12)))
    assert ledger.spent == pytest.approx(3.0, rel=1e-6)
    assert len(ledger.entries) == 1
    assert ledger.entries[0].steps == 12
    with pytest.raises(OverBudget, match=r"Client north: loss would take epsilon from 3 to .*is 3"):
        ledger.spend(Entry("loss", mu / 10, 1.0))
    assert ledger.entries[0].steps == 12  # nothing of what was refused is entered


def test_the_file_is_there_before_an_answer_could_leave(tmp_path, monkeypatch):
    path = tmp_path / "north.json"
    ledger = Ledger(3.0, 1e-5, path=path)
    ledger.spend(Entry("loss", 0.1, 1.0))
    kept = json.loads(path.read_text())
    assert kept["entries"][0]["kind"] == "loss"

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr("equifed.privacy.ledger.write_file", full)
    with pytest.raises(OSError, match="no space"):
        ledger.spend(Entry("loss", 0.1, 1.0))  # raises, so that nothing is answered
    assert json.loads(path.read_text()) == kept


def test_a_ledger_goes_on_over_runs(tmp_path):
    path, mu = tmp_path / "north.json", mu_of(1.0, 1e-5)
    Ledger(1.0, 1e-5, path=path).spend(Entry("gradient", 0.9 * mu, 1.0))
    later = Ledger(1.0, 1e-5, path=path)
    with pytest.raises(OverBudget):
        later.spend(Entry("gradient", 0.9 * mu, 1.0))
    with pytest.raises(ValueError, match=r"unit 'record' at delta 1e-05"):
        Ledger(1.0, 1e-6, path=path)
    path.write_text("{")
    with pytest.raises(RuntimeError, match="so nothing is answered"):
        Ledger(1.0, 1e-5, path=path)


@pytest.mark.parametrize(
    "wrong", [{"sensitivity": math.inf}, {"sigma": 0.0}, {"q": 0.0}, {"steps": 0}]
)
def test_entries_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Entry(**{"kind": "loss", "sensitivity": 1.0, "sigma": 1.0, **wrong})
