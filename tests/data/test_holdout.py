"""What is held out does not leak: groups stay whole, later stays later, duplicates are named."""

import datetime
import warnings

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equifed.data import DataError, DataWarning, Federation, Holdout
from equifed.data.columns import group_rows, read_moments
from equifed.data.site_table import SiteTable
from equifed.data.split import _place_groups, divide_at_random, divide_by_time, divide_groups
from equifed.data.table import TableRequest

SPLITS = ("train", "validation", "test")
some = settings(deadline=None, max_examples=80)
fractions = st.sampled_from([(0.0, 0.3), (0.2, 0.0), (0.2, 0.2), (0.45, 0.45)])


@st.composite
def visits(draw):
    rows = draw(st.integers(1, 40))
    clients = draw(st.lists(st.sampled_from("abc"), min_size=rows, max_size=rows))
    groups = draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows))
    return clients, groups, Holdout(*draw(fractions), draw(st.integers(0, 5)))


@some
@given(visits())
def test_all_rows_of_a_group_are_in_one_split(given_visits):
    clients, groups, holdout = given_visits
    part = divide_groups(group_rows(clients), group_rows(groups), holdout)
    for group in set(groups):
        assert len({part[k] for k, g in enumerate(groups) if g == group}) == 1
    if holdout.validation == 0:
        assert "validation" not in part
    if holdout.test == 0:
        assert "test" not in part


def test_groups_meet_the_fractions_as_nearly_as_they_can():
    groups = np.repeat(np.arange(300), 3)
    owners = {"a": np.arange(600), "b": np.arange(600, 900)}
    part = divide_groups(owners, group_rows(groups.tolist()), Holdout(0.1, 0.2))
    for rows in owners.values():
        assert abs(np.mean(part[rows] == "test") - 0.2) < 0.01
        assert abs(np.mean(part[rows] == "validation") - 0.1) < 0.01


def test_groups_that_several_clients_share_meet_the_fractions_too():
    groups = [k // 4 for k in range(400)]
    owners = {"a": np.arange(0, 400, 2), "b": np.arange(1, 400, 2)}
    part = divide_groups(owners, group_rows(groups), Holdout(0.0, 0.3))
    assert np.mean(part == "test") == pytest.approx(0.3)
    assert all(len(set(part[4 * k : 4 * k + 4])) == 1 for k in range(100))


@some
@given(visits())
def test_later_splits_are_later(given_visits):
    clients, times, holdout = given_visits
    owners, moments = group_rows(clients), np.array(times, dtype=float)
    part = divide_by_time(owners, moments, holdout)
    order = {"train": 0, "validation": 1, "test": 2}
    for rows in owners.values():
        assert "train" in part[rows]
        for one in rows:
            for two in rows:
                if order[part[one]] < order[part[two]]:
                    assert moments[one] < moments[two]
        if len(np.unique(moments[rows])) == len(rows):
            held = [np.sum(part[rows] == label) for label in ("validation", "test")]
            assert held == [*holdout.counts(len(rows))]


def test_fractions_by_time_are_met():
    part = divide_by_time({"a": np.arange(100)}, np.arange(100.0), Holdout(0.2, 0.2))
    assert part.tolist() == ["train"] * 60 + ["validation"] * 20 + ["test"] * 20


@pytest.mark.long
@some
@given(visits())
def test_rows_drawn_by_table_are_those_drawn_by_federation(given_visits):
    clients, values, holdout = given_visits
    table = {"c": clients, "x": values, "k": range(len(values)), "y": ["u", "v"] * len(values)}
    table["y"] = table["y"][: len(values)]
    plain = {"scale": None, "missing": "error", "task": "classification", "features": ["x", "k"]}
    options = {"test": holdout.test, "validation": holdout.validation, "seed": holdout.seed}
    direct = Federation.from_table(table, "c", "y", **plain, **options)
    later = Federation.from_table(table, "c", "y", **plain).split(**options)
    for label, split in direct.splits().items():
        np.testing.assert_array_equal(split.inputs, later.splits()[label].inputs)
    part = divide_at_random(group_rows(clients), holdout)
    assert np.sum(part == "train") == len(direct.train)


FORMS = {
    "ISO": ["2024-01-02", "2023-12-31", "2024-01-02T10:00"],
    "days": [datetime.date(2024, 1, 2), datetime.date(2023, 12, 31), datetime.date(2024, 1, 3)],
    "pandas": pd.to_datetime(["2024-01-02", "2023-12-31", "2024-01-03"]).to_list(),
    "numpy": list(np.array(["2024-01-02", "2023-12-31", "2024-01-03"], dtype="datetime64[ns]")),
    "zones": ["2024-01-02T00:30+01:00", "2024-01-01T23:00Z", "2024-01-02"],
    "years": ["2024", "2023", 2025.5],
}


@pytest.mark.parametrize("values", FORMS.values(), ids=FORMS)
def test_times_are_read_in_their_order(values):
    assert np.argsort(read_moments("t", values)).tolist() == [1, 0, 2]


def test_dates_of_unknown_order_are_refused():
    with pytest.raises(
        DataError, match="'t' holds '03/04/2024', which is neither a number nor a date"
    ):
        read_moments("t", ["03/04/2024"])


VISITS = {
    "site": ["n"] * 10 + ["s"] * 10,
    "patient": [k // 2 for k in range(20)],
    "day": [*range(10), *range(10)],
    "x": [float(k) for k in range(20)],
    "y": ["u", "v"] * 10,
}


def test_a_table_keeps_its_patients_and_its_order():
    fed = Federation.from_table(
        VISITS, "site", "y", features=["x"], keep_together="patient", test=0.4
    )
    assert fed.test.sizes.tolist() == [4, 4]
    centre, scale = fed.preparation.columns[0].centre, fed.preparation.columns[0].scale
    held = np.round(fed.test.inputs.ravel() * scale + centre).astype(int)
    assert sorted(held // 2 * 2) == sorted([*held[held % 2 == 0]] * 2)
    fed = Federation.from_table(VISITS, "site", "y", features=["x"], time="day", test=0.3)
    assert fed.preparation.columns[0].centre == np.mean([*range(7), *range(10, 17)])


def test_held_out_rows_change_nothing_that_is_fitted():
    table = {**VISITS, "part": ["train"] * 9 + ["test"] + ["train"] * 9 + ["test"]}
    one = Federation.from_table(table, "site", "y", features=["x"], split="part")
    moved = {**table, "x": [*table["x"][:9], 1e6, *table["x"][10:19], None]}
    two = Federation.from_table(moved, "site", "y", features=["x"], split="part")
    assert one.preparation == two.preparation
    np.testing.assert_array_equal(one.train.inputs, two.train.inputs)


def test_rows_that_are_in_both_are_named():
    again = {"x": [*range(10)] * 2, "z": [k / 2 for k in range(10)] * 2}
    table = {**VISITS, **again, "part": ["train"] * 15 + ["test"] * 5}
    with pytest.warns(DataWarning, match=r"5 held-out row.*row 16 as row 6.*client.s. s") as told:
        fed = Federation.from_table(table, "site", "y", features=["x", "z"], split="part")
    assert len(told) == 1 and "duplicates of a training row" in fed.source["rows and columns"]


def test_rows_that_are_alike_by_chance_are_no_copies_and_copies_among_them_are():
    rng, n = np.random.default_rng(0), 2000
    table = {"site": ["a", "b"] * (n // 2), "x": rng.integers(0, 3, n), "z": rng.integers(0, 3, n)}
    table |= {"y": np.array(["no", "yes"])[rng.integers(0, 2, n)]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Federation.from_table(table, "site", "y", test=0.25)
    table["w"] = rng.integers(0, 2000, n)
    twice = {name: np.concatenate([column, column[:200]]) for name, column in table.items()}
    with pytest.warns(DataWarning, match=r"duplicates of a training row.*about \d+ would be alike"):
        Federation.from_table(twice, "site", "y", test=0.25)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_together": "patient", "time": "day", "test": 0.2}, "both at once"),
        ({"keep_together": "patient"}, "give test= a fraction"),
        ({"split": "part", "test": 0.2}, "leave out the test"),
        (
            {"split": "part", "keep_together": "patient"},
            "Rows of '0' in column 'patient' are in sev",
        ),
        ({"keep_together": "none", "test": 0.2}, "no column 'none'"),
        ({"test": 1.0}, "leave something to train on"),
        ({"test": float("nan")}, "leave something to train on"),
    ],
)
def test_requests_that_cannot_be_kept(options, message):
    table = {**VISITS, "part": ["train", "test"] * 10}
    with pytest.raises(DataError, match=message):
        Federation.from_table(table, "site", "y", features=["x"], **options)


def test_a_federation_that_was_scaled_is_not_divided_afterwards():
    fed = Federation.from_table(VISITS, "site", "y", features=["x"])
    with pytest.raises(DataError, match=r"leaked; give test= and validation= to from_table"):
        fed.split(test=0.2)


def test_groups_inside_clients_are_a_column_of_the_table() -> None:
    table = {
        "site": ["n"] * 4 + ["s"] * 4,
        "sex": ["f", "m", None, "f", "m", "m", "f", "f"],
        "age": [50, 61, 42, 33, 70, 55, 48, 39],
        "ill": ["no", "yes", "no", "yes", "no", "yes", "no", "yes"],
    }
    given = {"client": "site", "target": "ill", "report_by": "sex", "min_count": 1}
    fed = Federation.from_table(table, **given)
    assert fed.train.groups is not None
    assert fed.train.groups.tolist() == ["f", "m", "unknown", "f", "m", "m", "f", "f"]
    assert any(name.startswith("sex") for name in fed.preparation.feature_names)
    without = Federation.from_table(table, **given, features=["age"])
    assert without.preparation.feature_names == ("age",)
    with pytest.raises(DataError, match="no column 'gender'"):
        Federation.from_table(table, client="site", target="ill", report_by="gender")


PEOPLE = {
    "hospital": ["Hill", "Lake"] * 120,
    "patient": [f"p{k // 3}" for k in range(240)],
    "age": [float(k) for k in range(240)],
    "sex": ["f", "m", "f"] * 80,
    "outcome": ["well", "ill", "ill", "well"] * 60,
}


def load_people(**more):
    given = {"features": ["age"], "test": 0.25, **more}
    return Federation.from_table(PEOPLE, "hospital", "outcome", **given)


def find_people(fed):
    """Return the patients of every split, whose ages number the rows."""
    (age,) = fed.preparation.columns
    return {
        label: {round(row) // 3 for row in (split.inputs.ravel() * age.scale + age.centre).tolist()}
        for label, split in fed.splits().items()
    }


def test_a_person_in_groups_is_warned_of_and_kept_together_by_group():
    with pytest.warns(
        DataWarning, match=r"80 different values.* in test data.*keep_together='patient'"
    ):
        fed = load_people(report_by="patient")
    found = find_people(fed)
    assert len(found["train"] & found["test"]) > 20  # what the warning is about
    assert "keep_together='patient'" in fed.source["rows and columns"]
    fed = load_people(keep_together="patient")
    found = find_people(fed)
    assert not found["train"] & found["test"]
    assert found["train"] | found["test"] == set(range(80)) and len(found["test"]) >= 15


def test_a_site_is_told_of_a_person_in_groups():
    request = TableRequest("hospital", "outcome", ("age",), report_by="patient")
    rows = {name: values[::2] for name, values in PEOPLE.items()}
    (told,) = SiteTable.read(rows, "Hill", request).told
    assert "80 different values" in told and "use keep_together='patient'" in told


@pytest.mark.filterwarnings("error")
def test_groups_of_people_are_not_warned_of():
    assert set(load_people(report_by="sex").train.groups) == {"f", "m"}
    both = load_people(keep_together="patient", report_by="patient")
    assert not set(both.train.groups) & set(both.test.groups)


@pytest.mark.parametrize("values", [16, 20], ids=["few rows each", "as many as may be"])
def test_few_people_are_known_by_the_name_of_their_column(values):
    rows = 5 * values
    table = {
        "site": ["n", "s"] * (rows // 2),
        "patient": [k % values for k in range(rows)],
        "band": [k % values for k in range(rows)],
        "x": [float(k) for k in range(rows)],
        "y": (["u", "v", "v"] * rows)[:rows],
    }
    given = {"client": "site", "target": "y", "features": ["x"], "test": 0.2}
    with pytest.warns(DataWarning, match="use keep_together='patient'"):
        Federation.from_table(table, report_by="patient", **given)
    assert "rows and columns" not in Federation.from_table(table, report_by="band", **given).source


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    taken=st.lists(
        st.sampled_from(["train", "validation", "test", None]), min_size=30, max_size=30
    ),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None)
def test_groups_are_as_near_to_the_fractions_as_one_group_more_or_less(sizes, taken, seed):
    """Whatever other clients fixed before; a split that they overfilled gets nothing more."""
    holdout = Holdout(validation=0.2, test=0.3, seed=seed)
    mine = {f"g{k}": list(range(size)) for k, size in enumerate(sizes)}
    fixed = {g: split for g, split in zip(mine, taken, strict=False) if split}
    places = _place_groups("a", mine, fixed, holdout)
    assert places.keys() == mine.keys() and fixed.items() <= places.items()
    assert "train" in places.values() or all(g in fixed for g in mine)
    for split, share in (("validation", 0.2), ("test", 0.3)):
        before = sum(len(mine[g]) for g in fixed if fixed[g] == split)
        after = sum(len(mine[g]) for g in mine if places[g] == split)
        wanted = share * sum(sizes)
        assert after == before or abs(after - wanted) < abs(before - wanted)
        free = [len(mine[g]) for g in mine if g not in fixed and places[g] == "train"]
        if "train" in fixed.values():  # nobody has to stay: what is left would lead further away
            assert all(abs(after + k - wanted) >= abs(after - wanted) for k in free)
