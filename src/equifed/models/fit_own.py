r"""The own part of one client at fixed shared parameters: a convex problem of a few numbers.

With the features :math:`\phi` that enter the last layer (or a one, for its bias alone) and the
outputs z without the own part,

.. math:: \min_v\ \frac1m \sum_s \text{loss}\bigl(z_s + v^\top \phi_s,\ y_s\bigr)
          + \frac{\text{l2}}2 |v|^2

is solved by Newton's method to rounding.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

MOST_NUMBERS = 2000
"""Numbers of an own part that Newton's method is for."""
STEPS = 100
SHORTEST = 2.0**-30
FittedLoss = Literal["cross_entropy", "binary_logistic", "squared"]
Derivatives = tuple[Tensor, Tensor, Tensor]


def find_last_layer(module: nn.Module, names: Sequence[str]) -> str:
    """Return the name of the linear layer whose bias, or weight and bias, the names are."""
    places = {name.rpartition(".")[0] for name in names}
    place = next(iter(places))
    layer = module.get_submodule(place) if len(places) == 1 else None
    parts = {name.rpartition(".")[2] for name in names}
    if not isinstance(layer, nn.Linear) or parts not in ({"bias"}, {"weight", "bias"}):
        raise ValueError(
            f"An own part is fitted at fixed shared parameters where it is the bias, or weight and "
            f"bias, of the last linear layer, not {', '.join(names)}; for others train with own=."
        )
    return place


def read_last_layer(
    module: nn.Module, place: str, run: Callable[[nn.Module], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return what enters the last layer (m, q) and the module's outputs (m, k), in float64.

    ``run`` passes samples through the module.
    """
    seen: list[Tensor] = []
    hook = module.get_submodule(place).register_forward_hook(
        lambda _, given, __: seen.append(given[0].detach())
    )
    try:
        outputs = run(module).double()
    finally:
        hook.remove()
    layer = module.get_submodule(place)
    assert isinstance(layer, nn.Linear)
    entered = torch.cat(seen).double() if seen else outputs.new_zeros(0, layer.in_features)
    told = entered.dim() == 2 and len(entered) == len(outputs)
    if told:
        bias = 0.0 if layer.bias is None else layer.bias.double()
        wanted = entered @ layer.weight.double().T + bias
        told = wanted.shape == outputs.shape
        told = told and torch.allclose(wanted, outputs, rtol=1e-3, atol=1e-4)
    if not told:
        raise ValueError(
            f"The model's outputs are not those of its last linear layer {place!r}, so the own "
            "part cannot be fitted at fixed shared parameters; train with own= instead."
        )
    return entered, outputs


def fit_linear(
    design: Tensor, outputs: Tensor, targets: Tensor, loss: FittedLoss, l2: float
) -> Tensor:
    """Return the best v (q, k) for rows ``design`` (m, q) beside outputs (m, k), in float64.

    >>> ones, zeros = torch.ones(4, 1).double(), torch.zeros(4, 1).double()
    >>> fit_linear(ones, zeros, torch.tensor([1.0, 2.0, 3.0, 6.0]), "squared", l2=0.0)
    tensor([[3.]], dtype=torch.float64)
    """
    (m, q), k = design.shape, outputs.shape[1]
    if q * k > MOST_NUMBERS:
        raise ValueError(
            f"The own part has {q * k} numbers; at fixed shared parameters up to {MOST_NUMBERS} "
            "are fitted: take own='bias', or train with own= instead."
        )
    v, eye = outputs.new_zeros(q, k), l2 * torch.eye(q * k, dtype=outputs.dtype)
    if m == 0:
        return v
    at = _DERIVATIVES[loss]
    value, first, second = _penalised(at, design, outputs, targets, v, l2)
    for _ in range(STEPS):
        gradient = (design.T @ first / m + l2 * v).T.reshape(-1)
        hessian = torch.einsum("mce,ma,mb->caeb", second / m, design, design)
        matrix = hessian.reshape(q * k, q * k) + eye
        step = torch.linalg.lstsq(matrix, gradient[:, None], driver="gelsd").solution[:, 0]
        decrement, length = float(gradient @ step), 1.0
        if not decrement > 1e-24:
            break
        while length > SHORTEST:
            there = v - length * step.reshape(k, q).T
            found = _penalised(at, design, outputs, targets, there, l2)
            if found[0] <= value - 1e-4 * length * decrement + 1e-15 * abs(value):
                break
            length /= 2
        else:
            break
        settled = value - found[0] <= 1e-15 * abs(value) and decrement < 1e-12
        v, (value, first, second) = there, found
        if settled:
            break
    return v


def _penalised(
    at: Callable[[Tensor, Tensor], Derivatives], design: Tensor, outputs: Tensor, targets: Tensor,
    v: Tensor, l2: float,
) -> tuple[float, Tensor, Tensor]:  # fmt: skip
    losses, first, second = at(outputs + design @ v, targets)
    value = float(losses.mean() + 0.5 * l2 * v.square().sum())
    return (value if math.isfinite(value) else math.inf), first, second


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


_DERIVATIVES = {"cross_entropy": _softmax, "binary_logistic": _sigmoid, "squared": _squared}


def fitted_loss(loss: object) -> FittedLoss | None:
    """Return the name of a loss for which own parts can be fitted; None for others."""
    if getattr(loss, "__module__", "") != "equifed.models.losses":
        return None
    names = get_args(FittedLoss)
    return next((name for name in names if name == getattr(loss, "__name__", "")), None)


def sample_losses(outputs: Tensor, targets: Tensor, loss: FittedLoss) -> Tensor:
    """Return one loss per sample, as the fit counts them."""
    return _DERIVATIVES[loss](outputs, targets)[0]


def split_own(
    v: Tensor, names: Sequence[str], shapes: Mapping[str, torch.Size]
) -> dict[str, Tensor]:
    """Return v (q, k) by the names of the own parameters: the last row is the bias."""
    parts = {"bias": v[-1], "weight": v[:-1].T}
    return {n: parts[n.rpartition(".")[2]].reshape(shapes[n]).clone() for n in names}


def widen(entered: Tensor, names: Sequence[str]) -> Tensor:
    """Return the rows that own parameters are multiplied with: features and a one, or a one."""
    ones = entered.new_ones(len(entered), 1)
    return torch.cat([entered, ones], dim=1) if len(names) == 2 else ones


def check_fit(loss: FittedLoss | None, l2: float) -> FittedLoss:
    """Refuse losses that own parts are not fitted to, and penalties with which there is no best."""
    if loss is None:
        raise ValueError(
            "Own parts are fitted to cross_entropy, logistic and squared losses without class "
            "weights; the model was trained with another."
        )
    if not (l2 >= 0 and math.isfinite(l2)) or (l2 == 0 and loss != "squared"):
        raise ValueError(
            f"own_l2 must be a number above 0, got {l2:g}: the best own part of a client without "
            "some class would be infinite; give own_l2=1e-3."
        )
    return loss


def fit_new_client(
    module: nn.Module, names: Sequence[str], run: Callable[[nn.Module], Tensor], targets: Tensor,
    loss: FittedLoss | None, l2: float,
) -> nn.Module:  # fmt: skip
    """Return the module with the best own parameters for a client's samples, as training has them.

    ``run`` passes the samples through a module; the penalty draws own parameters to zero.
    """
    found = copy.deepcopy(module)
    entered, _ = read_last_layer(found, find_last_layer(found, names), run)
    known = check_fit(loss, l2)
    with torch.no_grad():
        for name in names:
            found.get_parameter(name).zero_()
        v = fit_linear(widen(entered, names), run(found).double(), targets, known, l2)
        shapes = {name: found.get_parameter(name).shape for name in names}
        for name, value in split_own(v, names, shapes).items():
            found.get_parameter(name).copy_(value)
    return found
