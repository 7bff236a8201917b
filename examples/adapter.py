"""A LoRA-style adapter as a plain module: a frozen body, and a low-rank change that is trained.

Parameters with ``requires_grad=False`` are no part of the model that algorithms see: they are not
sent, not averaged and not penalised. Run it with ``equifed run examples/adapter.toml``. The body
here has fixed random features, so that the example needs no download; put your pretrained one in
its place.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import equifed as ef


class LowRank(nn.Module):
    """A frozen linear layer plus B A, of which A and B are trained; B begins at zero."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, frozen.in_features) / math.sqrt(frozen.in_features))
        self.b = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + B A x."""
        change: Tensor = x @ self.a.T @ self.b.T
        return self.frozen(x) + change  # type: ignore[no-any-return]


class Adapted(nn.Module):
    """A frozen body with an adapter, and a head."""

    def __init__(
        self, input_shape: tuple[int, ...], outputs: int, rank: int = 2, hidden: int = 32
    ) -> None:
        super().__init__()
        self.body = LowRank(pretrained_body(math.prod(input_shape), hidden), rank)
        self.head = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.head(torch.relu(self.body(x.flatten(1))))  # type: ignore[no-any-return]


def pretrained_body(features: int, hidden: int = 32) -> nn.Linear:
    """Return the layer that stays as it is: the same weights at every client, whatever the seed."""
    body, draw = nn.Linear(features, hidden), torch.Generator().manual_seed(0)
    with torch.no_grad():
        body.weight.copy_(torch.randn(hidden, features, generator=draw) / math.sqrt(features))
        body.bias.zero_()
    return body


def frozen_features(data: str = "heart-disease") -> ef.Federation:
    """Return what the body makes of a data set, for ``[data]``: a head on it is convex."""
    samples = ef.load(data)
    body = pretrained_body(math.prod(samples.input_shape))
    return ef.features(nn.Sequential(nn.Flatten(), body, nn.ReLU()), samples)
