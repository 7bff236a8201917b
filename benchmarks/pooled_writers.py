"""How even a network of femnist-cnn would be if all writers' images could be put together.

    python -m benchmarks.pooled_writers [--copies 8] [--channels 32 64 128] [--steps 8500]
    python -m benchmarks.pooled_writers --validation [...]

Dropout, L2 penalty and folds of the experiment ``femnist-cnn``, by default also its network; SGD
with momentum 0.9 on minibatches of 50 of all training images, and a mean of the models of the last
ninth of all steps: not tuned, to be read beside what a federation reaches. It prints the measures
of the experiment's table for the network as it is, with each writer's own shares of digits,
capitals and small letters, and with these and own offsets (half of what they say); how much of the
spread is explained by what writers wrote (were every class read equally well in every hand); and
who is served worse than chance explains. With ``--validation`` the images that are never tested are
held out of fold 0 and looked at in place of all test images: settings are compared by these.
"""

from __future__ import annotations

import argparse
import importlib
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from experiments.harness.experiment import EXPERIMENTS, definition
from experiments.harness.network_parts import folded_femnist, image_cnn
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from equifed import Federation
from equifed.metrics import compare_to_chance, worst_fraction

Array = NDArray[np.float64]
BATCH, CLASSES, TRUST = 50, 62, 0.5
KINDS = ("as it is", "own shares", "own shares and offsets")
MOVED: tuple[dict[str, Any], ...] = ({}, {"shares": True}, {"shares": True, "trust": TRUST})
measured = importlib.import_module("experiments.femnist-cnn.measured")


def train(data: Federation, model: dict[str, Any], steps: int, lr: float, l2: float) -> Any:
    """Return the network after so many minibatches of all training images, a mean of the last."""
    pairs = [data.train.client(i) for i in range(len(data.names))]
    x, y = (torch.as_tensor(np.concatenate(columns)) for columns in zip(*pairs, strict=True))
    network = image_cnn(tuple(x.shape[1:]), CLASSES, **model)
    descent = torch.optim.SGD(network.parameters(), lr, momentum=0.9, weight_decay=l2)
    mean, counted = torch.zeros_like(parameters_to_vector(network.parameters())), 0
    rows = torch.randperm(len(y))
    for k in range(steps):
        if len(rows) < BATCH:
            rows = torch.randperm(len(y))
        batch, rows = rows[:BATCH], rows[BATCH:]
        descent.zero_grad()
        cross_entropy(network(x[batch]), y[batch].long()).backward()  # type: ignore[no-untyped-call]
        descent.step()
        if k >= steps * 8 / 9:
            counted += 1
            found = parameters_to_vector(network.parameters()).detach()
            mean += (found - mean) / counted
    vector_to_parameters(mean, network.parameters())
    return network.eval()


def train_and_test(fold: int, given: argparse.Namespace) -> tuple[list[str], list[Array]]:
    """Return the writers, and of each a row per image: class, right as it is and with own parts."""
    torch.set_num_threads(1)
    torch.manual_seed(fold + given.seed)
    settings = definition("femnist-cnn")
    data, plain = (
        folded_femnist(fold, settings["run"]["data"]["folds"], validation=given.validation,
                       copies=copies, strength=given.strength)
        for copies in (given.copies, 0)
    )  # fmt: skip
    model = {k: v for k, v in settings["run"]["model"].items() if k not in ("name", "init", "l2")}
    model |= {"channels": given.channels, "hidden": [given.hidden], "dropout": [given.dropout]}
    network = train(data, model, given.steps, given.lr, settings["run"]["model"]["l2"])
    n, split = len(data.names), "validation" if given.validation else "test"
    moves = measured.Moves.of(plain, settings["fit"]["class_kinds"], given.offsets)
    told = []
    with torch.no_grad():
        for i in range(n):
            images, labels = data.splits()[split].client(i)
            logits = network(torch.as_tensor(images)).double().numpy()
            said = [(logits + moves.of_images(i, images, one)).argmax(1) for one in MOVED]
            told.append(np.stack([labels, *(k == labels for k in said)], axis=1).astype(float))
    return list(data.names), told


def explained(images: list[Array]) -> float:
    """Return the spread of writers' accuracies, were every class read alike in every hand."""
    labels, right = np.concatenate(images)[:, :2].T
    of_class = [right[labels == k].mean() if (labels == k).any() else 0.0 for k in range(CLASSES)]
    return float(100 * np.std([np.take(of_class, one[:, 0].astype(int)).mean() for one in images]))


def main() -> None:
    """Train on every fold, pool the folds, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8500)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--copies", type=int, default=0)
    parser.add_argument("--strength", type=float, default=1.0)
    parser.add_argument("--channels", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--offsets", type=int, default=definition("femnist-cnn")["fit"]["offsets"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--validation", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    settings = definition("femnist-cnn")
    folds = settings["seeds"][:1] if given.validation else settings["seeds"]
    with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
        found = list(pool.map(partial(train_and_test, given=given), folds))
    whole = [np.concatenate(parts) for parts in zip(*(told for _, told in found), strict=True)]
    if given.validation:
        for column, words in enumerate(KINDS, start=1):
            values = np.array([one[:, column].mean() for one in whole if len(one)])
            average, worst = values.mean(), worst_fraction(values, 0.2, higher_is_better=True)
            print(f"{words}: average {100 * average:.2f} %, worst 20 % {100 * worst:.2f} %, "
                  f"mean of both {50 * (average + worst):.2f}")  # fmt: skip
        return
    kept = [one for one in whole if len(one) >= settings["least"]]
    names = [n for n, one in zip(found[0][0], whole, strict=True) if len(one) >= settings["least"]]
    sizes = np.array([len(one) for one in kept], dtype=np.float64)
    print(f"{len(sizes)} writers")
    for column, words in enumerate(KINDS, start=1):
        correct = np.array([one[:, column].sum() for one in kept])
        print(f"{words}:")
        for title, measure in EXPERIMENTS["femnist-cnn"].module.MEASURES.items():
            print(f"  {title}: {measure((correct, sizes)):.2f}")
        for i in compare_to_chance(correct, sizes).underserved:
            print(f"  below chance: {names[i]}, {correct[i]:.0f} of {sizes[i]:.0f} images")
    print(f"spread explained by what was written, as it is: {explained(kept):.2f}")


if __name__ == "__main__":
    main()
