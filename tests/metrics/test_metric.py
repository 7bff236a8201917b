"""The direction of a metric is decided once; everything that depends on it agrees."""

import numpy as np
import pytest
from hypothesis import given
from tests.metrics.vectors import vectors

from equifed import metrics
from equifed.metrics import METRICS, find_metric


def test_the_sign_is_the_direction():
    assert all(metric.sign == (1 if metric.higher_is_better else -1) for metric in METRICS.values())


@pytest.mark.parametrize("name", ["accuracy", "loss"])
@given(values=vectors())
def test_the_sign_makes_larger_better(name, values):
    metric = find_metric(name)
    higher = metric.higher_is_better
    signed = metric.sign * np.asarray(values)
    assert metric.sign * signed.min() == metrics.worst(values, higher_is_better=higher)
    assert metric.sign * signed.max() == metrics.best(values, higher_is_better=higher)


def test_every_metric_is_known_by_its_name():
    assert all(find_metric(name) is metric for name, metric in METRICS.items())


def test_a_metric_of_ones_own_is_a_kind_of_loss():
    own, loss = find_metric("squared error"), find_metric("loss")
    assert own.name == "squared error"
    assert (own.sign, own.factor, own.unit) == (loss.sign, loss.factor, loss.unit)
    assert own.write(0.123456) == loss.write(0.123456)


def test_fractions_are_written_in_percent():
    accuracy = find_metric("accuracy")
    assert accuracy.write(0.5) == "50.0 %" == f"{accuracy.factor * 0.5:.1f}{accuracy.unit}"
