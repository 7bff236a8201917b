"""A trained model predicts: what the module says, by name, for whatever rows come."""

from __future__ import annotations

import importlib.util
import json
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from tests.problems import classification, regression
from torch import nn

import equifed as ef
from equifed.algorithms import FedAvg, ScaffPD
from equifed.contract.local import LocalSGD
from equifed.data.federation import Federation
from equifed.data.split import DataError
from equifed.engines.simulate import simulate
from equifed.models import build
from equifed.models.export import DESCRIPTION, ONNX, PREPARATION, export
from equifed.models.predictor import Predictor
from equifed.objectives import Average
from equifed.training.files import RunFolderError
from equifed.training.folder import RunFolder
from equifed.training.history import History
from equifed.training.loop import train

DOUBLE = torch.float64


def draw_table(rows: int = 90, seed: int = 0) -> pd.DataFrame:
    """Two sites with gaps, text and scales over many orders."""
    draw = np.random.default_rng(seed)
    age, income = draw.normal(50, 12, rows), draw.lognormal(10, 1, rows)
    arm = draw.choice(["a", "b", "c"], rows)
    score = (age - 50) / 12 + (arm == "a") - (income > 30000) + draw.normal(0, 0.4, rows)
    age[draw.random(rows) < 0.1] = np.nan
    columns = {"site": draw.choice(["n", "s"], rows), "age": age, "income": income, "arm": arm}
    return pd.DataFrame({**columns, "ill": np.where(score > 0, "yes", "no")})


def fit(model="logistic", loss="auto", seed=0, **options) -> tuple[Federation, History]:
    data = Federation.from_table(draw_table(), client="site", target="ill", dtype="float64")
    clients = simulate(data, model, loss, l2=0.1, dtype=DOUBLE, **options)
    return data, train(ScaffPD(Average()), clients, rounds=5, seed=seed)


def predict_by_hand(data: Federation, history: History, rows: pd.DataFrame) -> np.ndarray:
    """The scores of a linear model, from its named parameters and the prepared features."""
    weight, bias = (history.parameters[f"1.{name}"].numpy() for name in ("weight", "bias"))
    return data.preparation.apply(rows) @ weight.T + bias


@pytest.mark.parametrize("loss", ["cross_entropy", "logistic"])
def test_probabilities_and_classes_are_those_of_the_parameters(loss) -> None:
    data, history = fit(loss=loss)
    rows, predictor = draw_table(seed=1), history.predictor()
    scores = predict_by_hand(data, history, rows)
    margin = scores[:, 0] if loss == "logistic" else scores[:, 1] - scores[:, 0]
    np.testing.assert_allclose(predictor.decision_function(rows), margin, rtol=1e-10)
    proba = predictor.predict_proba(rows)
    np.testing.assert_allclose(proba[:, 1], 1 / (1 + np.exp(-margin)), rtol=1e-10)
    np.testing.assert_allclose(proba.sum(axis=1), 1.0)
    assert predictor.classes == ("no", "yes")
    assert (predictor.predict(rows) == np.where(margin > 0, "yes", "no")).all()
    assert predictor.feature_names == data.preparation.feature_names
    assert predictor.columns == ("age", "income", "arm")


def test_frames_mappings_files_and_arrays_say_the_same(tmp_path) -> None:
    predictor = fit()[1].predictor()
    rows = draw_table(seed=2)
    wanted = predictor.predict_proba(rows)
    rows.to_csv(tmp_path / "rows.csv", index=False)
    shuffled = rows[["income", "ill", "arm", "site", "age"]]  # matched by name
    without = rows[["arm", "age", "income"]]
    array = rows[["age", "income", "arm"]].to_numpy(dtype=object)
    mapping = {name: rows[name].tolist() for name in rows}
    for given in (shuffled, without, array, mapping, tmp_path / "rows.csv"):
        np.testing.assert_allclose(predictor.predict_proba(given), wanted, rtol=1e-9)
    reversed_rows = predictor.predict_proba(rows.iloc[::-1])
    np.testing.assert_allclose(reversed_rows[::-1], wanted)


def test_arrays_without_a_preparation_and_many_classes() -> None:
    data = classification(classes=3)
    history = train(FedAvg(LocalSGD(lr=0.1, steps=2)), simulate(data, "mlp"), rounds=1)
    predictor, X = history.predictor(), data.train.inputs
    assert predictor.classes == ("0", "1", "2") and predictor.feature_names is None
    with torch.no_grad():
        scores = history.model(torch.tensor(X, dtype=torch.float32))
    np.testing.assert_allclose(predictor.decision_function(X), scores.numpy(), rtol=1e-6)
    np.testing.assert_allclose(predictor.predict_proba(X), scores.softmax(1).numpy(), rtol=1e-5)
    assert predictor.predict(X).tolist() == [str(k) for k in scores.argmax(1).tolist()]


@pytest.mark.parametrize("outputs", [1, 2])
def test_regression_gives_values_in_the_shape_of_the_targets(outputs) -> None:
    data = regression(outputs=outputs)
    history = train(ScaffPD(Average()), simulate(data, "linear", dtype=DOUBLE), rounds=3)
    found = history.predictor().predict(data.train.inputs)
    assert found.shape == data.train.targets.shape
    for method in ("predict_proba", "decision_function"):
        with pytest.raises(ValueError, match="has no classes"):
            getattr(history.predictor(), method)(data.train.inputs)


def test_the_model_is_the_one_given_out_and_the_users_module_is_untouched() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    before = {name: p.clone() for name, p in module.state_dict().items()}
    clients = simulate(classification(), module, engine="loop")
    history = train(FedAvg(LocalSGD(lr=0.5, steps=2)), clients, rounds=2)
    assert all(torch.equal(p, before[n]) for n, p in module.state_dict().items())
    for name, p in history.model.state_dict().items():
        assert torch.equal(p, history.parameters[name])
    assert not history.model.training  # no dropout in predictions
    again = pickle.loads(pickle.dumps(history))
    X = classification().train.inputs
    np.testing.assert_array_equal(again.predictor().predict(X), history.predictor().predict(X))


def test_losses_without_probabilities_say_so() -> None:
    predictor = fit(loss="hinge")[1].predictor()
    assert set(predictor.predict(draw_table())) <= {"no", "yes"}
    with pytest.raises(ValueError, match="gives scores, not probabilities"):
        predictor.predict_proba(draw_table())


# -- what is wrong is said -------------------------------------------------------------------------


def test_wrong_rows_are_refused_one_by_one() -> None:
    predictor, rows = fit()[1].predictor(), draw_table()
    with pytest.raises(DataError, match="no column 'income'"):
        predictor.predict(rows.rename(columns={"income": "Income"}))
    with pytest.raises(DataError, match=r"3 columns \(age, income, arm\), got .* shape \(2, 2\)"):
        predictor.predict(np.zeros((2, 2)))
    X = classification().train.inputs
    clients = simulate(classification(), "logistic")
    arrays = train(FedAvg(LocalSGD(lr=0.1, steps=1)), clients, rounds=1).predictor()
    with pytest.raises(DataError, match=r"samples of shape \(3,\), got an array of shape \(3,\)"):
        arrays.predict(X[0])
    with pytest.raises(DataError, match=r"not finite at \[0, 1\]"):
        arrays.predict(np.array([[0.0, np.nan, 1.0]]))
    with pytest.raises(DataError, match="whose columns have no names"):
        arrays.predict(pd.DataFrame(X))
    with pytest.raises(DataError, match="must be numbers"):
        arrays.predict([["a", "b", "c"]])
    with pytest.raises(ValueError, match="The module is not available"):
        History(("a",)).predictor()


# -- exported --------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("model", ["logistic", "mlp"])
def test_an_exported_program_predicts_the_same(tmp_path, model) -> None:
    predictor = fit(model)[1].predictor()
    written = export(predictor, tmp_path, program=True)
    assert all(path.exists() for path in written)
    again = ef.load_predictor(tmp_path, trust=True)
    for rows in (draw_table(1, seed=5), draw_table(50, seed=6)):
        np.testing.assert_allclose(
            again.predict_proba(rows), predictor.predict_proba(rows), rtol=1e-12
        )
        assert (again.predict(rows) == predictor.predict(rows)).all()
    assert again.feature_names == predictor.feature_names


@pytest.mark.long
@pytest.mark.parametrize(("name", "shape"), [("cnn", (1, 12, 12)), ("lstm", (7,))])
def test_images_and_tokens_are_exported_too(tmp_path, name, shape) -> None:
    module, tokens = build(name, shape, 3).eval(), name == "lstm"
    predictor = Predictor(module, shape, ("a", "b", "c"), "softmax", tokens=tokens)
    export(predictor, tmp_path, program=True)
    draw = np.random.default_rng(0)
    for rows in (1, 9):
        size = (rows, *shape)
        X = draw.integers(0, 3, size) if tokens else draw.standard_normal(size)
        wanted = predictor.predict_proba(X)
        np.testing.assert_allclose(
            ef.load_predictor(tmp_path, trust=True).predict_proba(X), wanted, rtol=1e-6
        )


@pytest.mark.long
def test_an_exported_program_needs_its_own_preparation(tmp_path) -> None:
    export(fit()[1].predictor(), tmp_path)
    with pytest.raises(RunFolderError, match="export the run again with --torch"):
        ef.load_predictor(tmp_path, trust=True)
    export(fit()[1].predictor(), tmp_path, program=True)
    told = json.loads((tmp_path / PREPARATION).read_text())
    told["columns"][0]["scale"] *= 2
    (tmp_path / PREPARATION).write_text(json.dumps(told))
    with pytest.raises(RunFolderError, match="is not the preparation that the run"):
        ef.load_predictor(tmp_path, trust=True)
    (tmp_path / PREPARATION).unlink()
    with pytest.raises(RunFolderError, match=r"preparation.json is missing"):
        ef.load_predictor(tmp_path, trust=True)
    (tmp_path / DESCRIPTION).write_text('{"format": 99}')
    with pytest.raises(RunFolderError, match="format 99"):
        ef.load_predictor(tmp_path, trust=True)


@pytest.mark.skipif(importlib.util.find_spec("onnxscript") is not None, reason="it is there")
def test_onnx_without_its_packages_says_what_to_install(tmp_path) -> None:
    with pytest.raises(ValueError, match="onnx and onnxscript"):
        export(fit()[1].predictor(), tmp_path, onnx=True)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_an_onnx_model_gives_the_same_scores(tmp_path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    predictor, rows = fit("mlp")[1].predictor(), draw_table(7, seed=8)
    export(predictor, tmp_path, onnx=True)
    session = runtime.InferenceSession(tmp_path / ONNX, providers=["CPUExecutionProvider"])
    features = predictor.features(rows)
    (scores,) = session.run(["scores"], {"features": features})
    wanted = predictor.decision_function(rows)
    np.testing.assert_allclose(scores[:, 1] - scores[:, 0], wanted, rtol=1e-9)


@pytest.mark.long
def test_folders_of_plain_training_predict_again(tmp_path):
    data = ef.Federation.from_table(draw_table(90), "site", "ill", test=0.3)
    clients = ef.simulate(data, "logistic", l2=0.01, own="bias")
    folder = RunFolder(tmp_path / "folder", clients.names)
    folder.create()
    work = ef.ScaffPD(ef.objectives.Average())
    history = ef.train(work, clients, rounds=2, evaluate=["test"], folder=folder)
    history.save(tmp_path / "saved")
    rows = draw_table(30, seed=1)
    wanted = history.predictor().predict_proba(rows)
    for place in ("folder", "saved"):
        found = ef.load_predictor(tmp_path / place)
        np.testing.assert_array_equal(found.predict_proba(rows), wanted)
        again = ef.History.load(tmp_path / place)
        np.testing.assert_array_equal(again.predictor().predict_proba(rows), wanted)


def test_a_module_of_ones_own_is_asked_for_by_name(tmp_path):
    data = ef.Federation.from_table(draw_table(90), "site", "ill", test=0.3)
    module = nn.Sequential(nn.Linear(data.input_shape[0], 2))
    history = ef.train(ef.FedAvg(ef.LocalSGD(lr=0.1, steps=2)), ef.simulate(data, module), rounds=2)
    history.save(tmp_path / "run")
    with pytest.raises(RunFolderError, match=r"load_predictor\(folder, model=module\)"):
        ef.load_predictor(tmp_path / "run")
    rows = draw_table(30, seed=1)
    found = ef.load_predictor(tmp_path / "run", model=module)
    np.testing.assert_array_equal(
        found.predict_proba(rows), history.predictor().predict_proba(rows)
    )
    assert not any(p is q for p in module.parameters() for q in found.module.parameters())
    with pytest.raises(ValueError, match=r"0\.weight"):
        ef.load_predictor(tmp_path / "run", model=nn.Sequential(nn.Linear(3, 2)))
