"""The summary and the descriptions of its entries."""

import math
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.metrics.vectors import vectors

from equifed import metrics

LOSSES = np.array([0.2, 0.9, 0.4, 0.4, 1.6, 0.1])


@pytest.mark.parametrize("higher", [True, False])
def test_entries_are_the_functions_of_the_same_name(higher):
    row = metrics.summary(LOSSES, np.arange(6), higher_is_better=higher)
    assert row["worst"] == metrics.worst(LOSSES, higher_is_better=higher)
    for name in ("worst", "best"):
        fraction = getattr(metrics, f"{name}_fraction")
        assert row[f"{name}_20_percent"] == fraction(LOSSES, 0.2, higher_is_better=higher)
    for name in ("average_by_client", "spread", "standard_deviation", "twenty_twenty", "gini"):
        assert row[name] == getattr(metrics, name)(LOSSES), name
    assert row["average_by_sample"] == metrics.average_by_sample(LOSSES, np.arange(6))
    assert row["clients"] == 6
    assert all(isinstance(value, float) for value in row.values())


def test_every_entry_has_a_snake_case_name():
    row = metrics.summary(LOSSES, higher_is_better=False)
    assert set(row) == {"clients", *metrics.REDUCERS}
    assert all(re.fullmatch("[a-z][a-z0-9_]*", name) for name in metrics.REDUCERS)


def test_sizes_are_optional():
    assert "average_by_sample" not in metrics.summary(LOSSES, higher_is_better=False)


@settings(deadline=None, max_examples=30)
@given(vectors(1e-3, 1e3, min_size=2), st.booleans(), st.floats(0.05, 0.95))
def test_directions_agree_with_equalisation(values, higher, part):
    """Moving every client towards the mean must not look less fair in any directed entry."""
    after = values + part * (values.mean() - values)
    rows = [metrics.summary(v, higher_is_better=higher) for v in (values, after)]
    for reducer in metrics.REDUCERS.values():
        before, now = (row[reducer.name] for row in rows)
        slack = 1e-9 * (1 + abs(before))
        if not reducer.level:
            assert now <= before + slack, reducer.name


@settings(deadline=None, max_examples=30)
@given(vectors(1e-3, 1e3, min_size=2), st.booleans(), st.floats(0.1, 10))
def test_levels_improve_when_everybody_does(values, higher, gain):
    after = values + gain if higher else values - gain
    rows = [metrics.summary(v, higher_is_better=higher) for v in (values, after)]
    for reducer in metrics.REDUCERS.values():
        if reducer.level:
            change = rows[1][reducer.name] - rows[0][reducer.name]
            lower = reducer.lower_is_better(higher_is_better=higher)
            assert (change < 0) is lower, reducer.name


@pytest.mark.long
@settings(deadline=None, max_examples=50)
@given(vectors(-1e3, 1e3), st.booleans())
def test_bounds_hold(values, higher):
    row = metrics.summary(values, higher_is_better=higher)
    for reducer in metrics.REDUCERS.values():
        if not math.isnan(row[reducer.name]):
            low, high = reducer.bounds
            assert low <= row[reducer.name] <= high


def test_negative_values_leave_out_what_needs_shares():
    row = metrics.summary([-1.0, 2.0], higher_is_better=False)
    undefined = {name for name, value in row.items() if math.isnan(value)}
    assert undefined == {name for name, r in metrics.REDUCERS.items() if not r.signed}
    assert "gini" in undefined
    assert row["worst"] == 2.0


def test_absurd_losses_give_infinity_and_no_warning():
    row = metrics.summary([1e308, 1e308, 1.0], higher_is_better=False)
    assert row["average_by_client"] == row["standard_deviation"] == math.inf
    assert row["gini"] == pytest.approx(1 / 3)
    assert row["worst"] == 1e308


def test_messages():
    with pytest.raises(ValueError, match=r"positions 1 are not; leave clients without a value out"):
        metrics.summary([0.5, math.nan, 1.0], higher_is_better=True)
    with pytest.raises(ValueError, match="each of the 2 clients, got 1"):
        metrics.summary([1.0, 2.0], [1], higher_is_better=True)
    with pytest.raises(ValueError, match=r"shape \(n,\), got \(1, 2\)"):
        metrics.summary([[1.0, 2.0]], higher_is_better=True)


def test_metrics_import_neither_torch_nor_scipy():
    code = "import sys, equifed.metrics; print({'torch', 'scipy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
