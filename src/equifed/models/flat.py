"""A torch module as a function of one flat vector, which is what algorithms know of a model.

Modules whose result depends on anything else (running statistics, their own random numbers) are
refused, dropout gets an address. Parameters with ``requires_grad=False`` are not in the vector.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from equifed.models.adapted import take_logits
from equifed.models.checks import (
    agrees,
    check_classes,
    check_device,
    check_loss,
    check_module,
    check_outputs,
    copy_module,
    explain_inputs,
)
from equifed.models.layers import address_dropout
from equifed.models.losses import LOSSES, SampleLoss
from equifed.models.own_part import OwnPart, check_effect

Penalise: TypeAlias = Literal["all", "weights"]
"""Every trained parameter, or all but those whose name begins with ``bias``."""

# Samples that a module is tried on: with two outputs and three samples no axes are mixed up
EXAMPLES = 3


class FlatModel:
    """A module and a per-sample loss as functions of one flat vector.

    >>> model = FlatModel(nn.Linear(3, 1), lambda o, t: (o[:, 0] - t) ** 2, torch.zeros(2, 3))
    >>> model.sample_losses(torch.zeros(model.size), torch.ones(2, 3), torch.tensor([1.0, 2.0]))
    tensor([1., 4.])
    """

    def __init__(
        self,
        module: nn.Module,
        loss: SampleLoss,
        example: Tensor,
        targets: Tensor | None = None,
        *,
        classes: int | None = None,
        l2: float = 0.0,
        penalise: Penalise = "all",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        own: OwnPart | None = None,
    ) -> None:
        if not (l2 >= 0 and math.isfinite(l2)):
            raise ValueError(f"l2 must be a number of at least 0, got {l2}.")
        check_module(module)
        self.loss, self.l2, self.dtype, self.device = loss, float(l2), dtype, check_device(device)
        self.module = copy_module(module).to(device=self.device, dtype=dtype)
        self.dropouts = address_dropout(self.module)
        self._lay_out(own, penalise)
        self.input_dimensions = example.dim() - 1
        example = self._take_few(example)
        self.channels_last = False
        outputs, start = self._try(example), self.flatten_all(self.module)
        self.channels_last = gains_from_channels_last(self.module, start, example, self.outputs)
        self.output_dimensions = outputs.dim() - 1
        check_effect(lambda x: self.outputs(x, example), start, self.own_shapes)
        if classes is not None:
            check_classes(outputs, classes, loss)
        if targets is not None:
            check_loss(loss, outputs, self._take_few(targets))

    def _lay_out(self, own: OwnPart | None, penalise: Penalise) -> None:
        """Say which parameters are in the vector, which are own, and where each belongs."""
        trained = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        kept = () if own is None else own.names
        self.own_l2 = self.l2 if own is None else own.strength(1)  # divided by n where it varies
        self.shapes = {name: p.shape for name, p in trained.items() if name not in kept}
        self.own_shapes = {name: trained[name].shape for name in kept}
        self.all_shapes = self.shapes | self.own_shapes
        self.size = sum(shape.numel() for shape in self.shapes.values())
        self.own_size = sum(shape.numel() for shape in self.own_shapes.values())
        if not self.all_shapes:
            raise ValueError(
                "The model has no parameters to train; requires_grad_(True) on some makes them so."
            )
        marks = mark_penalised(penalise, self.shapes)
        self.penalised = None if marks is None else marks.to(self.device, self.dtype)
        first = {p: name for name, p in trained.items()}
        tied = self.module.named_parameters(remove_duplicate=False)
        self.names = {name: first[p] for name, p in tied if p in first}
        # Places of parameters: several for tied ones, one for a module that is used twice
        self._slots = {
            f"{place}.{own}" if place else own: first[p]
            for place, part in self.module.named_modules()
            for own, p in part.named_parameters(recurse=False, remove_duplicate=False)
            if p in first
        }
        self.module.requires_grad_(False)

    def _take_few(self, values: Tensor) -> Tensor:
        """Return as many samples as a module is tried on, real numbers in its precision."""
        few = values[torch.arange(EXAMPLES, device=values.device) % len(values)]
        return few.to(self.device, self.dtype if values.is_floating_point() else None)

    def twin(self) -> FlatModel:
        """Return the same model for another thread: another module that holds the same numbers."""
        held = [*self.module.parameters(), *self.module.buffers()]
        twin = copy.copy(self)
        twin.module = copy.deepcopy(self.module, {id(tensor): tensor for tensor in held})
        return twin

    @property
    def known_loss(self) -> str | None:
        """The name of the loss, if it is one of ours, without weights of classes."""
        return next((one.__name__ for one in LOSSES.values() if one is self.loss), None)

    def _held(self) -> dict[str, Tensor]:
        """Return parameters under all of their names, and buffers of the module's state."""
        held = self.module.state_dict(keep_vars=True)
        return {name: value for name, value in held.items() if isinstance(value, Tensor)}

    @property
    def fixed(self) -> dict[str, Tensor]:
        """Parameters that are not trained, and buffers that belong to the module's state."""
        return {name: value for name, value in self._held().items() if name not in self.names}

    def digest_fixed(self) -> str:
        """Return a digest of all that is fixed: whoever shares the model must have the same."""
        digest = hashlib.sha256()
        for name, value in self.fixed.items():
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest() if self.fixed else ""

    def flatten(self, module: nn.Module) -> Tensor:
        """Return the shared parameters of a module of the same shape as one vector."""
        return self.flatten_all(module)[: self.size]

    def flatten_all(self, module: nn.Module) -> Tensor:
        """Return the shared parameters and, at the end, the own ones as one vector."""
        held = dict(module.named_parameters(remove_duplicate=False))
        return torch.cat([held[name].detach().reshape(-1) for name in self.all_shapes]).to(
            self.device, self.dtype
        )

    def flatten_any(self, value: Tensor | nn.Module | Mapping[str, Tensor]) -> Tensor:
        """Return a start (vector, module, or parameters by name) as one vector."""
        if isinstance(value, nn.Module):
            value = value.state_dict()
        if isinstance(value, Mapping):
            return self._flatten_state(value)
        if not isinstance(value, Tensor | np.ndarray):
            raise ValueError(
                f"A start is a vector, a module or a state dict, got {type(value).__name__}."
            )
        x = torch.as_tensor(value).detach().to(self.device, self.dtype)
        if x.shape != (self.size,) or not torch.isfinite(x).all():
            raise ValueError(
                f"A start must be a vector of the {self.size} trained parameters, all finite, got "
                f"shape {tuple(x.shape)} with {int((~torch.isfinite(x)).sum())} that are not."
            )
        return x

    def _flatten_state(self, given: Mapping[str, Any]) -> Tensor:
        """Return a state dict as one vector, or say what it lacks or has too much."""
        held, parts = self._held(), dict[str, Tensor]()
        for name, value in given.items():
            if name not in held:
                known = ", ".join([*self.all_shapes][:8])
                raise ValueError(f"The model has no parameter {name!r}; it trains {known}.")
            value, here = torch.as_tensor(value).detach().to(held[name]), held[name]
            if value.shape != here.shape:
                raise ValueError(
                    f"Parameter {name!r} has shape {tuple(value.shape)}, the model needs "
                    f"{tuple(here.shape)}."
                )
            if name in self.names:
                here = parts.setdefault(self.names[name], value)
            if here is not value and not torch.equal(value, here):
                raise ValueError(
                    f"{name!r} is fixed or tied in the model and different here; pass the "
                    "module with these numbers instead."
                )
        absent = [name for name in self.shapes if name not in parts]
        if absent:
            raise ValueError(f"The start lacks the parameter {absent[0]!r}; give all of them.")
        return self.flatten_any(torch.cat([parts[name].reshape(-1) for name in self.shapes]))

    def unflatten(self, x: Tensor) -> dict[str, Tensor]:
        """Return the named parameters that the vector holds, own ones at its end, as views."""
        return unflatten(x, self.all_shapes)

    def state(self, x: Tensor) -> dict[str, Tensor]:
        """Return the module's state by name; trained parameters are views of the vector."""
        trained, held, names = self.unflatten(x), self._held(), self.names
        return {n: trained[names[n]] if n in names else value for n, value in held.items()}

    def outputs(
        self, x: Tensor, inputs: Tensor, keys: Tensor | None = None, training: bool = False
    ) -> Tensor:
        """Return the module's outputs; ``keys`` holds one dropout key per sample when training."""
        if self.module.training != training:
            self.module.train(training)
        parts = self.unflatten(x)
        state = {slot: parts[name] for slot, name in self._slots.items()}
        if keys is not None:
            state |= dict.fromkeys(self.dropouts, keys)
        inputs = put_channels_last(inputs) if self.channels_last else inputs
        outputs = functional_call(self.module, state, (inputs,), tie_weights=False)
        return take_logits(outputs)  # type: ignore[no-any-return]

    def sample_losses(
        self, x: Tensor, inputs: Tensor, targets: Tensor, keys: Tensor | None = None
    ) -> Tensor:
        """Return the training loss of each sample, without the L2 penalty."""
        return self.loss(self.outputs(x, inputs, keys, training=True), targets)

    def penalty(self, x: Tensor, own_l2: float | None = None) -> Tensor:
        """Return l2/2 |x|^2 of what is penalised, own parameters with a strength of their own."""
        own_l2 = self.own_l2 if own_l2 is None else own_l2
        u, v = x[: self.size], x[self.size :]
        shared = 0.5 * self.l2 * (u @ self.pull(u)) if self.l2 else x.new_zeros(())
        return shared if len(v) == 0 else shared + 0.5 * own_l2 * (v @ v)

    def add_pull(self, gradient: Tensor, x: Tensor, own_l2: float | None = None) -> Tensor:
        """Add the penalty's gradient at x to another one, in place, and return it."""
        own_l2 = self.own_l2 if own_l2 is None else own_l2
        if self.l2:
            gradient[: self.size] += self.l2 * self.pull(x[: self.size])
        if self.own_size and own_l2:
            gradient[self.size :] += own_l2 * x[self.size :]
        return gradient

    def pull(self, u: Tensor) -> Tensor:
        """Return the rows of u with zeros where there is no penalty: its gradient, but for l2."""
        return u if self.penalised is None else u * self.penalised

    def _try(self, inputs: Tensor) -> Tensor:
        """Return outputs of the module, unless they depend on more than parameters and sample."""
        x = self.flatten_all(self.module)
        keys = torch.arange(len(inputs), device=self.device)
        before = {name: b.clone() for name, b in self.module.named_buffers()}
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(1)
            with explain_inputs(self.module, inputs):
                first = self.outputs(x, inputs, keys, training=True)
            check_outputs(first, len(inputs))
            torch.manual_seed(2)
            second = self.outputs(x, inputs, keys, training=True)
            fewer = self.outputs(x, inputs[:-1], keys[:-1], training=True)
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
                "functional dropout, and 0 for the attention dropout of transformers."
            )
        alone = first[:-1]
        scale = float(alone.nan_to_num().abs().max()) if alone.numel() else 0.0
        if not agrees(fewer, alone, 1e-3 * scale):
            raise ValueError(
                "The model's outputs for a sample depend on the other samples of the batch; "
                "normalise within samples, and set batch_first=True in layers that have it."
            )
        return first


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


def mark_penalised(penalise: Penalise, shapes: Mapping[str, torch.Size]) -> Tensor | None:
    """Return 1 for every number that is penalised and 0 for biases; None if all are.

    >>> shapes = {"0.weight": torch.Size([1, 2]), "0.bias": torch.Size([1])}
    >>> mark_penalised("weights", shapes), mark_penalised("all", shapes)
    (tensor([1., 1., 0.]), None)
    """
    if penalise not in get_args(Penalise):
        raise ValueError(f"penalise is 'all' or 'weights', got {penalise!r}.")
    free = {name: name.rpartition(".")[2].startswith("bias") for name in shapes}
    if penalise == "all" or not any(free.values()):
        return None
    return torch.cat([torch.full((s.numel(),), 1.0 - free[name]) for name, s in shapes.items()])


def put_channels_last(images: Tensor) -> Tensor:
    """Return the same images (batch, channels, height, width), the channels of a pixel together."""
    return images.to(memory_format=torch.channels_last)


def gains_from_channels_last(
    module: nn.Module, x: Tensor, images: Tensor, outputs: Callable[[Tensor, Tensor], Tensor]
) -> bool:
    """Tell whether to put channels last: float32 on a CPU, and a few samples pass through."""
    real = images.dim() == 4 and images.dtype == x.dtype == torch.float32
    convolves = any(isinstance(part, nn.Conv2d) for part in module.modules())
    if not (real and convolves and x.device.type == "cpu"):
        return False
    x = x.detach().requires_grad_()
    try:
        with torch.enable_grad():
            found = outputs(x, put_channels_last(images))
            torch.autograd.grad(found.sum(), x)
            plain = outputs(x, images)
    except RuntimeError:
        return False
    return agrees(found, plain, 1e-5)
