"""Clients spread over the processes of a ``torch.distributed`` group.

Every process runs the same algorithm on the same state, and computes for its own clients with the
stacked engine. Losses are gathered, weighted sums are added up in the order of the clients: all go
the same way, in double precision on CPUs the same as one process.
"""

from __future__ import annotations

import atexit
import copy
import datetime
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from equifed.contract import BlockMatrix, ClientVectors, Index, LocalWork, Losses, Stream, Weights
from equifed.contract.clients import Group, MissingClients
from equifed.contract.curvature import Curvature, Inexactness
from equifed.contract.evaluation import Details, Evaluation, Hits, SampleMetric
from equifed.data.federation import Federation
from equifed.engines.base import TorchClients
from equifed.engines.in_process import InProcessClients
from equifed.engines.ordered_sums import (
    DenseVectors,
    InProcessVectors,
    Node,
    group_clients,
    join_leaves,
    join_nodes,
    leaf_nodes,
    nodes_within,
)
from equifed.engines.simulate import simulate
from equifed.models.checks import load_weights
from equifed.models.curvature import LinearHessian, known_curvature
from equifed.models.losses import SampleLoss
from equifed.models.predictor import Predictor

TIMEOUT = datetime.timedelta(minutes=30)
"""How long a process waits for another before it takes it for lost."""

Part = TypeVar("Part")
Done = TypeVar("Done")


class WorkerLost(RuntimeError):
    """Another process of the group ended or does not answer."""


class Workers(Group):
    """The group that ``torchrun`` or ``equifed run --workers N`` started; else one of one."""

    def __init__(self, device: str | torch.device) -> None:
        local = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if str(device) == "cuda" else device
        self.device = torch.device(local)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # objects travel by way of the current device
        if not dist.is_initialized():
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            if "RANK" in os.environ:
                dist.init_process_group(backend, timeout=TIMEOUT)
            else:
                store = dist.HashStore()  # type: ignore[attr-defined]
                dist.init_process_group(backend, timeout=TIMEOUT, store=store, rank=0, world_size=1)
            atexit.register(_leave)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def unite(self, part: Tensor) -> Tensor:
        """Put together tensors of which every entry is zero in all processes but one."""
        whole = part.contiguous().clone()
        _talk(lambda: dist.all_reduce(whole))
        return whole

    def share(self, value: Any) -> list[Any]:
        """Return the values of all processes, in their order."""
        values = [None] * self.size
        _talk(lambda: dist.all_gather_object(values, value))
        return values

    def gather(self, part: Any, places: Index, n: int) -> Losses:
        """Return the numbers of all n clients from each process's part, an array or None."""
        whole = torch.zeros(n, dtype=torch.float64)
        if part is not None:
            whole[torch.as_tensor(places)] = torch.as_tensor(np.asarray(part, dtype=np.float64))
        return self.unite(whole.to(self.device)).cpu().numpy()

    def exchange(self, plans: list[list[Node]], own: Tensor) -> dict[Node, Tensor]:
        """Return the values of all processes' nodes from those of this one's."""
        rows = own.new_zeros(max(map(len, plans)), *own.shape[1:])
        rows[: len(own)] = own
        parts = [torch.empty_like(rows) for _ in range(self.size)]
        _talk(lambda: dist.all_gather(parts, rows))
        known: dict[Node, Tensor] = {}
        for plan, values in zip(plans, parts, strict=True):
            known |= dict(zip(plan, values, strict=False))
        return known

    @override
    def from_first(self, text: str) -> str:
        return str(self.share(text)[0])

    @override
    def wait(self) -> None:
        _talk(dist.barrier)


def _talk(exchange: Callable[[], object]) -> None:
    try:
        exchange()
    except RuntimeError as error:
        raise WorkerLost(
            "A process of the group ended or does not answer "
            f"({str(error).splitlines()[0][:120]}). Nothing up to the last checkpoint is lost: "
            "continue the run with 'equifed resume', with any number of processes."
        ) from error


def _leave() -> None:
    """End the group's threads while Python still runs: left to the exit they may abort it."""
    if dist.is_initialized():
        dist.destroy_process_group()


def assign_clients(sizes: Index, processes: int) -> Index:
    """Return the process that holds each client: consecutive groups, similar numbers of samples.

    >>> assign_clients(np.array([10, 10, 10, 10, 40]), 2)
    array([0, 0, 0, 0, 1])
    """
    groups = group_clients(sizes, processes)
    totals = np.bincount(groups, weights=sizes)
    before = np.cumsum(totals) - totals / 2
    wanted = (before * processes / totals.sum()).astype(np.int64)
    held: Index = np.minimum(wanted, processes - 1)[groups]
    if len(np.unique(held)) < processes:
        raise ValueError(
            f"{processes} processes are more than these {len(sizes)} clients can keep busy; start "
            "fewer."
        )
    return held


def cut_shard(federation: Federation, held: np.ndarray[Any, np.dtype[np.bool_]]) -> Federation:
    """Return the federation with the samples of the held clients only; the others stay, empty."""
    part = copy.copy(federation)
    for name, split in federation.splits().items():
        rows = [mine if here else mine[:0] for mine, here in zip(split.rows(), held, strict=True)]
        # The checks of a federation were made on the whole; a shard's empty clients are meant.
        object.__setattr__(part, name, split.take(rows))
    return part


class DistributedVectors(ClientVectors):
    """Client vectors, each in the process that holds the client."""

    def __init__(self, clients: DistributedClients, index: Index, own: Any) -> None:
        mine = DenseVectors(clients.zeros(0)) if own is None else own
        self.own: InProcessVectors = mine  # of this process's clients
        self.clients, self.n = clients, len(index)
        self.holders = clients.holder[index]  # in order, as clients and processes are
        self.places = np.flatnonzero(self.holders == clients.workers.rank)

    @override
    def weighted_sum(self, weights: Weights) -> Tensor:
        # Each process its part of one tree over all clients, then all parts together.
        ends = np.searchsorted(self.holders, np.arange(self.clients.workers.size + 1)).tolist()
        spans = itertools.pairwise(ends)
        plans = [list(nodes_within(a, b, self.n)) if a < b else [] for a, b in spans]
        rank = self.clients.workers.rank
        part = self.clients.guard(self.own, lambda own: own.nodes(plans[rank], weights, ends[rank]))
        rows = torch.stack(part) if part else self.clients.zeros(0)
        return join_nodes(self.clients.workers.exchange(plans, rows), weights, self.n)

    @override
    def squared_norms(self, scale: BlockMatrix | None = None) -> Losses:
        part = self.clients.guard(self.own, lambda own: own.squared_norms(scale))
        return self.clients.workers.gather(part, self.places, self.n)

    @override
    def collect(self) -> DenseVectors:
        rows = self.clients.zeros(self.n)
        rows[self.places] = self.own.dense()
        return DenseVectors(self.clients.workers.unite(rows))


def spread(vectors: ClientVectors) -> DistributedVectors:
    """Return vectors that these clients made; refuse those of others."""
    if not isinstance(vectors, DistributedVectors):
        raise TypeError(f"Vectors of another engine: {type(vectors).__name__}.")
    return vectors


class DistributedClients(TorchClients):
    """The stacked engine on every process of a group; arguments as for :func:`simulate`."""

    def __init__(
        self, data: Federation, model: nn.Module | str, loss: SampleLoss | str = "auto", *,
        device: str | torch.device = "cpu", memory: int | None = None, chunk: int | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(data)
        self.workers = Workers(device)
        self.holder = assign_clients(self._sizes, self.workers.size)
        self._held = np.flatnonzero(self.holder == self.workers.rank)
        shard = cut_shard(data, self.holder == self.workers.rank)
        options |= {"device": self.workers.device, "memory": memory, "chunk": chunk}
        self._local = simulate(shard, model, loss, **options)
        self.choice = self._local.choice
        # Where engines are chosen by measuring, all processes take the first one's.
        first: Any = self.workers.from_first(self._local.engine)
        if self._local.engine != first:
            self._local = simulate(shard, model, loss, engine=first, **options)
        self._groups = group_clients(self._sizes, self.workers.size)
        self._local.divide_as(self._sizes, self._groups)
        self.coarse = self._local.coarse
        self.model, self.own = self._local.model, self._local.own
        self.own_rows = self._local.own_rows
        if len(set(self.workers.share(self.model.digest_fixed()))) > 1:
            raise ValueError("Frozen parameters differ from process to process; seed the module.")

    @override
    def initial(self, stream: Stream) -> Tensor:
        drawn = self._local.initial(stream), self.own_rows.start
        # Every process may have drawn its own module: all take the first one's.
        first = drawn if self.workers.rank == 0 else map(torch.zeros_like, drawn)
        x, self.own_rows.start = map(self.workers.unite, first)
        return x

    @override
    def flatten(self, model: Tensor | nn.Module | Mapping[str, Tensor]) -> Tensor:
        return self._local.flatten(model)

    @override
    def group(self) -> Workers | None:
        return self.workers if self.workers.size > 1 else None

    def _places(self) -> Index:
        """Return which of the clients are here."""
        return np.flatnonzero(self.holder[self.index] == self.workers.rank)

    def _ask(self, work: Callable[[InProcessClients], Done]) -> tuple[Index, Done | None]:
        """Return which of the clients are here, and what the local engine does for them, if any."""
        places = self._places()
        here = self._local.subset(self.index[places]) if len(places) else None
        return places, self.guard(here, work)

    def guard(self, part: Part | None, work: Callable[[Part], Done]) -> Done | None:
        """Work on this process's part; if clients of any are missing, raise in all of them."""
        result, reasons = None, dict[int, str]()
        try:
            result = None if part is None else work(part)
        except MissingClients as lost:
            reasons = lost.reasons
        count = self.workers.unite(torch.tensor([float(len(reasons))], device=self.workers.device))
        if count.item():
            everyone = itertools.chain(*(lost.items() for lost in self.workers.share(reasons)))
            raise MissingClients(dict(everyone), self.names)
        return result

    @override
    def measure_losses(self, x: Tensor, stream: Stream, batch_size: int | None) -> Tensor:
        places, own = self._ask(lambda here: here.measure_losses(x, stream, batch_size))
        return torch.as_tensor(self.workers.gather(own, places, len(self.index)))

    @override
    def differentiate(
        self, x: Tensor, stream: Stream, batch_size: int | None
    ) -> tuple[Losses, ClientVectors]:
        places, own = self._ask(lambda here: here.differentiate(x, stream, batch_size))
        losses, gradients = own or (None, None)
        vectors = DistributedVectors(self, self.index, gradients)
        return self.workers.gather(losses, places, len(self.index)), vectors

    @override
    def move(
        self, x: Tensor, work: LocalWork, stream: Stream, control: ClientVectors | None,
        target: Tensor | None, slopes: Weights | None,
    ) -> tuple[Mapping[str, ClientVectors], Losses | None]:  # fmt: skip
        kept = None if control is None else spread(control).own
        some = None if slopes is None else slopes[self._places()]
        places, own = self._ask(lambda here: here.move(x, work, stream, kept, target, some))
        if self.remembers_own():
            rows = torch.zeros_like(self.own_rows.start[self.index])
            rows[places] = self._local.own_after()[self.index[places]]
            self.own_rows.put(self.index, self.workers.unite(rows))
        found, thresholds = own or ({}, None)
        if work.hinge is not None:
            thresholds = self.workers.gather(thresholds, places, len(self.index))
        vectors = {k: DistributedVectors(self, self.index, found.get(k)) for k in work.results}
        return vectors, thresholds

    @override
    def remembered(self, vectors: ClientVectors | None, index: Index) -> ClientVectors:
        here = index[self.holder[index] == self.workers.rank]
        rows = self._memory(vectors)[np.searchsorted(self._held, here)]
        return DistributedVectors(self, index, DenseVectors(rows))

    @override
    def remember(
        self, memory: ClientVectors | None, index: Index, vectors: ClientVectors
    ) -> ClientVectors:
        rows, new = self._memory(memory).clone(), spread(vectors)
        rows[np.searchsorted(self._held, index[new.places])] = new.own.dense()
        return DistributedVectors(self, np.arange(len(self.names)), DenseVectors(rows))

    def _memory(self, vectors: ClientVectors | None) -> Tensor:
        """Return the rows of this process's clients in a memory of all clients."""
        if vectors is None:
            return self.zeros(len(self._held))
        if isinstance(vectors, DenseVectors):  # from a checkpoint
            return vectors.matrix[self._held]
        return spread(vectors).own.dense()

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
        return list(itertools.chain(*self.workers.share(self._local.find_one_class())))

    @override
    def inexactness(self, x: Tensor) -> Inexactness | str | None:
        own = self._local.inexactness(x)
        if not isinstance(own, Inexactness):
            return own
        return Inexactness(self._everywhere(own.losses), self._everywhere(own.gradients))

    @override
    def find_curvature(self) -> Curvature | str:
        held, n = self._held, len(self.names)
        own = known_curvature(self.model, n, self._local.inputs_of, held)
        if isinstance(own, str):
            return own
        smoothness = self.workers.gather(own.smoothness[held], held, n)
        convexity = self.workers.gather(own.strong_convexity[held], held, n)
        return Curvature(smoothness, convexity, all(self.workers.share(own.tight)), own.lowest)

    @override
    def add_hessians(
        self, hessian: LinearHessian, x: Tensor, weights: Weights, thin: Tensor | None
    ) -> Tensor:
        starts = np.searchsorted(self.holder, np.arange(self.workers.size + 1))  # all hold some
        spans = np.append(self._groups, self._groups[-1] + 1)[starts].tolist()
        groups = int(self._groups[-1]) + 1
        plans = [leaf_nodes(a, b, groups) for a, b in itertools.pairwise(spans)]
        nodes, given = plans[self.workers.rank], (hessian, x, weights[self._places()], thin)
        _, own = self._ask(lambda here: here.sum_hessians(*given, nodes))
        parts = torch.stack(own or [hessian.zeros(thin)] * len(nodes))
        return join_leaves(self.workers.exchange(plans, parts), groups)

    @override
    def predictor(self, x: Tensor) -> Predictor:
        told = self._local.predictor(x)
        if self.own is None:
            return told
        own = self.own_parameters(self.rows_of_own(x))  # every process has those of its clients
        return replace(told, module=load_weights(told.module, self.parameters(x)), own=own)

    @override
    def evaluate(self, *given: Any, **named: Any) -> list[Evaluation]:
        return [self._join(part) for part in self._local.evaluate(*given, **named)]

    @override
    def describe(self, x: Tensor, split: str, metrics: Sequence[SampleMetric]) -> Details | None:
        parts = self.workers.share(self._local.describe(x, split, metrics))
        known = [part.clients for part in parts if part is not None]
        if not known:
            return None
        clients = (next(filter(None, found), None) for found in zip(*known, strict=True))
        return Details(split, tuple(clients))

    def _join(self, own: Evaluation) -> Evaluation:
        """Return the evaluation of all clients from each process's, which is empty elsewhere."""
        sizes, metrics = self._everywhere(own.sizes).astype(np.int64), {}
        for name, values in own.metrics.items():
            whole = self._everywhere(np.where(own.sizes > 0, values, 0.0))
            metrics[name] = np.where(sizes > 0, whole, np.nan)
        hits = own.hits
        if hits is not None:
            places = np.flatnonzero(np.repeat(own.sizes > 0, sizes))
            correct = self.workers.gather(hits.correct, places, int(sizes.sum())) > 0
            hits = Hits(correct, self._everywhere(hits.checksums).astype(np.int64))
        return replace(own, sizes=sizes, metrics=metrics, hits=hits)

    def _everywhere(self, own: Index | Losses) -> Losses:
        """Return the sums of all processes' numbers, most of them zero in all but one."""
        return self.workers.gather(own, np.arange(len(own)), len(own))
