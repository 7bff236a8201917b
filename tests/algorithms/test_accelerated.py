"""Anderson acceleration: an oracle, jumps that are taken back, rounds that are left alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from tests.optima import interior_point
from tests.problems import Problem, convex_problem, drawn_objective

from equifed.algorithms.accelerated import Accelerated, State
from equifed.algorithms.safeguarded import Safeguarded
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.algorithms.scaff_pd import State as Inner
from equifed.contract.algorithm import AnyAlgorithm, Info, Proof
from equifed.contract.curvature import Curvature
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.objectives import CVaR, QFair, RelativeFairness, WorstCase
from equifed.steps.automatic import AutoSizes
from equifed.steps.schedules import ConstantSteps
from equifed.training.final_model import StopWhen
from equifed.training.loop import train

DOUBLE = torch.float64
SIZES = AutoSizes(4.0, 1.0, 1.0, 0.5, smoothness=1.0)


@dataclass
class Affine:
    """An algorithm whose round is x <- A x + b, with gaps that it is told."""

    matrix: torch.Tensor
    vector: torch.Tensor
    gaps: list[float]
    objective: WorstCase = field(default_factory=WorstCase)

    def round(self, state: Inner, clients: None, stream: Stream) -> tuple[Inner, Info]:
        x, gap = self.matrix @ state.x + self.vector, self.gaps[stream.seed]
        gradient = torch.tensor([np.sqrt(2 * gap)])  # |g|^2 / 2 is the gap
        proof = Proof(state.x, state.losses, state.weights, gradient, self.objective)
        return replace(state, x=x), Info(state.weights, state.losses, 1.0, proof=proof)


def play(algorithm: Accelerated, x: torch.Tensor, rounds: int) -> list[State]:
    """Return the states after so many rounds."""
    known = Curvature(np.ones(2), np.ones(2))
    states = [State(Inner(x, np.ones(2) / 2, np.ones(2), SIZES), curvature=known)]
    for k in range(rounds):
        states.append(algorithm.round(states[-1], None, Stream(k))[0])
    return states


def slow_map(d: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a map that takes a hundred rounds for two digits, and its fixed point."""
    basis = torch.linalg.qr(torch.randn(d, d, dtype=DOUBLE))[0]
    matrix = basis @ torch.diag(torch.linspace(0.5, 0.95, d, dtype=DOUBLE)) @ basis.T
    vector = torch.randn(d, dtype=DOUBLE)
    return matrix, vector, torch.linalg.solve(torch.eye(d, dtype=DOUBLE) - matrix, vector)


def test_an_affine_map_is_solved_in_as_many_rounds_as_dimensions() -> None:
    """It is GMRES then: two rounds to begin with, one for each dimension, and one to arrive."""
    d = 4
    matrix, vector, fixed = slow_map(d)
    *_, state = play(
        Accelerated(Affine(matrix, vector, [1.0] * 20)), torch.zeros(d).double(), d + 2
    )
    far = torch.linalg.vector_norm(fixed)
    assert torch.linalg.vector_norm(state.x - fixed) < 1e-4 * far
    plain = torch.zeros(d, dtype=DOUBLE)
    for _ in range(d + 2):
        plain = matrix @ plain + vector
    assert torch.linalg.vector_norm(plain - fixed) > 0.1 * far


def test_a_jump_that_proves_worse_is_taken_back_and_jumps_pause() -> None:
    matrix, vector, _ = slow_map(3)
    gaps = [1.0, 1.0, 1.0, 3.1, 1.0, 1.0, 1.0, 1.0, 3.1, 1.0]  # after the jumps of rounds 3 and 8
    states = play(Accelerated(Affine(matrix, vector, gaps)), torch.zeros(3).double(), 10)
    plain = matrix @ states[2].x + vector
    assert not torch.allclose(states[3].x, plain)
    assert torch.equal(states[4].x, plain)  # as if there had been no jump
    jumped = [k for k, s in enumerate(states) if s.plain is not None]
    assert jumped == [3, 7, 8], jumped  # the wait is over when there are three rounds to look at
    assert (states[4].wait, states[4].pause, states[9].wait, states[9].pause) == (1, 2, 1, 2)


def test_a_gap_that_grows_forgets_the_last_rounds() -> None:
    matrix, vector, _ = slow_map(3)
    gaps = [1.0, 1.0, 4.0, 16.0, 64.0]
    states = play(Accelerated(Affine(matrix, vector, gaps)), torch.zeros(3).double(), 5)
    plain = torch.zeros(3, dtype=DOUBLE)
    for _ in gaps:
        plain = matrix @ plain + vector
    assert torch.equal(states[-1].x, plain) and all(s.plain is None for s in states)


def models(algorithm: AnyAlgorithm, problem: Problem, rounds: int) -> list[torch.Tensor]:
    clients = problem.clients()
    state, out = algorithm.init(clients, problem.start()), []
    for r in range(rounds):
        state, _ = algorithm.round(state, clients, Stream(0).at("round", r))
        out.append(algorithm.model(state))
    return out


@pytest.mark.parametrize(
    "options",
    [
        {"steps": ConstantSteps(0.05, 0.1), "local": LocalSGD(lr=0.01, steps=3)},
        {"gradient_batch_size": 5},
        {"objective": QFair(1.0)},
        {"objective": RelativeFairness(0.2)},
    ],
    ids=["chosen steps", "minibatches", "a free sum", "signed weights"],
)
def test_other_rounds_are_left_alone(options: dict) -> None:
    problem = convex_problem(2)
    algorithm = ScaffPD(**{"objective": CVaR(0.5), **options})
    plain = Safeguarded(algorithm)
    pair = [models(a, problem, 8) for a in (Accelerated(plain), plain)]
    assert all(torch.equal(*both) for both in zip(*pair, strict=True))


def test_absent_clients_end_the_jumps() -> None:
    """A round without somebody proves nothing: the pause begins with three whole rounds again."""
    problem, algorithm = convex_problem(2), ScaffPD(CVaR(0.5))
    clients, wrapped = problem.clients(), Accelerated(algorithm).wrapped()
    state = wrapped.init(clients, problem.start())
    kept = []
    for r in range(8):
        here = clients.subset(np.arange(problem.n - 1)) if r == 4 else clients
        state, _ = wrapped.round(state, here, Stream(0).at("round", r))
        kept.append(0 if state.points is None else len(state.points))
    assert kept == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 3, 23])
def test_fewer_rounds_and_nothing_is_proved_that_is_not_true(seed: int) -> None:
    """Average, worst case and chi-square on CVaR, against the interior-point solver."""
    problem = convex_problem(seed)
    _, objective = drawn_objective(seed, problem.n)
    best, _ = interior_point(problem, objective)
    algorithm, needed = ScaffPD(objective), []
    stop = StopWhen(at_gap=1e-6 * abs(best))
    for wrapped in (Accelerated(algorithm), algorithm):
        clients = problem.clients()
        history = train(wrapped, clients, rounds=400, x=problem.start(), stop=stop)
        for record in history.rounds:
            assert record.objective - record.numbers["gap"] <= best + 1e-8 * abs(best)
        needed.append(len(history.rounds))
    assert needed[0] <= 0.6 * needed[1], needed


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="memory must be at least 1, got 0"):
        Accelerated(ScaffPD(WorstCase()), memory=0)
