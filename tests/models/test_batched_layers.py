"""Layers written as plain products compute what torch's own do, and batch over clients."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.problems import classification
from torch import Tensor, nn

from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.engines.loop import LoopClients
from equifed.engines.simulate import simulate
from equifed.models.layers import WrittenConv2d, write_out
from equifed.models.losses import cross_entropy

RECURRENT = [
    nn.LSTM(5, 4, layers, bias=bias, batch_first=first).double()
    for layers, bias, first in ((1, True, True), (2, True, False), (2, False, True))
]


@pytest.mark.parametrize("layer", RECURRENT, ids=str)
def test_recurrent_layers(layer: nn.RNNBase) -> None:
    written = copy.deepcopy(layer)
    write_out(written)
    assert type(written) is not type(layer)
    inputs = torch.randn(3, 3, 5, dtype=torch.float64)
    (ours, last), (theirs, others) = written(inputs), layer(inputs)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(last, others)
    given = tuple(torch.randn_like(state) for state in others)
    torch.testing.assert_close(written(inputs, given), layer(inputs, given))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 4, 3, padding=1),
        nn.Conv2d(2, 5, (3, 2), stride=(2, 1), padding=(0, 1), bias=False),
    ],
    ids=str,
)
def test_convolutions(layer: nn.Conv2d) -> None:
    written = copy.deepcopy(layer)
    write_out(written, convolutions=True)
    assert type(written) is WrittenConv2d
    images = torch.randn(2, layer.in_channels, 7, 8)
    torch.testing.assert_close(written(images), layer(images))
    torch.testing.assert_close(written(images[0]), layer(images[0]))
    gradients = [
        torch.autograd.grad(m(images).square().sum(), m.weight)[0] for m in (written, layer)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(2, 2, 3, dilation=2),
        nn.Conv2d(2, 2, 3, padding="same"),
    ],
    ids=str,
)
def test_what_is_special_stays(layer: nn.Conv2d) -> None:
    write_out(layer, convolutions=True)
    assert type(layer) is nn.Conv2d


class Sequences(nn.Module):
    """A recurrent layer over the rows of an image."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer, self.output = layer, nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        """Return scores from the last state."""
        scores: Tensor = self.output(self.layer(images)[0][:, -1])
        return scores


def test_engines_agree_on_sequences() -> None:
    """The fused kernel has no rule for batching: with torch 2.13 this warned, or failed."""
    data, module = classification([7, 4, 6], (6, 5), 3), Sequences(nn.LSTM(5, 4, batch_first=True))
    given = {"dtype": torch.float64, "init": "given"}
    stacked = simulate(data, module, cross_entropy, engine="stacked", **given)
    loop = LoopClients(data, module, cross_entropy, **given)
    x, work = loop.flatten(module), LocalSGD(lr=0.3, steps=3, batch_size=3)
    ours = stacked.local_steps(x, work, Stream(1)).displacement.weighted_sum([0.2, 0.3, 0.5])
    theirs = loop.local_steps(x, work, Stream(1)).displacement.weighted_sum([0.2, 0.3, 0.5])
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
