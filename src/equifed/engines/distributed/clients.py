"""Clients spread over the processes of a ``torch.distributed`` group.

Every process runs the same algorithm on the same state; each holds the samples of its own clients
and computes for them with the stacked engine. Losses are gathered, weighted sums are added up in
the order of the clients, so all of them see the same numbers and go the same way, in double
precision on CPUs the same as one process.

Processes are started by ``torchrun`` (one machine or many) or by ``equifed run --workers N``.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from equifed.contract.arrays import ClientVectors, Index, Losses, Weights
from equifed.contract.clients import MissingClients, Moved
from equifed.contract.curvature import Curvature, CurvatureSum, Form, Inexactness
from equifed.contract.evaluation import Details, Evaluation, Hits, SampleMetric
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.engines.base import TorchClients
from equifed.engines.distributed.group import Workers, assign_clients, cut_shard
from equifed.engines.in_process import MOST_BYTES, InProcessClients, products_of_rows
from equifed.engines.ordered_sums import (
    DenseVectors,
    InProcessVectors,
    group_clients,
    join_leaves,
    join_nodes,
    leaf_nodes,
    nodes_within,
)
from equifed.engines.own import JOINT
from equifed.engines.simulate import simulate
from equifed.models.architectures import Init
from equifed.models.checks import load_weights
from equifed.models.curvature import LinearHessian, check_sum_weights, known_curvature
from equifed.models.losses import SampleLoss
from equifed.models.predictor import Predictor

Part = TypeVar("Part")
Done = TypeVar("Done")


class DistributedVectors(ClientVectors):
    """Client vectors, each in the process that holds the client."""

    def __init__(
        self, clients: DistributedClients, index: Index, own: InProcessVectors | None
    ) -> None:
        self.clients, self.own, self.n = clients, own, len(index)
        self.holders = clients.holder[index]  # in order, as clients and processes are
        self.places = np.flatnonzero(self.holders == clients.workers.rank)

    @override
    def weighted_sum(self, weights: Weights) -> Tensor:
        # Each process its part of one tree over all clients, then all parts together.
        plans = [list(nodes_within(a, b, self.n)) if a < b else [] for a, b in self.spans]
        own = plans[self.clients.workers.rank]
        part = self.clients.guard(
            self.own, lambda vectors: vectors.nodes(own, weights, int(self.places[0]))
        )
        rows = torch.stack(part) if part else self.clients.zeros(0)
        return join_nodes(self.clients.workers.exchange(plans, rows), weights, self.n)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The places of each process's clients, from one up to another."""
        ends = np.searchsorted(self.holders, np.arange(self.clients.workers.size), side="right")
        return list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True))

    @override
    def squared_norms(self) -> Losses:
        part = self.clients.guard(self.own, lambda own: own.squared_norms())
        return self.clients.workers.gather(part, self.places, self.n)

    @override
    def collect(self) -> DenseVectors:
        rows = self.clients.zeros(self.n)
        if self.own is not None:
            rows[torch.as_tensor(self.places, device=rows.device)] = self.own.dense()
        return DenseVectors(self.clients.workers.unite(rows))


def spread(vectors: ClientVectors) -> DistributedVectors:
    """Return vectors that these clients made; refuse those of others."""
    if not isinstance(vectors, DistributedVectors):
        raise TypeError(f"Vectors of another engine: {type(vectors).__name__}.")
    return vectors


class DistributedClients(TorchClients):
    """The stacked engine on every process of a group; arguments as for :func:`simulate`."""

    def __init__(
        self,
        data: Federation,
        model: nn.Module | str,
        loss: SampleLoss | str = "auto",
        *,
        device: str | torch.device = "cpu",
        init: Init | None = None,
        memory: int | None = None,
        chunk: int | None = None,
        **common: Any,
    ) -> None:
        super().__init__(data)
        self.workers = Workers(device)
        self.holder = assign_clients(self._sizes, self.workers.size)
        self._held = np.flatnonzero(self.holder == self.workers.rank)
        shard = cut_shard(data, self.holder == self.workers.rank)
        common |= {"device": self.workers.device, "init": init, "memory": memory, "chunk": chunk}
        self._local = simulate(shard, model, loss, **common)
        self.choice = self._local.choice
        # Where engines are chosen by measuring, all processes take the first one's.
        first: Any = self.workers.gather_texts(self._local.engine)[0]
        if self._local.engine != first:
            self._local = simulate(shard, model, loss, engine=first, **common)
        self._groups = group_clients(self._sizes, self.workers.size)
        self._local.divide_as(self._sizes, self._groups)
        self._curvature: list[Curvature | str] = []
        self.model, self._template = self._local.model, self._local._template
        self.own, self.own_rows = self._local.own, self._local.own_rows
        if len(set(self.workers.gather_texts(self.model.digest_fixed()))) > 1:
            raise ValueError("Frozen parameters differ from process to process; seed the module.")

    @override
    def initial(self, stream: Stream) -> Tensor:
        x = self._local.initial(stream)  # every process may have drawn its own module
        self.own_rows.start = self._from_first(self.own_rows.start)
        return self._from_first(x)

    @override
    def flatten(self, model: Tensor | nn.Module | Mapping[str, Tensor]) -> Tensor:
        return self._local.flatten(model)

    @override
    def with_own(self, own: Tensor) -> Self:
        part = super().with_own(own)
        part._local = self._local.with_own(own)
        return part

    @override
    def rows_of_own(self, x: Tensor) -> Tensor:
        own = self._local.rows_of_own(x)
        return own if self.remembers_own() else self.workers.unite(own)

    @override
    def find_one_class(self) -> list[str]:
        texts = self.workers.gather_texts(json.dumps(self._local.find_one_class()))
        return [name for text in texts for name in json.loads(text)]

    @override
    def inexactness(self, x: Tensor) -> Inexactness | str | None:
        own, everybody = self._local.inexactness(x), np.arange(len(self.names))
        if not isinstance(own, Inexactness):
            return own
        bounds = (self.workers.gather(b, everybody, len(b)) for b in (own.losses, own.gradients))
        return Inexactness(*bounds)

    @override
    def predictor(self, x: Tensor) -> Predictor:
        told = replace(self._local.predictor(x), clients=self.names)
        if self.own is None:
            return told
        own = self.own_parameters(self.rows_of_own(x))  # every process has those of its clients
        return replace(told, module=load_weights(told.module, self.parameters(x)), own=own)

    @override
    def losses(self, *given: Any, **named: Any) -> Losses:
        places, own = self._ask(lambda here: here.losses(*given, **named))
        self._book(down=1, up=0, losses=1)
        return self.workers.gather(own, places, len(self.index))

    @override
    def value_and_gradient(self, *given: Any, **named: Any) -> tuple[Losses, ClientVectors]:
        places, own = self._ask(lambda here: here.value_and_gradient(*given, **named))
        self._book(down=1, up=1, losses=1)
        losses, gradients = (None, None) if own is None else own
        return self.workers.gather(losses, places, len(self.index)), self._vectors(gradients)

    @override
    def local_steps(self, x: Tensor, local: LocalSGD, stream: Stream, **given: Any) -> Moved:
        work, corrected = local.work(), given.get("control") is not None
        if corrected:
            given["control"] = spread(given["control"]).own
        if given.get("slopes") is not None:
            given["slopes"] = given["slopes"][self._places()]
        places, own = self._ask(lambda here: here.local_steps(x, work, stream, **given))
        if self.remembers_own():
            self.own_rows.put(self.index, self._gather_own(places))
        self._book_local(work, corrected)
        thresholds = None
        if work.hinge is not None:
            ends = None if own is None else own.thresholds
            thresholds = self.workers.gather(ends, places, len(self.index))
        found = {} if own is None else vars(own)
        vectors = {kind: self._vectors(found.get(kind)) for kind in work.results}
        return Moved(steps=work.steps_for(self.sizes), thresholds=thresholds, **vectors)

    @override
    def remembered(self, vectors: ClientVectors | None, index: Index) -> ClientVectors:
        places = np.flatnonzero(self.holder[index] == self.workers.rank)
        if len(places) == 0:
            return DistributedVectors(self, index, None)
        rows = self._memory(vectors)[self._rows(index[places])]
        return DistributedVectors(self, index, DenseVectors(rows))

    @override
    def remember(
        self, memory: ClientVectors | None, index: Index, vectors: ClientVectors
    ) -> ClientVectors:
        rows, new = self._memory(memory).clone(), spread(vectors)
        if new.own is not None:
            rows[self._rows(index[new.places])] = new.own.dense()
        return DistributedVectors(self, np.arange(len(self.names)), DenseVectors(rows))

    @override
    def evaluate(self, *given: Any, **named: Any) -> list[Evaluation]:
        return [self._join(part) for part in self._local.evaluate(*given, **named)]

    @override
    def describe(self, x: Tensor, split: str, metrics: Sequence[SampleMetric]) -> Details | None:
        own = self._local.describe(x, split, metrics)
        told = None if own is None else own.to_dict()
        parts = [json.loads(text) for text in self.workers.gather_texts(json.dumps(told))]
        known = [Details.from_dict(part).clients for part in parts if part is not None]
        if not known:
            return None
        clients = (next(filter(None, found), None) for found in zip(*known, strict=True))
        return Details(split, tuple(clients))

    @override
    def curvature(self) -> Curvature | str:
        if self.remembers_own():
            return JOINT
        if not self._curvature:  # a list that subsets share: eigenvalues are worth keeping
            self._curvature.append(self._gather_curvature())
        return self._curvature[0]

    @override
    def curvature_sum(
        self, x: Tensor, weights: Weights, form: Form = "blocks", thin: Tensor | None = None
    ) -> CurvatureSum | str:
        hessian = LinearHessian.of(self.model, form, thin, not self.remembers_own())
        if isinstance(hessian, str):
            return hessian
        check_sum_weights(weights, len(self.index))
        starts = np.searchsorted(self.holder, np.arange(self.workers.size + 1))  # all hold some
        spans = np.append(self._groups, self._groups[-1] + 1)[starts].tolist()
        groups = int(self._groups[-1]) + 1
        plans = [leaf_nodes(a, b, groups) for a, b in itertools.pairwise(spans)]
        nodes, given = plans[self.workers.rank], (hessian, x, weights[self._places()], thin)
        _, own = self._ask(lambda here: here.sum_hessians(*given, nodes))
        self._book_hessians(hessian, thin)
        parts = torch.stack(own or [hessian.zeros(thin)] * len(nodes))
        return hessian.answer(
            join_leaves(self.workers.exchange(plans, parts), groups), weights, thin
        )

    @override
    def inner_products(
        self, vectors: ClientVectors, multiply: Callable[[Tensor], Tensor]
    ) -> Losses | str:
        if len(self.index) * self.model.size * self.model.dtype.itemsize > MOST_BYTES:
            return "the clients' vectors do not fit into memory at once"
        return products_of_rows(spread(vectors).collect().matrix, multiply)

    @override
    def group(self) -> Workers | None:
        return self.workers if self.workers.size > 1 else None

    def guard(self, part: Part | None, work: Callable[[Part], Done]) -> Done | None:
        """Work on this process's part; if clients of any are missing, raise in all of them."""
        reasons: dict[int, str] = {}
        result = None
        try:
            result = None if part is None else work(part)
        except MissingClients as lost:
            reasons = lost.reasons
        count = self.workers.unite(torch.tensor([float(len(reasons))], device=self.workers.device))
        if count.item():
            everyone: dict[int, str] = {}
            for text in self.workers.gather_texts(json.dumps(reasons)):
                everyone |= {int(i): reason for i, reason in json.loads(text).items()}
            raise MissingClients(everyone, self.names)
        return result

    def _gather_curvature(self) -> Curvature | str:
        """Return bounds on the curvature of all clients from each process's."""
        n = len(self.names)
        own = known_curvature(self.model, n, self._local.inputs_of, self._held)
        if isinstance(own, str):
            return own
        tight = all(map(json.loads, self.workers.gather_texts(json.dumps(own.tight))))
        known = own.smoothness, own.strong_convexity
        smoothness, convexity = (self.workers.gather(b[self._held], self._held, n) for b in known)
        return Curvature(smoothness, convexity, tight, own.lowest)

    def _join(self, own: Evaluation) -> Evaluation:
        """Return the evaluation of all clients from each process's, which is empty elsewhere."""
        sizes, metrics = self._everywhere(own.sizes), {}
        for name, values in own.metrics.items():
            whole = self._everywhere(np.where(own.sizes > 0, values, 0.0))
            metrics[name] = np.where(sizes > 0, whole, np.nan)
        hits = None if own.hits is None else self._join_hits(own.hits, own.sizes, sizes)
        return replace(own, sizes=sizes.astype(np.int64), metrics=metrics, hits=hits)

    def _everywhere(self, own: Index | Losses) -> Losses:
        """Return numbers of all clients from each process's, which are zero elsewhere."""
        return self.workers.gather(own.astype(np.float64), np.arange(len(own)), len(own))

    def _join_hits(self, own: Hits, here: Index, sizes: Losses) -> Hits:
        """Return all clients' hits; those of the clients here lie where ``sizes`` puts them."""
        places = np.flatnonzero(np.repeat(here > 0, sizes.astype(np.int64)))
        correct = self.workers.gather(own.correct.astype(np.float64), places, int(sizes.sum()))
        checksums = self._everywhere(own.checksums)
        counts = torch.as_tensor(own.predicted, dtype=torch.float64, device=self.workers.device)
        predicted = self.workers.sum_in_order(counts).cpu().numpy()
        return Hits(correct > 0, checksums.astype(np.int64), predicted.astype(np.int64))

    def _places(self) -> Index:
        """Return which of the clients are here."""
        return np.flatnonzero(self.holder[self.index] == self.workers.rank)

    def _ask(self, work: Callable[[InProcessClients], Done]) -> tuple[Index, Done | None]:
        """Return which of the clients are here, and what the local engine does for them, if any."""
        places = self._places()
        here = self._local.subset(self.index[places]) if len(places) else None
        return places, self.guard(here, work)

    def _from_first(self, values: Tensor) -> Tensor:
        """Return what the first process has."""
        return self.workers.unite(values if self.workers.rank == 0 else torch.zeros_like(values))

    def _gather_own(self, places: Index) -> Tensor:
        """Return where the own parts of the clients that take part ended, in all processes."""
        rows = torch.zeros_like(self.own_rows.start[self.index])
        rows[places] = self._local.own_after()[self.index[places]]
        return self.workers.unite(rows)

    def _vectors(self, own: Any) -> DistributedVectors:
        return DistributedVectors(self, self.index, own)

    def _memory(self, vectors: ClientVectors | None) -> Tensor:
        """Return the rows of this process's clients in a memory of all clients."""
        if vectors is None:
            return self.zeros(len(self._held))
        if isinstance(vectors, DenseVectors):  # from a checkpoint
            return vectors.matrix[torch.as_tensor(self._held, device=vectors.matrix.device)]
        own = spread(vectors).own
        return self.zeros(0) if own is None else own.dense()

    def _rows(self, clients: Index) -> Tensor:
        """Return the places of clients among those of this process."""
        return torch.as_tensor(np.searchsorted(self._held, clients), device=self.model.device)
