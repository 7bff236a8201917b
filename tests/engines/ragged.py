"""Small ragged federations and pairs of engines on them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from equifed.data.federation import Federation
from equifed.engines.loop import LoopClients
from equifed.engines.stacked.clients import StackedClients

SIZES = (1, 4, 7, 2, 9)


def classification(
    sizes: tuple[int, ...] = SIZES, shape: tuple[int, ...] = (3,), classes: int = 3, seed: int = 0
) -> Federation:
    """Clients of these sizes with random features and labels."""
    draw = np.random.default_rng(seed)
    return Federation.from_clients(
        {
            f"c{i}": (draw.normal(size=(m, *shape)), draw.integers(classes, size=m))
            for i, m in enumerate(sizes)
        },
        classes=classes,
    )


def regression(
    sizes: tuple[int, ...] = SIZES, features: int = 3, outputs: int = 1, seed: int = 0
) -> Federation:
    """Clients of these sizes with random features and real targets."""
    draw = np.random.default_rng(seed)
    shape = () if outputs == 1 else (outputs,)
    return Federation.from_clients(
        {
            f"c{i}": (draw.normal(size=(m, features)), draw.normal(size=(m, *shape)))
            for i, m in enumerate(sizes)
        }
    )


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
