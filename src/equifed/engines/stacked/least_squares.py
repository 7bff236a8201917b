r"""Full-gradient local steps on least squares without passes over the data.

The mean squared error of a linear model with weights Z (one row per output, the bias as a last
column) is quadratic, so its gradient needs two matrices per client that are computed once:

.. math:: \nabla f(Z) = 2\,(Z A - B), \qquad A = \sum_s w_s\, x_s x_s^\top, \quad
          B = \sum_s w_s\, y_s x_s^\top .

Where features outnumber samples, the iterates stay in the span of the samples, the start and the
correction: :math:`Z = a X + \alpha Z_0 + \beta C`. In these coordinates a step needs the samples'
Gram matrix only,

.. math:: Z X^\top = a\, X X^\top + \alpha\, Z_0 X^\top + \beta\, C X^\top, \qquad
          \nabla f(Z) = 2\,\bigl((Z X^\top - Y) W\bigr) X .

Everything else a step does is linear, so the same :class:`equifed.engines.stacked.walk.ChunkWalk`
runs in either set of coordinates, and its results are mapped back at the end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from equifed.contract.local import LocalWork
from equifed.engines.stacked.dense_layers import DenseLayersRule, Linear
from equifed.engines.stacked.gradient_rules import GradientRule, PenalisedRule, StepSamples
from equifed.engines.stacked.walk import ChunkWalk, ChunkWork
from equifed.models.losses import squared


@dataclass(frozen=True)
class Data:
    """Samples X (c, m, p) with a column of ones for the bias, targets (c, k, m), weights (c, m)."""

    inputs: Tensor
    targets: Tensor
    weights: Tensor

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return A (c, p, p) and B (c, k, p)."""
        counted = self.inputs * self.weights.unsqueeze(2)
        return torch.bmm(counted.transpose(1, 2), self.inputs), torch.bmm(self.targets, counted)

    def gram(self) -> Tensor:
        """Return the Gram matrices of the samples (c, m, m)."""
        return torch.bmm(self.inputs, self.inputs.transpose(1, 2))


class Primal:
    """Coordinates Z (c, k, p), with A and B; see the top of this file."""

    def __init__(self, a: Tensor, b: Tensor, z: Tensor, correction: Tensor | None) -> None:
        self.start, self.correction, self._a, self._b = z, correction, a, b

    def slope(self, z: Tensor) -> Tensor:
        """Return the gradient at z."""
        live = len(z)
        return torch.baddbmm(self._b[:live], z, self._a[:live], beta=-2, alpha=2)

    def decode(self, z: Tensor) -> Tensor:
        """Return the weights that z stands for."""
        return z


class Dual:
    """Coordinates (a, alpha, beta), (c, k, m + 2); see the top of this file."""

    def __init__(self, data: Data, gram: Tensor, z: Tensor, correction: Tensor | None) -> None:
        self._data, self._z = data, z
        self._c = torch.zeros_like(z) if correction is None else correction
        m = data.inputs.shape[1]
        unit = torch.zeros(*z.shape[:2], m + 2, dtype=z.dtype, device=z.device)
        self.start, self.correction = unit.clone(), None if correction is None else unit.clone()
        self.start[:, :, m] = 1
        if self.correction is not None:
            self.correction[:, :, m + 1] = 1
        across = data.inputs.transpose(1, 2)
        self._gram, self._of_z, self._of_c = gram, torch.bmm(z, across), torch.bmm(self._c, across)

    def slope(self, z: Tensor) -> Tensor:
        """Return the coordinates of the gradient at z."""
        live, m = len(z), self._gram.shape[1]
        predicted = torch.bmm(z[:, :, :m], self._gram[:live])
        predicted = predicted + z[:, :, m, None] * self._of_z[:live]
        predicted = predicted + z[:, :, m + 1, None] * self._of_c[:live]
        errors = predicted - self._data.targets[:live]
        return F.pad(2 * errors * self._data.weights[:live].unsqueeze(1), (0, 2))

    def decode(self, z: Tensor) -> Tensor:
        """Return the weights that z stands for."""
        m = self._gram.shape[1]
        own = torch.bmm(z[:, :, :m], self._data.inputs)
        return own + z[:, :, m, None] * self._z + z[:, :, m + 1, None] * self._c


class QuadraticRule(GradientRule):
    """The gradient rule in one of these sets of coordinates."""

    def __init__(self, coordinates: Primal | Dual) -> None:
        self._at, self._shape = coordinates, coordinates.start.shape[1:]

    @override
    def gradient(self, u: Tensor, samples: StepSamples) -> tuple[Tensor, Tensor]:
        slope = self._at.slope(u.view(-1, *self._shape)).flatten(1)
        return slope, u.new_full((len(u),), float("nan"))  # no step here needs the losses


class LeastSquares:
    """Local steps on least squares, with the clients' matrices remembered between rounds.

    Parameters
    ----------
    layer : Linear
        The model's only layer.
    l2 : float
        The penalty's strength.
    memory : int
        Bound in bytes on the matrices remembered.
    """

    def __init__(self, layer: Linear, l2: float, memory: int) -> None:
        self._layer, self._l2, self._memory = layer, l2, memory
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
        """Tell whether clients of so many samples gain: a matrix costs half its side in steps.

        The hinge needs losses, and the ball needs norms, which these coordinates do not keep.
        """
        plain = work.batch_size is None and work.hinge is None and work.radius is None
        return plain and 2 * steps >= min(size, self._features)

    def walk(self, given: ChunkWork, samples: StepSamples) -> ChunkWalk:
        """Carry out the local steps of a chunk's clients on all their samples."""
        steps, key = given.steps, given.chunk.clients.tobytes()
        z = self._as_matrices(given.x.expand(len(steps), -1))
        c = None if given.correction is None else self._as_matrices(given.correction)
        coordinates: Primal | Dual
        if samples.weights.shape[1] + 2 < self._features:
            data = self._data(samples)
            (gram,) = self._remembered(key, lambda: (data.gram(),))
            coordinates = Dual(data, gram, z, c)
        else:
            a, b = self._remembered(key, lambda: self._data(samples).moments())
            coordinates = Primal(a, b, z, c)
        pull = None if coordinates.correction is None else coordinates.correction.flatten(1)
        start = coordinates.start.flatten(1)
        walk = ChunkWalk(start, given.work, steps, pull, None, torch.empty_like(start))
        rule = PenalisedRule(QuadraticRule(coordinates), self._l2)
        for step in range(int(steps[0])):
            walk.advance(step, rule, [samples], given.work.snapshot)
        shape = coordinates.start.shape
        walk.decode = lambda rows: self._as_rows(coordinates.decode(rows.view(shape)))
        return walk

    def _data(self, samples: StepSamples) -> Data:
        inputs = samples.inputs.flatten(2)
        if self._layer.bias:
            inputs = F.pad(inputs, (0, 1), value=1.0)
        targets = samples.targets
        if not targets.is_floating_point() and self._layer.fan_out > 1:
            targets = F.one_hot(targets, self._layer.fan_out)
        targets = targets.flatten(2) if targets.dim() > 2 else targets.unsqueeze(2)
        return Data(inputs, targets.to(inputs.dtype).transpose(1, 2), samples.weights)

    def _remembered(self, key: bytes, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return the matrices of these clients; the oldest are forgotten when memory is short."""
        if key not in self._known:
            made = self._known[key] = make()
            held = sum(matrix.nbytes for kept in self._known.values() for matrix in kept)
            while held > self._memory:
                held -= sum(matrix.nbytes for matrix in self._known.popitem(last=False)[1])
            return made
        return self._known[key]

    def _as_matrices(self, rows: Tensor) -> Tensor:
        """Return flat models (c, d) as matrices (c, k, p)."""
        weight = self._layer.weight(rows)
        if not self._layer.bias:
            return weight
        return torch.cat([weight, self._layer.offset(rows).unsqueeze(2)], dim=2)

    def _as_rows(self, matrices: Tensor) -> Tensor:
        """Return matrices (c, k, p) as flat models (c, d)."""
        if not self._layer.bias:
            return matrices.flatten(1)
        return torch.cat([matrices[:, :, :-1].flatten(1), matrices[:, :, -1]], dim=1)
