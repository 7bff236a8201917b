"""A preparation fitted by adding equals the one that sees all rows; new rows are met alike."""

import datetime
import json
import warnings
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.impute import MissingIndicator, SimpleImputer
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from equifed.data import DataError, DataWarning, Federation, Preparation, Prepare, columns
from equifed.data.columns import Columns, clean_column
from equifed.data.fit import ask_kinds, combine, describe_rows, fit_preparation
from equifed.data.preparation import Target

TARGET = Target("y", ("a", "b"))


def clean(rows) -> Columns:
    return Columns({name: clean_column(list(values)) for name, values in rows.items()})


def fit(rows, **options) -> Preparation:
    """Fit through JSON, as between machines: what is sent is all there is."""
    rows = {c: clean(mine) for c, mine in rows.items()}
    features = list(next(iter(rows.values())))
    asked = ask_kinds(features, TARGET, Prepare(**options))
    while not isinstance(asked, Preparation):
        sent = json.loads(json.dumps(asked))
        answers = {c: json.loads(json.dumps(describe_rows(r, sent, c))) for c, r in rows.items()}
        asked = combine(sent, answers)
    return asked


def pool(rows) -> pd.DataFrame:
    return pd.concat([pd.DataFrame(r) for r in rows.values()], ignore_index=True)


def wild(seed=0, gaps=0.1, sizes=(200, 31, 7, 1)):
    """Numbers of scales over ten orders, with large offsets, unequal clients, and gaps."""
    draw = np.random.default_rng(seed)
    scales, offsets = 10.0 ** np.arange(-5, 6, 2), np.array([1e3, 0, -1e2, 1e4, 1e9, 1e12])
    rows = {}
    for k, size in enumerate(sizes):
        x = offsets + scales * (draw.standard_normal((size, 6)) + k)
        x[draw.random(x.shape) < gaps] = np.nan
        rows[f"c{k}"] = {
            f"x{j}": [None if np.isnan(v) else float(v) for v in x[:, j]] for j in range(6)
        }
    return rows


@pytest.mark.parametrize("seed", range(3))
def test_sums_give_what_scikit_learn_gives_on_all_rows(seed):
    rows = wild(seed)
    pooled = pool(rows)
    ours = fit(rows, missing="indicator").apply(pooled)
    scaler = StandardScaler().fit(pooled)
    expected = SimpleImputer(strategy="mean").fit_transform(scaler.transform(pooled))
    marks = MissingIndicator(features="all").fit_transform(pooled)
    np.testing.assert_allclose(ours[:, 0::2], expected, rtol=0, atol=2e-3)  # its sums round
    np.testing.assert_array_equal(ours[:, 1::2], marks)


@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_scaling_and_filling_agree_to_ten_digits(offset):
    draw = np.random.default_rng(1)
    x = offset + 10.0 ** np.arange(-2, 6) * draw.standard_normal((300, 8))
    x[draw.random(x.shape) < 0.2] = np.nan
    table = pd.DataFrame(x, columns=[f"x{k}" for k in range(8)])
    rows = {c: {k: [None if np.isnan(v) else v for v in table[k][part]] for k in table}
            for c, part in {"a": slice(250), "b": slice(250, 300)}.items()}  # fmt: skip
    scaler, imputer = StandardScaler().fit(table), SimpleImputer(strategy="mean").fit(table)
    expected = scaler.transform(pd.DataFrame(imputer.transform(table), columns=table.columns))
    np.testing.assert_allclose(fit(rows, missing="mean").apply(table), expected, atol=1e-10)


def test_two_passes_are_exact_where_one_is_not():
    rows = wild(2, gaps=0.0)
    pooled, fitted = pool(rows), fit(rows)
    for column in fitted.columns:
        exact = [Fraction(v) for v in pooled[column.name]]
        mean = sum(exact) / len(exact)
        variance = sum((v - mean) ** 2 for v in exact) / len(exact)
        assert column.centre == pytest.approx(float(mean), rel=1e-15)
        assert column.scale == pytest.approx(float(variance) ** 0.5, rel=1e-10)
    offset = pooled["x5"].to_numpy()
    once = (offset**2).mean() - offset.mean() ** 2
    assert abs(np.sqrt(max(once, 0)) / fitted.columns[5].scale - 1) > 1e-3


words = st.lists(st.sampled_from(["red", "blue", "green", "other", "rare"]), max_size=12)


@settings(deadline=None, max_examples=60)
@given(st.lists(words, min_size=1, max_size=4), st.integers(1, 6), words)
def test_categories_are_those_of_the_one_hot_encoder(lists, least, new):
    pooled = [w for words in lists for w in words if w != "other"]
    if not pooled:
        return
    rows = {str(k): {"x": [w for w in ws if w != "other"]} for k, ws in enumerate(lists)}
    encoder = OneHotEncoder(
        min_frequency=least, handle_unknown="infrequent_if_exist", sparse_output=False
    ).fit(np.array(pooled, dtype=object)[:, None])
    fitted = fit(rows, categorical=["x"], min_count=least)
    for values in (pooled, [*new, "never seen"]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = encoder.transform(np.array(values, dtype=object)[:, None])
        np.testing.assert_array_equal(fitted.apply({"x": values}), expected)


def test_the_order_of_clients_and_their_number_do_not_matter():
    rows = wild(3)
    turned = {c: rows[c] for c in reversed(rows)}
    assert fit(rows).digest() == fit(turned).digest()
    whole = {"all": {k: [v for r in rows.values() for v in r[k]] for k in rows["c0"]}}
    np.testing.assert_allclose(
        fit(whole).apply(pool(rows)), fit(rows).apply(pool(rows)), rtol=0, atol=1e-3
    )


def test_every_client_by_its_own_numbers():
    rows = {"a": {"x": [1.0, 3.0]}, "b": {"x": [100.0, None]}, "c": {"x": [None]}}
    fitted = fit(rows, per_client=True, missing="mean")
    common = fit(rows, missing="mean").columns[0]
    np.testing.assert_allclose(fitted.apply({"x": [1.0, 3.0]}, "a").ravel(), [-1, 1])
    # a constant client keeps the common scale, one without values both common numbers
    np.testing.assert_allclose(fitted.apply({"x": [100.0 + common.scale]}, "b"), [[1.0]])
    np.testing.assert_allclose(fitted.apply({"x": [common.centre]}, "c"), [[0.0]])
    # what is missing is filled at the client's own level, whatever its unit
    np.testing.assert_allclose(fitted.apply({"x": [None]}, "b"), [[0.0]])
    np.testing.assert_allclose(fitted.apply({"x": [None]}, "c"), [[0.0]], atol=1e-15)
    sites = {"site": ["b", "a"], "x": [100.0, 3.0]}
    column = Preparation(fitted.columns, fitted.target, "site", fitted.scale, fitted.missing)
    np.testing.assert_allclose(column.apply(sites).ravel(), [0, 1])
    with pytest.raises(DataError, match=r"client 'z'; pass client=NAME, one of a, b, c"):
        fitted.apply({"x": [1.0]}, "z")
    again = Preparation.from_json(json.loads(json.dumps(fitted.to_json())))
    assert again == fitted and again.digest() == fitted.digest()
    older = {**fitted.to_json(), "target": {**fitted.to_json()["target"], "unit": None}}
    assert Preparation.from_json(older) == fitted  # fields that are gone are passed over


TABLE = {
    "site": ["n"] * 12 + ["s"] * 8,
    "age": [*range(30, 40), *range(30, 35), None, 50, 50, 52, 53],
    "sex": ["f", "m"] * 10,
    "smokes": [True, False, None, True] * 5,
    "when": [f"2024-01-{d:02d}" for d in range(1, 21)],
    "id": [f"p{k}" for k in range(20)],
    "ill": ["no", "yes"] * 10,
}


def own(**options) -> Federation:
    with pytest.warns(DataWarning) as told:
        made = Federation.from_table(TABLE, "site", "ill", **options)
    assert {w for w in ("'when'", "'id'") if any(w in str(t.message) for t in told)} == {
        "'when'",
        "'id'",
    }
    return made


def test_a_table_is_prepared_and_the_preparation_travels():
    fed = own()
    fitted = fed.preparation
    expected = ("age", "age missing", "sex=f", "sex=m", "smokes=False", "smokes=True",
                "smokes missing")  # fmt: skip
    assert fitted.feature_names == expected
    assert set(dict(fitted.left_out)) == {"when", "id"}
    assert "scaled to mean 0" in fed.source["preparation"]
    np.testing.assert_array_equal(
        np.float32(fitted.apply(pd.DataFrame(TABLE)[:12])), fed.train.client(0)[0]
    )
    assert fitted.encode_target(TABLE["ill"])[:2].tolist() == [0, 1]
    assert fed.subset(["s"]).preparation == fitted
    assert fed.with_inputs({"train": fed.train.inputs}).preparation is None


def test_pandas_categories_are_categories_and_whole_numbers_are_not():
    frame = pd.DataFrame({"c": ["a"] * 6, "x": pd.Categorical([1, 2] * 3), "y": [0, 1] * 3})
    made = Federation.from_table(frame, "c", "y", min_count=1)
    assert made.preparation.feature_names == ("x=1", "x=2")
    frame["x"] = frame["x"].astype(int)
    plain = Federation.from_table(frame, "c", "y")
    assert plain.preparation.feature_names == ("x",)
    # the same rows from a file with gaps, where pandas makes floats of whole numbers
    gaps = made.preparation.apply(pd.DataFrame({"x": [1.0, np.nan, 2.0]}))
    assert gaps.tolist() == [[1, 0], [0, 0], [0, 1]]


REFUSED = {
    "no column": ({"sex": ["f"]}, r"no column 'age'; it has sex\. The model was trained on age"),
    "text": ({"age": ["old"], "sex": ["f"], "smokes": [True]}, r"'age' is not numeric .*'old' in"),
    "comma": ({"age": ["1,5"], "sex": ["f"], "smokes": [True]}, "decimal point"),
    "inf": ({"age": [np.inf], "sex": ["f"], "smokes": [True]}, "'age' holds inf in 1 row"),
    "lengths": ({"age": [1, 2], "sex": ["f"], "smokes": [True]}, "the same length"),
}


@pytest.mark.parametrize(("table", "message"), REFUSED.values(), ids=REFUSED)
def test_new_rows_that_do_not_fit_are_refused(table, message):
    with pytest.raises(DataError, match=message):
        own().preparation.apply(table)


def test_new_rows_in_another_order_and_with_more_columns():
    fitted = own().preparation
    new = {"smokes": ["TRUE"], "ill": ["no"], "sex": ["x"], "id": ["q"], "age": ["44"]}
    row = dict(zip(fitted.feature_names, fitted.apply(new)[0], strict=True))
    assert (row["smokes=True"], row["sex=f"] + row["sex=m"], row["age missing"]) == (1, 0, 0)
    assert fitted.apply({**new, "note": ["!"]}).shape == (1, 7)
    strict = own(unknown="error").preparation
    with pytest.raises(DataError, match=r"'sex': row 1 holds 'x', which is none of .* f, m"):
        strict.apply(new)
    with pytest.raises(DataError, match=r"row 2 holds 'maybe', which is none of the classes no"):
        fitted.encode_target(["no", "maybe"])


def test_dropped_rows_mean_that_new_gaps_are_refused():
    fitted = own(missing="drop").preparation
    with pytest.raises(DataError, match=r"'age' lacks a value in row 1.*missing='drop'"):
        fitted.apply({"age": [None], "sex": ["f"], "smokes": [True]})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([*map(str, range(30)), "<5"], "'x' holds 30 numbers and 1 texts; list it in numeric"),
        ([*range(21), *["unknown"] * 5], "21 numbers and 5 texts.*or in categorical"),
        (["1e400", "2"], "holds inf"),
        ([1e200, -1e200], "too large to be added or squared"),
        ([None, None], "no training row has a value"),
    ],
)
def test_columns_that_are_neither_are_refused(values, message):
    with pytest.raises(DataError, match=message):
        fit({"a": {"x": values}})


def test_numbers_here_and_text_there_are_refused():
    with pytest.raises(DataError, match="numbers at client 'a' and text or dates at client 'b'"):
        fit({"a": {"x": [1, 2]}, "b": {"x": ["low"]}})


def test_a_constant_column_is_shifted_only():
    fitted = fit({"a": {"x": [0.1] * 7}, "b": {"x": [0.1] * 3}})
    np.testing.assert_allclose(fitted.apply({"x": [0.1, 1.1]}), [[0], [1]], atol=1e-15)


def test_rows_without_a_client_or_target_are_left_out_and_said():
    table = {"c": ["a", None, "a", "b"], "x": [1, 2, 3, 4], "y": ["u", "v", None, "v"]}
    with pytest.warns(DataWarning, match="1 row.* without a value in '[cy]'"):
        fed = Federation.from_table(table, "c", "y")
    assert len(fed.train) == 2
    with pytest.raises(DataError, match="lacks a value"):
        Federation.from_table(table, "c", "y", missing="error")


def test_a_site_may_hand_over_a_data_frame():
    frame = pd.DataFrame({"x": [1.0, np.nan, 3.0] * 5, "s": ["u", None, "v"] * 5})
    lists = {"x": [1, None, 3] * 5, "s": ["u", "", "v"] * 5}
    assert fit({"a": frame}) == fit({"a": lists})


def test_fit_preparation_is_the_loop():
    rows = {c: clean(mine) for c, mine in wild(5).items()}
    asked = ask_kinds(list(rows["c0"]), TARGET, Prepare())
    assert fit_preparation(rows, asked) == fit(rows)


def test_a_cell_is_cleaned_once(monkeypatch):
    seen = []
    clean = columns.clean_column
    monkeypatch.setattr(columns, "clean_column", lambda v: seen.append(len(v)) or clean(v))
    table = {"site": ["n", "s"] * 20, "age": [" 1", "NA"] * 20, "dose": [k / 7 for k in range(40)]}
    table["ill"] = ["no", "no", "yes", "yes"] * 10
    fed = Federation.from_table(table, client="site", target="ill", test=0.2)
    assert seen == [40, 40, 40, 40]
    new = columns.read_columns({"age": ["2", "?"], "dose": [1, 2]})
    assert columns.read_columns(new) is new
    assert fed.preparation.apply(new).shape == (2, 3) and len(seen) == 6


def test_a_list_in_a_held_out_cell_is_refused():
    table = {"site": ["n"] * 4, "x": [1, 2, 3, [4]], "y": ["a", "b"] * 2, "t": [1, 2, 3, 4]}
    with pytest.raises(DataError, match=r"'n': column 'x' is not numeric \(it has '\[4\]'"):
        Federation.from_table(table, "site", "y", features=["x"], time="t", test=0.25)


def test_numbers_and_dates_in_one_column_are_refused():
    table = {"site": ["n"] * 3, "x": [1, 2, datetime.date(2020, 1, 1)], "y": ["a", "b", "a"]}
    with pytest.raises(DataError, match=r"'n': column 'x' holds numbers and dates, e.g. '1' and"):
        Federation.from_table(table, "site", "y")
