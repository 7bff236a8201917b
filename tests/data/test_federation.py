"""A federation holds what it was given, loses no row, and refuses what cannot be trained on."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equifed.data import DataError, Federation, Split

few = settings(deadline=None, max_examples=40)


def federation(sizes, seed=0, classes=3, **options):
    draw = np.random.default_rng(seed)
    clients = {
        f"c{i}": (draw.normal(size=(m, 2)), draw.integers(classes, size=m))
        for i, m in enumerate(sizes)
    }
    return Federation.from_clients(clients, classes=classes, **options)


sizes = st.lists(st.integers(1, 30), min_size=1, max_size=8)


@few
@given(sizes, st.integers(0, 99))
def test_every_client_gets_its_own_rows_back(m, seed):
    draw = np.random.default_rng(seed)
    clients = [(draw.normal(size=(k, 2)), draw.integers(3, size=k)) for k in m]
    split = Split.from_clients(clients)
    assert split.sizes.tolist() == m
    for i, (inputs, targets) in enumerate(clients):
        np.testing.assert_array_equal(split.client(i)[0], inputs)
        np.testing.assert_array_equal(split.client(i)[1], targets)
        np.testing.assert_array_equal(split.inputs[split.owners() == i], inputs)


@few
@given(sizes, st.integers(0, 99))
def test_class_counts_match_counting_by_hand(m, seed):
    fed = federation(m, seed)
    counts = fed.train.class_counts(3)
    for i in range(len(m)):
        assert counts[i].tolist() == [int((fed.train.client(i)[1] == k).sum()) for k in range(3)]


@few
@given(sizes, st.floats(0, 0.45), st.floats(0, 0.45), st.integers(0, 99))
def test_a_split_loses_and_repeats_no_row(m, validation, test, seed):
    whole = federation(m)
    parts = whole.split(validation=validation, test=test, seed=seed)
    for i, size in enumerate(m):
        held = [s.client(i)[0] for s in parts.splits().values()]
        together = np.concatenate(held)
        assert len(held[0]) >= 1
        order, expected = (np.lexsort(x.T) for x in (together, whole.train.client(i)[0]))
        np.testing.assert_array_equal(together[order], whole.train.client(i)[0][expected])
        if test and size > 1:
            assert len(parts.test.client(i)[0]) == min(round(test * size), size - 1)


def test_a_client_is_split_alike_whoever_else_is_there():
    whole = federation([20, 15, 30])
    alone = whole.subset(["c1"]).split(test=0.3, seed=5)
    together = whole.split(test=0.3, seed=5)
    np.testing.assert_array_equal(alone.test.inputs, together.test.client(1)[0])


def test_other_seeds_split_differently():
    first, second = (federation([50]).split(test=0.5, seed=s) for s in (0, 1))
    assert not np.array_equal(first.test.inputs, second.test.inputs)


def test_subset_keeps_the_order_asked_for_and_all_splits():
    fed = federation([3, 4, 5]).split(test=0.4).subset(["c2", 0])
    assert fed.names == ("c2", "c0")
    assert fed.train.sizes.tolist() == [3, 2] and fed.test.sizes.tolist() == [2, 1]


def test_other_inputs_keep_samples_owners_and_targets():
    fed = federation([3, 4, 5]).split(test=0.4)
    doubled = fed.with_inputs({label: 2 * s.inputs for label, s in fed.splits().items()})
    for label, split in fed.splits().items():
        other = doubled.splits()[label]
        np.testing.assert_array_equal(other.inputs, 2 * split.inputs)
        assert other.targets is split.targets and other.offsets is split.offsets
    with pytest.raises(DataError, match="rows of inputs but"):
        fed.with_inputs({label: s.inputs[1:] for label, s in fed.splits().items()})


def test_a_client_may_lack_test_samples():
    fed = Federation.from_clients(
        {"a": (np.ones((2, 1)), [0, 1]), "b": (np.ones((2, 1)), [0, 1])},
        test={"a": (np.ones((1, 1)), [1])},
    )
    assert fed.test.sizes.tolist() == [1, 0]


def test_checksum_sees_every_change():
    base = federation([3, 4])
    same = federation([3, 4])
    assert base.checksum() == same.checksum()
    others = [
        federation([3, 4], seed=1),
        federation([3, 4], classes=4),
        federation([3, 4], dtype="float32"),
        base.subset(["c1", "c0"]),
        base.split(test=0.3),
        Federation("your data", ("c0", "x"), base.train, classes=3),
    ]
    assert len({base.checksum(), *(fed.checksum() for fed in others)}) == 1 + len(others)


def test_table_shows_sizes_and_class_counts():
    fed = Federation.from_clients({"north": (np.ones((3, 1)), ["a", "b", "b"])})
    assert str(fed.table()).splitlines()[2].split() == ["north", "3", "1", "2"]


def test_table_of_many_classes_counts_those_present():
    fed = Federation.from_clients({"a": (np.ones((3, 1)), [0, 5, 5])}, classes=40)
    assert str(fed.table()).splitlines()[1].split() == ["client", "train", "classes"]
    assert str(fed.table()).splitlines()[2].split() == ["a", "3", "2"]


# -- messages -------------------------------------------------------------------------------------


def bad(message, clients, **options):
    with pytest.raises(DataError, match=message):
        Federation.from_clients(clients, **options)


GOOD = (np.ones((3, 2)), np.array([0, 1, 1]))


@pytest.mark.parametrize(("value", "kind"), [(np.nan, "NaN"), (np.inf, "infinity")])
def test_a_client_with_non_finite_features_is_named_with_the_column(value, kind):
    x = np.ones((4, 2))
    x[1:3, 1] = value
    bad(rf"'sick'.*features contain {kind} in column 1 \(2 row", {"a": GOOD, "sick": (x, [0] * 4)})


def test_opposite_infinities_do_not_hide_each_other():
    x = np.array([[np.inf, 1.0], [-np.inf, 1.0]])
    bad("'sick'.*infinity in column 0", {"a": GOOD, "sick": (x, [0, 1])})


def test_a_pixel_is_named_by_its_place():
    x = np.zeros((2, 1, 3, 3))
    x[0, 0, 2, 1] = np.nan
    bad("column 0, 2, 1", {"a": (x, [0, 1])})


def test_finite_features_whose_sum_overflows_are_accepted():
    x = np.full((3, 2), 1e308)
    assert Federation.from_clients({"a": (x, [0, 1, 1])}).train.inputs.max() == 1e308


def test_how_many_other_clients_are_affected_is_said():
    x = np.full((1, 2), np.nan)
    bad("and 1 other client", {"a": GOOD, "b": (x, [0]), "c": (x, [0])})


@pytest.mark.parametrize(
    ("clients", "options", "message"),
    [
        ({"a": GOOD, "empty": (np.ones((0, 2)), [])}, {}, "'empty' has no training samples"),
        (
            {"a": GOOD, "b": (np.ones((3, 4)), [0, 1, 1])},
            {},
            "'b': train X has shape .*'a'",
        ),
        ({"a": GOOD, "b": (np.ones((3, 2), "f4"), [0, 1, 1])}, {}, "float64.*float32.*dtype="),
        ({"a": GOOD, "b": (np.ones((3, 2)), [0, 1, 7])}, {"classes": 3}, "'b'.*0..2, got 7"),
        ({"a": GOOD, "b": (np.ones((3, 2)), [0, -1, 1])}, {}, "'b'.*from -1 to 1"),
        ({"a": GOOD, "b": (np.ones((3, 2)), [0, -1, 1])}, {"classes": 2}, "'b'.*got -1"),
        ({"a": (GOOD[0], [0.0, 0.5, 1.0])}, {"classes": 2}, "whole numbers, got 0.5"),
        ({"a": (GOOD[0], [0.0, np.inf, 1.0])}, {"classes": 2}, "whole numbers, got inf"),
        ({"a": (GOOD[0], [0, 1])}, {}, "'a'.*same number of rows"),
        ({"a": ([["x", "y"]], [0])}, {}, "must be numbers"),
        ({"a": GOOD[0]}, {}, r"pair \(X, y\)"),
        ({}, {}, "non-empty mapping"),
        ({"": GOOD}, {}, "names must be non-empty"),
        ({"a": (GOOD[0], [0.0, np.nan, 1.0])}, {}, "'a'.*targets contain NaN"),
        ({"a": GOOD}, {"class_names": ["x"]}, "2 classes but 1 class names"),
        ({"a": GOOD}, {"test": {"b": GOOD}}, "'b' has test samples but no training"),
        ({"a": GOOD}, {"test": {"a": (np.ones((1, 5)), [0])}}, "'a': test X has shape"),
        ({"a": (np.array([[-1, 0]]), [0])}, {"tokens": True}, "'a'.*tokens must be at least 0"),
    ],
)
def test_bad_data_is_refused_by_name(clients, options, message):
    bad(message, clients, **options)


def test_names_must_differ():
    split = Split.from_clients([GOOD, GOOD])
    with pytest.raises(DataError, match="'a' more than once"):
        Federation("x", ("a", "a"), split, classes=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": np.array([0, 2])}, "rise from 0 to the 3 rows"),
        ({"offsets": np.array([0.0, 3.0])}, "int64"),
        ({"inputs": np.ones((3, 2), dtype=np.uint8)}, "convert with astype"),
        ({"targets": np.zeros((3, 2), dtype=np.int64)}, "targets must have shape"),
        ({"targets": np.zeros(2, dtype=np.int64)}, "3 rows of inputs but 2 targets"),
        ({"inputs": [[1.0]]}, "must be a NumPy array"),
    ],
)
def test_a_split_that_does_not_fit_together_is_refused(change, message):
    parts = {"inputs": GOOD[0], "targets": GOOD[1], "offsets": np.array([0, 3])} | change
    with pytest.raises(DataError, match=message):
        Split(**parts)


def test_splits_must_be_of_one_kind_and_fit_the_names():
    train = Split.from_clients([GOOD])
    with pytest.raises(DataError, match="test inputs are float32"):
        Federation(
            "x", ("a",), train, test=Split.from_clients([(np.ones((1, 2), "f4"), [0])]), classes=2
        )
    with pytest.raises(DataError, match="2 client names"):
        Federation("x", ("a", "b"), train, classes=2)
    with pytest.raises(DataError, match="classes is None"):
        Federation("x", ("a",), train)


def test_requests_that_make_no_sense_are_refused():
    fed = federation([5, 6]).split(test=0.4)
    with pytest.raises(DataError, match="already has a test split"):
        fed.split(test=0.2)
    with pytest.raises(DataError, match="less than 1"):
        federation([5]).split(test=0.5, validation=0.5)
    with pytest.raises(DataError, match=r"lie in \[0, 1\)"):
        federation([5]).split(test=1.5)
    with pytest.raises(DataError, match="no client 'x'"):
        fed.subset(["x"])
    with pytest.raises(DataError, match=r"0\.\.1"):
        fed.subset([2])
    with pytest.raises(DataError, match="no repeats"):
        fed.subset([0, "c0"])


def test_a_federation_and_its_server_load_no_reader_of_files():
    told = "import sys, equifed.data.federation, equifed.flower.server; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert "equifed.data.federation" in loaded and "equifed.data.files" not in loaded
