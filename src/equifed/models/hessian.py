"""The matrix of second derivatives of a linear model's weighted loss."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

from equifed.models.curvature import trained_rows
from equifed.models.flat import FlatModel


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
