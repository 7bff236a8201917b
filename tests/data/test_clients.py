"""The same data arrives whole, whichever door it comes through."""

import csv

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from equifed.data import DataError, Federation

TABLE = {
    "site": ["n", "s", "n", "s", "n"],
    "age": [50, 61, 47, 33, 29],
    "dose": [0.5, 1.5, 2.5, 3.5, 4.5],
    "arm": ["x", "y", "x", "z", "z"],
    "ill": ["no", "yes", "no", "yes", "yes"],
}


def write_csv(path, table=TABLE):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([list(table), *zip(*table.values(), strict=True)])
    return path


def doors(tmp_path):
    pq.write_table(pa.table(TABLE), tmp_path / "t.parquet")
    return {
        "mapping": TABLE,
        "csv path": write_csv(tmp_path / "t.csv"),
        "csv text": str(write_csv(tmp_path / "t.csv")),
        "pandas": pd.DataFrame(TABLE),
        "pyarrow": pa.table(TABLE),
        "parquet": tmp_path / "t.parquet",
    }


def test_every_kind_of_table_gives_the_same_federation(tmp_path):
    sums = {
        Federation.from_table(table, client="site", target="ill", min_count=1, name="t").checksum()
        for table in doors(tmp_path).values()
    }
    assert len(sums) == 1


def test_rows_go_to_their_client_and_categories_become_columns():
    fed = Federation.from_table(TABLE, client="site", target="ill", scale=None, min_count=1)
    assert fed.names == ("n", "s") and fed.class_names == ("no", "yes")
    np.testing.assert_array_equal(
        fed.train.client(0)[0], [[50, 0.5, 1, 0, 0], [47, 2.5, 1, 0, 0], [29, 4.5, 0, 0, 1]]
    )
    assert fed.train.client(1)[1].tolist() == [1, 1]


def test_numeric_labels_are_numbered_in_sorted_order():
    table = TABLE | {"ill": [-1, 1, -1, 1, 1]}
    fed = Federation.from_table(table, client="site", target="ill", features=["age"])
    assert fed.class_names == ("-1", "1") and fed.train.client(0)[1].tolist() == [0, 0, 1]


def test_labels_ten_sort_after_nine():
    table = {"c": ["a"] * 3, "x": [1, 2, 3], "y": [10, 9, 2]}
    fed = Federation.from_table(table, client="c", target="y", task="classification")
    assert fed.class_names == ("2", "9", "10") and fed.train.targets.tolist() == [2, 1, 0]


def test_fractions_are_regression_and_whole_numbers_may_be():
    fed = Federation.from_table(TABLE, client="site", target="dose", features=["age"])
    assert fed.classes is None and fed.train.targets.dtype == np.float32
    whole = Federation.from_table(
        TABLE, client="site", target="age", features=["dose"], task="regression"
    )
    assert whole.classes is None
    np.testing.assert_allclose(whole.in_units(whole.train.client(1)[1]), [61, 33], rtol=1e-6)


def test_an_infinite_target_is_named():
    table = TABLE | {"dose": [1, 2, 3, float("inf"), 5]}
    with pytest.raises(DataError, match="'s': column 'dose' holds inf in 1 row"):
        Federation.from_table(table, client="site", target="dose", features=["age"])


def test_a_split_column_divides_the_rows():
    table = TABLE | {"part": ["train", "train", "test", "train", "validation"]}
    fed = Federation.from_table(table, client="site", target="ill", features=["age"], split="part")
    assert [s.sizes.tolist() for s in fed.splits().values()] == [[1, 2], [1, 0], [1, 0]]


def test_missing_values_are_named_or_dropped():
    table = TABLE | {"age": [50, None, 47, float("nan"), 29]}
    asked = {"client": "site", "target": "ill", "features": ["age"]}
    with pytest.raises(DataError, match=r"'s': column 'age' lacks a value in 2 row"):
        Federation.from_table(table, **asked, missing="error")
    table["age"][1] = 61
    fed = Federation.from_table(
        table, client="site", target="ill", features=["age"], missing="drop"
    )
    assert fed.train.sizes.tolist() == [3, 1]


@pytest.mark.parametrize("mark", ["", "NA", "?", "nan", " null "])
def test_csv_marks_of_missing_values(tmp_path, mark):
    path = write_csv(tmp_path / "t.csv", TABLE | {"age": [50, mark, 47, 33, 29]})
    asked = {"client": "site", "target": "ill", "features": ["age"]}
    with pytest.raises(DataError, match="lacks a value in 1 row"):
        Federation.from_table(path, **asked, missing="error")
    assert Federation.from_table(path, **asked).preparation.columns[0].indicator


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"client": "who"}, "no column 'who'; it has site, age"),
        ({"features": ["agee"]}, "no column 'agee'"),
        ({"categorical": ["arm"], "numeric": "arm"}, "'arm' is in categorical and in numeric"),
        ({"features": ["age"], "numeric": ["arm"]}, "'arm' is in numeric but not in features"),
        ({"features": ["age"], "target": "arm", "task": "regression"}, "cannot be a regression"),
        ({"features": ["age"], "split": "arm"}, "must say train, validation or test, got 'x'"),
        (
            {"features": ["age"], "missing": "guess"},
            "missing must be one of .*'drop', 'error', got 'guess'",
        ),
        ({"features": []}, "no feature columns"),
        ({"features": ["age"], "classes": 2}, "must hold labels"),
    ],
)
def test_wrong_requests_for_a_table(options, message):
    with pytest.raises(DataError, match=message):
        Federation.from_table(TABLE, **({"client": "site", "target": "ill"} | options))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("a,b\n1\n", "line 2 has 1 cells, expected 2"),
        ("a,a\n1,2\n", "column names must differ"),
        ("a,b\n", "needs rows"),
    ],
)
def test_broken_csv_files(tmp_path, text, message):
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        Federation.from_table(path, client="a", target="b")


def test_a_missing_file_and_a_strange_object_are_refused(tmp_path):
    with pytest.raises(DataError, match="Cannot read"):
        Federation.from_table(tmp_path / "none.csv", client="a", target="b")
    with pytest.raises(DataError, match="A table is a path"):
        Federation.from_table(7, client="a", target="b")


def test_whole_numbers_become_floats_like_the_others():
    fed = Federation.from_clients({"a": ([[1, 2]], [0]), "b": (np.ones((1, 2)), [1])})
    assert fed.train.inputs.dtype == np.float64
    assert Federation.from_clients({"a": ([[1, 2]], [0])}).train.inputs.dtype == np.float32


def test_tokens_stay_whole_numbers():
    fed = Federation.from_clients({"a": (np.array([[1, 2]], "u1"), [0])}, tokens=True)
    assert fed.train.inputs.dtype == np.int64


def test_several_regression_targets_are_kept():
    fed = Federation.from_clients({"a": (np.ones((2, 3)), np.ones((2, 4)))})
    assert fed.classes is None and fed.train.targets.shape == (2, 4)


def test_torch_tensors_are_arrays_too():
    import torch

    fed = Federation.from_clients({"a": (torch.ones(2, 3), torch.tensor([0, 1]))})
    assert fed.train.inputs.dtype == np.float32 and fed.classes == 2


def test_names_that_look_alike_are_not_two_clients():
    """An accent is one character or two; a table from two systems has both."""
    composed, decomposed = "Orl\u00e9ans", "Orle\u0301ans"
    assert composed != decomposed
    samples = ([[1.0], [2.0]], [0, 1])
    with pytest.raises(DataError, match=f"Two clients are called '{composed}'.*two ways"):
        Federation.from_clients({composed: samples, decomposed: samples}, classes=2)
