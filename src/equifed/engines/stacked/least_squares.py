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

from equifed.contract.local import LocalWork
from equifed.engines.stacked.dense_layers import DenseLayersRule, Linear
from equifed.engines.stacked.gradient_rules import GradientRule, PenalisedRule, StepSamples
from equifed.engines.stacked.samples import Chunk
from equifed.models.losses import squared


class QuadraticRule(GradientRule):
    """The gradient rule of clients with matrices A (c, p, p) and B (c, k, p)."""

    def __init__(self, layer: Linear, a: Tensor, b: Tensor) -> None:
        self._layer, self._a, self._b = layer, a, b

    @override
    def gradient(self, u: Tensor, samples: StepSamples) -> tuple[Tensor, Tensor]:
        live, layer = len(u), self._layer
        together = layer.fan_out == 1 or not layer.bias  # rows of u are those of Z, then
        if together:
            z = u.view(live, layer.fan_out, -1)
        else:
            z = torch.cat([layer.weight(u), layer.offset(u).unsqueeze(2)], dim=2)
        slope = torch.baddbmm(self._b[:live], z, self._a[:live], beta=-2, alpha=2)
        rows = slope.flatten(1)
        if not together:
            rows = torch.cat([slope[:, :, :-1].flatten(1), slope[:, :, -1]], dim=1)
        return rows, u.new_full((live,), float("nan"))  # no step here needs the losses


class LeastSquares:
    """Rules for local steps on least squares; the clients' matrices are kept between rounds.

    Parameters
    ----------
    layer : Linear
        The model's only layer.
    l2 : float
        The penalty's strength.
    memory : int
        Bound in bytes on the matrices that are kept.
    """

    def __init__(self, layer: Linear, l2: float, memory: int) -> None:
        self._layer, self._l2, self._memory = layer, l2, memory
        self._features = layer.fan_in + layer.bias
        self._known: OrderedDict[bytes, tuple[Tensor, Tensor]] = OrderedDict()

    @staticmethod
    def layer_of(rule: GradientRule, loss: object) -> Linear | None:
        """Return the layer of a linear model with the squared loss, else None."""
        if loss is squared and isinstance(rule, DenseLayersRule) and len(rule.layers) == 1:
            (layer,) = rule.layers
            return layer if isinstance(layer, Linear) else None
        return None

    def pays(self, work: LocalWork, steps: int, size: int) -> bool:
        """Tell whether clients of so many samples gain: a matrix costs half its side in steps.

        The hinge needs losses, which are not computed here.
        """
        full = work.batch_size is None and work.hinge is None
        return full and 2 * steps >= self._features and self._features <= size

    def rule(self, chunk: Chunk, samples: StepSamples) -> PenalisedRule:
        """Return the rule for a chunk's clients, of whom these are all samples."""
        key = chunk.clients.tobytes()
        made = self._known.get(key)
        if made is None:
            made = self._known[key] = self._moments(samples)
            held = sum(matrix.nbytes for kept in self._known.values() for matrix in kept)
            while held > self._memory:  # the oldest are forgotten
                held -= sum(matrix.nbytes for matrix in self._known.popitem(last=False)[1])
        return PenalisedRule(QuadraticRule(self._layer, *made), self._l2)

    def _moments(self, samples: StepSamples) -> tuple[Tensor, Tensor]:
        """Return A and B, with a column of ones for the bias."""
        inputs, targets = samples.inputs.flatten(2), samples.targets
        if self._layer.bias:
            inputs = F.pad(inputs, (0, 1), value=1.0)
        if not targets.is_floating_point() and self._layer.fan_out > 1:
            targets = F.one_hot(targets, self._layer.fan_out)
        targets = targets.flatten(2) if targets.dim() > 2 else targets.unsqueeze(2)
        counted = inputs * samples.weights.unsqueeze(2)
        across = targets.to(inputs.dtype).transpose(1, 2)
        return torch.bmm(counted.transpose(1, 2), inputs), torch.bmm(across, counted)
