"""A fair head on frozen features as a data set of your own, and an adapter."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from equifed.contract.streams import Stream
from equifed.runs.build import build_run
from equifed.runs.config import RunConfig

pytestmark = pytest.mark.long
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_head_on_a_frozen_body_of_your_own_is_certified(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "adapter.py", tmp_path / "adapter.py")
    algorithm = {"name": "scaff-pd", "objective": {"name": "chi-square", "rho": 0.1}}
    model = {"name": "linear", "l2": 0.01, "loss": "cross_entropy"}
    table = {"rounds": 2, "data": "adapter:frozen_features", "model": model, "algorithm": algorithm}
    config = RunConfig.from_dict(table, base=tmp_path)
    assert any("adapter" in address for address, _ in config.loaded_code)
    built = build_run(config)
    assert built.federation.input_shape == (32,)
    assert built.federation.train.inputs.min() >= 0  # behind a ReLU
    assert built.train().rounds[-1].numbers["gap"] >= 0


def test_an_adapter_trains_and_sends_its_own_parameters_alone() -> None:
    built = build_run(RunConfig.read(EXAMPLES / "adapter.toml", ["rounds=3"]))
    clients: Any = built.clients
    x = clients.initial(Stream(0))
    named = clients.parameters(x)
    sent = ["body.a", "body.b", "head.bias", "head.weight"]
    assert sorted(set(named) - set(sent)) == ["body.frozen.bias", "body.frozen.weight"]
    assert len(x) == sum(named[name].numel() for name in sent)
    frozen = clients.model.module.body.frozen.weight.clone()
    history = built.train()
    assert torch.equal(clients.model.module.body.frozen.weight, frozen)
    assert history.parameters["body.b"].abs().max() > 0
