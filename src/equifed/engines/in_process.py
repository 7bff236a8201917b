"""What our engines share: subsets, the ledger, dense vectors, and the data of one process."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from equifed.contract.arrays import Index, Losses, Weights
from equifed.contract.clients import Clients, ClientVectors, MissingClients, Traffic, check_index
from equifed.contract.curvature import Curvature, CurvatureSum, Form
from equifed.contract.details import Details
from equifed.contract.evaluation import SPLITS, Evaluation, SampleMetric
from equifed.contract.local import LocalSGD
from equifed.contract.names import show_text
from equifed.contract.own import OwnSteps
from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.data.tables import Table
from equifed.engines.evaluator import FederationEvaluator, measure_scales
from equifed.engines.own_parts import JOINT, FoundOwnParts, OwnParts, OwnRows
from equifed.engines.profile import choose_offsets, settle_own
from equifed.engines.sums import (
    Node,
    group_clients,
    leaf_nodes,
    node_values,
    sum_leaves,
    sum_rows,
)
from equifed.models.architectures import Init, build, choose_init, initialise
from equifed.models.checks import (
    check_device,
    check_dtype,
    check_module,
    check_start,
    copy_module,
    load_weights,
)
from equifed.models.curvature import known_curvature, refuse_bounds
from equifed.models.flat import EXAMPLES, FlatModel, SampleLoss, as_data
from equifed.models.hessian import linear_hessian
from equifed.models.hessians import PIECE, LinearHessian, check_sum_weights
from equifed.models.losses import loss_by_name, outputs_for, resolve_loss
from equifed.models.penalty import Penalise
from equifed.models.predictor import Predictor, describe_predictor, link_of

MOST_BYTES = 1 << 30
"""Vectors of all clients are put side by side up to this size, whatever else an engine keeps."""


@runtime_checkable
class InProcessVectors(ClientVectors, Protocol):
    """Client vectors that this process could lay side by side."""

    def dense(self) -> Tensor:
        """Return all of them as the rows of one matrix."""
        ...

    def nodes(self, nodes: Sequence[Node], weights: Weights, first: int) -> list[Tensor]:
        """Return parts of the weighted sum with others'; see :mod:`equifed.engines.sums`.

        ``weights`` are those of all clients, of whom the ones here begin at ``first``.
        """
        ...


@dataclass(frozen=True, eq=False)
class DenseVectors(ClientVectors):
    """Client vectors as the rows of one matrix."""

    matrix: Tensor
    at_hand: ClassVar[bool] = True  # norms cost neither an exchange nor work done again

    @override
    def weighted_sum(self, weights: Weights) -> Tensor:
        return sum_rows(weights, self.matrix)

    @override
    def squared_norms(self) -> Losses:
        return to_numpy(self.matrix.square().sum(dim=1))

    def dense(self) -> Tensor:
        """Return the matrix."""
        return self.matrix

    def nodes(self, nodes: Sequence[Node], weights: Weights, first: int) -> list[Tensor]:
        """Return the values of nodes of the tree of all clients."""
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
    engine: ClassVar[str] = ""
    """Its name in the catalogue."""
    choice: str | None = None
    """Why this engine, where it was chosen by measuring."""

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
            x = torch.cat([x, self.own_parts(x).mean(dim=0)])
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

    def _book_local(self, work: LocalSGD, corrected: bool) -> None:
        self._book(down=1 + corrected, up=len(work.results), losses=work.hinge is not None)


class InProcessClients(FoundOwnParts, TorchClients):
    """Clients whose data this process holds; what ``loop`` and ``stacked`` have in common.

    Parameters
    ----------
    data, model, loss, l2, penalise, dtype, device, init, own, own_l2, own_steps
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
        own_l2: float | None = None,
        own_steps: OwnSteps = "auto",
    ) -> None:
        super().__init__(data)
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
        return self._evaluator(tuple(splits))(x, metrics, self._own_parts(x))

    def evaluate_shared(self, x: Tensor, splits: Sequence[str]) -> list[Evaluation]:
        """Return the numbers of x with the mean of all own parts; MeasuresShared asks."""
        own = self.own_parts(x)
        mean = own.mean(dim=0, keepdim=True).expand_as(own)
        return self._evaluator(tuple(splits))(x, (), mean)

    def describe(self, x: Tensor, split: str, metrics: Sequence[SampleMetric]) -> Details | None:
        """Return what the samples of a split say about a model, client by client."""
        held = [splits for splits in self._evaluators if split in splits]
        own = self._own_parts(x)
        return self._evaluator(held[0] if held else (split,)).describe(split, x, metrics, own)

    def _own_parts(self, x: Tensor) -> Tensor | None:
        return None if self.own is None else self.own_parts(x)

    def _evaluator(self, splits: tuple[str, ...]) -> FederationEvaluator:
        if splits not in self._evaluators:
            self._evaluators[splits] = FederationEvaluator(self._federation, self.model, splits)
        return self._evaluators[splits]

    def predictor(self, x: Tensor) -> Predictor:
        """Return what predicts for new samples with the model x; KnowsModule asks."""
        module = copy.deepcopy(self._template).to("cpu", self.model.dtype)
        loaded = load_weights(module, self.parameters(x))
        told = describe_predictor(self._federation, loaded, self.model.loss)
        own = self._own_parts(x)
        if own is None or self.own is None:
            return told
        kept = self.own_parameters(own)
        return dataclasses.replace(told, own=kept, own_l2=self.own.l2)

    def origin(self) -> dict[str, Any]:
        """Return what the engine was made of; KnowsOrigin asks."""
        if not self._origin:  # a list that subsets share: large data take a while
            told = describe_origin(self._federation, self._template, self.model)
            if self.model_name is not None:  # enough to build the module again
                start = self.model.flatten_all(self.model.module)
                outputs = self.model.outputs(start, self._inputs[:1].to(self.model.device))
                told["model_name"] = self.model_name
                told["samples"]["outputs"] = outputs.numel()
            self._origin.append(told)
        return self._origin[0]

    def feature_scales(self) -> Losses | None:
        """Return every feature's standard deviation, NaN if it hardly varies; None: no vectors."""
        return measure_scales(self._federation.train.inputs)

    @override
    def curvature(self) -> Curvature | str:
        if self.remembers_own():
            return JOINT
        if (why := refuse_bounds(self.model)) is not None:  # hooks may come later
            return why
        if not self._curvature:  # a list that subsets share: eigenvalues are worth keeping
            self._curvature.append(known_curvature(self.model, len(self.names), self.inputs_of))
        return self._curvature[0]

    def hessian(self, x: Tensor, weights: Weights) -> Tensor | str:
        """Return the weighted sum of the clients' second derivatives; KnowsHessians asks."""
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
        own = self._own_parts(x)

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
        plain, own = dataclasses.replace(hessian, form="diagonal"), self._own_parts(x)
        for k, i in enumerate(self.index):
            found, inputs = plain.zeros(), self.inputs_of(int(i))
            with_own = x if own is None else torch.cat([x, own[i]])
            plain.add(found, with_own, inputs, x.new_full((len(inputs),), 1 / len(inputs)))
            sizes[k] = float(found.sum())
        self.refuse_non_finite(sizes, "trace of its curvature")

    @override
    def inner_products(
        self, vectors: ClientVectors, solve: Callable[[Tensor], Tensor]
    ) -> Losses | str:
        if len(self.index) * self.model.size * self.model.dtype.itemsize > MOST_BYTES:
            return "the clients' vectors do not fit into memory at once"
        assert isinstance(vectors, InProcessVectors)
        return products_of_rows(vectors.dense(), solve)

    @override
    def group(self) -> None:
        return None

    @override
    def remembered(self, vectors: ClientVectors | None, index: Index) -> DenseVectors:
        if vectors is None:
            return DenseVectors(self.zeros(len(index)))
        assert isinstance(vectors, DenseVectors)
        return DenseVectors(vectors.matrix[torch.as_tensor(index, device=self.model.device)])

    @override
    def remember(
        self, memory: ClientVectors | None, index: Index, vectors: ClientVectors
    ) -> DenseVectors:
        assert memory is None or isinstance(memory, DenseVectors)
        assert isinstance(vectors, InProcessVectors)
        matrix = self.zeros(len(self.names)) if memory is None else memory.matrix.clone()
        matrix[torch.as_tensor(index, device=matrix.device)] = vectors.dense()
        return DenseVectors(matrix)

    def refuse_non_finite(self, values: Losses, what: str) -> None:
        """Raise :class:`MissingClients` for those whose numbers are not finite."""
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            reasons = {int(self.index[k]): f"{what} is {values[k]}" for k in bad}
            raise MissingClients(reasons, self.names)

    def inputs_of(self, client: int) -> Tensor:
        """Return the training inputs of a client of the federation."""
        return self._inputs[self._offsets[client] : self._offsets[client + 1]]

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


def check_local_arguments(
    work: LocalSGD, control: object | None, target: object | None, slopes: object | None
) -> None:
    """Refuse half a correction, a multiplier without one, or a hinge without slopes."""
    if (control is None) != (target is None):
        raise ValueError("local_steps takes control and target together or neither.")
    if work.multiplier and control is None:
        raise ValueError("local.multiplier is c_i - c + proximal (x - u): it needs a control.")
    if (work.hinge is None) != (slopes is None):
        raise ValueError(
            "local_steps takes slopes exactly when the local work has a hinge: rFedFair sets "
            "local.hinge itself, and no other algorithm has one; leave it out."
        )


def products_of_rows(rows: Tensor, solve: Callable[[Tensor], Tensor]) -> Losses:
    """Return <v_i, P^-1 v_j> for the rows of a matrix, in float64."""
    rows = rows.double().contiguous()  # products of other strides may have other bits
    products = rows @ solve(rows).T
    return to_numpy((products + products.T) / 2)


def to_numpy(values: Tensor) -> Losses:
    """Return per-client numbers as float64 on the server."""
    return values.detach().to("cpu", torch.float64).numpy()


def to_tensor(weights: Weights, like: Tensor) -> Tensor:
    """Return per-client numbers in the model's precision where the model is."""
    return torch.as_tensor(weights, dtype=like.dtype, device=like.device)
