"""The initial model as a torch module, for the peers that take one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn


class LastState(nn.Module):
    """Embedding, LSTM, and a linear map of its last state."""

    def __init__(self, vocabulary: int, size: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size)
        self.lstm = nn.LSTM(size, hidden, batch_first=True)
        self.output = nn.Linear(hidden, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, length) to scores."""
        return self.output(self.lstm(self.embedding(tokens))[0][:, -1])


def build_module(model: str, parameters: Sequence[np.ndarray]) -> nn.Module:
    """Return the module that has these parameters: their shapes tell its layers."""
    if model == "lstm":
        sizes = (*parameters[0].shape, parameters[2].shape[1], len(parameters[-1]))
        module: nn.Module = LastState(*sizes)
    else:
        layers: list[nn.Module] = []
        for weight in parameters[::2]:
            fan_out, fan_in = weight.shape[:2]
            if weight.ndim == 4:
                layers.append(nn.Conv2d(fan_in, fan_out, weight.shape[2], padding="same"))
                layers += [nn.ReLU(), nn.MaxPool2d(2)]
            else:
                layers += [nn.Flatten(), nn.Linear(fan_in, fan_out), nn.ReLU()]
        module = nn.Sequential(*layers[:-1])
    for held, value in zip(module.parameters(), parameters, strict=True):
        held.data = torch.from_numpy(np.array(value))
    return module
