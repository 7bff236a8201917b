"""SCAFFOLD's variates in memory and in a file: seconds of a round and peak memory.

    python -m benchmarks.remembering [--clients 100000] [--rounds 20]

Clients of 5 samples x 32 features, 1 % of whom take part in a round, logistic regression with 10
classes; each way in a process of its own. Both must end at the same model.
"""

from __future__ import annotations

import argparse
import hashlib
import resource
import subprocess
import sys
import time

import numpy as np
import torch
from tests.problems import classification

from equifed.algorithms.scaffold import Scaffold
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.engines.simulate import simulate


def measure(where: str, clients: int, rounds: int) -> None:
    """Print what one way takes, and a digest of its model."""
    data = classification([5] * clients, (32,), 10, dtype=np.float32)
    engine = simulate(data, "logistic", remember_on=where)  # type: ignore[arg-type]
    algorithm = Scaffold(LocalSGD(lr=0.1, steps=3, batch_size=5), participation=0.01)
    state, taken = algorithm.init(engine, engine.initial(Stream(0))), []
    for r in range(rounds):
        begun = time.process_time()
        state, _ = algorithm.round(state, engine, Stream(0).at("round", r))
        taken.append(time.process_time() - begun)
    digest = hashlib.sha256(state.x.numpy().tobytes()).hexdigest()[:8]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"| {where} | {1e3 * float(np.median(taken)):.1f} | {peak:.2f} | {digest} |", flush=True)


def main() -> None:
    """Measure both ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", choices=("memory", "disk"), help="in this process")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.only:
        measure(given.only, given.clients, given.rounds)
        return
    print("| variates | processor ms a round | peak GB | model |\n|---|---:|---:|---|", flush=True)
    for where in ("memory", "disk"):
        sizes = ["--clients", str(given.clients), "--rounds", str(given.rounds)]
        command = [sys.executable, "-m", "benchmarks.remembering", "--only", where, *sizes]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
