"""Special cases of one algorithm that are another one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests import naive
from tests.optima import smooth_optimum
from tests.problems import PROBLEMS, least_squares, rounds, start

from equifed.algorithms import (
    AFL,
    DRFA,
    AgnosticFedAvg,
    DeltaFL,
    FedAvg,
    QFedAvg,
    RFedFair,
    Scaffold,
    ScaffPD,
    drfa_by_theory,
    rfedfair_by_theory,
    tilted_erm,
)
from equifed.contract.absence import sample_clients
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.objectives import (
    KL,
    Average,
    ChiSquare,
    CVaR,
    Entropic,
    Euclidean,
    RelativeFairness,
    WorstCase,
)
from equifed.steps.schedules import AcceleratedSteps, ConstantSteps

pytestmark = pytest.mark.long

PROBLEM = PROBLEMS["more clients"]
WORK = LocalSGD(lr=0.05, steps=4)
MINIBATCHES = LocalSGD(lr=0.05, steps=4, batch_size=2)


def play(algorithm: Any, count: int = 5) -> Any:
    return rounds(algorithm, PROBLEM.clients(), start(PROBLEM), count, seed=4)[0]


def same(one: Any, other: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dual", [Euclidean(), Entropic()], ids=repr)
@pytest.mark.parametrize("objective", [WorstCase(), CVaR(0.5), ChiSquare(0.1)], ids=repr)
def test_drfa_with_one_step_of_all_clients_is_afl(objective: Any, dual: Any) -> None:
    """Its weights are those with which AFL begins the next round."""
    work = LocalSGD(lr=0.05, steps=1)
    drfa = play(DRFA(work, 0.1, objective, dual=dual), 5)
    same(drfa.x, play(AFL(work, 0.1, objective, dual=dual), 5).x)
    ahead = play(AFL(work, 0.1, objective, dual=dual), 6).weights
    np.testing.assert_allclose(drfa.weights, ahead, atol=1e-12)


def test_the_mean_over_draws_of_drfa_is_full_participation() -> None:
    """Line 2 and 13 are unbiased: the mean over many seeds approaches the step of all clients."""
    work, clients, x = LocalSGD(lr=0.05, steps=1), PROBLEM.clients(), start(PROBLEM)
    one = DRFA(work, 1e-3, Average(), clients_per_round=3)
    draws = [rounds(one, clients, x, 1, seed)[0].x.numpy() for seed in range(150)]
    everyone = rounds(DRFA(work, 1e-3, Average()), clients, x, 1)[0].x.numpy()
    error = np.std(draws, axis=0) / np.sqrt(len(draws))
    assert (np.abs(np.mean(draws, axis=0) - everyone) < 4 * error).all()


def test_the_mean_over_draws_of_afl_is_the_step_of_all() -> None:
    work, clients, x = LocalSGD(lr=0.05, steps=3), PROBLEM.clients(), start(PROBLEM)
    objective = Average((1, 2, 3, 4, 5, 6, 7))
    drawn = AFL(work, 0.1, objective, clients_per_round=3)
    draws = [rounds(drawn, clients, x, 1, seed)[0].x.numpy() for seed in range(150)]
    everyone = rounds(AFL(work, 0.1, objective), clients, x, 1)[0].x.numpy()
    error = np.std(draws, axis=0) / np.sqrt(len(draws))
    assert (np.abs(np.mean(draws, axis=0) - everyone) < 4 * error).all()


@pytest.mark.parametrize("server", [1.0, 3.0])
def test_short_local_steps_are_a_server_step(server: float) -> None:
    """Lemma D.2, tau = J eta eta_g: the server moves eta_g times the mean way of the clients."""
    tau, sigma, work, x = 0.12, 0.3, LocalSGD(lr=1.0, steps=4), start(PROBLEM)
    eta = tau / (4 * server)
    fair = ScaffPD(CVaR(0.5), work, ConstantSteps(tau, sigma, local=eta))
    state, infos = rounds(fair, PROBLEM.clients(), x, 1)
    weights, c = infos[0].weights, PROBLEM.gradients(x)
    ends = []
    for i in range(PROBLEM.n):
        u = x
        for _ in range(4):
            u = u - eta * (PROBLEM.gradient_of(i, u) - c[i] + weights @ c)
        ends.append(u)
    np.testing.assert_allclose(state.x, x - server * weights @ (x - np.array(ends)), atol=1e-12)
    one, more = (AcceleratedSteps(1.0, 1.0, 1.0, 4 * g).start() for g in (1.0, server))
    assert more.local == pytest.approx(more.primal / (4 * server)) and more.primal == one.primal


@pytest.mark.parametrize("convex", [True, False])
def test_the_step_sizes_of_drfa_in_theory(convex: bool) -> None:
    """Theorems 1 and 2 at T = 10^8, where the powers are whole numbers of tens."""
    made = drfa_by_theory(10**8, 5.0, 25, convex=convex, objective=CVaR(0.5), batch_size=8)
    assert made.local == LocalSGD(
        lr=1 / (20 * 10**4) if convex else 1 / (20 * 10**6),
        steps=20 if convex else 100,
        batch_size=8,
    )
    assert made.dual_step == pytest.approx(1e-5 if convex else 1e-4)
    assert (made.clients_per_round, made.objective) == (25, CVaR(0.5))
    assert made.output == ("average" if convex else "last")


def test_the_alternative_of_drfa_comes_nearer_at_its_rate() -> None:
    """Section 5.2: with tau = sqrt(T / m) the objective is O(log T / sqrt(mT)) from its minimum."""
    objective, problem = ChiSquare(5.0), least_squares(3, l2=20.0)
    n, x = problem.n, start(problem)
    best = smooth_optimum(problem, objective)
    curved = [np.linalg.eigvalsh(problem.hessian_of(i, x)) for i in range(n)]
    smooth, mu = max(v[-1] for v in curved), min(v[0] for v in curved)
    gaps, counts = [], (20_000, 80_000)
    for count in counts:
        made = drfa_by_theory(count, smooth, n, strong_convexity=(mu, 5 * n), objective=objective)
        assert (made.ascent, made.output) == ("full", "last")
        assert made.local.steps == round((count / n) ** 0.5) and made.dual_step == 1 / (5 * n)
        assert made.local.lr == 4 * np.log(count) / (mu * count)  # T is large enough
        everyone = replace(made, clients_per_round=None)  # no noise of draws
        state, _ = rounds(everyone, problem.clients("stacked"), x, count // made.local.steps)
        gaps.append(objective.value(problem.losses(state.x.numpy())) - best)
    rates = np.log(counts) / np.sqrt(n * np.array(counts))
    assert 0 < gaps[0] < rates[0] and gaps[1] / gaps[0] <= rates[1] / rates[0]


@pytest.mark.parametrize("steps", [1, 5, 400])
@pytest.mark.parametrize("drawn", [None, 4])
def test_the_step_size_of_rfedfair_in_theory_is_the_largest_allowed(
    steps: int, drawn: int | None
) -> None:
    made = rfedfair_by_theory(
        3.0, 2.0, steps, tails=(0.5, 0.25, 1.0), smoothing=0.2, clients_per_round=drawn
    )
    big, kappa, k = (3.0 + (4 + 1) / 0.2) / 0.25, steps, drawn

    def allowed(beta: float) -> bool:
        first = beta <= 1 / (40 * big) if k is None else big * beta * (3 * kappa / k + 2) <= 1 / 20
        return first and 6 * big**2 * beta**2 * (kappa - 1) ** 2 <= 1

    assert allowed(made.local.lr * (1 - 1e-9)) and not allowed(made.local.lr * (1 + 1e-9))


@pytest.mark.parametrize("weighting", ["size", "uniform"])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_qfedavg_with_q_zero_is_fedavg(weighting: Any, participation: float) -> None:
    fair = QFedAvg(MINIBATCHES, 0.0, weighting=weighting, participation=participation)
    same(play(fair).x, play(FedAvg(MINIBATCHES, weighting, participation)).x)


@pytest.mark.parametrize("weighting", ["size", "uniform"])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_delta_fl_at_level_one_is_fedavg(weighting: Any, participation: float) -> None:
    tail = DeltaFL(MINIBATCHES, 1.0, weighting, participation)
    same(play(tail).x, play(FedAvg(MINIBATCHES, weighting, participation)).x)


def test_delta_fl_trains_the_stated_fraction() -> None:
    _, infos = rounds(DeltaFL(WORK, 3 / 7, "uniform"), PROBLEM.clients(), start(PROBLEM), 3)
    assert [len(info.index) for info in infos] == [3, 3, 3]


def test_delta_fl_takes_the_tail_of_those_who_were_sampled() -> None:
    """Four of seven are asked; those with the larger half of these four losses have the weight."""
    algorithm, clients, x = DeltaFL(WORK, 0.5, "uniform", 4 / 7), PROBLEM.clients(), start(PROBLEM)
    losses = clients.losses(torch.as_tensor(x), Stream(0))
    for seed in range(5):
        _, (info,) = rounds(algorithm, clients, x, 1, seed)
        asked = sample_clients(clients, 4 / 7, Stream(seed).at("round", 1)).index
        tail = asked[np.argsort(-losses[asked])[:2]]
        np.testing.assert_allclose(info.weights, np.isin(np.arange(7), tail) / 2, rtol=1e-12)


@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_rfedfair_with_tails_one_above_its_threshold_is_fedavg(weighting: Any) -> None:
    """Tails 1, and all losses so far above the threshold that the sigmoid is one in floats."""
    fair = RFedFair(MINIBATCHES, 1.0, 1e-3, threshold=-1.0, weighting=weighting, output="last")
    state = play(fair)
    same(state.x, play(FedAvg(MINIBATCHES, weighting)).x)
    assert state.threshold == pytest.approx(-1.0, abs=1e-13)


def test_tilted_erm_without_tilt_is_fedavg() -> None:
    same(play(tilted_erm(MINIBATCHES, 0.0)).x, play(FedAvg(MINIBATCHES, "uniform")).x)


def test_agnostic_fedavg_without_dual_steps_is_fedavg() -> None:
    """The set {uniform} leaves the weights where they are."""
    agnostic = AgnosticFedAvg(MINIBATCHES, 0.1, Average(), dual=Euclidean())
    same(play(agnostic).x, play(FedAvg(MINIBATCHES, "uniform")).x)


def test_tilted_erm_is_the_best_response_of_a_kl_penalty() -> None:
    """Its weights are those that KL with strength 1/t gives to the same losses."""
    clients, x = PROBLEM.clients(), start(PROBLEM)
    _, (info,) = rounds(tilted_erm(WORK, 2.0), clients, x, 1)
    np.testing.assert_allclose(info.weights, KL(0.5).weights(PROBLEM.losses(x)), atol=1e-12)


def test_scaff_pd_with_the_average_is_scaffold_with_fresh_variates() -> None:
    """The server step J eta makes the update the average of the clients' models."""
    steps = ConstantSteps(primal=WORK.lr * 4, dual=1.0)
    average = play(ScaffPD(Average(), WORK, steps))
    same(average.x, play(Scaffold(WORK, variates="fresh")).x)


def test_scaff_pd_with_one_local_step_is_the_centralised_primal_dual_method() -> None:
    algorithm = ScaffPD(ChiSquare(0.1), LocalSGD(lr=0.01, steps=1), ConstantSteps(0.2, 0.4, 0.9))
    state = play(algorithm)
    x, weights = naive.primal_dual(PROBLEM, start(PROBLEM), 5, 0.1, 0.2, 0.4, 0.9)
    np.testing.assert_allclose(state.x, x, atol=1e-12)
    np.testing.assert_allclose(state.weights, weights, atol=1e-12)


@pytest.mark.parametrize(
    ("upper", "rho"), [(WorstCase(), 0.0), (CVaR(0.5), 0.0), (WorstCase(), 0.1)], ids=repr
)
def test_scaff_pd_ia_with_phi_zero_is_scaff_pd(upper: Any, rho: float) -> None:
    steps = ConstantSteps(0.2, 0.4)
    relative = RelativeFairness(phi=0.0, upper=upper, lower=WorstCase(), rho=rho)
    one = play(ScaffPD(relative, WORK, steps))
    other = play(ScaffPD(ChiSquare(rho, upper), WORK, steps))
    same(one.x, other.x)
    np.testing.assert_allclose(one.weights, other.weights, atol=1e-12)
