"""Train-Convexify-Train: a network's own tangent features make its last mile a convex problem.

Stage 1 trains a network, by FedAvg say. Stage 2 replaces it by its linearisation at the trained
parameters: the features of a sample are the derivatives of the network's output with respect to
the parameters (the empirical neural tangent kernel), of which a random subset of coordinates is
kept. A linear model on these features with squared loss on one-hot labels is a convex problem, on
which SCAFF-PD converges and has a certificate.

SCAFF-PD, Section 1.1 and Appendix F.1; Yu et al. 2022.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from equifed.contract.arrays import Index, Vector
from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.models.flat import as_data, unflatten

CHUNK_BYTES = 1 << 27
"""Target size of the whole gradients of one chunk of samples; only chosen coordinates are kept."""


def choose_coordinates(size: int, coordinates: int, seed: int = 0) -> Index:
    """Return which parameters become features: a uniform subset, increasing.

    >>> choose_coordinates(5, 5)
    array([0, 1, 2, 3, 4])
    """
    if not 1 <= coordinates <= size:
        raise ValueError(
            f"coordinates must lie between 1 and the model's {size} parameters, got {coordinates}."
        )
    pick = Stream(seed).at("tangent", "coordinates").generator()
    return np.sort(pick.choice(size, size=coordinates, replace=False)).astype(np.int64)


def tangent_features(
    module: nn.Module,
    parameters: dict[str, Tensor],
    inputs: Tensor,
    coordinates: Index,
    *,
    output: Callable[[Tensor], Tensor] | None = None,
    chunk: int | None = None,
) -> Tensor:
    r"""Return :math:`\partial h(x_j; \theta) / \partial \theta_k` for samples j and coordinates k.

    h is the sum of the outputs for a model with several (:math:`\sum_k o_k(x_j; \theta)`), the
    output itself for a model with one, or whatever ``output`` makes of them. Gradients are taken
    sample by sample in chunks (``torch.func``); of a chunk only the chosen coordinates are kept, so
    the full Jacobian never exists.

    Parameters
    ----------
    module : nn.Module
        The network; evaluated without dropout.
    parameters : dict of tensors
        Where to linearise, by name.
    inputs : Tensor, shape (samples, ...)
    coordinates : array of int
        Positions in the flattened parameters.
    output : callable, optional
        Maps one sample's outputs, shape (K,), to a number.
    chunk : int, optional
        Samples at a time; chosen from the model's size if not given.
    """
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    held = {name: parameters[name].detach().to(inputs.device) for name in names}
    size = sum(p.numel() for p in held.values())
    item = next(iter(held.values())).element_size()
    chunk = max(1, CHUNK_BYTES // (size * item)) if chunk is None else chunk
    wanted = torch.as_tensor(coordinates, device=inputs.device)
    module = module.eval()
    total = torch.sum if output is None else output

    def scalar(theta: dict[str, Tensor], sample: Tensor) -> Tensor:
        return total(functional_call(module, theta, (sample.unsqueeze(0),)).reshape(-1))

    per_sample = vmap(grad(scalar), in_dims=(None, 0))
    rows = []
    for a in range(0, len(inputs), chunk):
        gradients = per_sample(held, inputs[a : a + chunk])
        flat = torch.cat([gradients[name].flatten(1) for name in names], dim=1)
        rows.append(flat[:, wanted].detach())
    return torch.cat(rows)


def convexify(
    federation: Federation,
    module: nn.Module,
    x: Vector | dict[str, Tensor],
    *,
    coordinates: int = 50_000,
    seed: int = 0,
    normalise: bool = True,
    dtype: Any = np.float32,
    device: str | torch.device = "cpu",
    chunk: int | None = None,
) -> Federation:
    """Return the federation with tangent features of a trained network in place of its inputs.

    Train the model ``linear`` on it with the loss ``squared``: classes become one-hot vectors, and
    SCAFF-PD has its guarantees and its certificate. All splits are converted with the same
    coordinates.

    Parameters
    ----------
    federation : Federation
        The data the network was trained on.
    module : nn.Module
        The network's architecture.
    x : Vector or dict of tensors
        Its trained parameters: flat, or by name (``History.parameters``).
    coordinates : int
        Features to keep, all if the network has fewer; the paper keeps 50,000.
    seed : int
        Of the choice of coordinates.
    normalise : bool
        Divide the features by the root of the mean squared norm on the training samples, so that
        the problem's smoothness is of order one. (Ours: the paper does not say.)
    dtype : NumPy dtype
        Precision of the features.
    device, chunk
        Where, and how many samples at a time.
    """
    module = module.to(device)
    parameters = x if isinstance(x, dict) else _name_parameters(module, x)
    size = sum(p.numel() for p in module.parameters() if p.requires_grad)
    chosen = choose_coordinates(size, min(coordinates, size), seed)
    precision = next(iter(parameters.values())).dtype

    def features(inputs: NDArray[Any]) -> NDArray[Any]:
        data = as_data(inputs, precision, device)
        out = tangent_features(module, parameters, data, chosen, chunk=chunk)
        return np.asarray(out.to("cpu").numpy(), dtype=dtype)

    converted = {label: features(split.inputs) for label, split in federation.splits().items()}
    if normalise:
        scale = np.sqrt(np.mean(np.sum(converted["train"].astype(np.float64) ** 2, axis=1)))
        if scale > 0:
            converted = {k: np.asarray(v / scale, dtype=dtype) for k, v in converted.items()}
    about = {"features": f"{len(chosen)} of {size} tangent coordinates, seed {seed}"}
    return replace(
        federation.with_inputs(converted),
        name=f"{federation.name}, tangent",
        source={**federation.source, **about},
    )


def _name_parameters(module: nn.Module, x: Vector) -> dict[str, Tensor]:
    shapes = {name: p.shape for name, p in module.named_parameters() if p.requires_grad}
    size = sum(shape.numel() for shape in shapes.values())
    if x.numel() != size:
        raise ValueError(
            f"The vector has {x.numel()} parameters, the model {size}; give the model that was "
            "trained."
        )
    return unflatten(x, shapes)
