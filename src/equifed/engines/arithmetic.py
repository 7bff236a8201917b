"""How numbers are computed: on which threads, and products in which precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Literal, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

Precision = Literal["full", "tf32", "bf16"]
"""Of matrix products on a GPU: the model's own, or with factors rounded to 10 or 7 bits."""


def map_in_threads(
    function: Callable[[Item], Result], items: Sequence[Item], together: bool
) -> list[Result]:
    """Return the function's results in the order of the items.

    Small batched products gain little from being divided among cores; whole chunks of clients gain
    all there is. If they may run ``together`` and there are at least as many as torch has threads,
    every thread takes one after the other, on a core of its own. Nothing depends on who is ready
    first, so results are the same bit for bit.

    >>> map_in_threads(abs, [-1, -2, -3, -4], together=True)
    [1, 2, 3, 4]
    """
    threads = torch.get_num_threads()
    if not together or threads == 1 or len(items) < threads:
        return [function(item) for item in items]
    # Here for the matrix library, which counts its threads for all callers; in every thread for
    # OpenMP, which counts them for each.
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(function, items))
    finally:
        torch.set_num_threads(threads)


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
