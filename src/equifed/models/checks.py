"""What a module and a loss must be, so that clients can share them: one clear error each."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from equifed.models.losses import SampleLoss, cross_entropy, squared

# What torch raises when shapes or types do not fit
FAILURES = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, NotImplementedError)
BATCH_NORMS = nn.modules.batchnorm._NormBase


def check_device(device: str | torch.device) -> torch.device:
    """Return a device that is there."""
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"Unknown device {device!r}; use 'cpu' or 'cuda'.") from None
    given = f"device={str(device)!r}"
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"{given}, but torch {torch.__version__} finds no CUDA device here; use device='cpu', "
            "or install torch for CUDA on a machine with a GPU."
        )
    if chosen.type == "cuda" and (chosen.index or 0) >= (count := torch.cuda.device_count()):
        raise ValueError(f"{given}, but there are only {count} CUDA devices, counted from 0.")
    try:
        torch.zeros(1, device=chosen).sum().item()
    except FAILURES as error:
        why = _first_line(error)
        raise ValueError(f"{given} cannot compute here ({why}); use 'cpu' or 'cuda'.") from None
    return chosen


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200]


def check_dtype(dtype: torch.dtype) -> None:
    """Refuse what is no precision of real numbers."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype!r}.")


def check_module(module: Any) -> None:
    """Refuse what is no module, or one of which it is known that clients cannot share it."""
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        raise ValueError(f"The model must be a torch.nn.Module or a name, got {kind}.")
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            "The model is a TorchScript module, whose parameters cannot be replaced; pass the "
            "module that it was made from."
        )
    for name, part in module.named_modules():
        if fault := _find_fault(part):
            raise ValueError(f"The model's '{name}' ({type(part).__name__}) {fault}.")


def _find_fault(part: Any) -> str | None:
    """Return why clients cannot share a layer, and what to do."""
    held = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
    tracks = isinstance(part, BATCH_NORMS) and part.track_running_stats
    drops = isinstance(part, nn.RNNBase) and part.dropout > 0
    alpha = isinstance(part, nn.AlphaDropout | nn.FeatureAlphaDropout)
    attends = isinstance(part, nn.MultiheadAttention) and part.dropout > 0
    reasons = {
        "is lazy and has no shape yet; call the model once on a batch of samples before passing "
        "it": any(map(nn.parameter.is_lazy, held)),
        "lies on the meta device, without numbers": any(value.is_meta for value in held),
        "keeps running statistics, which have no meaning when many clients share one model; "
        "equifed.models.to_group_norm(model) puts nn.GroupNorm with the same weight and bias in "
        "its place. Or train a head on equifed.features(...) if it is part of a backbone that "
        "stays as it is": tracks,
        "mixes the samples of a batch; equifed.models.to_group_norm(model) puts nn.GroupNorm with "
        "the same weight and bias in its place": isinstance(part, nn.modules.batchnorm._BatchNorm),
        "draws its own dropout; set dropout=0 there and put nn.Dropout between layers": drops,
        "is not supported; use nn.Dropout instead": alpha,
        "has dropout besides add_bias_kv or add_zero_attn, which is not supported; set "
        "dropout=0.0 there": attends and (part.add_zero_attn or part.bias_k is not None),
    }
    return find_reason(reasons)


def find_reason(reasons: Mapping[str, Any]) -> str | None:
    """Return the first reason that holds."""
    return next((why for why, holds in reasons.items() if holds), None)


@contextmanager
def explain_inputs(module: nn.Module, inputs: Tensor) -> Iterator[None]:
    """Say which part of a module could not take what it was given, if one cannot."""
    entered: list[tuple[nn.Module, Any]] = []
    hooks = [
        part.register_forward_pre_hook(lambda part, given: entered.append((part, given)))
        for part in module.modules()
        if not list(part.children())
    ]
    try:
        yield
    except FAILURES as error:
        layout = getattr(module, "equifed_layout", None)
        shape = tuple(inputs.shape[1:]) if layout is None else f"[{layout}]"
        at = ""
        if entered:
            part, given = entered[-1]
            shapes = [tuple(v.shape) for v in given if isinstance(v, Tensor)]
            at = f" It stopped at {part}, which was given {', '.join(map(str, shapes))}."
        raise ValueError(
            f"The model cannot take samples of shape {shape} ({inputs.dtype}), here "
            f"{len(inputs)} of them.{at} Torch says: {_first_line(error)} Build the model for "
            f"samples of shape {shape}."
        ) from error
    finally:
        for hook in hooks:
            hook.remove()


def check_outputs(outputs: Any, samples: int) -> None:
    """Refuse outputs that are not one tensor of numbers with a row per sample."""
    if not isinstance(outputs, Tensor):
        held = f" of {len(outputs)};" if isinstance(outputs, tuple | list) else ";"
        if isinstance(outputs, Mapping):
            held = f" with {', '.join(map(str, outputs))}, and no 'logits'; call them that, or"
        raise ValueError(
            f"The model returns a {type(outputs).__name__}{held} wrap it in a module whose "
            "forward returns one tensor (batch, outputs)."
        )
    if outputs.dim() == 0 or len(outputs) != samples or not outputs.is_floating_point():
        raise ValueError(
            f"The model maps {samples} samples to {outputs.dtype} outputs of shape "
            f"{tuple(outputs.shape)}; they must be real, and the first dimension the sample."
        )


def check_classes(outputs: Tensor, classes: int, loss: SampleLoss) -> None:
    """Refuse outputs that are not one per class, or one whose sign tells two classes apart."""
    shape = tuple(outputs.shape[1:])
    signed = classes == 2 and loss not in (cross_entropy, squared)
    if shape == (classes,) or (shape == (1,) and signed):
        return
    single = ", or one for a binary loss" if signed else ""
    raise ValueError(
        f"The model has outputs of shape {shape} per sample, the data {classes} classes; give it "
        f"{classes} outputs{single} (a last layer nn.Linear(..., {classes}))."
    )


def check_loss(loss: SampleLoss, outputs: Tensor, targets: Tensor) -> None:
    """Refuse a loss that does not give one number per sample."""
    name = getattr(loss, "__name__", type(loss).__name__)
    if isinstance(loss, nn.Module) and (reduction := getattr(loss, "reduction", "none")) != "none":
        raise ValueError(
            f"The loss {name} has reduction={reduction!r}: one number for a whole batch. A loss "
            f"must give one number per sample: {name}(reduction='none')."
        )
    shares = torch.linspace(0.9, 1, len(outputs)).to(outputs)  # samples that differ
    outputs = outputs * shares.view(-1, *[1] * (outputs.dim() - 1))
    try:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")  # torch warns of what is refused below
            each = loss(outputs.detach().requires_grad_(), targets)
            fewer = loss(outputs[:-1], targets[:-1])
    except FAILURES as error:
        raise ValueError(
            f"The loss {name} cannot compare outputs of shape {tuple(outputs.shape)} "
            f"({outputs.dtype}) with targets of shape {tuple(targets.shape)} ({targets.dtype}): "
            f"{_first_line(error)}"
        ) from error
    if not isinstance(each, Tensor) or each.shape != outputs.shape[:1]:
        seen = f"shape {tuple(each.shape)}" if isinstance(each, Tensor) else type(each).__name__
        raise ValueError(
            f"A loss must give one number per sample, {name} gives {seen} for {len(outputs)} "
            f"samples with outputs of shape {tuple(outputs.shape)}; use reduction='none', and sum "
            "or average over all axes but the first."
        )
    if not each.is_floating_point() or not each.requires_grad:
        raise ValueError(
            f"The loss {name} gives {each.dtype} numbers without a derivative in the outputs, so "
            "nothing could be learned from it; use one that is differentiable."
        )
    if not agrees(fewer, each[:-1], 1e-6):
        raise ValueError(
            f"The loss {name} gives a sample another number when other samples are beside it; do "
            "not sum, average or divide over the batch (reduction='none')."
        )


def agrees(one: Tensor, other: Tensor, atol: float, rtol: float = 1e-3) -> bool:
    """Tell whether numbers are the same, shapes and missing ones too, but for rounding."""
    return one.shape == other.shape and torch.allclose(one, other, rtol, atol, equal_nan=True)


def check_start(module: nn.Module) -> nn.Module:
    """Refuse a module whose parameters are not finite."""
    for name, value in module.named_parameters():
        if not torch.isfinite(value).all():
            raise ValueError(
                f"The model's parameter {name!r} has numbers that are not finite; training cannot "
                "start from them."
            )
    return module


def to_group_norm(module: nn.Module, groups: int = 8) -> nn.Module:
    """Return a copy with ``nn.GroupNorm`` in place of batch norm, with its weights and biases.

    A layer of C channels gets the largest divisor of C up to ``groups`` that leaves at least two
    channels per group, else one group. Running statistics go: train, or fine-tune, afterwards.

    >>> to_group_norm(nn.Sequential(nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12)))[1].num_groups
    6
    """
    if groups < 1:
        raise ValueError(f"groups must be at least 1, got {groups}.")
    made = copy_module(module)
    norms = [part for part in made.modules() if isinstance(part, BATCH_NORMS)]
    new = {part: _group_norm(part, groups) for part in norms}
    for parent in list(made.modules()):
        for name, child in parent._modules.items():
            parent._modules[name] = new.get(child, child)  # type: ignore[call-overload]
    return new.get(made, made)  # type: ignore[call-overload, no-any-return]


def _group_norm(part: Any, groups: int) -> nn.Module:
    """Return the group norm for a batch norm, or for an instance norm with statistics."""
    count, alone = part.num_features, isinstance(part, nn.modules.instancenorm._InstanceNorm)
    if count == 1 and not alone:
        raise ValueError(f"{part} has one channel, whose group norm may be 0; replace it by hand.")
    fits = [g for g in range(1, min(groups, count // 2) + 1) if count % g == 0]
    norm = nn.GroupNorm(count if alone else max(fits), count, part.eps, part.affine)
    norm.weight, norm.bias = part.weight, part.bias
    return norm.train(part.training)


def copy_module(module: nn.Module) -> nn.Module:
    """Return a copy that later changes of the module do not reach, or say why there is none."""
    try:
        return copy.deepcopy(module)
    except RuntimeError as error:
        raise ValueError(
            "The model cannot be copied; torch says: "
            f"{str(error).splitlines()[0][:200]} Make what was done to its weights permanent "
            "(torch.nn.utils.remove_weight_norm, prune.remove), or use "
            "torch.nn.utils.parametrizations."
        ) from None


def is_plain(module: nn.Module) -> bool:
    """Tell whether a call of this module runs its class's ``forward`` and nothing else."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = [(getattr(module, kind), getattr(torch_module, f"_global{kind}")) for kind in kinds]
    return "forward" not in vars(module) and not any(any(pair) for pair in hooks)


def load_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Give a module its weights; what it keeps beside tensors stays as it was built."""
    found = module.load_state_dict(weights, strict=False)
    lost = [name for name in found.missing_keys if not name.endswith("_extra_state")]
    if lost or found.unexpected_keys:
        what = f"lack {lost[0]!r}" if lost else f"have the unexpected {found.unexpected_keys[0]!r}"
        raise ValueError(f"The weights are not those of this module: they {what}.")
    return module.eval()
