"""Clients whose data this process holds: what ``loop`` and ``stacked`` have in common."""

from __future__ import annotations

import copy
import dataclasses
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from equifed.contract import OwnL2, OwnSteps, Stream
from equifed.contract.arrays import ClientVectors, Index, Losses, Weights, show_text
from equifed.contract.curvature import Curvature, Inexactness
from equifed.contract.evaluation import SPLITS, Details, Evaluation, SampleMetric
from equifed.data.federation import Federation
from equifed.data.fields import KINDS, Field, Layout
from equifed.data.split import TOKENS, DataError
from equifed.engines.base import MOST_BYTES, OwnRows, TorchClients, describe_data, describe_samples
from equifed.engines.evaluate import FederationEvaluator, measure_scales
from equifed.engines.ordered_sums import (
    DenseVectors,
    Node,
    dense_rows,
    group_clients,
    has_one_order,
    leaf_nodes,
    sum_leaves,
)
from equifed.engines.own import JOINT, choose_offsets, error_bounds, settle_own
from equifed.engines.threads import ALIGNED, Workspace
from equifed.models.adapted import adapt_to_data
from equifed.models.architectures import MODELS, Init, build, choose_init, initialise
from equifed.models.checks import (
    check_device,
    check_dtype,
    check_start,
    copy_module,
    load_weights,
)
from equifed.models.curvature import PIECE, LinearHessian, known_curvature
from equifed.models.flat import EXAMPLES, FlatModel, Penalise, as_data
from equifed.models.losses import SampleLoss, Weighted, loss_by_name, outputs_for, resolve_loss
from equifed.models.predictor import Predictor, describe_predictor, link_of


class InProcessClients(TorchClients):
    """All samples in two tensors, client by client; arguments as for :func:`equifed.simulate`."""

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
    ) -> None:
        super().__init__(data)
        check_dtype(dtype)
        self._init, device = choose_init(model, init), check_device(device)
        self.model_name = model if isinstance(model, str) else None
        module, loss = resolve_model(data, model, loss)
        self._federation = data
        self._origin: list[dict[str, Any]] = []  # subsets share it once it is known
        self._inputs = as_data(data.train.inputs, dtype, device)
        if self._inputs.data_ptr() % ALIGNED and has_one_order(dtype, device):
            self._inputs = self._inputs.clone()
        self._targets = as_data(data.train.targets, dtype, device)
        self._offsets = np.asarray(data.train.offsets, dtype=np.int64)
        self._refuse_infinite("inputs", self._inputs)
        self._refuse_infinite("targets", self._targets)
        self._groups = group_clients(self._sizes)  # whose Hessians are summed together
        self.workspace = Workspace(MOST_BYTES)
        self.own = settle_own(module, loss, self._inputs.dim() - 1, own, own_steps, own_l2, l2)
        self.model = FlatModel(
            module, loss, self._inputs[:EXAMPLES], self._targets[:EXAMPLES],
            classes=data.classes, l2=l2, penalise=penalise, dtype=dtype, device=device,
            own=self.own,
        )  # fmt: skip
        self._template = copy_module(module)
        if self.own is not None and self.model.penalised is not None:
            raise ValueError(
                "penalise='weights' leaves shared biases free, which models with own parameters "
                "cannot; make the biases own parameters, too, or give penalise='all'."
            )
        self._try_largest(data)
        self._evaluator = FederationEvaluator(data, self.model)
        start = self.model.flatten_all(module)[self.model.size :]
        self.own_rows = OwnRows(start.repeat(len(self.names), 1))
        self.offsets = choose_offsets(self.own, loss)

    def _refuse_infinite(self, what: str, values: Tensor) -> None:
        """Refuse data that are finite, but not in the model's precision."""
        rows = ~torch.isfinite(values.reshape(len(values), -1).sum(dim=1))
        for row in rows.nonzero().flatten().tolist():
            if torch.isfinite(values[row]).all():  # its sum alone overflows
                continue
            client = self.names[int(np.searchsorted(self._offsets, row, side="right")) - 1]
            raise ValueError(
                f"Client {show_text(client)}: training {what} hold numbers beyond the largest of "
                f"{values.dtype}; rescale them, or use dtype=torch.float64."
            )

    def _try_largest(self, data: Federation) -> None:
        """Refuse tokens that the model has no embedding for: samples with the largest are tried.

        Not on a GPU, which would answer nothing more after it.
        """
        plain = Layout((Field("tokens", data.input_shape, KINDS["i"]),))
        layout = plain if data.train.inputs.dtype == TOKENS else None
        spans = list((data.layout or layout or Layout(())).spans())
        x, dtype = self.model.flatten_all(self.model.module), self.model.dtype
        if self.model.device.type != "cpu":
            return
        for (label, split), (one, span) in product(data.splits().items(), spans):
            rows = split.inputs.reshape(len(split), -1)[:, span]
            if one.kind != KINDS["i"] or not len(rows):
                continue
            k = int(rows.max(axis=1).argmax())
            try:
                with torch.no_grad():
                    self.model.outputs(x, as_data(split.inputs[k : k + 1], dtype, "cpu"))
            except IndexError as error:
                what, most = f"{label} {one.name} hold", int(rows[k].max())
                cure = "its nn.Embedding needs more rows"
                raise DataError(
                    f"Client {show_text(self.names[split.owners()[k]])}: {what} {most}, which the "
                    f"model has no embedding for ({error}); {cure} than that number.",
                    f"{what} numbers that the model has no embedding for; {cure}.",
                ) from None

    def inputs_of(self, client: int) -> Tensor:
        """Return the training inputs of a client of the federation."""
        return self._inputs[self._offsets[client] : self._offsets[client + 1]]

    # -- what a model is --------------------------------------------------------------------------

    @override
    def initial(self, stream: Stream) -> Tensor:
        fresh = self._template
        if self._init != "given":
            fresh = copy.deepcopy(self._template)
            initialise(fresh, stream)
        x, own = self.model.flatten_all(check_start(fresh)).tensor_split([self.model.size])
        self.own_rows.start = own.repeat(len(self.names), 1)
        return x

    @override
    def flatten(self, model: Tensor | nn.Module | Mapping[str, Tensor]) -> Tensor:
        x, given = self.model.flatten_any(model), model
        # Own parts start as in what is given, if they are there, else as in the module.
        held = dict[str, Any](self._template.named_parameters(remove_duplicate=False))
        if isinstance(given, nn.Module):
            given = given.state_dict()
        held |= given if isinstance(given, Mapping) else {}
        own = [torch.as_tensor(held[n]).detach().reshape(-1).to(x) for n in self.model.own_shapes]
        self.own_rows.start = torch.cat([x[:0], *own]).repeat(len(self.names), 1)
        return x

    # -- own parts --------------------------------------------------------------------------------

    @override
    def rows_of_own(self, x: Tensor) -> Tensor:
        return super().rows_of_own(x) if self.offsets is None else self._solve_own(x)[0]

    @override
    def find_one_class(self) -> list[str]:
        return self._federation.find_one_class()

    @override
    def inexactness(self, x: Tensor) -> Inexactness | str | None:
        if self.own is None:
            return None
        if self.own.steps != "profile":
            return JOINT
        _, losses, gradients = self._solve_own(x)
        return Inexactness(losses.double().cpu().numpy(), gradients.double().cpu().numpy())

    def _solve_own(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return best own parts (N, p), and bounds on losses' and gradients' errors."""
        assert self.offsets is not None
        n, here = len(self.names), np.flatnonzero(np.diff(self._offsets))
        own, decrements, squares = x.new_zeros(n, self.model.own_size), *x.new_zeros(2, n)
        for places, v, decrement, square in self.subset(here).best_own(x):
            rows = torch.as_tensor(here[places], device=x.device)
            own[rows], decrements[rows], squares[rows] = v, decrement, square
        return own, *error_bounds(decrements, self.offsets, squares)

    @abstractmethod
    def best_own(self, x: Tensor) -> Iterator[tuple[slice | Index, Tensor, Tensor, Tensor]]:
        """Yield places of clients, their best own parts, squared decrements, and mean |a|^2."""

    # -- memories ---------------------------------------------------------------------------------

    @override
    def remembered(self, vectors: ClientVectors | None, index: Index) -> DenseVectors:
        if vectors is None:
            return DenseVectors(self.zeros(len(index)))
        return DenseVectors(dense_rows(vectors)[torch.as_tensor(index, device=self.model.device)])

    @override
    def remember(
        self, memory: ClientVectors | None, index: Index, vectors: ClientVectors
    ) -> ClientVectors:
        matrix = self.workspace.empty((len(self.names), self.model.size), self.zeros(0))
        matrix = matrix.zero_() if memory is None else matrix.copy_(dense_rows(memory))
        matrix[torch.as_tensor(index, device=matrix.device)] = dense_rows(vectors)
        return DenseVectors(matrix)

    # -- second derivatives -----------------------------------------------------------------------

    @override
    def find_curvature(self) -> Curvature | str:
        return known_curvature(self.model, len(self.names), self.inputs_of)

    @override
    def add_hessians(
        self, hessian: LinearHessian, x: Tensor, weights: Weights, thin: Tensor | None
    ) -> Tensor:
        groups = int(self._groups[-1]) + 1
        (total,) = self.sum_hessians(hessian, x, weights, thin, leaf_nodes(0, groups, groups))
        return total

    def sum_hessians(
        self, hessian: LinearHessian, x: Tensor, weights: Weights, thin: Tensor | None,
        nodes: Sequence[Node],
    ) -> list[Tensor]:  # fmt: skip
        """Return parts of the weighted sum of Hessians, penalty apart: nodes of a fixed tree."""
        share = np.zeros(len(self.names))
        share[self.index] = weights
        own = self.own_parts(x)

        def sum_group(group: int) -> Tensor:
            total = hessian.zeros(thin)
            here = np.flatnonzero((self._groups == group) & (share > 0))
            if own is None:
                self._add_samples(hessian, total, x, here, share, thin)
                return total
            for i in here.tolist():  # profile losses
                pieces = torch.split(self.inputs_of(i), self._piece)
                with_own, size = torch.cat([x, own[i]]), int(self._sizes[i])
                hessian.add_profile(total, with_own, pieces, share[i], size, thin)
            return total

        groups = int(self._groups[-1]) + 1
        totals = [sum_leaves(node, sum_group, groups) for node in nodes]
        if not all(bool(torch.isfinite(total).all()) for total in totals):
            self._refuse_curvature(hessian, x)
        return totals

    @property
    def _piece(self) -> int:
        """How many samples go into a sum of Hessians at once, to bound the memory."""
        return max(1, PIECE // max(1, self._inputs[0].numel() * self._inputs.element_size()))

    def _add_samples(
        self, hessian: LinearHessian, total: Tensor, x: Tensor, here: Index, share: Weights,
        thin: Tensor | None,
    ) -> None:  # fmt: skip
        """Add the Hessians of clients ``here``; each sample counts its client's weight."""
        sizes, step = self._sizes[here], self._piece
        rows = np.repeat(self._offsets[here] - np.cumsum(sizes) + sizes, sizes)
        rows += np.arange(len(rows))  # all samples of these clients
        counts = np.repeat(share[here] / sizes, sizes)
        for start in range(0, len(rows), step):
            some = torch.as_tensor(rows[start : start + step], device=self._inputs.device)
            count = torch.as_tensor(counts[start : start + step]).to(x)
            if isinstance(self.model.loss, Weighted):
                count = count * self.model.loss.counts(self._targets[some]).to(x)
            hessian.add(total, x, self._inputs[some], count, thin)

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
        self.require_finite(sizes, "trace of its curvature")

    # -- questions of training --------------------------------------------------------------------

    @override
    def evaluate(
        self, x: Tensor, splits: Sequence[str] = SPLITS, metrics: Sequence[SampleMetric] = ()
    ) -> list[Evaluation]:
        return self._evaluator(x, splits, metrics, self.own_parts(x))

    @override
    def evaluate_shared(self, x: Tensor, splits: Sequence[str]) -> list[Evaluation]:
        own = self.rows_of_own(x)
        return self._evaluator(x, splits, (), own.mean(dim=0, keepdim=True).expand_as(own))

    @override
    def describe(self, x: Tensor, split: str, metrics: Sequence[SampleMetric]) -> Details | None:
        return self._evaluator.describe(split, x, metrics, self.own_parts(x))

    @override
    def predictor(self, x: Tensor) -> Predictor:
        module = copy.deepcopy(self._template).to("cpu", self.model.dtype)
        loaded = load_weights(module, self.parameters(x))
        told = describe_predictor(self._federation, loaded, self.model.loss)
        own = self.own_parts(x)
        if own is None or self.own is None:
            return told
        return dataclasses.replace(told, own=self.own_parameters(own), own_l2=self.own.l2)

    @override
    def origin(self) -> dict[str, Any]:
        if not self._origin:
            loss: Any = self.model.loss
            told: dict[str, Any] = {
                "model": " ".join(str(self._template).split()),
                "loss": str(getattr(loss, "__name__", type(loss).__name__)),
                "l2": self.model.l2,
                "dtype": str(self.model.dtype).removeprefix("torch."),
                **({"own": [*self.model.own_shapes]} if self.model.own_size else {}),
                "samples": describe_samples(self._federation) | {"link": link_of(loss)},
                "data": describe_data(self._federation),
            }
            if self.model_name is not None:  # enough to build the module again
                start = self.model.flatten_all(self.model.module)
                outputs = self.model.outputs(start, self._inputs[:1].to(self.model.device))
                told["model_name"] = self.model_name
                told["samples"]["outputs"] = outputs.numel()
            self._origin.append(told)
        return self._origin[0]

    @override
    def feature_scales(self) -> Losses | None:
        if self._federation.layout is not None:
            return None
        return measure_scales(self._federation.train.inputs)


def resolve_model(
    federation: Federation, module: nn.Module | str, loss: SampleLoss | str
) -> tuple[nn.Module, SampleLoss]:
    """Return module and loss, looked up and built for this data where they are names."""
    if isinstance(loss, str):
        loss = resolve_loss(loss, federation.classes)
    if isinstance(module, str):
        if not isinstance(loss, str):
            raise ValueError(f"The model {module!r} is a name, so the loss must be one too.")
        if federation.layout is not None and module in MODELS:
            raise ValueError(
                f"The model {module!r} takes one array, a sample is {federation.layout}; pass "
                "a module whose forward takes these."
            )
        module = build(module, federation.input_shape, outputs_for(federation, loss))
    module = adapt_to_data(module, federation)
    return module, loss_by_name(loss) if isinstance(loss, str) else loss
