"""Second derivatives of clients whose samples this process holds: bounds, and weighted sums."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from equifed.contract.arrays import Index, Weights
from equifed.contract.curvature import Curvature, CurvatureSum, Form
from equifed.engines.base import TorchClients
from equifed.engines.own_parts import JOINT, FoundOwnParts
from equifed.engines.sums import Node, leaf_nodes, sum_leaves
from equifed.models.curvature import (
    PIECE,
    LinearHessian,
    check_sum_weights,
    known_curvature,
    linear_hessian,
    refuse_bounds,
)


class SecondDerivatives(FoundOwnParts, TorchClients):
    """What clients answer about curvature, from all samples in two tensors, client after client."""

    _inputs: Tensor
    _targets: Tensor
    _groups: Index
    """Of clients whose Hessians are summed together."""
    _curvature: list[Curvature | str]
    """Empty until it is known; subsets share it, since eigenvalues are worth keeping."""

    def inputs_of(self, client: int) -> Tensor:
        """Return the training inputs of a client of the federation."""
        return self._inputs[self._offsets[client] : self._offsets[client + 1]]

    @override
    def curvature(self) -> Curvature | str:
        if self.remembers_own():
            return JOINT
        if (why := refuse_bounds(self.model)) is not None:  # hooks may come later
            return why
        if not self._curvature:
            self._curvature.append(known_curvature(self.model, len(self.names), self.inputs_of))
        return self._curvature[0]

    @override
    def hessian(self, x: Tensor, weights: Weights) -> Tensor | str:
        if self.offsets is not None:
            summed = self.curvature_sum(x, weights, "full")
            return summed if isinstance(summed, str) else summed.dense(self.model.size).to(x.dtype)
        rows = np.concatenate([np.arange(*self._offsets[i : i + 2]) for i in self.index])
        shares = torch.as_tensor(np.repeat(weights / self.sizes, self.sizes), dtype=x.dtype)
        held = self._inputs[rows].to(x.device), self._targets[rows], shares.to(x.device)
        found = linear_hessian(self.model, x, *held)
        if isinstance(found, str):
            return found
        self._book(down=1, up=self.model.size)
        ridge = self.model.l2 * float(weights.sum()) * self.model.pull(torch.ones_like(x))
        return found + torch.diag(ridge)

    @override
    def curvature_sum(
        self, x: Tensor, weights: Weights, form: Form = "blocks", thin: Tensor | None = None
    ) -> CurvatureSum | str:
        hessian = LinearHessian.of(self.model, form, thin, not self.remembers_own())
        if isinstance(hessian, str):
            return hessian
        check_sum_weights(weights, len(self.index))
        groups = int(self._groups[-1]) + 1
        (total,) = self.sum_hessians(hessian, x, weights, thin, leaf_nodes(0, groups, groups))
        self._book_hessians(hessian, thin)
        return hessian.answer(total, weights, thin)

    def sum_hessians(
        self,
        hessian: LinearHessian,
        x: Tensor,
        weights: Weights,
        thin: Tensor | None,
        nodes: Sequence[Node],
    ) -> list[Tensor]:
        """Return parts of the weighted sum of the clients' Hessians without the penalty.

        Each sample counts its client's weight; a few samples at a time bound the memory. The parts
        are nodes of a tree over groups of clients, so that the order of the sum is always the same.
        """
        share = np.zeros(len(self.names))
        share[self.index] = weights
        step = max(1, PIECE // max(1, self._inputs[0].numel() * self._inputs.element_size()))
        own = self.own_parts(x)

        def add_samples(total: Tensor, here: Index) -> None:
            sizes = self._sizes[here]
            rows = np.repeat(self._offsets[here] - np.cumsum(sizes) + sizes, sizes)
            rows += np.arange(len(rows))  # all samples of these clients
            counts = np.repeat(share[here] / sizes, sizes)
            for start in range(0, len(rows), step):
                some = torch.as_tensor(rows[start : start + step], device=self._inputs.device)
                count = torch.as_tensor(counts[start : start + step]).to(x)
                hessian.add(total, x, self._inputs[some], count, thin)

        def add_profiles(total: Tensor, here: Index, own: Tensor) -> None:
            for i in here:
                first, last = int(self._offsets[i]), int(self._offsets[i + 1])
                ends = [*range(first, last, step), last]
                pieces = [self._inputs[a:b] for a, b in itertools.pairwise(ends)]
                with_own = torch.cat([x, own[i]])
                hessian.add_profile(total, with_own, pieces, share[i], last - first, thin)

        def sum_group(group: int) -> Tensor:
            total = hessian.zeros(thin)
            here = np.flatnonzero((self._groups == group) & (share > 0))
            if own is None:
                add_samples(total, here)
            else:
                add_profiles(total, here, own)
            return total

        groups = int(self._groups[-1]) + 1
        totals = [sum_leaves(node, sum_group, groups) for node in nodes]
        if not all(bool(torch.isfinite(total).all()) for total in totals):
            self._refuse_curvature(hessian, x)
        return totals

    def divide_as(self, sizes: Index, groups: Index) -> None:
        """Divide the work as a federation of these sizes does, of which this is a part."""
        self._groups = groups

    def _refuse_curvature(self, hessian: LinearHessian, x: Tensor) -> None:
        """Name those whose Hessian is not finite."""
        sizes = np.zeros(len(self.index))
        plain, own = dataclasses.replace(hessian, form="diagonal"), self.own_parts(x)
        for k, i in enumerate(self.index):
            found, inputs = plain.zeros(), self.inputs_of(int(i))
            with_own = x if own is None else torch.cat([x, own[i]])
            plain.add(found, with_own, inputs, x.new_full((len(inputs),), 1 / len(inputs)))
            sizes[k] = float(found.sum())
        self.refuse_non_finite(sizes, "trace of its curvature")
