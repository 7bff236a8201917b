"""The certificate: an upper bound on what an interior-point solver finds, wherever it is asked."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.optima import interior_point
from tests.problems import LeastSquares, convex_problem
from torch import nn

from equifed.algorithms.scaff_pd import ScaffPD
from equifed.contract.curvature import Curvature
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.engines.in_process import InProcessClients
from equifed.engines.loop import LoopClients
from equifed.engines.simulate import simulate
from equifed.models import curvature
from equifed.objectives import (
    KL,
    Average,
    ChiSquare,
    CVaR,
    RelativeFairness,
    SaddleObjective,
    WorstCase,
)
from equifed.steps.certificate import Certificate, Certify, certificate
from equifed.training.loop import train
from equifed.training.stopping import StopAtGap

OBJECTIVES = {
    "average": Average(),
    "worst case": WorstCase(),
    "CVaR": CVaR(0.4),
    "chi-square": ChiSquare(0.1),
    "KL": KL(0.5),
}
SEEDS = (24, 35)  # small problems of either kind


@cache
def optimum(seed: int, name: str) -> tuple[float, np.ndarray]:
    return interior_point(convex_problem(seed), OBJECTIVES[name])


@cache
def engine(seed: int) -> InProcessClients:
    clients = convex_problem(seed).clients()
    return clients


def proof_at(
    seed: int, objective: SaddleObjective, x: np.ndarray, point: np.ndarray
) -> tuple[Certificate | str, float]:
    """The certificate at x with the feasible weights nearest to a point, and the objective."""
    clients = engine(seed)
    losses, gradients = clients.value_and_gradient(torch.as_tensor(x), Stream(0))
    weights = objective.prox(point, 0.0)
    known = clients.curvature()
    assert isinstance(known, Curvature)
    gradient = gradients.weighted_sum(weights)
    return certificate(objective, known, losses, weights, gradient), objective.value(losses)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("seed", SEEDS)
@settings(deadline=None, max_examples=15)
@given(draw=st.integers(0, 2**32 - 1), near=st.floats(-8, 1))
def test_no_model_and_weights_have_a_certificate_below_the_true_gap(
    seed: int, name: str, draw: int, near: float
) -> None:
    best, solution = optimum(seed, name)
    random = np.random.default_rng(draw)
    x = solution + 10**near * random.standard_normal(len(solution))
    n = convex_problem(seed).n
    proof, value = proof_at(seed, OBJECTIVES[name], x, random.dirichlet(np.ones(n)))
    assert isinstance(proof, Certificate)
    assert proof.gap >= value - best - 1e-8 * abs(best)
    assert proof.distance >= np.linalg.norm(x - solution) - 1e-3


def test_for_one_sphere_the_certificate_is_the_gap() -> None:
    """One client with loss |x - 1|^2: strong convexity is smoothness, so nothing is lost."""
    federation = Federation.from_clients(
        {"only": (np.eye(3) * np.sqrt(3), np.sqrt(3) * np.ones(3))}
    )
    clients = simulate(federation, nn.Linear(3, 1, bias=False), "squared", dtype=torch.float64)
    x = torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64)
    losses, gradients = clients.value_and_gradient(x, Stream(0))
    known = clients.curvature()
    assert isinstance(known, Curvature)
    weights = np.ones(1)
    proof = certificate(Average(), known, losses, weights, gradients.weighted_sum(weights))
    assert isinstance(proof, Certificate)
    np.testing.assert_allclose(proof.gap, 5.0, rtol=1e-10)
    np.testing.assert_allclose(proof.distance, np.sqrt(5.0), rtol=1e-10)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("samples", [3, 12])
def test_known_curvature_is_that_of_the_data(bias: bool, samples: int) -> None:
    random = np.random.default_rng(0)
    data = [random.normal(size=(samples, 5)) for _ in range(3)]
    labels = np.arange(samples) % 2
    federation = Federation.from_clients({f"c{i}": (a, labels) for i, a in enumerate(data)})
    for loss, outputs, factor in (("squared", 2, 2.0), ("logistic", 1, 0.25)):
        module = nn.Sequential(nn.Flatten(), nn.Linear(5, outputs, bias=bias))
        known = simulate(federation, module, loss, l2=0.1, dtype=torch.float64).curvature()
        assert isinstance(known, Curvature)
        for i, a in enumerate(data):
            full = np.column_stack([a, np.ones(samples)]) if bias else a
            values = np.linalg.eigvalsh(full.T @ full / samples)
            np.testing.assert_allclose(known.smoothness[i], factor * values[-1] + 0.1)
            least = 2 * max(values[0], 0) + 0.1 if loss == "squared" else 0.1
            np.testing.assert_allclose(known.strong_convexity[i], least, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "value"), [("EIGENVALUE_WORK", 0.0), ("MOST_CLIENTS", 1)], ids=lambda v: str(v)
)
def test_cheaper_bounds_are_bounds(
    name: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = convex_problem(24).clients()
    exact = clients.curvature()
    monkeypatch.setattr(curvature, name, value)
    cheap = clients.curvature()
    assert isinstance(exact, Curvature) and isinstance(cheap, Curvature)
    assert (cheap.smoothness >= exact.smoothness).all()
    assert (cheap.strong_convexity <= exact.strong_convexity).all()
    assert (cheap.strong_convexity > 0).all() and not cheap.tight


@settings(deadline=None, max_examples=25)
@given(draw=st.integers(0, 2**32 - 1))
def test_the_modulus_is_below_every_eigenvalue_of_the_weighted_hessian(draw: int) -> None:
    random = np.random.default_rng(draw)
    factors = random.normal(size=(4, 6, 3))
    hessians = np.einsum("nmd,nme->nde", factors, factors)
    values = np.linalg.eigvalsh(hessians)
    weights = random.normal(size=4)
    weights /= weights.sum()
    bounds = Curvature(values[:, -1], values[:, 0])
    least = np.linalg.eigvalsh(np.einsum("n,nde->de", weights, hessians))[0]
    assert bounds.modulus(weights) <= least + 1e-9
    assert bounds.least_modulus(float(np.abs(weights).sum())) <= bounds.modulus(weights) + 1e-9


@pytest.mark.long
def test_signed_weights_have_a_certificate_while_the_sum_is_convex() -> None:
    """One client cannot be served well, one hardly badly: the weight of the latter is negative."""
    twice = np.vstack([np.eye(3), np.eye(3)]) * 1.8
    noisy = np.array([3.0, 0, 0, -3.0, 1, 0])
    problem = LeastSquares(
        (twice, twice * 0.9, twice * 0.8),
        (noisy, 0.5 * noisy + 1, np.full(6, 0.1)),
        0.1,
        "stacked",
    )
    clients, objective = problem.clients(), RelativeFairness(0.1)
    history = train(ScaffPD(objective), clients, rounds=200, x=problem.start())
    gaps = np.array([r.numbers["gap"] for r in history.rounds])
    values = np.array([r.objective for r in history.rounds])
    assert gaps[-1] < 1e-10
    assert (gaps >= values - values.min() - 1e-14).all()
    assert min(w.min() for w in history.weights.values()) < 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"module": nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))}, "not linear"),
        ({"l2": 0.0}, "strongly convex"),
        ({"algorithm": {"gradient_batch_size": 2}}, "minibatches"),
        ({"algorithm": {"participation": 0.5}}, "not all clients took part"),
        ({"loss": lambda o, t: (o[:, 0] - t) ** 4}, "nothing is known about the loss"),
    ],
)
def test_without_a_proof_there_is_a_reason(changes: dict, reason: str) -> None:
    random = np.random.default_rng(1)
    data = {f"c{i}": (random.normal(size=(6, 4)), np.arange(6) % 2) for i in range(4)}
    module = changes.get("module", nn.Linear(4, 1))
    clients = LoopClients(
        Federation.from_clients(data),
        module,
        changes.get("loss", "logistic"),
        l2=changes.get("l2", 0.1),
        dtype=torch.float64,
    )
    algorithm = ScaffPD(WorstCase(), **changes.get("algorithm", {}))
    history = train(algorithm, clients, rounds=2)
    text = history.summary()["certificate"]
    assert text.startswith("no certificate: ") and reason in text
    chosen, why = (e["reason"] for e in history.events if e["event"] == "note")
    assert chosen.startswith("automatic step sizes") and why == text


def test_minibatches_are_certified_every_few_rounds() -> None:
    problem = convex_problem(24)
    algorithm = ScaffPD(
        CVaR(0.4),
        local=LocalSGD(lr=1.0, steps=4, batch_size=5),
        gradient_batch_size=5,
        certify=Certify(every=3),
    )
    history = train(algorithm, problem.clients(), rounds=7, x=problem.start())
    assert [r.round for r in history.rounds if "gap" in r.numbers] == [1, 4, 7]
    ordinary = history.rounds[1].exchanges
    assert [r.exchanges - ordinary for r in history.rounds[1:]] == [0, 0, 1, 0, 0, 1]


@pytest.mark.long
def test_what_the_user_states_is_used() -> None:
    problem = convex_problem(24)
    federation = Federation.from_clients(
        {f"c{i}": pair for i, pair in enumerate(zip(problem.inputs, problem.targets, strict=True))}
    )
    module = nn.Linear(problem.d, 1, bias=False)
    own = simulate(federation, module, my_loss, l2=problem.l2, dtype=torch.float64)
    stated = ScaffPD(CVaR(0.4), certify=Certify(strong_convexity=problem.l2))
    mine = train(stated, own, rounds=25, x=problem.start())
    assert mine.rounds[-1].numbers["gap"] < mine.rounds[0].numbers["gap"] / 100
    known = train(ScaffPD(CVaR(0.4)), problem.clients(), rounds=25, x=problem.start())
    # The library knows more about its own loss than the penalty's share of the convexity.
    assert known.rounds[-1].numbers["gap"] < mine.rounds[-1].numbers["gap"]


def my_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs[:, 0] - targets) ** 2


def test_training_stops_at_the_gap_that_was_asked_for() -> None:
    problem = convex_problem(24)
    rule = StopAtGap(1e-5)
    history = train(
        ScaffPD(CVaR(0.4)), problem.clients(), rounds=300, x=problem.start(), stop=[rule]
    )
    gaps = [r.numbers["gap"] for r in history.rounds]
    assert gaps[-1] <= 1e-5 < min(gaps[:-1])
    assert history.summary()["certificate"]["gap"] == gaps[-1]
    assert "certified" in history.events[-1]["reason"]


@pytest.mark.parametrize("name", ["strong_convexity", "smoothness", "every"])
def test_nonsense_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Certify(**{name: 0})
