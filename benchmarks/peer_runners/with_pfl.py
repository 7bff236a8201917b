"""FedAvg with pfl's ``SimulatedBackend``, in one process or in one process a core."""

from __future__ import annotations

import os
import subprocess
import sys

if sys.argv[4:] == ["processes"] and "RANK" not in os.environ:
    count = os.environ["OMP_NUM_THREADS"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={count}", *sys.argv]
    raise SystemExit(subprocess.call(command, env=os.environ | {"OMP_NUM_THREADS": "1"}))

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from shared import LR, Turn, given
from torch import nn
from torch.nn.functional import cross_entropy
from torch_module import build_module

FIRST = int(os.environ.get("RANK", "0")) == 0


class Scores(nn.Module):
    """The module, with the two methods that pfl asks for."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs):
        """Return the module's scores."""
        return self.module(inputs)

    def loss(self, inputs, targets):
        """Return the mean loss of a batch."""
        return cross_entropy(self(inputs), targets)

    def metrics(self, inputs, targets):
        """Return the loss as a metric."""
        with torch.no_grad():
            total = cross_entropy(self(inputs), targets, reduction="sum")
        return {"loss": Weighted(total.item(), len(targets))}


class Turns(TrainingProcessCallback):
    """Between two rounds: stop the clock, answer, wait for the next turn."""

    def __init__(self) -> None:
        self.done = 0

    def wait(self) -> None:
        """Start all processes together once the driver says so."""
        self.turn = Turn() if FIRST else None
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        if self.turn:
            self.turn.restart()

    def on_train_begin(self, *, model) -> Metrics:
        """Wait for the first turn."""
        self.wait()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        """Answer, and wait for the next turn if there is one."""
        if self.turn:
            self.turn.stop()
            held = model.pytorch_model.parameters()
            self.turn.answer(work, (p.detach().numpy() for p in held))
        self.done += 1
        if self.done < work.rounds:
            self.wait()
        return False, Metrics()


work = given()
data = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in work.batches]


def shuffled(user: int) -> PyTorchTensorDataset:
    """Return the data of a client in a new order."""
    order = torch.randperm(len(data[user][1]))
    return PyTorchTensorDataset([part[order] for part in data[user]])


module = Scores(build_module(work.model, work.parameters))
users = FederatedDataset(shuffled, get_user_sampler("minimize_reuse", range(len(data))))
FederatedAveraging().run(
    NNAlgorithmParams(
        central_num_iterations=work.rounds,
        evaluation_frequency=10**9,  # evaluates before the first round alone, which is not timed
        train_cohort_size=len(data),
        val_cohort_size=0,
    ),
    SimulatedBackend(training_data=users, val_data=users, postprocessors=[WeightByUser()]),
    PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0)),
    NNTrainHyperParams(local_batch_size=work.batch, local_num_epochs=1, local_learning_rate=LR),
    callbacks=[Turns()],
)
