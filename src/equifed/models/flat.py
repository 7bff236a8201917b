"""A torch module as a function of one flat vector.

Algorithms know models as vectors of length d. :class:`FlatModel` turns a user's module and
per-sample loss into pure functions of such a vector, refuses modules whose result depends on
anything else (running statistics, their own random numbers), and gives dropout an address.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from equifed.contract.streams import mix

SampleLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Maps outputs (batch, ...) and targets (batch, ...) to one loss per sample, shape (batch,)."""


class AddressedDropout(nn.Module):
    """Dropout whose mask is a function of a key per sample, not of a global generator.

    ``channels`` drops whole channels (the second dimension), as ``nn.Dropout2d`` does. The buffer
    ``keys`` holds one key for each sample and is replaced in every call.
    """

    keys: Tensor

    def __init__(self, p: float, layer: int, channels: bool) -> None:
        super().__init__()
        self.p, self.layer, self.channels = p, layer, channels
        self.register_buffer("keys", torch.zeros(1, dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        """Drop units with probability p and scale the others by 1/(1-p)."""
        if not self.training or self.p == 0:
            return inputs
        shape = inputs.shape[1:2] if self.channels else inputs.shape[1:]
        factors = self.factors(self.keys, shape, inputs.dtype)
        return inputs * factors.reshape(*factors.shape, *[1] * (inputs.dim() - factors.dim()))

    def factors(self, keys: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return 0 or 1/(1-p) for every unit of every sample, shape (samples, *shape)."""
        units = torch.arange(math.prod(shape), device=keys.device)
        drawn = mix(mix(keys, self.layer).unsqueeze(1), units) & ((1 << 24) - 1)
        keep = (drawn >= int(self.p * (1 << 24))).to(dtype) / (1 - self.p)
        return keep.reshape(keep.shape[0], *shape)


class FlatModel:
    """A module and a per-sample loss as functions of one flat vector.

    Parameters
    ----------
    module : torch.nn.Module
        Any module without running statistics; it is copied.
    loss : callable
        Per-sample loss of (outputs, targets).
    l2 : float
        Strength of the penalty ``l2 / 2 |x|^2``, part of every client's loss.
    example : Tensor
        Two samples or more, used to check the module.
    dtype, device
        Precision and place of the parameters.

    Examples
    --------
    >>> model = FlatModel(nn.Linear(3, 1), lambda o, t: (o[:, 0] - t) ** 2, torch.zeros(2, 3))
    >>> model.size
    4
    >>> model.sample_losses(torch.zeros(4), torch.ones(2, 3), torch.tensor([1.0, 2.0]))
    tensor([1., 4.])
    """

    def __init__(
        self,
        module: nn.Module,
        loss: SampleLoss,
        example: Tensor,
        *,
        l2: float = 0.0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if not (l2 >= 0 and math.isfinite(l2)):
            raise ValueError(f"l2 must be a number of at least 0, got {l2}.")
        self.loss, self.l2, self.dtype, self.device = loss, float(l2), dtype, torch.device(device)
        self.module = copy.deepcopy(module).to(device=self.device, dtype=dtype)
        _refuse_known_trouble(self.module)
        self.dropouts = _address_dropout(self.module)
        self.shapes = {name: p.shape for name, p in self.module.named_parameters()}
        self.size = sum(shape.numel() for shape in self.shapes.values())
        if self.size == 0:
            raise ValueError("The model has no parameters to train.")
        self.module.requires_grad_(False)
        self._check(example[:2].to(self.device, dtype if example.is_floating_point() else None))

    def flatten(self, module: nn.Module) -> Tensor:
        """Return the parameters of a module of the same shape as one vector."""
        return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).to(
            self.device, self.dtype
        )

    def flatten_any(self, value: Tensor | nn.Module | Mapping[str, Tensor]) -> Tensor:
        """Return a start as one vector: a vector, a module, or parameters by name."""
        if isinstance(value, nn.Module):
            value = dict(value.named_parameters())
        if isinstance(value, Mapping):
            shapes = {name: tuple(part.shape) for name, part in value.items()}
            wrong = [f"lacks {name}" for name in self.shapes if name not in shapes]
            wrong += [f"has an unexpected {name}" for name in shapes if name not in self.shapes]
            wrong += [
                f"has {name} of shape {shapes[name]} instead of {tuple(shape)}"
                for name, shape in self.shapes.items()
                if shapes.get(name, tuple(shape)) != tuple(shape)
            ]
            if wrong:
                raise ValueError(f"The start does not fit the model: it {', '.join(wrong)}.")
            value = torch.cat([torch.as_tensor(value[n]).reshape(-1) for n in self.shapes])
        if not isinstance(value, Tensor | np.ndarray):
            raise ValueError(
                f"A start is a vector, a module or a state dict, got {type(value).__name__}."
            )
        x = torch.as_tensor(value).detach().to(self.device, self.dtype)
        if x.shape != (self.size,) or not torch.isfinite(x).all():
            raise ValueError(
                f"A start must be a vector of the model's {self.size} parameters, all finite, got "
                f"shape {tuple(x.shape)} with {int((~torch.isfinite(x)).sum())} that are not."
            )
        return x

    def unflatten(self, x: Tensor) -> dict[str, Tensor]:
        """Return the named parameters that the vector holds, as views."""
        return unflatten(x, self.shapes)

    def outputs(
        self, x: Tensor, inputs: Tensor, keys: Tensor | None = None, training: bool = False
    ) -> Tensor:
        """Return the module's outputs; ``keys`` holds one dropout key per sample when training."""
        if self.module.training != training:
            self.module.train(training)
        state = self.unflatten(x)
        if keys is not None:
            state |= dict.fromkeys(self.dropouts, keys)
        outputs: Tensor = functional_call(self.module, state, (inputs,))
        return outputs

    def sample_losses(
        self, x: Tensor, inputs: Tensor, targets: Tensor, keys: Tensor | None = None
    ) -> Tensor:
        """Return the training loss of each sample, without the L2 penalty."""
        return self.loss(self.outputs(x, inputs, keys, training=True), targets)

    def penalty(self, x: Tensor) -> Tensor:
        """Return l2/2 |x|^2."""
        return 0.5 * self.l2 * (x @ x)

    def _check(self, inputs: Tensor) -> None:
        """Refuse a module that keeps statistics or draws its own random numbers."""
        x = self.flatten(self.module)
        keys = torch.zeros(len(inputs), dtype=torch.int64, device=self.device)
        before = {name: b.clone() for name, b in self.module.named_buffers()}
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(1)
            first = self.outputs(x, inputs, keys, training=True)
            torch.manual_seed(2)
            second = self.outputs(x, inputs, keys, training=True)
        changed = [n for n, b in self.module.named_buffers() if not torch.equal(b, before[n])]
        if changed:
            raise ValueError(
                f"The model keeps running statistics ({', '.join(changed[:3])}), which have no "
                "meaning when many clients share one model; use GroupNorm, LayerNorm or none."
            )
        if not torch.equal(first.nan_to_num(), second.nan_to_num()):
            raise ValueError(
                "The model draws its own random numbers in training, so runs could not be "
                "reproduced; use nn.Dropout modules (they are given an address) instead of "
                "functional dropout."
            )
        if first.shape[0] != len(inputs):
            raise ValueError(
                f"The model maps {len(inputs)} samples to outputs of shape {tuple(first.shape)}; "
                "the first dimension must be the sample."
            )


def _refuse_known_trouble(module: nn.Module) -> None:
    for name, part in module.named_modules():
        where = f"'{name}' ({type(part).__name__})"
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats:
            raise ValueError(
                f"The model's {where} keeps running statistics, which have no meaning when many "
                "clients share one model; use nn.GroupNorm instead."
            )
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            raise ValueError(
                f"The model's {where} mixes the samples of a batch; use nn.GroupNorm instead."
            )
        if isinstance(part, nn.RNNBase) and part.dropout > 0:
            raise ValueError(
                f"The model's {where} draws its own dropout; set dropout=0 there and put "
                "nn.Dropout between layers."
            )
        if isinstance(part, nn.AlphaDropout | nn.FeatureAlphaDropout):
            raise ValueError(f"The model's {where} is not supported; use nn.Dropout instead.")


def _address_dropout(module: nn.Module) -> list[str]:
    """Replace every dropout layer by an addressed one; return the names of their key buffers."""
    names = []
    for layer, (name, part) in enumerate(list(module.named_modules())):
        if isinstance(part, nn.modules.dropout._DropoutNd):
            parent, _, child = name.rpartition(".")
            channels = not isinstance(part, nn.Dropout)
            new = AddressedDropout(part.p, layer, channels)
            setattr(module.get_submodule(parent), child, new)
            names.append(f"{name}.keys")
    return names


def unflatten(x: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return the tensors of these shapes that a vector holds one after the other, as views."""
    parts = torch.split(x, [shape.numel() for shape in shapes.values()])
    return {n: part.view(s) for (n, s), part in zip(shapes.items(), parts, strict=True)}


def as_data(
    array: np.ndarray[Any, np.dtype[Any]], dtype: torch.dtype, device: str | torch.device
) -> Tensor:
    """Return samples as a tensor: real numbers in the model's precision, whole numbers as int64."""
    tensor = torch.as_tensor(np.ascontiguousarray(array))
    return tensor.to(device, dtype if tensor.is_floating_point() else torch.int64)
