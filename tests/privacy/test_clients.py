"""Simulated clients under privacy: what runs, what it costs, and what is refused."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from tests.problems import classification, regression

import equifed as ef
from equifed.contract import Clients, LocalSGD, Stream
from equifed.objectives import Average, ChiSquare
from equifed.privacy.clients import PrivateClients
from equifed.privacy.ledger import OverBudget
from equifed.privacy.noise import StreamNoise
from equifed.privacy.site import OWN_FLOOR, Unanswered
from equifed.steps.schedules import ConstantSteps
from equifed.training.play_round import TrainingError

ROUNDS = 4
WORK = LocalSGD(lr=0.1, steps=3)
FAIR = ChiSquare(rho=0.5, scale=1.0)
ALGORITHMS = {
    "FairNewton": ef.FairNewton(FAIR),
    "FairNewton average": ef.FairNewton(Average()),
    "FedAvg": ef.FedAvg(WORK),
    "Scaffold": ef.Scaffold(WORK),
    "Scaffold fresh": ef.Scaffold(WORK, variates="fresh"),
    "ScaffPD": ef.ScaffPD(FAIR, WORK),
    "ScaffPD constant": ef.ScaffPD(FAIR, WORK, ConstantSteps(0.1, 0.5)),
    "DRFA": ef.DRFA(WORK, 0.1),
}


def draw_data():
    data = classification(sizes=(12, 9, 15), shape=(4,))
    return dataclasses.replace(data, test=classification((6, 6, 6), (4,), seed=1).train)


def make(epsilon=1.0, rounds=ROUNDS, model="logistic", data=None, own=None, **bounds):
    privacy = ef.Privacy(
        **{"epsilon": epsilon, "rows": 3.0, "loss": 2.0, "rounds": rounds} | bounds
    )
    data = draw_data() if data is None else data
    return ef.simulate(data, model, l2=1e-2, dtype=torch.float64, privacy=privacy, own=own)


@pytest.mark.parametrize("own", [None, "bias"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run_spends_its_budget_and_no_more(name, own):
    clients = make(own=own)
    history = ef.train(ALGORITHMS[name], clients, rounds=ROUNDS, evaluate=["test"], progress=False)
    assert len(history.rounds) == ROUNDS
    for ledger in clients.ledgers:
        assert ledger.spent == pytest.approx(1.0, rel=1e-6)
    assert any("epsilon 1 " in event.get("reason", "") for event in history.events)
    assert not any("gap" in record.numbers for record in history.rounds)
    with pytest.raises((OverBudget, TrainingError), match="budget"):
        ef.train(ALGORITHMS[name], clients, rounds=1, progress=False)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_squared_losses_tell_their_moments_and_nothing_else(name):
    data = regression(sizes=(30, 20, 25))
    found = []
    for epsilon in (1.0, 1e12):
        privacy = ef.Privacy(epsilon, rows=6.0, loss=100.0, rounds=ROUNDS)
        clients = ef.simulate(data, "linear", l2=1e-2, dtype=torch.float64, privacy=privacy)
        history = ef.train(ALGORITHMS[name], clients, rounds=ROUNDS, progress=False)
        found.append(history.parameters)
        for ledger in clients.ledgers:
            assert [(entry.kind, entry.steps) for entry in ledger.entries] == [("moments", 1)]
            assert ledger.spent == pytest.approx(epsilon, rel=1e-6)
    if name == "FairNewton average":
        clients = ef.simulate(data, "linear", l2=1e-2, dtype=torch.float64)
        wanted = ef.train(ALGORITHMS[name], clients, rounds=ROUNDS, progress=False).parameters
        for key, one in found[1].items():
            assert torch.allclose(one, wanted[key], atol=1e-3)


@pytest.mark.parametrize("name", ["FairNewton", "ScaffPD", "FedAvg"])
def test_with_a_huge_budget_it_is_the_algorithm_without_noise(name):
    data = draw_data()
    kept = max(float(np.linalg.norm(row)) for row in data.train.inputs)
    found = []
    rounds = 80 if name == "FairNewton" else ROUNDS  # its metric is a bound: the same solution
    for privacy in (ef.Privacy(1e12, kept * 1.01, 50.0, rounds), None):
        clients = ef.simulate(data, "logistic", l2=0.1, dtype=torch.float64, privacy=privacy)
        steps = ConstantSteps(0.3, 0.5)
        algorithm = ef.ScaffPD(FAIR, WORK, steps) if name == "ScaffPD" else ALGORITHMS[name]
        history = ef.train(algorithm, clients, rounds=rounds, give_out="last", progress=False)
        found.append(history.parameters)
    for one, other in zip(found[0].values(), found[1].values(), strict=True):
        assert torch.allclose(one, other, atol=1e-3)


@pytest.mark.parametrize("kind", ["logistic", "linear"])
def test_own_biases_with_a_huge_budget_are_those_without_noise(kind):
    """FairNewton against profile losses; FedAvg on one local step against their average."""
    data = draw_data() if kind == "logistic" else regression(sizes=(30, 20, 25))
    given = {"l2": 0.1, "own": "bias", "own_l2": 0.05, "dtype": torch.float64}
    for objective, private in (
        (FAIR, ef.FairNewton(FAIR)),
        (Average(), ef.FedAvg(LocalSGD(lr=0.3, steps=1), weighting="uniform")),
    ):
        plain = ef.simulate(data, kind, **given)
        wanted = ef.train(ef.FairNewton(objective), plain, rounds=40, progress=False)
        assert wanted.given_out.gap < 1e-9
        privacy = ef.Privacy(1e14, rows=9.0, loss=500.0, rounds=300)
        clients = ef.simulate(data, kind, privacy=privacy, **given)
        found = ef.train(private, clients, rounds=300, give_out="last", progress=False)
        for key, value in {**wanted.parameters, "own": wanted.own["1.bias"]}.items():
            mine = {**found.parameters, "own": found.own["1.bias"]}[key]
            assert torch.allclose(mine, value, atol=1e-4), key


@pytest.mark.parametrize("name", ["FairNewton", "FedAvg"])
def test_an_own_bias_moves_by_what_is_noised_and_no_more(name, monkeypatch):
    """From zero, over seeds: as the noise of its gradient, over the curvature; without it, not."""

    def spread():
        moved = []
        for seed in range(60):
            clients, stream = make(own="bias", rounds=1), Stream(seed)
            clients.expect(ALGORITHMS[name], 1, stream)
            x = clients.initial(stream)
            if name == "FedAvg":
                clients.local_steps(x, LocalSGD(lr=0.1, steps=1), stream)
            else:
                clients.value_and_gradient(x, stream)
            moved.append(clients.own_after()[0])
        (entry,) = (e for e in clients.ledgers[0].entries if e.kind in ("gradients", "steps"))
        assert OWN_FLOOR * entry.sigma > clients.site(0).bend  # noise decides, not the loss
        return float(torch.stack(moved).std(dim=0).square().mean().sqrt()) * OWN_FLOOR

    size = math.sqrt(2 / 3)  # what is known of softmax is taken off: that all three sum to zero
    assert 0.9 * size < spread() < 1.1 * size
    add = StreamNoise.add

    def forget(self, value, sensitivity, sigma, kind, turn):
        known = kind in ("gradients", "steps")
        return value if known else add(self, value, sensitivity, sigma, kind, turn)

    monkeypatch.setattr(StreamNoise, "add", forget)
    assert spread() < 0.2


def test_who_has_one_class_only_is_not_told():
    inputs = np.random.default_rng(0).standard_normal((20, 4))
    one, both = (inputs, np.zeros(20, dtype=np.int64)), (inputs, np.arange(20) % 2)
    data = ef.Federation.from_clients({"one": one, "both": both})
    assert ef.simulate(data, "logistic", own="bias").warn_of_own() is not None
    assert make(data=data, own="bias").warn_of_own() is None


def test_noise_belongs_to_the_seed():
    runs = [
        ef.train(ALGORITHMS["FairNewton"], make(), rounds=2, seed=seed, progress=False)
        for seed in (0, 0, 1)
    ]
    one, again, other = (run.parameters["1.weight"] for run in runs)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_no_noise_is_used_twice():
    clients, seen = make(), []
    add = StreamNoise.add

    def watch(self, value, sensitivity, sigma, *where):
        seen.append((self.stream.address, *where))
        return add(self, value, sensitivity, sigma, *where)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamNoise, "add", watch)
        ef.train(ALGORITHMS["ScaffPD"], clients, rounds=ROUNDS, progress=False)
    assert len(seen) == len(set(seen)) == 3 * ROUNDS * (1 + 1 + 3)


@pytest.mark.long
@pytest.mark.parametrize("algorithm", [ef.FedAvg, ef.DRFA])
def test_minibatches_are_drawn_anew_in_every_step(algorithm, monkeypatch):
    pytest.importorskip("dp_accounting")
    drawn, draw = [], StreamNoise.draw

    def watch(self, count, size, *where):
        rows = draw(self, count, size, *where)
        drawn.append((self.stream.address, where, count, size, len(set(rows.tolist()))))
        return rows

    monkeypatch.setattr(StreamNoise, "draw", watch)
    sizes = (40, 40, 20)
    data = classification(sizes=sizes, shape=(4,))
    clients = make(rounds=2, data=data)
    work = LocalSGD(lr=0.1, steps=2, batch_size=20)  # a client with 20 rows takes all of them
    ef.train(algorithm(work), clients, rounds=2, progress=False)
    assert len({(address, where) for address, where, *_ in drawn}) == len(drawn) == 2 * (2 + 2)
    assert {tuple(rest) for _, _, *rest in drawn} == {(20, 40, 20)}
    for ledger, size in zip(clients.ledgers, sizes, strict=True):
        assert {e.q for e in ledger.entries if e.kind == "steps"} == {20 / size}
        assert 0.95 < ledger.spent <= 1.0 + 1e-9


REFUSED = {
    "an unknown algorithm": (lambda: (ef.AFL(), make()), "AFL has no private version"),
    "a guard": (lambda: (ef.Guarded(ef.FairNewton(FAIR)), make()), "leave it out"),
    "a scale": (lambda: (ef.FairNewton(ChiSquare(rho=0.5)), make()), "scale = 1.0"),
    "more rounds": (lambda: (ef.FedAvg(WORK), make(rounds=2)), "rounds=4"),
    "measured steps": (
        lambda: (
            ef.ScaffPD(FAIR, WORK),
            make(model=torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh()), gradient=1.0),
        ),
        "smoothness",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_price_is_refused_with_the_reason(what):
    make_both, reason = REFUSED[what]
    with pytest.raises((Unanswered, ValueError, TrainingError), match=reason):
        algorithm, clients = make_both()
        ef.train(algorithm, clients, rounds=ROUNDS, progress=False)


def test_rows_are_evaluated_by_nobody():
    clients = make()
    x = clients.initial(Stream(0))
    with pytest.raises(Unanswered, match="train rows"):
        clients.evaluate(x)
    assert clients.evaluate(x, ["test"])
    privacy = ef.Privacy(epsilon=1.0, rows=3.0, loss=2.0, rounds=2)
    with pytest.raises(Unanswered, match="class_weights"):
        weights = {0: 1.0, 1: 2.0, 2: 1.0}
        ef.simulate(draw_data(), "logistic", privacy=privacy, class_weights=weights)
    with pytest.raises(ValueError, match="stacked"):
        ef.simulate(draw_data(), "logistic", privacy=privacy, engine="stacked")


def test_data_that_were_prepared_from_their_rows_are_refused_unless_that_is_public(tmp_path):
    rows = [f"{'ab'[i % 2]},{20 + i % 9},{'yes' if i % 3 else 'no'}" for i in range(40)]
    (tmp_path / "table.csv").write_text("\n".join(["site,age,ill", *rows]))
    data = ef.Federation.from_table(tmp_path / "table.csv", client="site", target="ill")
    assert data.preparation is not None
    with pytest.raises(Unanswered, match="preparation='public'"):
        make(data=data)
    assert make(data=data, preparation="public").names == ("a", "b")


def test_a_wrapper_is_known_by_its_class_and_not_by_its_name():
    class Safeguarded(ef.Safeguarded):
        pass

    algorithm = ef.ScaffPD(FAIR, WORK, ConstantSteps(0.1, 0.5))
    ef.train(ef.Safeguarded(algorithm), make(), rounds=1, progress=False)
    with pytest.raises(Unanswered, match="leave it out"):
        ef.train(Safeguarded(algorithm), make(), rounds=1, progress=False)


PUBLIC = {
    "subset", "require_finite", "initial", "flatten", "parameters", "origin", "predictor", "group",
    "can_remember", "remembered", "remember", "inner_products", "hides_sums", "adds_noise",
    "expect", "names", "index", "sizes", "take_notes", "describe_own", "warn_of_own", 
    "remembers_own", "needs_all_samples", "own_parts", "with_own", "own_after", "own_parameters",
    "evaluate_shared", "answer", "account",
}  # fmt: skip
"""Of the model, of who takes part, of what was told before; own parts there are none."""

PRICED = {"losses", "value_and_gradient", "local_steps", "curvature_sum"}
DECLINED = {"curvature", "inexactness", "feature_scales", "evaluate", "describe"}
"""Answered from what is declared, for test rows alone, or not at all."""


def test_nothing_leaves_by_forgetting():
    """Every question of the contract is priced, declined or about no rows; a new one fails."""
    questions = {name for name in vars(Clients) if not name.startswith("_")}
    assert (
        questions - PUBLIC - PRICED - DECLINED
        == {"traffic", "engine", "choice", "model"} & questions
    )
    own = vars(PrivateClients).keys()
    assert DECLINED - {"curvature"} <= own
    assert "find_curvature" in own
    clients = make()
    clients.expect(ALGORITHMS["ScaffPD"], ROUNDS, Stream(0))
    x, told = clients.initial(Stream(0)), []
    for ask in (
        lambda: clients.losses(x, Stream(0)),
        lambda: clients.value_and_gradient(x, Stream(0)),
        lambda: clients.local_steps(x, WORK, Stream(0)),
    ):
        before = sum(entry.square for entry in clients.ledgers[0].entries)
        ask()
        told.append(sum(entry.square for entry in clients.ledgers[0].entries) > before)
    assert told == [True] * 3
    with pytest.raises(Unanswered, match="moments are not in the plan"):
        clients.curvature_sum(x, np.ones(3))
