"""Predictions with own parts: each client's own, the mean for strangers, and never in silence."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from tests.models.test_predictor import draw_table
from torch import nn
from typer.testing import CliRunner

from equifed.algorithms import FedAvg
from equifed.cli.main import app
from equifed.contract.local import LocalSGD
from equifed.data.federation import Federation
from equifed.data.split import DataError
from equifed.engines.distributed import DistributedClients
from equifed.engines.simulate import simulate
from equifed.models.export import export
from equifed.models.predictor import Predictor
from equifed.runs.config import RunConfig
from equifed.runs.load import evaluate, load_predictor
from equifed.runs.run import run
from equifed.training.files import RunFolderError
from equifed.training.loop import train

pytestmark = pytest.mark.long

KINDS = {
    "profile": ("logistic", {"own": "bias", "l2": 0.1}),
    "joint": ("mlp", {"own": "head"}),
}


def fit(kind: str, engine=simulate):
    """Train with own parts; the sites' shares of ill people differ, so that own parts do."""
    rows = draw_table()
    rows.loc[(rows["site"] == "n") & (rows.index % 3 > 0), "ill"] = "yes"
    data = Federation.from_table(rows, client="site", target="ill", dtype="float64")
    model, options = KINDS[kind]
    clients = engine(data, model, dtype=torch.float64, **options)
    history = train(FedAvg(LocalSGD(lr=0.2, steps=4)), clients, rounds=4, evaluate=("train",))
    return rows, clients, history


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", [simulate, DistributedClients])
def test_predictions_per_client_are_those_that_were_evaluated(kind, engine) -> None:
    rows, clients, history = fit(kind, engine)
    predictor = history.predictor()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        right = predictor.predict(rows) == rows["ill"]
    record = history.last("accuracy", "train")
    for name, accuracy in zip(clients.names, record.values, strict=True):
        mine = rows["site"] == name
        assert right[mine].mean() == pytest.approx(accuracy)
        unnamed = rows[mine].drop(columns="site")
        scores = predictor.decision_function(rows)[mine]
        for given in (name, [name] * mine.sum()):
            np.testing.assert_array_equal(predictor.decision_function(unnamed, given), scores)
        alone = predictor.for_client(name)
        np.testing.assert_allclose(alone.decision_function(unnamed), scores, rtol=1e-12)


def test_strangers_take_the_mean_which_is_said() -> None:
    rows, _, history = fit("profile")
    predictor = history.predictor()
    mean = Predictor(predictor.module, predictor.input_shape, predictor.classes, "softmax",
                     predictor.preparation)  # fmt: skip
    (bias,) = history.own.values()
    assert not torch.allclose(bias[0], bias[1])
    own = next(name for name in history.own)
    assert torch.allclose(predictor.module.get_parameter(own), bias.mean(0))
    wanted = mean.predict_proba(rows)
    with pytest.warns(UserWarning, match="but 'x' took no part in training: the shared"):
        np.testing.assert_array_equal(predictor.predict_proba(rows, "x"), wanted)
    with pytest.warns(UserWarning, match="it is not said whose rows these are"):
        found = predictor.predict_proba(rows.drop(columns="site"))
    np.testing.assert_array_equal(found, wanted)
    mixed = [name if k % 2 else "x" for k, name in enumerate(rows["site"])]
    with pytest.warns(UserWarning, match="'x'"):
        found = predictor.predict_proba(rows, mixed)
    np.testing.assert_allclose(found[::2], wanted[::2])
    np.testing.assert_allclose(found[1::2], predictor.predict_proba(rows)[1::2])
    with pytest.raises(DataError, match="client names 2 rows, there are 90"):
        predictor.predict(rows.drop(columns="site").values[:, :3], client=["n", "s"])


def test_one_clients_model_refuses_the_rows_of_others(tmp_path) -> None:
    rows, _, history = fit("profile")
    predictor = history.predictor()
    with pytest.raises(ValueError, match=r"own parts .* export one client's"):
        export(predictor, tmp_path)
    mine = predictor.for_client("n")
    with pytest.raises(DataError, match="model of 'n', with its own part; got a row of 's'"):
        mine.predict(rows)
    with pytest.raises(DataError, match="no client 'x'"):
        predictor.for_client("x")
    with pytest.raises(ValueError, match="no own parts"):
        mine.for_client("n")
    assert export(mine, tmp_path)


def test_tied_own_parameters_and_wrong_ones() -> None:
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    second.weight = first.weight
    own = {"0.weight": torch.stack([torch.eye(2), 3 * torch.eye(2)])}
    tied = Predictor(nn.Sequential(first, second), (2,), clients=("a", "b"), own=own)
    rows = np.array([[1.0, 2.0], [1.0, 2.0]], dtype=np.float32)
    np.testing.assert_allclose(tied._outputs(rows, ["b", "a"]), [[9, 18], [1, 2]])
    assert tied._outputs(rows[:0], []).shape[0] == 0
    with pytest.raises(ValueError, match="one row for each of 1 clients"):
        Predictor(nn.Sequential(first), (2,), clients=("a",), own=own)
    with pytest.raises(ValueError, match=r"no parameter '0\.weight'"):
        Predictor(first, (2,), clients=("a", "b"), own=own)


def test_a_run_folder_predicts_and_measures_per_client(tmp_path) -> None:
    rows, _, _ = fit("profile")
    table = tmp_path / "table.csv"
    rows.to_csv(table, index=False)
    data = {"name": "table", "path": str(table), "client": "site", "target": "ill"}
    config = {
        "algorithm": {"name": "fedavg", "local": {"lr": 0.2, "steps": 4}},
        "data": {**data, "holdout": {"test": 0, "validation": 0}},
        "model": {"name": "logistic", "own": "bias", "l2": 0.1, "dtype": "float64"},
        "rounds": 3,
    }
    history = run(RunConfig.from_dict(config), tmp_path / "run")
    record = history.last("accuracy", "train")
    predictor = load_predictor(tmp_path / "run")
    np.testing.assert_allclose(
        predictor.predict_proba(rows), history.predictor().predict_proba(rows), rtol=1e-12
    )
    drift = {d.metric: d for d in evaluate(tmp_path / "run", rows)}
    for name, before in zip(history.names, record.values, strict=True):
        mine = rows["site"] == name
        assert (predictor.predict(rows[mine]) == rows["ill"][mine]).mean() == pytest.approx(before)
    now = {row["client"]: row["now"] for row in drift["accuracy"].rows}
    assert [now[n] for n in history.names] == pytest.approx(record.values.tolist())
    for row in drift["loss"].rows:  # the run had float32
        assert row["now"] == pytest.approx(row["at_training"], rel=1e-6)
    with pytest.warns(UserWarning, match="'x' took no part"):
        evaluate(tmp_path / "run", rows.drop(columns="site"), client="x")
    runner, out = CliRunner(), tmp_path / "out.csv"
    rows.drop(columns="site").to_csv(table, index=False)
    command = ["predict", str(tmp_path / "run"), str(table), "--client", "n", "--out", str(out)]
    assert runner.invoke(app, command).exit_code == 0
    told = [line.split(",")[0] for line in out.read_text().splitlines()[1:]]
    assert told == predictor.predict(rows, "n").tolist()
    command = ["export", str(tmp_path / "run")]
    refused = runner.invoke(app, command)
    assert refused.exit_code != 0 and "--client NAME" in " ".join(refused.output.split())
    assert runner.invoke(app, [*command, "--client", "n"]).exit_code == 0
    (tmp_path / "run" / "own.safetensors").unlink()
    with pytest.raises(RunFolderError, match=r"own\.safetensors"):
        load_predictor(tmp_path / "run")
