"""FairNewton: oracles, reductions, hard cases, absent clients, resuming."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.optima import interior_point
from tests.problems import (
    LeastSquares,
    Logistic,
    Problem,
    classification,
    convex_problem,
    drawn_objective,
    least_squares,
    logistic,
    rounds,
)
from torch import Tensor, nn

from equifed.algorithms.fair_newton import FairNewton
from equifed.contract import Weights
from equifed.contract.absence import Memory, Recall
from equifed.contract.algorithm import Info
from equifed.contract.streams import Stream
from equifed.engines.in_process import InProcessClients
from equifed.engines.simulate import simulate
from equifed.objectives import Average, ChiSquare, CVaR, QFair, RelativeFairness, WorstCase
from equifed.runs.config import RunConfig
from equifed.runs.run import resume, run
from equifed.steps.dual_step import step_exactly
from equifed.steps.metric import Metric, factor_blocks, form_metric, least_weighted_loss
from equifed.training.final_model import StopWhen
from equifed.training.history import RoundRecord
from equifed.training.loop import train
from equifed.training.trackers import Callback

pytestmark = pytest.mark.long

DOUBLE = torch.float64


def certified(
    problem: Problem, objective: object, count: int = 40, **options: object
) -> list[RoundRecord]:
    algorithm, clients = FairNewton(objective, **options), problem.clients("stacked")
    return train(algorithm, clients, rounds=count, x=problem.start()).rounds


# -- the metric ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "blocks", "projected", 4])
def test_a_metric_solves_with_its_matrix(kind: str | int) -> None:
    """Full rank and all axes, so that also the forms that leave something out have all."""
    clients = simulate(classification(sizes=(9, 12, 8)), "logistic", l2=0.1, dtype=DOUBLE)
    x, weights = torch.randn(12, dtype=DOUBLE), np.array([0.2, 0.5, 0.3])
    metric, _ = form_metric(clients, x, weights, kind, Stream(0))
    form = "full" if kind == "full" else "blocks"
    found = clients.curvature_sum(x, weights, form)
    rows = torch.randn(3, 12, dtype=DOUBLE)
    solved = metric.solve(rows)
    for places, block in zip(found.places, found.blocks, strict=True):
        part = solved[:, places]
        back = part @ block
        torch.testing.assert_close(back, rows[:, places], rtol=1e-6, atol=1e-8)


def test_secants_are_those_of_bfgs() -> None:
    """The compact form against the textbook's rank-two updates, one after the other."""
    draw = np.random.default_rng(0)
    a = draw.normal(size=(8, 5))
    matrix, first = torch.as_tensor(a.T @ a), torch.diag(torch.arange(1.0, 6.0, dtype=DOUBLE))
    metric = Metric(torch.arange(5)[None], torch.linalg.cholesky(first)[None])
    inverse, eye = first.inverse(), torch.eye(5, dtype=DOUBLE)
    for _ in range(3):
        s = torch.as_tensor(draw.normal(size=5))
        y = matrix @ s
        metric, rho = metric.with_secant(s, y), 1 / (s @ y)
        left = eye - rho * torch.outer(s, y)
        inverse = left @ inverse @ left.T + rho * torch.outer(s, s)
    torch.testing.assert_close(metric.solve(eye), inverse)
    assert metric.with_secant(s, -y) is metric  # no step of a convex function


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("secants", [0, 3])
def test_products_in_low_rank_are_those_of_the_inverse(shared: bool, secants: int) -> None:
    """Of P itself, as a dense matrix; eigenvalues of 1e8 leave no more than rounding."""
    n, k, q, r = 300, 3, 7, 2  # more rows than one panel has
    d, b = k * q + 1, 1 if shared else k  # one coordinate is in no block
    places = torch.randperm(d - 1).view(k, q)
    basis = torch.linalg.qr(torch.randn(b, q, r, dtype=DOUBLE))[0]
    values, rest = torch.tensor([[1e8, 3.0]], dtype=DOUBLE).expand(b, r), torch.rand(b).double() + 1
    metric = Metric(places, basis, values, rest)
    dense = torch.zeros(d, d, dtype=DOUBLE)
    for i, block in enumerate(places):
        u, v, s = (part[0 if shared else i] for part in (basis, values, rest))
        dense[block[:, None], block] = (
            u @ torch.diag(1 / v - 1 / s) @ u.T + torch.eye(q, dtype=DOUBLE) / s
        )
    bent, inside = torch.randn(d, d, dtype=DOUBLE), torch.arange(d) < d - 1
    for _ in range(secants):
        step = torch.randn(d, dtype=DOUBLE) * inside
        y, i = bent @ bent.T @ step, torch.eye(d, dtype=DOUBLE)
        metric, rho = metric.with_secant(step, y), 1 / (step @ y)
        turn = i - rho * torch.outer(step, y)
        dense = turn @ dense @ turn.T + rho * torch.outer(step, step)
    rows = torch.randn(n, d, dtype=DOUBLE)
    expected = rows @ dense @ rows.T
    torch.testing.assert_close(metric.multiply(rows), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(rows @ metric.solve(rows).T, expected, rtol=1e-6, atol=1e-6)
    rough = metric.multiply(rows.float())  # computed in float64 all the same
    torch.testing.assert_close(rough, metric.multiply(rows.float().double()))


@pytest.mark.parametrize(
    "objective",
    [WorstCase(), CVaR(0.4), ChiSquare(0.2, scale=1.0), QFair(1.0), RelativeFairness(0.3)],
    ids=repr,
)
def test_no_feasible_weights_beat_the_exact_dual_step(objective: object) -> None:
    draw = np.random.default_rng(1)
    losses, root = draw.uniform(1, 2, 6), draw.normal(size=(6, 4))
    products, tau = root @ root.T, 0.7
    start = objective.start(6)

    def value(w: np.ndarray) -> float:
        return float(w @ losses - objective.penalty(w) - tau / 2 * w @ products @ w)

    best, gain = step_exactly(objective, losses, products, start, tau, accuracy=1e-12, most=20000)
    for _ in range(200):
        other = objective.prox(best + draw.normal(size=6) * 10 ** draw.uniform(-3, 1), 0.1)
        assert value(other) <= value(best) + 1e-8
    assert gain == pytest.approx(objective.value(losses) - value(best), abs=1e-7)


def test_the_exact_dual_value_is_the_minimum() -> None:
    """Of a weighted quadratic loss, also without a penalty; unknown where rank is missing."""
    weights = np.array([0.1, 0.2, 0.3, 0.4])
    for problem in (least_squares(1), replace(least_squares(1), l2=0.0)):
        clients, x = problem.clients("stacked"), torch.randn(problem.d, dtype=DOUBLE)
        metric, summed = form_metric(clients, x, weights, "full", Stream(0))
        losses, gradients = clients.value_and_gradient(x, Stream(0))
        matrix = sum(w * problem.hessian_of(i, x.numpy()) for i, w in enumerate(weights))
        gradient = gradients.weighted_sum(weights)
        solution = x.numpy() - np.linalg.solve(matrix, gradient.numpy())
        above = float(weights @ losses - weights @ problem.losses(solution))
        found = least_weighted_loss(summed, metric, gradient)
        assert above <= found <= above * (1 + 1e-9) + 1e-12
    flat = LeastSquares(tuple(a[:1] for a in problem.inputs[:2]), (np.ones(1),) * 2, 0.0)
    clients = flat.clients("stacked")
    metric, summed = form_metric(clients, x, np.array([0.5, 0.5]), "full", Stream(0))
    assert least_weighted_loss(summed, metric, torch.ones(3, dtype=DOUBLE)) == np.inf


# -- reductions ------------------------------------------------------------------------------------


def test_the_average_of_quadratics_takes_one_round() -> None:
    problem = convex_problem(24)
    best, _ = interior_point(problem, Average())
    assert certified(problem, Average(), 2)[1].objective == pytest.approx(best, rel=1e-9)


def test_the_average_of_logistic_losses_is_newtons_method() -> None:
    problem = logistic(3, n=5)
    state, _ = rounds(FairNewton(Average()), problem.clients("stacked"), np.zeros(problem.d), 2)
    x, uniform = np.zeros(problem.d), np.full(problem.n, 1 / problem.n)
    for _ in range(2):
        matrix = sum(problem.hessian_of(i, x) for i in range(problem.n)) / problem.n
        x = x - np.linalg.solve(matrix, uniform @ problem.gradients(x))
    np.testing.assert_allclose(state.x, x, rtol=1e-9)


def test_the_decrement_is_newtons_and_what_the_weights_could_gain() -> None:
    """Oracle: sqrt(g' H^-1 g) by dense matrices; with a maximum also twice the duality gap."""
    problem = logistic(0)
    x = problem.start()
    gradients = np.array([problem.gradient_of(i, x.numpy()) for i in range(problem.n)])
    hessian = np.mean([problem.hessian_of(i, x.numpy()) for i in range(problem.n)], axis=0)
    inverse = np.linalg.inv(hessian)
    for objective in (Average(), ChiSquare(0.1, scale=1.0)):
        record = train(FairNewton(objective), problem.clients(), rounds=1, x=x)
        weights = record.weights[1]
        pull = weights @ gradients
        losses = problem.losses(x.numpy())
        slack = objective.value(losses) - weights @ losses + objective.penalty(weights)
        wanted = np.sqrt(pull @ inverse @ pull + 2 * slack)
        assert record.rounds[0].numbers["decrement"] == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("orders", [0, 6])
def test_factors_do_not_depend_on_the_columns_units(orders: int) -> None:
    draw = torch.Generator().manual_seed(0)
    root = torch.randn(2, 5, 9, generator=draw, dtype=DOUBLE)
    units = torch.logspace(-orders, orders, 5, dtype=DOUBLE)
    plain, scaled = (
        factor_blocks(u[:, None] * (root @ root.mT) * u, 1e-13) for u in (units**0, units)
    )
    torch.testing.assert_close(scaled / units[:, None], plain, rtol=1e-9, atol=0)
    torch.testing.assert_close(plain @ plain.mT, root @ root.mT)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FairNewton(CVaR(0.5), metric="best"), "'projected' or 'full', got 'best'"),
        (lambda: FairNewton(QFair(1.0)), r"weights with a fixed sum.*use ScaffPD"),
        (lambda: FairNewton(CVaR(0.5), patience=0), "patience must be at least 1"),
    ],
)
def test_nonsense_is_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_what_it_cannot_do_is_refused_by_name() -> None:
    """Networks, hidden inner products, signed weights over losses that need not be convex."""
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    network = simulate(classification(), module, dtype=DOUBLE)
    with pytest.raises(ValueError, match=r"the model is not linear\. Use ScaffPD"):
        train(FairNewton(CVaR(0.5)), network, rounds=1)
    problem = convex_problem(24)
    clients = problem.clients("stacked")
    clients.inner_products = lambda *_: "they are hidden"  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"they are hidden\. Use ScaffPD"):
        train(FairNewton(CVaR(0.5)), clients, rounds=1)
    with pytest.raises(ValueError, match=r"weights have no fixed sum. Use ScaffPD"):
        train(
            FairNewton(ChiSquare(0.1, QFair(1.0), scale=1.0)), problem.clients("stacked"), rounds=1
        )
    signed = FairNewton(RelativeFairness(0.9))
    with pytest.raises(ValueError, match=r"may be negative.*Use ScaffPD"):
        train(signed, problem.clients("stacked"), rounds=1)


# -- solutions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [2, 5, 8, 30])
def test_the_metric_needs_few_rounds_and_proves_no_more_than_is_true(seed: int) -> None:
    problem = convex_problem(seed)
    _, objective = drawn_objective(seed, problem.n)
    best, _ = interior_point(problem, objective)
    infos = certified(problem, objective, 20)
    gaps = np.array([i.numbers["gap"] for i in infos])
    values = np.array([i.objective for i in infos])
    assert (gaps >= values - best - 1e-8 * abs(best)).all()
    assert gaps[-1] <= 1e-8 * abs(best)
    assert (np.diff(values - gaps) >= -1e-12 * abs(best)).all()  # bounds hold for good


def wide(clients: int = 4) -> tuple[InProcessClients, Tensor]:
    data = classification(sizes=(30,) * clients, shape=(12,), classes=4)
    found = simulate(data, "logistic", l2=1e-2, dtype=DOUBLE)
    return found, torch.zeros(found.model.size, dtype=DOUBLE)


def test_a_projected_metric_is_the_blocks_on_its_axes_and_their_mean_beside() -> None:
    clients, x = wide()
    weights = np.full(4, 0.25)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("equifed.steps.metric.AXES", 5)
        metric, found = form_metric(clients, x, weights, "projected", Stream(0))
    blocks = clients.curvature_sum(x, weights).blocks
    held = metric.basis @ metric.basis.mT
    axes = metric.axes
    assert axes is not None and axes.shape == (13, 5) and found.blocks.shape == (4, 5, 5)
    torch.testing.assert_close(axes.T @ held @ axes, axes.T @ blocks @ axes, rtol=1e-8, atol=1e-10)
    assert float(torch.linalg.eigvalsh(held).min()) >= 0.01  # never flatter than the penalty
    other = torch.linalg.svd(axes, full_matrices=True)[0][:, 5:]
    mean = (other.T @ blocks.mean(dim=0) @ other) - 0.01 * torch.eye(8, dtype=DOUBLE)
    for block in other.T @ held @ other - 0.01 * torch.eye(8, dtype=DOUBLE):
        torch.testing.assert_close(block / block.trace(), mean / mean.trace())


def test_a_projected_metric_sums_the_mean_once_and_proves_the_same_optimum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("equifed.steps.metric.AXES", 4)
    monkeypatch.setattr("equifed.steps.metric.WHOLE", {"auto": 10, "full": 10})
    monkeypatch.setattr("equifed.steps.metric.SENT", 1.0)
    found = []
    for metric in ("auto", "full"):
        clients, _ = wide()
        asked: list[str] = []
        ask = clients.curvature_sum

        def count(x: Tensor, weights: Weights, form: str, *rest: object, ask=ask, asked=asked):
            asked.append(form)
            return ask(x, weights, form, *rest)

        monkeypatch.setattr(clients, "curvature_sum", count)
        algorithm = FairNewton(ChiSquare(0.1), metric=metric)
        history = train(algorithm, clients, rounds=80, stop=[StopWhen(at_relative_gap=1e-6)])
        assert history.rounds[-1].numbers["gap"] <= 1e-6 * history.rounds[-1].objective
        found.append(history.rounds[-1].objective)
        assert asked.count("mean") == (metric == "auto") and len(history.rounds) < 80
        said = " ".join(str(e) for e in history.events)
        assert ("projected second-order" in said) == (metric == "auto")
    assert found[0] == pytest.approx(found[1], rel=3e-6)


@pytest.mark.parametrize("metric", ["low-rank", "full"])
@pytest.mark.parametrize("objective", [Average(), CVaR(0.5), ChiSquare(0.1, scale=1.0)], ids=repr)
def test_softmax_is_certified_in_every_metric(objective: object, metric: str) -> None:
    clients = simulate(classification(sizes=(20, 30, 25, 22)), "logistic", l2=1e-2, dtype=DOUBLE)
    algorithm = FairNewton(objective, metric=metric)
    history = train(algorithm, clients, rounds=60, stop=[StopWhen(at_relative_gap=1e-3)])
    last = history.rounds[-1]
    assert last.numbers["gap"] <= 1e-3 * last.objective
    assert any("% of its minimum" in e["reason"] for e in history.events)


HARD = {
    "more clients than parameters": least_squares(2, n=40, d=2),
    "few samples": least_squares(5, n=3, d=12, samples=2, l2=1e-6),
    "hardly a penalty": logistic(7, n=6, d=5, l2=1e-6),
    "mostly penalty": logistic(8, n=6, d=5, l2=1.0),
    "two clients": least_squares(9, n=2, d=6),
    "one class each": Logistic(
        tuple(np.random.default_rng(i).normal(size=(8, 3)) for i in range(4)),
        tuple(np.full(8, i % 2) for i in range(4)),
        1e-3,
    ),
    "the same client twice": LeastSquares(
        least_squares(3).inputs[:1] * 4, least_squares(3).targets[:1] * 4, 0.1
    ),
}


@pytest.mark.parametrize(
    "objective", [WorstCase(), CVaR(0.5), ChiSquare(0.05, scale=1.0)], ids=repr
)
@pytest.mark.parametrize("name", HARD)
def test_hard_cases_are_solved(name: str, objective: object) -> None:
    problem = HARD[name]
    best, _ = interior_point(problem, objective)
    infos = certified(problem, objective, 60)
    values = np.array([i.objective for i in infos])
    gaps = np.array([i.numbers["gap"] for i in infos])
    assert values.min() <= best + 1e-6 * abs(best) + 1e-9
    assert (gaps >= values - best - 1e-7 * abs(best) - 1e-9).all()  # 1e-9: the solver's own
    assert gaps[-1] <= 1e-3 * abs(best) + 1e-9


def test_squared_losses_without_a_penalty_are_certified() -> None:
    problem = replace(least_squares(1, samples=9), l2=0.0)
    best, _ = interior_point(problem, CVaR(0.5))
    infos = certified(problem, CVaR(0.5), 20)
    gaps = np.array([i.numbers["gap"] for i in infos])
    assert (gaps >= np.array([i.objective for i in infos]) - best - 1e-8).all()
    assert gaps[-1] <= 1e-8


def test_half_of_the_clients_missing_ends_at_the_solution() -> None:
    """They count with what they sent last; with all back it is second order again."""
    problem = convex_problem(24)
    objective, draw = CVaR(0.5), np.random.default_rng(0)
    best, _ = interior_point(problem, objective)
    clients, algorithm = problem.clients("stacked"), FairNewton(objective)
    state, memory = algorithm.init(clients, problem.start()), Memory()
    for r in range(400):
        here = np.flatnonzero(draw.random(problem.n) < 0.5)
        view = Recall(clients.subset(here if len(here) else [0]), memory)
        state, info = algorithm.round(state, view, Stream(0).at("round", r))
        memory = view.memory()
        assert info.proof is None or len(here) == problem.n
    assert objective.value(problem.losses(state.x.numpy())) <= best * (1 + 1e-4)
    for r in range(400, 404):
        state, info = algorithm.round(state, clients, Stream(0).at("round", r))
    assert info.proof is not None
    assert objective.value(problem.losses(state.x.numpy())) <= best * (1 + 1e-7)


def test_a_round_with_a_client_missing_costs_one_round() -> None:
    """The metric of before is kept: one whole step later quadratics are solved again."""
    problem = convex_problem(24)
    clients, algorithm = problem.clients("stacked"), FairNewton(Average())
    best, _ = interior_point(problem, Average())
    state, memory = algorithm.init(clients, problem.start()), Memory()
    for r, here in enumerate([problem.n, problem.n - 1, problem.n]):
        view = Recall(clients.subset(np.arange(here)), memory)
        state, info = algorithm.round(state, view, Stream(0).at("round", r))
        memory = view.memory()
    assert Average().value(problem.losses(state.x.numpy())) == pytest.approx(best, rel=1e-9)
    assert info.numbers["curvature_sums"] == 1


def test_who_is_missing_from_the_first_round_on_is_left_out_after_the_patience() -> None:
    problem = convex_problem(24)
    clients, algorithm = problem.clients("stacked"), FairNewton(CVaR(0.5), patience=5)
    state, memory = algorithm.init(clients, problem.start()), Memory()
    some = np.arange(1, problem.n)
    for r in range(120):
        view = Recall(clients.subset(some), memory, 5)
        state, _ = algorithm.round(state, view, Stream(0).at("round", r))
        memory = view.memory()
    others = replace(problem, inputs=problem.inputs[1:], targets=problem.targets[1:])
    best, _ = interior_point(others, CVaR(0.5))
    assert CVaR(0.5).value(others.losses(state.x.numpy())) <= best * (1 + 1e-4)
    assert state.weights[0] == 0


@pytest.mark.parametrize("name", ["fair-newton", "scaff-pd"])
def test_a_run_that_was_killed_resumes_bit_by_bit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {
        "rounds": 6, "data": {"name": "heart-disease"}, "model": {"name": "logistic", "l2": 1e-3},
        "algorithm": {"name": name, "objective": {"name": "cvar", "tail": 0.5}},
    }  # fmt: skip
    whole = run(RunConfig.from_dict(table), tmp_path / "whole")

    class Breaks(Callback):
        def round(self, record: RoundRecord, info: Info) -> None:
            if record.round == 4:
                raise KeyboardInterrupt

    monkeypatch.setattr("equifed.training.loop.CHECKPOINT_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        run(RunConfig.from_dict(table), tmp_path / "half", callbacks=[Breaks()])
    again = resume(tmp_path / "half")
    for key, value in whole.parameters.items():
        assert torch.equal(value, again.parameters[key])
    assert [r.numbers for r in whole.rounds] == [r.numbers for r in again.rounds]


def test_relative_gaps_are_fractions() -> None:
    with pytest.raises(ValueError, match="at_relative_gap must lie in"):
        StopWhen(at_relative_gap=1.5)
