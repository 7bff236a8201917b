"""Measurements on a real deployment on this machine.

Run: python -m benchmarks.flower.deployment SCENARIO

Scenarios: rounds, kill-node-fail, kill-node-wait, kill-node-continue, kill-superlink, large,
simulation.
Each starts its own SuperLink and nodes with TLS and node keys, prints one JSON line and stops
everything. The numbers depend on the machine and on what else runs on it.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from equifed.engines.loop import LoopClients
from equifed.flower.app_config import AppConfig
from equifed.flower.trial.apps import find_script, write_app
from equifed.flower.trial.deploy import Deployment, is_reachable
from equifed.models.losses import outputs_for
from equifed.runs.build import load_data
from equifed.training.loop import train


class Trial:
    """An app, a deployment and a run folder."""

    def __init__(
        self,
        root: Path,
        nodes: int,
        rounds: int,
        data: str,
        edit: Any = None,
        stock: bool = False,
        database: bool = True,
        kind: type[Deployment] = Deployment,
    ) -> None:
        self.root, self.nodes, self.rounds, self.out = root, nodes, rounds, root / "run"
        package = write_app(root / "trial-app", data=data)
        self.toml = package / "equifed.toml"
        text = self.toml.read_text().replace("every = 5", "splits = []")
        self.toml.write_text(edit(text) if edit else text)
        configs = [{"partition-id": i} for i in range(nodes)]
        self.deployment = kind(
            root / "up",
            configs,
            app=None if stock else root / "trial-app",
            database=database,
            env={"OMP_NUM_THREADS": "1"},
        )

    def settings(self, **more: Any) -> dict[str, Any]:
        """Return the run configuration."""
        return {"clients": self.nodes, "rounds": self.rounds, "out": str(self.out), **more}

    def in_background(self, **more: Any) -> tuple[threading.Thread, list[str]]:
        """Run the app in a thread; its log is in the list when the thread has ended."""
        log: list[str] = []

        def run() -> None:
            done = self.deployment.run(self.root / "trial-app", self.settings(**more))
            log.append(done.stdout)

        thread = threading.Thread(target=run)
        thread.start()
        return thread, log

    def rows(self) -> list[dict[str, str]]:
        """Return the rounds so far."""
        path = self.out / "rounds.csv"
        if not path.exists():
            return []
        with path.open(newline="") as file:
            return list(csv.DictReader(file))

    def wait_for_round(self, number: int, timeout: float = 600) -> None:
        """Return when that many rounds are done."""
        until = time.monotonic() + timeout
        while len(self.rows()) < number and time.monotonic() < until:
            time.sleep(0.2)
        if len(self.rows()) < number:
            raise RuntimeError(self.deployment.log("superlink")[-3000:])

    def events(self) -> list[dict[str, Any]]:
        """Return the events so far."""
        path = self.out / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def error(self) -> float | None:
        """Return the largest difference to the simulator, or None if the run did not end."""
        if not (self.out / "model.safetensors").exists():
            return None
        config = AppConfig.read(self.toml)
        federation, task = load_data(config.data).subset(range(self.nodes)), config.build_task()
        module = task.model(federation.input_shape, outputs_for(federation, task.loss))
        dtype = getattr(torch, task.dtype)
        given = {"l2": task.l2, "dtype": dtype, "init": "fresh"}
        engine = LoopClients(federation, module, task.loss, **given)
        algorithm = config.build_algorithm(federation.train.sizes.tolist())
        expected = train(algorithm, engine, rounds=self.rounds, seed=config.seed).parameters
        assert expected is not None
        found = load_file(self.out / "model.safetensors")
        return max(float((found[k] - v).abs().max()) for k, v in expected.items())

    def restart(self, i: int) -> float:
        """Start a killed node again and wait until it is taken back; return the seconds it took."""
        began, log = time.monotonic(), f"node{i}"
        before = self.deployment.log(log).count("is connected to")
        self.deployment.start_node(i)
        while self.deployment.log(log).count("is connected to") == before:
            time.sleep(0.5)
        return time.monotonic() - began


def rounds(root: Path, nodes: int, count: int) -> dict[str, Any]:
    trial = Trial(root, nodes, count, "heart-disease")
    began = time.monotonic()
    with trial.deployment as deployment:
        up = time.monotonic() - began
        deployment.run(root / "trial-app", trial.settings())
    rows = trial.rows()
    per_round = [float(row["seconds"]) for row in rows]
    exchanges = sum(int(row["exchanges"]) for row in rows)
    return {
        "nodes": nodes,
        "rounds": len(rows),
        "start_s": round(up, 1),
        "total_s": round(time.monotonic() - began, 1),
        "seconds_per_exchange": round(sum(per_round) / exchanges, 2),
        "slowest_round_s": round(max(per_round), 1),
        "error": trial.error(),
    }


def kill_node(root: Path, policy: str) -> dict[str, Any]:
    trial = Trial(root, 3, 6, "penguins")
    deadlines = {"on-missing": policy, "timeout": 45.0, "grace": 20.0, "wait": 600.0}
    with trial.deployment as deployment:
        thread, log = trial.in_background(**deadlines)
        trial.wait_for_round(2)
        time.sleep(1)  # into the next round
        deployment.kill(deployment.supernodes[1])
        killed, back = time.monotonic(), None
        if policy == "wait":
            back = round(trial.restart(1), 1)
        thread.join(timeout=900)
        ended = time.monotonic() - killed
    said = [line for line in "".join(log).splitlines() if "TrainingError" in line]
    return {
        "policy": policy,
        "finished": (trial.out / "summary.json").exists(),
        "rounds": len(trial.rows()),
        "seconds_from_kill_to_end": round(ended, 1),
        "node_taken_back_after_s": back,
        "events": [
            {k: e.get(k) for k in ("event", "round", "client", "reason")} for e in trial.events()
        ],
        "seconds_of_rounds": [round(float(r["seconds"]), 1) for r in trial.rows()],
        "error_to_simulator": trial.error() if policy == "wait" else None,
        "said": said[-1:],
    }


def kill_superlink(root: Path) -> dict[str, Any]:
    trial = Trial(root, 2, 6, "penguins")
    with trial.deployment as deployment:
        thread, _ = trial.in_background()
        trial.wait_for_round(3)
        assert deployment.superlink is not None
        deployment.kill(deployment.superlink)
        thread.join(timeout=120)
        done_before, began = len(trial.rows()), time.monotonic()
        deployment.start_superlink()
        deployment.run(root / "trial-app", trial.settings(resume=True))
        ended = time.monotonic() - began
    return {
        "rounds_before": done_before,
        "rounds_after": len(trial.rows()),
        "seconds_from_restart_to_end": round(ended, 1),
        "resumed_at": [e["round"] for e in trial.events() if e["event"] == "resume"],
        "error_to_simulator": trial.error(),
    }


def large(root: Path, width: int = 5000) -> dict[str, Any]:
    def edit(text: str) -> str:
        text = text.replace('name = "logistic"', f'name = "mlp"\nhidden = [{width}, {width}]')
        text = text.replace('dtype = "float64"', 'dtype = "float32"')
        head, _, _ = text.partition("[algorithm]")
        work = '[algorithm]\nname = "scaffold"\nvariates = "fresh"\n[algorithm.local]\n'
        return head + work + "lr = 0.01\nsteps = 1\nbatch_size = 8\n[evaluate]\nsplits = []\n"

    trial = Trial(root, 2, 2, "penguins", edit)
    with trial.deployment as deployment:
        deployment.run(root / "trial-app", trial.settings())
    rows = trial.rows()
    return {
        "megabytes_of_the_model": round((trial.out / "model.safetensors").stat().st_size / 1e6, 1),
        "rounds": len(rows),
        "seconds_of_rounds": [round(float(r["seconds"]), 1) for r in rows],
        "exchanges_a_round": [int(r["exchanges"]) for r in rows],
        "megabytes_up_a_round": [round(int(r["bytes_up"]) / 1e6, 1) for r in rows],
        "megabytes_down_a_round": [round(int(r["bytes_down"]) / 1e6, 1) for r in rows],
    }


def simulation(root: Path, nodes: int = 10) -> dict[str, Any]:
    """Run the same app in Flower's simulation; needs Ray (pip install 'flwr[simulation]')."""

    def edit(text: str) -> str:
        return text.replace(
            'name = "synthetic-regression"', f'name = "synthetic-regression"\nclients = {nodes}'
        )

    trial = Trial(root, nodes, 3, "synthetic-regression", edit)
    deployment = trial.deployment = Deployment(root / "up", [])
    for name in ("home", "logs", "memory"):
        (deployment.folder / name).mkdir(parents=True, exist_ok=True)
    where = f"127.0.0.1:{deployment.port}"
    (deployment.folder / "home" / "config.toml").write_text(
        f'[superlink]\ndefault = "local"\n\n[superlink.local]\naddress = "{where}"\n'
        f"insecure = true\noptions.num-supernodes = {nodes}\n"
    )
    began = time.monotonic()
    try:
        place = ["--host", "127.0.0.1", "--port", str(deployment.port)]
        trust = ["--insecure", "--simulation", "--disable-runtime-dependency-installation"]
        deployment.superlink = deployment._spawn(
            "superlink", [find_script("flower-superlink"), *trust, *place]
        )
        reachable = partial(is_reachable, "127.0.0.1", deployment.port)
        deployment._wait("superlink", deployment.superlink, reachable, 60)
        done = deployment.run(root / "trial-app", trial.settings())
    finally:
        deployment.stop()
    rows = trial.rows()
    return {
        "nodes": nodes,
        "rounds": len(rows),
        "total_s": round(time.monotonic() - began, 1),
        "seconds_of_rounds": [round(float(r["seconds"]), 1) for r in rows],
        "error_to_simulator": trial.error(),
        "said": "" if rows else done.stdout[-1500:],
    }


SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "rounds": lambda root: rounds(root, 4, 10),
    "rounds-1": lambda root: rounds(root, 1, 5),
    "rounds-2": lambda root: rounds(root, 2, 5),
    "kill-node-fail": lambda root: kill_node(root, "fail"),
    "kill-node-wait": lambda root: kill_node(root, "wait"),
    "kill-node-continue": lambda root: kill_node(root, "continue"),
    "kill-superlink": kill_superlink,
    "large": large,
    "simulation": simulation,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--keep", type=Path, help="keep keys, logs and run folder here")
    chosen = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="equifed-") as temporary:
        root = chosen.keep or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        found = SCENARIOS[chosen.scenario](root)
    print(json.dumps({"scenario": chosen.scenario, **found, "load_before": round(load, 1)}))


if __name__ == "__main__":
    main()
