r"""Own parts of clients: how they are found, and the best own bias for many clients at once.

Profile losses are those of the best own offset of the outputs,

.. math:: F_i(u) = \min_v f_i(u, v), \qquad \nabla F_i(u) = \partial_u f_i(u, v_i^\star(u))

(envelope theorem) for linear models whose bias is the clients' own. With the outputs z of the
shared part at hand, the inner problem has as many unknowns as there are outputs. It is solved by
Newton steps from a start that depends on z alone, so that the same model gives the same bits. They
are damped as suits losses whose third derivatives are bounded by R times their second ones (Bach
2010): a step p is taken log(1 + R|p|) / (R|p|) of its length, which never overshoots and tends to
the whole step. For the softmax R|p| may be the range of p: a third central moment is at most the
range times the variance.

What is left is known. With :math:`\nu^2 = g^\top H^{-1} g` at v (the Newton decrement) and
:math:`R\nu \le \sqrt{m}/2`, H being at least m: :math:`|v - v^\star|_H \le 2\nu`, so

.. math:: 0 \le f_i(u, v) - F_i(u) \le 2 \nu^2, \qquad
          |\partial_u f_i(u, v) - \nabla F_i(u)| \le 2 \sqrt{L}\, \nu

with :math:`L \ge \partial_{uu} f_i` without its penalty: in a positive semidefinite Hessian
:math:`|H_{uv} p|^2 \le L\, p^\top H_{vv} p`, and H changes by a factor of at most two on the way.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from equifed.contract.local import LocalWork, OwnL2, OwnSteps, own_strength
from equifed.models.curvature import linear_layer
from equifed.models.losses import DERIVATIVES, Derivatives, SampleLoss, squared
from equifed.models.own_part import OwnPart, choose_own, is_last_bias

JOINT = "own parts move by local steps, so the losses are not functions of the shared model alone"
"""Why there are no bounds then."""

OWN_L2 = 1e-3
"""Default penalty of own offsets where a client without some class would let them run away."""

OWN_SAMPLES = "1/n"
"""The same of an own bias of classes in local steps: about as much as one sample of each class.
Few samples of a client move it little (writers of 62 letters), many as far as they want (clients
with other shares of classes)."""

MOST_NEWTON = 200
"""Newton steps at most: some five are usual, a hundred where outputs differ by hundreds."""

SCALINGS = 3
"""Iterative scalings at the start: each costs a fraction of the Newton step that it saves."""

LEAST = 1e-3
"""Mean chances below this part of the penalty are taken for it, so that no start is infinite."""


def as_rows(outputs: Tensor) -> Tensor:
    """Return outputs (c, k, b) with a row for each sample, (c b, k), as losses take them."""
    return outputs.transpose(1, 2).flatten(0, 1)


def cross_entropy_slope(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted derivative of the cross-entropy: softmax minus one at the class."""
    weights = weights.unsqueeze(1)
    slope = torch.softmax(outputs, dim=1).mul_(weights)
    return slope.scatter_add_(1, targets.unsqueeze(1), -weights)


class Offsets(ABC):
    """A loss as a function of one offset per output (c, k); outputs are (c, k, b).

    Sums are of a *base*, made once for offsets near some; steps change how far ``away`` they are.
    """

    known: ClassVar[Derivatives]
    turn: float
    """R: how fast second derivatives can change."""
    l2: float
    reach: float = math.inf
    """How far away of its offsets a base serves."""

    def wanted(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Return what the mean outcome (c, k) should be: shares of classes, means of targets."""
        return torch.bmm(self.known.wanted(outputs, targets), weights.unsqueeze(2)).squeeze(2)

    def base(self, outputs: Tensor, near: Tensor) -> Tensor:
        """Return the base (c, k, b) for offsets near these."""
        return outputs + near.unsqueeze(2)

    def start(self, base: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
        """Return offsets (c, k) to start from; the base is that of zero."""
        return torch.zeros_like(wanted)

    @abstractmethod
    def derivatives(
        self, base: Tensor, away: Tensor, wanted: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return first (c, k) and second (c, k, k) derivatives by the offsets, penalty apart."""

    def slopes(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted derivatives (c, k, b) by the outputs."""
        return self.known.first(outputs, targets) * weights.unsqueeze(1)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return sample losses (c, b)."""
        each: Tensor = self.known.loss(as_rows(outputs), targets.flatten(0, 1))
        return each.view(len(outputs), -1)

    def losses_and_slopes(
        self, outputs: Tensor, targets: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return sample losses (c, b) and :meth:`slopes`."""
        return self.losses(outputs, targets), self.slopes(outputs, targets, weights)

    def project(self, v: Tensor) -> Tensor:
        """Return offsets without what has no effect."""
        return v

    def length(self, step: Tensor) -> Tensor:
        """Return R|p| (c, 1) of steps p (c, k)."""
        length: Tensor = torch.linalg.vector_norm(step, dim=1, keepdim=True)
        return length.mul_(self.turn)

    def solve(
        self, outputs: Tensor, wanted: Tensor, weights: Tensor, start: Tensor | None = None
    ) -> Tensor:
        """Return the best offsets (c, k); a client's steps do not depend on the others'."""
        near, eps = torch.zeros_like(wanted), torch.finfo(wanted.dtype).eps
        base = self.base(outputs, near)
        v = here = self.start(base, wanted, weights) if start is None else start
        rows = torch.arange(len(v), device=v.device)  # of those who are not done
        for _ in range(MOST_NEWTON if self.turn else 1):
            if self.reach < math.inf and float((here - near).abs().max()) > self.reach:
                far = (here - near).abs().amax(1, keepdim=True) > self.reach
                near = torch.where(far, here, near)
                base = self.base(outputs, near)
            step, decrement = self._newton(here, base, here - near, wanted, weights)
            length = self.length(step)
            part = torch.where(length > 1, torch.log1p(length) / length, 1.0)
            here = torch.addcmul(here, step, part, value=-1)
            v = v.index_copy(0, rows, here)
            on = torch.nonzero(decrement > eps).squeeze(1)  # if not, this step doubled the digits
            if len(on) == 0:
                break
            if len(on) < len(rows):
                kept = (values[on] for values in (rows, here, near, base, outputs, wanted, weights))
                rows, here, near, base, outputs, wanted, weights = kept
        return self.project(v)

    def newton(
        self, v: Tensor, outputs: Tensor, wanted: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return Newton's step (c, k) at offsets v, and the decrement's square (c,)."""
        return self._newton(v, self.base(outputs, v), torch.zeros_like(v), wanted, weights)

    def _newton(
        self, v: Tensor, base: Tensor, away: Tensor, wanted: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        first, second = self.derivatives(base, away, wanted, weights)
        gradient = first.add_(v, alpha=self.l2)  # sums to zero where equal offsets do nothing
        if second.shape[-1] == 1:
            step = gradient / (second[:, 0] + self.l2)
        else:
            second.diagonal(dim1=1, dim2=2).add_(self.l2)
            root = torch.linalg.cholesky_ex(second).L
            step = torch.cholesky_solve(gradient.unsqueeze(2), root).squeeze(2)
        return step, torch.linalg.vecdot(gradient, step)


@dataclass(frozen=True)
class SquaredOffsets(Offsets):
    """Of the squared loss, in one step."""

    known = DERIVATIVES["squared"]
    l2: float
    turn: float = 0.0

    @override
    def derivatives(
        self, base: Tensor, away: Tensor, wanted: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        total = weights.sum(dim=1, keepdim=True).expand_as(away)
        mean = torch.bmm(base, weights.unsqueeze(2)).squeeze(2) + away * total
        return 2 * (mean - wanted), torch.diag_embed(2 * total)


@dataclass(frozen=True)
class LogisticOffsets(Offsets):
    """Of the logistic loss of one output."""

    known = DERIVATIVES["binary_logistic"]
    l2: float
    turn: float = 1.0

    @override
    def start(self, base: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
        """Return the difference of log-odds: those of the labels minus those of the outputs."""
        given = (torch.sigmoid(base[:, 0]) * weights).sum(dim=1, keepdim=True)
        return _log_odds(wanted, self.l2) - _log_odds(given, self.l2)

    @override
    def derivatives(
        self, base: Tensor, away: Tensor, wanted: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        chance = torch.sigmoid(base + away.unsqueeze(2))
        weighted = chance * weights.unsqueeze(1)
        return weighted.sum(dim=2) - wanted, (weighted * (1 - chance)).sum(dim=2, keepdim=True)


@dataclass(frozen=True)
class SoftmaxOffsets(Offsets):
    """Of the cross-entropy; equal offsets of all classes have no effect: they sum to zero."""

    known = DERIVATIVES["cross_entropy"]
    l2: float
    turn: float = math.sqrt(2)
    reach: float = 20.0
    """Chances down to exp(-47) are still counted then in float32."""

    @override
    def wanted(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return outputs.new_zeros(outputs.shape[:2]).scatter_add_(1, targets, weights)

    @override
    def base(self, outputs: Tensor, near: Tensor) -> Tensor:
        """Return exponentials: chances at offsets ``away`` are base exp(away), divided by sums."""
        shifted = outputs + near.unsqueeze(2)
        return shifted.sub_(shifted.amax(dim=1, keepdim=True)).exp_()

    @override
    def start(self, base: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
        """Return what iterative scalings give: each mean chance becomes its share minus l2 v."""
        v = torch.zeros_like(wanted)
        for _ in range(SCALINGS):
            e = torch.exp(v)
            counted = weights.unsqueeze(1) / torch.bmm(e.unsqueeze(1), base)
            mean = torch.bmm(counted, base.transpose(1, 2)).squeeze(1).mul_(e)
            share = torch.sub(wanted, v, alpha=self.l2).clamp_(min=self.l2)
            v = self.project(share.div_(mean.add_(LEAST * self.l2)).log_().add_(v))
        return v

    @override
    def derivatives(
        self, base: Tensor, away: Tensor, wanted: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        e = torch.exp(away)
        counted = weights.unsqueeze(1) / torch.bmm(e.unsqueeze(1), base).square_()
        products = torch.bmm(base * counted, base.transpose(1, 2))
        products.mul_(e.unsqueeze(1)).mul_(e.unsqueeze(2))
        mean = products.sum(dim=2)  # chances sum to one
        # The last term is where nothing changes: offsets that sum to zero do not see it.
        second = torch.rsub(products, 1 / base.shape[1])
        second.diagonal(dim1=1, dim2=2).add_(mean)
        return mean - wanted, second

    @override
    def slopes(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return cross_entropy_slope(outputs, targets, weights)

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

    @override
    def length(self, step: Tensor) -> Tensor:
        least, most = torch.aminmax(step, dim=1, keepdim=True)
        return most - least


OFFSETS: dict[SampleLoss, type[SquaredOffsets | LogisticOffsets | SoftmaxOffsets]] = {
    one.known.loss: one for one in (SquaredOffsets, LogisticOffsets, SoftmaxOffsets)
}


def choose_offsets(own: OwnPart | None, loss: SampleLoss) -> Offsets | None:
    """Return the offsets of profile losses; None if the clients have no such losses."""
    return None if own is None or own.steps != "profile" else OFFSETS[loss](own.strength(1))


def _log_odds(share: Tensor, least: float) -> Tensor:
    return torch.log(share + least) - torch.log1p(least - share)


def error_bounds(decrement: Tensor, offsets: Offsets, mean_square: Tensor) -> tuple[Tensor, Tensor]:
    """Return bounds on losses' and gradients' errors, from decrements^2 and the means of |a|^2."""
    steepest, decrement = offsets.known.steepest, decrement.clamp(min=0)
    least = 2.0 if offsets.turn == 0 else offsets.l2
    near = offsets.turn * decrement.sqrt() <= 0.5 * math.sqrt(least)
    far = torch.full_like(decrement, math.inf)
    losses = torch.where(near, 2 * decrement, far)
    return losses, torch.where(near, 2 * (steepest * mean_square * decrement).sqrt(), far)


def plain_work(work: LocalWork) -> LocalWork:
    """Return the steps on own parameters that precede alternating work on the shared ones."""
    return LocalWork(work.lr, work.steps, work.epochs, work.batch_size)


def settle_own(
    module: nn.Module, loss: SampleLoss, input_dimensions: int, own: str | Sequence[str] | None,
    steps: OwnSteps, own_l2: OwnL2 | None, l2: float,
) -> OwnPart | None:  # fmt: skip
    """Return what clients keep and how it is found, or None if they keep nothing."""
    if steps not in ("auto", "profile", "joint", "alternating"):
        raise ValueError(f"own_steps must be auto, profile, joint or alternating, got {steps!r}.")
    if own_l2 is not None:
        own_strength(own_l2)  # refuses what is none
    if own is None:
        if steps != "auto" or own_l2 is not None:
            raise ValueError(
                "own_steps and own_l2 need own parameters; choose them, for example own='bias'."
            )
        return None
    names = choose_own(module, own)
    why = refuse_profile(module, loss, input_dimensions, names)
    if steps == "profile" and why is not None:
        raise ValueError(f"own_steps='profile': {why}; use own_steps='joint'.")
    if steps in ("auto", "profile") and why is None:
        _check_profile_l2(own_l2, loss)
        usual: OwnL2 = 0.0 if loss is squared else OWN_L2
        steps = "profile"
    else:
        usual = OWN_SAMPLES if loss is not squared and is_last_bias(module, names) else l2
        steps = "joint" if steps == "auto" else steps
    return OwnPart(names, steps, usual if own_l2 is None else own_l2)


def _check_profile_l2(own_l2: OwnL2 | None, loss: SampleLoss) -> None:
    if isinstance(own_l2, str):
        raise ValueError(
            f"own_l2 = {own_l2!r} is for local steps; profile losses take a number, {OWN_L2:g} if "
            "it is left out."
        )
    if own_l2 == 0 and loss is not squared:
        raise ValueError(
            "own_l2 must be above 0: the own bias of a client that lacks a class has no best value "
            f"without a penalty; leave it out for {OWN_L2:g}."
        )


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
