"""Numbers near the largest float: whoever sent them is missing, nobody else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripts.trust.federations import ALGORITHMS, draw_federation
from tests.problems import regression

from equifed.algorithms.fedavg import FedAvg
from equifed.algorithms.guard import Guarded
from equifed.algorithms.guard_limits import Guard
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.algorithms.scaffold import Scaffold
from equifed.contract.clients import MissingClients
from equifed.contract.local import DEFAULT_WORK, LocalSGD
from equifed.contract.streams import Stream
from equifed.engines.ordered_sums import DenseVectors
from equifed.engines.simulate import simulate
from equifed.objectives import CVaR
from equifed.steps.automatic import with_measured_step
from equifed.testing import with_liar
from equifed.training.folder import RunFolder
from equifed.training.loop import train
from equifed.training.play_round import TrainingError, Witness, WitnessedVectors

pytestmark = pytest.mark.long

LIES: dict[str, dict[str, Any]] = {
    "1e308": {"loss": 1e308},
    "-1e308": {"loss": -1e308},
    "x 1e30": {"update": 1e30},
    "x -1e38": {"update": -1e38},
    "x 1e150": {"update": 1e150},
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fedavg", torch.float32),
        ("afl", torch.float64),
        ("q-fedavg", torch.float32),
        ("scaff-pd", torch.float64),
    ],
    ids=str,
)
def test_only_the_liar_is_missing_and_the_model_stays_finite(
    name: str, lie: str, dtype: torch.dtype
) -> None:
    honest = simulate(draw_federation(0, test=5), "logistic", l2=1e-2, dtype=dtype)
    for algorithm in (ALGORITHMS[name], Guarded(ALGORITHMS[name], Guard("watch"))):
        history = train(algorithm, with_liar(honest, 4, **LIES[lie]), rounds=3, seed=0)
        assert len(history.rounds) == 3
        named = {e["client"] for e in history.events if e["event"] == "quarantine"}
        assert named <= {"client 4"}
        largest = max(float(v.abs().max()) for v in (history.parameters or {}).values())
        assert largest < 100


LARGEST = 1e100  # as documented


def checked() -> Witness:
    return Witness(simulate(regression((7, 5, 9, 8)), "linear", dtype=torch.float64))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_loss_is_too_large_from_the_limit_on(sign: float) -> None:
    clients, stream = checked(), Stream(0)
    below = np.array([0.5, sign * 0.9 * LARGEST, 1.0, 2.0])
    np.testing.assert_array_equal(clients.see_numbers(below, "loss", stream), below)
    above = np.array([0.5, sign * 1.1 * LARGEST, 1.0, 2.0])
    with pytest.raises(MissingClients) as lost:
        clients.see_numbers(above, "loss", stream)
    assert list(lost.value.reasons) == [1]
    assert np.finfo(np.float64).max > LARGEST**3  # losses up to it can be squared, and cubed


def test_losses_that_are_large_with_most_clients_are_nobodys_fault() -> None:
    large = np.array([2.0 * LARGEST, 0.5, 2.0 * LARGEST, 3.0 * LARGEST])
    np.testing.assert_array_equal(checked().see_numbers(large, "loss", Stream(0)), large)


@pytest.mark.parametrize(("usual", "model"), [(0.1, 0.0), (30.0, 0.0), (0.1, 99.0)])
def test_a_vector_is_absurd_beyond_a_million_times_the_median_and_the_model(
    usual: float, model: float
) -> None:
    """The measure is the longer one of the median vector and of 1 + |x|."""
    limit = 1e6 * max(usual, 1.0 + model)
    for factor, refused in ((0.9, False), (1.1, True)):
        rows = usual * torch.eye(4, dtype=torch.float64)
        rows[2, 2] = factor * limit
        x = torch.tensor([model, 0.0, 0.0, 0.0], dtype=torch.float64)
        vectors = WitnessedVectors(DenseVectors(rows), checked(), "gradient", x)
        for ask in (vectors.squared_norms, lambda v=vectors: v.weighted_sum(np.ones(4))):
            if not refused:
                ask()
                continue
            with pytest.raises(MissingClients, match="length of its gradient") as lost:
                ask()
            assert list(lost.value.reasons) == [2]


def test_a_loss_of_1e308_does_not_end_cvar() -> None:
    honest = simulate(draw_federation(0, test=5), "logistic", l2=1e-2, dtype=torch.float64)
    history = train(ScaffPD(CVaR(0.25)), with_liar(honest, 0, loss=1e308), rounds=4, seed=0)
    assert {e["client"] for e in history.events if e["event"] == "quarantine"} == {"client 0"}


@pytest.mark.parametrize("way", ["fedavg", "scaffold", "network"])
def test_divergence_of_everybody_is_blamed_on_nobody(way: str, tmp_path: Path) -> None:
    model = "mlp" if way == "network" else "linear"
    clients = simulate(regression((7, 5, 9)), model, dtype=torch.float64)
    work = LocalSGD(lr=1e9, steps=60)
    folder = RunFolder(tmp_path / "run", clients.names)
    folder.create()
    with pytest.raises(TrainingError, match=r"training diverged.*smaller step sizes") as told:
        ran = Scaffold(work) if way == "scaffold" else FedAvg(work)
        train(ran, clients, rounds=40, folder=folder)
    assert not [name for name in clients.names if name in str(told.value)]
    said = (tmp_path / "run" / "events.jsonl").read_text()
    assert "training diverged" in said and "quarantine" not in said


def test_defaults_take_whole_steps_of_a_measured_length_where_own_parts_need_them() -> None:
    clients = simulate(draw_federation(0, test=5), "logistic", own="bias", dtype=torch.float64)
    history = train(FedAvg(), clients)
    assert len(history.rounds) == 100
    (note,) = [e["reason"] for e in history.events if "was not given" in e.get("reason", "")]
    whole = FedAvg(replace(DEFAULT_WORK, batch_size=None))
    start = clients.initial(Stream(0).at("initial"))
    found = with_measured_step(whole, clients, start, Stream(0).at("measured lr"))
    assert repr(found.local) in note
    again = train(found, clients)
    assert history.parameters is not None and again.parameters is not None
    assert all(torch.equal(history.parameters[k], again.parameters[k]) for k in again.parameters)
    given = FedAvg(LocalSGD(lr=0.02, steps=10, batch_size=50))  # what is said is not changed
    with pytest.raises(ValueError, match="needs all samples"):
        train(given, clients, rounds=1)


def test_a_badly_scaled_client_that_is_honest_stays() -> None:
    federation = regression((7, 5, 9, 8))
    federation.train.inputs[:7] *= 300.0
    clients = simulate(federation, "linear", dtype=torch.float64)
    history = train(FedAvg(LocalSGD(lr=1e-7, steps=2)), clients, rounds=3)
    assert not [e for e in history.events if e["event"] == "quarantine"]
    assert np.isfinite(history.rounds[-1].seconds)


def test_most_of_those_who_are_asked_may_send_nothing_finite() -> None:
    """Four of six updates of a tail are NaN: these four are missing, the model stays finite."""
    from scripts.trust.nan_clients import play

    assert play("delta-fl", "update NaN", 5, "off") is None
