"""Channels last and fused attention: the same functions, faster; and where they do not apply."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.problems import classification
from torch import Tensor, nn

from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.engines.loop import LoopClients
from equifed.engines.stacked.clients import StackedClients
from equifed.models import build
from equifed.models.flat import FlatModel
from equifed.models.layers import AddressedAttention
from equifed.models.losses import cross_entropy


class Viewed(nn.Module):
    """Looks at its images through ``view``, which other layouts do not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(4 * 36, 3)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(images)
        scores: Tensor = self.last(hidden.view(len(images), -1))
        return scores


class InMemory(Viewed):
    """Reads its images in the order in which they lie in memory: no function of the images."""

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(images)
        scores: Tensor = self.last(hidden.as_strided((len(images), 4 * 36), (4 * 36, 1)))
        return scores


def flat(module: nn.Module, dtype: torch.dtype = torch.float32) -> FlatModel:
    return FlatModel(module, cross_entropy, torch.randn(3, 2, 6, 6), dtype=dtype)


@pytest.mark.parametrize("channels", [1, 2])
def test_layout_changes_nothing_but_rounding(channels: int) -> None:
    module = build("cnn", (channels, 6, 6), 3, groups=2)
    images = torch.randn(5, channels, 6, 6)
    model = FlatModel(module, cross_entropy, images[:3])
    assert model.channels_last
    x = model.flatten(module).requires_grad_()
    found = []
    for last in (True, False):
        model.channels_last = last
        value = model.sample_losses(x, images, torch.tensor([0, 1, 2, 0, 1])).sum()
        found += [torch.cat([value.detach()[None], torch.autograd.grad(value, x)[0]])]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_modules_that_need_their_layout_keep_it() -> None:
    for module in (Viewed(), InMemory()):
        model = flat(module)
        assert not model.channels_last
        outputs = model.outputs(model.flatten(module), torch.randn(4, 2, 6, 6))
        assert outputs.shape == (4, 3)


def test_double_precision_and_dense_models_are_left_alone() -> None:
    assert not flat(build("cnn", (2, 6, 6), 3), torch.float64).channels_last
    assert not flat(build("mlp", (2, 6, 6), 3)).channels_last


@pytest.mark.parametrize("name", ["cnn", "viewed"])
def test_engines_agree_whatever_the_layout(name: str) -> None:
    module = build("cnn", (2, 6, 6), 3) if name == "cnn" else Viewed()
    data = classification(sizes=(6, 4), shape=(2, 6, 6))
    work, ends = LocalSGD(lr=0.1, steps=3, batch_size=3), []
    for kind in (LoopClients, StackedClients):
        clients = kind(data, module, cross_entropy, l2=0.1)
        moved = clients.local_steps(clients.flatten(module), work, Stream(0))
        ends.append(moved.displacement.dense())
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_is_torchs(need_weights: bool, masked: bool, first: bool, bias: bool) -> None:
    """Outputs and gradients, to itself and to others, fused or by products."""
    torch.manual_seed(0)
    given = {"bias": bias, "batch_first": first}
    theirs = nn.MultiheadAttention(8, 2, **given, dtype=torch.float64)
    ours = copy.deepcopy(theirs)
    AddressedAttention.take_over(ours, 0)
    inputs = torch.randn(4, 4, 8, dtype=torch.float64, requires_grad=True)
    later = torch.ones(4, 4, dtype=torch.bool).triu(1) if masked else None
    for others in (inputs, inputs.flip(0)):
        found = []
        for products, attention in ((None, theirs), (False, ours), (True, ours)):
            if products is not None:
                attention.products = products
            outputs, weights = attention(
                inputs, others, others, need_weights=need_weights, attn_mask=later
            )
            assert (weights is not None) == need_weights
            wanted = [inputs, *attention.parameters()]
            gradients = torch.autograd.grad(outputs.square().sum(), wanted)
            found.append(torch.cat([v.reshape(-1) for v in (outputs, *gradients)]))
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=1e-10, atol=1e-12)
