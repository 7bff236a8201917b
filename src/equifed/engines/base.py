"""What our engines share: who takes part, the ledger, the model, and own parts."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from equifed.contract import ClientVectors, Index, LocalSGD, LocalWork, Losses, Stream, Weights
from equifed.contract.clients import Clients, Moved, Traffic, check_index
from equifed.contract.curvature import Curvature, CurvatureSum, Form
from equifed.data.federation import Federation
from equifed.engines.ordered_sums import dense_rows, to_numpy
from equifed.engines.own import JOINT
from equifed.models.curvature import LinearHessian, check_sum_weights, refuse_bounds
from equifed.models.flat import FlatModel
from equifed.models.own_part import OwnPart

MOST_BYTES = 1 << 30
"""Vectors of all clients are put side by side up to this size, whatever else an engine keeps."""


@dataclass(eq=False)
class OwnRows:
    """Own parts of all clients, one row each: where a round starts, and where steps ended."""

    start: Tensor
    after: Tensor | None = None

    def put(self, index: Index, rows: Tensor) -> None:
        """Remember where the own parts of clients ``index`` ended; the others stay."""
        self.after = self.start.index_copy(0, torch.as_tensor(index, device=rows.device), rows)


class TorchClients(Clients):
    """What our engines share: who takes part, the ledger, the model as a flat vector."""

    names: tuple[str, ...] = ()
    index: Index = np.arange(0)
    model: FlatModel
    own: OwnPart | None = None
    own_rows: OwnRows
    coarse: str | None = None
    """Why second derivatives say nothing of the gradients here."""

    def __init__(self, data: Federation) -> None:
        self.names, self.index = data.names, np.arange(len(data.names))
        self.traffic = Traffic(len(data.names))
        self._curvature: list[Curvature | str] = []  # subsets share it once it is known
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

    def zeros(self, rows: int) -> Tensor:
        """Return a matrix of zeros as wide as the model."""
        return torch.zeros(rows, self.model.size, dtype=self.model.dtype, device=self.model.device)

    @override
    def inner_products(
        self, vectors: ClientVectors, multiply: Callable[[Tensor], Tensor]
    ) -> Losses | str:
        if len(self.index) * self.model.size * self.model.dtype.itemsize > MOST_BYTES:
            return "the clients' vectors do not fit into memory at once"
        return products_of_rows(dense_rows(vectors.collect()), multiply)

    # -- second derivatives -----------------------------------------------------------------------

    @override
    def curvature(self) -> Curvature | str:
        if self.remembers_own():
            return JOINT
        if (why := self.coarse or refuse_bounds(self.model)) is not None:  # hooks may come later
            return why
        if not self._curvature:
            self._curvature.append(self.find_curvature())
        return self._curvature[0]

    @override
    def curvature_sum(
        self, x: Tensor, weights: Weights, form: Form = "blocks", thin: Tensor | None = None
    ) -> CurvatureSum | str:
        hessian = LinearHessian.of(self.model, form, thin, not self.remembers_own())
        if self.coarse is not None or isinstance(hessian, str):
            return self.coarse or str(hessian)
        check_sum_weights(weights, len(self.index))
        total, width = self.add_hessians(hessian, x, weights, thin), self.model.dtype.itemsize
        # Down goes the model, and what its Hessian is multiplied with.
        down = self.model.size + (0 if thin is None else thin.numel())
        self.traffic.record(self.index, down=width * down, up=width * hessian.numbers(thin))
        return hessian.answer(total, weights, thin)

    @abstractmethod
    def find_curvature(self) -> Curvature | str:
        """Return bounds on the curvature of a model that has some."""

    @abstractmethod
    def add_hessians(
        self, hessian: LinearHessian, x: Tensor, weights: Weights, thin: Tensor | None
    ) -> Tensor:
        """Return the weighted sum of the clients' Hessians, penalty apart."""

    # -- the verbs, and what they cost ------------------------------------------------------------

    @override
    def losses(self, x: Tensor, stream: Stream, batch_size: int | None = None) -> Losses:
        self.refuse_minibatches(batch_size)
        self._book(down=1, up=0, losses=1)
        return self.require_finite(to_numpy(self.measure_losses(x, stream, batch_size)), "loss")

    @override
    def value_and_gradient(
        self, x: Tensor, stream: Stream, batch_size: int | None = None
    ) -> tuple[Losses, ClientVectors]:
        self.refuse_minibatches(batch_size)
        self._book(down=1, up=1, losses=1)
        return self.differentiate(x, stream, batch_size)

    @override
    def local_steps(
        self, x: Tensor, local: LocalSGD, stream: Stream, *, control: ClientVectors | None = None,
        target: Tensor | None = None, slopes: Weights | None = None,
    ) -> Moved:  # fmt: skip
        work = local.work()
        self.refuse_minibatches(work.batch_size)
        work.check(control, target, slopes)
        hinge = work.hinge is not None
        self._book(down=1 + (control is not None), up=len(work.results), losses=hinge)
        vectors, thresholds = self.move(x, work, stream, control, target, slopes)
        thresholds = thresholds if hinge else None
        return Moved(steps=work.steps_for(self.sizes), thresholds=thresholds, **vectors)

    @abstractmethod
    def measure_losses(self, x: Tensor, stream: Stream, batch_size: int | None) -> Tensor:
        """Return the loss of every client."""

    @abstractmethod
    def differentiate(
        self, x: Tensor, stream: Stream, batch_size: int | None
    ) -> tuple[Losses, ClientVectors]:
        """Return losses and gradients, all finite."""

    @abstractmethod
    def move(
        self, x: Tensor, work: LocalWork, stream: Stream, control: ClientVectors | None,
        target: Tensor | None, slopes: Weights | None,
    ) -> tuple[Mapping[str, ClientVectors], Losses | None]:  # fmt: skip
        """Return the vectors of checked local work, and the thresholds of a hinge."""

    def _book(self, *, down: int, up: int, losses: int) -> None:
        """Book an exchange of model-sized vectors down and up, and of numbers up, per client."""
        vector = self.model.size * self.model.dtype.itemsize
        self.traffic.record(self.index, down=down * vector, up=up * vector + 8 * losses)

    # -- own parts --------------------------------------------------------------------------------

    @override
    def describe_own(self) -> str | None:
        return None if self.own is None else f"{self.own}; {self.model.own_size} numbers per client"

    @override
    def warn_of_own(self) -> str | None:
        alone = [] if self.own is None else self.find_one_class()
        if self.own is None or not alone:
            return None
        more = f" and {len(alone) - 5} more" if len(alone) > 5 else ""
        return (
            f"{len(alone)} client(s) have samples of one class only ({', '.join(alone[:5])}{more}):"
            f" only the penalty determines their own part ({self.own.penalty})"
        )

    @abstractmethod
    def find_one_class(self) -> list[str]:
        """Return the names of clients whose training samples are of one class."""

    @override
    def remembers_own(self) -> bool:
        return self.own is not None and self.own.steps != "profile"

    @override
    def needs_all_samples(self) -> bool:
        return self.own is not None and self.own.steps == "profile"

    def refuse_minibatches(self, batch_size: int | None) -> None:
        """Refuse minibatches where the best own part for all samples is meant."""
        if batch_size is not None and self.needs_all_samples():
            raise ValueError(
                f"batch_size={batch_size}: own_steps='profile' needs all samples, got minibatches; "
                "omit batch_size, or use own_steps='joint'."
            )

    @override
    def with_own(self, own: Tensor) -> Self:
        part = copy.copy(self)
        part.own_rows = OwnRows(own)
        return part

    @override
    def own_after(self) -> Tensor:
        rows = self.own_rows
        return rows.start if rows.after is None else rows.after

    @override
    def own_parts(self, x: Tensor) -> Tensor | None:
        return None if self.own is None else self.rows_of_own(x)

    def rows_of_own(self, x: Tensor) -> Tensor:
        """Return every client's own part at x, a row each."""
        return self.own_rows.start

    @override
    def own_parameters(self, own: Tensor) -> dict[str, Tensor]:
        shapes = self.model.own_shapes
        parts = torch.split(own.to("cpu"), [s.numel() for s in shapes.values()], dim=1)
        pairs = zip(shapes.items(), parts, strict=True)
        return {n: part.reshape(-1, *shape).clone() for (n, shape), part in pairs}


def products_of_rows(rows: Tensor, multiply: Callable[[Tensor], Tensor]) -> Losses:
    """Return <v_i, P^-1 v_j> for the rows of a matrix, symmetric to the last bit."""
    products = multiply(rows)
    return to_numpy((products + products.T) / 2)


def describe_samples(data: Federation) -> dict[str, Any]:
    """Return what must be known of samples to build a model again without them."""
    layout = data.layout
    return {
        **({} if layout is None else {"layout": layout.to_json()}),
        "input_shape": list(data.input_shape),
        "tokens": data.train.inputs.dtype.kind == "i",
        "classes": data.classes,
        "class_names": list(data.class_names),
        "target_shape": list(data.train.targets.shape[1:]),
    }


def describe_data(data: Federation) -> dict[str, Any]:
    """Return which data they are."""
    told = {"name": data.name, "sha256": data.checksum(), "source": data.source}
    return told if data.preparation is None else told | {"preparation": data.preparation.digest()}
