"""From a run folder to predictions, new numbers and files: the commands and their Python twins."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tomli_w
from markdown_it import MarkdownIt
from safetensors.torch import load_file
from sklearn.metrics import accuracy_score, log_loss
from tests.models.test_predictor import draw_table
from typer.testing import CliRunner, Result

import equifed as ef
from equifed.cli.main import app
from equifed.cli.model import _write_cells
from equifed.report import write_card
from equifed.report.page import plain
from equifed.runs.config import RunConfig
from equifed.training.files import RunFolderError

pytestmark = pytest.mark.long

OWN = """
from torch import nn

def Net(input_shape, outputs, width=4):
    return nn.Sequential(nn.Linear(input_shape[0], width), nn.Tanh(), nn.Linear(width, outputs))
"""


def equifed(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def describe_run(folder: Path, **model: Any) -> dict[str, Any]:
    draw_table(120).to_csv(folder / "train.csv", index=False)
    data = {"name": "table", "path": "train.csv", "client": "site", "target": "ill"}
    return {
        "rounds": 6,
        "data": {**data, "holdout": {"test": 0.3}},
        "model": {"name": "logistic", "l2": 0.01, **model},
        "algorithm": {"name": "scaff-pd", "objective": "worst-case"},
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on a table, whose training file is gone."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "run.toml").write_text(tomli_w.dumps(describe_run(folder)))
    history = ef.run(RunConfig.read(folder / "run.toml"), folder / "out")
    (folder / "train.csv").unlink()  # whoever predicts need not have it
    rows = draw_table(seed=1)
    np.save(folder / "wanted.npy", history.predictor().predict_proba(rows))
    rows.to_csv(folder / "rows.csv", index=False)
    return folder


def test_rows_are_prepared_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from equifed.cli.model import _predict_columns
    from equifed.data.columns import read_columns
    from equifed.data.preparation import Preparation
    from equifed.runs.load import load_predictor

    apply, calls = Preparation.apply, list[Any]()

    def count(*given: Any) -> Any:
        calls.append(given)
        return apply(*given)

    monkeypatch.setattr(Preparation, "apply", count)
    found = _predict_columns(load_predictor(run / "out"), read_columns(run / "rows.csv"), None)
    assert len(calls) == 1 and "probability_yes" in found


def test_predictions_are_those_in_process_row_by_row(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "predictions.csv"
    result = equifed("predict", run / "out", run / "rows.csv", "--out", out)
    assert result.exit_code == 0, result.stderr
    found = pd.read_csv(out)
    assert list(found) == ["prediction", "probability_no", "probability_yes"]
    wanted = np.load(run / "wanted.npy")
    np.testing.assert_allclose(found[["probability_no", "probability_yes"]], wanted, rtol=1e-12)
    assert (found["prediction"] == np.array(["no", "yes"])[wanted.argmax(axis=1)]).all()


def test_kept_columns_come_first_and_no_spreadsheet_computes_them(
    run: Path, tmp_path: Path
) -> None:
    rows = pd.read_csv(run / "rows.csv").assign(note="=1+1", shift="-2.5")
    rows.loc[0, "note"] = None
    rows.to_csv(tmp_path / "rows.csv", index=False)
    plain = equifed("predict", run / "out", tmp_path / "rows.csv").stdout.splitlines()
    kept = equifed("predict", run / "out", tmp_path / "rows.csv", "--keep").stdout.splitlines()
    assert kept[0] == ",".join([*rows, plain[0]])
    assert kept[1].endswith(",,-2.5," + plain[1])
    assert all(k.endswith(",'=1+1,-2.5," + p) for k, p in zip(kept[2:], plain[2:], strict=True))


def test_the_target_need_not_be_there(run: Path, tmp_path: Path) -> None:
    rows = pd.read_csv(run / "rows.csv").drop(columns=["ill", "site"]).assign(note="x")
    rows.to_csv(tmp_path / "rows.csv", index=False)
    plain = equifed("predict", run / "out", tmp_path / "rows.csv").stdout
    assert plain == equifed("predict", run / "out", run / "rows.csv").stdout


def test_a_loaded_history_has_the_model(run: Path) -> None:
    history = ef.History.load(run / "out")
    weights = load_file(run / "out" / "model.safetensors")
    assert {name: p.tolist() for name, p in history.model.state_dict().items()} == {
        name: p.tolist() for name, p in weights.items()
    }
    rows = pd.read_csv(run / "rows.csv")
    found = ef.load_predictor(run / "out").predict_proba(rows)
    np.testing.assert_allclose(found, np.load(run / "wanted.npy"), rtol=1e-12)


def test_new_rows_are_measured_beside_training(run: Path) -> None:
    result = equifed("evaluate", run / "out", run / "rows.csv", "--json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)["metrics"]
    rows, history = pd.read_csv(run / "rows.csv"), ef.History.load(run / "out")
    predictor = history.predictor()
    for client in told["accuracy"]["clients"]:
        mine = rows[rows["site"] == client["client"]]
        assert client["rows"] == len(mine)
        now = accuracy_score(mine["ill"], predictor.predict(mine))
        assert client["now"] == pytest.approx(now)
        then = history.per_client("accuracy", "test")[client["client"]]
        assert client["at_training"] == then
        assert client["change"] == pytest.approx(now - then)
    for client in told["loss"]["clients"]:
        mine = rows[rows["site"] == client["client"]]
        wanted = log_loss(mine["ill"], predictor.predict_proba(mine))
        assert client["now"] == pytest.approx(wanted, rel=1e-5)
    shown = equifed("evaluate", run / "out", run / "rows.csv").stdout
    assert "at training (test)" in shown and "accuracy" in shown


@pytest.mark.filterwarnings("always::equifed.data.split.DataWarning")  # the command prints it
def test_clients_that_took_no_part_have_no_number_at_training(run: Path, tmp_path: Path) -> None:
    rows = pd.read_csv(run / "rows.csv").assign(site="new")
    rows.to_csv(tmp_path / "rows.csv", index=False)
    result = equifed("evaluate", run / "out", tmp_path / "rows.csv", "--json")
    assert "new took no part in training" in result.stderr
    told = json.loads(result.stdout)
    (client,) = told["metrics"]["accuracy"]["clients"]
    assert client["client"] == "new" and client["at_training"] is None
    rows.drop(columns="site").to_csv(tmp_path / "rows.csv", index=False)
    result = equifed("evaluate", run / "out", tmp_path / "rows.csv", "--client", "nobody")
    assert result.exit_code == 0, result.stderr


def test_new_categories_and_new_clients_are_said_beside_predictions(
    run: Path, tmp_path: Path
) -> None:
    rows, predictor = pd.read_csv(run / "rows.csv"), ef.load_predictor(run / "out")
    column = next(c for c in predictor.preparation.columns if hasattr(c, "categories"))
    plain = equifed("predict", run / "out", run / "rows.csv")
    rows.assign(**{column.name: "unheard", "site": "new"}).to_csv(tmp_path / "r.csv", index=False)
    strange = equifed("predict", run / "out", tmp_path / "r.csv")
    assert plain.exit_code == strange.exit_code == 0 and "unheard" not in plain.stderr
    assert f"{len(rows)} row(s) hold 'unheard'" in strange.stderr
    assert "new took no part in training" in strange.stderr


def test_exported_files_predict_the_same_and_the_card_tells(run: Path, tmp_path: Path) -> None:
    result = equifed("export", run / "out", "--out", tmp_path, "--torch", "--card")
    assert result.exit_code == 0, result.stderr
    again = equifed("predict", tmp_path, run / "rows.csv", "--trust").stdout
    assert again == equifed("predict", run / "out", run / "rows.csv").stdout
    card, history = (tmp_path / "MODEL_CARD.md").read_text(), ef.History.load(run / "out")
    for split in ("train", "test"):
        for name, value in history.per_client("accuracy", split).items():
            line = next(text for text in card.splitlines() if text.startswith(f"| {name} |"))
            assert f"{value:.4g} (n=" in line
    for words in (
        "`worst-case`", "`scaff-pd`", "no, yes", "age, age missing, income", "scaled to mean 0",
        history.describe_certificate() or "", "Served worst by test accuracy", "Nothing is known",
    ):  # fmt: skip
        assert words in card, words


@pytest.mark.parametrize("loss", ["auto", "hinge"])
def test_own_modules_are_found_by_their_address(tmp_path: Path, loss: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    outputs = {} if loss == "auto" else {"loss": loss}
    table = describe_run(tmp_path, name="own:Net", width=3, **outputs)
    (tmp_path / "run.toml").write_text(tomli_w.dumps(table))
    history = ef.run(RunConfig.read(tmp_path / "run.toml"), tmp_path / "out")
    rows = draw_table(seed=2)
    again = ef.History.load(tmp_path / "out").predictor(trust=True)
    wanted = history.predictor().decision_function(rows)
    np.testing.assert_allclose(again.decision_function(rows), wanted, rtol=1e-12)
    assert again.link == history.predictor().link
    rows.to_csv(tmp_path / "rows.csv", index=False)
    done = equifed("predict", tmp_path / "out", tmp_path / "rows.csv", "--trust")
    head = done.stdout.splitlines()[0]
    assert ("probability_yes" in head) == (loss == "auto")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.drop(columns="age"), "no column 'age'"),
        (lambda rows: rows.drop(columns="ill"), "no column 'ill', the target"),
        (lambda rows: rows.assign(ill="maybe"), "none of the classes"),
        (lambda rows: rows.drop(columns="site"), "no column 'site'"),
        (lambda rows: rows.assign(site=[None, *rows["site"][1:]]), "lacks a value in row 1"),
    ],
)
def test_tables_that_cannot_be_measured_are_refused(
    run: Path, tmp_path: Path, change: Any, message: str
) -> None:
    change(pd.read_csv(run / "rows.csv")).to_csv(tmp_path / "rows.csv", index=False)
    result = equifed("evaluate", run / "out", tmp_path / "rows.csv")
    assert result.exit_code == 2 and message in result.stderr
    assert "Traceback" not in result.stderr


def test_runs_on_arrays_predict_in_python_and_say_so(tmp_path: Path) -> None:
    table = {
        "rounds": 1,
        "data": {"name": "fashion-three", "train": 5},
        "model": {"name": "logistic"},
        "algorithm": {"name": "scaff-pd", "objective": "average"},
    }
    history = ef.run(RunConfig.from_dict(table), tmp_path / "out")
    predictor, X = ef.load_predictor(tmp_path / "out"), ef.load("fashion-three").train.inputs[:9]
    assert predictor.classes == ("T-shirt", "pullover", "shirt")
    wanted = history.predictor().predict_proba(X)
    np.testing.assert_allclose(predictor.predict_proba(X), wanted, rtol=1e-12)
    draw_table().to_csv(tmp_path / "rows.csv", index=False)
    for command in ("predict", "evaluate"):
        result = equifed(command, tmp_path / "out", tmp_path / "rows.csv")
        assert result.exit_code == 2 and "trained on arrays" in result.stderr
    result = equifed("export", tmp_path / "out", "--card")
    assert result.exit_code == 0, result.stderr
    card = (tmp_path / "out" / "export" / "MODEL_CARD.md").read_text()
    assert "No preparation is part of the model" in card and "Zalando" in card


def test_folders_that_hold_no_model_say_why(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="is not a folder"):
        ef.load_predictor(tmp_path / "nothing")
    with pytest.raises(RunFolderError, match=r"has no config\.toml"):
        ef.load_predictor(tmp_path)
    history = ef.History.load(run / "out")
    history.save(tmp_path / "saved")
    assert ef.History.load(tmp_path / "saved").model is not None
    (tmp_path / "saved" / "config.toml").unlink()
    (tmp_path / "saved" / "summary.json").unlink()  # else its checksums tell
    with pytest.raises(RunFolderError, match=r"has no config\.toml: only runs of a configuration"):
        _ = ef.History.load(tmp_path / "saved").model
    (tmp_path / "saved" / "config.toml").write_text((run / "out" / "config.toml").read_text())
    (tmp_path / "saved" / "model.safetensors").unlink()
    with pytest.raises(RunFolderError, match="has not ended; resume it with: equifed resume"):
        ef.load_predictor(tmp_path / "saved")


def test_a_model_card_shows_names_as_they_are(tmp_path: Path) -> None:
    """No name of a client is a link, a picture, a cell or a line of its own."""
    name = "[x](http://a) <img src=b>|`c`\n# d"
    samples = (np.arange(12.0).reshape(6, 2), [0, 1] * 3)
    data = ef.Federation.from_clients({name: samples, "south": samples}, classes=2)
    clients = ef.simulate(data, "logistic", l2=0.1)
    history = ef.train(ef.FedAvg(), clients, rounds=1, progress=False)
    config = {"algorithm": {"name": "fedavg"}, "seed": 0,
              "model": {"name": "logistic", "loss": "cross_entropy", "l2": 0.1}}  # fmt: skip
    told = {"data": {"name": name, "sha256": "0", "source": {"url": name}}, "versions": {}}
    shape = {"classes": [name, "b"], "input_shape": [2], "clients": list(history.names)}
    card = write_card(history, config, told, shape, None)
    shown = r"\[x\](http://a) \<img src=b\>\|\`c\`\\n# d"
    assert f"| {shown} |" in card and f"one of the classes {shown}, b" in card
    assert f"- Url: {shown}" in card and f"- Name: {shown};" in card
    bare = card.replace(shown, "")
    assert "img" not in bare and "\n# d" not in bare and "http" not in bare


@pytest.mark.parametrize(
    "name", ["_x_", "__x__", "a_b_c", "a__b", "~~x~~", "&copy; a", "&amp;", "a & b", "![x](y)",
             "<!-- x", "&#60;b&#62;", "x\\", "***", "`a``b`", "a|b", "\\|", "[a](javascript:b)"],
)  # fmt: skip
def test_markdown_shows_a_name_as_it_is(name: str) -> None:
    shown = (
        MarkdownIt("commonmark")
        .enable(["table", "strikethrough"])
        .render(f"| head |\n|---|\n| {plain(name)} |\n")
    )
    assert html.unescape(shown.split("<td>")[1].split("</td>")[0]) == name


def test_kept_cells_are_no_formulas() -> None:
    """Numbers stay numbers, signs included; a text that a spreadsheet would compute does not."""
    cells = ["=1+1", "+1-1", "-2+3", "@SUM(A1)", "-7", "+7"]
    assert _write_cells(cells) == ["'=1+1", "'+1-1", "'-2+3", "'@SUM(A1)", "-7", "+7"]
