r"""Weighted sums of the Hessians of linear models: one matrix product over all samples.

A sample with features a and outputs z adds :math:`w\, h(z) \otimes a a^\top` to the Hessian, h
being the second derivative of its loss in the outputs. A weighted sum over clients is a sum over
their samples in which each counts its client's weight divided by that client's number of samples.

Where clients have own biases v, their profile losses :math:`\min_v f_i(u, v)` have the Schur
complement :math:`H_{uu} - H_{uv} H_{vv}^{-1} H_{vu}`. It grows with H, so that of an upper bound is
an upper bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

from equifed.contract.arrays import Weights
from equifed.contract.curvature import CurvatureSum, Form
from equifed.models.curvature import PARTS, trained_rows
from equifed.models.flat import FlatModel
from equifed.models.losses import base_loss, hinge

KNOWN = ("squared", "binary_logistic", "cross_entropy")
"""Losses whose second derivatives are written down here."""

PIECE = 1 << 25
"""Features that are multiplied at once, in bytes."""


@dataclass(frozen=True, eq=False)
class LinearHessian:
    """The Hessians of a linear model's loss: where their blocks lie, and how samples add to them.

    Parameters
    ----------
    model : FlatModel
        One trained linear layer with one of the :data:`KNOWN` losses.
    rows : callable
        What makes of samples the rows that the layer is applied to.
    loss : str
        Its name.
    places : Tensor, shape (k, q)
        Flat positions of the k outputs' parameters.
    weight, bias : bool
        Which of the layer's parameters are trained.
    form : Form
        What is summed.
    """

    model: FlatModel
    rows: Callable[[Tensor], Tensor]
    loss: str
    places: Tensor
    weight: bool
    bias: bool
    form: Form

    @classmethod
    def of(
        cls, model: FlatModel, form: Form, thin: Tensor | None = None, profile: bool = False
    ) -> LinearHessian | str:
        """Return the Hessians of a model, or why they are not known.

        ``profile`` says that own biases are the best ones for the shared model.
        """
        if thin is not None and form != "blocks":
            raise ValueError(f"A thin matrix is multiplied with blocks, not with form={form!r}.")
        rows = trained_rows(model)
        if rows is None:
            return "the model is not linear"
        loss = getattr(model.loss, "__name__", "?")
        if loss not in KNOWN or getattr(model.loss, "__module__", "") != "equifed.models.losses":
            return f"the second derivative of the loss {loss} is not known"
        if model.own_size and not profile:
            return "clients have own parameters, and the sum would have to do without them"
        if model.penalised is not None:
            return "biases are not penalised, and blocks know one penalty for all parameters"
        if model.dtype not in (torch.float32, torch.float64):
            return f"the model computes in {model.dtype}"
        parts = model.unflatten(torch.arange(model.size + model.own_size, device=model.device))
        parts = {name: part for name, part in parts.items() if name in model.shapes}
        weight, bias = ([p for n, p in parts.items() if n.endswith(part)] for part in PARTS)
        columns = [w.reshape(len(w), -1) for w in weight] + [b[:, None] for b in bias]
        places = torch.cat(columns, dim=1)
        return cls(model, rows, loss, places, bool(weight), bool(bias), form)

    @property
    def whole(self) -> bool:
        """Whether all outputs have one Hessian together: softmax mixes them."""
        return self.loss == "cross_entropy" and self.form == "full"

    def shape(self, thin: Tensor | None = None) -> tuple[int, ...]:
        """Return the shape of the blocks."""
        k, q = self.places.shape
        if self.whole:
            k, q = 1, k * q
        elif self.loss == "squared":
            k = 1
        if self.form == "diagonal":
            return k, q
        return k, q, q if thin is None else thin.shape[1]

    def zeros(self, thin: Tensor | None = None) -> Tensor:
        """Return the blocks of nobody."""
        return torch.zeros(self.shape(thin), dtype=torch.float64, device=self.model.device)

    def add(
        self, total: Tensor, x: Tensor, inputs: Tensor, counts: Tensor, thin: Tensor | None = None
    ) -> None:
        """Add samples to the blocks, each as often as ``counts`` says.

        Where there are own biases, x ends with those of the samples' client.
        """
        a = self._features(inputs)
        if self.whole:
            few = max(1, PIECE // (self.places.numel() * a.element_size()))
            samples = a, self._chances(x, inputs), counts
            for parts in zip(*(torch.split(values, few) for values in samples), strict=True):
                self._add_whole(total[0], *parts)
            return
        derivatives = list(self._second_derivatives(x, inputs))
        if self.form == "diagonal":
            total += (torch.stack([counts * h for h in derivatives]) @ a.square()).double()
            return
        product = None if thin is None else a @ thin.to(a)
        for block, h in zip(total, derivatives, strict=True):
            scaled = counts * h
            if product is not None:
                block += (a.T @ (scaled[:, None] * product)).double()
            else:
                block += (a.T @ (scaled[:, None] * a)).double()

    def add_profile(
        self, total: Tensor, x: Tensor, pieces: Iterable[Tensor], weight: float, size: int,
        thin: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Add the Hessian of one client's profile loss from pieces of its ``size`` samples."""
        b, q = self.shape()[:2]
        k = len(self.places)
        mixed = total.new_zeros((k, k, q // k) if self.whole else (b, q))  # H_vu
        own = total.new_zeros((k, k) if self.whole else (b,))  # H_vv
        for inputs in pieces:
            share = x.new_full((len(inputs),), 1 / size)
            self.add(total, x, inputs, weight * share, thin)
            a = self._features(inputs)
            if self.whole:
                p = self._chances(x, inputs)
                h = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]) / size
                mixed += torch.einsum("sce,sq->ecq", h, a).double()
                own += h.sum(dim=0).double()
            else:
                h = torch.stack([v * share for v in self._second_derivatives(x, inputs)])
                mixed, own = mixed + (h @ a).double(), own + h.sum(dim=1).double()
        if self.whole:
            factor = torch.linalg.cholesky(own + self.model.own_l2 * torch.eye(k).to(own))
            root = torch.linalg.solve_triangular(factor, mixed.reshape(k, q), upper=False)
            total[0] -= weight * root.T @ root
            return
        root = mixed * (weight / (own + self.model.own_l2)).sqrt()[:, None]
        if self.form == "diagonal":
            total -= root.square()
        else:
            right = root[:, None] if thin is None else (root @ thin.double())[:, None]
            total -= root[:, :, None] * right

    def answer(self, total: Tensor, weights: Weights, thin: Tensor | None = None) -> CurvatureSum:
        """Return the blocks with the penalty's part."""
        penalty = self.model.l2 * float(np.sum(weights))
        if self.form == "diagonal":
            total += penalty
        elif thin is not None:
            total += penalty * thin.to(total)
        else:
            total.diagonal(dim1=-2, dim2=-1).add_(penalty)
        places = self.places.reshape(1, -1) if self.whole else self.places
        exact = self.form != "diagonal" and (self.loss != "cross_entropy" or self.whole)
        return CurvatureSum(total, places, penalty, exact, self.loss == "squared")

    def numbers(self, thin: Tensor | None = None) -> int:
        """Return how many numbers a client sends: of a symmetric matrix one triangle."""
        shape = self.shape(thin)
        if self.form == "diagonal" or thin is not None:
            return int(np.prod(shape))
        return shape[0] * shape[1] * (shape[1] + 1) // 2

    def _features(self, inputs: Tensor) -> Tensor:
        a = self.rows(inputs)
        return torch.cat([a, a.new_ones(len(a), 1)][not self.weight : 1 + self.bias], dim=1)

    def _chances(self, x: Tensor, inputs: Tensor) -> Tensor:
        return torch.softmax(self.model.outputs(x, inputs.to(self.model.device)), dim=1)

    def _second_derivatives(self, x: Tensor, inputs: Tensor) -> Iterable[Tensor]:
        """Return one row of second derivatives for each block, or bounds of them."""
        if self.loss == "squared":
            return [torch.full((), 2.0, dtype=x.dtype, device=x.device)]
        if self.loss == "binary_logistic":
            p = torch.sigmoid(self.model.outputs(x, inputs.to(self.model.device)))[:, 0]
            return [p * (1 - p)]
        p = self._chances(x, inputs)
        return (2 * p * (1 - p)).T  # diag(p) - pp' <= 2 diag(p (1 - p)): diagonally dominant

    def _add_whole(self, total: Tensor, a: Tensor, p: Tensor, counts: Tensor) -> None:
        """Add diag(p) - pp' times aa', a row of blocks up to the diagonal at a time."""
        k, q = self.places.shape
        for c in range(k):
            h = -counts[:, None] * p[:, c : c + 1] * p[:, : c + 1]
            h[:, c] += counts * p[:, c]
            blocks = a.T @ (h[:, :, None] * a[:, None, :]).reshape(len(a), -1)
            rows, before = slice(c * q, (c + 1) * q), c * q
            total[rows, : before + q] += blocks.double()
            total[:before, rows] += blocks[:, :before].T.double()


def check_sum_weights(weights: Weights, n: int) -> None:
    """Refuse weights that make no positive sum of Hessians."""
    if weights.shape != (n,) or not np.isfinite(weights).all() or weights.min() < 0:
        raise ValueError(
            f"A sum of Hessians needs one weight of at least 0 for each of {n} clients, got "
            f"{np.array2string(np.asarray(weights), threshold=8)}; take absolute values of signed "
            "ones."
        )


def linear_hessian(
    model: FlatModel, x: Tensor, inputs: Tensor, targets: Tensor, weights: Tensor
) -> Tensor | str:
    r"""Return the second derivatives of a weighted sum of sample losses, or why there are none.

    .. math:: \sum_s w_s\, A_s \otimes z_s z_s^\top, \qquad z_s = (a_s, 1)

    where :math:`A_s` are the second derivatives of the loss in the outputs of sample s. The L2
    penalty is not in it.

    Parameters
    ----------
    x : Tensor
        The model as a vector.
    inputs, targets : Tensor
        Samples, shape (m, ...).
    weights : Tensor
        One number per sample, shape (m,).
    """
    rows_of = trained_rows(model)
    if rows_of is None:
        return "the model is not linear in its parameters"
    if model.own_size:
        return "clients have own parameters, and the matrix would have to do without them"
    if base_loss(model.loss) is hinge:
        return "the hinge loss has a kink, and second derivatives that say nothing of it"
    outputs = model.outputs(x, inputs).reshape(len(inputs), -1)

    def loss_of(output: Tensor, target: Tensor) -> Tensor:
        return model.loss(output[None], target[None])[0]

    bends = vmap(jacrev(grad(loss_of)))(outputs, targets)
    rows = rows_of(inputs)
    weight, bias = (any(n.endswith(part) for n in model.shapes) for part in ("weight", "bias"))
    z = torch.cat([rows, rows.new_ones(len(rows), 1)][not weight : 1 + bias], dim=1)
    width, k = z.shape[1], outputs.shape[1]
    blocks = x.new_empty(k, width, k, width)
    for a in range(k):
        for b in range(a + 1):
            block = z.T @ (z * (weights * bends[:, a, b])[:, None])
            blocks[a, :, b, :], blocks[b, :, a, :] = block, block.T
    # The vector has the weights of all outputs first, then their biases.
    place = torch.arange(k * width, device=x.device).view(k, width)
    order = torch.cat([place[:, : width - bias].flatten(), place[:, width - bias :].flatten()])
    return blocks.view(k * width, k * width)[order][:, order]
