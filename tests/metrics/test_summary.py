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
from equifed.metrics.summary import BY_SAMPLE

LOSSES = np.array([0.2, 0.9, 0.4, 0.4, 1.6, 0.1])


@pytest.mark.parametrize("higher", [True, False])
def test_entries_are_the_functions_of_the_same_name(higher):
    row = metrics.summary(LOSSES, np.arange(6), higher_is_better=higher, fractions=(0.1, 0.5))
    for name in ("worst", "best"):
        assert row[name] == getattr(metrics, name)(LOSSES, higher_is_better=higher)
        fraction = getattr(metrics, f"{name}_fraction")
        assert row[f"{name}_50_percent"] == fraction(LOSSES, 0.5, higher_is_better=higher)
    assert row["cvar_10_percent"] == metrics.cvar(LOSSES, 0.1, higher_is_better=higher)
    for name in [
        "average_by_client",
        "minimum",
        "maximum",
        "spread",
        "variance",
        "standard_deviation",
        "twenty_twenty",
        "palma",
        "gini",
        "theil",
        "jain",
        "entropy",
        "cosine",
    ]:
        assert row[name] == getattr(metrics, name)(LOSSES), name
    for name in ("atkinson", "burden"):
        assert row[f"{name}_1"] == getattr(metrics, name)(LOSSES, 1.0)
        assert row[f"{name}_infinite"] == getattr(metrics, name)(LOSSES, math.inf)
    assert row["average_by_sample"] == metrics.average_by_sample(LOSSES, np.arange(6))
    assert row["clients"] == 6
    assert all(isinstance(value, float) for value in row.values())


def test_every_entry_is_described_once_with_a_snake_case_name():
    row = metrics.summary(LOSSES, LOSSES, higher_is_better=False)
    described = [r.name for r in (*metrics.reducers(), BY_SAMPLE)]
    assert len(set(described)) == len(described)
    assert set(row) == {"clients", *described}
    for name in described:
        assert re.fullmatch("[a-z][a-z0-9_]*", name)
        assert metrics.describe(name).name == name
        assert "\n" not in metrics.describe(name).meaning


def test_sizes_are_optional():
    assert "average_by_sample" not in metrics.summary(LOSSES, higher_is_better=False)


@settings(deadline=None, max_examples=30)
@given(vectors(1e-3, 1e3, min_size=2), st.booleans(), st.floats(0.05, 0.95))
def test_directions_agree_with_equalisation(values, higher, part):
    """Moving every client towards the mean must not look less fair in any directed entry."""
    after = values + part * (values.mean() - values)
    rows = [metrics.summary(v, higher_is_better=higher) for v in (values, after)]
    for reducer in metrics.reducers():
        before, now = (row[reducer.name] for row in rows)
        slack = 1e-9 * (1 + abs(before))
        if reducer.direction is metrics.Direction.LOWER:
            assert now <= before + slack, reducer.name
        elif reducer.direction is metrics.Direction.HIGHER:
            assert now >= before - slack, reducer.name


@settings(deadline=None, max_examples=30)
@given(vectors(1e-3, 1e3, min_size=2), st.booleans(), st.floats(0.1, 10))
def test_levels_improve_when_everybody_does(values, higher, gain):
    after = values + gain if higher else values - gain
    rows = [metrics.summary(v, higher_is_better=higher) for v in (values, after)]
    for reducer in metrics.reducers():
        if reducer.direction is metrics.Direction.AS_VALUES:
            change = rows[1][reducer.name] - rows[0][reducer.name]
            lower = reducer.lower_is_better(higher_is_better=higher)
            assert (change < 0) is lower, reducer.name


@pytest.mark.long
@settings(deadline=None, max_examples=50)
@given(vectors(-1e3, 1e3), st.booleans())
def test_bounds_hold(values, higher):
    row = metrics.summary(values, higher_is_better=higher)
    for reducer in metrics.reducers():
        if not math.isnan(row[reducer.name]):
            low, high = reducer.bounds
            assert low <= row[reducer.name] <= high


def test_negative_values_leave_out_what_needs_shares():
    row = metrics.summary([-1.0, 2.0], higher_is_better=False)
    undefined = {name for name, value in row.items() if math.isnan(value)}
    assert undefined == {r.name for r in metrics.reducers() if not r.signed}
    assert "gini" in undefined
    assert row["worst"] == 2.0


def test_missing_clients_are_named_or_dropped_on_request():
    values, sizes = [0.5, math.nan, 1.0], [1, 100, 3]
    with pytest.raises(ValueError, match=r"positions 1 have no value .*missing='drop'"):
        metrics.summary(values, higher_is_better=True)
    row = metrics.summary(values, sizes, higher_is_better=True, missing="drop")
    assert row == metrics.summary([0.5, 1.0], [1, 3], higher_is_better=True)
    assert row["clients"] == 2
    with pytest.raises(ValueError, match="no client has a value"):
        metrics.summary([math.nan], higher_is_better=True, missing="drop")
    with pytest.raises(ValueError, match="must be finite"):
        metrics.summary([math.inf, 1.0], higher_is_better=False, missing="drop")


def test_absurd_losses_give_infinity_and_no_warning():
    row = metrics.summary([1e308, 1e308, 1.0], higher_is_better=False)
    assert row["average_by_client"] == row["variance"] == math.inf
    assert row["gini"] == pytest.approx(1 / 3)
    assert row["worst"] == 1e308


def test_messages():
    with pytest.raises(ValueError, match="no reducer is called 'fairness'"):
        metrics.describe("fairness")
    with pytest.raises(ValueError, match="no reducer is called 'worst_x_percent'"):
        metrics.describe("worst_x_percent")
    with pytest.raises(ValueError, match="'refuse' or 'drop', got 'ignore'"):
        metrics.summary([1.0], higher_is_better=True, missing="ignore")
    with pytest.raises(ValueError, match=r"sizes must have shape \(2,\)"):
        metrics.summary([1.0, 2.0], [1], higher_is_better=True)
    with pytest.raises(ValueError, match=r"shape \(n,\), got \(1, 2\)"):
        metrics.summary([[1.0, 2.0]], higher_is_better=True)
    with pytest.raises(TypeError, match="needs sizes"):
        BY_SAMPLE.compute(np.ones(2), True)


def test_metrics_import_neither_torch_nor_scipy():
    code = "import sys, equifed.metrics; print({'torch', 'scipy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
