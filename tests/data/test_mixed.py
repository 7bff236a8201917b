"""Columns with numbers and text: numbers with gaps, or a category, by a stated rule."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equifed.data import DataError, DataWarning, Federation
from equifed.data.columns import GAP_WORDS, blank, read_columns
from equifed.data.fit import ask_kinds, describe_rows, fit_preparation
from equifed.data.fit_by_sums import find_names, fit_by_sums, to_vector
from equifed.data.preparation import NumberColumn, Preparation, Prepare, Target

TARGET = Target("y", ("a", "b"))
CHILDREN = ["1", "2", "3 or more"] * 10


def fit(rows: dict[str, list], **options) -> Preparation:
    given = {client: read_columns({"x": values}) for client, values in rows.items()}
    return fit_preparation(given, ask_kinds(["x"], TARGET, Prepare(**options)))


@pytest.mark.parametrize("word", sorted(GAP_WORDS))
def test_a_few_gap_words_are_gaps(word):
    numbers = [k / 7 for k in range(60)]
    worded = fit({"a": numbers, "b": [*numbers, word.upper(), word]})
    empty = fit({"a": numbers, "b": [*numbers, None, None]})
    assert worded.columns[0].gaps == "words"
    assert worded.feature_names == empty.feature_names == ("x", "x missing")
    np.testing.assert_array_equal(worded.apply({"x": [0.5, word]}), empty.apply({"x": [0.5, None]}))
    with pytest.raises(DataError, match=r"'x' is not numeric .*'hot' in row 1"):
        worded.apply({"x": ["hot"]})


@given(st.integers(1, 30), st.integers(1, 30))
def test_more_than_one_in_twenty_are_a_category(numbers, words):
    found = fit({"a": [*([1, 2] * numbers), *["unknown"] * words]}, min_count=1)
    assert isinstance(found.columns[0], NumberColumn) == (words <= 0.05 * (2 * numbers + words))


@pytest.mark.parametrize("kinds", [20, 21])
def test_numbers_and_text_of_more_than_twenty_kinds_are_no_category(kinds):
    rows = {"a": [*map(str, range(kinds - 1)), "none of these"] * 5}
    if kinds == 20:
        assert len(fit(rows).feature_names) == kinds
    else:
        with pytest.raises(DataError, match="list it in"):
            fit(rows)


def test_other_text_makes_a_category_and_numeric_makes_gaps():
    rows = {"a": CHILDREN, "b": ["1", "2"] * 10}
    assert fit(rows).feature_names == ("x=1", "x=2", "x=3 or more")
    forced, empty = fit(rows, numeric="x"), fit({c: blank(v, "texts") for c, v in rows.items()})
    new = {"x": [2, "3 or more", "many"]}
    np.testing.assert_array_equal(forced.apply(new), empty.apply({"x": [2, None, None]}))
    assert Preparation.from_json(forced.to_json()) == forced


def test_gap_words_are_asked_about_where_gaps_are_not_filled():
    values = [*range(100), "unknown"]
    for rule in ("drop", "error"):
        with pytest.raises(DataError, match="list it in numeric"):
            fit({"a": values}, missing=rule)


@pytest.mark.parametrize(
    "rows",
    [
        {"a": CHILDREN, "b": ["2", "1"] * 10},
        {"a": [*range(100), "unknown"], "b": [1.5] * 10},
    ],
)
def test_hidden_sums_decide_alike(rows):
    held = {client: read_columns({"x": values}) for client, values in rows.items()}
    asked = ask_kinds(["x"], TARGET, Prepare())

    def answer(question, mine):
        named = question["stage"] in ("names", "counts")
        return describe_rows(mine, {**question, "stage": "sums"} if named else question)

    def add(question):
        return sum(to_vector(question, answer(question, mine)) for mine in held.values())

    def collect(question):
        return [find_names(question, answer(question, mine)) for mine in held.values()]

    assert fit_by_sums(asked, add, collect) == fit(rows)


def test_a_table_says_what_it_takes_a_column_for():
    table = {"site": ["n", "s"] * 15, "x": CHILDREN, "c": [1, 2] * 15, "y": ["u", "v", "v"] * 10}
    with pytest.warns(DataWarning, match="'x' holds numbers and text.* taken as a category"):
        fed = Federation.from_table(table, "site", "y", categorical=["c"])
    assert fed.preparation.feature_names == ("x=1", "x=2", "x=3 or more", "c=1", "c=2")
    fed = Federation.from_table(table, "site", "y", categorical=["x"])
    assert fed.preparation.feature_names == ("x=1", "x=2", "x=3 or more", "c")
    fed = Federation.from_table(table, "site", "y", numeric=["x"])
    assert fed.preparation.feature_names == ("x", "x missing", "c")
    table["x"] = [*(k / 3 for k in range(29)), "unknown"]
    with pytest.warns(DataWarning, match="'x' is taken as numbers, 1 cell"):
        fed = Federation.from_table(table, "site", "y")
    assert fed.preparation.feature_names == ("x", "x missing", "c")
