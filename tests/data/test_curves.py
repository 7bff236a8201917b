"""Columns with bends: where they bend, what they become, and that new rows become the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import SplineTransformer

import equifed as ef
from equifed.data.curves import LEAST, LEVELS, bend, count_below, find_knots, find_lines
from equifed.data.preparation import NumberColumn, Preparation
from equifed.data.split import DataError
from equifed.runs import candidates
from equifed.runs.candidates import Point, solve

Array = np.ndarray[Any, Any]


def draw(seed: int = 0, rows: int = 300, sites: int = 4) -> dict[str, list[Any]]:
    rng = np.random.default_rng(seed)
    age, dose = rng.uniform(20, 80, rows), rng.lognormal(4, 1, rows)
    value = 100 + np.abs(age - 50) + rng.normal(size=rows)
    return {
        "site": [f"s{k}" for k in rng.integers(0, sites, rows)],
        "age": age.tolist(),
        "dose": [None if k % 17 == 0 else v for k, v in enumerate(dose.tolist())],
        "arm": rng.choice(list("abc"), rows).tolist(),
        "male": rng.integers(0, 2, rows).tolist(),
        "value": value.tolist(),
    }


def read(table: Any, **more: Any) -> ef.Federation:
    given: dict[str, Any] = {"client": "site", "target": "value", "task": "regression"}
    made: ef.Federation = ef.Federation.from_table(table, **{**given, "test": 0.25, **more})
    return made


# -- knots ------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw_values", ["normal", "lognormal", "uniform", "cauchy"])
def test_knots_are_the_quantiles(draw_values: str) -> None:
    """Oracle: numpy's quantiles; a mark is off by a share of the deviation at most."""
    rng = np.random.default_rng(1)
    make: Any = {"normal": rng.normal, "lognormal": rng.lognormal, "uniform": rng.uniform,
            "cauchy": rng.standard_cauchy}[draw_values]  # fmt: skip
    values = np.asarray(1e5 + 3 * make(size=(400, 2)))
    knots = find_knots(lambda m: count_below(values, m), values.mean(0), values.std(0))
    there = np.isfinite(knots)
    expected = np.quantile(values, LEVELS, axis=0, method="inverted_cdf").T
    error = np.abs(knots - expected)[there] / np.repeat(values.std(0), there.sum(1))
    assert there.any() and error.max() <= 4 / 16**3 + 1e-12
    if draw_values != "cauchy":  # of which one row may be as far away as all others together
        assert there.all()


def test_clients_tell_counts_and_their_sum_is_all_that_knots_need() -> None:
    values = np.random.default_rng(2).normal(size=(90, 3))
    parts = np.split(values, [20, 35, 70])

    def add(marks: Array) -> Array:
        return np.asarray(np.sum([count_below(part, marks) for part in parts], axis=0))

    given = values.mean(0), values.std(0)
    whole = find_knots(lambda m: count_below(values, m), *given)
    np.testing.assert_array_equal(find_knots(add, *given), whole)


@pytest.mark.parametrize(
    ("values", "bends"),
    [([0, 1] * 50, 0), ([7] * 100, 0), ([0] * 60 + list(range(1, 41)), 1),
     ([1, 2, 3, 4, 5] * 20, 3), ([1] * 70 + [2] * 4 + [3] * 26, 0)],
    ids=["two values", "constant", "mostly zero", "five values", "nearly two values"],
)  # fmt: skip
def test_there_is_no_bend_without_rows_on_both_sides(values: list[float], bends: int) -> None:
    column = np.array(values, dtype=np.float64)[:, None]
    knots = find_knots(lambda m: count_below(column, m), column.mean(0), column.std(0))[0]
    knots = knots[np.isfinite(knots)]
    assert len(knots) == bends
    share = [min((column < k - 0.01).mean(), (column > k + 0.01).mean()) for k in knots]
    assert all(s >= LEAST for s in share)


# -- what columns become ----------------------------------------------------------------------


@pytest.mark.parametrize("rules", [{}, {"per_client": True}, {"scale": None}, {"missing": "mean"}])
def test_new_rows_are_prepared_as_the_federation_was(rules: dict[str, Any]) -> None:
    table = draw()
    bent = bend(read(table, split=np_split(table), test=0, **rules))
    prepared = bent.preparation
    assert prepared is not None and bent.test is not None
    held = {k: [v for v, s in zip(cells, table["split"], strict=True) if s == "test"]
            for k, cells in table.items()}  # fmt: skip
    features = prepared.apply(held)
    owners = np.array(held["site"])
    for i, name in enumerate(bent.names):
        np.testing.assert_allclose(bent.test.client(i)[0], features[owners == name], 1e-6, 1e-5)


def np_split(table: dict[str, list[Any]]) -> str:
    table["split"] = np.random.default_rng(5).choice(["train", "test"], len(table["age"])).tolist()
    return "split"


def test_a_bend_is_the_excess_over_its_knot_and_titles_tell_it_in_the_columns_unit() -> None:
    data = read(draw())
    bent = bend(data)
    prepared = bent.preparation
    assert data.preparation is not None and prepared is not None
    age = prepared.columns[0]
    assert isinstance(age, NumberColumn) and len(age.knots) == 3
    lines = find_lines(prepared)
    np.testing.assert_array_equal(bent.train.inputs[:, lines], data.train.inputs)
    years = bent.train.inputs[:, 0] * age.scale + age.centre
    for k, title in enumerate(prepared.feature_names[1:4], start=1):
        knot = float(title.removeprefix("age above "))
        excess = np.maximum(years - knot, 0) / age.scale
        np.testing.assert_allclose(bent.train.inputs[:, k], excess, atol=1e-3)


def test_a_preparation_with_knots_is_read_back_and_others_are_written_as_before() -> None:
    plain, bent = read(draw()).preparation, bend(read(draw())).preparation
    assert plain is not None and bent is not None
    assert Preparation.from_json(bent.to_json()) == bent
    assert (plain.to_json()["format"], bent.to_json()["format"]) == (2, 3)
    assert "knots" not in str(plain.to_json())
    assert plain.digest() != bent.digest()


def test_images_have_no_columns_to_bend() -> None:
    data = ef.Federation.from_clients({"a": (np.zeros((4, 2, 2)), [0, 1, 0, 1])})
    with pytest.raises(DataError, match="have none"):
        bend(data)


# -- what is solved ---------------------------------------------------------------------------


def test_the_average_with_curves_is_ridge_on_columns_made_by_hand() -> None:
    """Oracle: scikit-learn's Ridge on explicit hinges; every client counts the same."""
    data, l2 = read(draw()), 0.01
    bent = bend(data)
    assert bent.preparation is not None
    blocks, start = [], 0
    for column in bent.preparation.columns:
        z = data.train.inputs[:, start : start + 1]
        knots = getattr(column, "knots", ())
        width = len(column.titles) - len(knots)
        blocks += [z, *(np.where(z > k, z - k, 0) for k in knots)]
        blocks.append(data.train.inputs[:, start + 1 : start + width])
        start += width
    rows = np.hstack([*blocks, np.ones((len(data.train), 1))])
    weights = np.repeat(1 / data.train.sizes / len(data), data.train.sizes)
    ridge = Ridge(alpha=l2 / 2, fit_intercept=False, tol=1e-12).fit(
        rows, data.train.targets, sample_weight=weights
    )
    history = next(solve(bent, [Point(l2, curves=True)], ()))
    predictor: Any = history.predictor()
    made = predictor.answer(bent.train.inputs)[:, 0]
    np.testing.assert_allclose(made, rows @ ridge.coef_, atol=1e-6)


def test_without_a_penalty_it_is_the_spline_of_scikit_learn() -> None:
    """Oracle: the B-splines of degree one with the same knots span the same functions."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(400, 1))
    y = np.sin(2 * x[:, 0]) + 0.1 * rng.normal(size=400)
    bent = bend(ef.Federation.from_clients({"a": (x[:200], y[:200]), "b": (x[200:], y[200:])}))
    assert bent.preparation is not None
    column = bent.preparation.columns[0]
    assert isinstance(column, NumberColumn)
    ends = [x.min(), *column.knots, x.max()]
    spline = SplineTransformer(degree=1, knots=np.array(ends)[:, None], extrapolation="linear")
    theirs = make_pipeline(spline, LinearRegression()).fit(x, y)
    made = next(solve(bent, [Point(1e-13, curves=True)], ())).predictor()
    new = np.linspace(-5, 5, 50)[:, None]
    np.testing.assert_allclose(made.predict(new), theirs.predict(new), atol=1e-6)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, values in {
        "L2": (1e-3,),
        "RHOS": (0.3,),
        "OWN_L2": (1e-2,),
        "OWN_RHOS": (0.3,),
    }.items():
        monkeypatch.setattr(candidates, name, values)


@pytest.mark.usefixtures("few")
def test_fit_takes_curves_where_they_serve_and_keeps_to_lines_without_them() -> None:
    table = draw()
    given: dict[str, Any] = {"client": "site", "target": "value", "task": "regression"}
    lines, curves = (ef.fit(table, **given, curves=c) for c in (False, True))
    assert "with curves" in curves.choice and "curves" not in lines.choice
    assert not any("curves" in row["candidate"] for row in lines.rows)
    best = {row["candidate"]: row for row in curves.rows}
    for row in lines.rows:  # lines are solved as they were, beside curves
        for split in ("validation", "test"):
            assert best[row["candidate"]][split]["loss"] == pytest.approx(row[split]["loss"])
    assert curves.chosen.tried == 2 * lines.chosen.tried
    new = {k: v[:20] for k, v in table.items()}
    error = [np.abs(s.predictor().predict(new) - new["value"]).mean() for s in (lines, curves)]
    assert error[1] < 0.5 * error[0]


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_neither_unit_changes_a_curve(factor: float) -> None:
    table = draw()
    scaled = {**table, "age": [factor * v for v in table["age"]],
              "value": [factor * v for v in table["value"]]}  # fmt: skip
    given: dict[str, Any] = {"client": "site", "target": "value", "task": "regression"}
    ours, theirs = (ef.fit(t, **given, curves=True) for t in (table, scaled))
    assert ours.chosen.point == theirs.chosen.point
    predicted = theirs.predictor().predict(scaled) / factor
    np.testing.assert_allclose(predicted, ours.predictor().predict(table), rtol=1e-5)


@pytest.mark.usefixtures("few")
def test_a_kept_own_model_is_a_line_in_the_columns_of_the_curve() -> None:
    """Oracle: the client's own line, solved apart by least squares with its penalty."""
    table = draw(rows=2000, sites=10)
    odd = [s == "s3" for s in table["site"]]
    rng = np.random.default_rng(9)
    pairs = zip(table["age"], table["value"], odd, strict=True)
    table["value"] = [3 * a + 0.01 * rng.normal() if o else v for a, v, o in pairs]
    given: dict[str, Any] = {"client": "site", "target": "value", "task": "regression"}
    served = ef.fit(table, **given, features=["age"], curves=True, keep_own=True)
    assert served.chosen.keepers == ("s3",) and "with curves" in served.choice
    new = {"site": ["s3"] * 3, "age": [20.0, 50.0, 80.0]}
    np.testing.assert_allclose(served.predictor().predict(new), [60.0, 150.0, 240.0], rtol=0.02)
    row = next(row for row in served.rows if row["chosen"])
    record = served.history.last("loss", "test")
    assert record is not None and row["test"]["loss"] == pytest.approx(record.values.mean())


@pytest.mark.parametrize(
    "more", [{"model": "mlp"}, {"privacy": ef.Privacy(epsilon=3.0, rows=4.0, loss=3.0, rounds=2)}]
)
def test_curves_are_refused_where_they_are_not_tried(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="curves=True is for linear models without privacy"):
        ef.fit(ef.load("heart-disease"), curves=True, **more)
