r"""What a client's offset says about its outputs: how its samples look, by measuring.

A stroke of medium weight is a capital from a fine pen and a small letter from a broad one. A shared
model does not know the pen, and one that has its training samples by heart gives no sign of it on
them. The samples themselves do: with t, a few principal components of the inputs, of a sample of
class y from client i,

.. math:: t = m_y + e_i + r, \qquad e_i \sim N(0, E), \qquad r \sim N(0, R),

a model of random effects (Laird and Ware 1982), whose m, E and R are those of the largest
likelihood (by EM). A client's samples tell its offset up to a doubt, :math:`N(\hat e_i, P_i)`. To
know the client multiplies the odds of class y by (Bayes' rule)

.. math:: \frac{N(t;\ m_y + \hat e_i,\ R + P_i)}{N(t;\ m_y,\ R + E)},

and up to what is the same for all classes the logarithm of that is linear in t, with
:math:`A_i = (R + P_i)^{-1}` and :math:`B = (R + E)^{-1}`:

.. math:: t^\top (A_i - B)\, m_y - \tfrac12 m_y^\top (A_i - B)\, m_y - m_y^\top A_i\, \hat e_i.

A client without samples has :math:`A_i = B` and no offset: nothing moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, svds
from torch import Tensor, nn

Array = NDArray[np.float64]
BLOCK = 4096
ROUNDS = 200
SETTLED = 1e-6
"""Of EM: the most rounds, and the change of E and R, in shares of t's variance, that ends them."""
DENSE, LEAST = 64, 1e-5
"""Up to this many dimensions all components are found; those of less deviation, in shares of the
largest input, are rounding."""
FLOOR = 1e-6
"""Least variance of r in every direction, in shares of t's: inputs may repeat exactly."""


@dataclass(frozen=True, eq=False)
class Components:
    """Principal components of inputs: ``(x - centre) @ axes.T``, of variance 1 on these inputs."""

    centre: Array
    axes: Array

    def of(self, inputs: NDArray[Any]) -> Array:
        """Return the components of samples (m, d)."""
        out = np.empty((len(inputs), len(self.axes)))
        for k in range(0, len(inputs), BLOCK):  # of which alone there is a copy in float64
            block = np.asarray(inputs[k : k + BLOCK], dtype=np.float64)
            out[k : k + BLOCK] = (block.reshape(len(block), -1) - self.centre) @ self.axes.T
        return out


def leading_components(inputs: NDArray[Any], count: int) -> Components:
    """Return the leading components of the inputs; fewer where these vary in fewer directions."""
    flat = np.asarray(inputs).reshape(len(inputs), -1)
    if flat.dtype not in (np.float32, np.float64):
        flat = flat.astype(np.float32)
    centre, small = flat.mean(0, dtype=np.float64), min(flat.shape)
    if count < small and small > DENSE:
        start = np.random.default_rng(0).standard_normal(small)
        _, sizes, axes = svds(_centred(flat, centre), k=count, v0=start)
    else:
        _, sizes, axes = np.linalg.svd(flat - centre, full_matrices=False)
    order = np.argsort(-sizes)[:count]
    order = order[sizes[order] > LEAST * np.sqrt(max(len(flat), 1)) * np.abs(flat).max(initial=0.0)]
    axes = axes[order]
    signs = np.sign(axes[np.arange(len(axes)), np.abs(axes).argmax(1)])  # theirs are arbitrary
    scale = sizes[order] / np.sqrt(len(flat))
    return Components(centre, axes * (signs / scale)[:, None])


def _centred(flat: NDArray[Any], centre: Array) -> LinearOperator:
    """Return ``flat - centre`` as an operator: large inputs are not copied."""

    def times(matrix: NDArray[Any], v: Array) -> Array:
        product: Array = (matrix @ v.astype(flat.dtype)).astype(np.float64)
        return product

    def forth(v: Array) -> Array:
        return times(flat, v.ravel()) - centre @ v.ravel()

    def back(u: Array) -> Array:
        return times(flat.T, u.ravel()) - centre * float(u.sum())

    return LinearOperator(flat.shape, matvec=forth, rmatvec=back, dtype=np.float64)


@dataclass(frozen=True, eq=False)
class Offsets:
    """Class means m (k, d), E and R (d, d), and every client's offset (n, d) and doubt P (n, d, d).

    A class without samples has the mean of the others'.
    """

    means: Array
    between: Array
    within: Array
    offsets: Array
    doubts: Array

    def shifts(self) -> tuple[Array, Array]:
        """Return what clients' logits move by: weights on t (n, k, d) and biases (n, k)."""
        m = self.means
        known = np.linalg.inv(self.within + self.doubts)
        unknown = np.linalg.inv(self.within + self.between)
        weight = np.einsum("kd,nde->nke", m, known - unknown)
        bias = -0.5 * np.einsum("nke,ke->nk", weight, m)
        bias -= np.einsum("kd,nde,ne->nk", m, known, self.offsets)
        return weight, bias


def fit_offsets(
    t: Array, labels: NDArray[Any], owners: NDArray[Any], clients: int, classes: int
) -> Offsets:
    """Return the likeliest model of samples (m, d) with their classes and clients."""
    m, d = t.shape
    counts, of_class = (
        np.bincount(owners, minlength=clients),
        np.bincount(labels, minlength=classes),
    )
    spread = np.diag(t.var(0)) if m and t.var(0).any() else np.eye(d)
    between, within = 0.2 * spread, 0.8 * spread
    floor, settled = (share * np.diag(spread).mean() for share in (FLOOR, SETTLED))
    means, seen = _means(t, labels, of_class), counts > 0
    for _ in range(ROUNDS if m else 0):
        offsets, doubts = _find(t - means[labels], owners, counts, between, within)
        rest = t - means[labels] - offsets[owners]
        before = between, within
        # Clients without samples have E itself as their doubt, and tell nothing of it.
        between = (offsets[seen].T @ offsets[seen] + doubts[seen].sum(0)) / seen.sum()
        within = (rest.T @ rest + np.einsum("n,nde->de", counts, doubts)) / m + floor * np.eye(d)
        means = _means(t - offsets[owners], labels, of_class)
        now = between, within
        if max(np.abs(a - b).max() for a, b in zip(before, now, strict=True)) <= settled:
            break
    offsets, doubts = _find(t - means[labels], owners, counts, between, within)
    return Offsets(means, between, within, offsets, doubts)


def _find(
    residuals: Array, owners: NDArray[Any], counts: NDArray[Any], between: Array, within: Array
) -> tuple[Array, Array]:
    """Return every client's offset and doubt, given E and R."""
    sums, n = np.zeros((len(counts), len(within))), counts[:, None, None]
    np.add.at(sums, owners, residuals)
    gain = between @ np.linalg.inv(n * between + within)
    doubts = between - n * gain @ between
    return np.einsum("nde,ne->nd", gain, sums), (doubts + doubts.transpose(0, 2, 1)) / 2


def _means(t: Array, labels: NDArray[Any], counts: NDArray[Any]) -> Array:
    sums = np.zeros((len(counts), t.shape[1]))
    np.add.at(sums, labels, t)
    seen = counts > 0
    sums[seen] /= counts[seen, None]
    sums[~seen] = sums[seen].mean(0) if seen.any() else 0.0
    return sums


class Beside(nn.Module):
    """A network and, beside it, a linear map of a few components of its inputs: both are added.

    The map is zero to begin with; clients have their own.
    """

    centre: Tensor
    axes: Tensor

    def __init__(self, network: nn.Module, centre: Tensor, axes: Tensor, outputs: int) -> None:
        super().__init__()
        like = next(network.parameters())
        self.network, self.training = network, network.training
        self.register_buffer("centre", centre.to(like))
        self.register_buffer("axes", axes.to(like))
        self.linear = nn.Linear(len(axes), outputs).to(like)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs (m, k)."""
        seen = (inputs.flatten(1) - self.centre) @ self.axes.T
        beside: Tensor = self.linear(seen)
        outputs: Tensor = self.network(inputs)
        return outputs.reshape(beside.shape) + beside


__all__ = ["Beside", "Components", "Offsets", "fit_offsets", "leading_components"]
