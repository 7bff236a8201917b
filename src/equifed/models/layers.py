"""Layers that engines put in place of torch's: dropout with an address, and plain products.

The dropout mask of a sample is a function of its key alone, so clients and steps can come in any
order. ``torch.func.vmap`` has no rule for the fused kernel of an LSTM, and makes grouped
convolutions, which GPUs are slow at: plain products give the same from the same parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence
from typing_extensions import override

from equifed.contract.streams import mix

# Layers that are replaced; subclasses may do something else, and stay
PLAIN = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class AddressedDropout(nn.Module):
    """Dropout whose mask is a function of a key per sample, not of a global generator."""

    keys: Tensor

    def __init__(self, p: float, layer: int, channels: bool, axis: int = 0) -> None:
        super().__init__()
        self.p, self.layer = p, layer
        self.channels, self.axis = channels, axis  # drop whole channels; where samples are
        self.register_buffer("keys", torch.zeros(1, dtype=torch.int64), persistent=False)

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return inputs
        rows = inputs.transpose(0, self.axis)
        if len(self.keys) != len(rows):
            raise ValueError(
                f"Dropout was given {tuple(inputs.shape)} for {len(self.keys)} samples; the first "
                "dimension must be the sample (batch_first=True in layers that have it)."
            )
        shape = rows.shape[1:2] if self.channels else rows.shape[1:]
        factors = draw_factors(self.keys, self.layer, self.p, shape, inputs.dtype)
        factors = factors.reshape(*factors.shape, *[1] * (rows.dim() - factors.dim()))
        return (rows * factors).transpose(0, self.axis)


class AddressedAttention(nn.MultiheadAttention):
    """Multi-head attention whose weights are dropped by the key of their sample."""

    keys: Tensor
    rate: float
    layer: int
    products = False
    """Whether to multiply matrices where torch has one fused operation."""

    @classmethod
    def take_over(cls, module: nn.MultiheadAttention, layer: int) -> None:
        """Turn a module into an addressed one, in place: its parameters keep their names."""
        module.__class__ = cls
        assert isinstance(module, cls)
        module.rate, module.layer, module.dropout = module.dropout, layer, 0.0
        if module.rate > 0:
            module.register_buffer("keys", torch.zeros(1, dtype=torch.int64), persistent=False)

    @override
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        more: dict[str, Any] = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        # What is fused adds up in an order of its own on a GPU, another one each time.
        fused = self.rate == 0 and not self.products and query.device.type == "cpu"
        masked = is_causal or any(mask is not None for mask in more.values())
        alone = query is key is value and query.dim() == 3 and not masked and not need_weights
        if self.training and alone and self.rate == 0 and self._is_simple:
            return self._attend(query, fused), None
        more |= {"average_attn_weights": average_attn_weights, "is_causal": is_causal}
        if not self.training or fused:
            return super().forward(query, key, value, need_weights=need_weights, **more)
        # Asked for its weights torch multiplies matrices, which can be batched over clients.
        more["average_attn_weights"] = average_attn_weights and self.rate == 0
        outputs, weights = super().forward(query, key, value, need_weights=True, **more)
        if self.rate == 0:
            return outputs, weights if need_weights else None
        assert weights is not None  # (samples, heads, queries, keys)
        if weights.dim() != 4 or len(weights) != len(self.keys):
            raise ValueError(
                f"Attention was given {tuple(query.shape)} for {len(self.keys)} samples; it needs "
                "(samples, length, features) with batch_first=True, or (length, samples, features)."
            )
        shape = weights.shape[1:]
        weights = weights * draw_factors(self.keys, self.layer, self.rate, shape, weights.dtype)
        outputs = self.out_proj((weights @ self._values(value)).transpose(1, 2).flatten(2))
        shown = weights.mean(1) if average_attn_weights else weights
        return outputs if self.batch_first else outputs.transpose(0, 1), (
            shown if need_weights else None
        )

    @property
    def _is_simple(self) -> bool:
        """Whether queries, keys and values are three maps of the same samples, and no more."""
        plain = self._qkv_same_embed_dim and self.bias_k is None and not self.add_zero_attn
        return plain and self.batch_first

    def _attend(self, inputs: Tensor, fused: bool) -> Tensor:
        """Return what samples (samples, length, features) that attend to themselves give."""
        parts = F.linear(inputs, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        q, k, v = (p.view(*p.shape[:2], self.num_heads, -1).transpose(1, 2) for p in parts)
        if fused:
            heads = F.scaled_dot_product_attention(q, k, v)
        else:
            heads = torch.softmax(q / math.sqrt(self.head_dim) @ k.transpose(2, 3), dim=-1) @ v
        outputs: Tensor = self.out_proj(heads.transpose(1, 2).flatten(2))
        return outputs

    def _values(self, value: Tensor) -> Tensor:
        """Return the values of every head, (samples, heads, keys, features of a head)."""
        rows = value if self.batch_first else value.transpose(0, 1)
        last = slice(2 * self.embed_dim, None)
        weight = self.in_proj_weight[last] if self._qkv_same_embed_dim else self.v_proj_weight
        bias = None if self.in_proj_bias is None else self.in_proj_bias[last]
        values = F.linear(rows, weight, bias)
        return values.view(*values.shape[:2], self.num_heads, -1).transpose(1, 2)


def draw_factors(
    keys: Tensor, layer: int, p: float, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return 0 or 1/(1-p) for every unit of every sample, shape (samples, *shape)."""
    units = torch.arange(math.prod(shape), device=keys.device)
    drawn = mix(mix(keys, layer).unsqueeze(1), units) & ((1 << 24) - 1)
    keep = (drawn >= int(p * (1 << 24))).to(dtype) / (1 - p)
    return keep.reshape(keep.shape[0], *shape)


def address_dropout(module: nn.Module) -> list[str]:
    """Give every dropout layer an address, in place; return the names of their key buffers."""
    names, second = [], _second_axis(module)
    known: dict[nn.Module, AddressedDropout] = {}
    for layer, (name, part) in enumerate(list(module.named_modules())):
        if type(part) in PLAIN:
            channels = type(part) is not nn.Dropout
            known[part] = AddressedDropout(part.p, layer, channels, int(part in second))
            names.append(f"{name}.keys")
        elif type(part) is nn.MultiheadAttention:
            names += [f"{name}.keys"] if part.dropout > 0 else []
            AddressedAttention.take_over(part, layer)
    for name, part in list(module.named_modules(remove_duplicate=False)):
        if part in known:
            parent, _, child = name.rpartition(".")
            setattr(module.get_submodule(parent), child, known[part])
    return names


def _second_axis(module: nn.Module) -> set[nn.Module]:
    """Return the dropout layers that see (length, samples, features)."""
    kinds = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    layers = [part for part in module.modules() if isinstance(part, kinds)]
    return {part for m in layers if not m.self_attn.batch_first for part in m.children()}


# -- plain products -------------------------------------------------------------------------------


def write_out(module: nn.Module, convolutions: bool = False) -> None:
    """Let torch's own LSTMs, attention, and convolutions if asked, be plain products."""
    for part in module.modules():
        if type(part) is nn.LSTM and part.proj_size == 0 and not part.bidirectional:
            part.__class__ = WrittenLSTM  # dropout between layers is refused
        elif type(part) is AddressedAttention:
            part.products = True
        elif convolutions and type(part) is nn.Conv2d and _is_simple(part):
            part.__class__ = WrittenConv2d


def _is_simple(part: nn.Conv2d) -> bool:
    whole = part.groups == 1 and part.dilation == (1, 1)
    return whole and part.padding_mode == "zeros" and not isinstance(part.padding, str)


class WrittenLSTM(nn.LSTM):
    """``nn.LSTM`` by plain products, one per step."""

    def forward(self, inputs: Any, start: Any = None) -> Any:
        """Return the states of all steps, and the last ones of every layer."""
        if isinstance(inputs, PackedSequence) or inputs.dim() != 3:
            raise ValueError(
                "LSTM of packed or unbatched sequences cannot be batched over clients; use "
                "engine='loop'."
            )
        hidden = inputs.transpose(0, 1) if self.batch_first else inputs
        if start is None:
            start = (hidden.new_zeros(self.num_layers, hidden.shape[1], self.hidden_size),) * 2
        ends = []
        for layer, (state, cell) in enumerate(zip(*start, strict=True)):
            inner, outer = (
                (getattr(self, f"weight_{k}_l{layer}"), getattr(self, f"bias_{k}_l{layer}", None))
                for k in ("ih", "hh")
            )
            seen = []
            for gate in F.linear(hidden, *inner).unbind(0):  # all steps in one product
                i, f, g, o = (gate + F.linear(state, *outer)).chunk(4, dim=-1)
                cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
                state = torch.sigmoid(o) * torch.tanh(cell)
                seen.append(state)
            hidden = torch.stack(seen)
            ends.append((state, cell))
        last = tuple(torch.stack(each) for each in zip(*ends, strict=True))
        return hidden.transpose(0, 1) if self.batch_first else hidden, last


class WrittenConv2d(nn.Conv2d):
    """``nn.Conv2d`` as patches times a matrix."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the images' convolutions."""
        if inputs.dim() == 3:  # one image
            return self.forward(inputs.unsqueeze(0)).squeeze(0)
        patches = self._patches(inputs)
        # All samples side by side: one large product for a client, not one for each sample, whose
        # batches would repeat the weights and add up as many gradients.
        out = self.weight.flatten(1) @ patches.flatten(0, 2).flatten(1)
        if self.bias is not None:
            out = out + self.bias.unsqueeze(1)
        return out.view(len(out), *patches.shape[3:]).transpose(0, 1)

    def _patches(self, inputs: Tensor) -> Tensor:
        """Return what the kernel sees, (channels, its rows and columns, samples, rows, columns)."""
        # Shifted images: compiled, both ways are plain copies and sums. ``unfold`` would compute
        # anew what comes before for every place of the kernel, and its derivative has no order.
        assert not isinstance(self.padding, str)
        (high, wide), (down, across) = self.kernel_size, self.stride
        above, beside = self.padding
        images = F.pad(inputs, (beside, beside, above, above)).transpose(0, 1)
        bottom, right = images.shape[2] - high + 1, images.shape[3] - wide + 1
        columns = torch.stack([images[..., k : k + right : across] for k in range(wide)], dim=1)
        return torch.stack([columns[..., k : k + bottom : down, :] for k in range(high)], dim=1)
