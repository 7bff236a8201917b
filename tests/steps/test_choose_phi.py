"""The choice of phi against dense algebra, and what it does to real losses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize, minimize_scalar
from tests.optima import saddle_point
from tests.problems import PROBLEMS, Array, LeastSquares, Problem, least_squares, logistic

from equifed.algorithms.around import inner_state
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.algorithms.scaff_pd_ia import ScaffPDIA
from equifed.contract.curvature import Curvature
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.objectives import CVaR, RelativeFairness, WorstCase
from equifed.steps.phi import LARGEST_PHI, UNSOLVED, best_phi, choose_phi, inverse_product
from equifed.training import checkpoint
from equifed.training.final_model import StopWhen
from equifed.training.loop import train

pytestmark = pytest.mark.long

positive = st.floats(1e-3, 1e3)


@settings(deadline=None)
@given(high=positive, low=positive, bend=positive)
def test_phi_minimises_the_predicted_unfairness(high: float, low: float, bend: float) -> None:
    """(8) against a generic minimiser of (a + c phi^2 / 2) (b + c phi)^(-1/2)."""
    found = minimize_scalar(
        lambda phi: np.log(high + bend * phi**2 / 2) - 0.5 * np.log(low + bend * phi),
        bounds=(0, LARGEST_PHI), method="bounded", options={"xatol": 1e-10},
    )  # fmt: skip
    np.testing.assert_allclose(best_phi(high, low, bend), found.x, atol=1e-4)


def test_phi_stays_within_bounds_and_exists_at_zero_losses() -> None:
    assert best_phi(1e9, 1e-9, 1e-9) == LARGEST_PHI
    assert best_phi(0.0, 1.0, 1.0) == 0
    assert best_phi(1.0, 0.0, 0.0) == LARGEST_PHI


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), d=st.integers(1, 8))
def test_conjugate_gradients_equal_a_dense_solve(seed: int, d: int) -> None:
    random = np.random.default_rng(seed)
    factor = random.normal(size=(d + 3, d))
    matrix, g = factor.T @ factor, random.normal(size=d)
    dense = torch.as_tensor(matrix)
    found, used = inverse_product(lambda v: dense @ v, torch.as_tensor(g), 1e-10, 100)
    np.testing.assert_allclose(found, g @ np.linalg.solve(matrix, g), rtol=1e-6)
    assert used <= 3 * d + 3


def test_negative_curvature_ends_the_search() -> None:
    found, used = inverse_product(lambda v: -v, torch.ones(3), 1e-6, 100)
    assert (found, used) == (0.0, 1)


def equation_8(problem: Problem, x: Array, a: Array, b: Array) -> float:
    """The paper's formula as it is printed, with dense matrices."""
    losses = problem.losses(x)
    hessian = sum(w * problem.hessian_of(i, x) for i, w in enumerate(a))
    g = b @ problem.gradients(x)
    c, high, low = g @ np.linalg.solve(hessian, g), a @ losses, b @ losses
    return float((np.sqrt(low**2 + 2 * (1 - 0.25) * high * c) - low) / (c * (1 + 0.5)))


def best_served(losses: Array, share: float, tie: float) -> Array:
    """The weights of the smallest ``share`` of the losses; those that tie share alike."""
    left, out = 1.0, np.zeros(len(losses))
    while left > 1e-12:
        open_ = np.flatnonzero(out == 0)
        group = open_[losses[open_] <= losses[open_].min() + tie]
        out[group] = min(left / len(group), 1 / (share * len(losses)))
        left -= out[group].sum()
    return out


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_constant_is_that_of_the_hessians(name: str) -> None:
    problem = PROBLEMS[name]
    clients, objective = problem.clients(), RelativeFairness(0.0, CVaR(0.5), CVaR(0.5))
    draw = np.random.default_rng(0)
    x, a = draw.normal(size=problem.d), draw.dirichlet(np.ones(problem.n))
    choice = choose_phi(clients, torch.as_tensor(x), a, objective, Stream(0))
    losses = problem.losses(x)
    slack = objective.value(losses) - a @ losses
    _, b = objective.extremes(losses, within=10 * slack)
    hessian = sum(w * problem.hessian_of(i, x) for i, w in enumerate(a))
    g = b @ problem.gradients(x)
    np.testing.assert_allclose(choice.bend, g @ np.linalg.solve(hessian, g), rtol=1e-4)
    np.testing.assert_allclose((choice.high, choice.low), (a @ losses, b @ losses))
    np.testing.assert_allclose(choice.phi, best_phi(choice.high, choice.low, choice.bend))
    assert choice.unsolved > UNSOLVED and "longer warmup" in choice.notes()[-1]  # nobody trained


@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 10**6), kind=st.sampled_from([least_squares, logistic]))
@pytest.mark.parametrize("tail", [None, 0.5])
def test_phi_is_equation_8_at_the_saddle_point_of_phi_zero(
    seed: int, kind: Callable[..., Problem], tail: float | None
) -> None:
    """An interior-point solver and Newton's method find the saddle point; training found it, too.

    The maximiser of the losses at x, which the weights are not where clients tie, gives another.
    """
    problem = kind(seed, n=5, l2=0.3)
    x, a = saddle_point(problem, tail=tail)
    losses = problem.losses(x)
    b = best_served(losses, 0.5, tie=1e-7 * losses.max())
    wanted = equation_8(problem, x, a, b)
    objective = RelativeFairness(0.0, WorstCase() if tail is None else CVaR(tail), CVaR(0.5))
    assume(objective.value(losses) - a @ losses <= 1e-9)  # else the solver stopped short of it
    choice = choose_phi(problem.clients(), torch.as_tensor(x), a, objective, Stream(0))
    assert choice.phi == pytest.approx(min(wanted, LARGEST_PHI), rel=1e-3)
    assert choice.unsolved < 1e-6 and len(choice.notes()) == 1 + (choice.phi == LARGEST_PHI)


@pytest.mark.parametrize(
    ("name", "tail"), [("least squares", None), ("logistic", 0.5), ("more clients", None)]
)
def test_training_finds_the_dual_solution_that_phi_is_chosen_at(
    name: str, tail: float | None
) -> None:
    problem = PROBLEMS[name]
    x, a = saddle_point(problem, tail=tail)
    losses = problem.losses(x)
    wanted = equation_8(problem, x, a, best_served(losses, 0.4, tie=1e-6 * losses.max()))
    upper = WorstCase() if tail is None else CVaR(tail)
    algorithm = ScaffPDIA("auto", upper, CVaR(0.4), warmup=400)
    clients = problem.clients("stacked")
    state = algorithm.init(clients, problem.start())
    for r in range(401):
        state, info = algorithm.round(state, clients, Stream(0).at("round", r))
    assert state.phi == pytest.approx(min(wanted, LARGEST_PHI), rel=0.01)
    assert any(note.startswith(f"phi = {state.phi:.4g}") for note in info.notes)


@pytest.mark.parametrize("phi", [0.0, 0.05, 0.8])
@pytest.mark.parametrize("name", PROBLEMS)
def test_weights_beyond_the_proof_are_announced(name: str, phi: float) -> None:
    problem = PROBLEMS[name]
    spectra = [
        np.linalg.eigvalsh(problem.hessian_of(i, np.zeros(problem.d))) for i in range(problem.n)
    ]
    known = problem.clients("stacked").curvature()
    assert isinstance(known, Curvature)
    covered = 1 + known.strong_convexity.min() / (2 * known.smoothness.max())
    assert covered <= 1 + min(s[0] for s in spectra) / (2 * max(s[-1] for s in spectra)) + 1e-12
    size = (1 + phi) / (1 - phi)
    algorithm = ScaffPDIA(phi)
    clients = problem.clients("stacked")
    state = algorithm.init(clients, problem.start())
    notes = []
    for r in range(3):
        state, info = algorithm.round(state, clients, Stream(0).at("round", r))
        notes += [note for note in info.notes if "|Lambda|_1" in note]
    assert len(notes) == (phi > 0 and size >= covered)
    assert all(f"|Lambda|_1 = {size:.4g}" in note and f"{covered:.4g}" in note for note in notes)


def test_a_phi_that_serves_everybody_worse_is_announced() -> None:
    """A flat client with a high floor and a steep one with a low one, whose best models are near.

    The gap closes only where the steep one's loss has risen, and the flat one's with it.
    """
    flat, steep = (np.array([[s, 0], [0, s], [0, 0]]) for s in (0.5, 3.0))
    far = LeastSquares((flat, steep), (np.array([0.05, 0, 1.7]), np.array([0, 0, 0.5])), l2=1e-3)
    algorithm, clients = ScaffPDIA("auto", warmup=30).wrapped(), far.clients("stacked")
    state, notes = algorithm.init(clients, far.start()), {}
    for r in range(100):
        start = state.x
        state, info = algorithm.round(state, clients, Stream(0).at("round", r))
        notes |= dict.fromkeys(info.notes, start)
    (told,) = (x for note, x in notes.items() if "every client is worse off than" in note)
    first = inner_state(state).before
    assert (far.losses(told.numpy()) > first).all()
    least = RelativeFairness(0.0).value(first)  # the best that phi = 0 can do
    assert least == pytest.approx(far.losses(saddle_point(far)[0]).max(), rel=1e-3)


@pytest.mark.long
def test_the_chosen_phi_narrows_the_ratio_and_is_announced() -> None:
    problem = PROBLEMS["least squares"]
    clients, sides = problem.clients("stacked"), (CVaR(0.5), CVaR(0.5))
    algorithm = ScaffPDIA("auto", *sides, warmup=40)
    history = train(algorithm, clients, rounds=100)
    phis = [r.numbers["phi"] for r in history.rounds]
    assert phis[:40] == [0.0] * 40 and len(set(phis[40:])) == 1 and 0 < phis[40] < 1
    (note,) = (e for e in history.events if e["reason"].startswith(f"phi = {phis[40]:.4g}"))
    assert note["round"] == 41 and "predicted" in note["reason"]
    assert history.parameters is not None
    ratios = []
    for rounds in (40, 100):
        done = train(algorithm, clients, rounds=rounds)
        assert done.parameters is not None
        losses = clients.losses(
            torch.cat([p.flatten() for p in done.parameters.values()]), Stream(0)
        )
        a, b = RelativeFairness(0.0, *sides).extremes(losses)
        ratios.append((a @ losses) / (b @ losses))
    assert ratios[1] < ratios[0]


@pytest.mark.parametrize("shape", ["ball", "box"])
@pytest.mark.parametrize("name", ["least squares", "logistic"])
def test_the_model_stays_in_theta_and_is_best_there(name: str, shape: str) -> None:
    """One local step, phi = 0: the best model of the set by a generic solver."""
    problem = PROBLEMS[name]
    free = saddle_point(problem, tail=0.5)[0]
    radius = 0.5 * float(np.linalg.norm(free) if shape == "ball" else np.abs(free).max())
    work = LocalSGD(lr=1.0, steps=1, radius=radius)
    if shape == "box":
        work = LocalSGD(lr=1.0, steps=1, onto=lambda x: x.clamp(-radius, radius))

    def size(x: Any) -> float:
        return float(np.linalg.norm(x) if shape == "ball" else np.abs(x).max())

    algorithm, clients = ScaffPDIA(0.0, CVaR(0.5), local=work), problem.clients("stacked")
    state = algorithm.init(clients, problem.start())
    for r in range(600):
        state, _ = algorithm.round(state, clients, Stream(0).at("round", r))
        assert size(state.x.numpy()) <= radius * (1 + 1e-12)
    cvar = CVaR(0.5)
    found = minimize(
        lambda x: cvar.value(problem.losses(x)),
        state.x.numpy(),
        constraints={"type": "ineq", "fun": lambda x: radius - size(x)},
        method="COBYLA",
        options={"maxiter": 5000, "rhobeg": 0.05 * radius, "tol": 1e-9},
    )
    assert cvar.value(problem.losses(state.x.numpy())) <= found.fun * (1 + 1e-4)
    assert size(state.x.numpy()) == pytest.approx(radius)  # and it binds


def test_a_given_phi_is_scaff_pd_with_that_objective() -> None:
    """Reduction: the same numbers, round by round."""
    problem = PROBLEMS["logistic"]
    clients, start = problem.clients(), torch.zeros(problem.d, dtype=torch.float64)
    given, plain = ScaffPDIA(0.2), ScaffPD(RelativeFairness(0.2))
    one, other = given.init(clients, start), plain.init(clients, start)
    for r in range(5):
        one, _ = given.round(one, clients, Stream(0).at("round", r))
        other, _ = plain.round(other, clients, Stream(0).at("round", r))
    assert torch.equal(one.x, other.x)
    np.testing.assert_array_equal(one.weights, other.weights)


def test_a_state_with_a_chosen_phi_survives_a_checkpoint(tmp_path: Path) -> None:
    problem = PROBLEMS["least squares"]
    clients, algorithm = problem.clients(), ScaffPDIA(warmup=2)
    template = state = algorithm.init(clients, torch.zeros(problem.d, dtype=torch.float64))
    for r in range(4):
        state, _ = algorithm.round(state, clients, Stream(0).at("round", r))
    checkpoint.save(tmp_path, 4, state, {})
    _, loaded, _ = checkpoint.load(tmp_path, template)
    after = [algorithm.round(s, clients, Stream(0).at("round", 4))[0] for s in (state, loaded)]
    assert torch.equal(after[0].x, after[1].x) and after[0].phi == after[1].phi


@pytest.mark.parametrize("wrong", [{"phi": "often"}, {"phi": 1.0}, {"warmup": 0}])
def test_nonsense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ScaffPDIA(**wrong)


def test_a_gap_proved_in_the_warm_up_does_not_stop_the_run() -> None:
    """It is about phi = 0; with that phi given, the same tolerance ends the run at once."""
    problem, stop = PROBLEMS["least squares"], [StopWhen(at_gap=1e6)]
    given = train(ScaffPDIA(0.0), problem.clients("stacked"), rounds=9, stop=stop)
    assert given.rounds[-1].round == 1
    chosen = train(ScaffPDIA("auto", warmup=6), problem.clients("stacked"), rounds=9, stop=stop)
    assert not any("gap" in record.numbers for record in chosen.rounds[:6])
    assert chosen.rounds[-1].round > 6
