"""FedAvg with equifed: the engine ``loop``, or the one that ``auto`` chooses."""

from __future__ import annotations

import os
import sys

import numpy as np
import torch
from shared import LR, Turn, given

from equifed.algorithms.fedavg import FedAvg
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.data import Federation, Split
from equifed.engines.simulate import simulate
from equifed.models.architectures import build
from equifed.models.losses import cross_entropy

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
work = given()
count, samples, *shape = work.inputs.shape
split = Split(
    work.inputs.reshape(-1, *shape),
    work.targets.reshape(-1),
    np.arange(count + 1, dtype=np.int64) * samples,
)
names = tuple(f"client {i}" for i in range(count))
data = Federation("random", names, split, classes=len(work.parameters[-1]))
module = build(work.model, shape, data.classes)
clients = simulate(data, module, cross_entropy, engine=sys.argv[4])
steps = samples // work.batch
algorithm = FedAvg(LocalSGD(lr=LR, steps=steps, batch_size=work.batch), weighting="uniform")
start = np.concatenate([part.ravel() for part in work.parameters])
state = algorithm.init(clients, torch.from_numpy(start))
for i in range(work.rounds):
    turn = Turn()
    state, _ = algorithm.round(state, clients, Stream(0).at("round", i))
    turn.stop()
    parts = np.split(state.x.numpy(), np.cumsum([p.size for p in work.parameters])[:-1])
    shaped = zip(parts, work.parameters, strict=True)
    turn.answer(work, (part.reshape(like.shape) for part, like in shaped))
