"""Clients spread over the processes of a ``torch.distributed`` group.

Every process runs the same algorithm on the same state; each holds the samples of its own clients
and computes for them with the stacked engine. Losses are gathered, weighted sums are added up in
the order of the processes, so all of them see the same numbers and go the same way; a result
depends on the number of processes only by rounding.

Processes are started by ``torchrun`` (one machine or many) or by ``equifed run --workers N``. The
first one writes the run folder (:class:`SharedFolder`); everything that could differ between
processes (the clock) is decided there and told to the others.
"""

from __future__ import annotations

import atexit
import copy
import datetime
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from equifed.contract.arrays import Index, Losses, Weights
from equifed.contract.clients import ClientVectors, MissingClients, Moved, Traffic, check_index
from equifed.contract.curvature import Curvature
from equifed.contract.evaluation import SPLITS, Evaluation
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.data import Federation, Split
from equifed.engines.in_process import DenseVectors, InProcessVectors
from equifed.engines.loop import LoopClients
from equifed.engines.simulate import simulate
from equifed.engines.stacked.clients import MEMORY, StackedClients
from equifed.models.curvature import known_curvature
from equifed.models.flat import FlatModel, SampleLoss
from equifed.training.folder import RunFolder
from equifed.training.history import History

T = TypeVar("T")

TIMEOUT = datetime.timedelta(minutes=30)
"""How long a process waits for another before it takes it for lost."""


class WorkerLost(RuntimeError):
    """Another process of the group ended or does not answer."""


class Group:
    """The processes that work together, and the few ways in which they talk.

    Without the variables that ``torchrun`` sets it is a group of one.
    """

    def __init__(self, device: torch.device) -> None:
        if not dist.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            if "RANK" in os.environ:
                dist.init_process_group(backend, timeout=TIMEOUT)
            else:
                store = dist.HashStore()  # type: ignore[attr-defined]
                dist.init_process_group(backend, timeout=TIMEOUT, store=store, rank=0, world_size=1)
            atexit.register(_leave)
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device

    def sum_in_order(self, part: Tensor) -> Tensor:
        """Add up one tensor of every process, in the order of the processes."""
        parts = [torch.empty_like(part) for _ in range(self.size)]
        self._talk(lambda: dist.all_gather(parts, part.contiguous()))
        total = parts[0]
        for other in parts[1:]:
            total = total + other
        return total

    def union(self, part: Tensor) -> Tensor:
        """Put together tensors of which every entry is zero in all processes but one."""
        whole = part.contiguous().clone()
        self._talk(lambda: dist.all_reduce(whole))
        return whole

    def texts(self, text: str) -> list[str]:
        """Return the texts of all processes."""
        encoded = text.encode()
        lengths = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        lengths[self.rank] = len(encoded)
        lengths = self.union(lengths)
        letters = torch.zeros(self.size, int(lengths.max()), dtype=torch.uint8, device=self.device)
        letters[self.rank, : len(encoded)] = torch.tensor(
            list(encoded), dtype=torch.uint8, device=self.device
        )
        rows = self.union(letters).cpu().numpy()
        return [bytes(row[:n]).decode() for row, n in zip(rows, lengths.tolist(), strict=True)]

    def from_first(self, text: str) -> str:
        """Return the first process's text in all of them."""
        return self.texts(text if self.rank == 0 else "")[0]

    def wait(self) -> None:
        """Return when all processes have come here."""
        self._talk(dist.barrier)

    def _talk(self, exchange: Callable[[], object]) -> None:
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


class DistributedVectors:
    """Client vectors, each in the process that holds the client."""

    def __init__(
        self, clients: DistributedClients, places: Index, own: InProcessVectors | None, n: int
    ) -> None:
        self.clients, self.places, self.own, self.n = clients, places, own, n

    def weighted_sum(self, weights: Weights) -> Tensor:
        """Return sum_i weights_i v_i: each process its part, then all parts in order."""
        part = self.clients.guarded(
            lambda: None if self.own is None else self.own.weighted_sum(weights[self.places])
        )
        return self.clients.group.sum_in_order(self.clients.zeros(1)[0] if part is None else part)

    def squared_norms(self) -> Losses:
        """Return |v_i|^2 for every client."""
        part = self.clients.guarded(lambda: None if self.own is None else self.own.squared_norms())
        return self.clients.gathered(part, self.places, self.n)

    def dense(self) -> Tensor:
        """Return all vectors as the rows of one matrix, in every process."""
        rows = self.clients.zeros(self.n)
        if self.own is not None:
            rows[torch.as_tensor(self.places, device=rows.device)] = self.own.dense()
        return self.clients.group.union(rows)


class DistributedClients:
    """The stacked engine on every process of a group; arguments as for :func:`stacked`."""

    def __init__(
        self,
        data: Federation,
        model: nn.Module | str,
        loss: SampleLoss | str = "auto",
        *,
        l2: float = 0.0,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        memory: int = MEMORY,
        chunk: int | None = None,
    ) -> None:
        self.group = Group(_own_device(device))
        self.names = data.names
        self.index: Index = np.arange(len(data.names))
        self.traffic = Traffic(len(data.names))
        self._sizes = np.asarray(data.train.sizes, dtype=np.int64)
        self._holder = holders(self._sizes, self.group.size)
        if len(np.unique(self._holder)) < self.group.size:
            raise ValueError(
                f"{self.group.size} processes are more than the {len(self.names)} clients of "
                f"{data.name} can keep busy; start fewer."
            )
        self.federation = shard(data, self._holder == self.group.rank)
        self._local: StackedClients | LoopClients = simulate(
            self.federation,
            model,
            loss,
            l2=l2,
            dtype=dtype,
            device=device,
            memory=memory,
            chunk=chunk,
        )

    @property
    def model(self) -> FlatModel:
        """The model as a flat vector."""
        return self._local.model

    @property
    def sizes(self) -> Index:
        """Training samples of the clients that take part."""
        return self._sizes[self.index]

    def initial(self, stream: Stream) -> Tensor:
        """Return a freshly initialised model."""
        return self._local.initial(stream)

    def parameters(self, x: Tensor) -> dict[str, Tensor]:
        """Return the model's parameters by name and in their shapes."""
        return self._local.parameters(x)

    def losses(self, x: Tensor, stream: Stream, batch_size: int | None = None) -> Losses:
        """Return f_i(x), each from the process that holds the client."""
        places, part = self._part()
        own = self.guarded(lambda: None if part is None else part.losses(x, stream, batch_size))
        self._book(down=1, up=0, losses=1)
        return self.gathered(own, places, len(self.index))

    def value_and_gradient(
        self, x: Tensor, stream: Stream, batch_size: int | None = None
    ) -> tuple[Losses, ClientVectors]:
        """Return f_i(x) and a handle for the gradients at x."""
        places, part = self._part()
        own = self.guarded(
            lambda: None if part is None else part.value_and_gradient(x, stream, batch_size)
        )
        self._book(down=1, up=1, losses=1)
        losses = self.gathered(None if own is None else own[0], places, len(self.index))
        return losses, self._vectors(places, None if own is None else own[1])

    def local_steps(
        self,
        x: Tensor,
        work: LocalSGD,
        stream: Stream,
        *,
        control: ClientVectors | None = None,
        target: Tensor | None = None,
        slopes: Weights | None = None,
    ) -> Moved:
        """Let every process's clients do ``work`` from x."""
        assert control is None or isinstance(control, DistributedVectors)
        places, part = self._part()

        def walk() -> Moved | None:
            if part is None:
                return None
            own = None if control is None else control.own
            steep = None if slopes is None else slopes[places]
            return part.local_steps(x, work, stream, control=own, target=target, slopes=steep)

        own = self.guarded(walk)
        extra = (work.snapshot is not None) + work.average + work.mean_gradient
        self._book(down=1 + (target is not None), up=1 + extra, losses=int(work.hinge is not None))
        thresholds = None
        if work.hinge is not None:
            ends = None if own is None else own.thresholds
            thresholds = self.gathered(ends, places, len(self.index))
        wanted = {
            "displacement": True,
            "snapshot": work.snapshot is not None,
            "average": work.average,
            "mean_gradient": work.mean_gradient,
        }
        vectors = {
            kind: self._vectors(places, None if own is None else getattr(own, kind))
            for kind, asked in wanted.items()
            if asked
        }
        return Moved(steps=work.steps_for(self.sizes), thresholds=thresholds, **vectors)

    def subset(self, index: Iterable[int] | Index) -> Self:
        """Return the same engine restricted to clients ``index`` (positions in ``names``)."""
        part = copy.copy(self)
        part.index = check_index(index, len(self.names))
        return part

    def remembered(self, vectors: ClientVectors | None, index: Index) -> ClientVectors:
        """Return what clients ``index`` keep of a memory of all clients; zeros if it is None."""
        places = np.flatnonzero(self._holder[index] == self.group.rank)
        if len(places) == 0:
            return DistributedVectors(self, places, None, len(index))
        rows = self._memory(vectors)[self._rows(index[places])]
        return DistributedVectors(self, places, DenseVectors(rows), len(index))

    def remember(
        self, memory: ClientVectors | None, index: Index, vectors: ClientVectors
    ) -> ClientVectors:
        """Return the memory of all clients after those in ``index`` replaced their vector."""
        assert isinstance(vectors, DistributedVectors)
        rows = self._memory(memory).clone()
        if vectors.own is not None:
            rows[self._rows(index[vectors.places])] = vectors.own.dense()
        own = np.flatnonzero(self._holder == self.group.rank)
        return DistributedVectors(self, own, DenseVectors(rows), len(self.names))

    def evaluate(self, x: Tensor, splits: Sequence[str] = SPLITS) -> list[Evaluation]:
        """Return what the model is worth to all clients; each process measures its own."""
        return [self._gather(part) for part in self._local.evaluate(x, splits)]

    def curvature(self) -> Curvature | str:
        """Return bounds on the curvature of all clients' losses, or why none are known."""
        return known_curvature(self.model, len(self.names))

    def _gather(self, own: Evaluation) -> Evaluation:
        everywhere = np.arange(len(own.sizes))
        sizes = self.gathered(own.sizes.astype(np.float64), everywhere, len(own.sizes))
        metrics = {}
        for name, values in own.metrics.items():
            whole = self.gathered(np.where(own.sizes > 0, values, 0.0), everywhere, len(own.sizes))
            metrics[name] = np.where(sizes > 0, whole, np.nan)
        return replace(own, sizes=sizes.astype(np.int64), metrics=metrics)

    def guarded(self, work: Callable[[], T]) -> T | None:
        """Do this process's part; if clients of any process are missing, raise in all of them."""
        reasons: dict[int, str] = {}
        result = None
        try:
            result = work()
        except MissingClients as lost:
            reasons = lost.reasons
        count = self.group.union(torch.tensor([float(len(reasons))], device=self.group.device))
        if count.item():
            everyone: dict[int, str] = {}
            for text in self.group.texts(json.dumps(reasons)):
                everyone |= {int(i): reason for i, reason in json.loads(text).items()}
            raise MissingClients(everyone, self.names)
        return result

    def gathered(self, part: Losses | None, places: Index, n: int) -> Losses:
        """Return the numbers of all n clients from each process's part."""
        whole = torch.zeros(n, dtype=torch.float64, device=self.group.device)
        if part is not None:
            whole[torch.as_tensor(places, device=whole.device)] = torch.as_tensor(
                np.ascontiguousarray(part), dtype=torch.float64, device=whole.device
            )
        return self.group.union(whole).cpu().numpy()

    def zeros(self, rows: int) -> Tensor:
        """Return a matrix of zeros as wide as the model."""
        return torch.zeros(rows, self.model.size, dtype=self.model.dtype, device=self.model.device)

    def _part(self) -> tuple[Index, StackedClients | LoopClients | None]:
        """Return which of the clients are here, and the local engine on them."""
        places = np.flatnonzero(self._holder[self.index] == self.group.rank)
        return places, self._local.subset(self.index[places]) if len(places) else None

    def _vectors(self, places: Index, own: Any) -> DistributedVectors:
        return DistributedVectors(self, places, own, len(self.index))

    def _memory(self, vectors: ClientVectors | None) -> Tensor:
        """Return the rows of this process's clients in a memory of all clients."""
        own = np.flatnonzero(self._holder == self.group.rank)
        if vectors is None:
            return self.zeros(len(own))
        if isinstance(vectors, DenseVectors):  # from a checkpoint
            return vectors.matrix[torch.as_tensor(own, device=vectors.matrix.device)]
        assert isinstance(vectors, DistributedVectors)
        return self.zeros(0) if vectors.own is None else vectors.own.dense()

    def _rows(self, clients: Index) -> Tensor:
        """Return the places of clients among those of this process."""
        own = np.flatnonzero(self._holder == self.group.rank)
        return torch.as_tensor(np.searchsorted(own, clients), device=self.model.device)

    def _book(self, *, down: int, up: int, losses: int) -> None:
        vector = self.model.size * self.model.dtype.itemsize
        self.traffic.record(self.index, down=down * vector, up=up * vector + 8 * losses)


class SharedFolder(RunFolder):
    """A run folder of which the first process is the only writer."""

    def __init__(self, path: str | Path, names: Iterable[str], group: Group) -> None:
        super().__init__(path, tuple(names))
        self._group = group

    def create(self, overwrite: bool = False) -> None:
        """Make the folder with empty tables."""
        if self._group.rank == 0:
            super().create(overwrite)
        self._group.wait()

    def due(self, seconds: float) -> bool:
        """Tell in all processes whether the first one's clock says that a checkpoint is due."""
        return self._group.from_first(str(super().due(seconds))) == "True"

    def save(self, round: int, state: Any) -> None:
        """Write a checkpoint; memories of clients are collected from all processes."""
        collected = _collected(state)
        if self._group.rank == 0:
            super().save(round, collected)

    def restore(self, template: Any, owner: object) -> tuple[int, Any]:
        """Return round and state of the newest checkpoint, in all processes."""
        if self._group.rank == 0:
            super().restore(template, owner)  # cuts the tables back
        self._group.wait()
        from equifed.training import checkpoints

        round, state, _ = checkpoints.load(self.checkpoints, template, owner)
        self._group.wait()
        return round, state

    def finish(self, history: History) -> None:
        """Write the model and the summary."""
        if self._group.rank == 0:
            super().finish(history)
        self._group.wait()

    def _write(self, name: str, text: str) -> None:
        if self._group.rank == 0:
            super()._write(name, text)


def _collected(state: Any) -> Any:
    """Return a state whose distributed memories are matrices."""
    changes = {
        name: DenseVectors(value.dense())
        for name, value in vars(state).items()
        if isinstance(value, DistributedVectors)
    }
    return replace(state, **changes) if changes else state


def _own_device(device: str | torch.device) -> torch.device:
    """Return this process's own GPU where the device says only that it is one."""
    if str(device) == "cuda":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device(device)


def holders(sizes: Index, processes: int) -> Index:
    """Return the process that holds each client: consecutive clients, similar numbers of samples.

    >>> holders(np.array([10, 10, 10, 10, 40]), 2)
    array([0, 0, 0, 0, 1])
    """
    before = np.cumsum(sizes) - sizes / 2
    held = (before * processes / sizes.sum()).astype(np.int64)
    return np.asarray(np.minimum(held, processes - 1))


def shard(federation: Federation, held: np.ndarray[Any, np.dtype[np.bool_]]) -> Federation:
    """Return the federation with the samples of the held clients only; the others stay, empty."""
    part = copy.copy(federation)
    for name in SPLITS:
        split = getattr(federation, name)
        if split is not None:
            sizes = np.diff(split.offsets)
            rows = np.repeat(held, sizes)
            offsets = np.concatenate([[0], np.cumsum(np.where(held, sizes, 0))])
            kept = Split(split.inputs[rows], split.targets[rows], offsets)
            # The checks of a federation were made on the whole; a shard's empty clients are meant.
            object.__setattr__(part, name, kept)
    return part
