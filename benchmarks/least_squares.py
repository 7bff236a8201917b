"""Full-gradient local steps on least squares: Gram matrices against passes over the data.

    python -m benchmarks.least_squares [--threads 1]

100 local steps of every client in float64; all paths must end at the same models.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from benchmarks.timing import best_times, table
from tests.problems import regression
from torch import nn

from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.engines.stacked.clients import StackedClients
from equifed.models.losses import squared


def compare(clients: int, samples: int, features: int, lr: float) -> None:
    data, module = regression([samples] * clients, features), nn.Linear(features, 1)
    make = partial(StackedClients, data, module, squared, dtype=torch.float64)
    engines = {"Gram matrices": make(), "written out": make(), "torch.func": make(fast=False)}
    engines["written out"].least_squares = None
    x, work = engines["torch.func"].initial(Stream(0)), LocalSGD(lr=lr, steps=100)
    calls = {name: partial(e.local_steps, x, work, Stream(0)) for name, e in engines.items()}
    ends = {name: call().displacement.dense() for name, call in calls.items()}
    for name, end in ends.items():
        torch.testing.assert_close(end, ends["torch.func"], rtol=1e-10, atol=1e-12, msg=name)
    title = f"\n{clients} clients, {samples} samples, {features} features, 100 local steps"
    print(table(title, best_times(calls, turns=7), "Gram matrices"))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads())
    torch.set_num_threads(arguments.parse_args().threads)
    compare(clients=100, samples=500, features=50, lr=0.01)
    compare(clients=5, samples=100, features=10, lr=0.01)


if __name__ == "__main__":
    main()
