"""Frozen features: the layer's output, whatever the chunk; the rest of the federation stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from equifed.algorithms import ScaffPD
from equifed.data.federation import Federation
from equifed.engines.simulate import simulate
from equifed.models.features import features
from equifed.objectives import CVaR
from equifed.training.loop import train


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2))


def federation() -> Federation:
    rng = np.random.default_rng(0)
    made = {f"c{i}": (rng.normal(size=(m, 3)), np.arange(m) % 2) for i, m in enumerate((20, 30))}
    return Federation.from_clients(made).split(test=0.3)


@pytest.mark.parametrize("chunk", [2, 7, 1000])
def test_they_are_the_output_of_the_layer(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equifed.models.features.CHUNK", chunk)
    net, data = network(), federation()
    made = features(net, data, layer="1")
    for label, split in data.splits().items():
        x = torch.as_tensor(split.inputs, dtype=torch.float32)
        expected = torch.relu(x @ net[0].weight.T + net[0].bias).detach()
        np.testing.assert_allclose(made.splits()[label].inputs, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(made.splits()[label].targets, split.targets)
        np.testing.assert_array_equal(made.splits()[label].offsets, split.offsets)
    assert made.names == data.names and made.classes == 2
    assert net.training and net[2].training  # left as it was


def test_dropout_is_off_and_images_are_flattened() -> None:
    net, data = network(), federation()
    one, two = (features(net, data).train.inputs for _ in range(2))
    np.testing.assert_array_equal(one, two)
    images = nn.Sequential(nn.Unflatten(1, (1, 3, 1)), nn.Conv2d(1, 2, 1))
    assert features(images, data).input_shape == (6,)


def test_a_linear_head_has_a_certificate() -> None:
    made = features(network(), federation(), layer="1")
    history = train(ScaffPD(CVaR(0.5)), simulate(made, "linear", l2=0.1), rounds=3)
    assert "gap" in history.rounds[-1].numbers


class Twice(nn.Module):
    """Runs its layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        return self.inner(self.inner(x))


class Broken(nn.Module):
    """Gives no numbers."""

    def forward(self, x: Any) -> Any:
        return x * float("nan")


class Centred(nn.Module):
    """Mixes the samples of a batch."""

    def forward(self, x: Any) -> Any:
        return x - x.mean(0)


class Drawn(nn.Module):
    """Draws at random in evaluation, too."""

    def forward(self, x: Any) -> Any:
        return x + torch.randn_like(x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: features(Centred(), d), "when other samples are beside it"),
        (lambda d: features(Drawn(), d), "or at a second time"),
        (lambda d: features(nn.Linear(7, 2), d), r"cannot take samples of shape \(3,\)"),
        (lambda d: features(network(), d, layer="9"), "no layer '9'; it has 0, 1, 2, 3"),
        (lambda d: features(Twice(), d, layer="inner"), "'inner' ran 2 times"),
        (lambda d: features(Broken(), d), "not finite"),
        (lambda d: features(nn.Flatten(0), d), "one row for each of"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(federation())
