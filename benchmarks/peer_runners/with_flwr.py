"""FedAvg with Flower's simulation: a ServerApp, a ClientApp and one Ray actor a core."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parent)  # for Ray's actors
os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0")

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from flwr_client import app as client_app
from shared import Turn, given

work = given()
server_app = ServerApp()


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Do the rounds of ``Strategy.start``, without its evaluation and with turns in between."""
    flat = [torch.from_numpy(part) for layer in work.layers for part in layer]
    keys = [f"{2 * i}.{kind}" for i in range(len(work.layers)) for kind in ("weight", "bias")]
    arrays = ArrayRecord(dict(zip(keys, flat, strict=True)))
    count = len(work.inputs)
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=count)
    config = ConfigRecord({"folder": str(Path(sys.argv[1]).resolve())})
    for number in range(1, work.rounds + 1):
        turn = Turn()
        messages = strategy.configure_train(number, arrays, config, grid)
        arrays, _ = strategy.aggregate_train(number, grid.send_and_receive(messages))
        turn.stop()
        state = [value.numpy() for value in arrays.to_torch_state_dict().values()]
        turn.answer(work, list(zip(state[::2], state[1::2], strict=True)))


run_simulation(
    server_app,
    client_app,
    num_supernodes=len(work.inputs),
    backend_config={
        "init_args": {"num_cpus": int(os.environ["OMP_NUM_THREADS"])},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    },
)
