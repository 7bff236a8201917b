"""Privacy of clients: what one of them can change, what the noise hides, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scripts.trust.canaries import bound_epsilon
from tests.problems import regression

from equifed.algorithms import FedAvg, Guarded
from equifed.algorithms.fedavg import State as FedAvgState
from equifed.algorithms.guard import Guard
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.engines.simulate import simulate
from equifed.privacy.fedavg import PrivateFedAvg, State
from equifed.privacy.ledger import OverBudget, compose
from equifed.training.loop import train

WORK = LocalSGD(lr=0.3, steps=2)


def clients_of(data: Federation) -> Any:
    inputs, targets = data.train.inputs, data.train.targets
    model = torch.nn.Linear(inputs.shape[1], 1, bias=False)
    assert len(inputs) == len(targets)
    return simulate(data, model, "squared", engine="stacked", dtype=torch.float64)


def neighbour(data: Federation, i: int, seed: int, scale: float) -> Federation:
    """The same federation but for client i, all of whose rows are others."""
    draw, pairs = np.random.default_rng(seed), {}
    for k, name in enumerate(data.names):
        x, y = data.train.client(k)
        if k == i:
            x, y = draw.normal(size=x.shape), scale * draw.normal(size=y.shape)
        pairs[name] = (x, y)
    return Federation.from_clients(pairs)


def step(algorithm: PrivateFedAvg, clients: Any, seed: int = 0) -> np.ndarray:
    x = torch.zeros(clients.model.size, dtype=torch.float64)
    return algorithm.round(State(x), clients, Stream(seed))[0].x.numpy()


@pytest.mark.long
@pytest.mark.parametrize("share", [1.0, 0.6, 0.4])
def test_no_client_moves_the_model_by_more_than_the_sensitivity(share):
    # the noise has one address, so that the difference of two models is that of their sums
    private = PrivateFedAvg(2.0, 5, 0.3, WORK, share, server_lr=0.5)
    for seed in range(20):
        data = regression(sizes=(3, 5, 2, 8, 1), seed=seed)
        i, scale = seed % 5, 10.0 ** (seed % 4)
        clients, others = clients_of(data), clients_of(neighbour(data, i, seed, scale))
        moved = np.linalg.norm(step(private, clients, seed) - step(private, others, seed))
        assert moved <= 0.5 * private.price(len(clients.names)).sensitivity * (1 + 1e-9)


def test_the_sensitivity_is_reached():
    rows = {f"c{i}": (np.eye(3), np.zeros(3)) for i in range(4)}
    ends = [rows | {"c1": (np.eye(3), np.full(3, sign * 100.0))} for sign in (-1, 1)]
    private = PrivateFedAvg(2.0, 5, 0.3, WORK)
    one, other = (clients_of(Federation.from_clients(pairs)) for pairs in ends)
    moved = np.linalg.norm(step(private, one) - step(private, other))
    assert moved == pytest.approx(private.price(len(one.names)).sensitivity, rel=1e-5)
    assert private.price(len(one.names)).sensitivity == pytest.approx(2 * 0.3 / 4)


def test_without_clipping_and_noise_it_is_fedavg(monkeypatch):
    monkeypatch.setattr("equifed.privacy.fedavg.find_factor", lambda *_: 1e-15)
    clients = clients_of(regression(seed=1))
    private = PrivateFedAvg(2.0, 5, 1e6, WORK, server_lr=0.7)
    plain = FedAvg(WORK, "uniform", server_lr=0.7)
    x = torch.ones(clients.model.size, dtype=torch.float64)
    ours = private.round(State(x), clients, Stream(3))[0].x
    theirs = plain.round(FedAvgState(x), clients, Stream(3))[0].x
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-7)


def test_noise_has_the_deviation_of_the_entry():
    clients = clients_of(regression(sizes=(2,) * 4, features=4000))
    private = PrivateFedAvg(1.0, 10, 1e-9, WORK, server_lr=3.0)  # updates are clipped to nothing
    x = step(private, clients)
    sigma = private.price(len(clients.names)).sigma
    assert x.std() == pytest.approx(3.0 * sigma, rel=0.05)
    assert abs(x.mean()) < 4 * 3.0 * sigma / np.sqrt(4000)
    assert not np.array_equal(x, step(private, clients, seed=1))


def test_secret_noise_has_the_same_deviation_and_no_seed():
    clients = clients_of(regression(sizes=(2,) * 4, features=4000))
    private = PrivateFedAvg(1.0, 10, 1e-3, LocalSGD(lr=1e-9, steps=1), secret=True)
    one, other = (step(private, clients) for _ in range(2))
    entry = private.price(len(clients.names))
    assert one.std() == pytest.approx(entry.sigma, rel=0.05)
    assert not np.array_equal(one, other)
    plain = replace(private, secret=False).price(len(clients.names))
    assert entry.sensitivity > plain.sensitivity  # rounding to the grid is counted


@pytest.mark.parametrize("share", [1.0, 0.2])
def test_the_rounds_cost_the_budget_and_one_more_is_refused(share):
    clients = clients_of(regression(sizes=(2,) * 10))
    private = PrivateFedAvg(3.0, 4, 0.5, WORK, participation=share)
    spent = compose([private.price(len(clients.names), 4)], 1e-5)
    assert 0.99 * 3.0 < spent <= 3.0 * (1 + 1e-9)
    history = train(private, clients, rounds=4)
    assert sum("epsilon 3, delta 1e-05" in e["reason"] for e in history.events) == 1
    with pytest.raises(OverBudget, match="spent epsilon = 3 over its 4 rounds"):
        train(private, clients, rounds=5)


@pytest.mark.long
def test_sampling_needs_less_noise_and_never_more():
    few, half, whole = (
        PrivateFedAvg(3.0, 100, 0.5, WORK, participation=p) for p in (0.01, 0.9, 1.0)
    )
    clients = clients_of(regression(sizes=(1,) * 100))
    ratios = [
        p.price(len(clients.names)).sigma / p.price(len(clients.names)).sensitivity
        for p in (few, half, whole)
    ]
    assert ratios[0] < 0.2 * ratios[2]
    assert ratios[1] <= ratios[2]  # the accountant's bound is above the exact price of all


def test_missing_clients_leave_their_weight_empty(monkeypatch):
    monkeypatch.setattr("equifed.privacy.fedavg.find_factor", lambda *_: 1e-15)
    clients = clients_of(regression(sizes=(4,) * 5))
    private = PrivateFedAvg(2.0, 5, 1e-3, WORK)
    for here in ([0, 1, 2, 3, 4], [2], [1, 3]):
        _, info = private.round(
            State(torch.zeros(3, dtype=torch.float64)), clients.subset(here), Stream(0)
        )
        assert info.weights.sum() == pytest.approx(len(here) / 5)
        assert info.weights.max() == pytest.approx(1 / 5)
    sampled, seen = replace(private, participation=0.2), set()  # one client; often it is not there
    for seed in range(20):
        x = torch.zeros(3, dtype=torch.float64)
        new, info = sampled.round(State(x), clients.subset([0, 1]), Stream(seed))
        assert new.rounds == 1
        seen.add(tuple(info.index))
    assert seen == {(), (0,), (1,)}


def test_an_audit_finds_the_missing_noise(monkeypatch):
    """Every client is a canary: its one row says +1 or -1 in a direction of its own."""
    n, draw = 400, np.random.default_rng(0)
    coins = draw.choice([-1.0, 1.0], n)
    rows = {f"c{i}": (np.eye(n)[[i]], 100 * coins[[i]]) for i in range(n)}
    clients = clients_of(Federation.from_clients(rows))
    private = PrivateFedAvg(3.0, 4, 0.5, LocalSGD(lr=0.1, steps=1), delta=1e-6)

    def audit() -> float:
        state = private.init(clients, torch.zeros(n, dtype=torch.float64))
        for r in range(4):
            state, _ = private.round(state, clients, Stream(0).at("round", r))
        return bound_epsilon(coins, state.x.numpy(), 1e-6)

    assert audit() <= 3.0
    monkeypatch.setattr("equifed.privacy.fedavg.find_factor", lambda *_: 1e-15)
    assert audit() > 3.0


def test_what_would_spoil_the_promise_is_refused():
    clients = clients_of(regression())
    private = PrivateFedAvg(3.0, 4, 0.5, WORK)
    with pytest.raises(ValueError, match=r"not counted.*set guard = 'off'"):
        train(Guarded(private, Guard(cap=1.0)), clients, rounds=1)
    train(Guarded(private, Guard("watch")), clients, rounds=1)

    class Hidden(type(clients)):
        hides_sums = True

    hidden = Hidden.__new__(Hidden)
    hidden.__dict__.update(clients.__dict__)
    with pytest.raises(ValueError, match="clips the clients' updates at the server"):
        private.init(hidden, torch.zeros(3))


@pytest.mark.parametrize("wrong", [{"epsilon": 0.0}, {"clip": -1.0}, {"rounds": 0}, {"delta": 0.7}])
def test_settings_that_promise_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PrivateFedAvg(**{"epsilon": 3.0, "rounds": 4, "clip": 0.5, **wrong})
