"""Profile losses of linear models whose bias is the clients' own, for many clients at once."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from equifed.engines.precision import Precision, products_in
from equifed.engines.profile import Offsets
from equifed.engines.resources import empty_rows
from equifed.engines.stacked.dense_layers import Linear, as_rows
from equifed.engines.stacked.gradient_rules import GradientRule, PenalisedRule, Samples
from equifed.models.flat import FlatModel


@dataclass(frozen=True)
class Solved:
    """Outputs (c, k, b) of the shared part for all samples, and the best offsets (c, k)."""

    outputs: Tensor
    targets: Tensor
    weights: Tensor
    offsets: Tensor
    wanted: Tensor


class ProfileRule(PenalisedRule):
    """Gradients of the profile losses, with the L2 penalty of the shared part."""

    def __init__(
        self, rule: GradientRule, model: FlatModel, offsets: Offsets, precision: Precision
    ) -> None:
        super().__init__(rule, model.l2, precision)
        ((fan_out, fan_in),) = model.shapes.values()
        self._layer = Linear(0, fan_in, fan_out, bias=False)
        self._offsets, self._loss = offsets, model.loss
        self._last: Tensor | None = None

    @override
    def begin(self) -> ProfileRule:
        """Return the rule for one walk: each of its steps starts where the one before ended."""
        rule = copy.copy(self)
        rule._last = None
        return rule

    @override
    def gradient(self, u: Tensor, blocks: list[Samples]) -> tuple[Tensor, Tensor]:
        found, gradient = self._solve(u, blocks), empty_rows(len(u), u)
        outputs = found.outputs.add_(found.offsets.unsqueeze(2))  # not used again without them
        both = self._offsets.losses_and_slopes(outputs, found.targets, found.weights)
        if both is None:
            slope = self._offsets.slopes(outputs, found.targets, found.weights)
            each = self._losses(outputs, found)
        else:
            each, slope = both
        self._multiply(slope, blocks, gradient, 0.0, 1.0)
        return gradient.add_(u, alpha=self._l2), self._sum(u, found, each)

    @override
    def step(self, u: Tensor, blocks: list[Samples], *, keep: float, lr: float) -> None:
        found = self._solve(u, blocks, self._last)
        self._last = found.offsets
        self._add_gradient(found, blocks, u, keep - lr * self._l2, -lr)

    @override
    def value(self, u: Tensor, blocks: list[Samples]) -> Tensor:
        return self._value(u, self._solve(u, blocks))

    def best(self, u: Tensor, blocks: list[Samples]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the best own parts (c, k), squared decrements (c,), and mean |a|^2 (c,)."""
        at = self._solve(u, blocks)
        _, decrement = self._offsets.newton(at.offsets, at.outputs, at.wanted, at.weights)
        squares = [(s.inputs.flatten(2).square().sum(2) * s.weights).sum(1) for s in blocks]
        return at.offsets, decrement, torch.stack(squares).sum(dim=0)

    def _solve(self, u: Tensor, blocks: list[Samples], start: Tensor | None = None) -> Solved:
        with products_in(self._precision, u.device):
            parts = [self._layer.forward(u, _columns(samples), None)[0] for samples in blocks]
        outputs = _join(parts, 2).to(u.dtype)
        targets = _join([samples.targets for samples in blocks], 1)
        weights = _join([samples.weights for samples in blocks], 1)
        wanted = self._offsets.wanted(outputs, targets, weights)
        start = None if start is None else start[: len(u)]  # those with most samples walk longest
        best = self._offsets.solve(outputs, wanted, weights, start)
        return Solved(outputs, targets, weights, best, wanted)

    def _value(self, u: Tensor, at: Solved) -> Tensor:
        return self._sum(u, at, self._losses(at.outputs + at.offsets.unsqueeze(2), at))

    def _losses(self, outputs: Tensor, at: Solved) -> Tensor:
        return self._loss(as_rows(outputs), at.targets.flatten(0, 1)).view(at.weights.shape)

    def _sum(self, u: Tensor, at: Solved, each: Tensor) -> Tensor:
        """Return the clients' losses with both penalties."""
        held = self._l2 * u.square().sum(dim=1) + self._offsets.l2 * at.offsets.square().sum(dim=1)
        return (each * at.weights).sum(dim=1) + 0.5 * held

    def _add_gradient(
        self, at: Solved, blocks: list[Samples], out: Tensor, beta: float, alpha: float
    ) -> None:
        """Set ``out`` to beta times itself plus alpha times the gradients by the shared part."""
        outputs = at.outputs + at.offsets.unsqueeze(2)
        slope = self._offsets.slopes(outputs, at.targets, at.weights)
        self._multiply(slope, blocks, out, beta, alpha)

    def _multiply(
        self, slope: Tensor, blocks: list[Samples], out: Tensor, beta: float, alpha: float
    ) -> None:
        """Do the same with derivatives by the outputs."""
        widths = [samples.weights.shape[1] for samples in blocks]
        with products_in(self._precision, out.device):
            for samples, delta in zip(blocks, torch.split(slope, widths, dim=2), strict=True):
                self._layer.add_gradient(out, delta, _columns(samples), beta, alpha)
                beta = 1.0


def _join(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def _columns(samples: Samples) -> Tensor:
    """Return the inputs with samples as columns, (c, features, b)."""
    return samples.inputs.flatten(2).transpose(1, 2)
