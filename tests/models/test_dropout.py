"""Dropout with an address: the same masks in any order, and torch's attention otherwise."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.problems import classification
from torch import nn

from equifed.algorithms import FedAvg
from equifed.contract.local import LocalSGD
from equifed.engines.simulate import simulate
from equifed.models.layers import AddressedAttention, address_dropout, draw_factors
from equifed.training.loop import train

pytestmark = pytest.mark.long

DOUBLE = torch.float64


class SequenceFirst(nn.Module):
    """Torch's default order: (length, samples, features) inside of the model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.last = layer, nn.Linear(12, 3)

    def forward(self, x):
        return self.last(self.layer(x.transpose(0, 1)).transpose(0, 1).flatten(1))


def transformer(batch_first: bool, **options) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=batch_first, **options)
    if batch_first:
        return nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 3))
    return SequenceFirst(layer)


@pytest.mark.parametrize("options", [{}, {"dropout": 0.0}, {"norm_first": True}], ids=str)
@pytest.mark.parametrize("batch_first", [True, False])
def test_an_encoder_layer_trains_alike_on_both_engines(batch_first, options):
    """With its default dropout of 0.1: the same run twice, and the same run on the other engine."""
    federation = classification(shape=(3, 4))
    found = []
    for engine in ("loop", "loop", "stacked"):
        module = transformer(batch_first, **options)
        clients = simulate(federation, module, engine=engine, dtype=DOUBLE)
        work = LocalSGD(lr=0.05, steps=3, batch_size=2)
        history = train(FedAvg(work), clients, rounds=2, seed=4)
        found.append(torch.cat([p.flatten() for p in history.parameters.values()]))
        module.load_state_dict(history.parameters)
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], found[2], rtol=1e-8, atol=1e-10)


@settings(deadline=None, max_examples=25)
@given(
    st.booleans(), st.booleans(), st.booleans(), st.integers(0, 99), st.sampled_from([None, 3, 5])
)
def test_attention_is_torchs_with_weights_that_were_dropped(first, bias, average, seed, width):
    """Oracle: torch's own weights, times the factors, times the values, head by head."""
    torch.manual_seed(seed)
    given = {"bias": bias, "batch_first": first, "kdim": width, "vdim": width, "dtype": DOUBLE}
    layer = nn.MultiheadAttention(4, 2, dropout=0.4, **given)
    query, memory = torch.randn(3, 2, 4, dtype=DOUBLE), torch.randn(3, 5, width or 4, dtype=DOUBLE)
    hidden = torch.zeros(3, 5, dtype=torch.bool)
    hidden[1, 2:] = True
    turn = (lambda t: t) if first else (lambda t: t.transpose(0, 1))
    arguments = turn(query), turn(memory), turn(memory)
    own = copy.deepcopy(layer).train()
    AddressedAttention.take_over(own, layer=7)
    own.keys = torch.tensor([11, 5, 8])
    got, shown = own(*arguments, key_padding_mask=hidden, average_attn_weights=average)
    _, weights = layer.eval()(*arguments, key_padding_mask=hidden, average_attn_weights=False)
    factors = draw_factors(own.keys, 7, 0.4, weights.shape[1:], DOUBLE)
    assert 0 < (factors == 0).double().mean() < 1
    value = layer.v_proj_weight if width not in (None, 4) else layer.in_proj_weight[8:]
    offset = layer.in_proj_bias[8:] if bias else torch.zeros(4, dtype=DOUBLE)
    for j in range(3):
        v = memory[j] @ value.T + offset
        heads = [(weights * factors)[j, h] @ v[:, 2 * h : 2 * h + 2] for h in range(2)]
        torch.testing.assert_close(turn(got)[j], layer.out_proj(torch.cat(heads, 1)))
    expected = weights * factors
    torch.testing.assert_close(shown, expected.mean(1) if average else expected)
    torch.testing.assert_close(own.eval()(*arguments)[0], layer(*arguments)[0])


def test_factors_have_mean_one_and_drop_the_share_asked_for():
    factors = draw_factors(torch.arange(200), 3, 0.3, (10, 50), DOUBLE)
    np.testing.assert_allclose((factors == 0).double().mean(), 0.3, atol=0.01)
    np.testing.assert_allclose(factors.mean(), 1.0, atol=0.02)


class Louder(nn.Dropout):
    """A dropout that also doubles: not ours to replace."""

    def forward(self, x):
        return 2 * x


def test_only_torchs_own_layers_are_replaced():
    module = nn.Sequential(nn.Linear(3, 3), Louder(0.5))
    assert address_dropout(module) == []
    inputs = torch.ones(1, 3)
    torch.testing.assert_close(module(inputs), 2 * module[0](inputs))


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_dropout_of_another_axis_is_refused(engine):
    module = SequenceFirst(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    with pytest.raises(ValueError, match=r"first\s+dimension must be the sample"):
        simulate(classification(shape=(3, 4)), module, engine=engine)
