r"""Newton's method for linear models, to rounding: own parts, and clients' own models.

With the rows :math:`\phi_s` that parameters v are multiplied with, and outputs z without them,

.. math:: \min_v\ \sum_s c_s\, \text{loss}\bigl(z_s + v^\top \phi_s,\ y_s\bigr)
          + \tfrac12 \textstyle\sum_a r_a |v_a|^2

is solved for many clients at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equifed.models.losses import DERIVATIVES, FittedLoss

MOST_NUMBERS = 2000  # numbers per client that Newton's method is for: its matrix takes 32 MB
STEPS = 100
FAST = 0.1  # while steps shorten so much, squared, in a matrix, it serves for the next one
SHORTEST = 2.0**-30
# Least pivot of a matrix with a diagonal of ones that Cholesky's factors are trusted for
FULL_RANK = 1e-5


def inverse_root(matrix: Tensor) -> Tensor:
    """Return R with R R' = the inverse of a symmetric matrix >= 0; zero stays zero.

    Units of the rows may differ by many orders.

    >>> root = inverse_root(torch.tensor([[4.0, 0.0], [0.0, 0.0]]))
    >>> root @ root.T
    tensor([[0.2500, 0.0000],
            [0.0000, 0.0000]])
    """
    scale = matrix.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    scale = torch.where(scale > 0, scale, 1.0)
    values, vectors = torch.linalg.eigh(matrix / scale[..., None, :] / scale[..., :, None])
    least = values.shape[-1] * torch.finfo(values.dtype).eps * values[..., -1:].clamp_min(0)
    inverse = torch.where(values > least, 1 / values.clamp_min(1e-300 + least), 0.0)
    root: Tensor = vectors * inverse.sqrt()[..., None, :] / scale[..., :, None]
    return root


@dataclass(frozen=True)
class Factored:
    """Positive matrices (n, d, d) to solve with, more than once.

    By Cholesky's factors, and by eigenvalues where these say nothing: matrices of no full rank.
    """

    scale: Tensor
    factor: Tensor
    poor: Tensor
    root: Tensor

    @classmethod
    def make(cls, matrix: Tensor) -> Factored:
        """Factor matrices."""
        scale = matrix.diagonal(dim1=1, dim2=2).clamp_min(1e-300).sqrt()
        factor, _ = torch.linalg.cholesky_ex(matrix / scale[:, None, :] / scale[:, :, None])
        pivots = factor.diagonal(dim1=1, dim2=2)
        poor = ~((pivots > FULL_RANK).all(1) & factor.isfinite().all((1, 2)))
        return cls(scale, factor, poor, inverse_root(matrix[poor]) if poor.any() else matrix[:0])

    def solve(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return matrix^-1 gradient of shape (n, d), and how far it goes downhill (n,)."""
        inside = (gradient / self.scale)[..., None]
        inside = torch.linalg.solve_triangular(self.factor, inside, upper=False)
        step = torch.linalg.solve_triangular(self.factor.mT, inside, upper=True)[..., 0]
        step, downhill = step / self.scale, inside.square().sum((1, 2))
        if self.poor.any():
            inside = gradient[self.poor][:, None] @ self.root
            step[self.poor] = (inside @ self.root.mT)[:, 0]
            downhill[self.poor] = inside.square().sum((1, 2))
        return step, downhill


def fit_linear(
    design: Tensor, outputs: Tensor, targets: Tensor, loss: FittedLoss, l2: float
) -> Tensor:
    """Return the best v (q, k) of one client, the mean over its rows (m, q), in float64.

    >>> ones, zeros = torch.ones(4, 1).double(), torch.zeros(4, 1).double()
    >>> fit_linear(ones, zeros, torch.tensor([1.0, 2.0, 3.0, 6.0]), "squared", l2=0.0).round()
    tensor([[3.]], dtype=torch.float64)
    """
    (m, q), k = design.shape, outputs.shape[1]
    if q * k > MOST_NUMBERS:
        raise ValueError(
            f"The own part has {q * k} numbers; at fixed shared parameters up to {MOST_NUMBERS} "
            "are fitted: take own='bias', or train with own= instead."
        )
    v = outputs.new_zeros(1, q, k)
    if m == 0:
        return v[0]
    counts, ridge = outputs.new_full((1, m), 1 / m), outputs.new_full((q,), l2)
    return fit_many(design[None], outputs[None], targets[None], counts, loss, ridge, v)[0][0]


def fit_many(
    design: Tensor, outputs: Tensor, targets: Tensor, counts: Tensor, loss: FittedLoss,
    ridge: Tensor, v: Tensor, steps: int = STEPS,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the best v (n, q, k) of n clients, from a start, and who has not converged (n,).

    Rows ``design`` (n, m, q) stand beside ``outputs`` (n, m, k); a sample counts ``counts`` (n, m),
    0 where there is none; ``ridge`` (q,) is the penalty on each row of v.
    """
    (n, m, q), k, known = design.shape, outputs.shape[2], DERIVATIVES[loss]

    def at(v: Tensor) -> tuple[Tensor, Tensor]:
        z, y = (outputs + design @ v).flatten(0, 1), targets.flatten(0, 1)
        value = (counts * known.loss(z, y).view(n, m)).sum(1) + (ridge @ v.square()).sum(1) / 2
        return value.nan_to_num(torch.inf), counts[..., None] * known.first(z, y).view(n, m, k)

    def factor(v: Tensor) -> Factored:
        second = known.second((outputs + design @ v).flatten(0, 1)).view(n, m, k, k)
        return Factored.make(sum_blocks(design, counts[..., None, None] * second) + penalty)

    value, first = at(v)
    going, penalty = torch.ones(n, dtype=torch.bool), torch.diag(ridge.repeat(k))
    last, metric = torch.full((n,), torch.inf), None
    while steps and 2 * going.sum() > n:  # those who are done wait for nobody
        steps -= 1
        gradient = (design.mT @ first + ridge[:, None] * v).mT.reshape(n, k * q)
        metric = metric or factor(v)
        flat, decrement = metric.solve(gradient)
        if (decrement > FAST * last)[going].any():
            metric = factor(v)
            flat, decrement = metric.solve(gradient)
        last = decrement
        step = flat.view(n, k, q).mT
        length = going.to(value.dtype)
        low_enough = torch.zeros_like(going)
        while not low_enough.all():
            there = v - length[:, None, None] * step
            found = at(there)
            wanted = value - 1e-4 * length * decrement + 1e-15 * value.abs()
            low_enough = (length == 0) | (found[0] <= wanted)
            length = torch.where(low_enough, length, length / 2)
            length[length <= SHORTEST] = 0.0
        settled = (value - found[0] <= 1e-15 * value.abs()) & (decrement < 1e-12)
        going &= (length > 0) & ~settled & (decrement > 1e-16)
        v, (value, first) = there, found
    if steps and going.any():
        rest = design[going], outputs[going], targets[going], counts[going]
        v[going], going[going.clone()] = fit_many(*rest, loss, ridge, v[going], steps)
    return v, going


def sum_blocks(design: Tensor, second: Tensor) -> Tensor:
    """Return sum_s second_s (x) design_s design_s' of all clients, shape (n, k q, k q)."""
    (n, _, q), k = design.shape, second.shape[2]
    blocks = design.new_empty(n, k, q, k, q)
    for a in range(k):
        for b in range(a + 1):
            block = design.mT @ (second[..., a, b, None] * design)
            blocks[:, a, :, b], blocks[:, b, :, a] = block, block
    return blocks.view(n, k * q, k * q)
