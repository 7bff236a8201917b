"""The processes of a ``torch.distributed`` group, and the few ways in which they talk."""

from __future__ import annotations

import atexit
import copy
import datetime
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from equifed.contract.arrays import Index, Losses
from equifed.contract.clients import Group
from equifed.contract.evaluation import SPLITS
from equifed.data import Federation, Split
from equifed.engines.ordered_sums import Node, group_clients

TIMEOUT = datetime.timedelta(minutes=30)
"""How long a process waits for another before it takes it for lost."""


class WorkerLost(RuntimeError):
    """Another process of the group ended or does not answer."""


class Workers(Group):
    """The group that ``torchrun`` or ``equifed run --workers N`` has started.

    Without the variables that these set it is a group of one.

    Parameters
    ----------
    device : str or torch.device
        Where this process computes; ``"cuda"`` is a GPU of its own.
    """

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

    def sum_in_order(self, part: Tensor) -> Tensor:
        """Add up one tensor of every process, in the order of the processes."""
        parts = self.gather_tensors(part)
        total = parts[0]
        for other in parts[1:]:
            total = total + other
        return total

    def gather_tensors(self, part: Tensor) -> list[Tensor]:
        """Return the tensors of all processes, which have one shape."""
        parts = [torch.empty_like(part) for _ in range(self.size)]
        _talk(lambda: dist.all_gather(parts, part.contiguous()))
        return parts

    def unite(self, part: Tensor) -> Tensor:
        """Put together tensors of which every entry is zero in all processes but one."""
        whole = part.contiguous().clone()
        _talk(lambda: dist.all_reduce(whole))
        return whole

    def gather_texts(self, text: str) -> list[str]:
        """Return the texts of all processes."""
        texts = [""] * self.size
        _talk(lambda: dist.all_gather_object(texts, text))
        return texts

    def gather(self, part: Losses | None, places: Index, n: int) -> Losses:
        """Return the numbers of all n clients from each process's part."""
        whole = torch.zeros(n, dtype=torch.float64, device=self.device)
        if part is not None:
            whole[torch.as_tensor(places, device=whole.device)] = torch.as_tensor(
                np.ascontiguousarray(part), dtype=torch.float64, device=whole.device
            )
        return self.unite(whole).cpu().numpy()

    def exchange(self, plans: list[list[Node]], own: Tensor) -> dict[Node, Tensor]:
        """Return the values of all processes' nodes from those of this one's."""
        rows = own.new_zeros(max(map(len, plans)), *own.shape[1:])
        rows[: len(own)] = own
        known: dict[Node, Tensor] = {}
        for plan, values in zip(plans, self.gather_tensors(rows), strict=True):
            known |= dict(zip(plan, values, strict=False))
        return known

    @override
    def from_first(self, text: str) -> str:
        return self.gather_texts(text if self.rank == 0 else "")[0]

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
    for name in SPLITS:
        split = getattr(federation, name)
        if split is not None:
            sizes = np.diff(split.offsets)
            rows = np.repeat(held, sizes)
            offsets = np.concatenate([[0], np.cumsum(np.where(held, sizes, 0))])
            groups = None if split.groups is None else split.groups[rows]
            kept = Split(split.inputs[rows], split.targets[rows], offsets, groups)
            # The checks of a federation were made on the whole; a shard's empty clients are meant.
            object.__setattr__(part, name, kept)
    return part
