"""Rules by which the gradients of many clients, each at its own model, are computed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol, Self, get_args

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from equifed.engines.threads import Precision, products_in
from equifed.models.flat import FlatModel
from equifed.models.layers import write_out


@dataclass(frozen=True)
class StepSamples:
    """The samples that c clients use in one step, side by side."""

    inputs: Tensor  # (c, b, ...)
    targets: Tensor  # (c, b, ...)
    weights: Tensor  # (c, b): with which each sample's loss counts
    keys: Tensor | None = None  # (c, b): for dropout where the model drops anything
    masks: tuple[Tensor, ...] = ()  # what GradientRule.masks makes of the keys, if made ahead

    def first(self, clients: int) -> StepSamples:
        """Return the part of the first few clients."""
        if clients == len(self.weights):
            return self
        return self.changed(lambda values: values[:clients])

    def blocks(self, width: int) -> list[StepSamples]:
        """Return the same samples in pieces of at most ``width`` per client."""
        if self.weights.shape[1] <= width:
            return [self]
        pieces = [slice(a, a + width) for a in range(0, self.weights.shape[1], width)]
        return [self.changed(itemgetter((slice(None), piece))) for piece in pieces]

    def changed(self, change: Callable[[Tensor], Tensor]) -> StepSamples:
        """Return the samples with the same change made to every tensor of samples."""
        keys = None if self.keys is None else change(self.keys)
        return StepSamples(change(self.inputs), change(self.targets), change(self.weights), keys)


class GradientRule(Protocol):
    r"""Gradients of the weighted losses :math:`f_i(u_i) = \sum_k w_{ik}\, \ell(u_i; z_{ik})`."""

    units: int = 0
    """Units of the layers whose dropout masks can be drawn ahead."""

    def masks(self, keys: Tensor) -> tuple[Tensor, ...]:
        """Return each of these layers' masks (s, c, units, b) of several steps' keys (s, c, b)."""
        return ()

    def gradient(self, u: Tensor, samples: StepSamples) -> tuple[Tensor, Tensor]:
        """Return the gradients (c, d) at the rows of u, and the losses (c,)."""

    def step(self, u: Tensor, samples: StepSamples, *, keep: float, lr: float) -> None:
        """Set u to ``keep * u - lr * gradients``, in place."""
        gradient, _ = self.gradient(u, samples)
        if keep != 1:  # large models are slow to walk through
            u.mul_(keep)
        u.sub_(gradient, alpha=lr)


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations within."""

    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, and go on."""
        self.operations += 1
        return func(*args, **(kwargs or {}))


class FunctionRule(GradientRule):
    """Any module, batched over clients by ``torch.func``."""

    def __init__(self, model: FlatModel, patches: bool = False) -> None:
        self._model = model.twin()
        self._model.channels_last = False  # batching has a layout of its own
        write_out(self._model.module, convolutions=patches)
        in_dims = (0, 0, 0, 0, 0 if model.dropouts else None)
        self.counts: dict[torch.Size, int] | None = None
        """Operations by the samples' shape, where somebody wants to know."""
        self._batched = vmap(grad_and_value(self._weighted_loss), in_dims=in_dims)

    @override
    def gradient(self, u: Tensor, samples: StepSamples) -> tuple[Tensor, Tensor]:
        """Return gradients and losses."""
        if self.counts is None or samples.inputs.shape in self.counts:
            return self.compute(u, samples)
        with Counting() as counting:  # type: ignore[no-untyped-call]
            found = self.compute(u, samples)
        self.counts[samples.inputs.shape] = counting.operations
        return found

    def compute(self, u: Tensor, samples: StepSamples) -> tuple[Tensor, Tensor]:
        """Return the same: what can be compiled."""
        gradient, value = self._batched(
            u, samples.inputs, samples.targets, samples.weights, samples.keys
        )
        return gradient, value

    def _weighted_loss(
        self, u: Tensor, inputs: Tensor, targets: Tensor, weights: Tensor, keys: Tensor | None
    ) -> Tensor:
        return weights @ self._model.sample_losses(u, inputs, targets, keys)


class PenalisedRule:
    """A rule for whole losses: blocks of samples, and penalties."""

    def __init__(
        self, rule: GradientRule, l2: float, precision: Precision = "full",
        model: FlatModel | None = None, strengths: Tensor | None = None,
    ) -> None:  # fmt: skip
        if precision not in get_args(Precision):
            raise ValueError(f"precision is one of {get_args(Precision)}, got {precision!r}.")
        self.data, self._l2, self._precision = rule, l2, precision
        self._penalised, self._own, self._strengths = None, slice(0), strengths
        self._beyond: float | Tensor = 0.0  # penalties of own parameters minus the shared ones'
        if model is not None:  # with own parameters, or shared ones that are free
            self._penalised, self._own = model.penalised, slice(model.size, None)
            self._beyond = model.own_l2 - l2

    def begin(self, clients: Tensor) -> Self:
        """Return the rule for one walk of these clients."""
        rule = copy.copy(self)
        if self._strengths is not None:
            rule._beyond = self._strengths[clients] - self._l2
        return rule

    def value(self, u: Tensor, blocks: list[StepSamples]) -> Tensor:
        """Return losses alone."""
        return self.gradient(u, blocks)[1]

    def gradient(self, u: Tensor, blocks: list[StepSamples]) -> tuple[Tensor, Tensor]:
        """Return gradients and losses."""
        with products_in(self._precision, u.device):
            gradient, value = self.data.gradient(u, blocks[0])
            for samples in blocks[1:]:
                more, rest = self.data.gradient(u, samples)
                gradient, value = gradient.add_(more), value + rest
        return self.penalise(u, gradient, value)

    def penalise(self, u: Tensor, gradient: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradients, in their place, and losses with the penalties at the rows of u."""
        if self._l2:
            some = u if self._penalised is None else u * self._penalised
            gradient = gradient.add_(some, alpha=self._l2)
            value = value + 0.5 * self._l2 * some.square().sum(dim=1)
        if (pull := self._pull_own(u)) is not None:
            gradient[:, self._own].add_(pull)
            value = value + 0.5 * (pull * u[:, self._own]).sum(dim=1)
        return gradient, value

    def step(self, u: Tensor, blocks: list[StepSamples], *, keep: float, lr: float) -> None:
        """Set u to ``keep * u - lr * gradients``, in place."""
        if len(blocks) == 1 and self._penalised is None:
            pull = self._pull_own(u, lr)
            with products_in(self._precision, u.device):
                self.data.step(u, blocks[0], keep=keep - lr * self._l2, lr=lr)
            if pull is not None:
                u[:, self._own].sub_(pull)
        else:
            gradient, _ = self.gradient(u, blocks)
            u.mul_(keep).sub_(gradient, alpha=lr)

    def _pull_own(self, u: Tensor, lr: float = 1.0) -> Tensor | None:
        """Return lr times the gradients of the penalty beyond the shared one; None without."""
        if isinstance(self._beyond, Tensor):
            return lr * self._beyond[: len(u)] * u[:, self._own]
        return lr * self._beyond * u[:, self._own] if self._beyond else None
