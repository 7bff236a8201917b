"""CentredClipping beside a naive twin; what it bears, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scripts.trust.federations import draw_federation
from tests.naive import walk
from tests.problems import Problem, rounds, start

from equifed.algorithms import AFL, CentredClipping, FedAvg, Guarded, Remembering
from equifed.algorithms.shelf import centred_clipping
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.engines.simulate import simulate
from equifed.testing import with_liar
from equifed.training.loop import train

WORK = LocalSGD(lr=0.05, steps=4)


def drawn() -> Any:
    return simulate(draw_federation(0, test=5), "logistic", dtype=torch.float64)


@pytest.mark.parametrize("radius", [0.5, 1.0, 2.0])
def test_centred_clipping_is_its_naive_twin(problem: Problem, radius: float) -> None:
    x, centre = start(problem), np.zeros(problem.d)
    p = problem.sizes / problem.sizes.sum()
    for _ in range(5):
        ways = [x - walk(problem, i, x, 0.05, 4)[-1] - centre for i in range(problem.n)]
        lengths = np.linalg.norm(ways, axis=1)
        most = radius * sorted(lengths)[(problem.n - 1) // 2]
        kept = np.minimum(1.0, most / lengths)
        centre = centre + sum(p[i] * kept[i] * ways[i] for i in range(problem.n))
        x = x - centre
    algorithm = CentredClipping(FedAvg(WORK), radius)
    state, _ = rounds(algorithm, problem.clients(), start(problem), 5)
    np.testing.assert_allclose(state.x, x, rtol=1e-9, atol=1e-9)


def test_gradients_pass_as_they_are() -> None:
    """It is updates that are cut: what clients say of their gradients has no radius."""
    clients, weights = drawn(), np.linspace(0.1, 1.0, 5)
    clients = clients.subset(range(5))
    x = clients.initial(Stream(0))
    plain, seen = (
        one.value_and_gradient(x, Stream(1))[1].weighted_sum(weights)
        for one in (clients, centred_clipping._Clipping(clients, torch.ones_like(x), 1e-3))
    )
    torch.testing.assert_close(seen, plain, rtol=0, atol=0)


def test_a_wide_radius_is_fedavg() -> None:
    wide: Any = train(CentredClipping(FedAvg(WORK), 1e6), drawn(), rounds=3)
    plain: Any = train(FedAvg(WORK), drawn(), rounds=3)
    for name, value in plain.parameters.items():
        torch.testing.assert_close(wide.parameters[name], value, rtol=1e-12, atol=1e-12)
    assert {record.numbers["clipped"] for record in wide.rounds} == {0.0}


@pytest.mark.parametrize("factor", [-1e6, -30.0, 1e30])
def test_a_liar_moves_a_step_by_its_share_of_the_usual_distance(factor: float) -> None:
    algorithm, x = CentredClipping(FedAvg(WORK, "uniform")), torch.zeros(27).double()
    liars = with_liar(drawn(), 3, update=factor)
    rows = drawn().local_steps(x, WORK, Stream(0).at("local")).displacement.dense()
    lengths = np.delete(rows.norm(dim=1).numpy(), 3)
    usual = float(sorted(lengths)[9])  # of twenty, the liar's being the longest
    others = sum(
        (row * min(1.0, usual / float(row.norm())) for row in rows[[i != 3 for i in range(20)]]),
        torch.zeros(27).double(),
    )
    moved = x - algorithm.round(algorithm.init(liars, x), liars, Stream(0))[0].x
    assert float((moved - others / 20).norm()) <= usual / 20 * (1 + 1e-9)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CentredClipping(AFL()), "is for FedAvg and FedProx: AFL.*Guarded"),
        (lambda: CentredClipping(Remembering(FedAvg(participation=0.5))), "one of the two"),
        (lambda: CentredClipping(FedAvg(), 0.0), "radius must be positive, got 0.0"),
    ],
)
def test_what_it_would_spoil_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
    CentredClipping(Guarded(FedAvg()))
