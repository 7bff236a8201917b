"""FedAvg with flgo: its fedavg on a task made from our arrays, one process, shuffling loaders."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import flgo
import torch
from flgo.algorithm import fedavg
from shared import LR, Turn, given

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
work = given()


class Fedavg:
    """flgo's fedavg whose server takes turns with the driver."""

    class Server(fedavg.Server):
        """Time ``iterate``: select, train, average."""

        def iterate(self):
            """Do one round."""
            turn = Turn()
            updated = super().iterate()
            turn.stop()
            turn.answer(work, (p.detach().numpy() for p in self.model.parameters()))
            return updated

    Client = fedavg.Client


sys.path.insert(0, os.getcwd())
task = f"flgo_{sys.argv[2]}"
here = Path(__file__).parent
flgo.gen_direct_task_from_file(task, str(here / "flgo_task.py"), overwrite=True)
option = {
    "sample": "full",
    "aggregate": "uniform",
    "num_rounds": work.rounds,
    "num_epochs": 1,
    "learning_rate": LR,
    "batch_size": work.batch,
    "train_holdout": 0.0,
    "eval_interval": -1,
}
flgo.init(task, Fedavg, option=option).run()
