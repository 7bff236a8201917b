"""What it gains to keep the memory of client vectors from round to round.

    python -m benchmarks.reuse [--clients 500] [--threads 2] [--turns 7]

A SCAFF-PD round of FEMNIST's size: clients of 100 samples x 784 features, 62 classes, logistic
regression, ten local steps with batch 20. With and without keeping; both must end at the same bits.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from benchmarks.model_profile import measure
from tests.problems import classification
from torch import Tensor

from equifed.algorithms.scaff_pd import ScaffPD
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.engines.stacked.clients import MEMORY, StackedClients
from equifed.engines.threads import Workspace
from equifed.objectives.cvar import CVaR
from equifed.steps.schedules import ConstantSteps

SAMPLES, FEATURES, CLASSES = 100, 784, 62


def main() -> None:
    """Print times and page faults of both ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--turns", type=int, default=7)
    given = parser.parse_args()
    data = classification([SAMPLES] * given.clients, (FEATURES,), CLASSES, dtype=np.float32)
    engine = StackedClients(data, "logistic")
    work = LocalSGD(lr=0.05, steps=10, batch_size=20)
    algorithm = ScaffPD(CVaR(0.3), work, ConstantSteps(primal=0.3, dual=0.1))
    state = algorithm.init(engine, engine.initial(Stream(0)))
    kept, fresh = Workspace(MEMORY), Workspace(0)  # the second one keeps nothing

    def round_in(workspace: Workspace) -> Tensor:
        engine.workspace = workspace
        return algorithm.round(state, engine, Stream(0).at("round", 0))[0].x

    if not torch.equal(round_in(kept), round_in(fresh)):
        raise SystemExit("Memory that was used before gives other results.")
    ways = {("fresh", given.threads): lambda: round_in(fresh),
            ("kept", given.threads): lambda: round_in(kept)}  # fmt: skip
    costs = measure(ways, given.turns)
    print(f"\nSCAFF-PD, {given.clients} clients, {engine.model.size:,} parameters\n")
    print("| memory | threads | ms | processor ms | system ms | page faults |")
    print("|---|---:|---:|---:|---:|---:|")
    for (how, threads), (wall, used, system, faults) in costs.items():
        print(f"| {how} | {threads} | {wall:.1f} | {used:.1f} | {system:.1f} | {faults:.0f} |")
    ratio = costs["kept", given.threads][1] / costs["fresh", given.threads][1]
    print(f"\nThe processor takes {ratio:.2f} times as long with kept memory; the same bits.")


if __name__ == "__main__":
    main()
