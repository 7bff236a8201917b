"""How strongly an own bias of a network should be held: accuracies over ``own_l2``.

    python -m benchmarks.own_strength writers --device cuda     (15 runs of some 45 s on a GPU)
    python -m benchmarks.own_strength skew                      (15 runs of some 10 s on a CPU)

``writers`` is the CNN of the experiment femnist-cnn: 62 classes, about 100 images of each writer,
hardly any label skew; measured on the images that the experiment never tests. ``skew`` is a network
of one hidden layer on Fashion-MNIST, 6,000 images, 30 clients, Dirichlet(0.2). Both are trained by
FedAvg with server momentum, with own biases in joint local steps. Prints the average over clients
and that of their worst fifth, in %, means over seeds, and both minus the shared network's.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from experiments.harness.network_parts import folded_femnist, image_cnn
from torch import nn

import equifed as ef
from equifed.metrics import worst_fraction

STRENGTHS = (1e-4, "1/n", "3/n", "10/n")


def writers(seed: int) -> tuple[ef.Federation, nn.Module, ef.LocalSGD, str]:
    """Return writers, the CNN of femnist-cnn, and where it is measured."""
    data = folded_femnist(fold=0, validation=True)
    shape: dict[str, Any] = {"channels": (32, 64), "hidden": (128,), "dropout": (0.3,)}
    net = image_cnn(data.input_shape, 62, kernel=3, padding=1, **shape)
    return data, net, ef.LocalSGD(lr=0.2, steps=5, batch_size=10), "validation"


def skew(seed: int) -> tuple[ef.Federation, nn.Module, ef.LocalSGD, str]:
    """Return clients with other shares of classes, and a network of one hidden layer."""
    split = {"name": "dirichlet", "clients": 30, "alpha": 0.2}
    data = ef.load("fashion-mnist", partition=split, samples=6000, seed=seed)
    hidden = nn.Linear(784, 100), nn.ReLU(), nn.Dropout(0.3)
    net = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(100, 10))
    return data, net, ef.LocalSGD(lr=0.05, steps=10, batch_size=20), "test"


KINDS = {"writers": (writers, 400), "skew": (skew, 60)}


def accuracies(kind: str, own_l2: float | str | None, seed: int, device: str) -> list[float]:
    """Return average and worst fifth, in %, of one run; without own bias if own_l2 is None."""
    make, rounds = KINDS[kind]
    torch.manual_seed(seed)
    data, net, local, split = make(seed)
    own: dict[str, Any] = {} if own_l2 is None else {"own": "bias", "own_l2": own_l2}
    if device == "cuda":
        own["precision"] = "tf32"
    clients = ef.simulate(data, net, l2=1e-4, engine="stacked", device=device, init="fresh", **own)
    momentum = ef.ServerOptimised(ef.FedAvg(local, weighting="uniform"), "momentum", lr=0.3)
    given: dict[str, Any] = {"evaluate": (split,), "every": rounds, "progress": False}
    record = ef.train(momentum, clients, rounds=rounds, seed=seed, **given).last("accuracy", split)
    assert record is not None
    values = 100 * record.values[np.isfinite(record.values)]
    return [float(values.mean()), float(worst_fraction(values, 0.2, higher_is_better=True))]


def main() -> None:
    """Print one line for each strength."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    shared = np.zeros(2)
    for own_l2 in (None, *STRENGTHS):
        runs = [accuracies(given.kind, own_l2, seed, given.device) for seed in range(given.seeds)]
        mean = np.mean(runs, axis=0)
        shared = mean if own_l2 is None else shared
        name = "shared" if own_l2 is None else f"own_l2 = {own_l2}"
        average, worst = mean - shared
        print(f"{name:16s} {mean[0]:.1f} {mean[1]:.1f}  minus shared {average:+.1f} {worst:+.1f}",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
