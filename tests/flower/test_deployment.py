"""Real deployments with TLS and node keys: both kinds of node, what leaves, a run that goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.flower.proxy import record
from safetensors.torch import load_file
from tests.flower.grid import loop_clients
from tests.hospitals import draw_hospitals

from equifed.data.federation import Federation
from equifed.flower.app_config import AppConfig
from equifed.flower.trial.apps import Ending, run_app, write_app
from equifed.flower.trial.deploy import (
    CONNECTION,
    Deployment,
    format_settings,
    is_reachable,
    list_session,
    make_node_key,
)
from equifed.runs.build import load_data
from equifed.training.history import History
from equifed.training.loop import train

pytestmark = pytest.mark.long


def simulated(config: AppConfig, rounds: int, clients: int) -> History:
    """Return the same training in one process."""
    federation = load_data(config.data).subset(range(clients))
    engine = loop_clients(federation, config.build_task())
    algorithm = config.build_algorithm(federation.train.sizes.tolist())
    return train(algorithm, engine, rounds=rounds, seed=config.seed)


@pytest.fixture
def app(tmp_path: Path) -> Path:
    package = write_app(tmp_path / "penguin-app", data="penguins")
    text = (package / "equifed.toml").read_text()
    (package / "equifed.toml").write_text(text.replace("every = 5", "splits = []"))
    return tmp_path / "penguin-app"


def make_deployment(app: Path, root: Path, count: int = 0, **options: Any) -> Deployment:
    nodes = [{"partition-id": i} for i in range(count)]
    return Deployment(root / "up", nodes, app=app, env={"OMP_NUM_THREADS": "1"}, **options)


FRAMING = 1000
"""Bytes that Flower puts around an object, at most."""


def follow(deployment: Deployment, app: Path, **settings: Any) -> tuple[Ending, list[str]]:
    given, said = {"timeout": 300.0, "wait": 300.0, **settings}, list[str]()
    words = [format_settings(given)]
    return run_app(app, CONNECTION, words, deployment.env, said.append), said


def check_model(app: Path, out: Path, rounds: int, clients: int = 2) -> None:
    config = AppConfig.read(app / "penguin_app" / "equifed.toml")
    expected = simulated(config, rounds, clients)
    assert expected.parameters is not None
    found = load_file(out / "model.safetensors")
    for name, value in expected.parameters.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10)
    assert History.load(out).names == expected.names


def wait_until(happened: Any, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not happened() and time.monotonic() < until:
        time.sleep(0.1)
    assert happened()


@pytest.mark.timeout(600)
def test_both_kinds_of_node_equal_the_simulator_and_all_that_leaves_is_on_record(
    app: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with make_deployment(app, tmp_path) as deployment:
        keys = deployment.folder / "keys"
        deployment.nodes = [{"partition-id": i} for i in range(3)]
        stranger, _ = make_node_key(tmp_path / "stranger", "node")
        refused = deployment.start_node(2, stock=True, key=stranger)
        for i in range(2):
            deployment.register(i)
        with record(deployment.port, keys) as recorder:
            ours = deployment.start_node(0, port=recorder.port)
            deployment.start_node(1, stock=True)
            ending, said = follow(deployment, app, clients=2, rounds=1, out=str(out))
            logs = ending.reason + deployment.log("node0") + deployment.log("superlink")[-3000:]
            assert ending == Ending(True, ""), logs
            ours.terminate()
            assert ours.wait(timeout=30) == 0, deployment.log("node0")
        assert sum(line.startswith("round 1: objective") for line in said) == 1
        wait_until(lambda: refused.poll() is not None, 30)
        assert refused.poll() != 0, "an unregistered node must be refused"
        sessions, port = [p.pid for p in deployment.processes], deployment.port
    check_model(app, out, rounds=1)
    lines = [
        json.loads(line)
        for line in (deployment.folder / "logs" / "audit0.jsonl").read_text().splitlines()
    ]
    pushed = [p.sent for p in recorder.passed if "push" in p.path]
    written = sum(line.get("bytes_out", 0) for line in lines)
    assert pushed and 0 <= sum(pushed) - written < FRAMING * len(pushed), "and nothing besides"
    asked = [line["request"] for line in lines if line["event"] == "request"]
    assert asked == ["hello", "gradient", "gradient", "local", "bounds", "deliver"]  # scale first
    assert lines[-1]["event"] == "stopped"
    size = sum(value.numel() for value in load_file(out / "model.safetensors").values())
    left = {name: a for line in lines for name, a in line.get("arrays", {}).items()}
    assert left == {
        name: {"dtype": "float64", "shape": [size]} for name in ("gradient", "displacement")
    }
    assert not any(map(list_session, sessions)) and not is_reachable("127.0.0.1", port)


@pytest.mark.slow  # in memory: test_faults and test_app
@pytest.mark.timeout(600)
def test_a_secure_run_whose_server_app_was_killed_goes_on_as_a_secure_run(
    app: Path, tmp_path: Path
) -> None:
    out, endings = tmp_path / "run", list[Ending]()
    with make_deployment(app, tmp_path, 3, database=False) as deployment:

        def run() -> None:
            ending, _ = follow(deployment, app, clients=3, rounds=6, privacy="secure", out=str(out))
            endings.append(ending)

        thread = threading.Thread(target=run)
        thread.start()
        rows = out / "rounds.csv"
        wait_until(lambda: rows.exists() and len(rows.read_text().splitlines()) >= 3, 200)
        (server,) = find_server_app(deployment)
        os.kill(server, signal.SIGKILL)
        # Flower notices after a minute; the run goes on at once, though the app says "none".
        ending, said = follow(deployment, app, resume=True, out=str(out), clients=3)
        assert ending == Ending(True, ""), ending.reason
    thread.join(timeout=60)
    assert endings and not endings[0].completed
    told = json.loads((out / "flower.json").read_text())
    assert (told["privacy"], told["rounds"]) == ("secure", 6)
    assert any("privacy is secure, not none as the app says now" in line for line in said)
    history = History.load(out)
    assert [r.round for r in history.rounds] == [1, 2, 3, 4, 5, 6]
    assert min(r.exchanges for r in history.rounds) >= 5  # secure sums to the end; in clear it is 2
    check_model(app, out, rounds=6, clients=3)
    for i in range(3):
        audit = (deployment.folder / "logs" / f"audit{i}.jsonl").read_text()
        left = {name for line in audit.splitlines() for name in json.loads(line).get("arrays", {})}
        assert left == {"masked"}


def find_server_app(deployment: Deployment) -> list[int]:
    """Return the processes of the deployment that run the server app."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended since, or not ours
            words, home = (path / "cmdline").read_bytes(), (path / "environ").read_bytes()
            if b"flwr-serverapp" in words and str(deployment.folder).encode() in home:
                found.append(int(path.name))
    return found


@pytest.mark.slow  # in memory: test_tables and test_policy
@pytest.mark.timeout(600)
def test_two_sites_with_files_and_policies(tmp_path: Path) -> None:
    """Statistics, a refusal, and a run that equals the one on the table of both sites."""
    app, out = tmp_path / "hospital-app", tmp_path / "run"
    package = write_app(app, data="penguins")
    text = (package / "equifed.toml").read_text()
    data = 'target = "outcome"\nclient = "hospital"\ndtype = "float64"\nholdout = { test = 0.2 }\n'
    text = text.replace('name = "penguins"', f"{data}#")
    (package / "equifed.toml").write_text(text.replace("every = 5", 'splits = ["test"]'))
    whole = draw_hospitals(0, {"north": 120, "south": 80})
    whole["admitted"] = whole["admitted"].dt.strftime("%Y-%m-%d")
    whole.to_csv(tmp_path / "all.csv", index=False)
    nodes = []
    for name in ("north", "south"):
        rows = whole[whole["hospital"] == name].drop(columns="hospital")
        rows.rename(columns={"age": f"age {name}"}).to_csv(tmp_path / f"{name}.csv", index=False)
        site = f'name = "{name}"\ndata = "{name}.csv"\npolicy = "{name}-policy.toml"\n'
        (tmp_path / f"{name}.toml").write_text(f'{site}[columns]\nage = "age {name}"\n')
        (tmp_path / f"{name}-policy.toml").write_text("max_steps = 100\n")
        nodes.append({"site": str(tmp_path / f"{name}.toml")})
    policy = tmp_path / "south-policy.toml"
    env = {"OMP_NUM_THREADS": "1"}
    with Deployment(tmp_path / "up", nodes, app=app, env=env, database=False) as deployment:
        policy.write_text("max_steps = 3\n")
        ending, _ = follow(deployment, app, clients=2, rounds=2, out=str(out))
        assert not ending.completed
        assert "south: refused: 20 local steps are asked for, this site takes at most 3" in (
            ending.reason
        )
        policy.write_text("show_by_name = false\n")
        ending, said = follow(deployment, app, clients=2, do="statistics")
        assert ending == Ending(True, ""), ending.reason
        assert any(line.split()[:2] == ["north", "96"] for line in said), said
        assert "WARNING: south does not show its numbers by name" in said
        ending, said = follow(deployment, app, clients=2, rounds=2, out=str(out))
        assert ending == Ending(True, ""), ending.reason + deployment.log("node0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pooled = Federation.from_table(
            tmp_path / "all.csv", "hospital", "outcome", test=0.2, dtype="float64"
        ).subset(["north", "south"])
    assert pooled.preparation is not None
    assert json.loads((out / "preparation.json").read_text()) == pooled.preparation.to_json()
    config = AppConfig.read(package / "equifed.toml")
    engine = loop_clients(pooled, config.build_task())
    algorithm = config.build_algorithm(pooled.train.sizes.tolist())
    expected = train(algorithm, engine, rounds=2, seed=config.seed, progress=False)
    assert expected.parameters is not None
    found = load_file(out / "model.safetensors")
    for name, value in expected.parameters.items():
        assert (found[name] - value).abs().max() == 0.0
    audit = (deployment.folder / "logs" / "audit1.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in audit]
    assert any("at most 3" in line.get("refused", "") for line in lines)
    asked = [line["request"] for line in lines if line["event"] == "request"]
    assert asked.count("prepare") == 5  # kinds, sums, names, counts, squares
