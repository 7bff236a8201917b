"""How the gradients of many clients, each at its own model, are computed.

One interface, several rules: :class:`FunctionRule` takes any module through ``torch.func``;
:class:`equifed.engines.dense_layers.DenseLayersRule` writes the products of fully connected layers
out by hand. :func:`rule_for` chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from equifed.engines.flat_model import FlatModel


@dataclass(frozen=True)
class Samples:
    """The samples that c clients use in one step, side by side.

    ``inputs`` (c, b, ...), ``targets`` (c, b, ...), ``weights`` (c, b) with which each sample's
    loss counts, and ``keys`` (c, b) for dropout where the model drops anything.
    """

    inputs: Tensor
    targets: Tensor
    weights: Tensor
    keys: Tensor | None = None

    def first(self, clients: int) -> Samples:
        """Return the part of the first few clients."""
        if clients == len(self.weights):
            return self
        return self._each(lambda values: values[:clients])

    def blocks(self, width: int) -> list[Samples]:
        """Return the same samples in pieces of at most ``width`` per client."""
        if self.weights.shape[1] <= width:
            return [self]
        pieces = [slice(a, a + width) for a in range(0, self.weights.shape[1], width)]
        return [self._each(partial(_columns, piece)) for piece in pieces]

    def as_one(self, shares: Tensor) -> Samples:
        """Return all samples as those of one client, each client counting its share (c,)."""
        weighted = replace(self, weights=self.weights * shares.unsqueeze(1))
        return weighted._each(lambda values: values.flatten(0, 1).unsqueeze(0))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Samples:
        keys = None if self.keys is None else change(self.keys)
        return Samples(change(self.inputs), change(self.targets), change(self.weights), keys)


def _columns(piece: slice, values: Tensor) -> Tensor:
    return values[:, piece]


class GradientRule(Protocol):
    r"""Gradients of the weighted losses :math:`f_i(u_i) = \sum_k w_{ik}\, \ell(u_i; z_{ik})`."""

    def add_gradient(
        self, u: Tensor, samples: Samples, out: Tensor, *, beta: float, alpha: float
    ) -> Tensor:
        r"""Set ``out`` to ``beta * out + alpha * gradients`` and return the losses (c,).

        ``u`` and ``out`` have shape (c, d). They may be the same tensor: with ``beta=1`` and
        ``alpha=-lr`` that is one gradient step, without a gradient ever being written down.
        """
        ...


class FunctionRule:
    """Any module, batched over clients by ``torch.func``."""

    def __init__(self, model: FlatModel) -> None:
        self._model = model
        in_dims = (0, 0, 0, 0, 0 if model.dropouts else None)
        self._batched = vmap(grad_and_value(self._weighted_loss), in_dims=in_dims)

    def add_gradient(
        self, u: Tensor, samples: Samples, out: Tensor, *, beta: float, alpha: float
    ) -> Tensor:
        """See :class:`GradientRule`."""
        gradient, value = self._batched(
            u, samples.inputs, samples.targets, samples.weights, samples.keys
        )
        if beta == 0:  # whatever was in ``out`` need not be a number
            torch.mul(gradient, alpha, out=out)
        else:
            out.mul_(beta).add_(gradient, alpha=alpha)
        losses: Tensor = value
        return losses

    def _weighted_loss(
        self, u: Tensor, inputs: Tensor, targets: Tensor, weights: Tensor, keys: Tensor | None
    ) -> Tensor:
        return weights @ self._model.sample_losses(u, inputs, targets, keys)


class PenalisedRule:
    """A rule for the clients' whole losses: several blocks of samples, and the L2 penalty."""

    def __init__(self, rule: GradientRule, l2: float) -> None:
        self.data, self._l2 = rule, l2

    def add_gradient(
        self, blocks: list[Samples], u: Tensor, out: Tensor, *, beta: float, alpha: float
    ) -> Tensor:
        """Set ``out`` to ``beta * out + alpha * gradients``; return the losses.

        ``out`` may be ``u``; the losses then lack the penalty, since a step does not need them.
        """
        if out is u and len(blocks) == 1:
            return self.data.add_gradient(
                u, blocks[0], out, beta=beta + alpha * self._l2, alpha=alpha
            )
        if out is u:
            gradient = torch.empty_like(u)
            value = self.add_gradient(blocks, u, gradient, beta=0.0, alpha=1.0)
            out.mul_(beta).add_(gradient, alpha=alpha)
            return value
        value = self.data.add_gradient(u, blocks[0], out, beta=beta, alpha=alpha)
        for samples in blocks[1:]:
            value = value + self.data.add_gradient(u, samples, out, beta=1.0, alpha=alpha)
        if self._l2:
            out.add_(u, alpha=alpha * self._l2)
            value = value + 0.5 * self._l2 * u.square().sum(dim=1)
        return value


def rule_for(model: FlatModel, input_dimensions: int, fast: bool = True) -> GradientRule:
    """Return the fastest rule for a model whose samples have that many dimensions.

    ``fast=False`` asks for ``torch.func`` in any case.
    """
    from equifed.engines.dense_layers import DenseLayersRule

    layers = DenseLayersRule.layers_of(model, input_dimensions) if fast else None
    return FunctionRule(model) if layers is None else DenseLayersRule(model, layers)
