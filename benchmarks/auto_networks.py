"""Automatic steps where there is no theory: embedded data, networks, minibatches.

Run ``python -m benchmarks.auto_networks [--samples 6000] [--rounds 40]``. MNIST and CIFAR-10 are
read from the data folder (``EQUIFED_DATA``). One line for each: objective on all samples at the
start and the end, average and worst client accuracy on test samples, step sizes, halvings.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from equifed.algorithms.scaff_pd import ScaffPD
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.data import Federation
from equifed.data.partitions import Dirichlet
from equifed.datasets import load
from equifed.engines.simulate import simulate
from equifed.models.architectures import build
from equifed.objectives import ChiSquare, RelativeFairness, SaddleObjective, WorstCase

EMBEDDED = ("fashion-three", "heart-disease", "penguins")


def run(
    federation: Federation,
    model: str,
    objective: SaddleObjective,
    rounds: int,
    batch_size: int | None = None,
    gradient_batch_size: int | None = None,
    device: str = "cpu",
) -> str:
    """Train with every default but the batches and tell what came of it."""
    classes = federation.classes
    assert classes is not None
    module = build(model, federation.input_shape, classes)
    clients = simulate(federation, module, "cross_entropy", device=device, init="fresh")
    algorithm = ScaffPD(
        objective,
        LocalSGD(lr=1.0, steps=8, batch_size=batch_size),
        gradient_batch_size=gradient_batch_size,
    ).wrapped()
    x = clients.initial(Stream(0))
    state, started = algorithm.init(clients, x), time.perf_counter()
    for r in range(rounds):
        state, info = algorithm.round(state, clients, Stream(0).at("round", r))
    seconds = time.perf_counter() - started
    first, last = (objective.value(clients.losses(m, Stream(1))) for m in (x, state.x))
    accuracy = {e.split: e.metrics["accuracy"] for e in clients.evaluate(state.x)}
    shown = accuracy.get("test", accuracy["train"])
    return (
        f"objective {first:.3f} -> {last:.3f}  accuracy {np.nanmean(shown):.3f} worst "
        f"{np.nanmin(shown):.3f}  T {info.numbers['primal_step']:.3g} "
        f"L {info.numbers['smoothness']:.3g} halvings {info.numbers['halvings']:.0f} "
        f"{seconds:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    signed = RelativeFairness(0.2)
    for name in EMBEDDED:
        federation = load(name)
        for model in ("logistic", "mlp"):
            for objective in (WorstCase(), ChiSquare(0.1, scale=1.0), signed):
                for batch in (None, 10):
                    text = run(federation, model, objective, arguments.rounds, batch, batch)
                    about = f"{name} {model} {type(objective).__name__} batch {batch}"
                    print(f"{about:55}", text, flush=True)
    division = Dirichlet(10, 0.5)
    for name, model in (("mnist", "mlp"), ("cifar10", "cnn")):
        federation = load(name, partition=division, samples=arguments.samples)
        for objective in (WorstCase(), ChiSquare(0.1, scale=1.0), signed):
            for batch, gradient_batch_size in ((None, None), (50, None), (50, 100)):
                text = run(
                    federation, model, objective, arguments.rounds, batch, gradient_batch_size,
                    arguments.device,
                )  # fmt: skip
                about = f"{name} {model} {type(objective).__name__} {batch} {gradient_batch_size}"
                print(f"{about:55}", text, flush=True)


if __name__ == "__main__":
    main()
