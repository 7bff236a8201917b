"""Rounds that prove how far they are from the optimum, for every algorithm that can."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.optima import interior_point
from tests.problems import LeastSquares, convex_problem
from torch import nn

from equifed.algorithms import tilted_erm
from equifed.algorithms.afl import AFL
from equifed.algorithms.around import Certified
from equifed.algorithms.fedavg import FedAvg
from equifed.algorithms.safeguarded import Safeguarded
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.algorithms.scaffold import Scaffold
from equifed.contract.local import LocalSGD
from equifed.data import Federation
from equifed.engines.loop import LoopClients
from equifed.engines.simulate import simulate
from equifed.objectives import Average, CVaR, RelativeFairness, WorstCase
from equifed.training.final_model import StopWhen
from equifed.training.loop import train

pytestmark = pytest.mark.long


@pytest.mark.parametrize("seed", [24, 35])
@pytest.mark.parametrize("name", ["afl", "scaffold", "scaff-pd"])
def test_no_round_of_any_algorithm_is_certified_below_its_true_gap(name: str, seed: int) -> None:
    problem = convex_problem(seed)
    objective = Average() if name == "scaffold" else CVaR(0.4)
    best, _ = interior_point(problem, objective)
    smooth = max(np.linalg.norm(a, 2) ** 2 * 2 / len(a) for a in problem.inputs) + problem.l2
    algorithm = {
        "afl": AFL(LocalSGD(lr=0.5 / smooth, steps=1), 0.05 / smooth, objective),
        "scaffold": Scaffold(LocalSGD(lr=0.1 / smooth, steps=5), "fresh"),
        "scaff-pd": ScaffPD(objective),
    }[name]
    proved = Certified(algorithm, every=1)
    history = train(proved, problem.clients(), rounds=30, x=problem.start())
    gaps = np.array([r.numbers["gap"] for r in history.rounds])
    values = np.array([r.objective for r in history.rounds])
    assert (gaps >= values - best - 1e-8 * abs(best)).all()
    assert gaps[-1] < gaps[0]


def test_the_certificate_changes_no_model() -> None:
    problem = convex_problem(24)
    local = LocalSGD(lr=0.01, steps=3)
    for algorithm in (AFL(local), Scaffold(local, "fresh")):
        plain, proved = (
            train(a, problem.clients(), rounds=5, x=problem.start(), give_out="last")
            for a in (algorithm, Certified(algorithm))
        )
        for name, value in plain.parameters.items():
            assert torch.equal(value, proved.parameters[name])


@pytest.mark.parametrize(
    "algorithm",
    [
        FedAvg(LocalSGD(lr=0.01, steps=1)),
        AFL(LocalSGD(lr=0.01, steps=2)),
        AFL(LocalSGD(lr=0.01, steps=1, batch_size=2)),
        AFL(LocalSGD(lr=0.01, steps=1, proximal=0.1)),
        Scaffold(LocalSGD(lr=0.01, steps=1), "stored"),
        Scaffold(LocalSGD(lr=0.01, steps=1), "fresh", gradient_batch_size=2),
    ],
    ids=repr,
)
def test_rounds_that_know_no_full_gradient_have_no_certificate(algorithm: object) -> None:
    problem = convex_problem(24)
    history = train(Certified(algorithm), problem.clients(), rounds=2, x=problem.start())
    assert all("gap" not in r.numbers for r in history.rounds)
    assert history.summary()["certificate"].startswith("no certificate: ")


def test_a_negative_tilt_is_no_maximum_and_has_no_certificate() -> None:
    problem, bad = convex_problem(24), tilted_erm(LocalSGD(lr=0.01, steps=1), -1.0)
    history = train(Certified(bad, every=1), problem.clients(), rounds=2, x=problem.start())
    assert "has no dual step" in history.summary()["certificate"]


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
    told = [e["reason"] for e in history.events if e["event"] == "note"]
    added, chosen, why = (note for note in told if not note.startswith("Each round asks"))
    assert added.startswith("Added to ScaffPD by default: Safeguarded")
    assert chosen.startswith("automatic step sizes") and why == text


def test_minibatches_are_certified_every_few_rounds() -> None:
    problem = convex_problem(24)
    local = LocalSGD(lr=1.0, steps=4, batch_size=5)
    algorithm = Certified(ScaffPD(CVaR(0.4), local, gradient_batch_size=5), every=3)
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
    stated = Safeguarded(Certified(ScaffPD(CVaR(0.4)), strong_convexity=problem.l2))
    mine = train(stated, own, rounds=25, x=problem.start())
    assert mine.rounds[-1].numbers["gap"] < mine.rounds[0].numbers["gap"] / 100
    known = train(ScaffPD(CVaR(0.4)), problem.clients(), rounds=25, x=problem.start())
    # The library knows more about its own loss than the penalty's share of the convexity.
    assert known.rounds[-1].numbers["gap"] < mine.rounds[-1].numbers["gap"]


def my_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs[:, 0] - targets) ** 2


def test_training_stops_at_the_gap_that_was_asked_for() -> None:
    problem = convex_problem(24)
    rule = StopWhen(at_gap=1e-5)
    history = train(
        ScaffPD(CVaR(0.4)), problem.clients(), rounds=300, x=problem.start(), stop=[rule]
    )
    gaps = [r.numbers["gap"] for r in history.rounds]
    assert gaps[-1] <= 1e-5 < min(gaps[:-1])
    assert history.summary()["certificate"]["gap"] == gaps[-1]
    assert "is proved" in next(e["reason"] for e in history.events if e["event"] == "stopped")


@pytest.mark.parametrize("name", ["strong_convexity", "smoothness", "every"])
def test_nonsense_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Certified(ScaffPD(WorstCase()), **{name: 0})


@pytest.mark.parametrize("batches", [(10, None), (None, 10), (10, 10)])
def test_nothing_is_proved_by_losses_or_gradients_of_some_samples(
    batches: tuple[int | None, int | None],
) -> None:
    losses, gradients = batches
    fair = ScaffPD(CVaR(0.5), gradient_batch_size=gradients, loss_batch_size=losses)
    problem = convex_problem(24)
    history = train(fair, problem.clients(), rounds=5, x=problem.start())
    assert not any("gap" in record.numbers for record in history.rounds)
