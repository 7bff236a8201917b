"""FedAvg with Flower's simulation: a ServerApp, a ClientApp and one Ray actor a core."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parent)  # for Ray's actors
os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0")

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from flwr_client import app as client_app
from shared import Turn, given
from torch_module import build_module

work = given()
server_app = ServerApp()


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Do the rounds of ``Strategy.start``, without its evaluation and with turns in between."""
    arrays = ArrayRecord(build_module(work.model, work.parameters).state_dict())
    count = len(work.inputs)
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=count)
    config = ConfigRecord({"folder": str(Path(sys.argv[1]).resolve()), "model": work.model})
    for number in range(1, work.rounds + 1):
        turn = Turn()
        messages = strategy.configure_train(number, arrays, config, grid)
        arrays, _ = strategy.aggregate_train(number, grid.send_and_receive(messages))
        turn.stop()
        turn.answer(work, (v.numpy() for v in arrays.to_torch_state_dict().values()))


run_simulation(
    server_app,
    client_app,
    num_supernodes=len(work.inputs),
    backend_config={
        "init_args": {"num_cpus": int(os.environ["OMP_NUM_THREADS"])},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    },
)
