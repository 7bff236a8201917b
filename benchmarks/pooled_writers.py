"""How even a network of femnist-cnn would be if all writers' images could be put together.

    python -m benchmarks.pooled_writers [--epochs 30] [--lr 0.03] [--jobs 2]

The network, dropout, L2 penalty and folds of the experiment ``femnist-cnn``; SGD with momentum 0.9
on minibatches of 50 of all training images, and a mean of the models of the last ninth of all
steps. It prints the measures of the experiment's table, and who is served worse than chance
explains: one setting, not tuned, to be read beside what a federation reaches.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import numpy as np
import torch
from experiments.harness.experiment import EXPERIMENTS, definition
from experiments.harness.network_parts import folded_femnist, image_cnn
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from equifed.metrics import compare_to_chance

Array = NDArray[np.float64]
BATCH = 50


def train_and_test(fold: int, epochs: int, lr: float) -> tuple[list[str], Array]:
    """Return the writers, and how many of their test images are right, and how many there are."""
    torch.set_num_threads(1)
    torch.manual_seed(fold)
    settings = definition("femnist-cnn")["run"]
    data = folded_femnist(fold, settings["data"]["folds"])
    pairs = [data.train.client(i) for i in range(len(data.names))]
    x, y = (torch.as_tensor(np.concatenate(columns)) for columns in zip(*pairs, strict=True))
    model = {k: v for k, v in settings["model"].items() if k not in ("name", "init", "l2")}
    network = image_cnn(tuple(x.shape[1:]), 62, **model)
    decay = settings["model"]["l2"]
    descent = torch.optim.SGD(network.parameters(), lr, momentum=0.9, weight_decay=decay)
    whole = len(y) // BATCH
    batches = [rows for _ in range(epochs) for rows in torch.randperm(len(y)).split(BATCH)[:whole]]
    mean, counted = torch.zeros_like(parameters_to_vector(network.parameters())), 0
    for k, rows in enumerate(batches):
        descent.zero_grad()
        cross_entropy(network(x[rows]), y[rows].long()).backward()  # type: ignore[no-untyped-call]
        descent.step()
        if k >= len(batches) * 8 / 9:
            counted += 1
            found = parameters_to_vector(network.parameters()).detach()
            mean += (found - mean) / counted
    vector_to_parameters(mean, network.parameters())
    network.eval()
    counts = []
    with torch.no_grad():
        for i in range(len(data.names)):
            images, labels = data.splits()["test"].client(i)
            right = network(torch.as_tensor(images)).argmax(1).numpy() == labels
            counts.append((right.sum(), len(right)))
    return list(data.names), np.array(counts, dtype=np.float64)


def main() -> None:
    """Train on every fold, pool the folds, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    settings = definition("femnist-cnn")
    work = partial(train_and_test, epochs=given.epochs, lr=given.lr)
    with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
        folds = list(pool.map(work, settings["seeds"]))
    names, counts = folds[0][0], np.sum([counts for _, counts in folds], axis=0)
    kept = counts[:, 1] >= settings["least"]
    correct, sizes = counts[kept].T
    print(f"{len(sizes)} writers")
    for words, measure in EXPERIMENTS["femnist-cnn"].module.MEASURES.items():
        print(f"{words}: {measure((correct, sizes)):.2f}")
    named = np.array(names)[kept]
    for i in compare_to_chance(correct, sizes).underserved:
        print(f"worse than chance explains: {named[i]}, {correct[i]:.0f} of {sizes[i]:.0f} images")


if __name__ == "__main__":
    main()
