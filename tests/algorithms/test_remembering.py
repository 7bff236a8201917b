"""Remembering: sampled rounds with everybody's last answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.optima import interior_point
from tests.problems import PROBLEMS, Problem, convex_problem, least_squares, logistic, rounds, start

from equifed.algorithms import (
    AFL,
    DRFA,
    AgnosticFedAvg,
    Averaged,
    Certified,
    FedAvg,
    Guarded,
    Normalised,
    Remembering,
    Safeguarded,
    Scaffold,
    ScaffPD,
    ScaffPDIA,
    tilted_erm,
)
from equifed.algorithms import remembering as module
from equifed.algorithms.guard_limits import Guard
from equifed.contract.clients import Clients
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.contract.views import ClientsView
from equifed.objectives import Average, ChiSquare, CVaR, RelativeFairness, WorstCase
from equifed.steps.schedules import ConstantSteps
from equifed.training.folder import RunFolder
from equifed.training.loop import train
from equifed.training.trackers import Callback

pytestmark = pytest.mark.long

PROBLEM = PROBLEMS["more clients"]
N, LR, TAU, SIGMA, THETA = PROBLEM.n, 0.05, 0.1, 0.2, 0.9
ONE = LocalSGD(lr=LR, steps=1)
SHARE = 0.3  # three of seven
SAMPLED: list[Any] = [
    FedAvg(ONE, "uniform", SHARE),
    FedAvg(ONE, "size", SHARE),
    AFL(ONE, participation=SHARE),
    AgnosticFedAvg(ONE, participation=SHARE),
    tilted_erm(ONE, participation=SHARE, scale=1.0),
    ScaffPD(CVaR(0.5), ONE, ConstantSteps(TAU, SIGMA, THETA), participation=SHARE),
    ScaffPDIA(0.2, local=ONE, steps=ConstantSteps(TAU, SIGMA, THETA), participation=SHARE),
]


def recalled(table: dict[int, np.ndarray], weights: np.ndarray) -> np.ndarray:
    """Sum of the last vectors by today's weights; who never answered leaves them to the others."""
    known = sum(abs(weights[i]) for i in table)
    total = sum((weights[i] * v for i, v in table.items()), np.zeros(PROBLEM.d))
    return total * np.abs(weights).sum() / known


@pytest.mark.parametrize("weighting", ["uniform", "size"])
def test_fedavg_is_its_naive_twin(weighting: Any) -> None:
    algorithm = Remembering(FedAvg(ONE, weighting, SHARE))
    state, infos = rounds(algorithm, PROBLEM.clients(), start(PROBLEM), 25)
    p = np.ones(N) / N if weighting == "uniform" else PROBLEM.sizes / PROBLEM.sizes.sum()
    x, table = start(PROBLEM), {}
    for info in infos:
        gradients = PROBLEM.gradients(x)
        table |= {int(i): gradients[i] for i in info.index}
        x = x - len(info.index) / N * LR * recalled(table, p)
    np.testing.assert_allclose(state.x, x, atol=1e-12)


@pytest.mark.parametrize("objective", [WorstCase(), RelativeFairness(0.3)], ids=repr)
def test_scaff_pd_is_its_naive_twin(objective: Any) -> None:
    """One local step, so that the update is the sum itself."""
    steps = ConstantSteps(TAU, SIGMA, THETA)
    algorithm = Remembering(ScaffPD(objective, ONE, steps, participation=SHARE))
    state, infos = rounds(algorithm, PROBLEM.clients(), start(PROBLEM), 25)
    x, weights, losses, table = start(PROBLEM), objective.start(N), None, {}
    before: set[int] = set()
    for info in infos:
        here, now, gradients = info.index, PROBLEM.losses(x), PROBLEM.gradients(x)
        new = np.full(N, now[here].mean()) if losses is None else losses.copy()
        new[here] = now[here]
        slope = np.zeros(N)
        for i in before if losses is not None else ():
            slope[i] = new[i] - losses[i]
        table |= {int(i): gradients[i] for i in here}
        to = objective.prox(weights + SIGMA * (new + THETA * slope), SIGMA)
        x = x - len(here) / N * TAU * recalled(table, to)
        weights = weights + len(here) / N * (to - weights)
        losses, before = new, {int(i) for i in here}
    np.testing.assert_allclose(state.x, x, atol=1e-10)
    np.testing.assert_allclose(state.inner.weights, weights, atol=1e-10)


@pytest.mark.parametrize("algorithm", SAMPLED, ids=lambda a: type(a).__name__)
def test_with_all_clients_it_is_the_algorithm_to_the_bit(algorithm: Any) -> None:
    whole = type(algorithm)(**{**vars(algorithm), "participation": 1.0})
    given: dict[str, Any] = {"rounds": 6, "x": torch.as_tensor(start(PROBLEM))}
    plain = train(whole, PROBLEM.clients(), **given)
    found = train(Remembering(whole), PROBLEM.clients(), **given)
    np.testing.assert_array_equal(found.parameters["weight"], plain.parameters["weight"])
    assert [r.numbers for r in found.rounds] == [r.numbers for r in plain.rounds]
    sent = [[(r.exchanges, r.bytes_up, r.bytes_down) for r in h.rounds] for h in (found, plain)]
    assert sent[0] == sent[1]


def test_training_adds_the_safeguard_only_where_all_clients_are_asked() -> None:
    plain, sampled = (Remembering(ScaffPD(CVaR(0.5), participation=p)) for p in (1.0, SHARE))
    assert plain.wrapped() == Safeguarded(plain)
    assert sampled.wrapped() == sampled


@pytest.mark.parametrize("algorithm", SAMPLED, ids=lambda a: type(a).__name__)
def test_no_client_is_asked_for_more(algorithm: Any) -> None:
    """Message for message: same clients, same bytes."""
    ledgers = []
    for one in (algorithm, Remembering(algorithm)):
        clients = PROBLEM.clients()
        rounds(one, clients, start(PROBLEM), 8)
        traffic = clients.traffic
        ledgers.append((traffic.exchanges, traffic.up.tolist(), traffic.down.tolist()))
    assert ledgers[0] == ledgers[1]


@pytest.mark.parametrize(
    "algorithm",
    [
        FedAvg(LocalSGD(lr=0.2, steps=1), "uniform", SHARE),
        FedAvg(LocalSGD(lr=0.2, steps=1), "size", SHARE),
        ScaffPD(ChiSquare(0.1, scale=1.0), ONE, ConstantSteps(2 * TAU, SIGMA), participation=SHARE),
    ],
    ids=["fedavg", "fedavg by size", "scaff-pd"],
)
def test_who_is_sampled_makes_no_noise_at_the_solution(algorithm: Any) -> None:
    """Gradients of the clients do not vanish there; without the memory the model jumps about."""
    clients, outer = PROBLEM.clients("stacked"), Remembering(algorithm)
    whole = type(algorithm)(**{**vars(algorithm), "participation": 1.0})
    solution = rounds(whole, clients, start(PROBLEM), 400)[0].x
    assert np.abs(PROBLEM.gradients(solution.numpy())).max() > 0.1
    state, _ = rounds(outer, clients, start(PROBLEM), 700)
    for r in range(10):
        assert float((state.x - solution).norm()) < 1e-7
        state, _ = outer.round(state, clients, Stream(1).at("round", r))
    assert float((rounds(algorithm, clients, start(PROBLEM), 400)[0].x - solution).norm()) > 1e-3


AUDIT: dict[str, Problem] = {
    "least squares": least_squares(1, n=12, d=5),
    "logistic": logistic(0, n=12, d=5),
    "drawn": convex_problem(11),
}


@pytest.mark.parametrize("name", AUDIT)
@pytest.mark.parametrize("objective", [WorstCase(), CVaR(0.5), ChiSquare(0.1, scale=1.0)], ids=repr)
def test_scaff_pd_comes_to_the_interior_point_optimum(name: str, objective: Any) -> None:
    problem = AUDIT[name]
    algorithm = Remembering(ScaffPD(objective, participation=SHARE))
    history = train(algorithm, problem.clients("stacked"), rounds=600, x=problem.start())
    best, _ = interior_point(problem, objective)
    value = objective.value(problem.losses(history.parameters["weight"].numpy().ravel()))
    assert value <= 1.0005 * best


def test_fedavg_comes_to_the_interior_point_optimum() -> None:
    problem = AUDIT["least squares"]
    algorithm = Remembering(FedAvg(ONE, participation=SHARE))
    state, _ = rounds(algorithm, problem.clients("stacked"), problem.start(), 600)
    best, _ = interior_point(problem, Average(tuple(problem.sizes)))
    losses = problem.losses(state.x.numpy())
    assert losses @ problem.sizes / problem.sizes.sum() <= best * (1 + 1e-6)


def test_relative_fairness_comes_to_what_all_clients_give() -> None:
    problem, ratios = least_squares(5, n=12, d=5), []
    for part in (1.0, 0.5):
        algorithm = Remembering(ScaffPDIA(0.3, participation=part))
        history = train(algorithm, problem.clients("stacked"), rounds=600, x=problem.start())
        losses = problem.losses(history.parameters["weight"].numpy().ravel())
        ratios.append(losses.max() / losses.min())
    assert ratios[1] == pytest.approx(ratios[0], rel=1e-3)


class Kill(Callback):
    """Ends the program in a round."""

    def round(self, record: Any, info: object) -> None:
        if record.round == 7:
            raise KeyboardInterrupt


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("algorithm", SAMPLED, ids=lambda a: type(a).__name__)
def test_an_interrupted_run_ends_alike(
    algorithm: Any, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("equifed.training.loop.CHECKPOINT_SECONDS", 0.0)
    given: dict[str, Any] = {"rounds": 14, "x": torch.as_tensor(start(PROBLEM))}
    whole = train(Remembering(algorithm), PROBLEM.clients(engine), **given)
    folders = [RunFolder(tmp_path / "run", PROBLEM.clients(engine).names) for _ in range(2)]
    folders[0].create()
    with pytest.raises(KeyboardInterrupt):
        parts = {"folder": folders[0], "callbacks": [Kill()]}
        train(Remembering(algorithm), PROBLEM.clients(engine), **given, **parts)
    again = train(
        Remembering(algorithm), PROBLEM.clients(engine), **given, folder=folders[1], resume=True
    )
    np.testing.assert_array_equal(again.parameters["weight"], whole.parameters["weight"])


def test_who_is_away_for_good_is_forgotten() -> None:
    """The others' average, once its patience is over."""
    algorithm, clients = Remembering(FedAvg(ONE, "uniform", 0.5)), PROBLEM.clients("stacked")
    state, _ = rounds(algorithm, clients, start(PROBLEM), 10)
    others = clients.subset(range(N - 1))
    for r in range(1500):
        state, _ = algorithm.round(state, others, Stream(3).at("round", r))
    mean = PROBLEM.gradients(state.x.numpy())[:-1].mean(axis=0)
    assert np.linalg.norm(mean) < 1e-8


def test_certified_says_why_there_is_no_certificate() -> None:
    algorithm = Certified(Remembering(ScaffPD(CVaR(0.5), participation=SHARE)), every=2)
    history = train(algorithm, PROBLEM.clients(), rounds=6)
    assert not any("gap" in record.numbers for record in history.rounds)
    told = [event["reason"] for event in history.events if event["event"] == "note"]
    assert "no certificate: not all clients took part" in told


class Hidden(ClientsView):
    """Clients whose sums are hidden."""

    hides_sums = True


class Forgetful(ClientsView):
    """An engine that keeps nothing for anybody."""

    remembered, remember, can_remember = Clients.remembered, Clients.remember, Clients.can_remember


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Remembering(Scaffold(ONE, participation=0.5)), "one sum .* Scaffold has not"),
        (lambda: Remembering(DRFA(ONE)), "DRFA has not"),
        (lambda: Remembering(AFL(ONE, clients_per_round=3)), "AFL draws clients"),
        (lambda: Remembering(AFL(ONE, output="average")), "use Averaged"),
        (lambda: Remembering(Averaged(FedAvg(ONE))), r"Averaged\(Remembering"),
        (lambda: Remembering(Guarded(FedAvg(ONE))), "leave Remembering out"),
        (lambda: Guarded(Remembering(FedAvg(ONE))), "use one of the two"),
        (lambda: Normalised(Remembering(FedAvg(ONE))), "use one of the two"),
        (lambda: init(Hidden), "their sums are hidden"),
        (lambda: init(Forgetful), "keeps no vectors"),
    ],
)
def test_what_it_cannot_do_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def init(view: Any) -> Any:
    return Remembering(FedAvg(ONE)).init(view(PROBLEM.clients()), torch.zeros(PROBLEM.d))


def test_too_many_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST", 13)
    with pytest.raises(ValueError, match="14 are more than 13"):
        init(ClientsView)


def test_a_guard_that_watches_changes_nothing() -> None:
    algorithm = Remembering(FedAvg(ONE, participation=SHARE))
    watched = Guarded(algorithm, Guard("watch"))
    given: dict[str, Any] = {"rounds": 8, "x": torch.as_tensor(start(PROBLEM))}
    one, other = (train(a, PROBLEM.clients(), **given) for a in (algorithm, watched))
    np.testing.assert_array_equal(one.parameters["weight"], other.parameters["weight"])
