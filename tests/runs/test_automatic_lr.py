"""Local step sizes that a configuration leaves open."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from equifed.runs import run as runs
from equifed.runs.config import RunConfig


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
