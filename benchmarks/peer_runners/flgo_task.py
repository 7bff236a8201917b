"""The task of the flgo runner, in the form that ``flgo.gen_direct_task_from_file`` reads."""

from functools import partial

import torch
from shared import given
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from torch_module import build_module

work = given()
train_data = [TensorDataset(torch.from_numpy(x), torch.from_numpy(y)) for x, y in work.batches]
val_data = test_data = None
DataLoader = partial(torch.utils.data.DataLoader, shuffle=True)


def data_to_device(batch, device):
    """Return the batch on the device."""
    return [part.to(device) for part in batch]


def eval(model, data_loader, device):
    """Return no metrics: the driver's judge evaluates."""
    return {}


def compute_loss(model, batch, device):
    """Return the mean loss of a batch."""
    inputs, targets = data_to_device(batch, device)
    return {"loss": cross_entropy(model(inputs), targets)}


def get_model():
    """Return the initial model."""
    return build_module(work.model, work.parameters)
