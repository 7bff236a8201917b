"""A network's features in place of the samples, on which a linear model is a convex problem.

:func:`features` takes what a trained module computes. :func:`convexify` linearises a trained
network (Train-Convexify-Train): the features of a sample are the derivatives of the network's
output with respect to its parameters (the empirical neural tangent kernel), of which a random
subset of coordinates is kept (SCAFF-PD, Section 1.1 and Appendix F.1; Yu et al. 2022).
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
from equifed.models.checks import explain_inputs
from equifed.models.flat import as_data, unflatten

FEW = 2
"""Samples of which features are made twice: with those beside them, and without."""
ROUNDING = 1e-2
"""What products in other shapes may differ by, also in bf16."""
CHUNK_BYTES = 1 << 27
"""Target size of the whole gradients of one chunk of samples; only chosen coordinates are kept."""


def features(
    module: nn.Module,
    data: Federation,
    layer: str | None = None,
    *,
    device: str | torch.device = "cpu",
    chunk: int = 1024,
) -> Federation:
    """Return the federation with a module's features in place of its inputs.

    A linear head on them is a convex problem: SCAFF-PD solves it and proves it. Clients, targets,
    groups and splits stay; the module is used as in evaluation, and is left as it was. Rows of a
    table cannot be prepared for the head alone, so the features have no ``preparation``.

    Parameters
    ----------
    module : nn.Module
        Trained or pretrained; takes a batch of the federation's inputs.
    data : Federation
        The samples.
    layer : str, optional
        Name of the part (``module.named_modules()``) whose output is taken; None is the module's
        own output. What has several axes per sample is flattened.
    device, chunk
        Where, and how many samples at a time.

    Examples
    --------
    >>> X = np.arange(6.0).reshape(3, 2)
    >>> data = Federation.from_clients({"north": (X, [0, 1, 1]), "south": (X + 1, [1, 0, 1])})
    >>> net = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 2))
    >>> features(net, data, layer="1").input_shape
    (5,)
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 sample, got {chunk}.")
    parts = dict(module.named_modules())
    if layer is not None and layer not in parts:
        known = ", ".join(name for name in parts if name)
        raise ValueError(f"The module has no layer {layer!r}; it has {known or 'none'}.")
    caught: list[Any] = []
    part = module if layer is None else parts[layer]
    home = next((p.device for p in module.parameters()), torch.device("cpu"))
    modes = [(one, one.training) for one in module.modules()]
    hook = part.register_forward_hook(lambda _m, _i, out: caught.append(out))
    try:
        module.eval().to(device)
        made = {
            label: _compute(module, split.inputs, caught, device, chunk, layer)
            for label, split in data.splits().items()
        }
    finally:
        hook.remove()
        for one, training in modes:
            one.training = training
        module.to(home)
    about = f"{type(module).__name__}, {'output' if layer is None else f'layer {layer}'}"
    return replace(
        data.with_inputs(made),
        name=f"{data.name}, features",
        source={**data.source, "features": about},
    )


def _compute(
    module: nn.Module,
    inputs: NDArray[Any],
    caught: list[Any],
    device: str | torch.device,
    chunk: int,
    layer: str | None,
) -> NDArray[Any]:
    """Return the features of all samples, chunk after chunk."""
    dtype = next((p.dtype for p in module.parameters()), torch.get_default_dtype())
    out: list[NDArray[Any]] = []
    with torch.no_grad():
        for first in range(0, max(len(inputs), 1), chunk):
            samples = as_data(inputs[first : first + chunk], dtype, device)
            out.append(_of_chunk(module, samples, caught, layer))
            if first == 0:
                again = _of_chunk(module, samples[:FEW], caught, layer)
                _check_rows(out[0][:FEW], again, layer)
    return np.concatenate(out)


def _of_chunk(
    module: nn.Module, samples: Tensor, caught: list[Any], layer: str | None
) -> NDArray[Any]:
    caught.clear()
    with explain_inputs(module, samples):
        module(samples)
    return _rows(caught, len(samples), layer)


def _check_rows(found: NDArray[Any], again: NDArray[Any], layer: str | None) -> None:
    """Refuse features of a sample that depend on chance, or on who is beside it in a chunk."""
    size = float(np.abs(found).max(initial=0.0))
    if not np.allclose(found, again, rtol=ROUNDING, atol=ROUNDING * size):
        which = "The module" if layer is None else f"Layer {layer!r}"
        raise ValueError(
            f"{which} gives a sample other features when other samples are beside it, or at a "
            "second time: take out what draws at random or mixes the samples of a batch."
        )


def _rows(caught: list[Any], samples: int, layer: str | None) -> NDArray[Any]:
    """Return what the layer gave, one row per sample, or say what is wrong with it."""
    which = "The module" if layer is None else f"Layer {layer!r}"
    if len(caught) != 1:
        raise ValueError(
            f"{which} ran {len(caught)} times in one pass over the samples; features need one."
        )
    found = caught[0]
    if not isinstance(found, Tensor) or found.ndim == 0 or len(found) != samples:
        told = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"{which} must give one row for each of {samples} samples, gave {told}.")
    flat = found.reshape(samples, found[0].numel() if samples else -1).to("cpu")
    if not bool(torch.isfinite(flat).all()):
        raise ValueError(f"{which} gives features that are not finite; check the module's weights.")
    return np.asarray(flat.numpy())


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


class TangentHead(nn.Module):
    r"""The linearised network: :math:`o_k(x) = h_k(x) + \langle \phi_k(x), w\rangle`, convex in w.

    Its inputs are those of :func:`convexify` with ``per_class=True``: for every class the
    derivatives :math:`\phi_k` of its logit and, last, the trained network's logit :math:`h_k`
    itself. w begins at zero, which is the trained network.
    """

    def __init__(self, input_shape: tuple[int, ...], outputs: int | None = None) -> None:
        super().__init__()
        if len(input_shape) != 2 or (outputs is not None and outputs != input_shape[0]):
            raise ValueError(
                f"TangentHead takes (classes, coordinates + 1) numbers per sample, got shape "
                f"{input_shape}; make them with convexify(..., per_class=True)."
            )
        self.weight = nn.Parameter(torch.zeros(input_shape[1] - 1))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return one number per class."""
        return inputs[..., :-1] @ self.weight + inputs[..., -1]


def _per_class(
    module: nn.Module, parameters: dict[str, Tensor], inputs: Tensor, chosen: Index,
    chunk: int | None,
) -> Tensor:  # fmt: skip
    """Return derivatives of every class's logit and the logit itself, (samples, classes, m + 1)."""
    steps = range(0, max(len(inputs), 1), chunk or 1024)
    with torch.no_grad():
        own = [
            functional_call(module.eval(), parameters, (inputs[a : a + (chunk or 1024)],))
            for a in steps
        ]
    logits = torch.cat(own).reshape(len(inputs), -1)
    blocks = [
        tangent_features(module, parameters, inputs, chosen, output=_pick(k), chunk=chunk)
        for k in range(logits.shape[1])
    ]
    return torch.cat([torch.stack(blocks, dim=1), logits.unsqueeze(2)], dim=2)


def _pick(k: int) -> Callable[[Tensor], Tensor]:
    return lambda outputs: outputs[k]


def convexify(
    federation: Federation,
    module: nn.Module,
    x: Vector | dict[str, Tensor],
    *,
    coordinates: int = 50_000,
    seed: int = 0,
    normalise: bool = True,
    per_class: bool = False,
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
    per_class : bool
        Take the derivatives of every class's logit, for a :class:`TangentHead`, which is the
        linearised network itself. The paper's sum of all logits makes the columns of the last
        layer repeat, once for each class, and cannot tell classes apart there.
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
        if per_class:
            out = _per_class(module, parameters, data, chosen, chunk)
        else:
            out = tangent_features(module, parameters, data, chosen, chunk=chunk)
        return np.asarray(out.to("cpu").numpy(), dtype=dtype)

    converted = {label: features(split.inputs) for label, split in federation.splits().items()}
    if normalise:
        held = converted["train"][..., :-1] if per_class else converted["train"]
        scale = np.sqrt(np.mean(np.sum(held.astype(np.float64) ** 2, axis=-1)))
        if scale > 0:
            factors = np.full(converted["train"].shape[-1], 1 / scale)
            factors[-1] = 1.0 if per_class else factors[-1]  # the logit stays
            converted = {k: np.asarray(v * factors, dtype=dtype) for k, v in converted.items()}
    kind = "tangent coordinates per class" if per_class else "tangent coordinates"
    about = {"features": f"{len(chosen)} of {size} {kind}, seed {seed}"}
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
