"""In which precision matrices are multiplied."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

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
