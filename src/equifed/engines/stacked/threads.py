"""Chunks of clients on several processor cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(
    function: Callable[[Item], Result], items: Sequence[Item], together: bool
) -> list[Result]:
    """Return the function's results in the order of the items.

    Small batched products gain little from being divided among cores; whole chunks of clients gain
    all there is. If they may run ``together`` and there are at least as many as torch has threads,
    every thread takes one after the other, on a core of its own. Nothing depends on who is ready
    first, so results are the same bit for bit.

    >>> in_threads(abs, [-1, -2, -3, -4], together=True)
    [1, 2, 3, 4]
    """
    threads = torch.get_num_threads()
    if not together or threads == 1 or len(items) < threads:
        return [function(item) for item in items]
    with one_core_each(threads), ThreadPoolExecutor(threads, initializer=_single) as pool:
        return list(pool.map(function, items))


def _single() -> None:
    """Keep OpenMP, which counts its threads for each caller, on this core."""
    torch.set_num_threads(1)


@contextmanager
def one_core_each(threads: int) -> Iterator[None]:
    """Keep the matrix library, which counts its threads for all callers, on the caller's core."""
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
