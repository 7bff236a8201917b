"""The safeguard: back to the best point, halved steps, overflow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.problems import PROBLEMS, convex_problem

from equifed.algorithms.around import Certified, inner_state, with_inner_state
from equifed.algorithms.safeguarded import Safeguarded, State
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.algorithms.scaff_pd import State as Inner
from equifed.contract.algorithm import Info, Proof
from equifed.contract.clients import MissingClients
from equifed.contract.curvature import Curvature
from equifed.contract.streams import Stream
from equifed.objectives import Average, CVaR, RelativeFairness
from equifed.steps.automatic import AutoSizes, AutoSteps
from equifed.steps.schedules import ConstantSteps
from equifed.training.loop import train

pytestmark = pytest.mark.long

EXACT = SimpleNamespace(adds_noise=lambda: False)
"""Clients of whom nothing else is asked."""


@pytest.mark.long
@pytest.mark.parametrize("penalised", [True, False])
def test_a_smoothness_far_too_small_is_survived(penalised: bool) -> None:
    """Steps 40 times too long; with a certificate and, for want of convexity, without."""
    problem = convex_problem(34)
    if not penalised:
        problem = replace(problem, l2=0.0, inputs=tuple(a[:1] for a in problem.inputs),
                          targets=tuple(y[:1] for y in problem.targets))  # fmt: skip
    clients = problem.clients()
    true = max(np.linalg.norm(a, 2) ** 2 * 2 / len(a) for a in problem.inputs) + problem.l2
    algorithm = ScaffPD(Average(), steps=AutoSteps(smoothness=true / 40))
    history = train(algorithm, clients, rounds=150, x=problem.start())
    careful = train(ScaffPD(Average()), clients, rounds=150, x=problem.start())
    last, best = history.rounds[-1], careful.rounds[-1]
    assert last.numbers["halvings"] >= 3
    assert last.objective is not None and best.objective is not None
    assert last.objective <= best.objective + 1e-3


@dataclass(frozen=True)
class Told:
    """An algorithm whose k-th round starts from x = k and tells what it was told to."""

    rounds: list[tuple[float, float | None]]  # objective and gap
    noisy: bool = False
    objective = Average()

    def round(self, state: Inner, clients: object, stream: Stream) -> tuple[Inner, Info]:
        k = stream.seed
        (value, gap), judged = self.rounds[k], self.rounds[0][1] is not None
        half, proof = np.ones(2) / 2, None
        if not self.noisy and (gap is not None or not judged):
            gradient = torch.tensor([np.sqrt(2 * (gap or 0.0))])  # |g|^2 / 2 is the gap
            proof = Proof(state.x, np.ones(2), half, gradient, self.objective)
        return replace(state, x=torch.tensor([k + 1.0])), Info(half, np.ones(2), value, proof=proof)


def after(
    rounds: list[tuple[float, float | None]], patience: int = 5, noisy: bool = False
) -> tuple[State, AutoSizes]:
    """Return the state after rounds with these objectives and gaps, and its step sizes."""
    algorithm = Safeguarded(Told(rounds, noisy), patience)
    sizes = AutoSizes(4.0, 1.0, 1.0, 0.5, smoothness=1.0)
    known = Curvature(np.ones(2), np.ones(2)) if rounds[0][1] is not None else "nothing is known"
    state = State(Inner(torch.zeros(1), np.ones(2) / 2, sizes=sizes), curvature=known)
    for k in range(len(rounds)):
        state, _ = algorithm.round(state, EXACT, Stream(k))
    return state, inner_state(state).sizes


def went_back(state: State, rounds: int) -> bool:
    """Tell whether the last round sent the model back."""
    return state.x.item() != rounds


def test_a_gap_a_hundred_times_the_best_sends_back() -> None:
    state, sizes = after([(1.0, 1.0), (0.5, 0.1), (0.6, 9.9), (0.9, 10.1)])
    assert state.x.item() == 1.0  # where the best round started
    assert (sizes.primal, sizes.local, sizes.dual, sizes.halvings) == (2.0, 0.25, 0.5, 1)


def test_an_objective_that_lost_half_of_the_gain_sends_back() -> None:
    good = [(8.0, None), (1.0, None), (4.4, None)]
    assert not went_back(after(good)[0], 3)
    assert went_back(after([*good, (4.6, None)])[0], 4)


def test_a_noisy_objective_is_judged_by_its_running_mean() -> None:
    """One minibatch that is ten times worse sends a deterministic run back, and no noisy one."""
    values = [2.0, 1.0, 1.0, 10.0]
    assert went_back(after([(v, None) for v in values])[0], 4)
    noisy, _ = after([(v, None) for v in values], noisy=True)
    assert not went_back(noisy, 4)
    mean = values[0]
    for value in values[1:]:
        mean = 0.9 * mean + 0.1 * value
    np.testing.assert_allclose(noisy.mean, mean)


def test_no_progress_halves_without_going_back() -> None:
    state, sizes = after([(1.0, 1.0)] + [(1.0, 1.0)] * 5)
    assert not went_back(state, 6) and sizes.halvings == 1 and state.stale == 0


def test_after_going_back_a_while_nothing_is_judged() -> None:
    worse = [(1.0, 0.1), (9.0, 11.0)]
    assert after([*worse, *[(9.0, 11.0)] * 10], patience=50)[1].halvings == 1
    assert after([*worse, *[(9.0, 11.0)] * 11], patience=50)[1].halvings == 2


def test_a_round_without_a_certificate_is_not_judged_by_one() -> None:
    state, sizes = after([(1.0, 0.1), (99.0, None), (99.0, None)], patience=1)
    assert not went_back(state, 3) and sizes.halvings == 0


def test_step_sizes_that_somebody_chose_stay() -> None:
    problem = PROBLEMS["logistic"]
    steps = ConstantSteps(primal=30.0, dual=1.0, local=4.0)
    plain, guarded = (
        train(a, problem.clients(), rounds=30, x=torch.zeros(problem.d, dtype=torch.float64))
        for a in (Certified(ScaffPD(CVaR(0.5), steps=steps)), ScaffPD(CVaR(0.5), steps=steps))
    )
    assert [r.numbers for r in plain.rounds] == [r.numbers for r in guarded.rounds]


@pytest.mark.parametrize(("phi", "measure"), [(0.0, "gap"), (0.4, "residual")])
def test_signed_weights_are_judged_by_the_residual(phi: float, measure: str) -> None:
    problem = convex_problem(6)
    objective = RelativeFairness(phi, CVaR(0.4), CVaR(0.4))
    clients, algorithm = problem.clients(), Safeguarded(ScaffPD(objective))
    state, _ = algorithm.round(algorithm.init(clients, problem.start()), clients, Stream(0))
    assert state.measure == measure and state.first == state.best.merit


def test_an_overflow_goes_back_to_the_best_model() -> None:
    """Quadratics at a rate of 1e160 overflow at once; the run goes on all the same."""
    problem = PROBLEMS["least squares"]
    clients = problem.clients()
    bold = Safeguarded(ScaffPD(Average(), steps=AutoSteps(smoothness=1e-60)))
    start = bold.init(clients, torch.zeros(problem.d, dtype=torch.float64))
    with pytest.raises(MissingClients):  # nothing to go back to yet
        bold.round(start, clients, Stream(0))
    careful, _ = Safeguarded(ScaffPD(Average())).round(start, clients, Stream(0))
    inner = inner_state(careful)
    wild = replace(inner, sizes=replace(inner.sizes, primal=1e60, local=1e60))
    back, info = bold.round(with_inner_state(careful, wild), clients, Stream(0))
    assert torch.equal(back.x, careful.best.x)
    assert inner_state(back).sizes.primal == 5e59 and "overflow" in info.notes[0]


def test_clients_that_are_away_are_no_overflow() -> None:
    """Nobody there is a matter for the policy about missing clients, not for smaller steps."""
    problem = PROBLEMS["least squares"]
    clients, algorithm = problem.clients(), ScaffPD(Average()).wrapped()
    state = algorithm.init(clients, torch.zeros(problem.d, dtype=torch.float64))
    state, _ = algorithm.round(state, clients, Stream(0))

    def away(*_: object) -> None:
        raise MissingClients(dict.fromkeys(range(problem.n), "no answer"), clients.names)

    clients.value_and_gradient = away  # type: ignore[assignment,method-assign]
    with pytest.raises(MissingClients, match="no answer"):
        algorithm.round(state, clients, Stream(0))


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="patience must be at least 1, got 0"):
        Safeguarded(ScaffPD(Average()), patience=0)
