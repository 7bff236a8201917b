"""Tangent features against finite differences, and the whole of Train-Convexify-Train."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.steps.test_steps import two_moons
from torch import nn

from equifed.algorithms import FedAvg, ScaffPD
from equifed.contract.local import LocalSGD
from equifed.engines.simulate import simulate
from equifed.models import build
from equifed.models.features import (
    choose_coordinates,
    convexify,
    tangent_features,
)
from equifed.objectives import CVaR
from equifed.training.loop import train

pytestmark = pytest.mark.long


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [nn.Linear(2, 5), nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, 3)]
    return nn.Sequential(*parts).double()


@pytest.mark.parametrize("size", [1, 3 * 33 * 8, 1 << 27])
def test_features_are_derivatives_of_the_output(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equifed.models.features.CHUNK_BYTES", size)
    module = network(dropout=0.5)  # features are taken without dropout
    parameters = {n: p.detach() for n, p in module.named_parameters()}
    inputs = torch.randn(7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    flat = torch.cat([p.flatten() for p in parameters.values()])
    coordinates = choose_coordinates(len(flat), 9, seed=3)
    found = tangent_features(module, parameters, inputs, coordinates)
    assert found.shape == (7, 9)
    module.eval()
    for column, k in enumerate(coordinates):
        outputs = []
        for sign in (1, -1):
            moved = flat.clone()
            moved[k] += sign * 1e-6
            nn.utils.vector_to_parameters(moved, module.parameters())
            with torch.no_grad():
                outputs.append(module(inputs).sum(1))
        np.testing.assert_allclose(found[:, column], (outputs[0] - outputs[1]) / 2e-6, atol=1e-8)


def test_features_of_a_linear_model_are_its_inputs() -> None:
    """Reduction: the tangent of a linear model with one output is the input itself, normalised."""
    federation = two_moons()
    tangent = convexify(federation, nn.Linear(2, 1, bias=False), {"weight": torch.ones(1, 2)})
    inputs = federation.train.inputs
    size = np.sqrt(np.mean(np.sum(inputs**2, axis=1)))
    np.testing.assert_allclose(tangent.train.inputs, inputs / size, rtol=1e-6)
    assert np.array_equal(tangent.train.targets, federation.train.targets)
    assert tangent.names == federation.names


def test_coordinates_are_a_subset_that_depends_on_the_seed_alone() -> None:
    first, again, other = (choose_coordinates(100, 20, seed) for seed in (0, 0, 1))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert len(np.unique(first)) == 20 and first.min() >= 0 and first.max() < 100
    with pytest.raises(ValueError, match="coordinates"):
        choose_coordinates(5, 6)


def test_normalised_features_have_mean_squared_norm_one() -> None:
    module = network().float()
    tangent = convexify(two_moons(), module, dict(module.named_parameters()), coordinates=10)
    norms = np.sum(tangent.train.inputs.astype(np.float64) ** 2, axis=1)
    np.testing.assert_allclose(norms.mean(), 1.0, rtol=1e-5)
    assert "10 of 33" in tangent.source["features"]


def test_another_models_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"parameters lack '3.weight' of shape \(3, 5\)"):
        convexify(two_moons(), network(), dict(nn.Sequential(nn.Linear(2, 5)).named_parameters()))


def test_train_convexify_train() -> None:
    """FedAvg on a network, then SCAFF-PD on its tangent features: better than on the raw inputs."""
    federation = two_moons()
    module = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    drawn = simulate(federation, module, "cross_entropy", init="fresh")
    stage1 = train(FedAvg(LocalSGD(lr=0.5, steps=10)), drawn, rounds=20)
    assert stage1.parameters is not None
    tangent = convexify(federation, module, stage1.parameters, coordinates=80)
    values, worst = {}, {}
    for name, data in (("raw", federation), ("tangent", tangent)):
        clients = simulate(data, build("linear", data.input_shape, 2), "squared", l2=1e-3)
        history = train(
            ScaffPD(CVaR(0.5)), clients, rounds=60, evaluate=("train", "test"), every=60
        )
        assert "gap" in history.rounds[-1].numbers
        last = history.last("accuracy", "train")
        assert last is not None and history.rounds[-1].objective is not None
        values[name], worst[name] = history.rounds[-1].objective, last.values.min()
    assert values["tangent"] < 0.9 * values["raw"]
    assert worst["tangent"] >= worst["raw"]
