"""A CNN under differential privacy of whole clients: what it costs with 300 of them.

    python -m benchmarks.client_privacy [--rounds 15] [--clients 300] [--rows 60] [--seeds 5]

Fashion-MNIST (from ``EQUIFED_DATA``) divided at random among equal clients; FedAvg with equal
weights beside :class:`equifed.PrivateFedAvg` at epsilon 10,000 (clipping alone), 8, 3 and 1 (delta
1e-5, one client replaced), the same rounds, local steps, clipping and seed. All clients take part
in every round. The number of clients was chosen on seed 100, among 100, 300 and 1,000.

Prints test accuracy (mean and deviation over seeds of start, noise and steps), and the length of
the noise in the model's step beside the clipping bound: one that is longer than what clients agree
on cannot be learnt through.
"""

from __future__ import annotations

import argparse
import math
import time

import numpy as np
from torch import nn

import equifed as ef
from equifed.contract.algorithm import AnyAlgorithm

WORK = ef.LocalSGD(lr=0.5, steps=3)


def small_cnn() -> nn.Module:
    """Return a CNN of 2,218 parameters: noise grows with the root of their number."""
    layers = [nn.AvgPool2d(2), nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(200, 10))


def main() -> None:
    """Train all and print a Markdown table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clients", type=int, default=300)
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--server-lr", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    rows = given.rows * given.clients
    data = ef.load("fashion-mnist", partition=ef.data.Iid(given.clients), samples=rows)
    plan = {"local": WORK, "server_lr": given.server_lr}
    print("| epsilon | test accuracy, % | noise in a step / clip | seconds |\n|---|---:|---:|---:|")
    for epsilon in (math.inf, 1e4, 8.0, 3.0, 1.0):
        started, ratio = time.perf_counter(), 0.0
        clients = ef.simulate(data, small_cnn(), engine="stacked", init="fresh")
        algorithm: AnyAlgorithm = ef.FedAvg(**plan, weighting="uniform")
        if math.isfinite(epsilon):
            algorithm = ef.PrivateFedAvg(epsilon, given.rounds, given.clip, **plan)
            ratio = (
                algorithm.price(given.clients).sigma * math.sqrt(clients.model.size) / given.clip
            )
        found = []
        for seed in range(given.seeds):
            history = ef.train(
                algorithm, clients, rounds=given.rounds, seed=seed, evaluate=["test"],
                every=given.rounds, progress=False,
            )  # fmt: skip
            found.append(100 * np.mean(list(history.per_client("accuracy", "test").values())))
        right = f"{np.mean(found):.1f} ± {np.std(found):.1f}"
        spent = time.perf_counter() - started
        print(f"| {epsilon:g} | {right} | {ratio:.2f} | {spent:.0f} |", flush=True)


if __name__ == "__main__":
    main()
