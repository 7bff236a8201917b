"""What a table's columns are told to be: leaks, identifiers, spellings, numbers as text."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equifed.data import Federation, columns, infer
from equifed.data.columns import Columns, look_at, name_category
from equifed.data.infer import find_leaks, guess_client, guess_columns, is_identifier
from equifed.data.split import DataError, DataWarning

pytestmark = pytest.mark.long

ROWS = 120
DRAW = np.random.default_rng(0)


def table(**more: Any) -> dict[str, list[Any]]:
    """Return a table of three clients whose only feature tells nothing."""
    found: dict[str, Any] = {"site": ["a", "b", "c"] * (ROWS // 3), "x": DRAW.normal(size=ROWS)}
    found |= {"ill": ["no", "yes", "yes", "no"] * (ROWS // 4), **more}
    return {name: list(values) for name, values in found.items()}


def test_persons_of_few_rows_each_are_kept_together_in_whatever_way_they_are_written() -> None:
    for people in ([k // 2 for k in range(ROWS)], [f"P{k // 2}" for k in range(ROWS)]):
        guess = guess_columns(table(person=people), "site", "ill")
        assert guess.groups == ("person",) and "several rows each" in guess.left_out["person"]


def test_case_numbers_are_identifiers_also_when_rows_were_copied() -> None:
    numbers = [*range(1000, 1000 + ROWS - 5), *range(1000, 1005)]
    ages = DRAW.integers(20, 90, ROWS)
    assert is_identifier("Fall", look_at(numbers))
    assert not is_identifier("age", look_at(list(ages)))
    assert not is_identifier("cost", look_at(list(DRAW.integers(0, 10**7, ROWS))))
    assert "Fall" in guess_columns(table(Fall=numbers), "site", "ill").left_out
    with pytest.warns(DataWarning, match=r"Left out: 'Fall' .*features=\["):
        fed = Federation.from_table(table(Fall=numbers), "site", "ill")
    assert "Fall" not in fed.preparation.feature_names
    assert "an identifier" in dict(fed.preparation.left_out)["Fall"]
    fed = Federation.from_table(table(Fall=numbers), "site", "ill", features=["x", "Fall"])
    assert fed.preparation.feature_names == ("x", "Fall")


@pytest.mark.parametrize(
    "values",
    [["I0", "I1", "I1", "I0"] * (ROWS // 4), [0.0, 3.5, 2.5, -1.0] * (ROWS // 4)],
    ids=["codes", "numbers"],
)
def test_a_column_that_tells_the_outcome_is_pointed_out(values: list[Any]) -> None:
    told = guess_columns(table(after=values), "site", "ill").remarks
    assert any(r.startswith("after: predicts ill of every row") for r in told)
    nearly = [values[1], *values[1:]]
    assert not any("predicts" in r for r in guess_columns(table(a=nearly), "site", "ill").remarks)


@pytest.mark.parametrize(
    ("different", "rows", "fits"),
    [(1, 120, False), (2, 120, True), (60, 120, True), (61, 120, False), (2000, 6000, True),
     (2001, 6000, False)],
)  # fmt: skip
def test_a_column_of_clients_has_two_to_two_thousand_values_of_two_rows_each(
    different: int, rows: int, fits: bool
) -> None:
    look = look_at([f"s{k % different}" for k in range(rows)])
    assert guess_client({"site": look, "x": look_at([0.5] * rows)}, rows) == ["site"] * fits


@pytest.mark.parametrize(("different", "told"), [(2, False), (3, True), (10, True), (11, False)])
def test_few_whole_numbers_may_be_codes_and_a_remark_says_so(different: int, told: bool) -> None:
    values = [k * k % 97 for k in range(different)] * ROWS
    remarks = guess_columns(table(grade=values[:ROWS]), "site", "ill").remarks
    assert any("different whole numbers, taken as amounts" in r for r in remarks) == told


def test_spellings_and_numbers_as_text_are_pointed_out() -> None:
    words = ["never", "Never", "often"] * (ROWS // 3)
    percents = [f"{k} %" for k in range(ROWS)]
    found = guess_columns(table(smokes=words, share=percents), "site", "ill")
    assert any("'never' and 'Never' differ in capitals" in r for r in found.remarks)
    assert "numbers written as text, such as '0 %'" in found.left_out["share"]


def test_targets_and_clients_that_differ_in_every_row_are_refused() -> None:
    days = [f"2024-{1 + k // 28:02d}-{1 + k % 28:02d}" for k in range(ROWS)]
    with pytest.raises(DataError, match=r"'ill' has 120 different values in 120 rows"):
        guess_columns(table(ill=days), "site", "ill")
    with pytest.raises(DataError, match=r"'ill' has 120 different values in 120 rows"):
        Federation.from_table(table(ill=days), "site", "ill")
    with pytest.raises(DataError, match=r"'site' has a value of its own in each of 120 rows"):
        guess_columns(table(site=days), "site", "ill")


def test_texts_of_clients_with_one_row_each_are_no_identifiers() -> None:
    data = table(site=[f"s{k}" for k in range(ROWS)], sex=["f", "m"] * (ROWS // 2))
    data = Federation.from_table(data, "site", "ill")
    assert "sex=f" in data.preparation.feature_names


def tells_by_hand(values: list[Any], classes: list[str | None]) -> bool:
    """Return what a column tells, cell by cell."""
    rows = [(v, c) for v, c in zip(values, classes, strict=True) if None not in (v, c)]
    if len(rows) < infer.FEW or len({c for _, c in rows}) < 2:
        return False
    if isinstance(rows[0][0], str):
        one = all(c == d for v, c in rows for w, d in rows if v == w)
        return one and len({v for v, _ in rows}) <= len(rows) // 4
    spans = {c: [v for v, d in rows if d == c] for _, c in rows}
    ends = sorted((min(found), max(found)) for found in spans.values())
    return all(a[1] < b[0] for a, b in itertools.pairwise(ends))


numbers = st.lists(st.integers(0, 6) | st.none(), min_size=12, max_size=30)
texts = st.lists(st.sampled_from(["a", "b", "c", None]), min_size=12, max_size=30)


@settings(deadline=None, max_examples=200)
@given(values=numbers | texts, data=st.data(), shown=st.sampled_from([3, 1000]))
def test_leaks_are_those_found_cell_by_cell(values: Any, data: st.DataObject, shown: int) -> None:
    known = [v for v in values if v is not None]
    guess = {v: data.draw(st.sampled_from("xy")) for v in dict.fromkeys(known)}
    odd = data.draw(st.sets(st.integers(0, len(values) - 1), max_size=1))
    other = data.draw(st.sampled_from(["x", None]))
    classes = [other if k in odd else guess.get(v, "x") for k, v in enumerate(values)]
    before, infer.SHOWN = infer.SHOWN, shown
    try:
        found = find_leaks({"f": values, "ill": classes}, ["f"], "ill")
    finally:
        infer.SHOWN = before
    if known:
        assert bool(found) == tells_by_hand(values, classes)


def test_each_different_cell_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[Any] = []

    def count(value: Any) -> str:
        named.append(value)
        return name_category(value)

    monkeypatch.setattr(columns, "name_category", count)
    cells = ["north", "south", "3.0", "3"] * 500
    found = look_at(cells)
    assert (found.different, found.most, found.count) == (3, 1000, 2000)
    assert len(named) == 4


def test_long_numbers_are_told_apart() -> None:
    ids = [str(2**60 + k) for k in range(50)]  # as float64 they are one number
    assert look_at(ids).different == 50
    assert is_identifier("record", look_at(ids))
    assert look_at(Columns({"a": [1, 1.5, 2**60]})["a"]).different == 3
