"""The generated regression is that of SCAFF-PD, Section 6.1."""

import numpy as np
import pytest

from equifed.data import DataError
from equifed.datasets import load


def models(fed):
    """Least squares recovers a client's true model, because there is no noise."""
    pairs = [fed.train.client(i) for i in range(len(fed))]
    return np.array([np.linalg.lstsq(x, y, rcond=None)[0] for x, y in pairs])


def test_paper_sizes_are_the_default():
    fed = load("synthetic-regression")
    assert len(fed) == 5 and fed.input_shape == (10,) and fed.train.sizes.tolist() == [100] * 5
    assert fed.train.inputs.dtype == fed.train.targets.dtype == np.float64


def test_targets_are_noise_free():
    fed = load("synthetic-regression", seed=3)
    for i, model in enumerate(models(fed)):
        x, y = fed.train.client(i)
        np.testing.assert_allclose(x @ model, y, atol=1e-10)


def test_models_spread_as_asked():
    fed = load("synthetic-regression", clients=400, features=20, samples=25, scale=2.0, shift=0.5)
    found = models(fed)
    assert found.std(0).mean() == pytest.approx(0.5, rel=0.05)
    wide = [
        models(load("synthetic-regression", scale=2.0, shift=0.0, seed=s))[0] for s in range(60)
    ]
    assert np.std(wide) == pytest.approx(2.0, rel=0.1)


def test_without_shift_all_clients_share_one_model():
    found = models(load("synthetic-regression", shift=0.0))
    np.testing.assert_allclose(found - found[0], 0, atol=1e-10)


def test_inputs_are_standard_normal():
    x = load("synthetic-regression", clients=10, samples=2000).train.inputs
    np.testing.assert_allclose(np.cov(x.T), np.eye(10), atol=0.05)


def test_more_clients_leave_the_first_ones_alone():
    few, many = (load("synthetic-regression", clients=n) for n in (2, 6))
    np.testing.assert_array_equal(few.train.inputs, many.train.inputs[:200])
    np.testing.assert_array_equal(few.train.targets, many.train.targets[:200])


@pytest.mark.parametrize(
    ("params", "message"),
    [({"clients": 0}, "clients must be at least 1"), ({"shift": -1.0}, "must be finite and >= 0")],
)
def test_wrong_parameters_are_refused(params, message):
    with pytest.raises(DataError, match=message):
        load("synthetic-regression", **params)
