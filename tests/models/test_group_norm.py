"""BatchNorm becomes GroupNorm: the same weights and biases, in a model that clients can share."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from equifed.models import to_group_norm
from equifed.models.checks import check_module


class Tied(nn.Module):
    """One batch norm in two places, beside a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen = nn.BatchNorm2d(12), nn.BatchNorm2d(6).requires_grad_(False)
        self.body = nn.Sequential(self.first, nn.Conv2d(12, 6, 1))

    def forward(self, x):
        return self.frozen(self.body(self.first(x)))


def redraw(module):
    for name, value in module.named_parameters():
        if "conv" not in name:
            value.data = torch.randn_like(value)
    return module


def test_weights_and_biases_are_kept_and_the_formula_is_group_norm():
    torch.manual_seed(0)
    old = redraw(Tied()).double()
    before = copy.deepcopy(old.state_dict())
    new, x = to_group_norm(old), torch.randn(5, 12, 4, 4, dtype=torch.float64)
    check_module(new)
    assert dict(new.named_parameters()).keys() == dict(old.named_parameters()).keys()
    for (name, a), b in zip(new.named_parameters(), old.parameters(), strict=True):
        assert torch.equal(a, b) and a.requires_grad == b.requires_grad, name
    assert new.body[0] is new.first and isinstance(old.first, nn.BatchNorm2d)

    def norm(x, part, groups):  # each sample by itself, by its definition
        flat = x.reshape(len(x), groups, -1)
        mean, var = flat.mean(2, keepdim=True), flat.var(2, keepdim=True, correction=0)
        scaled = ((flat - mean) / (var + part.eps).sqrt()).reshape(x.shape)
        return scaled * part.weight.view(-1, 1, 1) + part.bias.view(-1, 1, 1)

    inner = functional.conv2d(norm(norm(x, old.first, 6), old.first, 6), *old.body[1].parameters())
    torch.testing.assert_close(new(x), norm(inner, old.frozen, 3))
    torch.testing.assert_close(new(x)[:1], new(x[:1]))
    for name, value in old.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize(
    ("channels", "groups", "found"), [(12, 8, 6), (64, 8, 8), (64, 32, 32), (7, 8, 1), (2, 8, 1)]
)
def test_groups_divide_and_hold_two_channels(channels, groups, found):
    assert to_group_norm(nn.BatchNorm1d(channels), groups).num_groups == found


def test_an_instance_norm_loses_its_statistics_alone():
    old = nn.InstanceNorm2d(3, affine=True, track_running_stats=True).train()
    x = torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(to_group_norm(old)(x), old(x))


def test_one_channel_is_refused():
    with pytest.raises(ValueError, match="replace it by hand"):
        to_group_norm(nn.Sequential(nn.BatchNorm1d(1)))


@pytest.mark.parametrize("stats", [True, False])
def test_the_refusal_names_the_conversion(stats):
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=stats))
    with pytest.raises(ValueError, match=r"equifed\.models\.to_group_norm\(model\)"):
        check_module(net)
    check_module(to_group_norm(net))
