"""Runs algorithms on one process of a group; started by the tests with RANK and WORLD_SIZE set."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from equifed.algorithms.drfa import DRFA
from equifed.algorithms.rfedfair import RFedFair
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.algorithms.scaffold import Scaffold
from equifed.algorithms.scaled import Scaled
from equifed.contract.evaluation import SPLITS
from equifed.contract.local import LocalSGD
from equifed.data.federation import Federation
from equifed.engines.distributed import DistributedClients
from equifed.engines.loop import LoopClients
from equifed.objectives import ChiSquare
from equifed.steps.schedules import ConstantSteps
from equifed.training.folder import RunFolder
from equifed.training.history import History
from equifed.training.loop import train
from equifed.training.trackers import Callback

WORK = LocalSGD(lr=0.1, steps=4, batch_size=5)
ALGORITHMS = {
    "scaff-pd": ScaffPD(ChiSquare(0.1, scale=1.0), WORK, ConstantSteps(0.4, 0.1)),
    "scaffold": Scaffold(WORK, participation=0.6),
    "drfa": DRFA(WORK, clients_per_round=3, output="average"),
    "rfedfair": RFedFair(WORK, clients_per_round=3),
    "own": Scaffold(WORK, participation=0.6),
    "scaled": Scaled(ScaffPD(ChiSquare(0.1, scale=1.0)), "uncorrelated"),
}
METRICS = ("balanced_accuracy", "auroc", "brier")
OPTIONS: dict[str, dict[str, Any]] = {
    "own": {"own": "head"},
    "scaled": {"model": "logistic", "l2": 0.01},
}
SIZES = [6, 11, 3, 8, 15, 9, 2]


def federation() -> Federation:
    rng = np.random.default_rng(1)
    data = {
        f"c{i}": (rng.normal(size=(m, 4)), rng.integers(0, 3, m), np.arange(m) % 2)
        for i, m in enumerate(SIZES)
    }
    return Federation.from_clients(data, classes=3).split(test=0.2, seed=0)


def loop(name: str) -> History:
    options: Any = {"model": "mlp", **OPTIONS.get(name, {})}
    clients = LoopClients(federation(), dtype=torch.float64, **options)
    return train(ALGORITHMS[name], clients, rounds=6, seed=2, evaluate=SPLITS, metrics=METRICS)


class Die(Callback):
    """Kills this process in a round, as a crash would."""

    def round(self, record: object, info: object) -> None:
        if record.round == 3:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)


def main(names: list[str], folder: Path, mode: str) -> None:
    torch.set_num_threads(1)
    for name in names:
        run(name, folder / name, mode)


def run(name: str, folder: Path, mode: str) -> None:
    options: Any = {"model": "mlp", **OPTIONS.get(name, {})}
    clients = DistributedClients(federation(), dtype=torch.float64, **options)
    group = clients.group()
    assert group is not None
    store = RunFolder(folder, clients.names, group)
    if mode != "resume":
        store.create()
    dies = mode == "die" and group.rank == group.size - 1
    history = train(
        ALGORITHMS[name],
        clients,
        rounds=6,
        seed=2,
        evaluate=SPLITS,
        metrics=METRICS,
        folder=store,
        callbacks=[Die()] if dies else [],
        resume=mode == "resume",
    )
    predictor = history.predictor()
    assert predictor.clients == clients.names and len(predictor.predict(np.zeros((2, 4)))) == 2


if __name__ == "__main__":
    main(sys.argv[1].split(","), Path(sys.argv[2]), sys.argv[3])
