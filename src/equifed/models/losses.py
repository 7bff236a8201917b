"""Per-sample losses by name: they map outputs and targets to one number each, shape (batch,)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

if TYPE_CHECKING:
    from equifed.data.federation import Federation

SampleLoss = Callable[[Tensor, Tensor], Tensor]
"""Maps outputs (batch, ...) and targets (batch, ...) to one loss per sample, shape (batch,)."""
ClassWeights = str | Mapping[Any, float]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    r"""Negative log-likelihood of the softmax of one output per class.

    .. math:: \log \sum_k e^{o_k} - o_y

    >>> cross_entropy(torch.zeros(1, 4), torch.tensor([2])).exp()
    tensor([4.])
    """
    return F.cross_entropy(outputs, targets, reduction="none")


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    r"""Sum over the outputs of squared errors, without the factor 1/2 (SCAFF-PD, Section 6.1).

    .. math:: \sum_k (o_k - y_k)^2

    Classes become one-hot vectors when there are several outputs.

    >>> squared(torch.tensor([[1.0, 0.0], [1.0, 3.0]]), torch.tensor([0, 1]))
    tensor([0., 5.])
    """
    flat = outputs.reshape(len(outputs), outputs.shape[1:].numel())
    wanted = as_outputs(targets, flat)
    if flat.shape != wanted.shape:
        raise ValueError(
            f"The squared loss needs as many outputs as targets, got {flat.shape[1]} outputs and "
            f"{wanted.shape[1]} targets per sample."
        )
    return (flat - wanted).square().sum(1)


def as_outputs(targets: Tensor, like: Tensor) -> Tensor:
    """Return targets in the shape of outputs, which are axis 1; classes as one-hot vectors."""
    if not targets.is_floating_point() and like.shape[1] > 1:
        classes = torch.arange(like.shape[1], device=targets.device)
        classes = classes.view(-1, *[1] * (targets.dim() - 1))
        return (targets.unsqueeze(1) == classes).to(like.dtype)
    first, rest = targets.shape[: like.dim() - 1], targets.shape[like.dim() - 1 :]
    return targets.reshape(*first, rest.numel()).movedim(-1, 1).to(like.dtype)


def binary_logistic(outputs: Tensor, targets: Tensor) -> Tensor:
    r"""Logistic loss of one output; labels are 0 and 1, or -1 and +1.

    .. math:: \log(1 + e^{-s\,o}), \qquad s = +1 \text{ if } y > 0 \text{ else } -1

    >>> binary_logistic(torch.zeros(2, 1), torch.tensor([0, 1])).exp()
    tensor([2., 2.])
    """
    return F.softplus(-_margin(outputs, targets, "logistic"))


def hinge(outputs: Tensor, targets: Tensor) -> Tensor:
    r"""Hinge loss of one output, that of a linear SVM; labels are 0 and 1, or -1 and +1.

    .. math:: \max(0,\ 1 - s\,o), \qquad s = +1 \text{ if } y > 0 \text{ else } -1

    >>> hinge(torch.tensor([[0.5], [2.0]]), torch.tensor([1, 1]))
    tensor([0.5000, 0.0000])
    """
    return F.relu(1 - _margin(outputs, targets, "hinge"))


LOSSES: dict[str, SampleLoss] = {
    "cross_entropy": cross_entropy,
    "squared": squared,
    "logistic": binary_logistic,
    "hinge": hinge,
}


FittedLoss = Literal["cross_entropy", "binary_logistic", "squared"]


@dataclass(frozen=True)
class Derivatives:
    r"""A loss with known derivatives in the outputs z, which are axis 1.

    .. math:: \partial_z = c\,(m(z) - y), \qquad 0 \le \partial_z^2 \le s I

    >>> DERIVATIVES["squared"].first(torch.tensor([[3.0]]), torch.tensor([1.0]))
    tensor([[4.]])
    """

    loss: SampleLoss
    mean: Callable[[Tensor], Tensor]  # m
    steepest: float  # s
    factor: float = 1.0  # c

    def wanted(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return y, in the shape of the outputs."""
        if self.loss is binary_logistic:
            return (targets > 0).to(outputs.dtype).unsqueeze(1)
        return as_outputs(targets, outputs)

    def first(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return first derivatives, in the shape of the outputs."""
        return self.factor * (self.mean(outputs) - self.wanted(outputs, targets))

    def second(self, outputs: Tensor) -> Tensor:
        """Return second derivatives of samples' outputs (m, k), shape (m, k, k)."""
        if self.loss is squared:
            return torch.diag_embed(torch.full_like(outputs, 2.0))
        p = self.mean(outputs)
        return torch.diag_embed(p) - p[:, :, None] * p[:, None]


DERIVATIVES: dict[FittedLoss, Derivatives] = {
    "cross_entropy": Derivatives(cross_entropy, partial(torch.softmax, dim=1), 0.5),
    "binary_logistic": Derivatives(binary_logistic, torch.sigmoid, 0.25),
    "squared": Derivatives(squared, lambda outputs: outputs, 2.0, factor=2.0),
}


def fitted_loss(loss: Any) -> FittedLoss | None:
    """Return the name of a loss with known derivatives; None for others."""
    return next((name for name, known in DERIVATIVES.items() if known.loss is loss), None)


def loss_by_name(name: str) -> SampleLoss:
    """Return the loss of that name, or of ``package.module:function``."""
    return LOSSES[name] if name in LOSSES else import_object(name, "loss", LOSSES)


def resolve_loss(name: str, classes: int | None) -> str:
    """Return the name of the loss that ``"auto"`` stands for; any other name as it is."""
    usual = "cross_entropy" if classes is not None else "squared"
    return usual if name == "auto" else name


def outputs_for(federation: Federation, loss: str) -> int:
    """Return how many outputs a model needs for this data and loss.

    One per class for ``cross_entropy`` and for ``squared`` on classes, one per target value for
    ``squared`` on regression data, one for the binary losses.
    """
    classes, targets = federation.classes, federation.train.targets
    if loss in ("logistic", "hinge"):
        if classes != 2:
            raise ValueError(
                f"Loss {loss} needs exactly 2 classes, {federation.name} has {classes}; "
                "use cross_entropy."
            )
        return 1
    if classes is not None:
        return int(classes)
    if loss == "cross_entropy":
        raise ValueError(f"{federation.name} is regression data; use the loss squared.")
    return 1 if targets.ndim == 1 else int(targets.shape[1])


def predicted_classes(outputs: Tensor) -> Tensor:
    """Return the class of each sample: the largest output, or the sign of a single one.

    >>> predicted_classes(torch.tensor([[0.1, 0.7], [0.3, 0.2]]))
    tensor([1, 0])
    >>> predicted_classes(torch.tensor([[0.5], [-0.5]]))
    tensor([1, 0])
    """
    return outputs.argmax(1) if outputs.shape[1] > 1 else (outputs[:, 0] > 0).long()


class Weighted:
    """A loss that counts more for some samples than for others."""

    base: SampleLoss

    def counts(self, targets: Tensor) -> Tensor:
        """Return what each sample counts."""
        raise NotImplementedError

    def values(self, targets: Tensor) -> Tensor:
        """Return the targets of the base."""
        return targets

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each sample's loss times what it counts."""
        return self.counts(targets).to(outputs.dtype) * self.base(outputs, self.values(targets))


@dataclass(frozen=True, eq=False)
class WeightedLoss(Weighted):
    """A loss in which every class has a weight."""

    base: SampleLoss
    weights: Tensor
    __name__: str = "weighted loss"

    @override
    def counts(self, targets: Tensor) -> Tensor:
        return self.weights.to(targets.device)[targets]


def base_loss(loss: Any) -> Any:
    """Return the loss without the weights of classes."""
    return loss.base if isinstance(loss, WeightedLoss) else loss


def weigh_classes(
    loss: SampleLoss, weights: ClassWeights | None, federation: Federation
) -> SampleLoss:
    """Return a loss that weighs classes.

    ``"balanced"`` gives class k the weight :math:`n / (K n_k)` with the clients' training samples
    counted together, as in scikit-learn. A mapping gives the weight of every class, by its name or
    number; classes that it leaves out have 1.

    >>> from equifed.data import Federation
    >>> rare = Federation.from_clients({"a": (torch.zeros(4, 1).numpy(), [0, 0, 0, 1])})
    >>> weigh_classes(cross_entropy, "balanced", rare).weights
    tensor([0.6667, 2.0000], dtype=torch.float64)
    """
    if weights is None:
        return loss
    classes, names = federation.classes, federation.class_names
    if classes is None:
        raise ValueError(f"class_weights: {federation.name} is regression data without classes.")
    if weights == "balanced":
        counts = torch.as_tensor(federation.train.class_counts(classes).sum(0))
        if not counts.all():
            absent = int((counts == 0).nonzero()[0])
            raise ValueError(
                f"class_weights='balanced': no client has a training sample of class {absent}; "
                "leave the class out of the data, or give the weights as a mapping."
            )
        return WeightedLoss(loss, counts.sum() / (classes * counts.to(torch.float64)))
    if not isinstance(weights, Mapping):
        raise ValueError(f"class_weights must be 'balanced' or a mapping, got {weights!r}.")
    found = torch.ones(classes, dtype=torch.float64)
    places: dict[Any, int] = {key: k for k in range(classes) for key in (k, str(k))}
    places |= {name: k for k, name in enumerate(names)}
    for key, weight in weights.items():
        if key not in places:
            known = ", ".join(names) or f"0..{classes - 1}"
            raise ValueError(f"class_weights: there is no class {key!r}; there are {known}.")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < inf:
            fault = f"class {key!r} has the weight {weight!r}"
            raise ValueError(f"class_weights: {fault}; give a positive number.")
        found[places[key]] = float(weight)
    return WeightedLoss(loss, found)


def _margin(outputs: Tensor, targets: Tensor, name: str) -> Tensor:
    flat = outputs.reshape(len(outputs), outputs.shape[1:].numel())
    if flat.shape[1] != 1:
        raise ValueError(f"Loss {name} needs a model with one output, got {flat.shape[1]}.")
    return torch.where(targets > 0, flat[:, 0], -flat[:, 0])


def import_object(name: str, what: str, known: Mapping[str, Any]) -> Any:
    """Import ``package.module:attribute``."""
    module_name, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(
            f"There is no {what} {name!r}; choose from {', '.join(known)}, or give "
            "'package.module:name'."
        )
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"Cannot import the {what} {name!r}: {error}.") from None
