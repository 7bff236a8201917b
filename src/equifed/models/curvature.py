"""What is certain about the curvature of a model's losses, from the model and the data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from equifed.contract.arrays import Index
from equifed.contract.curvature import Curvature
from equifed.models.architectures import ZeroLinear
from equifed.models.checks import is_plain
from equifed.models.flat import FlatModel

PARTS = ("weight", "bias")
"""Parameters of a linear layer."""

EIGENVALUE_WORK = 2e10
"""Most operations to spend on exact eigenvalues; beyond it, bounds that cost one pass."""

PIECE = 1024
"""Samples that fixed parts of a model are run on at once."""

MOST_CLIENTS = 5000
"""Beyond this many clients their data are not looked at one by one."""

STEEPEST = {"squared": 2.0, "binary_logistic": 0.25, "cross_entropy": 0.5, "hinge": math.inf}
"""Largest second derivative of each convex loss in its outputs; none of them is ever negative."""


def known_curvature(
    model: FlatModel,
    n: int,
    inputs_of: Callable[[int], Tensor] | None = None,
    here: Sequence[int] | Index | None = None,
) -> Curvature | str:
    r"""Return what is certain about the curvature of n clients' losses, or why nothing is.

    For a linear model and a convex loss the Hessian of :math:`f_i` lies between
    :math:`\text{l2}\, I` and :math:`(s\, \lambda_{\max}(A_i^\top A_i / m_i) + \text{l2})\, I`,
    s being the largest second derivative of the loss; the squared loss has the eigenvalues of
    :math:`2 A_i^\top A_i / m_i + \text{l2}\, I` themselves. Where biases are not penalised, the
    lower bound is 0 but for the squared loss (:func:`_free_bias`). Without the samples at hand (a
    real federation), or with too many clients to look at each, only the lower bound is known.

    A profile loss, with a bias that every client chooses for itself, has the Schur complement for a
    Hessian: at most that of the shared part alone, and at least the smallest eigenvalue of both
    parts together.

    Parameters
    ----------
    inputs_of : callable, optional
        Returns a client's training inputs.
    here : sequence of int, optional
        Clients whose inputs these are, if not all; nothing but the penalty is known of the others.
    """
    why, rows_of = refuse_bounds(model), trained_rows(model)
    if why is not None or rows_of is None:
        return str(why)
    loss = model.loss.__name__
    sure = 0.0 if model.penalised is not None else model.l2  # a free bias may be all but flat
    if inputs_of is None or n > MOST_CLIENTS:
        return Curvature(np.full(n, math.inf), np.full(n, sure), lowest=0.0)
    quadratic = loss == "squared"
    # Only what is trained has a derivative: the last column is that of the bias.
    weight, bias = (any(name.endswith(part) for name in model.shapes) for part in PARTS)
    here = range(n) if here is None else here
    found = [_bound(rows_of(inputs_of(i)), model, weight, bias, n) for i in here]
    least, largest, free = (np.array(column) for column in list(zip(*found, strict=True))[:3])
    smoothness, convexity = np.full(n, math.inf), np.full(n, sure)
    smoothness[here] = STEEPEST[loss] * largest + model.l2
    exact = all(one[3] for one in found)
    if quadratic:
        convexity[here] += 2.0 * least
    if quadratic and weight and model.penalised is not None:
        convexity[here] = np.maximum(convexity[here], free)
    pair = loss == "cross_entropy" and next(iter(model.shapes.values()))[0] == 2
    tight = exact and (pair or loss in ("squared", "binary_logistic"))  # at zero, all of them
    return Curvature(smoothness, convexity, tight, lowest=0.0)


def refuse_bounds(model: FlatModel) -> str | None:
    """Return why nothing is certain about the losses' curvature, if nothing is."""
    if trained_rows(model) is None:
        return f"the model is not linear, so its losses need not be convex{_cure(model)}"
    loss = getattr(model.loss, "__name__", "?")
    if loss not in STEEPEST or getattr(model.loss, "__module__", "") != "equifed.models.losses":
        return f"nothing is known about the loss {loss}; state strong_convexity yourself"
    return _rounded(model.dtype, model.device)


def _bound(
    rows: Tensor, model: FlatModel, weight: bool, bias: bool, n: int
) -> tuple[float, float, float, bool]:
    """Return bounds on a client's eigenvalues, that of a free bias, and whether they are exact."""
    least, largest, exact = _eigenvalues(rows, weight, bias, n)
    if model.own_shapes:  # of both parts together
        least = _eigenvalues(rows, True, True, n)[0]
    free = 0.0 if model.penalised is None else _free_bias(rows, model.l2)
    return least, largest, free, exact


def _free_bias(inputs: Tensor, l2: float) -> float:
    r"""Return a lower bound on the curvature of least squares with a bias that is not penalised.

    With the mean c of the inputs, :math:`A^\top A / m \succeq c c^\top`, so no eigenvalue is below
    l2 or the smaller one of :math:`[[2 |c|^2 + l2, 2 |c|], [2 |c|, 2]]`, of determinant 2 l2.

    >>> round(_free_bias(torch.zeros(3, 2), 0.5), 9)
    0.5
    """
    squared = float(inputs.detach().to("cpu", torch.float64).flatten(1).mean(dim=0).square().sum())
    trace, determinant = 2 * squared + l2 + 2, 2 * l2
    smaller = 2 * determinant / (trace + math.sqrt(max(trace**2 - 4 * determinant, 0.0)))
    return min(l2, smaller) * (1 - 1e-13)


def linear_layer(module: nn.Module, input_dimensions: int) -> nn.Linear | None:
    """Return the one linear layer of a model that is linear in its parameters, else None.

    Only torch's own classes are known: a subclass, a hook or a parametrisation may compute
    anything. A sample must reach the layer as one row: applied to several, it has the curvature of
    all of them together.
    """
    parts = list(module) if type(module) is nn.Sequential else [module]
    if not all(is_plain(part) for part in (module, *parts)):
        return None
    found, flat = None, input_dimensions == 1
    for part in parts:
        if type(part) is nn.Flatten and (part.start_dim, part.end_dim) == (1, -1):
            flat = True
        elif type(part) in (nn.Linear, ZeroLinear) and flat and found is None:
            found = part
        elif type(part) is not nn.Identity:
            return None
    if not isinstance(found, nn.Linear) or not set(found._parameters) <= set(PARTS):
        return None
    return found


def trained_rows(model: FlatModel) -> Callable[[Tensor], Tensor] | None:
    """Return what makes of samples the rows that the one trained linear layer is applied to.

    These are the samples themselves for a linear model, and for an ``nn.Sequential`` of parts that
    are not trained and a linear layer at its end what the former make of them: whatever they
    compute, the outputs are linear in the trained parameters. None if the model is not so.
    """
    if linear_layer(model.module, model.input_dimensions) is not None:
        return lambda inputs: inputs.to(model.device, model.dtype).reshape(len(inputs), -1)
    if type(model.module) is not nn.Sequential or model.dropouts or model.output_dimensions != 1:
        return None
    *fixed, last = model.module
    held = {id(part) for one in fixed for part in one.modules()}
    if linear_layer(last, 1) is None or not is_plain(model.module) or id(last) in held:
        return None
    place = [*model.module._modules][-1] + "."
    if not all(name.startswith(place) for name in model.names):
        return None

    def compute(inputs: Tensor) -> Tensor:
        model.module.train(True)  # as in the losses
        with torch.no_grad():
            pieces = [_run(fixed, piece.to(model.device)) for piece in torch.split(inputs, PIECE)]
        return torch.cat(pieces)

    return compute


def _run(parts: Sequence[nn.Module], values: Tensor) -> Tensor:
    for part in parts:
        values = part(values)
    return values


def _cure(model: FlatModel) -> str:
    """Say how a model of which one linear layer alone is trained becomes a linear one."""
    places = {name.rpartition(".")[0] for name in model.names}
    place, held = places.pop(), dict(model.module.named_parameters())
    linear = isinstance(model.module.get_submodule(place), nn.Linear)
    if places or not linear or held.keys() <= model.names.keys():
        return ""
    return (
        f"; if the layer {place!r}, the only one that is trained, gives the outputs, a linear "
        "model on equifed.features(...) of what comes before it has certificates"
    )


def _rounded(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why numbers are too coarse for bounds, if they are."""
    if torch.is_autocast_enabled(device.type):
        return "torch.autocast rounds what the model computes, which no bound here covers"
    products = torch.get_float32_matmul_precision()
    if dtype not in (torch.float32, torch.float64):
        return f"the model computes in {dtype}, whose rounding no bound here covers"
    if dtype == torch.float32 and products != "highest":
        return f"torch rounds matrix products to {products!r} precision, which no bound here covers"
    return None


def _eigenvalues(
    inputs: Tensor, weight: bool, bias: bool, clients: int
) -> tuple[float, float, bool]:
    """Return bounds on the eigenvalues of A'A / m, and whether they are its ends."""
    a = inputs.detach().to("cpu", torch.float64).reshape(len(inputs), -1)
    ones = torch.ones(len(a), 1, dtype=a.dtype)
    a = torch.cat([a, ones][not weight : 1 + bias], dim=1)
    m, d = a.shape
    if clients * min(m, d) ** 2 * (min(m, d) + max(m, d)) > EIGENVALUE_WORK:
        return 0.0, float(a.square().sum()) / m, False  # the trace
    gram = a.T @ a if d <= m else a @ a.T
    values = torch.linalg.eigvalsh(gram / m)
    rounding = 1e-13 * float(values[-1])  # eigvalsh may be off by this: stay on the safe side
    least = max(0.0, float(values[0]) - rounding) if d <= m else 0.0
    return least, float(values[-1]) + rounding, True
