"""What clients keep from round to round, in a file: control variates, multipliers, last updates.

A memory of n clients and d parameters is n d numbers, however few take part in a round. In a file
only those have a row who ever took part, and a round reads and writes the rows of its own clients.
States stay values: a memory that is replaced keeps its rows until nobody holds it any more.
"""

from __future__ import annotations

import tempfile
import weakref
from dataclasses import dataclass
from typing import Literal, NoReturn, get_args

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from equifed.contract.arrays import Index, Weights
from equifed.contract.vectors import ClientVectors

RememberOn = Literal["memory", "disk"]
"""Where clients keep vectors from round to round."""

ABSENT = -1


def check_remember_on(where: str) -> None:
    """Refuse another place."""
    if where not in get_args(RememberOn):
        raise ValueError(f"remember_on must be 'memory' or 'disk', got {where!r}.")


class RowMemory(ClientVectors):
    """A memory of clients whose vectors are rows somewhere, or zero."""

    @override
    def weighted_sum(self, weights: Weights) -> NoReturn:
        raise TypeError("Ask clients.remembered(memory, index) for a handle first.")

    @override
    def squared_norms(self) -> NoReturn:
        raise TypeError("Ask clients.remembered(memory, index) for a handle first.")

    def take(self, index: Index) -> Tensor:
        """Return the vectors of clients ``index`` as the rows of a matrix."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class SeenVectors(RowMemory):
    """The same as a checkpoint holds it: the clients that ever took part, and their vectors."""

    clients: Index
    rows: Tensor

    @override
    def take(self, index: Index) -> Tensor:
        out = self.rows.new_zeros(len(index), self.rows.shape[1])
        if len(self.clients):
            places = np.minimum(np.searchsorted(self.clients, index), len(self.clients) - 1)
            there = np.flatnonzero(self.clients[places] == index)
            out[torch.as_tensor(there)] = self.rows[torch.as_tensor(places[there])]
        return out


class FileVectors(RowMemory):
    """Vectors in a file; ``slots`` (n,) says where every client's is, or that it has none."""

    def __init__(self, file: RowFile, slots: Index) -> None:
        self._file, self.slots = file, slots
        used = slots[slots != ABSENT]
        file.hold(used)
        weakref.finalize(self, file.let_go, used).atexit = False

    @override
    def take(self, index: Index) -> Tensor:
        return self._file.read(self.slots[index])

    def collect(self) -> SeenVectors:
        """Return what a checkpoint holds."""
        clients = np.flatnonzero(self.slots != ABSENT)
        return SeenVectors(clients, self.take(clients))


class RowFile:
    """Rows of one width in a temporary file, which goes with the process.

    Parameters
    ----------
    like : Tensor (..., d)
        Precision and width of the rows.

    Examples
    --------
    >>> file = RowFile(torch.zeros(2))
    >>> first = file.replace(None, 3, np.array([1]), torch.tensor([[1.0, 2.0]]))
    >>> second = file.replace(first, 3, np.array([1, 2]), torch.tensor([[3.0, 4.0], [5.0, 6.0]]))
    >>> first.take(np.array([0, 1])).tolist(), second.take(np.array([1, 2])).tolist()
    ([[0.0, 0.0], [1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]])
    """

    def __init__(self, like: Tensor) -> None:
        self._empty = torch.zeros(0, like.shape[-1], dtype=like.dtype)
        self._file = tempfile.TemporaryFile(prefix="equifed-")  # noqa: SIM115 - closed with this
        weakref.finalize(self, self._file.close)
        self._holders = np.zeros(0, dtype=np.int64)
        self._free: list[int] = []

    @property
    def slots(self) -> int:
        """Rows that the file has room for."""
        return len(self._holders)

    def replace(
        self, memory: ClientVectors | None, n: int, index: Index, rows: Tensor
    ) -> FileVectors:
        """Return the memory of n clients after those in ``index`` replaced their vectors."""
        if isinstance(memory, FileVectors) and memory._file is self:
            slots = memory.slots.copy()
        else:
            slots = np.full(n, ABSENT, dtype=np.int64)
            if memory is not None:  # from a checkpoint, or of another engine
                kept = self._adopt(memory, n)
                slots[kept.clients] = self._write(kept.rows)
        slots[index] = self._write(rows)
        return FileVectors(self, slots)

    def _adopt(self, memory: ClientVectors, n: int) -> SeenVectors:
        if isinstance(memory, FileVectors):
            return memory.collect()
        if isinstance(memory, SeenVectors):
            return memory
        matrix = getattr(memory, "matrix", None)
        if matrix is None:
            raise TypeError(f"A memory of client vectors cannot be a {type(memory).__name__}.")
        return SeenVectors(np.arange(n), matrix)

    def read(self, slots: Index) -> Tensor:
        """Return rows; zeros where there is none."""
        out = torch.zeros(len(slots), self._empty.shape[1], dtype=self._empty.dtype)
        into = out.view(torch.uint8).numpy()
        for k, slot in enumerate(slots.tolist()):
            if slot != ABSENT:
                self._file.seek(slot * into.shape[1])
                if self._file.readinto(into[k].data) != into.shape[1]:
                    raise OSError("The file of the clients' vectors is shorter than it was.")
        return out

    def _write(self, rows: Tensor) -> Index:
        """Write rows where there is room, and return where."""
        more = len(rows) - len(self._free)
        if more > 0:
            self._free += range(self.slots, self.slots + more)
            self._holders = np.concatenate([self._holders, np.zeros(more, dtype=np.int64)])
        slots = np.array([self._free.pop() for _ in range(len(rows))], dtype=np.int64)
        data = rows.detach().to("cpu").contiguous().view(torch.uint8).numpy()
        for slot, row in zip(slots.tolist(), data, strict=True):
            self._file.seek(slot * len(row))
            self._file.write(row.data)
        self._file.flush()  # a full disk says so here
        return slots

    def hold(self, slots: Index) -> None:
        """Keep rows for one more memory."""
        self._holders[slots] += 1

    def let_go(self, slots: Index) -> None:
        """Keep rows for one memory less; those that nobody holds are written over."""
        self._holders[slots] -= 1
        self._free += slots[self._holders[slots] == 0].tolist()
