r"""Profile losses: the best own offset of the outputs, for many clients at once.

.. math:: F_i(u) = \min_v f_i(u, v), \qquad \nabla F_i(u) = \partial_u f_i(u, v_i^\star(u))

(envelope theorem) for linear models whose bias is the clients' own. With the outputs z of the
shared part at hand, the inner problem has as many unknowns as there are outputs. It is solved by
Newton steps from a start that depends on z alone, so that the same model gives the same bits. They
are damped as suits losses whose third derivatives are bounded by R times their second ones (Bach
2010): a step p is taken log(1 + R|p|) / (R|p|) of its length, which never overshoots and tends to
the whole step.

What is left is known. With :math:`\nu^2 = g^\top H^{-1} g` at v (the Newton decrement) and
:math:`R\nu \le \sqrt{m}/2`, H being at least m: :math:`|v - v^\star|_H \le 2\nu`, so

.. math:: 0 \le f_i(u, v) - F_i(u) \le 2 \nu^2, \qquad
          |\partial_u f_i(u, v) - \nabla F_i(u)| \le 2 \sqrt{L}\, \nu

with :math:`L \ge \partial_{uu} f_i` without its penalty: in a positive semidefinite Hessian
:math:`|H_{uv} p|^2 \le L\, p^\top H_{vv} p`, and H changes by a factor of at most two on the way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from typing_extensions import override

from equifed.contract.own import OwnSteps
from equifed.models.curvature import STEEPEST, linear_layer
from equifed.models.flat import SampleLoss
from equifed.models.losses import binary_logistic, cross_entropy, squared
from equifed.models.own_part import OwnPart, choose_own

MOST_NEWTON = 200
"""Newton steps at most: some five are usual, a hundred where outputs differ by hundreds."""

OWN_L2 = 1e-3
"""Default penalty of own offsets where a client without some class would let them run away."""


class Offsets(Protocol):
    """A loss as a function of one offset for each output; outputs are (c, k, b)."""

    turn: float
    """R: how fast second derivatives can change."""
    l2: float

    def wanted(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Return what the mean outcome (c, k) should be: shares of classes, means of targets."""
        ...

    def start(self, outputs: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
        """Return offsets (c, k) to start from."""
        ...

    def derivatives(
        self, outputs: Tensor, wanted: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return first (c, k) and second (c, k, k) derivatives by the offsets, penalty apart."""
        ...

    def slopes(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted derivatives (c, k, b) by the outputs."""
        ...

    def losses_and_slopes(
        self, outputs: Tensor, targets: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Return sample losses (c, b) and :meth:`slopes` in one pass; None: take them apart."""
        return None

    def project(self, v: Tensor) -> Tensor:
        """Return offsets without what has no effect."""
        return v

    def solve(
        self, outputs: Tensor, wanted: Tensor, weights: Tensor, start: Tensor | None = None
    ) -> Tensor:
        """Return the best offsets (c, k); a client's steps do not depend on the others'."""
        v = self.start(outputs, wanted, weights) if start is None else start
        rows, tiny = None, torch.finfo(v.dtype).tiny
        for _ in range(MOST_NEWTON if self.turn else 1):
            here = v if rows is None else v[rows]
            step, decrement = self.newton(here, outputs, wanted, weights)
            length = torch.linalg.vector_norm(step, dim=1, keepdim=True).mul_(self.turn).add_(tiny)
            here = here - step * (torch.log1p(length) / length)
            v = here if rows is None else v.index_copy(0, rows, here)
            going = decrement > torch.finfo(v.dtype).eps  # if not, this step doubled the digits
            if not going.all():
                on = torch.nonzero(going).squeeze(1)
                if len(on) == 0:
                    break
                rows = on if rows is None else rows[on]
                outputs, wanted, weights = outputs[on], wanted[on], weights[on]
        return v

    def newton(
        self, v: Tensor, outputs: Tensor, wanted: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return Newton's step (c, k) at offsets v, and the decrement's square (c,)."""
        first, second = self.derivatives(outputs + v.unsqueeze(2), wanted, weights)
        gradient = self.project(first + self.l2 * v)
        if second.shape[-1] == 1:
            step = gradient / (second[:, 0] + self.l2)
        else:
            second.diagonal(dim1=1, dim2=2).add_(self.l2)
            root = torch.linalg.cholesky_ex(second).L
            step = torch.cholesky_solve(gradient.unsqueeze(2), root).squeeze(2)
        return self.project(step), (gradient * step).sum(dim=1)


@dataclass(frozen=True)
class SquaredOffsets(Offsets):
    """Of the squared loss, in one step."""

    l2: float
    turn: float = 0.0

    @override
    def wanted(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return torch.bmm(self._targets(outputs, targets), weights.unsqueeze(2)).squeeze(2)

    @override
    def start(self, outputs: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
        return torch.zeros_like(wanted)

    @override
    def derivatives(
        self, outputs: Tensor, wanted: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        mean = torch.bmm(outputs, weights.unsqueeze(2)).squeeze(2)
        total = weights.sum(dim=1, keepdim=True).expand_as(mean)
        return 2 * (mean - wanted), torch.diag_embed(2 * total)

    @override
    def slopes(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return 2 * (outputs - self._targets(outputs, targets)) * weights.unsqueeze(1)

    def _targets(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the targets in the shape of the outputs, classes as one-hot vectors."""
        if not targets.is_floating_point() and outputs.shape[1] > 1:
            classes = torch.arange(outputs.shape[1], device=targets.device)
            return (targets.unsqueeze(1) == classes[:, None]).to(outputs.dtype)
        shaped = targets.flatten(2).transpose(1, 2) if targets.dim() > 2 else targets.unsqueeze(1)
        return shaped.to(outputs.dtype)


@dataclass(frozen=True)
class LogisticOffsets(Offsets):
    """Of the logistic loss of one output."""

    l2: float
    turn: float = 1.0

    @override
    def wanted(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return ((targets > 0).to(outputs.dtype) * weights).sum(dim=1, keepdim=True)

    @override
    def start(self, outputs: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
        """Return the difference of log-odds: those of the labels minus those of the outputs."""
        given = (torch.sigmoid(outputs[:, 0]) * weights).sum(dim=1, keepdim=True)
        return _log_odds(wanted, self.l2) - _log_odds(given, self.l2)

    @override
    def derivatives(
        self, outputs: Tensor, wanted: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        chance = torch.sigmoid(outputs)
        weighted = chance * weights.unsqueeze(1)
        return weighted.sum(dim=2) - wanted, (weighted * (1 - chance)).sum(dim=2, keepdim=True)

    @override
    def slopes(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        wanted = (targets > 0).to(outputs.dtype).unsqueeze(1)
        return (torch.sigmoid(outputs) - wanted) * weights.unsqueeze(1)


@dataclass(frozen=True)
class SoftmaxOffsets(Offsets):
    """Of the cross-entropy; equal offsets of all classes have no effect: they sum to zero."""

    l2: float
    turn: float = math.sqrt(2)

    @override
    def wanted(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return outputs.new_zeros(outputs.shape[:2]).scatter_add_(1, targets, weights)

    @override
    def start(self, outputs: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
        """Return log(share of the class) - log(its mean probability): one iterative scaling."""
        chance = torch.bmm(torch.softmax(outputs, dim=1), weights.unsqueeze(2)).squeeze(2)
        return self.project(torch.log(wanted + self.l2) - torch.log(chance + self.l2))

    @override
    def derivatives(
        self, outputs: Tensor, wanted: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        chance = torch.softmax(outputs, dim=1)
        products = torch.bmm(chance * weights.unsqueeze(1), chance.transpose(1, 2))
        mean = products.sum(dim=2)  # chances sum to one
        # The last term is where nothing changes: offsets that sum to zero do not see it.
        return mean - wanted, torch.diag_embed(mean) - products + 1 / chance.shape[1]

    @override
    def slopes(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        weights = weights.unsqueeze(1)
        slope = torch.softmax(outputs, dim=1).mul_(weights)
        return slope.scatter_add_(1, targets.unsqueeze(1), -weights)

    @override
    def losses_and_slopes(
        self, outputs: Tensor, targets: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        logs = torch.log_softmax(outputs, dim=1)
        losses = logs.gather(1, targets.unsqueeze(1)).squeeze(1).neg_()
        weights = weights.unsqueeze(1)
        slope = logs.exp_().mul_(weights)
        return losses, slope.scatter_add_(1, targets.unsqueeze(1), -weights)

    @override
    def project(self, v: Tensor) -> Tensor:
        return v - v.mean(dim=1, keepdim=True)


OFFSETS: dict[SampleLoss, type[SquaredOffsets | LogisticOffsets | SoftmaxOffsets]] = {
    squared: SquaredOffsets,
    binary_logistic: LogisticOffsets,
    cross_entropy: SoftmaxOffsets,
}


def choose_offsets(own: OwnPart | None, loss: SampleLoss) -> Offsets | None:
    """Return the offsets of profile losses; None if the clients have no such losses."""
    return None if own is None or own.steps != "profile" else OFFSETS[loss](own.l2)


def _log_odds(share: Tensor, least: float) -> Tensor:
    return torch.log(share + least) - torch.log1p(least - share)


def error_bounds(
    decrement: Tensor, offsets: Offsets, mean_square: Tensor, loss: SampleLoss
) -> tuple[Tensor, Tensor]:
    """Return bounds on the errors of losses and gradients, from squared decrements.

    ``mean_square`` holds the mean of |a|^2 over each client's samples a.
    """
    steepest, decrement = STEEPEST[loss.__name__], decrement.clamp(min=0)
    least = 2.0 if offsets.turn == 0 else offsets.l2
    near = offsets.turn * decrement.sqrt() <= 0.5 * math.sqrt(least)
    far = torch.full_like(decrement, math.inf)
    losses = torch.where(near, 2 * decrement, far)
    return losses, torch.where(near, 2 * (steepest * mean_square * decrement).sqrt(), far)


def settle_own(
    module: nn.Module,
    loss: SampleLoss,
    input_dimensions: int,
    own: str | Sequence[str] | None,
    steps: OwnSteps,
    own_l2: float | None,
    l2: float,
) -> OwnPart | None:
    """Return what clients keep and how it is found, or None if they keep nothing."""
    if steps not in ("auto", "profile", "joint", "alternating"):
        raise ValueError(f"own_steps must be auto, profile, joint or alternating, got {steps!r}.")
    if own_l2 is not None and not (own_l2 >= 0 and math.isfinite(own_l2)):
        raise ValueError(f"own_l2 must be a number of at least 0, got {own_l2}.")
    if own is None:
        if steps != "auto" or own_l2 is not None:
            raise ValueError(
                "own_steps and own_l2 are about own parameters; say which: own='bias'."
            )
        return None
    names = choose_own(module, own)
    why = refuse_profile(module, loss, input_dimensions, names)
    if steps == "profile" and why is not None:
        raise ValueError(f"own_steps='profile': {why}; say own_steps='joint'.")
    if steps == "auto":
        steps = "profile" if why is None else "joint"
    if steps != "profile":
        return OwnPart(names, steps, l2 if own_l2 is None else own_l2)
    if own_l2 is None:
        own_l2 = 0.0 if loss is squared else OWN_L2
    if own_l2 == 0 and loss is not squared:
        raise ValueError(
            "own_l2 must be above 0: the own bias of a client that lacks a class has no best value "
            f"without a penalty; leave it out for {OWN_L2:g}."
        )
    return OwnPart(names, "profile", own_l2)


def refuse_profile(
    module: nn.Module, loss: SampleLoss, input_dimensions: int, names: Sequence[str]
) -> str | None:
    """Return why there are no profile losses for these own parameters; None if there are."""
    layer = linear_layer(module, input_dimensions)
    if layer is None:
        return "profile losses are for linear models"
    if loss not in OFFSETS:
        known = ", ".join(one.__name__ for one in OFFSETS)
        return f"profile losses are for {known}, not for {getattr(loss, '__name__', 'this loss')}"
    if len(names) > 1 or module.get_parameter(names[0]) is not layer.bias:
        return f"profile losses are for an own bias, not for {', '.join(names)}"
    return None
