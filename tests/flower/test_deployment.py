"""A real deployment: SuperLink and two SuperNodes with TLS and node keys equal the simulator."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.flower.grid import loop_clients

from equifed.flower.app_config import AppConfig
from equifed.flower.trial.certificates import make_node_key
from equifed.flower.trial.deploy import Deployment, is_reachable, list_session
from equifed.flower.trial.new import write_app
from equifed.runs.run import load_data
from equifed.training.history import History
from equifed.training.loop import train

pytestmark = pytest.mark.long


def simulated(config: AppConfig, rounds: int, clients: int) -> History:
    """Return the same training in one process."""
    federation = load_data(config.data).subset(range(clients))
    engine = loop_clients(federation, config.build_task())
    algorithm = config.build_algorithm(federation.train.sizes.tolist())
    return train(algorithm, engine, rounds=rounds, seed=config.seed)


@pytest.mark.timeout(600)
def test_a_deployment_with_tls_and_node_keys_equals_the_simulator(tmp_path: Path) -> None:
    package = write_app(tmp_path / "penguin-app", data="penguins")
    text = (package / "equifed.toml").read_text()
    (package / "equifed.toml").write_text(text.replace("every = 5", "splits = []"))
    out, nodes = tmp_path / "run", [{"partition-id": i} for i in range(2)]
    with Deployment(tmp_path / "up", nodes, env={"OMP_NUM_THREADS": "1"}) as deployment:
        stranger, _ = make_node_key(tmp_path / "stranger", "node")
        deployment.nodes.append({"partition-id": 2})
        refused = deployment.start_supernode(2, key=stranger)
        done = deployment.run(
            tmp_path / "penguin-app",
            {"clients": 2, "rounds": 1, "out": str(out), "timeout": 300.0, "wait": 300.0},
            timeout=500,
        )
        logs = done.stdout + deployment.log("superlink")[-3000:]
        assert (out / "summary.json").exists(), logs
        until = time.monotonic() + 30
        while refused.poll() is None and time.monotonic() < until:
            time.sleep(0.2)
        assert refused.poll() not in (None, 0), "an unregistered node must be refused"
        sessions, port = [p.pid for p in deployment.processes], deployment.port
    expected = simulated(AppConfig.read(package / "equifed.toml"), rounds=1, clients=2)
    assert expected.parameters is not None
    found = load_file(out / "model.safetensors")
    for name, value in expected.parameters.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
    assert History.load(out).names == ("Adelie", "Gentoo")
    assert not any(map(list_session, sessions)) and not is_reachable("127.0.0.1", port)
