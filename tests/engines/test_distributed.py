"""Several processes: the same results as the loop, whatever their number; a crash loses nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engines import distributed_program as program

from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.engines.distributed import DistributedClients, assign_clients, cut_shard
from equifed.runs.run import free_port, run
from equifed.training.history import History

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


def start(processes: int, *arguments: str) -> list[subprocess.CompletedProcess[str]]:
    port = free_port()
    running = []
    for rank in range(processes):
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, "-m", "tests.engines.distributed_program", *arguments]
        running.append(
            subprocess.Popen(
                command, env=environment, text=True, cwd=ROOT, stderr=subprocess.PIPE, stdout=-1
            )
        )
    done = []
    for process in running:
        out, err = process.communicate(timeout=120)
        done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return done


def assert_close(one: Any, other: Any) -> None:
    """Compare nested tables of numbers."""
    if isinstance(one, dict):
        assert set(one) == set(other)
        for key in one:
            assert_close(one[key], other[key])
    else:
        assert other == (one if isinstance(one, str) else pytest.approx(one, abs=1e-9))


def assert_same(history: History, other: History) -> None:
    assert history.parameters is not None and other.parameters is not None
    for name, value in history.parameters.items():
        assert torch.allclose(value, other.parameters[name], rtol=0, atol=1e-10)
    assert (history.own is None) == (other.own is None)
    for name, value in (history.own or {}).items():
        assert torch.allclose(value, (other.own or {})[name], rtol=0, atol=1e-10)
    for r, weights in history.weights.items():
        assert other.weights[r] == pytest.approx(weights, abs=1e-10)
    for a, b in zip(history.metrics, other.metrics, strict=True):
        assert (a.split, a.metric, a.round) == (b.split, b.metric, b.round)
        assert b.values == pytest.approx(a.values, abs=1e-10, nan_ok=True)
    assert set(history.hits) == set(other.hits)
    for split, hits in history.hits.items():
        for name in ("correct", "checksums"):
            np.testing.assert_array_equal(getattr(hits, name), getattr(other.hits[split], name))
    assert [r.bytes_up for r in history.rounds] == [r.bytes_up for r in other.rounds]
    assert history.details is not None and other.details is not None
    for a, b in zip(history.details.clients, other.details.clients, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert_close(a.to_dict(), b.to_dict())


def test_processes_agree_with_the_loop(tmp_path: Path) -> None:
    names = list(program.ALGORITHMS)
    for process in start(3, ",".join(names), str(tmp_path), "run"):
        assert process.returncode == 0, process.stderr
    for name in names:
        assert_same(program.loop(name), History.load(tmp_path / name))


def test_a_killed_process_ends_the_run_and_another_number_resumes_it(tmp_path: Path) -> None:
    survivor, killed = start(2, "scaffold", str(tmp_path), "die")
    assert killed.returncode == -9
    assert survivor.returncode != 0
    assert "A process of the group ended or does not answer" in survivor.stderr
    for process in start(3, "scaffold", str(tmp_path), "resume"):
        assert process.returncode == 0, process.stderr
    assert_same(program.loop("scaffold"), History.load(tmp_path / "scaffold"))


def test_every_client_is_held_once_and_the_load_is_shared() -> None:
    sizes = np.random.default_rng(0).integers(1, 100, 1000)
    held = assign_clients(sizes, 4)
    assert (np.diff(held) >= 0).all()
    load = np.bincount(held, weights=sizes)
    assert load.max() < 1.1 * load.min()


def test_a_shard_keeps_the_clients_and_only_its_samples() -> None:
    whole = program.federation()
    part = cut_shard(whole, np.arange(7) < 3)
    assert part.names == whole.names
    assert part.train.sizes.tolist() == [*whole.train.sizes[:3], 0, 0, 0, 0]
    assert np.array_equal(part.train.client(2)[0], whole.train.client(2)[0])
    assert isinstance(part, Federation)


def test_rounded_gradients_have_no_curvature_here_either() -> None:
    clients = DistributedClients(program.federation(), "logistic", precision="bf16")
    answers = clients.curvature(), clients.curvature_sum(clients.initial(Stream(0)), np.ones(7))
    assert all(isinstance(why, str) and "bf16" in why for why in answers)


def test_more_processes_than_clients_are_refused() -> None:
    with pytest.raises(ValueError, match="3 processes are more than these 2 clients"):
        assign_clients(np.array([3, 4]), 3)


def test_a_config_runs_in_processes(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        'rounds = 3\ndata = "heart-disease"\nmodel = "logistic"\n'
        'algorithm = {name = "fedavg", local = {lr = 0.1, steps = 2}}\n'
    )
    out = tmp_path / "run"
    command = [sys.executable, "-m", "equifed", "run", str(config), "--out", str(out), "--quiet"]
    command += ["--workers", "2"]
    first = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert first.returncode == 0, first.stderr
    several, alone = History.load(out), run(config)
    assert several.per_client("loss") == pytest.approx(alone.per_client("loss"), rel=1e-5)
    again = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert again.returncode == 2
    assert "already holds a run" in again.stderr


def test_the_group_is_left_before_python_ends() -> None:
    """What remains of it at the exit may abort a process whose work is done."""
    program = (
        "import atexit, torch, torch.distributed as dist\n"
        "atexit.register(lambda: print('left:', not dist.is_initialized()))\n"  # the last to run
        "from equifed.engines.distributed import Workers\n"
        "print('size:', Workers('cpu').size)\n"
    )
    alone = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=alone, capture_output=True, text=True, check=True
    )
    assert ended.stdout.split("\n")[:2] == ["size: 1", "left: True"]
