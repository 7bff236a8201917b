"""Threads and memory that stay from round to round: both are dear to get from the system."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import lru_cache
from typing import Literal, TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")
Result = TypeVar("Result")

ALIGNED = 64
"""Bytes: where rows of models begin. Matrix libraries take other paths for other addresses; with
equal ones a client's numbers have the same bits wherever it stands in a chunk."""

SMALL = 1 << 20
"""Matrices up to this size, in bytes, are left to the allocator, which keeps such pieces itself."""


def map_in_threads(
    function: Callable[[Item], Result], items: Sequence[Item], together: bool
) -> list[Result]:
    """Return the function's results in the order of the items, the same bits for any threads."""
    threads = torch.get_num_threads()
    if not together or threads == 1 or len(items) < threads:
        return [function(item) for item in items]
    # Here for the matrix library, which counts its threads for all callers; in every thread for
    # OpenMP, which counts them for each.
    torch.set_num_threads(1)
    try:
        pool = _threads(threads, os.getpid())
        futures = [pool.submit(function, item) for item in items]
        try:
            return [future.result() for future in futures]
        finally:  # after an error nobody goes on behind the caller's back
            for future in futures:
                future.cancel()
            wait(futures)
    finally:
        torch.set_num_threads(threads)


@lru_cache(maxsize=1)
def _threads(count: int, process: int) -> ThreadPoolExecutor:
    """Return so many threads, all of them started; a forked process has none of its parent's."""
    pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))
    meeting = threading.Barrier(count)
    list(pool.map(lambda _: meeting.wait(), range(count)))
    return pool


class Workspace:
    """Memory for matrices of client vectors, given out again when nobody has them any more.

    >>> workspace, like = Workspace(1 << 30), torch.zeros(1 << 19)
    >>> first = empty_rows(2, like, workspace)
    >>> place = first.data_ptr()
    >>> del first
    >>> empty_rows(2, like, workspace).data_ptr() == place
    True
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._free: dict[int, Tensor] = {}  # by address: blocks come back at any moment

    def empty(self, shape: tuple[int, int], like: Tensor) -> Tensor:
        """Return a matrix to be filled, of the type and in the place of ``like``."""
        size = shape[0] * shape[1] * like.element_size()
        lendable = like.device.type == "cpu" and like.dtype in (torch.float32, torch.float64)
        if not lendable or size <= SMALL:
            return like.new_empty(shape)
        block = self._take(size)
        # A tensor of an array holds that array until its last view is gone: then comes the block.
        array = block.numpy()
        weakref.finalize(array, _give_back, weakref.ref(self), block).atexit = False
        return torch.from_numpy(array)[:size].view(like.dtype).view(shape)

    def _take(self, size: int) -> Tensor:
        """Return the smallest free block that is large enough, but not much too large, or new."""
        fits = [(b.nbytes, k) for k, b in list(self._free.items()) if size <= b.nbytes <= 2 * size]
        block = self._free.pop(min(fits)[1], None) if fits else None
        return torch.empty(size, dtype=torch.uint8) if block is None else block

    def give_back(self, block: Tensor) -> None:
        """Keep a block for later, and let go of the oldest ones beyond the bound."""
        self._free[block.data_ptr()] = block
        while sum(b.nbytes for b in list(self._free.values())) > self._most:
            self._free.pop(next(iter(list(self._free))), None)


def _give_back(workspace: weakref.ref[Workspace], block: Tensor) -> None:
    found = workspace()
    if found is not None:
        found.give_back(block)


def empty_rows(count: int, like: Tensor, workspace: Workspace | None = None) -> Tensor:
    """Return a matrix to be filled, with as many columns as ``like`` and aligned rows."""
    columns = like.shape[-1]
    width = row_bytes(columns, like.dtype) // like.element_size()
    shape = count, width
    new = like.new_empty(shape) if workspace is None else workspace.empty(shape, like)
    return new.narrow(1, 0, columns)


def row_bytes(columns: int, dtype: torch.dtype) -> int:
    """Return the memory of one aligned row."""
    return -(-columns * dtype.itemsize // ALIGNED) * ALIGNED


Precision = Literal["full", "tf32", "bf16"]
"""Of matrix products on a GPU: the model's own, or with factors rounded to 10 or 7 bits."""


@contextmanager
def products_in(precision: Precision, device: torch.device) -> Iterator[None]:
    """Multiply matrices in that precision for a while."""
    if precision == "bf16":
        with torch.autocast(device.type, torch.bfloat16):
            yield
    elif precision == "full" and device.type == "cuda":  # convolutions would take tf32 by default
        cudnn = torch.backends.cudnn
        kept = {"enabled": cudnn.enabled, "benchmark": cudnn.benchmark}
        with cudnn.flags(**kept, deterministic=cudnn.deterministic, allow_tf32=False):
            yield
    elif precision == "tf32":
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
    else:
        yield
