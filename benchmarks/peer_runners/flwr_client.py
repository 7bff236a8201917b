"""The client of the Flower runner: a module of its own, so that Ray's actors can import it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from shared import BATCH, LR
from torch.nn.functional import cross_entropy
from torch_module import build_module

app = ClientApp()


@cache
def data(folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the data of all clients, mapped into memory once an actor."""
    torch.set_num_threads(1)
    parts = [np.load(Path(folder) / f"{name}.npy", mmap_mode="c") for name in ("inputs", "targets")]
    return torch.from_numpy(parts[0]), torch.from_numpy(parts[1])


@app.train()
def train(message: Message, context: Context) -> Message:
    """One shuffled pass over the client's samples."""
    config = message.content["config"]
    inputs, targets, model = *data(str(config["folder"])), str(config["model"])
    number = int(context.node_config["partition-id"])
    x, y = inputs[number], targets[number]
    state = message.content["arrays"].to_torch_state_dict()
    module = build_module(model, [value.numpy() for value in state.values()])
    optimiser = torch.optim.SGD(module.parameters(), lr=LR)
    for batch in torch.randperm(len(y)).split(BATCH[model]):
        optimiser.zero_grad()
        cross_entropy(module(x[batch]), y[batch]).backward()
        optimiser.step()
    content = {
        "arrays": ArrayRecord(module.state_dict()),
        "metrics": MetricRecord({"num-examples": len(y)}),
    }
    return Message(content=RecordDict(content), reply_to=message)
