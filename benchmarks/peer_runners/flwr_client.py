"""The client of the Flower runner: a module of its own, so that Ray's actors can import it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from shared import BATCH, LR
from torch import nn
from torch.nn.functional import cross_entropy

app = ClientApp()


@cache
def data(folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the data of all clients, mapped into memory once an actor."""
    torch.set_num_threads(1)
    parts = [np.load(Path(folder) / f"{name}.npy", mmap_mode="c") for name in ("inputs", "targets")]
    return torch.from_numpy(parts[0]), torch.from_numpy(parts[1])


def module_of(state: dict[str, torch.Tensor]) -> nn.Module:
    """Return the module whose parameters are these."""
    weights = [value for key, value in state.items() if key.endswith("weight")]
    layers: list[nn.Module] = []
    for weight in weights:
        layers += [nn.ReLU()] if layers else []
        layers.append(nn.Linear(weight.shape[1], weight.shape[0]))
    module = nn.Sequential(*layers)
    module.load_state_dict(state)
    return module


@app.train()
def train(message: Message, context: Context) -> Message:
    """One shuffled pass over the client's samples."""
    inputs, targets = data(str(message.content["config"]["folder"]))
    number = int(context.node_config["partition-id"])
    x, y = inputs[number], targets[number]
    module = module_of(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(module.parameters(), lr=LR)
    for batch in torch.randperm(len(y)).split(BATCH):
        optimiser.zero_grad()
        cross_entropy(module(x[batch]), y[batch]).backward()
        optimiser.step()
    content = {
        "arrays": ArrayRecord(module.state_dict()),
        "metrics": MetricRecord({"num-examples": len(y)}),
    }
    return Message(content=RecordDict(content), reply_to=message)
