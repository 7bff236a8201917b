"""``equifed fit`` from a table to predictions."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import equifed as ef
from equifed.algorithms.shelf.reweighted import Reweighted
from equifed.cli.main import app
from equifed.runs import candidates
from equifed.runs.build import build_module
from equifed.runs.config import RunConfig

ROWS = "site,age,arm,ill\n" + "".join(
    f"{site},{20 + 7 * k % 60}.{i}{k},{'ab'[k % 2]},{'yes' if k * 7 % 60 > 25 + k % 20 else 'no'}\n"
    for i, site in enumerate(("north", "south", "west"))
    for k in range(40)
)


@pytest.mark.parametrize("more", [[], ["--curves"]])
def test_a_table_becomes_a_model_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    for name, values in {"L2": (1e-2,), "RHOS": (0.3,), "OWN_L2": (1e-2,), "OWN_RHOS": ()}.items():
        monkeypatch.setattr(candidates, name, values)
    table, out = tmp_path / "clinics.csv", tmp_path / "run"
    table.write_text(ROWS)
    asked = [str(table), "--client", "site", "--target", "ill", "--out", str(out), "--json", *more]
    said = CliRunner().invoke(app, ["fit", *asked])
    assert said.exit_code == 0, said.stderr
    told = json.loads(said.stdout)
    assert told["choice"] and [row["chosen"] for row in told["candidates"]].count(True) == 1
    assert any("curves" in row["candidate"] for row in told["candidates"]) == bool(more)
    assert [site["client"] for site in told["sites"]] == ["north", "south", "west"]
    assert (out / "report.html").exists()
    predicted = ["predict", str(out), str(table), "--out", str(tmp_path / "found.csv")]
    assert CliRunner().invoke(app, predicted).exit_code == 0
    assert len((tmp_path / "found.csv").read_text().splitlines()) == 121


def test_fit_says_what_columns_were_taken_for_and_init_chooses_the_same(tmp_path: Path) -> None:
    """With numbers of rows that rounding tells apart: 0.15 and 0.2 (1 - 0.25) of 150."""
    rng, lines = np.random.default_rng(0), ["row,site,age,visits,ill"]
    for k in range(300):
        seen = ["1", "2", "3 or more"][k % 3]
        lines.append(f"{k},{'ab'[k % 2]},{rng.normal():.7f},{seen},{rng.integers(2)}")
    table = tmp_path / "t.csv"
    table.write_text("\n".join(lines))
    asked = [str(table), "--client", "site", "--target", "ill"]
    fitted = CliRunner().invoke(app, ["fit", *asked, "--out", str(tmp_path / "run")])
    begun = CliRunner().invoke(app, ["init", *asked, "--out", str(tmp_path / "run.toml")])
    assert fitted.exit_code == begun.exit_code == 0, fitted.stderr + begun.stderr
    for said in (fitted.stdout, begun.stdout):
        assert "left out    row: an identifier" in said and "'3 or more', taken as" in said
    chosen = next(line for line in begun.stdout.splitlines() if line.startswith("chosen"))
    assert chosen.removeprefix("chosen").strip() in fitted.stdout


def test_privacy_is_asked_for_with_its_bounds(tmp_path: Path) -> None:
    table, out = tmp_path / "clinics.csv", tmp_path / "run"
    table.write_text(ROWS)
    asked = ["fit", str(table), "--client", "site", "--target", "ill", "--out", str(out), "--json"]
    asked += ["--epsilon", "3"]
    half = CliRunner().invoke(app, asked)
    assert half.exit_code != 0 and "--rows-bound" in half.stderr
    asked += ["--rows-bound", "3", "--loss-bound", "2"]
    secret = CliRunner().invoke(app, asked)
    assert secret.exit_code != 0 and "--public-preparation" in secret.stderr
    said = CliRunner().invoke(app, [*asked, "--public-preparation"])
    assert said.exit_code == 0, said.stderr
    assert any("epsilon 3 at delta 1e-05" in note for note in json.loads(said.stdout)["notes"])
    assert CliRunner().invoke(app, ["privacy", str(out)]).exit_code == 0
    predicted = ["predict", str(out), str(table), "--out", str(tmp_path / "found.csv")]
    assert CliRunner().invoke(app, predicted).exit_code == 0


CONFIG = """
rounds = 4
data = "heart-disease"
[model]
name = "mlp"
hidden = [6]
[algorithm]
name = "fedavg"
local = {lr = 0.1, steps = 3}
"""


def run(*asked: object) -> Any:
    return CliRunner().invoke(app, ["fit", *map(str, asked)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "net.toml"
    path.write_text(CONFIG)
    return path


def test_a_configuration_is_fitted_as_in_python_and_predicts(file: Path, tmp_path: Path) -> None:
    said = run(file, "--out", tmp_path / "run", "--set", "seed=3", "--json")
    assert said.exit_code == 0, said.stderr
    told = json.loads(said.stdout)
    data, work = ef.load("heart-disease"), ef.LocalSGD(lr=0.1, steps=3, batch_size=50)
    config = RunConfig.read(file, ["seed=3"])
    net = build_module(config, data.input_shape, 2)
    expected = ef.fit(data, model=net, rounds=4, local=work, seed=3)
    assert told["choice"] == expected.choice and told["gain"] == expected.gain
    assert told["tried"] == 6 and told["seed"] == 3
    loaded = ef.load_predictor(tmp_path / "run")
    for name in data.names:
        rows = data.train.inputs[:5]
        found = loaded.predict_proba(rows, name)
        assert (found == expected.predictor().predict_proba(rows, name)).all()
    assert (tmp_path / "run" / "report.html").exists()


def test_an_interrupted_configuration_continues_and_others_are_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole, play = tmp_path / "run", tmp_path / "whole", Reweighted.round
    assert run(file, "--out", whole).exit_code == 0

    def stop(*given: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Reweighted, "round", stop)
    typed = ["equifed", "fit", str(file), "--out", str(out)]
    monkeypatch.setattr("sys.argv", typed)
    stopped = run(file, "--out", out)
    assert stopped.exit_code == 130
    assert f"Resume with: {shlex.join(typed)}" in " ".join(stopped.stderr.split())
    monkeypatch.setattr(Reweighted, "round", play)
    other = run(file, "--out", out, "--set", "rounds=5")
    assert other.exit_code != 0 and "other data or settings" in " ".join(other.stderr.split())
    assert run(file, "--out", out).exit_code == 0
    for name in ("model.safetensors", "choice.json", "metrics.csv"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()


def test_a_linear_configuration_takes_the_path_of_linear_models(tmp_path: Path) -> None:
    file = tmp_path / "linear.toml"
    file.write_text('rounds = 4\ndata = "heart-disease"\nmodel = "logistic"\nalgorithm = "fedavg"')
    said = run(file, "--out", tmp_path / "run", "--json")
    assert said.exit_code == 0, said.stderr
    assert json.loads(said.stdout)["choice"] == ef.fit(ef.load("heart-disease")).choice


def test_own_code_is_told_and_fitted(tmp_path: Path) -> None:
    (tmp_path / "ours.py").write_text(
        "from torch import nn\n"
        "def net(input_shape, outputs):\n"
        "    return nn.Sequential(nn.Linear(input_shape[0], 4), nn.Tanh(), nn.Linear(4, outputs))\n"
    )
    file = tmp_path / "own.toml"
    file.write_text(CONFIG.replace('"mlp"\nhidden = [6]', '"ours:net"'))
    said = run(file, "--out", tmp_path / "run")
    assert said.exit_code == 0, said.stderr
    assert "loads ours:net from" in said.stderr and "smallest of 6 candidates" in said.stdout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("hidden = [6]", "l2 = 0.1"), "model.l2: fit tries penalties"),
        (("hidden = [6]", 'own = "bias"'), "model.own: fit tries penalties"),
        (("lr = 0.1, ", ""), "algorithm.local.lr: fit measures it"),
    ],
)
def test_settings_that_a_fit_does_not_take_are_refused(
    change: tuple[str, str], message: str, file: Path, tmp_path: Path
) -> None:
    file.write_text(CONFIG.replace(*change))
    said = run(file, "--out", tmp_path / "run")
    assert said.exit_code != 0 and message in " ".join(said.stderr.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "option", [("--model", "mlp"), ("--client", "site"), ("--epsilon", "3"), ("--seed", "1")]
)
def test_options_of_a_table_do_not_go_with_a_configuration(
    option: tuple[str, str], file: Path
) -> None:
    assert "With a configuration only" in " ".join(run(file, *option).stderr.split())


def test_a_table_is_fitted_with_a_network(tmp_path: Path) -> None:
    table, out = tmp_path / "clinics.csv", tmp_path / "run"
    table.write_text(ROWS)
    asked = [table, "--client", "site", "--target", "ill", "--out", out, "--json"]
    said = run(*asked, "--model", "mlp", "--rounds", "3")
    assert said.exit_code == 0, said.stderr
    expected = ef.fit(
        table,
        client="site",
        target="ill",
        model="mlp",
        rounds=3,
        numeric=[],
        features=["age", "arm"],
    )
    assert json.loads(said.stdout)["choice"] == expected.choice
    predicted = ["predict", str(out), str(table), "--out", str(tmp_path / "found.csv")]
    assert CliRunner().invoke(app, predicted).exit_code == 0
    assert "--set changes a configuration" in run(*asked, "--set", "rounds=3").stderr


def test_an_interrupted_fit_says_the_same_command_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = ["equifed", "fit", "my table.csv", "--test", "0.3", "--curves"]
    monkeypatch.setattr("sys.argv", typed)

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("equifed.runs.fit.fit", stop)
    table = tmp_path / "t.csv"
    rows = [f"{'ab'[k % 2]},{k % 7},{k % 3 % 2}" for k in range(60)]
    table.write_text("\n".join(["owner,size,ill", *rows]))
    done = CliRunner().invoke(app, ["fit", str(table), "--client", "owner", "--target", "ill"])
    assert done.exit_code == 130
    assert f"Resume with: {shlex.join(typed)}" in done.stderr


def test_curves_go_with_a_linear_configuration_and_are_refused_with_a_network(
    file: Path, tmp_path: Path
) -> None:
    refused = run(file, "--out", tmp_path / "a", "--curves")
    assert refused.exit_code == 2 and "a network bends by itself" in refused.stderr
    refused = run(file, "--out", tmp_path / "b", "--rows-bound", "4")
    assert refused.exit_code == 2 and "With a configuration only" in " ".join(
        refused.stderr.split()
    )
    linear = tmp_path / "linear.toml"
    linear.write_text(
        'rounds = 5\n[data]\nname = "heart-disease"\n[model]\nname = "logistic"\n'
        '[algorithm]\nname = "fedavg"\n'
    )
    said = run(linear, "--out", tmp_path / "c", "--curves", "--json")
    assert said.exit_code == 0, said.stderr
    assert json.loads(said.stdout)["tried"] == 104
