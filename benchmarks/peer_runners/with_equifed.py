"""FedAvg with equifed: the engine ``stacked`` or ``loop``."""

from __future__ import annotations

import os
import sys

import numpy as np
import torch
from shared import BATCH, LR, STEPS, Turn, given

from equifed.algorithms.fedavg import FedAvg
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.data import Federation, Split
from equifed.engines.loop import LoopClients
from equifed.engines.stacked.clients import StackedClients
from equifed.models.architectures import build
from equifed.models.losses import cross_entropy

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
work = given()
count, samples, features = work.inputs.shape
split = Split(
    work.inputs.reshape(-1, features),
    work.targets.reshape(-1),
    np.arange(count + 1, dtype=np.int64) * samples,
)
names = tuple(f"client {i}" for i in range(count))
data = Federation("random", names, split, classes=len(work.layers[-1][1]))
engine = {"stacked": StackedClients, "loop": LoopClients}[sys.argv[4]]
module = build("mlp" if len(work.layers) > 1 else "logistic", (features,), data.classes)
clients = engine(data, module, cross_entropy)
algorithm = FedAvg(LocalSGD(lr=LR, steps=STEPS, batch_size=BATCH), weighting="uniform")
start = np.concatenate([part.ravel() for layer in work.layers for part in layer])
state = algorithm.init(clients, torch.from_numpy(start))
for i in range(work.rounds):
    turn = Turn()
    state, _ = algorithm.round(state, clients, Stream(0).at("round", i))
    turn.stop()
    layers, first = [], 0
    for weight, bias in work.layers:
        flat = state.x[first : (first := first + weight.size + bias.size)].numpy()
        layers.append((flat[: weight.size].reshape(weight.shape), flat[weight.size :]))
    turn.answer(work, layers)
