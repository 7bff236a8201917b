r"""Newton's method for linear models, to rounding: own parts, and clients' own models.

With the rows :math:`\phi_s` that parameters v are multiplied with, and outputs z without them,

.. math:: \min_v\ \sum_s c_s\, \text{loss}\bigl(z_s + v^\top \phi_s,\ y_s\bigr)
          + \tfrac12 \textstyle\sum_a r_a |v_a|^2

is solved for many clients at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast

import torch
from torch import Tensor, nn

from equifed.models.losses import known_loss

MOST_NUMBERS = 2000
"""Numbers per client that Newton's method is for: its matrix takes 32 MB."""
STEPS = 100
SHORTEST = 2.0**-30
FittedLoss = Literal["cross_entropy", "binary_logistic", "squared"]
Derivatives = tuple[Tensor, Tensor, Tensor]


def _softmax(z: Tensor, y: Tensor) -> Derivatives:
    chance, classes = torch.softmax(z, dim=1), torch.arange(z.shape[1])
    wanted = (y[:, None].long() == classes).to(z.dtype)
    losses = torch.logsumexp(z, dim=1) - (z * wanted).sum(dim=1)
    return losses, chance - wanted, torch.diag_embed(chance) - chance[:, :, None] * chance[:, None]


def _sigmoid(z: Tensor, y: Tensor) -> Derivatives:
    wanted = (y > 0).to(z.dtype)[:, None]
    chance = torch.sigmoid(z)
    losses = nn.functional.softplus(z) - wanted * z
    return losses[:, 0], chance - wanted, (chance * (1 - chance))[:, :, None]


def _squared(z: Tensor, y: Tensor) -> Derivatives:
    if not y.is_floating_point() and z.shape[1] > 1:
        y = y[:, None] == torch.arange(z.shape[1])  # classes as one-hot vectors
    away = z - y.reshape(len(z), -1).to(z.dtype)
    bend = 2 * torch.eye(z.shape[1], dtype=z.dtype).expand(len(z), -1, -1)
    return away.square().sum(dim=1), 2 * away, bend


_DERIVATIVES: dict[str, Callable[[Tensor, Tensor], Derivatives]] = {
    "cross_entropy": _softmax,
    "binary_logistic": _sigmoid,
    "squared": _squared,
}


def fitted_loss(loss: object) -> FittedLoss | None:
    """Return the name of a loss whose derivatives are written down here; None for others."""
    name = known_loss(loss)
    return cast(FittedLoss, name) if name in _DERIVATIVES else None


def sample_losses(outputs: Tensor, targets: Tensor, loss: FittedLoss) -> Tensor:
    """Return one loss per sample, as the fit counts them."""
    return _DERIVATIVES[loss](outputs, targets)[0]


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
    ridge: Tensor, v: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the best v (n, q, k) of n clients, from a start, and who has not converged (n,).

    Rows ``design`` (n, m, q) stand beside ``outputs`` (n, m, k); a sample counts ``counts`` (n, m),
    0 where there is none; ``ridge`` (q,) is the penalty on each row of v.
    """
    (n, m, q), k = design.shape, outputs.shape[2]

    def at(v: Tensor) -> Derivatives:
        z = (outputs + design @ v).flatten(0, 1)
        each, first, second = _DERIVATIVES[loss](z, targets.flatten(0, 1))
        value = (counts * each.view(n, m)).sum(1) + (ridge @ v.square()).sum(1) / 2
        first, second = counts[..., None] * first.view(n, m, k), second.view(n, m, k, k)
        return value.nan_to_num(torch.inf), first, counts[..., None, None] * second

    value, first, second = at(v)
    going, penalty = torch.ones(n, dtype=torch.bool), torch.diag(ridge.repeat(k))
    for _ in range(STEPS):
        gradient = (design.mT @ first + ridge[:, None] * v).mT.reshape(n, 1, k * q)
        inside = gradient @ (root := inverse_root(sum_blocks(design, second) + penalty))
        step = (inside @ root.mT).view(n, k, q).mT
        decrement = inside.square().sum((1, 2))
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
        going &= (length > 0) & ~settled & (decrement > 1e-24)
        v, (value, first, second) = there, found
        if not going.any():
            break
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
