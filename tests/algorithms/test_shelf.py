"""Reweighted, PropFair, Semi-VRed, mean-variance, FedMGDA+, UPGrad and FedFV."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from tests.naive import walk
from tests.problems import Problem, rounds, start

from equifed.algorithms import (
    FedAvg,
    FedEBA,
    FedFV,
    FedMGDA,
    Reweighted,
    UPGrad,
    propfair,
    semi_vred,
)
from equifed.algorithms.shelf.gradient_conflicts import shortest, unconflicting, without_conflicts
from equifed.contract.clients import inner_products
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.objectives import Average, ChiSquare, SemiVariance, mean_variance

pytestmark = pytest.mark.long

WORK = LocalSGD(lr=0.05, steps=4)
ROUNDS = 4
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def losses_of(problem: Problem, x: np.ndarray) -> np.ndarray:
    clients = problem.clients()
    return clients.losses(torch.as_tensor(x), Stream(0))


def naive(problem: Problem, rule: Any) -> np.ndarray:
    """Play FedAvg whose combination of updates is a rule of losses and updates."""
    x = start(problem)
    for _ in range(ROUNDS):
        updates = np.array([x - walk(problem, i, x, 0.05, 4)[-1] for i in range(problem.n)])
        x = x - rule(losses_of(problem, x), updates)
    return x


def propfair_rule(losses: np.ndarray, updates: np.ndarray) -> Any:
    w = np.array([1 / (5 - loss) if 5 - loss > 0.2 else 1 / 0.2 for loss in losses])
    return w / w.sum() @ updates


def semi_vred_rule(losses: np.ndarray, updates: np.ndarray) -> Any:
    above = [max(loss - losses.mean(), 0.0) for loss in losses]
    w = [(1 + 2 * 0.1 * (a - np.mean(above))) / len(losses) for a in above]
    return np.array(w) @ updates


def mgda_rule(losses: np.ndarray, updates: np.ndarray) -> Any:
    norms = np.linalg.norm(updates, axis=1)
    unit = updates / norms[:, None]
    found = by_slsqp(unit @ unit.T, np.zeros(len(unit)), 1.0)
    return np.median(norms) * found @ unit


def upgrad_rule(losses: np.ndarray, updates: np.ndarray) -> Any:
    gram, n = updates @ updates.T, len(updates)
    return np.mean([by_slsqp(gram, np.eye(n)[k]) @ updates for k in range(n)], axis=0)


def fedfv_rule(losses: np.ndarray, updates: np.ndarray) -> Any:
    """The paper's lines on the vectors themselves; of three to nine clients none is kept."""
    order = sorted(range(len(losses)), key=lambda i: losses[i])
    out = []
    for k in range(len(updates)):
        g = updates[k].copy()
        for j in order:
            if j != k and g @ updates[j] < 0:
                g = g - (g @ updates[j]) / (updates[j] @ updates[j]) * updates[j]
        out.append(g)
    mean = np.mean(out, axis=0)
    return mean / np.linalg.norm(mean) * np.linalg.norm(updates.mean(axis=0))


def by_slsqp(gram: np.ndarray, low: np.ndarray, total: float | None = None) -> np.ndarray:
    """Minimise v'Gv over v >= low, with a given sum or without, by a generic solver."""
    n, scale = len(gram), np.trace(gram) / len(gram)
    sums = [] if total is None else [{"type": "eq", "fun": lambda v: v.sum() - total}]
    found = minimize(
        lambda v: v @ gram @ v / scale,
        low + 1 / n,
        jac=lambda v: 2 * gram @ v / scale,
        bounds=[(b, None) for b in low],
        constraints=sums,
        method="SLSQP",
        options={"ftol": 1e-16, "maxiter": 1000},
    )
    return np.asarray(found.x)


@pytest.mark.parametrize(
    ("algorithm", "rule", "close"),
    [
        (propfair(local=WORK), propfair_rule, 1e-9),
        (semi_vred(0.1, local=WORK), semi_vred_rule, 1e-9),
        (FedMGDA(WORK), mgda_rule, 1e-5),
        (UPGrad(WORK), upgrad_rule, 1e-5),
        (FedFV(WORK, keep=0.0), fedfv_rule, 1e-9),
    ],
    ids=["propfair", "semi-vred", "fedmgda+", "upgrad", "fedfv"],
)
def test_it_is_its_naive_twin(problem: Problem, algorithm: Any, rule: Any, close: float) -> None:
    state, _ = rounds(algorithm, problem.clients(), start(problem), ROUNDS)
    np.testing.assert_allclose(state.x, naive(problem, rule), rtol=close, atol=close)


def test_reductions(problem: Problem) -> None:
    """The average is FedAvg; all of FedFV kept is FedAvg."""
    clients, x = problem.clients(), start(problem)
    plain, _ = rounds(FedAvg(WORK, "uniform"), clients, x, ROUNDS)
    for same in (Reweighted(Average(), WORK), semi_vred(0.0, WORK), FedFV(WORK, keep=1.0)):
        np.testing.assert_allclose(rounds(same, clients, x, ROUNDS)[0].x, plain.x, **CLOSE)


@pytest.mark.parametrize("angle", [0.0, 90.0])
def test_fedeba_is_its_naive_twin(problem: Problem, angle: float) -> None:
    """Losses are positive and unequal: the angle lies between 0 and 90 degrees."""
    x, n = start(problem), problem.n
    for _ in range(ROUNDS):
        p = np.exp(losses_of(problem, x) / 3.0 - losses_of(problem, x).max() / 3.0)
        p /= p.sum()
        fair = sum(p[i] * problem.gradient_of(i, x) for i in range(n))
        ends = []
        for i in range(n):
            u = x
            for _ in range(4):
                g = problem.gradient_of(i, u)
                u = u - 0.05 * (0.7 * g + 0.3 * fair if angle == 0 else g)
            ends.append(u)
        first = x - 0.05 * sum(problem.gradient_of(i, x) for i in range(n)) / n
        x = p @ np.array(ends) if angle == 0 else 0.7 * p @ np.array(ends) + 0.3 * first
    state, _ = rounds(FedEBA(WORK, 3.0, 0.3, angle), problem.clients(), start(problem), ROUNDS)
    np.testing.assert_allclose(state.x, x, **CLOSE)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6), st.floats(0.01, 3))
@settings(deadline=None, max_examples=50)
def test_mean_variance_is_chi_square(values: list[float], strength: float) -> None:
    losses, objective = np.array(values), mean_variance(strength)
    weights = (1 + 2 * strength * (losses - losses.mean())) / len(losses)
    value = losses.mean() + strength * losses.var()
    assert objective == ChiSquare(1 / (2 * strength))
    assert objective.value(losses) <= value + 1e-9
    if (weights >= 0).all():
        assert objective.value(losses) == pytest.approx(value, abs=1e-9)
        np.testing.assert_allclose(objective.weights(losses), weights, atol=1e-9)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=6), st.floats(0, 3))
@settings(deadline=None, max_examples=50)
def test_weights_are_the_gradient_of_the_semi_variance(values: list[float], b: float) -> None:
    losses = np.array(values)
    sizes = tuple(range(1, len(values) + 1))
    for objective in (SemiVariance(b), SemiVariance(b, sizes)):
        check_gradient(objective, losses)
    copies = np.repeat(losses, sizes)  # a client of size k is k clients
    assert SemiVariance(b, sizes).value(losses) == pytest.approx(SemiVariance(b).value(copies))


def check_gradient(objective: SemiVariance, losses: np.ndarray) -> None:
    step = 1e-6 * np.eye(len(losses))
    slope = [(objective.value(losses + e) - objective.value(losses - e)) / 2e-6 for e in step]
    np.testing.assert_allclose(objective.weights(losses), slope, atol=1e-4)
    assert objective.weights(losses).sum() == pytest.approx(1)


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 4))
@settings(deadline=None, max_examples=40)
def test_directions_that_oppose_nobody(seed: int, n: int, d: int) -> None:
    """FedMGDA+ and UPGrad: no client's update has a negative inner product with the step."""
    updates = np.random.default_rng(seed).normal(size=(n, d))
    gram = updates @ updates.T
    share = unconflicting(gram)
    assert (gram @ share >= -1e-9).all()
    assert (share >= 1 / n - 1e-12).all()
    shares = shortest(gram, 1.0, rounds=20_000)
    length = shares @ gram @ shares
    assert shares.sum() == pytest.approx(1) and shares.min() >= 0
    assert (gram @ shares >= length - 1e-5).all()  # optimality on the simplex
    near = shortest(gram, 0.1)
    assert np.abs(near - 1 / n).max() <= 0.1 + 1e-12
    np.testing.assert_allclose(shortest(gram, 0.0), 1 / n)


def test_fedfv_keeps_the_length_of_the_mean() -> None:
    updates = np.random.default_rng(0).normal(size=(5, 3))
    gram, losses = updates @ updates.T, np.arange(5.0)
    step = without_conflicts(gram, losses, 0.2) @ updates
    assert np.linalg.norm(step) == pytest.approx(np.linalg.norm(updates.mean(axis=0)))


def test_clients_that_do_not_move_do_no_harm() -> None:
    none = np.zeros((3, 3))
    for found in (shortest(none, 1.0), unconflicting(none), without_conflicts(none, np.ones(3), 0)):
        assert np.isfinite(found).all()


def test_inner_products_are_refused_by_name() -> None:
    class Hidden:
        """Clients whose sums are hidden."""

        def inner_products(self, *_: Any) -> str:
            return "sums are hidden"

    with pytest.raises(TypeError, match=r"UPGrad needs the .* Hidden does not give: sums are"):
        inner_products(Hidden(), None, "UPGrad")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedMGDA(epsilon=1.5), r"epsilon must lie in \[0, 1\], got 1.5"),
        (lambda: FedFV(keep=-0.1), r"keep must lie in \[0, 1\], got -0.1"),
        (lambda: FedEBA(align=1.0), r"align must lie in \[0, 1\), got 1"),
        (lambda: FedEBA(temperature=0.0), "temperature must be positive, got 0"),
        (lambda: FedEBA(angle=180.0), r"angle must lie in \[0, 90\], got 180"),
        (lambda: UPGrad(server_lr=0.0), "server_lr must be positive"),
        (lambda: SemiVariance(-1.0), "at least 0, got -1"),
        (lambda: mean_variance(0.0), "for 0 use Average"),
        (lambda: propfair(ceiling=0.1), "floor must lie between 0 and the ceiling"),
    ],
)
def test_wrong_arguments_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
