"""Numbers near the largest float: whoever sent them is missing, nobody else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scripts.trust.federations import ALGORITHMS, draw_federation
from tests.problems import regression

from equifed.algorithms.fedavg import FedAvg
from equifed.algorithms.guard import Guard
from equifed.algorithms.guarded import Guarded
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.contract.local import LocalSGD
from equifed.engines.simulate import simulate
from equifed.objectives import CVaR
from equifed.testing import with_liar
from equifed.training.loop import train
from equifed.training.missing import TrainingError

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


def test_a_loss_of_1e308_does_not_end_cvar() -> None:
    honest = simulate(draw_federation(0, test=5), "logistic", l2=1e-2, dtype=torch.float64)
    history = train(ScaffPD(CVaR(0.25)), with_liar(honest, 0, loss=1e308), rounds=4, seed=0)
    assert {e["client"] for e in history.events if e["event"] == "quarantine"} == {"client 0"}


def test_divergence_of_everybody_is_blamed_on_nobody() -> None:
    clients = simulate(regression((7, 5, 9)), "linear", dtype=torch.float64)
    with pytest.raises(TrainingError, match="If training diverged, use smaller step sizes"):
        train(FedAvg(LocalSGD(lr=1e9, steps=60)), clients, rounds=40)


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
