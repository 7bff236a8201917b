"""Many clients: seconds per round, peak memory, and how both grow.

    python -m benchmarks.scaling [--threads 1]

Each line runs in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import numpy as np
import torch
from tests.problems import classification

from equifed.algorithms.fedavg import FedAvg
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.engines.simulate import simulate
from equifed.models.architectures import build
from equifed.models.losses import cross_entropy
from equifed.objectives.cvar import CVaR
from equifed.steps.schedules import ConstantSteps

CLASSES = 10


def ragged(clients: int, samples: int, features: int, spread: bool) -> Federation:
    """Clients of that many samples, or of 10 to 200 whose mean is near it."""
    sizes = np.full(clients, samples)
    if spread:
        draw = np.random.default_rng(0)
        sizes = np.clip(draw.lognormal(np.log(samples), 0.7, clients), 10, 200).astype(np.int64)
    return classification(sizes, (features,), CLASSES, dtype=np.float32)


def measure(case: dict[str, float]) -> dict[str, float]:
    """Run a few rounds and return seconds per round, samples touched and peak memory."""
    torch.set_num_threads(int(case["threads"]))
    data = ragged(int(case["clients"]), int(case["samples"]), int(case["features"]), case["spread"])
    module = build("logistic", data.input_shape, CLASSES)
    clients = simulate(data, module, cross_entropy, l2=1e-4)
    work = LocalSGD(lr=0.1, epochs=1, batch_size=10)
    part = case["participation"]
    if case["algorithm"] == "scaff_pd":
        steps = ConstantSteps(primal=0.3, dual=1e-3)
        algorithm = ScaffPD(CVaR(0.3), work, steps, participation=part)
    else:
        algorithm = FedAvg(work, participation=part)
    state = algorithm.init(clients, clients.initial(Stream(0)))
    before = clients.losses(algorithm.model(state), Stream(0)).mean()
    # On one thread the processor's time: it does not count what other programs use.
    clock = time.process_time if case["threads"] == 1 else time.perf_counter
    seconds, samples = [], []
    for t in range(int(case["rounds"])):
        start = clock()
        state, info = algorithm.round(state, clients, Stream(0).at("round", t))
        seconds.append(clock() - start)
        samples.append(int(clients.subset(info.index).sizes.sum()))
    after = clients.losses(algorithm.model(state), Stream(0)).mean()
    if not after < before:
        raise SystemExit(f"The loss did not fall: {before} to {after}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    best = int(np.argmin(seconds))
    return {"seconds": seconds[best], "samples": samples[best], "peak": peak}


def case(**changes: float | str) -> dict[str, float | str]:
    base = {"clients": 100_000, "samples": 50, "features": 64, "spread": True}
    return base | {"participation": 0.01, "rounds": 5, "algorithm": "fedavg"} | changes


MILLION = {"clients": 1_000_000, "samples": 20, "features": 32, "spread": False}

CASES = [
    case(**MILLION, participation=0.001),
    case(**MILLION, participation=0.001, algorithm="scaff_pd"),
    case(),
    case(algorithm="scaff_pd"),
    case(participation=0.02),
    case(participation=0.04),
    case(participation=0.08),
    case(participation=0.08, clients=10_000),
    case(clients=20_000, samples=20, features=784, spread=False, participation=1.0, rounds=2),
    case(
        clients=20_000,
        samples=20,
        features=784,
        spread=False,
        participation=1.0,
        rounds=2,
        algorithm="scaff_pd",
    ),
]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments.add_argument("--case", type=json.loads)
    given = arguments.parse_args()
    if given.case is not None:
        print(json.dumps(measure(given.case)))
        return
    titles = ["clients", "features", "participation", "algorithm", "samples", "s per round"]
    print(" | ".join(["", *titles, "µs per sample", "peak GB", ""]).strip())
    print("|---:|---:|---:|---|---:|---:|---:|---:|")
    for each in CASES:
        text = json.dumps(each | {"threads": given.threads})
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.scaling", "--case", text],
            check=True,
            capture_output=True,
            text=True,
        )
        out = json.loads(done.stdout)
        cells = [f"{each['clients']:,}", each["features"], f"{each['participation']:.0%}"]
        cells += [each["algorithm"], f"{out['samples']:,}", f"{out['seconds']:.3f}"]
        cells += [f"{1e6 * out['seconds'] / out['samples']:.2f}", f"{out['peak'] / 1e9:.2f}"]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
