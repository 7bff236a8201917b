r"""Full-gradient local steps on least squares without passes over the data.

The mean squared error of a linear model with weights Z (one row per output, the bias as a last
column) is quadratic, so its gradient needs two matrices per client that are computed once:

.. math:: \nabla f(Z) = 2\,(Z A - B), \qquad A = \sum_s w_s\, x_s x_s^\top, \quad
          B = \sum_s w_s\, y_s x_s^\top .
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from equifed.contract import LocalWork
from equifed.engines.stacked.dense_layers import DenseLayersRule, Linear
from equifed.engines.stacked.gradient_rules import GradientRule, PenalisedRule, StepSamples
from equifed.engines.stacked.samples import Supply
from equifed.engines.stacked.walk import ChunkWalk, ChunkWork, Made
from equifed.models.losses import as_outputs, squared


class QuadraticRule(GradientRule):
    """Gradients by the matrices A (c, p, p) and B (c, k, p)."""

    def __init__(self, layer: Linear, a: Tensor, b: Tensor) -> None:
        self._layer, self._a, self._b = layer, a, b

    @override
    def gradient(self, u: Tensor, samples: StepSamples) -> tuple[Tensor, Tensor]:
        live, layer, no_losses = len(u), self._layer, u.new_full((len(u),), float("nan"))
        plain = layer.fan_out == 1 or not layer.bias  # rows of u are matrices as they are
        z = u.view(live, layer.fan_out, -1) if plain else self._to_matrices(u)
        slope = torch.baddbmm(self._b[:live], z, self._a[:live], beta=-2, alpha=2)
        if plain:
            return slope.flatten(1), no_losses
        return torch.cat([slope[:, :, :-1].flatten(1), slope[:, :, -1]], dim=1), no_losses

    def _to_matrices(self, u: Tensor) -> Tensor:
        """Return flat models (c, d) as matrices Z (c, k, p)."""
        return torch.cat([self._layer.weight(u), self._layer.offset(u).unsqueeze(2)], dim=2)


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
        known = work.batch_size is None and work.hinge is None and self._features <= 2 * size
        return known and 2 * steps >= min(size, self._features)

    def walk(self, given: ChunkWork, supply: Supply, room: Tensor | None) -> Made | None:
        """Carry out the local steps of a chunk's clients; None where that does not pay."""
        if not self.pays(given.work, int(given.steps[0]), given.chunk.width):
            return None
        made = self._matrices(given.chunk.clients.tobytes(), supply.whole)
        rule = PenalisedRule(QuadraticRule(self._layer, *made), self._l2)
        return ChunkWalk(given, room).carry_out(rule, supply)

    def _matrices(self, key: bytes, samples: StepSamples) -> tuple[Tensor, ...]:
        """Return A and B; the oldest are forgotten when memory is short."""
        made = self._known.get(key)
        if made is None:
            x = samples.inputs.flatten(2)
            y = as_outputs(samples.targets, x.new_empty(len(x), self._layer.fan_out, 0))
            x = F.pad(x, (0, 1), value=1.0) if self._layer.bias else x
            counted = x * samples.weights.unsqueeze(2)
            made = self._known[key] = torch.bmm(counted.mT, x), y @ counted
            held = sum(matrix.nbytes for kept in self._known.values() for matrix in kept)
            while held > self._memory:
                held -= sum(matrix.nbytes for matrix in self._known.popitem(last=False)[1])
        return made
