"""Own parts of clients whose samples are here: which, how they are found, what they are worth."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from equifed.contract.arrays import Index
from equifed.contract.curvature import Inexactness
from equifed.contract.local import LocalWork, OwnL2, OwnSteps, own_strength
from equifed.data.federation import Federation
from equifed.engines.base import TorchClients
from equifed.engines.own_bias import OFFSETS, Offsets, error_bounds
from equifed.models.curvature import linear_layer
from equifed.models.losses import SampleLoss, squared
from equifed.models.own_part import OwnPart, choose_own, is_last_bias

JOINT = "own parts move by local steps, so the losses are not functions of the shared model alone"
"""Why there are no bounds then."""

OWN_L2 = 1e-3
"""Default penalty of own offsets where a client without some class would let them run away."""

OWN_SAMPLES = "1/n"
"""The same of an own bias of classes in local steps: about as much as one sample of each class.
Few samples of a client move it little (writers of 62 letters), many as far as they want (clients
with other shares of classes)."""


def plain_work(work: LocalWork) -> LocalWork:
    """Return the steps on own parameters that precede alternating work on the shared ones."""
    return LocalWork(work.lr, work.steps, work.epochs, work.batch_size)


class FoundOwnParts(TorchClients):
    """Own parts where this process has the samples."""

    offsets: Offsets | None
    _federation: Federation
    _offsets: Index

    @override
    def rows_of_own(self, x: Tensor) -> Tensor:
        return super().rows_of_own(x) if self.offsets is None else self._solve_own(x)[0]

    @override
    def find_one_class(self) -> list[str]:
        if self._federation.classes is None:
            return []
        targets, offsets = np.asarray(self._federation.train.targets), self._offsets
        spans = zip(self.names, offsets[:-1], offsets[1:], strict=True)
        return [n for n, a, b in spans if b > a and (targets[a:b] == targets[a]).all()]

    @override
    def inexactness(self, x: Tensor) -> Inexactness | str | None:
        if self.own is None:
            return None
        if self.own.steps != "profile":
            return JOINT
        _, losses, gradients = self._solve_own(x)
        return Inexactness(losses.double().cpu().numpy(), gradients.double().cpu().numpy())

    def _solve_own(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return all clients' best own parts (N, p), and bounds on losses' and gradients' errors.

        Zeros for clients without samples, whose data another process has.
        """
        assert self.offsets is not None
        n, here = len(self.names), np.flatnonzero(np.diff(self._offsets))
        own, decrements, squares = x.new_zeros(n, self.model.own_size), *x.new_zeros(2, n)
        everybody = copy.copy(self)
        everybody.index = here
        for places, v, decrement, square in everybody.best_own(x):
            rows = torch.as_tensor(here[places], device=x.device)
            own[rows], decrements[rows], squares[rows] = v, decrement, square
        return own, *error_bounds(decrements, self.offsets, squares, self.model.loss)

    def best_own(self, x: Tensor) -> Iterator[tuple[slice | Index, Tensor, Tensor, Tensor]]:
        """Yield places of clients, their best own parts, squared decrements, and mean |a|^2."""
        raise NotImplementedError

    def repeat_own(self, start: nn.Module | Mapping[str, Tensor]) -> Tensor:
        """Return the own parts that a module begins with, a row for every client."""
        held: Mapping[str, Tensor] = (
            dict(start.named_parameters(remove_duplicate=False))
            if isinstance(start, nn.Module)
            else start
        )
        like = torch.zeros(0, dtype=self.model.dtype, device=self.model.device)
        parts = [torch.as_tensor(held[name]).detach().to(like) for name in self.model.own_shapes]
        row = torch.cat([like, *(part.reshape(-1) for part in parts)])
        return row.repeat(len(self.names), 1)

    def refuse_minibatches(self, batch_size: int | None) -> None:
        """Refuse minibatches where the best own part for all samples is meant."""
        if batch_size is not None and self.own is not None and self.own.steps == "profile":
            raise ValueError(
                f"batch_size={batch_size}: own_steps='profile' needs all samples, got minibatches; "
                "leave batch_size out, or say own_steps='joint'."
            )


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
                "own_steps and own_l2 are about own parameters; say which: own='bias'."
            )
        return None
    names = choose_own(module, own)
    why = refuse_profile(module, loss, input_dimensions, names)
    if steps == "profile" and why is not None:
        raise ValueError(f"own_steps='profile': {why}; say own_steps='joint'.")
    if steps == "profile" or (steps == "auto" and why is None):
        return OwnPart(names, "profile", _profile_l2(own_l2, loss))
    bias = loss is not squared and is_last_bias(module, names)
    usual = OWN_SAMPLES if bias else l2
    return OwnPart(
        names, "joint" if steps == "auto" else steps, usual if own_l2 is None else own_l2
    )


def _profile_l2(own_l2: OwnL2 | None, loss: SampleLoss) -> float:
    """Return the penalty of own offsets in profile losses."""
    if own_l2 is None:
        return 0.0 if loss is squared else OWN_L2
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
    return own_l2


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
