"""Engines on a GPU: agreement with the CPU loop, and seconds a round against the sequential loop.

Run on a machine with CUDA: ``python benchmarks/gpu.py [clients ...]``. FedAvg, 600 x 784 samples a
client, batch 50, 12 local steps, an MLP 784-50-10, float32; each size is timed after a first round.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import torch

from equifed.data.federation import Federation, Split
from equifed.engines.in_process import InProcessClients
from equifed.engines.loop import LoopClients
from equifed.engines.stacked import stacked
from equifed.local import LocalSGD
from equifed.streams import Stream

WORK = LocalSGD(lr=0.05, steps=12, batch=50)


def problem(clients: int, samples: int = 600, features: int = 784) -> Federation:
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((clients * samples, features), dtype=np.float32)
    targets = rng.integers(0, 10, clients * samples)
    offsets = np.arange(clients + 1) * samples
    names = tuple(f"c{i}" for i in range(clients))
    return Federation("random", names, Split(inputs, targets, offsets), classes=10)


def one_round(engine: InProcessClients, x: torch.Tensor, r: int) -> torch.Tensor:
    weights = np.full(len(engine.names), 1 / len(engine.names))
    moved = engine.local_steps(x, WORK, Stream(0).at("round", r))  # type: ignore[attr-defined]
    return x - moved.displacement.weighted_sum(weights)


def seconds(engine: InProcessClients, rounds: int = 5) -> float:
    x = engine.initial(Stream(0))
    x = one_round(engine, x, 0)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for r in range(1, rounds + 1):
        x = one_round(engine, x, r)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / rounds


def agreement() -> float:
    """Largest difference between stacked on the GPU and the loop on the CPU, float64, 3 rounds."""
    data, models = problem(7, samples=90, features=20), []
    for make, device in ((LoopClients, "cpu"), (stacked, "cuda")):
        engine = make(data, "mlp", dtype=torch.float64, device=device)
        x = engine.initial(Stream(0))
        for r in range(3):
            x = one_round(engine, x, r)
        models.append(x.cpu())
    return float((models[0] - models[1]).abs().max())


def main() -> None:
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print(f"stacked on cuda against loop on cpu, float64, largest difference: {agreement():.1e}")
    sizes = [int(n) for n in sys.argv[1:]] or [100, 1000, 10000]
    loop = seconds(LoopClients(problem(100), "mlp", device="cuda"), rounds=1)
    print(f"loop on cuda, 100 clients: {loop:.3f} s a round")
    for clients in sizes:
        data = problem(clients)
        for options in ({"fast": True}, {"fast": False}):
            took = seconds(stacked(data, "mlp", device="cuda", **options))
            ratio = f", {loop / took:.0f} times the loop" if clients == 100 else ""
            name = "written-out gradients" if options["fast"] else "torch.func"
            print(f"{clients:6d} clients, {name}: {1000 * took:.2f} ms a round{ratio}", flush=True)


if __name__ == "__main__":
    main()
