"""Dropout with an address: the mask of a sample is a function of its key alone.

Engines hand one key per sample to every call, so that clients and steps can be computed in any
order and any number of times with the same masks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from equifed.contract.streams import mix

PLAIN = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
"""Layers that are replaced; subclasses may do something else, and stay."""


class AddressedDropout(nn.Module):
    """Dropout whose mask is a function of a key per sample, not of a global generator.

    ``channels`` drops whole channels (the second dimension), as ``nn.Dropout2d`` does; ``axis`` is
    the dimension of the samples. The buffer ``keys`` holds one key for each sample and is replaced
    in every call.
    """

    keys: Tensor

    def __init__(self, p: float, layer: int, channels: bool, axis: int = 0) -> None:
        super().__init__()
        self.p, self.layer, self.channels, self.axis = p, layer, channels, axis
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
        factors = self.factors(self.keys, shape, inputs.dtype)
        factors = factors.reshape(*factors.shape, *[1] * (rows.dim() - factors.dim()))
        return (rows * factors).transpose(0, self.axis)

    def factors(self, keys: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return 0 or 1/(1-p) for every unit of every sample, shape (samples, *shape)."""
        return draw_factors(keys, self.layer, self.p, shape, dtype)


class AddressedAttention(nn.MultiheadAttention):
    r"""Multi-head attention whose dropout has an address.

    In training the weights :math:`\mathrm{softmax}(q k^\top / \sqrt{d})` of every head are dropped
    by the key of their sample, :math:`o = W_o\, (\text{factors} \cdot \text{weights})\, v`.
    """

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
        """Return the outputs of samples (samples, length, features) that attend to themselves.

        The same numbers as torch's own way, which copies queries, keys and values out of one
        matrix and puts their gradients together again as sums of three, mostly zeros.
        """
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
