"""FLamby's hospitals: its patients, its split rule, its scaling."""

from __future__ import annotations

import numpy as np
import pytest
from experiments.harness.experiment import EXPERIMENTS, definition

import equifed as ef

pytest.importorskip("sklearn")
HEART = EXPERIMENTS["flamby-heart"].module


def test_patients_and_split_are_the_published_ones() -> None:
    """740 patients; the sizes are those that FLamby prints for its split."""
    data = HEART.federation(definition("flamby-heart")["split_seed"])
    sizes = [(len(data.train.client(i)[1]), len(data.test.client(i)[1])) for i in range(4)]
    assert sizes == [(199, 104), (172, 89), (30, 16), (85, 45)]
    assert data.input_shape == (13,)
    assert data.classes == 2


def test_columns_are_those_of_the_package() -> None:
    """The same patients, read by the package's own loader, which keeps every category."""
    whole = ef.load("heart-disease", missing="complete", test=0.0)
    for i, code in enumerate(HEART.SITES.values()):
        features, labels = HEART.read_hospital(code)
        inputs, targets = whole.train.client(i)
        assert sorted(labels.tolist()) == sorted(np.asarray(targets).tolist())
        assert features.shape == (len(inputs), 13)
        dummies = np.asarray(inputs)[:, [9, 10, 11, 13, 14]].sum(0)
        np.testing.assert_allclose(features[:, 8:].sum(0), dummies)


@pytest.mark.parametrize("seed", [43, 1000])
def test_every_hospital_is_scaled_on_its_training_part(seed: int) -> None:
    data = HEART.federation(seed)
    for i in range(4):
        inputs, _ = data.train.client(i)
        np.testing.assert_allclose(inputs.mean(0), 0, atol=1e-9)
        spread = inputs.std(0, ddof=1)
        assert (np.isclose(spread, 1) | np.isclose(spread, 0)).all()
        both = np.concatenate([data.train.client(i)[1], data.test.client(i)[1]])
        if i != 2:  # stratified, but for Switzerland
            share = both.mean()
            assert abs(data.test.client(i)[1].mean() - share) < 1 / len(data.test.client(i)[1])


def test_differences_are_paired() -> None:
    values = {"a": np.array([[0.5, 0.6, 0.7, 0.8]] * 3), "b": np.array([[0.4, 0.6, 0.7, 0.9]] * 3)}
    table = HEART._differences(values, "b")
    assert table.rows[0][0] == "a"
    assert table.rows[0][1].startswith("+10.0") and table.rows[0][4].startswith("-10.0")
    assert table.rows[0][5].startswith("+10.0")
