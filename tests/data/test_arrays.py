"""Whatever is handed over is taken as it is, or refused by name; nothing changes on the way."""

import datetime
import math
from decimal import Decimal
from fractions import Fraction
from numbers import Real

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from equifed.data import DataError, Federation
from equifed.data.preparation import NumberColumn

pytestmark = pytest.mark.long

some = settings(deadline=None, max_examples=300)

# -- strategies: what a user might hand over -------------------------------------------------------

floats = st.floats(allow_nan=True, width=64)
scalars = st.one_of(
    st.integers(-3, 3),
    st.integers(-(10**30), 10**30),
    floats,
    st.booleans(),
    st.text(max_size=3),
    st.sampled_from(["0", "1", " 1", "1,5", "NA", "nan", "yes", b"x", None, pd.NA, pd.NaT]),
    st.sampled_from([Decimal("1.5"), Decimal("NaN"), Fraction(1, 3), 1j, (1, 2)]),
    st.sampled_from([datetime.date(2020, 1, 1), np.datetime64("2020-01-01"), np.ma.masked]),
)
dtypes = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(),
    hnp.unsigned_integer_dtypes(),
    hnp.floating_dtypes(),
    hnp.complex_number_dtypes(),
    hnp.datetime64_dtypes(),
    hnp.unicode_string_dtypes(max_len=4),
    hnp.byte_string_dtypes(max_len=4),
)
shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
arrays = dtypes.flatmap(lambda dtype: hnp.arrays(dtype, shapes))


def columns(rows: int) -> st.SearchStrategy:
    """Return columns of a data frame, of one pandas type each."""
    size = {"min_size": rows, "max_size": rows}
    maybe = st.one_of(st.none(), st.integers(0, 3))
    return st.one_of(
        st.lists(st.integers(-3, 30), **size).map(lambda v: pd.Series(v, dtype="int64")),
        st.lists(st.floats(-9, 9), **size).map(lambda v: pd.Series(v, dtype="float32")),
        st.lists(st.booleans(), **size).map(lambda v: pd.Series(v, dtype="bool")),
        st.lists(maybe, **size).map(lambda v: pd.Series(v, dtype="Int64")),
        st.lists(st.sampled_from("ab"), **size).map(lambda v: pd.Series(v, dtype="category")),
        st.lists(st.integers(0, 2), **size).map(lambda v: pd.Series(v, dtype="category")),
        st.lists(st.sampled_from(["a", "1", None]), **size).map(
            lambda v: pd.Series(v, dtype="str")
        ),
        st.lists(
            st.datetimes(datetime.datetime(2000, 1, 1), datetime.datetime(2020, 1, 1)), **size
        ).map(pd.Series),
        st.lists(scalars, **size).map(lambda v: pd.Series(v, dtype=object)),
    )


@st.composite
def frames(draw, rows=None):
    rows = draw(st.integers(0, 4)) if rows is None else rows
    parts = draw(st.lists(columns(rows), max_size=3))
    titles = draw(st.lists(st.sampled_from(["a", "b", "c", 1, "1"]), min_size=3, max_size=3))
    frame = pd.concat(parts, axis=1) if parts else pd.DataFrame(index=range(rows))
    return frame.set_axis(titles[: len(parts)], axis=1)


lists = st.one_of(
    st.lists(scalars, max_size=4),
    st.lists(st.lists(scalars, max_size=3), max_size=4),
    st.lists(st.lists(st.floats(-2, 2), min_size=2, max_size=2), max_size=4),
)
anything = st.one_of(arrays, lists, frames(), columns(3), scalars)
targets = st.one_of(
    st.lists(st.integers(0, 2), min_size=3, max_size=3),
    st.lists(scalars, min_size=3, max_size=3),
    dtypes.flatmap(lambda dtype: hnp.arrays(dtype, 3)),
    columns(3),
    anything,
)
inputs = st.one_of(
    dtypes.flatmap(lambda dtype: hnp.arrays(dtype, (3, 2))),
    st.lists(st.lists(st.floats(-2, 2), min_size=2, max_size=2), min_size=3, max_size=3),
    frames(3),
    anything,
)
options = st.fixed_dictionaries(
    {},
    optional={
        "task": st.sampled_from([None, "classification", "regression", "guess"]),
        "classes": st.sampled_from([None, 1, 2, 4, 0, -1, 2.0, "3", 10**9, True]),
        "dtype": st.sampled_from([None, "float32", "float64", "float16", "text", 3]),
        "class_names": st.sampled_from([(), ["x", "y"], "xy", [1, 2], None]),
        "tokens": st.booleans(),
    },
)


def rows_of(value) -> list:
    """Return the rows that a user sees: lists of cells, or cells; the slow way."""
    if isinstance(value, pd.DataFrame):
        return [[value.iloc[i, k] for k in range(value.shape[1])] for i in range(len(value))]
    if isinstance(value, pd.Series):
        return [value.iloc[i] for i in range(len(value))]
    return list(value)


def cells(row) -> list:
    return list(np.ravel(np.array(row, dtype=object)))


def same_number(cell, held) -> bool:
    """Tell whether the number held is that of the cell, in the precision of the holder."""
    if isinstance(cell, torch.Tensor | Decimal | np.bool_ | Real):
        with np.errstate(over="ignore"):
            return bool(np.asarray(float(cell), held.dtype) == held)
    return False


def same_target(cell, held, federation) -> bool:
    if federation.classes is None:
        return same_number(cell, held)
    text = federation.class_names[held] if federation.class_names else None
    if isinstance(cell, str):
        return text == cell
    if isinstance(cell, bytes):
        return text == cell.decode("utf-8", "backslashreplace")
    return int(cell) == cell and (int(cell) == held if text is None else text == str(int(cell)))


@some
@given(inputs, targets, st.one_of(st.none(), st.tuples(inputs, targets)), options)
def test_arrays_are_taken_unchanged_or_refused(x, y, other, given_options):
    clients = {"a": (x, y), "b": other or (x, y)}
    try:
        fed = Federation.from_clients(clients, **given_options)
    except DataError:
        return
    assert fed.names == ("a", "b")
    own_names = bool(given_options.get("class_names"))
    for i, (inputs_given, targets_given) in enumerate(clients.values()):
        held_x, held_y = fed.train.client(i)
        assert np.isfinite(held_x).all() and len(held_x) > 0
        for row, held in zip(rows_of(inputs_given), held_x, strict=True):
            pairs = zip(cells(row), held.ravel(), strict=True)
            assert all(same_number(cell, number) for cell, number in pairs)
        for row, held in zip(rows_of(targets_given), held_y, strict=True):
            for cell, number in zip(cells(row), np.ravel(held), strict=True):
                assert own_names or same_target(cell, number, fed)


@st.composite
def tables(draw):
    rows = draw(st.integers(1, 5))
    parts = {
        "who": draw(st.one_of(columns(rows), st.lists(scalars, min_size=rows, max_size=rows))),
        "what": draw(st.one_of(columns(rows), st.lists(scalars, min_size=rows, max_size=rows))),
        "x": draw(columns(rows)),
    }
    if draw(st.booleans()):
        return pd.DataFrame({name: pd.Series(list(v), dtype=object) for name, v in parts.items()})
    return parts


def is_gap(cell) -> bool:
    if isinstance(cell, str):
        return cell.strip().lower() in {"", "?", "na", "n/a", "nan", "null", "none"}
    if cell is None or cell is pd.NA or cell is pd.NaT or cell is np.ma.masked:
        return True
    return isinstance(cell, float | np.floating | Decimal) and math.isnan(cell)


@some
@given(
    tables(),
    st.fixed_dictionaries(
        {},
        optional={
            "task": st.sampled_from(["classification", "regression"]),
            "missing": st.just("drop"),
            "classes": st.sampled_from([1, 2, 3]),
            "categorical": st.just(["x"]),
            "split": st.sampled_from(["who", "what", "nowhere"]),
        },
    ),
)
@pytest.mark.filterwarnings("ignore:Client.*no row left", "ignore:Column .* taken as a category")
def test_tables_are_taken_unchanged_or_refused(table, given_options):
    try:
        plain = {"scale": None, "missing": "error", "min_count": 1, "target_scale": None}
        fed = Federation.from_table(
            table, client="who", target="what", dtype="float64", **(plain | given_options)
        )
    except DataError:
        return
    who, what, x = (rows_of(table[name]) for name in ("who", "what", "x"))
    kept = [row for row in zip(who, what, x, strict=True) if not any(map(is_gap, row))]
    assert len(kept) == len(who) or "missing" in given_options
    owners = []  # distinct as Python tells values apart, text without blanks around it
    for owner, _, _ in kept:
        owner = owner.strip() if isinstance(owner, str) else owner
        key = (isinstance(owner, str), isinstance(owner, bool | np.bool_), owner)
        owners.append(key)
    order = {key: i for i, key in enumerate(dict.fromkeys(owners))}
    assert len(fed.names) == len(order) == len(set(fed.names))
    for i in order.values():
        mine = [row for row, owner in zip(kept, owners, strict=True) if order[owner] == i]
        held_x, held_y = fed.train.client(i)
        for (_, target, feature), inputs_held, target_held in zip(
            mine, held_x, held_y, strict=True
        ):
            if isinstance(fed.preparation.columns[0], NumberColumn):
                number = float(feature)  # text that is a number counts as one
                assert same_number(number, inputs_held[0])
            else:
                assert inputs_held.sum() == 1
            if fed.classes is None:
                assert same_number(float(target), target_held)
            elif fed.class_names:
                title = fed.class_names[target_held]
                text = target.strip() if isinstance(target, str) else target
                assert title.lower() == str(text).lower() or float(title) == float(text)
            else:
                assert float(target) == target_held


# -- the cases by name ----------------------------------------------------------------------------

X, Y = np.arange(6.0).reshape(3, 2), [0, 1, 1]


def masked(*rows: int) -> np.ma.MaskedArray:
    mask = np.zeros((3, 2), dtype=bool)
    mask[list(rows), 1] = True
    return np.ma.masked_array(X, mask)


REFUSED = {
    "masked": (masked(1), Y, r"'a': train X has masked values, the first at \[1, 1\]; fill"),
    "masked rows": (list(masked(2)), Y, r"train X has masked values, the first at \[2, 1\]"),
    "masked y": (X, np.ma.masked_equal(Y, 0), "'a': train y has masked values"),
    "one axis": (X[:, 0], Y, r"'a': train X has the shape \(3,\), one axis; .*reshape\(-1, 1\)"),
    "no columns": (X[:, :0], Y, r"'a': train X has the shape \(3, 0\): no features"),
    "no columns, frame": (pd.DataFrame(index=range(3)), Y, "no features"),
    "columns twice": (
        pd.DataFrame(X, columns=["u", "u"]),
        Y,
        "'a': train X has the column 'u' twice",
    ),
    "text column": (pd.DataFrame({"u": [1, 2, 3], "v": list("xyz")}), Y, "column 'v' holds text"),
    "category": (
        pd.DataFrame({"u": [1, 2, 3], "v": pd.Categorical([1, 2, 1])}),
        Y,
        "'v' is of type category",
    ),
    "date": (pd.DataFrame({"u": pd.date_range("2020", periods=3)}), Y, "column 'u' has the dtype"),
    "nullable": (
        pd.DataFrame({"u": pd.array([1, None, 2], "Int64")}),
        Y,
        "contain NaN in column 0",
    ),
    "sparse": (pytest.importorskip("scipy.sparse").csr_array(X), Y, r"is sparse.*X\.toarray\(\)"),
    "ragged": ([[1, 2], [3], [4, 5]], Y, "train X is not an array.*unequal length"),
    "complex": (X + 1j, Y, "'a': train X has the dtype complex128"),
    "none among text": (X, ["no", None, "yes"], r"'a': train y holds None \(NoneType\) at \[1\]"),
    "numbers among text": (X, ["1", 1, 2], r"'a': train y holds '1' \(str\) at \[0\]"),
    "negative": (X, [0, -1, 1], "'a': train y holds whole numbers, .* from -1 to 1: values or"),
    "huge": (X, [0, 1, 10**9], "from 0 to 1000000000: values or classes"),
    "beyond": (X, [0, 1, 10**30], "too large a number"),
    "one-hot": (X, [[0, 1]] * 3, r"shape \(3, 2\).*argmax"),
    "too large": (X.astype("f4"), [1e300, 0.0, 0.5], "'a': train y holds 1e.300, which float32"),
}


@pytest.mark.parametrize(("x", "y", "message"), REFUSED.values(), ids=REFUSED)
def test_the_refusal_names_client_field_value_and_cure(x, y, message):
    with pytest.raises(DataError, match=message):
        Federation.from_clients({"a": (x, y)})


LABELS = {
    "nan": ([0.0, float("nan"), 1.0], "whole numbers, got nan in row 1"),
    "infinite": ([0.0, float("inf"), 1.0], "whole numbers, got inf"),
    "not whole": ([0.0, 0.5, 1.0], "whole numbers, got 0.5 in row 1"),
    "too large": ([0, 5, 1], "'a'.*got 5"),
    "huge": ([0.0, 1e300, 1.0], "not a label"),
}


@pytest.mark.parametrize(("y", "message"), LABELS.values(), ids=LABELS)
def test_labels_that_the_number_of_classes_excludes_are_named(y, message):
    with pytest.raises(DataError, match=message):
        Federation.from_clients({"a": (X, y)}, classes=3)


def test_a_billion_classes_are_not_allocated():
    with pytest.raises(DataError, match="1000000001 classes"):
        Federation.from_clients({"a": (X, [0, 1, 10**9])}, classes=10**9 + 1)


def test_columns_in_another_order_are_not_mixed_up():
    here, there = pd.DataFrame(X, columns=["u", "v"]), pd.DataFrame(X, columns=["v", "u"])
    with pytest.raises(DataError, match=r"'b': train X has the columns .*same order"):
        Federation.from_clients({"a": (here, Y), "b": (there, Y)})


def test_an_empty_mask_hides_nothing_and_extended_precision_keeps_what_doubles_can():
    assert Federation.from_clients({"a": (masked(), Y)}).train.inputs.tolist() == X.tolist()
    fed = Federation.from_clients({"a": (X.astype(np.longdouble) / 3, Y)})
    np.testing.assert_array_equal(fed.train.inputs, X / 3)


# -- classes or values -----------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(-5, 60), min_size=1, max_size=80))
def test_whole_numbers_are_classes_only_where_they_cannot_be_values(y):
    """The rule, written down once more: all of 0..K - 1 with K up to 20, or the user says."""
    clients = {"a": (np.ones((len(y), 1)), y)}
    distinct = sorted(set(y))
    if distinct == list(range(len(distinct))) and len(distinct) <= 20:
        fed = Federation.from_clients(clients)
        assert fed.classes == max(2, len(distinct)) and fed.train.targets.tolist() == y
    else:
        with pytest.raises(DataError, match="task='regression', or task='classification'"):
            Federation.from_clients(clients)
    values = Federation.from_clients(clients, task="regression")
    assert values.classes is None and values.train.targets.tolist() == y
    classes = Federation.from_clients(clients, task="classification")
    names = classes.class_names or [str(k) for k in range(classes.classes)]
    assert [int(names[k]) for k in classes.train.targets] == y


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(-5, 60), min_size=1, max_size=80), st.booleans())
def test_a_table_asks_about_whole_numbers_likewise(y, as_text):
    table = {"c": ["a"] * len(y), "x": [1] * len(y), "y": [str(v) if as_text else v for v in y]}
    distinct = sorted(set(y))
    follow = distinct == list(range(distinct[0], distinct[-1] + 1))
    if len(distinct) <= 2 or (follow and len(distinct) <= 20):
        fed = Federation.from_table(table, client="c", target="y")
        assert [int(fed.class_names[k]) for k in fed.train.targets] == y
    else:
        with pytest.raises(DataError, match=r"Column 'y' holds whole numbers.*task='regression'"):
            Federation.from_table(table, client="c", target="y")


@pytest.mark.parametrize("y", [["12", "13", "unknown"], ["1,5", "2,5", "2"], ["1,5", "2,5", "2,7"]])
def test_numbers_with_an_odd_one_among_them_do_not_become_classes(y):
    table = {"c": ["a"] * 3, "x": [1, 2, 3], "y": y}
    with pytest.raises(DataError, match="Client 'a': column 'y' holds"):
        Federation.from_table(table, client="c", target="y")
    asked = Federation.from_table(table, client="c", target="y", task="classification")
    assert [asked.class_names[k] for k in asked.train.targets] == y


def test_names_stay_classes_however_many_there_are():
    y = [f"word {k}" for k in range(50)]
    assert Federation.from_clients({"a": (np.ones((50, 1)), y)}).classes == 50


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [pd.DataFrame, dict])
def test_clients_that_print_alike_stay_apart(make):
    table = make({"who": [1, "1", 1, "2"], "x": [1.0, 2.0, 3.0, 4.0], "y": [0, 1, 1, 0]})
    fed = Federation.from_table(table, client="who", target="y", scale=None)
    assert fed.names == ("1", "'1'", "2")
    assert fed.train.client(0)[0].ravel().tolist() == [1, 3]
    assert fed.train.client(1)[0].ravel().tolist() == [2]
    direct = Federation.from_clients({1: (X, Y), "1": (X + 1, Y)}, test={"1": (X, Y)})
    assert direct.names == ("1", "'1'") and direct.test.sizes.tolist() == [0, 3]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pd.DataFrame([[1, 2, 3, 4]], columns=["c", "x", "x", "y"]), "column 'x' twice"),
        (pd.DataFrame([[1, 2, 3, 4]], columns=["c", 1, "1", "y"]), "column '1' twice"),
        ({"c": ["a"], "x": "1", "y": [0]}, "'x' must be a list"),
        ({"c": ["a"], "x": 1, "y": [0]}, "Cannot read a dict"),
        ({"c": [["a"]], "x": [1], "y": [0]}, "'c' must be text or numbers, got a list"),
        ({"c": ["a"], "x": [np.datetime64("2020-01-01")], "y": [0]}, "'x' is not a feature .dates"),
        ({"c": ["a"], "x": [np.ma.masked], "y": [0]}, "'x' lacks a value"),
        ({"c": ["a"], "x": [{}], "y": [0]}, "'a': column 'x' is not numeric: it holds a dict"),
        ({"c": ["a"], "x": [float("inf")], "y": [0]}, "'a': column 'x' holds inf"),
        ({"c": ["a"], "x": [1e300], "y": [0]}, "holds 1e.300, which float32"),
        ({"c": ["a"], "y": [0]}, "no feature columns"),
    ],
)
def test_tables_that_would_change_are_refused(table, message):
    with pytest.raises(DataError, match=message):
        Federation.from_table(table, client="c", target="y", scale=None, missing="error")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": ["x", "y"]}, "'y' is used twice"),
        ({"features": ["x", "x"]}, "'x' is used twice"),
        ({"target": "c"}, "'c' is used twice"),
        ({"features": ["x"], "categorical": ["z"]}, "'z' is in categorical but not in features"),
        ({"dtype": "float16"}, "dtype must be"),
        ({"task": "ranking"}, "task must be"),
        ({"task": "regression", "classes": 2}, "leave one of them out"),
    ],
)
def test_requests_that_contradict_themselves_are_refused(options, message):
    table = {"c": ["a", "b"], "x": [1, 2], "z": [3, 4], "y": [0, 1]}
    with pytest.raises(DataError, match=message):
        Federation.from_table(table, **({"client": "c", "target": "y"} | options))
