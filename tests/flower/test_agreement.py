"""Agreement: algorithms that together make every call of the clients equal the reference engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conformance import cases as conformance
from tests.flower.grid import convex, flower_clients, loop_clients, memory_grid, task

from equifed.algorithms.drfa import DRFA
from equifed.algorithms.fair_newton import FairNewton
from equifed.algorithms.fedavg import FedAvg
from equifed.algorithms.remembering import Remembering
from equifed.algorithms.rfedfair import RFedFair
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.algorithms.scaffold import Scaffold
from equifed.contract.evaluation import SPLITS
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.flower.messenger import SecureSums
from equifed.objectives import ChiSquare, CVaR
from equifed.runs import catalogue
from equifed.steps.automatic import AutoSteps
from equifed.steps.schedules import ConstantSteps
from equifed.training.loop import train

pytestmark = pytest.mark.long

LOCAL = LocalSGD(lr=0.1, steps=4, batch_size=5)
PART = LocalSGD(lr=0.1, steps=4, batch_size=5, correction=0.5)
CASES: dict[str, Any] = {
    "fedavg": FedAvg(LocalSGD(lr=0.1, epochs=2, batch_size=7)),
    "fedavg/partial": FedAvg(LOCAL, participation=0.5),
    "scaffold": Scaffold(LOCAL),
    "scaffold/partial": Scaffold(LOCAL, participation=0.75),
    "scaffold/fresh": Scaffold(LOCAL, variates="fresh"),
    "scaffold/part": Scaffold(PART, variates="fresh"),
    "drfa": DRFA(LOCAL, 0.1, ChiSquare(0.5), output="average"),
    "drfa/drawn": DRFA(LOCAL, 0.1, CVaR(0.5), clients_per_round=3),
    "rfedfair": RFedFair(LOCAL, 0.5),
    "scaff-pd": ScaffPD(ChiSquare(0.5), LOCAL, ConstantSteps(0.4, 0.5)),
    "scaff-pd/partial": ScaffPD(
        CVaR(0.5), LOCAL, ConstantSteps(0.4, 0.5), participation=0.75, gradient_batch_size=4
    ),
    "scaff-pd/part": ScaffPD(CVaR(0.5), PART, ConstantSteps(0.4, 0.5), participation=0.75),
    "scaff-pd/auto": ScaffPD(ChiSquare(0.5), LOCAL, AutoSteps(smoothness=5.0)),
    "scaff-pd/measured": ScaffPD(ChiSquare(0.5)),
    # and what these five do not ask of clients: proximal steps and their multipliers, inner
    # products of updates
    "feddyn": conformance.CASES["feddyn/plain"],
    # and a table of everybody's last vectors at the server
    "remembering": Remembering(ScaffPD(CVaR(0.5), LOCAL, ConstantSteps(0.4, 0.5), None, 0.5)),
    "fedmgda": conformance.CASES["fedmgda/plain"],
}
HIDDEN = {"none": lambda: None, "secure": SecureSums}
BOTH = ("scaffold/partial", "drfa", "rfedfair", "scaff-pd", "scaff-pd/part", "feddyn")
"""Algorithms to run with hidden sums too: stored, averaged, fused, counted and plain vectors."""


@pytest.mark.parametrize(
    ("name", "privacy"),
    [(name, "none") for name in CASES] + [(n, "secure") for n in BOTH],
)
def test_four_rounds_equal_the_loop_engine(name: str, privacy: str, tmp_path: Path) -> None:
    federation, the_task = convex(), task()
    loop = loop_clients(federation, the_task)
    algorithm = CASES[name]
    expected = train(algorithm, loop, rounds=4, seed=3, evaluate=SPLITS)
    clients = flower_clients(
        memory_grid(federation, the_task, tmp_path), the_task, hidden=HIDDEN[privacy]()
    )
    found = train(algorithm, clients, rounds=4, seed=3, evaluate=SPLITS)
    assert found.parameters is not None and expected.parameters is not None
    for key, value in expected.parameters.items():
        torch.testing.assert_close(found.parameters[key], value, rtol=0, atol=1e-10)
    for a, b in zip(found.metrics, expected.metrics, strict=True):
        assert (a.round, a.split, a.metric) == (b.round, b.split, b.metric)
        np.testing.assert_array_equal(a.sizes, b.sizes)
        np.testing.assert_allclose(a.values, b.values, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", catalogue.NEED_GRAM)
def test_inner_products_of_updates_are_refused(name: str, tmp_path: Path) -> None:
    federation, the_task = convex(), task()
    grid = memory_grid(federation, the_task, tmp_path)
    clients = flower_clients(grid, the_task, hidden=SecureSums())
    with pytest.raises(TypeError, match="needs the inner products of the clients' updates"):
        train(conformance.CASES[f"{name}/plain"], clients, rounds=1)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (CASES["remembering"], "their sums are hidden from the server"),
        (FairNewton(ChiSquare(0.5)), "inner products of the clients' gradients are hidden"),
    ],
    ids=["remembering", "fair-newton"],
)
def test_what_needs_vectors_is_refused_where_sums_are_hidden(
    algorithm: Any, message: str, tmp_path: Path
) -> None:
    clients = flower_clients(memory_grid(convex(), task(), tmp_path), task(), hidden=SecureSums())
    with pytest.raises(ValueError, match=message):
        train(algorithm, clients, rounds=1)


def test_a_server_that_started_anew_fills_its_table_again(tmp_path: Path) -> None:
    """It holds the keys of a checkpoint, no vectors, and asks nobody for them."""
    federation, the_task = convex(), task()
    servers = [flower_clients(memory_grid(federation, the_task, tmp_path), the_task) for _ in "ab"]
    algorithm = CASES["remembering"]
    state = algorithm.init(servers[0], servers[0].initial(Stream(0)))
    for r in range(1, 4):
        state, _ = algorithm.round(state, servers[0], Stream(0).at("round", r))
    state, info = algorithm.round(state, servers[1], Stream(0).at("round", 4))
    np.testing.assert_array_equal(np.flatnonzero(state.away == 0), info.index)
    np.testing.assert_array_equal(np.flatnonzero(servers[1].traffic.up), info.index)
