"""The initial model as torch modules, for the peers that take them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import nn


def torch_layers(parameters: Iterable[tuple[np.ndarray, np.ndarray]]) -> list[nn.Module]:
    """Return linear maps with these weights and biases, and ReLU between them."""
    modules: list[nn.Module] = []
    for weight, bias in parameters:
        modules += [nn.ReLU()] if modules else []
        linear = nn.Linear(weight.shape[1], weight.shape[0])
        linear.weight.data, linear.bias.data = torch.from_numpy(weight), torch.from_numpy(bias)
        modules.append(linear)
    return modules
