"""Values of a regression are trained on in standard units, and told in those of the column."""

import json

import numpy as np
import pytest
import torch

import equifed as ef
from equifed.data import DataError, DataWarning, Federation, Preparation
from equifed.data.columns import read_columns
from equifed.data.fit import ask_kinds, describe_rows, fit_preparation
from equifed.data.fit_by_sums import fit_by_sums, to_vector
from equifed.data.preparation import Prepare, Target
from equifed.models.export import export
from equifed.runs.alone import alone
from equifed.runs.config import RunConfig
from equifed.runs.load import evaluate
from equifed.runs.personalise import personalise
from equifed.runs.run import run

DRAWN = np.random.default_rng(0)
ROWS = 90
TABLE = {
    "site": ["a", "b", "c"] * (ROWS // 3),
    "age": DRAWN.normal(50, 12, ROWS).round(1).tolist(),
    "dose": DRAWN.exponential(3, ROWS).round(3).tolist(),
    "split": ["train"] * 60 + ["test"] * 30,
}
TABLE["price"] = [
    5e5 + 2000 * age - 900 * dose + 30000 * (site == "b") + error
    for site, age, dose, error in zip(
        TABLE["site"], TABLE["age"], TABLE["dose"], DRAWN.normal(0, 4000, ROWS), strict=True
    )
]
PRICES = np.array(TABLE["price"])
SITES = np.array(TABLE["site"])
ERRORS = {"mse": lambda e: (e**2).mean(), "mae": lambda e: np.abs(e).mean(),
          "rmse": lambda e: np.sqrt((e**2).mean())}  # fmt: skip


def read(**options) -> Federation:
    return Federation.from_table(TABLE, "site", "price", split="split", dtype="float64", **options)


def train(data: Federation) -> ef.History:
    clients = ef.simulate(data, "linear", dtype=torch.float64)
    algorithm = ef.FairNewton(ef.objectives.Average())
    return ef.train(algorithm, clients, rounds=8, evaluate=["test"], metrics=[*ERRORS])


@pytest.fixture(scope="module")
def trained() -> ef.History:
    return train(read())


def test_training_values_have_mean_0_and_deviation_1():
    data = read()
    values, target = data.train.targets, data.preparation.target
    assert values.mean() == pytest.approx(0, abs=1e-12)
    assert values.std() == pytest.approx(1)
    assert target.centre == pytest.approx(PRICES[:60].mean())
    assert target.scale == pytest.approx(PRICES[:60].std())
    held = np.concatenate([PRICES[60:][SITES[60:] == name] for name in data.names])
    np.testing.assert_allclose(data.in_units(data.test.targets), held)
    again = data.with_inputs({label: part.inputs for label, part in data.splits().items()})
    np.testing.assert_allclose(again.test.targets, held)
    assert "target scaled" in data.source["preparation"]


def test_none_leaves_values_as_they_are():
    data = read(target_scale=None)
    assert not data.preparation.target.is_scaled
    assert set(data.train.targets) == set(PRICES[:60])
    with pytest.raises(ValueError, match="target_scale must be one of 'standard', None, got 3"):
        Prepare(target_scale=3)


def test_errors_are_those_of_predictions_in_the_unit(trained):
    rows = {name: values[60:] for name, values in TABLE.items()}
    apart = trained.trained.predict(rows) - PRICES[60:]
    for metric, measure in ERRORS.items():
        told = trained.per_client(metric, "test")
        for name in trained.names:
            assert told[name] == pytest.approx(measure(apart[SITES[60:] == name]), rel=1e-6)


def test_a_linear_model_is_the_same_with_and_without(trained):
    plain = train(read(target_scale=None))
    np.testing.assert_allclose(
        trained.trained.predict(TABLE), plain.trained.predict(TABLE), rtol=1e-6
    )
    for name, value in plain.per_client("mse", "test").items():
        assert trained.per_client("mse", "test")[name] == pytest.approx(value, rel=1e-4)


def test_own_models_and_own_parts_are_measured_in_the_unit(trained):
    ours, plain = (
        alone(data, "linear", dtype=torch.float64, tune=False, metric="mae", split="test")
        for data in (read(), read(target_scale=None))
    )
    np.testing.assert_allclose(ours.record.values, plain.record.values, rtol=1e-6)
    before = personalise(trained, read(), temperature=1.0, penalty=1.0).before
    np.testing.assert_allclose(before, list(trained.per_client("mse", "test").values()))


def test_a_program_answers_in_the_unit(trained, tmp_path):
    export(trained.trained, tmp_path, program=True)
    loaded = ef.load_predictor(tmp_path, trust=True)
    np.testing.assert_allclose(loaded.predict(TABLE), trained.trained.predict(TABLE))
    told = json.loads((tmp_path / "predictor.json").read_text())
    target = trained.trained.preparation.target
    assert told["target_scale"] == [target.centre, target.scale]


def test_a_run_is_evaluated_in_the_unit(tmp_path):
    table, held = tmp_path / "table.csv", {k: v[60:] for k, v in TABLE.items() if k != "split"}
    lines = [",".join(map(str, row)) for row in zip(*TABLE.values(), strict=True)]
    table.write_text("\n".join([",".join(TABLE), *lines]))
    data = {"name": "table", "path": str(table), "client": "site", "target": "price"}
    algorithm = {"name": "fair-newton", "objective": {"name": "average"}}
    told = {"rounds": 3, "data": {**data, "split": "split"}, "model": {"name": "linear"}}
    run(RunConfig.from_dict({**told, "algorithm": algorithm}), tmp_path / "run")
    history = ef.History.load(tmp_path / "run")
    found = next(d for d in evaluate(tmp_path / "run", held) if d.metric == "mse")
    for row in found.rows:
        assert row["now"] == pytest.approx(history.per_client("mse", "test")[row["client"]])
        assert row["now"] > 1e6
    more = {name: [*values, *TABLE[name][:4]] for name, values in held.items()}
    more["price"][-4:] = [None, "", "NA", np.nan]
    with pytest.warns(DataWarning, match="4 of 34 row.* without a value in 'price' are left out"):
        assert next(d for d in evaluate(tmp_path / "run", more) if d.metric == "mse") == found
    with pytest.raises(DataError, match="No row has a value in 'price'"):
        evaluate(tmp_path / "run", {**held, "price": [None] * 30})


def test_hidden_sums_fit_the_same_target():
    rows = {
        name: read_columns({k: np.array(TABLE[k])[name == SITES] for k in ("age", "price")})
        for name in ("a", "b", "c")
    }
    asked = ask_kinds(["age"], Target("price"), Prepare())

    def add(question):
        return np.sum(
            [to_vector(question, describe_rows(mine, question)) for mine in rows.values()], axis=0
        )

    hidden, plain = fit_by_sums(asked, add, lambda _: []), fit_preparation(rows, asked)
    assert hidden.target.is_scaled
    assert hidden.target.centre == pytest.approx(plain.target.centre, rel=1e-14)
    assert hidden.target.scale == pytest.approx(plain.target.scale, rel=1e-14)


def test_the_target_is_scaled_where_features_are_not():
    fitted = read(scale=None, missing="error").preparation
    assert {(c.centre, c.scale) for c in fitted.columns} == {(0.0, 1.0)}
    assert fitted.target.scale == pytest.approx(PRICES[:60].std())
    by_client = read(per_client=True).preparation
    assert by_client.by_client
    assert by_client.target == read().preparation.target


def test_preparations_of_format_1_have_plain_targets():
    told = read().preparation.to_json()
    assert Preparation.from_json(told) == read().preparation
    told |= {"format": 1, "target": {"name": "price", "classes": None}}
    assert Preparation.from_json(told).target == Target("price")
    with pytest.raises(ValueError, match="has the format 4"):
        Preparation.from_json({**told, "format": 4})
