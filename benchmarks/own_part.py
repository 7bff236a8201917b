"""What an own bias costs: times with and without one, side by side in one process.

    python -m benchmarks.own_part [--device cuda] [--clients 30] [--samples 9000] [--repeats 7]

Softmax regression with skewed labels: on random images of 784 pixels and ten classes, the same
number for every client, at a random model; and on Fashion-MNIST, where its files are, with clients
of different sizes, at a model that is trained: there the best own biases take more Newton steps.
Prints, for one full gradient, full-gradient local steps and joint minibatch steps, seconds without
and with an own bias (medians of alternating runs) and their ratio. On a CPU it counts processor
time, which other programs lengthen less; use one thread (OMP_NUM_THREADS=1) and a quiet machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import equifed as ef
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.data import DataError

FULL = LocalSGD(lr=0.1, steps=8)
MINIBATCHES = LocalSGD(lr=0.1, epochs=1, batch_size=32)


def skewed(clients: int, samples: int, seed: int = 0) -> ef.Federation:
    """Clients of equal sizes whose labels are drawn from Dirichlet(0.2)."""
    draw, m = np.random.default_rng(seed), samples // clients
    centres = draw.normal(size=(10, 784)).astype(np.float32)
    data = {}
    for i in range(clients):
        labels = draw.choice(10, size=m, p=draw.dirichlet(np.full(10, 0.2)))
        pixels = 0.2 * centres[labels] + draw.normal(size=(m, 784)).astype(np.float32)
        data[f"client {i}"] = (pixels / 28, labels)
    return ef.Federation.from_clients(data, classes=10)


def compare(
    without: Callable[[], Any], own: Callable[[], Any], repeats: int, device: str
) -> tuple[float, ...]:
    """Return median seconds of both, taken in turns after a warm-up, and their ratio."""
    times: list[list[float]] = [[], []]
    clock = time.perf_counter if device == "cuda" else time.process_time
    for turn in range(repeats + 2):
        for kind, call in enumerate((without, own)):
            if device == "cuda":
                torch.cuda.synchronize()
            started = clock()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn >= 2:
                times[kind].append(clock() - started)
    plain, kept = (statistics.median(t) for t in times)
    return plain, kept, kept / plain


def main() -> None:
    """Measure on both kinds of images."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clients", type=int, default=30)
    parser.add_argument("--samples", type=int, default=9000)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    print("random images")
    measure(skewed(given.clients, given.samples), given.device, given.repeats)
    split = {"name": "dirichlet", "clients": given.clients, "alpha": 0.2}
    try:
        fashion = ef.load("fashion-mnist", partition=split, samples=given.samples)
    except DataError as error:
        print(f"Fashion-MNIST is left out: {error}")
        return
    print("Fashion-MNIST")
    measure(fashion, given.device, given.repeats, trained=True)


def measure(data: ef.Federation, device: str, repeats: int, trained: bool = False) -> None:
    """Print one line for each kind of work."""
    stream, options = Stream(0), {"l2": 1e-3, "device": device}
    shared = ef.simulate(data, "logistic", **options)
    profile = ef.simulate(data, "logistic", own="bias", **options)
    joint = ef.simulate(data, "logistic", own="bias", own_steps="joint", **options)
    draw = torch.Generator().manual_seed(0)
    x = (0.3 * torch.randn(shared.model.size, generator=draw)).to(device)
    if trained:
        fair = ef.FairNewton(ef.objectives.ChiSquare(rho=0.1, scale=1.0))
        x = shared.flatten(ef.train(fair, shared, rounds=30, progress=False).parameters or {})
    u, n = x[: profile.model.size], len(data.names)
    everybody = np.full(n, 1 / n)

    def gradient(clients: Any, at: Any) -> Any:
        return clients.value_and_gradient(at, stream)[1].weighted_sum(everybody)

    def steps(clients: Any, at: Any, work: LocalSGD) -> Any:
        return clients.local_steps(at, work, stream).displacement.weighted_sum(everybody)

    works: dict[str, tuple[Callable[[], Any], Callable[[], Any], float]] = {
        "one full gradient": (
            lambda: gradient(shared, x), lambda: gradient(profile, u), 1.3,
        ),
        "8 full-gradient local steps": (
            lambda: steps(shared, x, FULL), lambda: steps(profile, u, FULL), 1.6,
        ),
        "joint minibatch steps, one pass": (
            lambda: steps(shared, x, MINIBATCHES), lambda: steps(joint, u, MINIBATCHES), 1.3,
        ),
    }  # fmt: skip
    for name, (without, own, most) in works.items():
        plain, kept, ratio = compare(without, own, repeats, device)
        print(f"  {name:32s} {plain:.4f} s  {kept:.4f} s  ratio {ratio:.2f} (wanted: {most})")


if __name__ == "__main__":
    main()
