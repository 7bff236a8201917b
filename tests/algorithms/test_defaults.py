"""With settings that nobody chose, every algorithm learns on the embedded data."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.problems import PROBLEMS, start

from equifed.algorithms import FedAvg, QFedAvg, qfedsgd
from equifed.contract.absence import PATIENCE
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.datasets import load
from equifed.engines.in_process import resolve_model
from equifed.engines.simulate import simulate
from equifed.objectives import ChiSquare, CVaR
from equifed.runs import catalogue
from equifed.steps.automatic import with_measured_step

WITHOUT_DEFAULT: dict[str, dict[str, Any]] = {
    "scaff-pd": {"objective": CVaR(0.5)},
    "fair-newton": {"objective": CVaR(0.5)},
    "reweighted": {"objective": ChiSquare(1.0)},  # best responses to a small rho swing
}
"""What to minimise is the user's to say; the rest has a default."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("data", "fraction"),
    [
        ("heart-disease", 0.9),
        pytest.param("penguins", 0.8, marks=pytest.mark.slow),
        pytest.param("synthetic-regression", 0.5, marks=pytest.mark.slow),
        pytest.param("fashion-three", 0.95, marks=pytest.mark.slow),
    ],
)
def test_defaults_learn(data: str, fraction: float) -> None:
    """The worst training loss falls to a fraction of the first one in twenty rounds."""
    federation = load(data)
    module, loss = resolve_model(federation, "linear", "auto")
    clients = simulate(federation, module, loss, l2=1e-3)
    x = clients.initial(Stream(0).at("initial"))
    before, left = np.max(clients.losses(x, Stream(0))), {}
    noisy = {"private-fedavg"}  # a budget and a length are the user's, and its noise is not small
    for name in catalogue.ALGORITHMS.keys() - {*catalogue.WRAPPERS, *noisy}:
        algorithm = catalogue.ALGORITHMS[name].load()(**WITHOUT_DEFAULT.get(name, {}))
        if name not in ("scaff-pd", "fair-newton"):  # they have rules of their own
            algorithm = with_measured_step(algorithm, clients, x, Stream(0).at("smoothness"))
        state = algorithm.init(clients, x)
        for r in range(20):
            state, _ = algorithm.round(state, clients, Stream(0).at("round", r))
        left[name] = np.max(clients.losses(algorithm.model(state), Stream(0))) / before
    assert len(left) > 20
    assert {name: share for name, share in left.items() if not share < fraction} == {}


def test_the_measured_step_follows_the_smoothness() -> None:
    """The squared loss has a constant Hessian, so the least smooth client is known exactly."""
    problem = PROBLEMS["least squares"]
    largest = max(np.linalg.eigvalsh(problem.hessian_of(i, start(problem)))[-1] for i in range(4))
    clients, x = problem.clients("stacked"), torch.as_tensor(start(problem))
    local = LocalSGD(lr=9.0, steps=5, batch_size=4)
    found = with_measured_step(FedAvg(local, "uniform"), clients, x, Stream(0))
    assert found.local.lr == pytest.approx(2 / (5 * largest), rel=0.1)
    assert found == FedAvg(replace(local, lr=found.local.lr), "uniform")
    single = with_measured_step(qfedsgd(), clients, x, Stream(0))
    assert isinstance(single, QFedAvg)
    assert single.local.lr == pytest.approx(1 / largest, rel=0.1)


NEUTRAL = {"participation": 1.0, "server_lr": 1.0, "patience": PATIENCE, "extrapolation": 1.0}
"""Settings that change nothing where they are left out, whatever the algorithm or schedule."""
PRINTED: dict[str, dict[str, Any]] = {
    "drfa": {"dual_step": 0.008, "output": "last"},  # Section 6
    "q-fedavg": {"q": 0.2},  # DRFA, Section 6
    "q-fedsgd": {"q": 0.2},
    "delta-fl": {"level": 0.5},  # the middle one of 0.8, 0.5, 0.1
    "fedfv": {"keep": 0.1},  # alpha
    "averaged": {"decay": 3.0},  # eta, Shamir and Zhang 2013, Section 4
    "server-optimised": {"betas": (0.9, 0.99), "tau": 1e-3},  # Reddi et al. 2021, Section 5
    "rfedfair": {"output": "average"},  # the mean of the models, as Algorithm 1
}
"""Defaults that are the papers' own."""


def test_defaults_are_neutral_or_those_that_the_papers_print() -> None:
    found = {
        name: {key: p.default for key, p in inspect.signature(entry.load()).parameters.items()}
        for name, entry in (catalogue.ALGORITHMS | catalogue.SCHEDULES).items()
    }
    for name, defaults in found.items():
        others = {"patience"} if name == "safeguarded" else set()  # of another kind
        for key in (NEUTRAL.keys() & defaults.keys()) - others:
            if defaults[key] is not inspect.Parameter.empty:
                assert defaults[key] == NEUTRAL[key], f"{name} {key}"
    assert sum("participation" in defaults for defaults in found.values()) > 20
    for name, printed in PRINTED.items():
        assert found[name].items() >= printed.items(), name
