r"""Full-gradient local steps on least squares without passes over the data.

The mean squared error of a linear model with weights Z (one row per output, the bias as a last
column) is quadratic, so its gradient needs two matrices per client that are computed once:

.. math:: \nabla f(Z) = 2\,(Z A - B), \qquad A = \sum_s w_s\, x_s x_s^\top, \quad
          B = \sum_s w_s\, y_s x_s^\top .

Where features outnumber samples, the iterates stay in the span of the samples, the start and the
correction, :math:`Z = a X + \alpha Z_0 + \beta C`. All that a step does is linear, so the walk goes
through a, alpha and beta, and a step needs the samples' Gram matrix only:

.. math:: \nabla f(Z) = 2\,\bigl((Z X^\top - Y) W\bigr) X, \qquad
          Z X^\top = a\, X X^\top + \alpha\, Z_0 X^\top + \beta\, C X^\top .
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from equifed.contract.local import LocalWork
from equifed.engines.stacked.dense_layers import DenseLayersRule, Linear
from equifed.engines.stacked.gradient_rules import GradientRule, PenalisedRule, StepSamples
from equifed.engines.stacked.samples import Supply
from equifed.engines.stacked.walk import ChunkWalk, ChunkWork, Made
from equifed.models.losses import as_outputs, squared


def as_matrices(layer: Linear, rows: Tensor) -> Tensor:
    """Return flat models (c, d) as matrices Z (c, k, p), without a copy where that is possible."""
    if layer.fan_out == 1 or not layer.bias:
        return rows.view(len(rows), layer.fan_out, -1)
    return torch.cat([layer.weight(rows), layer.offset(rows).unsqueeze(2)], dim=2)


def as_vectors(layer: Linear, z: Tensor) -> Tensor:
    """Return matrices (c, k, p) as flat models (c, d)."""
    if layer.fan_out == 1 or not layer.bias:
        return z.flatten(1)
    return torch.cat([z[:, :, :-1].flatten(1), z[:, :, -1]], dim=1)


def read_samples(layer: Linear, samples: StepSamples) -> tuple[Tensor, Tensor]:
    """Return X (c, m, p), with a column of ones for the bias, and Y (c, k, m)."""
    inputs = samples.inputs.flatten(2)
    targets = as_outputs(samples.targets, inputs.new_empty(len(inputs), layer.fan_out, 0))
    return F.pad(inputs, (0, 1), value=1.0) if layer.bias else inputs, targets


class QuadraticRule(GradientRule):
    """Gradients by the matrices A (c, p, p) and B (c, k, p)."""

    def __init__(self, layer: Linear, a: Tensor, b: Tensor) -> None:
        self._layer, self._a, self._b = layer, a, b

    @override
    def gradient(self, u: Tensor, samples: StepSamples) -> tuple[Tensor, Tensor]:
        live, z = len(u), as_matrices(self._layer, u)
        slope = torch.baddbmm(self._b[:live], z, self._a[:live], beta=-2, alpha=2)
        return as_vectors(self._layer, slope), u.new_full((live,), float("nan"))  # no loss needed


class SpanRule(GradientRule):
    """Gradients in the coordinates (a, alpha, beta) of each output, by Gram matrices (c, m, m)."""

    def __init__(self, layer: Linear, gram: Tensor, given: ChunkWork, samples: StepSamples) -> None:
        self._layer, self._gram, self._weights = layer, gram, samples.weights.unsqueeze(1)
        self._inputs, self._targets = read_samples(layer, samples)
        start = given.x.expand(len(gram), -1)
        pull = torch.zeros_like(start) if given.correction is None else given.correction
        self._fixed = [as_matrices(layer, rows) for rows in (start, pull)]
        self._predicted = [torch.bmm(z, self._inputs.mT) for z in self._fixed]

    def encode(self, given: ChunkWork) -> ChunkWork:
        """Return the work with start and correction in these coordinates."""
        units = given.x.new_zeros(2, len(self._gram), self._layer.fan_out, self._gram.shape[1] + 2)
        units[0, ..., -2] = units[1, ..., -1] = 1
        x, pull = units.flatten(2)
        return replace(given, x=x, correction=None if given.correction is None else pull)

    def decode(self, u: Tensor) -> Tensor:
        """Return the vectors (c, d) that have these coordinates."""
        return as_vectors(self._layer, self._combine(u, self._inputs, self._fixed))

    @override
    def gradient(self, u: Tensor, samples: StepSamples) -> tuple[Tensor, Tensor]:
        live = len(u)
        errors = self._combine(u, self._gram, self._predicted).sub_(self._targets[:live])
        slope = F.pad(errors.mul_(2).mul_(self._weights[:live]), (0, 2))
        return slope.flatten(1), u.new_full((live,), float("nan"))

    def _combine(self, u: Tensor, of_samples: Tensor, fixed: list[Tensor]) -> Tensor:
        live, z = len(u), u.view(len(u), self._layer.fan_out, -1)
        total = torch.bmm(z[..., :-2], of_samples[:live])
        for k, one in enumerate(fixed):
            total.addcmul_(z[..., k - 2, None], one[:live])
        return total


class SpanWalk(ChunkWalk):
    """A walk in coordinates, whose results are vectors."""

    def __init__(self, given: ChunkWork, rule: SpanRule) -> None:
        super().__init__(rule.encode(given))
        self._given, self._rule = given, rule

    @override
    def decode(self, rows: Tensor) -> Tensor:
        return self._rule.decode(rows)


class LeastSquares:
    """Walks on least squares; the clients' matrices are kept between rounds."""

    def __init__(self, layer: Linear, l2: float, memory: int) -> None:
        self._layer, self._l2, self._memory = layer, l2, memory  # memory: most bytes kept
        self._features = layer.fan_in + layer.bias
        self._known: OrderedDict[bytes, tuple[Tensor, ...]] = OrderedDict()

    @staticmethod
    def layer_of(rule: GradientRule, loss: object) -> Linear | None:
        """Return the layer of a linear model with the squared loss, else None."""
        if loss is squared and isinstance(rule, DenseLayersRule) and len(rule.layers) == 1:
            (layer,) = rule.layers
            return layer if isinstance(layer, Linear) else None
        return None

    def pays(self, work: LocalWork, steps: int, size: int) -> bool:
        """Tell whether clients of so many samples gain: a matrix costs half its side in steps."""
        plain = work.radius is None and work.scale is None
        known = work.hinge is None and (plain or not self._spans(size))
        return work.batch_size is None and known and 2 * steps >= min(size, self._features)

    def _spans(self, size: int) -> bool:
        """Tell whether coordinates are fewer than features; they have no losses and no norms."""
        return size + 2 < self._features

    def walk(self, given: ChunkWork, supply: Supply, room: Tensor | None) -> Made | None:
        """Carry out the local steps of a chunk's clients; None where that does not pay."""
        size = given.chunk.width
        if not self.pays(given.work, int(given.steps[0]), size):
            return None
        made = self._matrices(given.chunk.clients.tobytes(), supply.whole, self._spans(size))
        rule: GradientRule
        if self._spans(size):
            rule = SpanRule(self._layer, made[0], given, supply.whole)
            walk: ChunkWalk = SpanWalk(given, rule)
        else:
            rule, walk = QuadraticRule(self._layer, *made), ChunkWalk(given, room)
        return walk.carry_out(PenalisedRule(rule, self._l2), supply)

    def _matrices(self, key: bytes, samples: StepSamples, spans: bool) -> tuple[Tensor, ...]:
        """Return the Gram matrices, or A and B; the oldest are forgotten when memory is short."""
        made = self._known.get(key)
        if made is None:
            x, y = read_samples(self._layer, samples)
            counted = x * samples.weights.unsqueeze(2)
            made = (torch.bmm(x, x.mT),) if spans else (torch.bmm(counted.mT, x), y @ counted)
            self._known[key] = made
            held = sum(matrix.nbytes for kept in self._known.values() for matrix in kept)
            while held > self._memory:
                held -= sum(matrix.nbytes for matrix in self._known.popitem(last=False)[1])
        return made
