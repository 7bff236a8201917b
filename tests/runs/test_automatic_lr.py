"""Local step sizes that a configuration leaves open."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import equifed as ef
from equifed.contract.streams import Stream
from equifed.runs import run as runs
from equifed.runs.config import RunConfig
from equifed.steps.automatic import measured_smoothness


def config(algorithm: Any, rounds: int = 1) -> RunConfig:
    table = {"rounds": rounds, "data": "heart-disease", "model": "logistic", "threads": 1}
    return RunConfig.from_dict({**table, "algorithm": algorithm})


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["fedavg", {"name": "fedavg", "local": {"steps": 4}}])
def test_a_step_that_is_not_given_is_measured_and_written_down(
    algorithm: Any, tmp_path: Path
) -> None:
    asked = config(algorithm)
    assert asked.algorithm["local"]["lr"] == "auto"
    runs.run(asked, tmp_path / "run")
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    lr = written["algorithm"]["local"]["lr"]
    built = runs.build_run(asked)
    assert lr == built.algorithm.local.lr  # type: ignore[attr-defined]
    # lr = min(2, J) / (L J) for the largest curvature L: twice the step on the steepest client's
    # logistic loss cannot exceed 2 / L, so a full step of it still descends.
    work = built.algorithm.local  # type: ignore[attr-defined]
    steps = int(work.steps_for(built.clients.sizes).max())
    inputs = [built.federation.train.client(i)[0] for i in range(4)]
    padded = [np.hstack([x, np.ones((len(x), 1))]) for x in inputs]
    # Of logistic regression with two outputs at zero the curvature is that of X'X/m times a half.
    curvature = max(np.linalg.eigvalsh(x.T @ x / len(x)).max() / 2 for x in padded)
    assert lr == pytest.approx(min(2, steps) / (curvature * steps), rel=0.05)


def test_a_step_that_is_given_stays() -> None:
    given = {"name": "fedavg", "local": {"lr": 0.3, "steps": 2}}
    assert config(given).algorithm["local"]["lr"] == 0.3


def test_scaff_pd_has_its_own_schedule() -> None:
    table = {"name": "scaff-pd", "objective": "worst-case"}
    assert config(table).algorithm["local"]["lr"] == 1.0
    assert config(table).algorithm["steps"]["name"] == "auto"


@pytest.mark.long
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "drfa", "q-fedsgd", "feddyn"])
def test_algorithms_learn_without_a_number(name: str) -> None:
    """As a configuration; that each algorithm does is tested with the algorithms."""
    history = runs.run(config(name, rounds=20))
    rounds, losses = history.series("loss", "train")
    assert rounds[-1] == 20
    assert losses[-1].mean() < losses[0].mean()


@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e2, 1e5])
def test_fedavg_without_work_learns_in_any_unit_of_the_features(unit: float) -> None:
    """In Python as in a configuration; a step of 0.02 was right for one unit alone."""
    rng, found = np.random.default_rng(0), {}
    for name in "abcd":
        x = rng.normal(size=(60, 3))
        found[name] = unit * x, (x.sum(axis=1) + 0.3 * rng.normal(size=60) > 0).astype(int)
    clients = ef.simulate(ef.Federation.from_clients(found, classes=2), "logistic")
    history = ef.train(ef.FedAvg(), clients, rounds=20, evaluate=["train"])
    losses = history.series("loss", "train")[1].mean(axis=1)
    assert losses[-1] < (0.7 if unit < 1 else 0.2)  # equal probabilities have log 2 = 0.693
    assert any("a step size measured" in event.get("reason", "") for event in history.events)
    given = ef.LocalSGD(lr=0.02, steps=10, batch_size=50)  # as the default, but said
    told = ef.train(ef.FedAvg(given), clients, rounds=1).events
    assert not any("a step size measured" in event.get("reason", "") for event in told)


def test_the_largest_eigenvalue_is_found_where_the_first_gradient_is_small_by_luck() -> None:
    """Nearly balanced labels: |f'|^2 <= 2 L f says little of L, and long walks flatten out."""
    x = np.linspace(-1.0, 1.0, 52)[:, None] * 1e-3
    y = np.arange(52) % 2
    y[0] = 1
    made = ef.Federation.from_clients({"a": (x, y), "b": (x, y)})
    clients = ef.simulate(made, "logistic", "logistic")
    found = measured_smoothness(clients, clients.initial(Stream(0)), Stream(0))
    assert found == pytest.approx(0.25, rel=0.3)  # of the bias: p (1 - p)
