"""A run folder that version 0.2 wrote is read, used and reported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import equifed as ef
from equifed.cli.main import app
from equifed.runs.config import RunConfig
from equifed.training.history import History

FOLDER = Path(__file__).parent / "folder-0.2"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDER, tmp_path / "run"))


def test_what_ran_has_its_own_name_now(folder: Path) -> None:
    """The second-order method ran under SCAFF-PD's name."""
    config = RunConfig.read(folder / "config.toml")
    assert config.algorithm["name"] == "fair-newton"
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace('metric = "auto"', 'metric = "none"'))
    assert RunConfig.read(folder / "config.toml").algorithm["name"] == "scaff-pd"


def test_its_model_predicts_as_it_was_measured(folder: Path) -> None:
    predictor, history = ef.load_predictor(folder), History.load(folder)
    test = ef.load("heart-disease").test
    assert test is not None
    for i, name in enumerate(history.names):
        inputs, labels = test.client(i)
        correct = np.asarray(predictor.predict(inputs)) == np.array(["healthy", "ill"])[labels]
        assert correct.mean() == pytest.approx(history.per_client("accuracy")[name])


@pytest.mark.parametrize(
    "command", [["report"], ["export", "--out", "x"], ["evidence", "--out", "e"]]
)
def test_commands_take_it(
    command: list[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [command[0], str(folder), *command[1:]])
    assert result.exit_code == 0, result.output


def test_it_is_of_version_0_2() -> None:
    assert json.loads((FOLDER / "run.json").read_text())["versions"]["equifed"] == "0.2.0.dev0"
