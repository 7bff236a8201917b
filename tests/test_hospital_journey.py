"""From a hospital table to predictions, in at most twelve lines or three commands."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path

import pandas as pd
import pytest
from tests.hospitals import SIZES, draw_hospitals, write_hospitals
from typer.testing import CliRunner

import equifed as ef
from equifed.cli.main import app
from equifed.runs.load import read_preparation
from equifed.training.files import StoredRun


def journey(table: Path, new: pd.DataFrame, out: Path) -> pd.Series:
    data = ef.Federation.from_table(table, "hospital", "outcome", test=0.25)
    clients = ef.simulate(data, "logistic", l2=1e-4)
    fair = ef.ScaffPD(ef.objectives.ChiSquare(0.1))
    history = ef.train(fair, clients, rounds=60, evaluate=["test"], every=20)
    history.save(out)
    ef.write_report(history, out / "report.html", per_client=True)
    return pd.Series(history.predictor().predict(new))


def check_served(folder: Path, predicted: pd.Series, new: pd.DataFrame) -> None:
    """Check every hospital against its majority class, the predictions, and the pages."""
    history = ef.History.load(folder)
    accuracy, details = history.per_client("accuracy", "test"), history.details
    assert details is not None
    shares = dict(zip(history.names, details.majorities(), strict=True))
    assert set(accuracy) == set(shares) == set(SIZES)
    for name, value in accuracy.items():
        assert value > shares[name], name
    agree = predicted.to_numpy() == new["outcome"].to_numpy()
    assert len(predicted) == len(new) and agree.mean() > 0.8
    assert "scaled to mean 0 and deviation 1" in (folder / "report.html").read_text()
    pages = sorted((folder / "report-clients").glob("*.html"))
    assert len(pages) == len(SIZES)


@pytest.mark.long
def test_twelve_lines_of_python(tmp_path: Path) -> None:
    body = ast.parse(inspect.getsource(journey)).body[0]
    assert isinstance(body, ast.FunctionDef)
    assert len(inspect.getsource(journey).splitlines()) - 1 + 2 <= 12  # with the two imports
    new = draw_hospitals(seed=1)
    with pytest.warns(UserWarning):  # of columns that were left out
        found = journey(write_hospitals(tmp_path / "hospitals.csv"), new, tmp_path / "run")
    check_served(tmp_path / "run", found, new)
    told = json.loads((tmp_path / "run" / "run.json").read_text())
    prepared = read_preparation(StoredRun(tmp_path / "run"))
    assert prepared is not None and prepared.digest() == told["data"]["preparation"]


@pytest.mark.long
def test_three_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_hospitals(tmp_path / "hospitals.csv")
    new = draw_hospitals(seed=1)
    new.drop(columns="outcome").to_csv("new.csv", index=False)
    for command in (
        "init hospitals.csv --out run.toml",
        "run run.toml --out run --report",
        "predict run new.csv --out predictions.csv",
    ):
        done = CliRunner().invoke(app, command.split())
        assert done.exit_code == 0, done.stderr
    predicted = pd.read_csv("predictions.csv")["prediction"]
    check_served(tmp_path / "run", predicted, new)
