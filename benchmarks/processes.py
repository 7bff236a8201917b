"""The same rounds in one and in several processes, one thread each.

    python -m benchmarks.processes [2 ...]

100 clients x 600 samples x 784 features, batch 50, 12 local steps, an MLP 784-50-10: FedAvg and
SCAFF-PD. The numbers of processes take turns; the best round of each counts. All must end at the
same model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import torch
from benchmarks.engines import BATCH, CLASSES, FEATURES, STEPS, federation

from equifed.algorithms.fedavg import FedAvg
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.engines.distributed import DistributedClients
from equifed.models.architectures import build
from equifed.models.losses import cross_entropy
from equifed.objectives.cvar import CVaR
from equifed.steps.schedules import ConstantSteps

WORK = LocalSGD(lr=0.05, steps=STEPS, batch_size=BATCH)
ALGORITHMS = {
    "FedAvg": FedAvg(WORK),
    "SCAFF-PD": ScaffPD(CVaR(0.3), WORK, ConstantSteps(primal=0.3, dual=0.1)),
}
ROUNDS, TURNS = 8, 4


def work() -> None:
    """Be one process of a group: print the best seconds of a round and the end's norm."""
    torch.set_num_threads(1)
    clients = DistributedClients(federation(100), build("mlp", (FEATURES,), CLASSES), cross_entropy)
    out = {}
    for name, algorithm in ALGORITHMS.items():
        state, times = algorithm.init(clients, clients.initial(Stream(0))), []
        for r in range(ROUNDS):
            clients.workers.wait()
            start = time.perf_counter()
            state, _ = algorithm.round(state, clients, Stream(0).at("round", r))
            times.append(time.perf_counter() - start)
        norm = float(torch.linalg.vector_norm(state.x.double()))
        out[name] = {"seconds": min(times[1:]), "norm": norm}
    if clients.workers.rank == 0:
        print(json.dumps(out))


def group(processes: int) -> dict[str, dict[str, float]]:
    """Start a group and return what its first process found."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *launch, "-m", "benchmarks.processes", "--work"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(numbers: list[int]) -> None:
    found = [{n: group(n) for n in [1, *numbers]} for _ in range(TURNS)]
    print("| algorithm | processes | ms per round | times as fast as one |\n|---|---:|---:|---:|")
    for name in ALGORITHMS:
        norms = [one[name]["norm"] for turn in found for one in turn.values()]
        if max(norms) - min(norms) > 1e-5 * norms[0]:
            raise SystemExit(f"The groups disagree on {name}: {norms}")
        best = {n: min(turn[n][name]["seconds"] for turn in found) for n in [1, *numbers]}
        for n, seconds in best.items():
            print(f"| {name} | {n} | {1e3 * seconds:.0f} | {best[1] / seconds:.2f} |")


if __name__ == "__main__":
    if "--work" in sys.argv:
        work()
    else:
        main([int(n) for n in sys.argv[1:]] or [2])
