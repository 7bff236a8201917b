"""Frozen features: what a trained module makes of the samples, as a federation of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from equifed.data.federation import Federation
from equifed.models.checks import explain_inputs
from equifed.models.flat import as_data

FEW = 2
"""Samples of which features are made twice: with those beside them, and without."""
ROUNDING = 1e-2
"""What products in other shapes may differ by, also in bf16."""


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
