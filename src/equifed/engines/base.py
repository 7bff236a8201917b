"""What our engines share: who takes part, the ledger, client vectors as rows of a matrix."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from equifed.contract.arrays import Index, Losses, Weights
from equifed.contract.clients import Clients, MissingClients, Traffic, check_index
from equifed.contract.local import LocalWork
from equifed.contract.names import show_text
from equifed.contract.vectors import ClientVectors
from equifed.data.describe import Table
from equifed.data.federation import Federation
from equifed.engines.own_parts import OwnParts
from equifed.engines.sums import Node, node_values, sum_rows
from equifed.models.curvature import LinearHessian
from equifed.models.flat import FlatModel

MOST_BYTES = 1 << 30
"""Vectors of all clients are put side by side up to this size, whatever else an engine keeps."""


class InProcessVectors(ClientVectors):
    """Client vectors that this process could lay side by side."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return all of them as the rows of one matrix."""

    @abstractmethod
    def nodes(self, nodes: Sequence[Node], weights: Weights, first: int) -> list[Tensor]:
        """Return parts of the weighted sum with others'; see :mod:`equifed.engines.sums`.

        ``weights`` are those of all clients, of whom the ones here begin at ``first``.
        """


@dataclass(frozen=True, eq=False)
class DenseVectors(InProcessVectors):
    """Client vectors as the rows of one matrix."""

    matrix: Tensor

    @property
    @override
    def at_hand(self) -> bool:
        return True

    @override
    def weighted_sum(self, weights: Weights) -> Tensor:
        return sum_rows(weights, self.matrix)

    @override
    def squared_norms(self) -> Losses:
        return to_numpy(self.matrix.square().sum(dim=1))

    @override
    def dense(self) -> Tensor:
        return self.matrix

    @override
    def nodes(self, nodes: Sequence[Node], weights: Weights, first: int) -> list[Tensor]:
        held = len(self.matrix)
        rows = partial(take_rows, self.matrix, first)
        return [value[0] for value in node_values(nodes, weights, rows, held, len(weights))]


def take_rows(matrix: Tensor, first: int, begin: int, end: int) -> list[Tensor]:
    """Return rows of a matrix that begins at place ``first``."""
    return [matrix[begin - first : end - first]]


class TorchClients(OwnParts, Clients):
    """What our engines have in common: who takes part, the ledger, the model as a flat vector.

    Parameters
    ----------
    data : Federation
        The clients' data.
    """

    names: tuple[str, ...] = ()
    index: Index = np.arange(0)
    model: FlatModel

    def __init__(self, data: Federation) -> None:
        self.names, self.index = data.names, np.arange(len(data.names))
        self.traffic = Traffic(len(data.names))
        self._sizes: Index = np.asarray(data.train.sizes, dtype=np.int64)

    @property
    @override
    def sizes(self) -> Index:
        return self._sizes[self.index]

    @override
    def parameters(self, x: Tensor) -> dict[str, Tensor]:
        if self.own is not None:  # whoever has no own part takes the mean of the others
            x = torch.cat([x, self.rows_of_own(x).mean(dim=0)])
        return {n: p.to("cpu").contiguous().clone() for n, p in self.model.state(x).items()}

    @override
    def subset(self, index: Iterable[int] | Index) -> Self:
        part = copy.copy(self)
        part.index = check_index(index, len(self.names))
        return part

    def _repr_html_(self) -> str:
        """Return what a notebook shows: who takes part, and with how many samples."""
        rows = [(show_text(self.names[i]), str(self._sizes[i])) for i in self.index]
        title = f"{len(rows)} clients, {self.model.size:,} parameters each way"
        return Table(title, ("client", "train"), rows)._repr_html_()

    def zeros(self, rows: int) -> Tensor:
        """Return a matrix of zeros as wide as the model."""
        return torch.zeros(rows, self.model.size, dtype=self.model.dtype, device=self.model.device)

    def _book(self, *, down: int, up: int, losses: int = 0) -> None:
        """Book an exchange of model-sized vectors down and up, and of numbers up, per client."""
        vector = self.model.size * self.model.dtype.itemsize
        self.traffic.record(self.index, down=down * vector, up=up * vector + 8 * losses)

    def _book_hessians(self, hessian: LinearHessian, thin: Tensor | None) -> None:
        """Book the model down (and what it is multiplied with), the client's Hessian up."""
        width = self.model.dtype.itemsize
        down = self.model.size + (0 if thin is None else thin.numel())
        self.traffic.record(self.index, down=width * down, up=width * hessian.numbers(thin))

    def _book_local(self, work: LocalWork, corrected: bool) -> None:
        self._book(down=1 + corrected, up=len(work.results), losses=work.hinge is not None)

    def refuse_non_finite(self, values: Losses, what: str) -> None:
        """Raise :class:`MissingClients` for those whose numbers are not finite."""
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            reasons = {int(self.index[k]): f"{what} is {values[k]}" for k in bad}
            raise MissingClients(reasons, self.names)


def check_local_arguments(
    work: LocalWork, control: object | None, target: object | None, slopes: object | None
) -> None:
    """Refuse half a correction, a multiplier without one, or a hinge without slopes."""
    if (control is None) != (target is None):
        raise ValueError("local_steps takes control and target together or neither.")
    if work.multiplier and control is None:
        raise ValueError("The multiplier is c_i - c + proximal (x - u): it needs a control.")
    if work.correction != 1 and control is None:
        raise ValueError(
            f"local.correction = {work.correction} damps a correction of local steps, and this "
            "algorithm has none; leave it at 1, or use SCAFFOLD or SCAFF-PD."
        )
    if (work.hinge is None) != (slopes is None):
        raise ValueError(
            "local_steps takes slopes exactly when the local work has a hinge, as rFedFair's has."
        )


def to_numpy(values: Tensor) -> Losses:
    """Return per-client numbers as float64 on the server."""
    return values.detach().to("cpu", torch.float64).numpy()


def to_tensor(weights: Weights, like: Tensor) -> Tensor:
    """Return per-client numbers in the model's precision where the model is."""
    return torch.as_tensor(weights, dtype=like.dtype, device=like.device)
