"""A network's features in place of the samples, on which a linear model is a convex problem.

:func:`features` takes what a trained module computes. :func:`convexify` linearises a trained
network (Train-Convexify-Train): the features of a sample are the derivatives of the network's
output with respect to its parameters (the empirical neural tangent kernel), of which a random
subset of coordinates is kept (SCAFF-PD, Section 1.1 and Appendix F.1; Yu et al. 2022).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from equifed.contract.arrays import Index
from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.models.adapted import adapt_to_data, take_logits
from equifed.models.checks import explain_inputs
from equifed.models.flat import as_data

FEW = 2  # samples of which features are made twice: with those beside them, and without
ROUNDING = 1e-2  # what products in other shapes may differ by, also in bf16
CHUNK = 1024  # samples that go through a module at a time
# Target size of the whole gradients of one chunk of samples; only chosen coordinates are kept
CHUNK_BYTES = 1 << 27


def features(module: nn.Module, data: Federation, layer: str | None = None) -> Federation:
    """Return the federation with a module's features in place of its inputs.

    A linear head on them is a convex problem. Clients, targets, groups and splits stay; the module
    is used as in evaluation, and is left as it was. The features have no ``preparation``.

    Parameters
    ----------
    module, data
        Trained or pretrained, on its own device; the samples.
    layer : str, optional
        Name of the part (``module.named_modules()``) whose output is taken; None is the module's
        own output. What has several axes per sample is flattened.

    Examples
    --------
    >>> X = np.arange(6.0).reshape(3, 2)
    >>> data = Federation.from_clients({"north": (X, [0, 1, 1]), "south": (X + 1, [1, 0, 1])})
    >>> net = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 2))
    >>> features(net, data, layer="1").input_shape
    (5,)
    """
    module = adapt_to_data(module, data)
    parts, kind = dict(module.named_modules()), type(module).__name__
    if layer is not None and layer not in parts:
        known = ", ".join(name for name in parts if name)
        raise ValueError(f"The module has no layer {layer!r}; it has {known or 'none'}.")
    part, which, about = module, "The module", f"{kind}, output"
    if layer is not None:
        part, which, about = parts[layer], f"Layer {layer!r}", f"{kind}, layer {layer}"
    modes = [(one, one.training) for one in module.modules()]
    try:
        module.eval()
        splits = data.splits().items()
        made = {label: _compute(module, part, which, split.inputs) for label, split in splits}
    finally:
        for one, training in modes:
            one.training = training
    return _with_features(data, made, "features", about)


def _with_features(
    data: Federation, made: dict[str, NDArray[Any]], name: str, about: str
) -> Federation:
    source = {**data.source, "features": about}
    return replace(data.with_inputs(made), name=f"{data.name}, {name}", source=source)


def _compute(module: nn.Module, part: nn.Module, which: str, inputs: NDArray[Any]) -> NDArray[Any]:
    """Return the features of all samples, chunk after chunk; a few are made twice."""
    like = next(module.parameters(), torch.zeros(()))

    def run(samples: NDArray[Any]) -> NDArray[Any]:
        caught: list[Any] = []
        hook = part.register_forward_hook(lambda _m, _i, out: caught.append(out))
        given = as_data(samples, like.dtype, like.device)
        with hook, torch.no_grad(), explain_inputs(module, given):
            module(given)
        return _rows(caught, len(samples), which)

    out = [run(inputs[first : first + CHUNK]) for first in range(0, max(len(inputs), 1), CHUNK)]
    found, again = out[0][:FEW], run(inputs[:FEW])
    size = float(np.abs(found).max(initial=0.0))
    if not np.allclose(found, again, rtol=ROUNDING, atol=ROUNDING * size):
        raise ValueError(
            f"{which} gives a sample other features when other samples are beside it, or at a "
            "second time: take out what draws at random or mixes the samples of a batch."
        )
    return np.concatenate(out)


def _rows(caught: list[Any], samples: int, which: str) -> NDArray[Any]:
    """Return what a part gave, one row per sample, or say what is wrong with it."""
    if len(caught) != 1:
        raise ValueError(
            f"{which} ran {len(caught)} times in one pass over the samples; features need one."
        )
    found = take_logits(caught[0])
    if not isinstance(found, Tensor) or found.ndim == 0 or len(found) != samples:
        told = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"{which} must give one row for each of {samples} samples, gave {told}.")
    flat = found.reshape(samples, found[0].numel() if samples else -1).to("cpu")
    if not bool(torch.isfinite(flat).all()):
        raise ValueError(f"{which} gives features that are not finite; check the module's weights.")
    return np.asarray(flat.numpy())


def choose_coordinates(size: int, coordinates: int, seed: int = 0) -> Index:
    """Return which parameters become features: a uniform subset, increasing."""
    if not 1 <= coordinates <= size:
        raise ValueError(
            f"coordinates must lie between 1 and the model's {size} parameters, got {coordinates}."
        )
    pick = Stream(seed).at("tangent", "coordinates").generator()
    return np.sort(pick.choice(size, size=coordinates, replace=False)).astype(np.int64)


def tangent_features(
    module: nn.Module, parameters: Mapping[str, Tensor], inputs: Tensor, coordinates: Index
) -> Tensor:
    """Return the derivatives of the sum of outputs, for samples and chosen coordinates."""
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    held = {name: parameters[name].detach() for name in names}
    chunk = max(1, CHUNK_BYTES // sum(p.numel() * p.element_size() for p in held.values()))
    module = module.eval()

    def scalar(theta: dict[str, Tensor], sample: Tensor) -> Tensor:
        given = sample.unsqueeze(0)
        return take_logits(functional_call(module, theta, (given,))).sum()  # type: ignore[no-any-return]

    rows = []
    for part in torch.split(inputs, chunk):
        gradients = vmap(grad(scalar), in_dims=(None, 0))(held, part)
        flat = torch.cat([gradients[name].flatten(1) for name in names], dim=1)
        rows.append(flat[:, torch.as_tensor(coordinates)].detach())
    return torch.cat(rows)


def convexify(
    federation: Federation,
    module: nn.Module,
    parameters: Mapping[str, Tensor],
    *,
    coordinates: int = 50_000,
    seed: int = 0,
) -> Federation:
    """Return the federation with tangent features of a trained network in place of its inputs.

    Train the model ``linear`` on it with the loss ``squared``: classes become one-hot vectors, and
    SCAFF-PD has its guarantees and its certificate. All splits are divided by the root of the mean
    squared norm on the training samples, so that the problem's smoothness is of order one. (Ours:
    the paper does not say.)

    Parameters
    ----------
    federation, module, parameters
        What the network was trained on, its architecture, and ``History.parameters``.
    coordinates, seed
        Features to keep, all if the network has fewer, and of their choice; the paper keeps 50,000.
    """
    shapes = {name: p.shape for name, p in module.named_parameters() if p.requires_grad}
    for name, shape in shapes.items():
        if name not in parameters or parameters[name].shape != shape:
            lacking = f"{name!r} of shape {tuple(shape)}"
            raise ValueError(f"The parameters lack {lacking}; give the model that was trained.")
    module = adapt_to_data(module, federation)
    size = sum(shape.numel() for shape in shapes.values())
    chosen = choose_coordinates(size, min(coordinates, size), seed)
    dtype, found = next(iter(parameters.values())).dtype, {}
    for label, split in federation.splits().items():
        inputs = as_data(split.inputs, dtype, "cpu")
        found[label] = tangent_features(module, parameters, inputs, chosen).float().numpy()
    squares = np.sum(found["train"].astype(np.float64) ** 2, axis=-1)
    factor = 1 / (np.sqrt(np.mean(squares)) or 1.0)
    found = {label: np.asarray(rows * factor, np.float32) for label, rows in found.items()}
    about = f"{len(chosen)} of {size} tangent coordinates, seed {seed}"
    return _with_features(federation, found, "tangent", about)
