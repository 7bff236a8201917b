"""What the L2 penalty is about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

Penalise: TypeAlias = Literal["all", "weights"]
"""Every trained parameter, or all but those whose name begins with ``bias``."""


def mark_penalised(penalise: Penalise, shapes: Mapping[str, torch.Size]) -> Tensor | None:
    """Return 1 for every number that is penalised and 0 for biases; None if all are.

    >>> shapes = {"0.weight": torch.Size([1, 2]), "0.bias": torch.Size([1])}
    >>> mark_penalised("weights", shapes), mark_penalised("all", shapes)
    (tensor([1., 1., 0.]), None)
    """
    if penalise not in get_args(Penalise):
        raise ValueError(f"penalise is 'all' or 'weights', got {penalise!r}.")
    free = {name: name.rpartition(".")[2].startswith("bias") for name in shapes}
    if penalise == "all" or not any(free.values()):
        return None
    return torch.cat([torch.full((s.numel(),), 1.0 - free[name]) for name, s in shapes.items()])
