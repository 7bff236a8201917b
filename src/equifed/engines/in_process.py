"""Clients whose data this process holds: what ``loop`` and ``stacked`` have in common."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from equifed.contract.arrays import Index, Losses
from equifed.contract.curvature import Curvature
from equifed.contract.evaluation import SPLITS, Details, Evaluation, SampleMetric
from equifed.contract.names import show_text
from equifed.contract.own import OwnL2, OwnSteps
from equifed.contract.streams import Stream
from equifed.contract.vectors import ClientVectors
from equifed.data.federation import Federation
from equifed.engines.base import MOST_BYTES, DenseVectors, InProcessVectors, to_numpy
from equifed.engines.evaluator import FederationEvaluator, measure_scales
from equifed.engines.own_parts import OwnRows, settle_own
from equifed.engines.profile import choose_offsets
from equifed.engines.resources import Workspace
from equifed.engines.row_file import RememberOn, RowFile, RowMemory, check_remember_on
from equifed.engines.second_derivatives import SecondDerivatives
from equifed.engines.sums import group_clients
from equifed.models.architectures import Init, build, choose_init, initialise
from equifed.models.checks import (
    check_device,
    check_dtype,
    check_module,
    check_start,
    copy_module,
    load_weights,
)
from equifed.models.flat import EXAMPLES, FlatModel, Penalise, SampleLoss, as_data
from equifed.models.losses import loss_by_name, outputs_for, resolve_loss
from equifed.models.predictor import Predictor, describe_predictor, link_of


class InProcessClients(SecondDerivatives):
    """Clients whose data this process holds; what ``loop`` and ``stacked`` have in common.

    Parameters
    ----------
    data, model, loss, l2, penalise, dtype, device, init, own, own_l2, own_steps, remember_on
        As for :func:`equifed.simulate`.
    """

    def __init__(
        self,
        data: Federation,
        model: nn.Module | str,
        loss: SampleLoss | str = "auto",
        *,
        l2: float = 0.0,
        penalise: Penalise = "all",
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        init: Init | None = None,
        own: str | Sequence[str] | None = None,
        own_l2: OwnL2 | None = None,
        own_steps: OwnSteps = "auto",
        remember_on: RememberOn = "memory",
    ) -> None:
        super().__init__(data)
        check_remember_on(remember_on)
        check_dtype(dtype)
        self._init, device = choose_init(model, init), check_device(device)
        self.model_name = model if isinstance(model, str) else None
        module, loss = resolve_model(data, model, loss)
        check_module(module)
        self._template, self._federation = copy_module(module), data
        self._curvature: list[Curvature | str] = []
        self._origin: list[dict[str, Any]] = []
        self._evaluators: dict[tuple[str, ...], FederationEvaluator] = {}
        self._inputs = self._place(as_data(data.train.inputs, dtype, "cpu"), device)
        self._targets = as_data(data.train.targets, dtype, self._inputs.device)
        self._offsets = np.asarray(data.train.offsets, dtype=np.int64)
        for what, values in (("inputs", self._inputs), ("targets", self._targets)):
            self._refuse_overflow(what, values)
        self._groups = group_clients(self._sizes)
        self.workspace = Workspace(MOST_BYTES)
        dimensions = self._inputs.dim() - 1
        self.own = settle_own(module, loss, dimensions, own, own_steps, own_l2, l2)
        self.model = FlatModel(
            module, loss, self._inputs[:EXAMPLES], self._targets[:EXAMPLES],
            classes=data.classes, l2=l2, penalise=penalise, dtype=dtype, device=device,
            own=self.own,
        )  # fmt: skip
        if self.own is not None and self.model.penalised is not None:
            raise ValueError(
                "penalise='weights' leaves shared biases free, which models with own parameters "
                "cannot; make the biases own parameters, too, or give penalise='all'."
            )
        self._row_file = RowFile(self.zeros(0)) if remember_on == "disk" else None
        self.own_rows = OwnRows(self.repeat_own(module))
        self.offsets = choose_offsets(self.own, loss)

    @override
    def initial(self, stream: Stream) -> Tensor:
        fresh = self._template
        if self._init != "own":
            fresh = copy.deepcopy(self._template)
            initialise(fresh, stream)
        self.own_rows.start = self.repeat_own(fresh)
        return self.model.flatten(check_start(fresh))

    @override
    def flatten(self, model: Tensor | nn.Module | Mapping[str, Tensor]) -> Tensor:
        # Own parts start as in what is given, if they are there, else as in the module.
        given: dict[str, Tensor] = {}
        given |= dict(self._template.named_parameters(remove_duplicate=False))
        given |= model.state_dict() if isinstance(model, nn.Module) else {}
        given |= model if isinstance(model, Mapping) else {}
        x = self.model.flatten_any(model)
        self.own_rows.start = self.repeat_own(given)
        return x

    @override
    def evaluate(
        self, x: Tensor, splits: Sequence[str] = SPLITS, metrics: Sequence[SampleMetric] = ()
    ) -> list[Evaluation]:
        return self._evaluator(tuple(splits))(x, metrics, self.own_parts(x))

    @override
    def evaluate_shared(self, x: Tensor, splits: Sequence[str]) -> list[Evaluation]:
        own = self.rows_of_own(x)
        mean = own.mean(dim=0, keepdim=True).expand_as(own)
        return self._evaluator(tuple(splits))(x, (), mean)

    @override
    def describe(self, x: Tensor, split: str, metrics: Sequence[SampleMetric]) -> Details | None:
        held = [splits for splits in self._evaluators if split in splits]
        own = self.own_parts(x)
        return self._evaluator(held[0] if held else (split,)).describe(split, x, metrics, own)

    def _evaluator(self, splits: tuple[str, ...]) -> FederationEvaluator:
        if splits not in self._evaluators:
            self._evaluators[splits] = FederationEvaluator(self._federation, self.model, splits)
        return self._evaluators[splits]

    @override
    def predictor(self, x: Tensor) -> Predictor:
        module = copy.deepcopy(self._template).to("cpu", self.model.dtype)
        loaded = load_weights(module, self.parameters(x))
        told = describe_predictor(self._federation, loaded, self.model.loss)
        own = self.own_parts(x)
        if own is None or self.own is None:
            return told
        kept = self.own_parameters(own)
        return dataclasses.replace(told, own=kept, own_l2=self.own.l2)

    @override
    def origin(self) -> dict[str, Any]:
        if not self._origin:  # a list that subsets share: large data take a while
            told = describe_origin(self._federation, self._template, self.model)
            if self.model_name is not None:  # enough to build the module again
                start = self.model.flatten_all(self.model.module)
                outputs = self.model.outputs(start, self._inputs[:1].to(self.model.device))
                told["model_name"] = self.model_name
                told["samples"]["outputs"] = outputs.numel()
            self._origin.append(told)
        return self._origin[0]

    @override
    def feature_scales(self) -> Losses | None:
        return measure_scales(self._federation.train.inputs)

    @override
    def inner_products(
        self, vectors: ClientVectors, multiply: Callable[[Tensor], Tensor]
    ) -> Losses | str:
        if len(self.index) * self.model.size * self.model.dtype.itemsize > MOST_BYTES:
            return "the clients' vectors do not fit into memory at once"
        assert isinstance(vectors, InProcessVectors)
        return products_of_rows(vectors.dense(), multiply)

    @override
    def remembered(self, vectors: ClientVectors | None, index: Index) -> DenseVectors:
        if vectors is None:
            return DenseVectors(self.zeros(len(index)))
        if isinstance(vectors, RowMemory):
            return DenseVectors(vectors.take(index).to(self.model.device))
        assert isinstance(vectors, DenseVectors)
        return DenseVectors(vectors.matrix[torch.as_tensor(index, device=self.model.device)])

    @override
    def remember(
        self, memory: ClientVectors | None, index: Index, vectors: ClientVectors
    ) -> ClientVectors:
        assert isinstance(vectors, InProcessVectors)
        if self._row_file is not None:
            return self._row_file.replace(memory, len(self.names), index, vectors.dense())
        if isinstance(memory, RowMemory):  # of a run that kept it in a file
            memory = self.remembered(memory, np.arange(len(self.names)))
        assert memory is None or isinstance(memory, DenseVectors)
        shape = len(self.names), self.model.size
        matrix = self.workspace.empty(shape, self.zeros(0))
        matrix = matrix.zero_() if memory is None else matrix.copy_(memory.matrix)
        matrix[torch.as_tensor(index, device=matrix.device)] = vectors.dense()
        return DenseVectors(matrix)

    def _refuse_overflow(self, what: str, values: Tensor) -> None:
        """Refuse data that are finite, but not in the model's precision."""
        rows = ~torch.isfinite(values.reshape(len(values), -1).sum(dim=1))
        for row in rows.nonzero().flatten().tolist():
            if torch.isfinite(values[row]).all():  # its sum alone overflows
                continue
            client = self.names[int(np.searchsorted(self._offsets, row, side="right")) - 1]
            raise ValueError(
                f"Client {show_text(client)}: training {what} hold numbers beyond the largest of "
                f"{values.dtype}; scale them, or say dtype=torch.float64."
            )

    def _place(self, inputs: Tensor, device: torch.device) -> Tensor:
        """Return the samples where they will stay."""
        return inputs.to(device)


def describe_origin(data: Federation, module: nn.Module, model: FlatModel) -> dict[str, Any]:
    """Return model, loss and data as a run's record has them, and what samples are like."""
    prepared, targets = data.preparation, data.train.targets
    loss: Any = model.loss
    return {
        "model": " ".join(str(module).split()),
        "loss": str(getattr(loss, "__name__", type(loss).__name__)),
        "l2": model.l2,
        "dtype": str(model.dtype).removeprefix("torch."),
        **({"own": [*model.own_shapes]} if model.own_size else {}),
        "samples": {
            "input_shape": list(data.input_shape),
            "tokens": data.train.inputs.dtype.kind == "i",
            "classes": data.classes,
            "class_names": list(data.class_names),
            "target_shape": list(targets.shape[1:]),
            "link": link_of(model.loss),
        },
        "data": {
            "name": data.name,
            "sha256": data.checksum(),
            "source": data.source,
            **({"preparation": prepared.digest()} if prepared is not None else {}),
        },
    }


def resolve_model(
    federation: Federation, module: nn.Module | str, loss: SampleLoss | str
) -> tuple[nn.Module, SampleLoss]:
    """Return module and loss, looked up and built for this data where they are names."""
    if isinstance(loss, str):
        loss = resolve_loss(loss, federation.classes)
    if isinstance(module, str):
        if not isinstance(loss, str):
            raise ValueError(f"The model {module!r} is a name, so the loss must be one too.")
        module = build(module, federation.input_shape, outputs_for(federation, loss))
    return module, loss_by_name(loss) if isinstance(loss, str) else loss


def products_of_rows(rows: Tensor, multiply: Callable[[Tensor], Tensor]) -> Losses:
    """Return <v_i, P^-1 v_j> for the rows of a matrix, symmetric to the last bit."""
    products = multiply(rows)
    return to_numpy((products + products.T) / 2)
