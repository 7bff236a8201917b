"""``[model.features]``: heads on frozen modules, from run folders and own code; an adapter."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import equifed as ef
from equifed.contract.streams import Stream
from equifed.runs.build import build_run
from equifed.runs.config import ConfigError, RunConfig
from equifed.runs.run import run
from equifed.training.files import RunFolderError

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "examples"
WORK = {"name": "fedavg", "local": {"lr": 0.1, "steps": 5}}
HEAD: dict[str, Any] = {"name": "linear", "l2": 0.01, "loss": "cross_entropy"}


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A small network, trained into a folder."""
    model = {"name": "mlp", "hidden": [6]}
    table = {"rounds": 2, "data": "heart-disease", "model": model, "algorithm": WORK}
    run(table, tmp_path / "body", progress=False)
    return tmp_path / "body"


def head(features: dict[str, Any], **more: Any) -> dict[str, Any]:
    algorithm = {"name": "scaff-pd", "objective": {"name": "chi-square", "rho": 0.1}}
    model = {**HEAD, "features": features}
    return {"rounds": 2, "data": "heart-disease", "model": model, "algorithm": algorithm, **more}


def test_a_head_on_a_trained_run_sees_its_features(trained: Path) -> None:
    predictor = ef.load_predictor(trained)
    layers = [name for name, one in predictor.module.named_modules() if name and
              isinstance(one, torch.nn.ReLU)]  # fmt: skip
    data = ef.load("heart-disease")
    expected = ef.features(predictor.module, data, layer=layers[-1])
    table = head({"of": str(trained), "layer": layers[-1]})
    first = build_run(RunConfig.from_dict(table))
    np.testing.assert_array_equal(first.federation.train.inputs, expected.train.inputs)
    np.testing.assert_array_equal(first.federation.test.inputs, expected.test.inputs)
    history = first.train()
    assert history.rounds[-1].numbers["gap"] >= 0  # convex: certified


def test_a_folder_of_the_run_is_relative_to_the_file_and_the_run_goes_on(
    trained: Path, tmp_path: Path
) -> None:
    import tomli_w

    file = tmp_path / "head.toml"
    file.write_text(tomli_w.dumps(head({"of": "body"})))
    config = RunConfig.read(file)
    assert Path(config.model["features"]["of"]) == trained.absolute()
    run(config, tmp_path / "head", progress=False)
    assert RunConfig.read(tmp_path / "head" / "config.toml").model == build_run(config).config.model
    with pytest.raises(RunFolderError, match=r"holds the head on frozen features of .*body"):
        ef.load_predictor(tmp_path / "head")


def test_own_code_is_a_body_too(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "adapter.py", tmp_path / "adapter.py")
    config = RunConfig.from_dict(head({"of": "adapter:frozen_body"}), base=tmp_path)
    assert any("adapter" in address for address, _ in config.loaded_code)
    built = build_run(config)
    assert built.federation.input_shape == (32,)
    assert built.federation.train.inputs.min() >= 0  # behind a ReLU


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"of": "nowhere"}, r"model.features.of: .*nowhere holds no trained run"),
        ({"of": "no.such:Thing"}, r"model.features.of: no.such:Thing is not found"),
        ({}, r"model.features.of: is required"),
        ({"of": "x", "layers": "1"}, r"model.features.layers: .*did you mean 'layer'"),
        ({"of": "x", "chunk": 0}, r"chunk must be at least 1"),
    ],
)
def test_wrong_tables_are_refused_by_name(features: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_run(RunConfig.from_dict(head(features)))


def test_bodies_that_do_not_fit_are_refused(trained: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no layer 'neck'"):
        build_run(RunConfig.from_dict(head({"of": str(trained), "layer": "neck"})))
    with pytest.raises(ConfigError, match=r"takes samples of shape \(\d+,\), these data have"):
        build_run(RunConfig.from_dict(head({"of": str(trained)}, data="penguins")))


def test_a_run_that_would_load_code_is_not_frozen(tmp_path: Path) -> None:
    for name in ("adapter.py", "adapter.toml"):
        shutil.copy(EXAMPLES / name, tmp_path / name)
    run(RunConfig.read(tmp_path / "adapter.toml", ["rounds=1"]), tmp_path / "out", progress=False)
    with pytest.raises(ConfigError, match=r"would load code \(.*adapter"):
        build_run(RunConfig.from_dict(head({"of": str(tmp_path / "out")})))


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
