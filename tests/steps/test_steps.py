"""Step sizes: the papers' conditions hold, and the automatic ones solve what they are given."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.auto_steps import observed_rate, rounds_to_saddle, solve, squared_distances
from tests.optima import interior_point
from tests.problems import PROBLEMS, LeastSquares, convex_problem, drawn_objective
from torch import nn

from equifed.algorithms.around import inner_state
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.datasets.small import synthetic_regression
from equifed.engines.simulate import simulate
from equifed.objectives import ChiSquare, CVaR, RelativeFairness, WorstCase
from equifed.steps.automatic import AutoSteps, hessian_product, measured_smoothness
from equifed.steps.dual_step import Products, largest_coupling, step_exactly
from equifed.steps.schedules import (
    AcceleratedSteps,
    ConstantSteps,
    LinearRateSteps,
    Problem,
    SignedWeightSteps,
)
from equifed.training import checkpoint
from equifed.training.loop import train

pytestmark = pytest.mark.long

THEORY = {"smoothness": 3.0, "strong_convexity": 0.5, "coupling": 2.0, "local_steps": 10}


# -- the papers' schedules -------------------------------------------------------------------------


def test_condition_5_1_holds_round_after_round() -> None:
    schedule = AcceleratedSteps(**THEORY)
    now = schedule.start()
    np.testing.assert_allclose(0.5 / now.primal, 12 * 3.0 + 4 * 2.0**2 * now.dual)  # (E.35)
    for _ in range(50):
        after = schedule.next(now)
        assert now.gamma is not None and after.gamma is not None
        np.testing.assert_allclose(after.gamma, now.gamma * (1 + 0.5 / 4 * now.primal))
        np.testing.assert_allclose(after.primal**2 * after.gamma, now.primal**2 * now.gamma)
        np.testing.assert_allclose(after.dual, after.gamma * after.primal)
        np.testing.assert_allclose(after.extrapolation, now.dual / after.dual)
        np.testing.assert_allclose(after.local, after.primal / 10)
        now = after


def test_condition_5_2_holds() -> None:
    sizes = LinearRateSteps(**THEORY, dual_strong_convexity=0.2).start()
    theta, kappa = sizes.extrapolation, 3.0 / 0.5
    omega = 1 / (1 - theta)
    half = 0.5 + 24 * kappa
    np.testing.assert_allclose((omega - half) ** 2, half**2 + 16 * 2.0**2 / (0.5 * 0.2))
    np.testing.assert_allclose(sizes.primal * 0.5 * theta, 4 * (1 - theta))
    np.testing.assert_allclose(sizes.dual * 0.2 * theta, 1 - theta)
    pi = theta * sizes.dual * 2.0  # (E.51) with c = 1
    assert 1 / sizes.primal >= 12 * 3.0 + 2 * pi * 2.0


@pytest.mark.parametrize("accuracy", [1e-1, 1e-3, 1e-6])
@pytest.mark.parametrize("noise", [0.0, 0.3, 4.0])
def test_condition_5_2_holds_with_noise(noise: float, accuracy: float) -> None:
    """The noise left, (E.60) times mu, is within the accuracy; (E.50) still holds."""
    given = {**THEORY, "dual_strong_convexity": 0.2}
    sizes = LinearRateSteps(**given, noise=noise, accuracy=accuracy).start()
    exact = LinearRateSteps(**given).start()
    theta, mu, big, coupling = sizes.extrapolation, 0.5, 3.0, 2.0
    left = 4 * (1 - theta) / theta * noise**2 / mu
    assert left <= accuracy * (1 + 1e-6)
    assert sizes == exact or left == pytest.approx(accuracy, rel=1e-6)  # no shorter than needed
    assert theta >= exact.extrapolation
    assert mu * sizes.primal >= 4 * (1 - theta) / theta * (1 - 1e-6)
    assert 0.2 * sizes.dual >= (1 - theta) / theta * (1 - 1e-6)
    pi = theta * sizes.dual * coupling  # (E.51) with c = 1
    assert 1 / sizes.primal >= 12 * big + 2 * pi * coupling


def test_noise_needs_an_accuracy() -> None:
    with pytest.raises(ValueError, match="noise needs accuracy"):
        LinearRateSteps(**THEORY, dual_strong_convexity=0.2, noise=1.0)


def problem_of(objective: RelativeFairness | WorstCase) -> Problem:
    clients = PROBLEMS["least squares"].clients()
    x = clients.initial(Stream(0))
    _, gradients = clients.value_and_gradient(x, Stream(0))
    local = LocalSGD(lr=1.0, steps=10)
    return Problem(ScaffPD(objective, local), clients, x, gradients, Stream(0))


def test_assumption_8_holds_round_after_round() -> None:
    objective = RelativeFairness(0.03)
    size = objective.l1_norm(PROBLEMS["least squares"].n)
    assert 1 < size < 1 + 0.5 / (2 * 3.0)
    schedule = SignedWeightSteps(**THEORY, balance=2.0)
    now = schedule.start(problem_of(objective))
    tau, beta = now.primal, max(1.0, 2 * now.primal * 3.0)
    assert tau <= 1 / (1200 * 3.0 * size)
    assert tau <= 18 * (1 + np.sqrt(3)) / (0.5 - 2 * 3.0 * (size - 1))
    assert 4 * 2.0**2 * tau**2 * 2.0 / 0.5 + 27 * 3.0 * tau <= 1 + 1e-12
    for _ in range(20):
        after = schedule.next(now)
        assert now.gamma is not None and after.gamma is not None
        growth = 1 + (0.5 / 4 - 3.0 * (size - 1) / 2) * now.primal
        np.testing.assert_allclose(after.gamma, now.gamma * growth)
        np.testing.assert_allclose(after.primal, now.primal * np.sqrt(now.gamma / after.gamma))
        np.testing.assert_allclose(after.dual, after.gamma * after.primal)
        np.testing.assert_allclose(after.extrapolation, now.dual / after.dual)
        np.testing.assert_allclose(after.local, after.primal / (10 * beta))
        now = after


@pytest.mark.parametrize("spread", [0.0, 0.7])
@pytest.mark.parametrize("phi", [0.0, 0.01])
def test_proposition_20_keeps_models_near(phi: float, spread: float) -> None:
    """The step is the largest for which its proof's factor of the squared distance shrinks.

    |x' - x0|^2 <= (1 - 2 tau m + tau^2 + 3 tau^2 S) |x - x0|^2 + (1 + 3 tau^2) T + ..., with S the
    squared Lipschitz constant of a sum and T <= S max_i |u_i - x|^2 (Appendix H); below
    1 - tau m the distances stay bounded.
    """
    m, big = THEORY["strong_convexity"], THEORY["smoothness"]
    problem = problem_of(RelativeFairness(phi))
    size = problem.algorithm.objective.l1_norm(len(problem.clients.names))
    assert SignedWeightSteps(**THEORY).start(problem).primal > 0
    tau = SignedWeightSteps(**THEORY, spread=spread).start(problem).primal
    pull = 0.5 * (m * (1 + (size - 1) / 2) - big * (size - 1) / 2)

    def factor(tau: float) -> float:
        square = (size * big) ** 2
        drift = 48 * tau**2 * spread**2 + 12 * tau**2 * 2 * square  # of |u - x|^2 per |x - x0|^2
        return 1 - 2 * tau * pull + tau**2 + 3 * tau**2 * square + (1 + 3 * tau**2) * square * drift

    assert factor(tau) <= 1 - tau * pull and tau <= min(1.0, 1 / pull)
    plain = SignedWeightSteps(**THEORY).start(problem).primal
    assert tau < plain and factor(8 * tau) > 1 - 8 * tau * pull  # no shorter than needed
    with pytest.raises(ValueError, match="use a smaller phi"), pytest.warns(UserWarning):
        SignedWeightSteps(**THEORY, spread=spread).start(problem_of(RelativeFairness(0.5)))


def test_a_set_beyond_assumption_8_is_warned_about_and_used() -> None:
    schedule, phi = SignedWeightSteps(**THEORY), 0.3
    with pytest.warns(UserWarning, match=r"\|Lambda\|_1 is .*1 \+ m/\(2M\)"):
        sizes = schedule.start(problem_of(RelativeFairness(phi)))
    assert schedule.next(sizes).gamma == sizes.gamma
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.start(problem_of(WorstCase()))  # |Lambda|_1 = 1


def test_constant_steps_are_as_given() -> None:
    constant = ConstantSteps(0.3, 0.4, 0.5)
    assert constant.next(constant.start()) == constant.start()


@pytest.mark.parametrize("name", [*THEORY, "balance"])
def test_the_papers_schedules_refuse_what_is_not_positive(name: str) -> None:
    for schedule in (AcceleratedSteps, SignedWeightSteps):
        with pytest.raises(ValueError, match=name):
            schedule(**{**THEORY, name: 0})


# -- measuring -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROBLEMS)
def test_hessian_products_are_those_of_the_hessian(name: str) -> None:
    problem, random = PROBLEMS[name], np.random.default_rng(0)
    clients, weights = problem.clients(), random.normal(size=problem.n)
    x, v = random.normal(size=(2, problem.d))
    exact = sum(w * problem.hessian_of(i, x) @ v for i, w in enumerate(weights))
    found = hessian_product(clients, torch.as_tensor(x), weights, torch.as_tensor(v), Stream(0))
    np.testing.assert_allclose(found, exact, atol=1e-7)


@pytest.mark.parametrize("apart", [0.0, 1e-12, 1e-6, 1e-3])
def test_a_start_at_rest_is_as_steep_as_it_is(apart: float) -> None:
    """Oracle: the Hessian of balanced labels, whose gradients cancel where all scores are zero."""
    rows = np.random.default_rng(0).normal(size=(40, 3))
    both = np.concatenate([rows, rows + apart])
    given = {"a": (both, [0] * 40 + [1] * 40), "b": (2 * both, [0] * 40 + [1] * 40)}
    data = Federation.from_clients(given, classes=2)
    clients = simulate(data, "logistic", "logistic", dtype=torch.float64)
    design = np.column_stack([2 * both, np.ones(80)])
    steepest = np.linalg.eigvalsh(design.T @ design / 80 / 4)[-1]
    found = measured_smoothness(clients, clients.initial(Stream(0)), Stream(0))
    assert found == pytest.approx(steepest, rel=0.05)


@pytest.mark.parametrize(("dtype", "accuracy"), [(torch.float64, 0.1), (torch.float32, 0.4)])
@pytest.mark.parametrize("seed", [24, 34, 35, 49])
def test_the_measured_smoothness_is_the_largest_eigenvalue(
    seed: int, dtype: torch.dtype, accuracy: float
) -> None:
    problem = convex_problem(seed)
    clients = problem.clients(dtype=dtype)
    factor = 0.25 if problem.loss == "logistic" else 2.0
    exact = factor * max(np.linalg.norm(a, 2) ** 2 / len(a) for a in problem.inputs) + problem.l2
    found = measured_smoothness(clients, problem.start().to(dtype), Stream(0))
    assert (1 - accuracy) * exact <= found <= (1 + accuracy) * exact


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("seed", [25, 31])
def test_half_precision_runs_with_measured_steps(
    seed: int, engine: str, dtype: torch.dtype
) -> None:
    """Steps of a client may be lost in rounding: a length of zero says nothing of its growth."""
    problem = convex_problem(seed)
    best, _ = interior_point(problem, WorstCase())
    given = {"rounds": 40, "x": problem.start().to(dtype)}
    history = train(ScaffPD(WorstCase()), problem.clients(engine, dtype=dtype), **given)
    x = history.parameters["weight"].reshape(-1).double().numpy()
    assert problem.losses(x).max() < 1.05 * best
    assert not any("gap" in record.numbers for record in history.rounds)
    told = " ".join(event.get("reason", "") for event in history.events)
    assert f"no certificate: the model computes in {dtype}" in told


def test_the_chosen_sizes_are_recorded_and_said_once() -> None:
    problem = convex_problem(24)
    history = train(ScaffPD(CVaR(0.5)), problem.clients(), rounds=3, x=problem.start())
    _, note = (e["reason"] for e in history.events if e["event"] == "note")
    first = history.rounds[0].numbers
    for name in ("smoothness", "primal_step", "local_step", "dual_step"):
        assert f"{first[name]:.4g}" in note


def test_measuring_costs_what_the_documentation_says() -> None:
    problem = convex_problem(24)
    clients = problem.clients()
    measured_smoothness(clients, problem.start(), Stream(0))
    assert clients.traffic.exchanges <= 18


# -- automatic steps -------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("seed", [8, 9, 10, 14, 16, 22, 34, 35, 37, 43])
def test_automatic_steps_solve_random_problems(seed: int) -> None:
    """A few of the fifty of ``benchmarks/auto_steps.py``: accuracy, rounds, certificate."""
    problem = convex_problem(seed)
    _, objective = drawn_objective(seed, problem.n)
    best, _ = interior_point(problem, objective)
    outcome = solve(problem, objective, best, rounds=80)
    assert outcome.rounds <= 80
    assert outcome.certified <= 80
    assert outcome.slack >= 1


@pytest.mark.long
@pytest.mark.parametrize("rho", [0.01, 0.05, 0.1])
def test_automatic_steps_on_the_papers_regression(rho: float) -> None:
    train_split = synthetic_regression().train
    pairs = [train_split.client(i) for i in range(5)]
    problem = LeastSquares(tuple(a for a, _ in pairs), tuple(y for _, y in pairs), 0.1, "stacked")
    _, best = interior_point(problem, ChiSquare(rho, scale=1.0))
    assert squared_distances(problem, ChiSquare(rho, scale=1.0), best, 150)[-1] <= 1e-10


def test_the_worst_case_converges_at_least_like_one_over_the_rounds_squared() -> None:
    slope, _ = observed_rate(convex_problem(27), 80)
    assert slope <= -2


@pytest.mark.parametrize("phi", [0.2, 0.4])
def test_signed_weights_reach_a_saddle_point(phi: float) -> None:
    problem = convex_problem(6)
    tail = CVaR(0.4)
    rounds, _ = rounds_to_saddle(problem, RelativeFairness(phi, tail, tail), rounds=120)
    assert rounds <= 120


def test_signed_weights_shorten_the_steps_by_their_norm() -> None:
    problem, sizes = convex_problem(6), {}
    for phi in (0.0, 0.4):
        clients, algorithm = (
            problem.clients(),
            ScaffPD(RelativeFairness(phi, CVaR(0.4), CVaR(0.4))),
        )
        state, _ = algorithm.round(algorithm.init(clients, problem.start()), clients, Stream(0))
        sizes[phi] = state.sizes
    assert sizes[0.4].primal == pytest.approx(sizes[0.0].primal * 0.6 / 1.4)


def test_engines_agree_on_automatic_steps() -> None:
    problem = PROBLEMS["logistic"]
    states = []
    for engine in ("loop", "stacked"):
        clients, algorithm = problem.clients(engine), ScaffPD(WorstCase())
        state = algorithm.init(clients, torch.zeros(problem.d, dtype=torch.float64))
        for r in range(15):
            state, _ = algorithm.round(state, clients, Stream(0).at("round", r))
        states.append(state)
    np.testing.assert_allclose(states[0].x, states[1].x, rtol=1e-9, atol=1e-12)


def test_a_state_of_automatic_steps_survives_a_checkpoint(tmp_path: Path) -> None:
    problem = PROBLEMS["logistic"]
    clients, algorithm = problem.clients(), ScaffPD(CVaR(0.5)).wrapped()
    template = algorithm.init(clients, torch.zeros(problem.d, dtype=torch.float64))
    state = template
    for r in range(5):
        state, _ = algorithm.round(state, clients, Stream(0).at("round", r))
    checkpoint.save(tmp_path, 5, state, {})
    _, loaded, _ = checkpoint.load(tmp_path, template)
    after = [algorithm.round(s, clients, Stream(0).at("round", 5))[0] for s in (state, loaded)]
    assert torch.equal(after[0].x, after[1].x)
    assert inner_state(after[0]).sizes == inner_state(after[1]).sizes


# -- minibatches and networks ----------------------------------------------------------------------


def two_moons(clients: int = 4) -> Federation:
    """Two interleaved half circles, shifted differently for every client."""
    data = {}
    for i in range(clients):
        random = np.random.default_rng(i)
        angle, label = random.uniform(0, np.pi, 40), np.arange(40) % 2
        x = np.column_stack([np.cos(angle), np.sin(angle)]) * np.where(label, 1, -1)[:, None]
        shift = np.where(label[:, None], [0.5, -0.25], [-0.5, 0.25]) + 0.3 * random.normal(size=2)
        data[f"c{i}"] = ((x + shift + 0.1 * random.normal(size=x.shape)), label)
    return Federation.from_clients(data)


@pytest.mark.parametrize(
    ("batch_size", "dtype"), [(None, torch.float32), (8, torch.float32), (None, torch.float64)]
)
def test_networks_and_minibatches_train_without_a_number_from_the_user(
    batch_size: int | None, dtype: torch.dtype
) -> None:
    module = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    clients = simulate(two_moons(), module, "cross_entropy", dtype=dtype)
    objective, start = CVaR(0.5), clients.initial(Stream(0))
    algorithm = ScaffPD(
        objective, LocalSGD(lr=1.0, steps=8, batch_size=batch_size), gradient_batch_size=batch_size
    ).wrapped()
    state = algorithm.init(clients, start)
    for r in range(25):
        state, _ = algorithm.round(state, clients, Stream(0).at("round", r))
    before, after = (objective.value(clients.losses(x, Stream(0))) for x in (start, state.x))
    assert after < 0.7 * before


@pytest.mark.parametrize(
    "wrong", [{"smoothness": 0.0}, {"coupling": 1.0}, {"horizon": 0.0}, {"probe": 0}]
)
def test_auto_steps_refuse_nonsense(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        AutoSteps(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [1, 7, 60])
def test_products_of_many_clients_give_the_step_of_the_whole_matrix(rank: int) -> None:
    rng = np.random.default_rng(rank)
    rows, losses = rng.normal(size=(1200, rank)) / rank, rng.uniform(1.0, 2.0, size=1200)
    whole = rows @ rows.T
    short = Products.of(whole)
    assert isinstance(short, Products) and short.rows.shape == (1200, rank)
    np.testing.assert_allclose(short.rows @ short.rows.T, whole, atol=1e-12)
    assert largest_coupling(short) >= np.linalg.eigvalsh(whole)[-1] * (1 - 1e-12)
    start, objective = np.full(1200, 1 / 1200), ChiSquare(0.5, scale=1.0)
    found = [step_exactly(objective, losses, q, start, 0.7, 1e-9, 5000) for q in (whole, short)]
    np.testing.assert_allclose(found[0][0], found[1][0], atol=1e-7)
    assert isinstance(Products.of(whole + np.eye(1200)), np.ndarray)  # of full rank
    assert isinstance(Products.of(whole[:900, :900]), np.ndarray)  # of few clients as before
