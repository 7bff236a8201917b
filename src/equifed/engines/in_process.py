"""What engines share that hold all data in one process: subsets, the ledger, dense vectors."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from equifed.contract.arrays import Index, Losses, Weights
from equifed.contract.clients import ClientVectors, MissingClients, Traffic, check_index
from equifed.contract.curvature import Curvature
from equifed.contract.evaluation import SPLITS, Evaluation
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.engines.evaluator import FederationEvaluator
from equifed.models.architectures import build, initialise
from equifed.models.curvature import known_curvature
from equifed.models.flat import FlatModel, SampleLoss, as_data
from equifed.models.losses import loss_by_name, outputs_for

if TYPE_CHECKING:
    from equifed.data.federation import Federation


@runtime_checkable
class InProcessVectors(ClientVectors, Protocol):
    """Client vectors that this process could lay side by side."""

    def dense(self) -> Tensor:
        """Return all of them as the rows of one matrix."""
        ...


class DenseVectors:
    """Client vectors as the rows of one matrix."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix

    def weighted_sum(self, weights: Weights) -> Tensor:
        """Return sum_i weights_i v_i."""
        return to_tensor(weights, self.matrix) @ self.matrix

    def squared_norms(self) -> Losses:
        """Return |v_i|^2 for every client."""
        return to_numpy(self.matrix.square().sum(dim=1))

    def dense(self) -> Tensor:
        """Return the matrix."""
        return self.matrix


class InProcessClients:
    """Clients whose data this process holds; what ``loop`` and ``stacked`` have in common.

    Parameters
    ----------
    data : Federation
        The clients' data; training uses its ``train`` split.
    model : torch.nn.Module or str
        The model's architecture, or its name in :data:`equifed.models.architectures.MODELS`.
    loss : callable or str
        Per-sample loss of (outputs, targets), or its name in :data:`equifed.models.losses.LOSSES`;
        ``"auto"`` is cross-entropy for classes and squared for numbers.
    l2 : float
        Strength of the penalty ``l2 / 2 |x|^2`` in every client's loss.
    dtype : torch.dtype
        Precision of the model and of real-valued data.
    device : str or torch.device
        Where to compute.
    """

    def __init__(
        self,
        data: Federation,
        model: nn.Module | str,
        loss: SampleLoss | str = "auto",
        *,
        l2: float = 0.0,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        module, loss = named_model(data, model, loss)
        split = data.train
        self.federation = data
        self.names = data.names
        self.index: Index = np.arange(len(data.names))
        self.traffic = Traffic(len(data.names))
        self._template = module
        self._curvature: list[Curvature | str] = []
        self._evaluators: dict[tuple[str, ...], FederationEvaluator] = {}
        self._inputs = self._placed(as_data(split.inputs, dtype, "cpu"), torch.device(device))
        self._targets = as_data(split.targets, dtype, self._inputs.device)
        self._offsets = np.asarray(split.offsets, dtype=np.int64)
        self.model = FlatModel(module, loss, self._inputs[:2], l2=l2, dtype=dtype, device=device)

    @property
    def sizes(self) -> Index:
        """Training samples of the clients that take part."""
        return self._offsets[self.index + 1] - self._offsets[self.index]

    def inputs_of(self, client: int) -> Tensor:
        """Return the training inputs of a client of the federation."""
        return self._inputs[self._offsets[client] : self._offsets[client + 1]]

    def curvature(self) -> Curvature | str:
        """Return bounds on the curvature of the clients' losses, or why none are known."""
        if not self._curvature:  # a list that subsets share: eigenvalues are worth keeping
            self._curvature.append(known_curvature(self.model, len(self.names), self.inputs_of))
        return self._curvature[0]

    def initial(self, stream: Stream) -> Tensor:
        """Return a freshly initialised model."""
        fresh = copy.deepcopy(self._template)
        initialise(fresh, stream)
        return self.model.flatten(fresh)

    def evaluate(self, x: Tensor, splits: Sequence[str] = SPLITS) -> list[Evaluation]:
        """Return what the model is worth to all clients of the federation, split by split."""
        wanted = tuple(splits)
        if wanted not in self._evaluators:
            self._evaluators[wanted] = FederationEvaluator(self.federation, self.model, wanted)
        return self._evaluators[wanted](x)

    def parameters(self, x: Tensor) -> dict[str, Tensor]:
        """Return the model's parameters by name and in their shapes."""
        return {n: p.to("cpu").contiguous().clone() for n, p in self.model.unflatten(x).items()}

    def subset(self, index: Iterable[int] | Index) -> Self:
        """Return the same engine restricted to clients ``index`` (positions in ``names``)."""
        part = copy.copy(self)
        part.index = check_index(index, len(self.names))
        return part

    def remembered(self, vectors: ClientVectors | None, index: Index) -> ClientVectors:
        """Return what clients ``index`` keep of ``vectors``; zeros if it is None."""
        if vectors is None:
            return DenseVectors(self._zeros(len(index)))
        assert isinstance(vectors, DenseVectors)
        return DenseVectors(vectors.matrix[torch.as_tensor(index, device=self.model.device)])

    def remember(
        self, memory: ClientVectors | None, index: Index, vectors: ClientVectors
    ) -> ClientVectors:
        """Return the memory of all clients after those in ``index`` replaced their vector."""
        assert memory is None or isinstance(memory, DenseVectors)
        assert isinstance(vectors, InProcessVectors)
        matrix = self._zeros(len(self.names)) if memory is None else memory.matrix.clone()
        matrix[torch.as_tensor(index, device=matrix.device)] = vectors.dense()
        return DenseVectors(matrix)

    def _placed(self, inputs: Tensor, device: torch.device) -> Tensor:
        """Return the samples where they will stay."""
        return inputs.to(device)

    def _zeros(self, rows: int) -> Tensor:
        return torch.zeros(rows, self.model.size, dtype=self.model.dtype, device=self.model.device)

    def _book(self, *, down: int, up: int, losses: int = 0) -> None:
        """Book an exchange of model-sized vectors down and up, and of numbers up, per client."""
        vector = self.model.size * self.model.dtype.itemsize
        self.traffic.record(self.index, down=down * vector, up=up * vector + 8 * losses)

    def _book_local(self, work: LocalSGD, corrected: bool) -> None:
        extra = (work.snapshot is not None) + work.average + work.mean_gradient
        self._book(down=1 + corrected, up=1 + extra, losses=work.hinge is not None)

    def _refuse_non_finite(self, values: Losses, what: str) -> None:
        """Raise :class:`MissingClients` for those whose numbers are not finite."""
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            reasons = {int(self.index[k]): f"{what} is {values[k]}" for k in bad}
            raise MissingClients(reasons, self.names)


def named_model(
    federation: Federation, module: nn.Module | str, loss: SampleLoss | str
) -> tuple[nn.Module, SampleLoss]:
    """Return module and loss, looked up and built for this data where they are names."""
    if loss == "auto":
        loss = "cross_entropy" if federation.classes is not None else "squared"
    if isinstance(module, str):
        if not isinstance(loss, str):
            raise ValueError(f"The model {module!r} is a name, so the loss must be one too.")
        module = build(module, federation.input_shape, outputs_for(federation, loss))
    return module, loss_by_name(loss) if isinstance(loss, str) else loss


def check_local_arguments(
    work: LocalSGD, control: object | None, target: object | None, slopes: object | None
) -> None:
    """Refuse half a correction, or a hinge without slopes."""
    if (control is None) != (target is None):
        raise ValueError("local_steps takes control and target together or neither.")
    if (work.hinge is None) != (slopes is None):
        raise ValueError("local_steps takes slopes exactly when the local work has a hinge.")


def to_numpy(values: Tensor) -> Losses:
    """Return per-client numbers as float64 on the server."""
    return values.detach().to("cpu", torch.float64).numpy()


def to_tensor(weights: Weights, like: Tensor) -> Tensor:
    """Return per-client numbers in the model's precision where the model is."""
    return torch.as_tensor(weights, dtype=like.dtype, device=like.device)
