r"""Hand-written gradients of fully connected networks, for many clients at once.

A network of linear maps, ReLU, tanh and dropout needs two batched products per linear map and
client forward and backward,

.. math:: h_{l+1} = W_l h_l + b_l, \qquad
          \partial W_l = \delta_{l+1} h_l^\top, \qquad \delta_l = W_l^\top \delta_{l+1},

and next to nothing else. Writing them out saves what a general differentiator spends around them;
the second product adds straight into the result, so a gradient step costs no further pass over the
model. Samples are columns: h is (c, units, b). A layer with few units then makes long rows of
samples, which products and softmax go through faster than through many short rows of units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor, nn
from typing_extensions import override

from equifed.engines.own import Offsets, as_rows, cross_entropy_slope
from equifed.engines.stacked.gradient_rules import (
    FunctionRule,
    GradientRule,
    PenalisedRule,
    StepSamples,
)
from equifed.engines.threads import Precision, empty_rows, products_in
from equifed.models.checks import is_plain
from equifed.models.flat import FlatModel
from equifed.models.layers import AddressedDropout, draw_factors
from equifed.models.losses import SampleLoss, cross_entropy

FUSED = 1 << 14
"""Entries of a weight matrix from which on the CPU adds products straight into it, one client after
the other; smaller ones are multiplied in one call and added afterwards."""

MOST_ONES = 1024
"""Samples of a client up to which a GPU sums over them by a product."""


class Layer(Protocol):
    """One layer of c networks whose parameters are the rows of u."""

    def forward(self, u: Tensor, inputs: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the outputs (c, out, b) and what the way back needs."""

    def backward(self, u: Tensor, delta: Tensor, saved: Tensor) -> Tensor:
        """Return the derivative by the inputs, given that by the outputs."""


@dataclass(frozen=True)
class Linear(Layer):
    """W h + b; its parameters lie in u from ``start`` on."""

    start: int
    fan_in: int
    fan_out: int
    bias: bool

    def weight(self, u: Tensor) -> Tensor:
        """Return the matrices (c, out, in) in the rows of u, as a view."""
        flat = u.narrow(1, self.start, self.fan_in * self.fan_out)
        return flat.view(-1, self.fan_out, self.fan_in)

    def offset(self, u: Tensor) -> Tensor:
        """Return the bias vectors (c, out) in the rows of u, as a view."""
        return u.narrow(1, self.start + self.fan_in * self.fan_out, self.fan_out)

    @override
    def forward(self, u: Tensor, inputs: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.bias and not u.is_cuda:
            return torch.baddbmm(self.offset(u).unsqueeze(2), self.weight(u), inputs), inputs
        outputs = torch.bmm(self.weight(u), inputs)
        # A GPU's product would have to read what it adds to.
        return outputs.add_(self.offset(u).unsqueeze(2)) if self.bias else outputs, inputs

    @override
    def backward(self, u: Tensor, delta: Tensor, saved: Tensor) -> Tensor:
        return torch.bmm(self.weight(u).transpose(1, 2), delta)

    def add_gradient(
        self, out: Tensor, delta: Tensor, saved: Tensor, beta: float, alpha: float
    ) -> None:
        """Set this layer's part of ``out`` to beta times itself plus alpha times its gradient."""
        weight = self.weight(out)
        plain = delta.dtype == saved.dtype == out.dtype  # not if products are in bf16
        if plain and (out.is_cuda or self.fan_in * self.fan_out >= FUSED):
            weight.baddbmm_(delta, saved.transpose(1, 2), beta=beta, alpha=alpha)
        else:
            scale_and_add(weight, torch.bmm(delta, saved.transpose(1, 2)), beta, alpha)
        if self.bias and plain and out.is_cuda and delta.shape[2] <= MOST_ONES:
            ones = _ones(out.device, out.dtype)[: delta.shape[2]].expand(len(out), -1, 1)
            self.offset(out).unsqueeze(2).baddbmm_(delta, ones, beta=beta, alpha=alpha)
        elif self.bias:
            scale_and_add(self.offset(out), delta.sum(dim=2), beta, alpha)


@lru_cache
def _ones(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a column of ones, by which sums over samples are products."""
    return torch.ones(MOST_ONES, 1, device=device, dtype=dtype)


def scale_and_add(out: Tensor, values: Tensor, beta: float, alpha: float) -> None:
    """Set ``out`` to ``beta * out + alpha * values``; with beta = 0 it need not hold numbers."""
    if beta == 0:
        torch.mul(values, alpha, out=out)
        return
    if beta != 1:
        out.mul_(beta)
    out.add_(values, alpha=alpha)


@dataclass(frozen=True)
class Activation(Layer):
    """A function of every unit whose derivative can be told from its value."""

    function: Callable[[Tensor], Tensor]
    chain: Callable[[Tensor, Tensor], Tensor]

    @override
    def forward(self, u: Tensor, inputs: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        outputs = self.function(inputs)
        return outputs, outputs

    @override
    def backward(self, u: Tensor, delta: Tensor, saved: Tensor) -> Tensor:
        return self.chain(delta, saved)


ACTIVATIONS = {
    nn.ReLU: Activation(
        torch.relu, lambda delta, out: torch.ops.aten.threshold_backward(delta, out, 0.0)
    ),
    nn.Tanh: Activation(torch.tanh, torch.ops.aten.tanh_backward),
}


@dataclass(frozen=True)
class Dropout(Layer):
    """The module's own dropout, with its own masks."""

    module: AddressedDropout
    units: int  # of the linear map before it; 0 where inputs are dropped

    @override
    def forward(self, u: Tensor, inputs: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        assert keys is not None
        factors = self.mask(keys, inputs.shape[1], inputs.dtype)
        return inputs * factors, factors

    def mask(self, keys: Tensor, units: int, dtype: torch.dtype) -> Tensor:
        """Return the factors (..., units, b) of samples with these keys (..., b)."""
        layer, p = self.module.layer, self.module.p
        factors = draw_factors(keys.reshape(-1), layer, p, (units,), dtype)
        return factors.view(*keys.shape, -1).transpose(-1, -2).contiguous()

    @override
    def backward(self, u: Tensor, delta: Tensor, saved: Tensor) -> Tensor:
        return delta * saved


class DenseLayersRule(GradientRule):
    """The gradient rule of fully connected networks."""

    def __init__(self, model: FlatModel, layers: list[Layer]) -> None:
        self.layers, self._loss = layers, model.loss
        self._first = next(k for k, layer in enumerate(layers) if isinstance(layer, Linear))
        self._slope, self._dtype = slope_of(model.loss), model.dtype
        dropped = [layer for layer in layers if isinstance(layer, Dropout)]
        self._dropped = dropped if all(layer.units for layer in dropped) else []
        self.units = sum(layer.units for layer in self._dropped)

    @override
    def masks(self, keys: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer.mask(keys, layer.units, self._dtype) for layer in self._dropped)

    @staticmethod
    def layers_of(model: FlatModel) -> list[Layer] | None:
        """Return the model's layers, or None if it has others than those known here."""
        layers: list[Layer] = []
        start, units, flat = 0, 0, model.input_dimensions == 1
        if model.fixed:
            return None  # what is not trained has no place in u
        for part in _parts(model.module):
            if not is_plain(part):
                return None
            forward = type(part).forward
            if forward is nn.Linear.forward and isinstance(part, nn.Linear) and flat:
                if set(dict(part.named_parameters())) - {"weight", "bias"}:
                    return None  # parametrised: the weight is computed from something else
                units, bias = part.out_features, part.bias is not None
                layers.append(Linear(start, part.in_features, units, bias))
                start += (part.in_features + bias) * units
            elif type(part) is nn.Flatten and (part.start_dim, part.end_dim) == (1, -1):
                flat = True
            elif isinstance(part, AddressedDropout) and flat and not part.channels:
                layers += [Dropout(part, units)] if part.p > 0 else []
            elif type(part) in ACTIVATIONS:
                layers.append(ACTIVATIONS[type(part)])
            elif type(part) is not nn.Identity:
                return None
        # A layer used twice has its parameters once; then the sizes differ. Own parameters are last
        # in u, which must be the order of the layers.
        ordered = list(model.all_shapes) == [n for n, _ in model.module.named_parameters()]
        return layers if flat and ordered and start == model.size + model.own_size else None

    @override
    def gradient(self, u: Tensor, samples: StepSamples) -> tuple[Tensor, Tensor]:
        outputs, saved = self._forward(u, samples)
        each = self._loss(as_rows(outputs), samples.targets.flatten(0, 1))
        gradient = empty_rows(len(u), u)
        self._backward(u, samples, outputs, saved, gradient, 0.0, 1.0)
        return gradient, (each.view(samples.weights.shape) * samples.weights).sum(dim=1)

    @override
    def step(self, u: Tensor, samples: StepSamples, *, keep: float, lr: float) -> None:
        outputs, saved = self._forward(u, samples)
        self._backward(u, samples, outputs, saved, u, keep, -lr)

    def _forward(self, u: Tensor, samples: StepSamples) -> tuple[Tensor, list[Tensor]]:
        """Return the outputs (c, out, b) and what each layer saved for the way back."""
        h, saved = _columns(samples), []
        masks = iter(samples.masks)
        for layer in self.layers:
            if isinstance(layer, Dropout) and samples.masks:
                kept = next(masks).to(h.dtype)
                h = h * kept
            else:
                h, kept = layer.forward(u, h, samples.keys)
            saved.append(kept)
        return h.to(u.dtype), saved

    def _backward(
        self, u: Tensor, samples: StepSamples, outputs: Tensor, saved: list[Tensor], out: Tensor,
        beta: float, alpha: float,
    ) -> None:  # fmt: skip
        """Set ``out``, which may be u, to beta times itself plus alpha times the gradients."""
        delta = self._slope(outputs, samples.targets, samples.weights)
        for k in range(len(self.layers) - 1, self._first - 1, -1):
            layer, above = self.layers[k], delta
            if k > self._first:
                delta = layer.backward(u, above, saved[k])
            if isinstance(layer, Linear):  # only now: the way down needs the old weights
                layer.add_gradient(out, above, saved[k], beta, alpha)


Slope = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps outputs (c, k, b), targets (c, b, ...) and weights (c, b) to the weighted loss's derivative
by the outputs."""


def slope_of(loss: SampleLoss) -> Slope:
    """Return how a per-sample loss is differentiated by the outputs: by hand or by autograd."""
    if loss is cross_entropy:
        return cross_entropy_slope

    def by_autograd(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = as_rows(outputs).detach().requires_grad_()
            value = loss(leaf, targets.flatten(0, 1)) @ weights.flatten()
            (slope,) = torch.autograd.grad(value, leaf)
        # Sums over samples have the same bits for any number of clients if samples are neighbours.
        return slope.view(*weights.shape, -1).transpose(1, 2).contiguous()

    return by_autograd


def choose_rule(model: FlatModel, fast: bool = True) -> GradientRule:
    """Return the fastest rule for a model, or ``torch.func`` if not ``fast``."""
    layers = DenseLayersRule.layers_of(model) if fast else None
    return FunctionRule(model) if layers is None else DenseLayersRule(model, layers)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield what a plain sequence of modules does, in order; anything else yields itself."""
    if type(module) is nn.Sequential and is_plain(module):
        for part in module:
            yield from _parts(part)
    else:
        yield module


@dataclass(frozen=True)
class Solved:
    """Outputs (c, k, b) of the shared part for all samples, and the best offsets (c, k)."""

    outputs: Tensor
    targets: Tensor
    weights: Tensor
    offsets: Tensor
    wanted: Tensor

    def shifted(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return outputs with their offsets, in place of those without; targets and weights."""
        return self.outputs.add_(self.offsets.unsqueeze(2)), self.targets, self.weights


class ProfileRule(PenalisedRule):
    """Gradients of the profile losses, with the L2 penalty of the shared part."""

    def __init__(
        self, rule: GradientRule, model: FlatModel, offsets: Offsets, precision: Precision
    ) -> None:
        super().__init__(rule, model.l2, precision)
        ((fan_out, fan_in),) = model.shapes.values()
        self._layer = Linear(0, fan_in, fan_out, bias=False)
        self._offsets = offsets
        self._last: Tensor | None = None  # each step of a walk starts where the one before ended

    @override
    def gradient(self, u: Tensor, blocks: list[StepSamples]) -> tuple[Tensor, Tensor]:
        at, gradient = self._solve(u, blocks), empty_rows(len(u), u)
        each, slope = self._offsets.losses_and_slopes(*at.shifted())
        self._multiply(slope, blocks, gradient, 0.0, 1.0)
        return gradient.add_(u, alpha=self._l2), self._sum(u, at, each)

    @override
    def step(self, u: Tensor, blocks: list[StepSamples], *, keep: float, lr: float) -> None:
        at = self._solve(u, blocks, self._last)
        self._last = at.offsets
        self._multiply(self._offsets.slopes(*at.shifted()), blocks, u, keep - lr * self._l2, -lr)

    @override
    def value(self, u: Tensor, blocks: list[StepSamples]) -> Tensor:
        at = self._solve(u, blocks)
        outputs, targets, _ = at.shifted()
        return self._sum(u, at, self._offsets.losses(outputs, targets))

    def best(self, u: Tensor, blocks: list[StepSamples]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the best own parts (c, k), squared decrements (c,), and mean |a|^2 (c,)."""
        at = self._solve(u, blocks)
        _, decrement = self._offsets.newton(at.offsets, at.outputs, at.wanted, at.weights)
        squares = [(s.inputs.flatten(2).square().sum(2) * s.weights).sum(1) for s in blocks]
        return at.offsets, decrement, torch.stack(squares).sum(dim=0)

    def _solve(self, u: Tensor, blocks: list[StepSamples], start: Tensor | None = None) -> Solved:
        with products_in(self._precision, u.device):
            parts = [self._layer.forward(u, _columns(samples), None)[0] for samples in blocks]
        outputs = _join(parts, 2).to(u.dtype)
        targets = _join([samples.targets for samples in blocks], 1)
        weights = _join([samples.weights for samples in blocks], 1)
        wanted = self._offsets.wanted(outputs, targets, weights)
        start = None if start is None else start[: len(u)]  # those with most samples walk longest
        best = self._offsets.solve(outputs, wanted, weights, start)
        return Solved(outputs, targets, weights, best, wanted)

    def _sum(self, u: Tensor, at: Solved, each: Tensor) -> Tensor:
        """Return the clients' losses with both penalties."""
        held = self._l2 * u.square().sum(dim=1) + self._offsets.l2 * at.offsets.square().sum(dim=1)
        return (each * at.weights).sum(dim=1) + 0.5 * held

    def _multiply(
        self, slope: Tensor, blocks: list[StepSamples], out: Tensor, beta: float, alpha: float
    ) -> None:
        """Set ``out`` to beta times itself plus alpha times the gradients by the shared part."""
        widths = [samples.weights.shape[1] for samples in blocks]
        with products_in(self._precision, out.device):
            for samples, delta in zip(blocks, torch.split(slope, widths, dim=2), strict=True):
                self._layer.add_gradient(out, delta, _columns(samples), beta, alpha)
                beta = 1.0


def _join(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def _columns(samples: StepSamples) -> Tensor:
    """Return the inputs with samples as columns, (c, features, b)."""
    return samples.inputs.flatten(2).transpose(1, 2)
