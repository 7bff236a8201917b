"""Pairs of engines on one federation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from equifed.data.federation import Federation
from equifed.engines.loop import LoopClients
from equifed.engines.stacked.clients import StackedClients


def engines(
    federation: Federation,
    module: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    l2: float = 0.1,
    **options: int,
) -> tuple[LoopClients, StackedClients]:
    """The reference and the engine under test, in float64."""
    reference = LoopClients(federation, module, loss, l2=l2, dtype=torch.float64)
    return reference, StackedClients(
        federation, module, loss, l2=l2, dtype=torch.float64, **options
    )


def start(clients: LoopClients, seed: int = 3) -> Tensor:
    """A random model."""
    draw = np.random.default_rng(seed)
    return torch.as_tensor(0.5 * draw.normal(size=clients.model.size))
