"""Vectors that clients keep in a file: the same bits as in memory, and states stay values."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.problems import classification

from equifed.algorithms.feddyn import FedDyn
from equifed.algorithms.scaffold import Scaffold
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.engines.row_file import FileVectors, RowFile
from equifed.engines.simulate import simulate
from equifed.runs import run as runs
from equifed.runs.config import RunConfig
from equifed.runs.settings import ConfigError
from equifed.training import checkpoints
from equifed.training import loop as training
from equifed.training.states import collect

WORK = LocalSGD(lr=0.1, steps=3, batch_size=2)
FEDERATION = classification(sizes=(5, 3, 9, 4, 7, 6, 8, 5, 4, 6))
ALGORITHMS = [
    Scaffold(WORK, participation=0.4),
    Scaffold(WORK, variates="stored-gradient", participation=0.4),
    FedDyn(WORK, participation=0.4),
]


def engine(where: str, **more: Any) -> Any:
    return simulate(FEDERATION, "mlp", remember_on=where, **more)  # type: ignore[arg-type]


def walk(algorithm: Any, clients: Any, state: Any, first: int, last: int) -> Any:
    for r in range(first, last):
        state, _ = algorithm.round(state, clients, Stream(0).at("round", r))
    return state


CASES = [("stacked", torch.float32, algorithm) for algorithm in ALGORITHMS]
CASES += [("stacked", torch.float64, ALGORITHMS[0]), ("loop", torch.float32, ALGORITHMS[0])]


@pytest.mark.parametrize(("name", "dtype", "algorithm"), CASES)
def test_disk_and_memory_agree_to_the_bit(
    name: str, dtype: torch.dtype, algorithm: Any, tmp_path: Path
) -> None:
    """Straight on, and over a checkpoint of either into either."""
    ends = []
    for before, after in [("memory", "memory"), ("disk", "disk"), ("disk", "memory"),
                          ("memory", "disk")]:  # fmt: skip
        clients = engine(before, engine=name, dtype=dtype)
        first = algorithm.init(clients, clients.initial(Stream(0)))
        state = walk(algorithm, clients, first, 0, 3)
        checkpoints.save(tmp_path / before / after, 3, collect(state), {})
        _, state, _ = checkpoints.load(tmp_path / before / after, first)
        ends.append(walk(algorithm, engine(after, engine=name, dtype=dtype), state, 3, 6).x)
        ends.append(walk(algorithm, clients, first, 0, 6).x)
    assert all(torch.equal(end, ends[0]) for end in ends)
    assert torch.isfinite(ends[0]).all()


def test_a_state_stays_as_it_is_while_rounds_go_on() -> None:
    clients, algorithm = engine("disk"), ALGORITHMS[0]
    third = walk(algorithm, clients, algorithm.init(clients, clients.initial(Stream(0))), 0, 3)
    once = walk(algorithm, clients, third, 3, 5).x
    walk(algorithm, clients, third, 3, 20)  # rows that nobody holds are written over
    assert torch.equal(walk(algorithm, clients, third, 3, 5).x, once)


def test_only_those_who_took_part_have_rows_and_rows_are_used_again() -> None:
    clients, algorithm = engine("disk"), ALGORITHMS[0]
    state = walk(algorithm, clients, algorithm.init(clients, clients.initial(Stream(0))), 0, 1)
    assert isinstance(state.variates, FileVectors)
    assert (state.variates.slots >= 0).sum() == 4
    walk(algorithm, clients, state, 1, 30)
    gc.collect()
    assert clients._row_file.slots <= 10 + 2 * 4 + 4  # of all, of two rounds, of the state held


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sets(st.integers(0, 5), min_size=1), st.booleans()), max_size=12))
def test_a_file_is_a_dictionary_of_rows(rounds: list[tuple[set[int], bool]]) -> None:
    """Oracle: a matrix that is copied in every round; some memories are kept, some dropped."""
    draw, file = np.random.default_rng(0), RowFile(torch.zeros(3))
    matrix, memory, held = torch.zeros(6, 3), None, []
    for who, keep in rounds:
        index = np.array(sorted(who))
        rows = torch.as_tensor(draw.standard_normal((len(index), 3)), dtype=torch.float32)
        matrix = matrix.clone()
        matrix[index] = rows
        memory = file.replace(memory, 6, index, rows)
        held += [(memory, matrix)] if keep else []
    for kept, expected in held:
        assert torch.equal(kept.take(np.arange(6)), expected)
        assert torch.equal(kept.collect().take(np.array([4, 0])), expected[[4, 0]])


@pytest.mark.long
def test_toml_runs_resume_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", 0.0)

    class Dies(runs.Callback):
        def evaluation(self, round: int, records: Any) -> None:
            if round == 2:
                raise KeyboardInterrupt

    def config(where: str) -> RunConfig:
        work = {"lr": 0.1, "steps": 2, "batch_size": 3}
        return RunConfig.from_dict({
            "rounds": 4,
            "data": {"name": "fashion-three", "train": 8, "test": 4},
            "model": {"name": "logistic"},
            "algorithm": {"name": "scaffold", "participation": 0.7, "local": work},
            "engine": {"name": "stacked", "remember_on": where},
        })  # fmt: skip

    runs.run(config("memory"), tmp_path / "memory")
    with pytest.raises(KeyboardInterrupt):
        runs.run(config("disk"), tmp_path / "disk", callbacks=[Dies()])
    runs.resume(tmp_path / "disk")
    for name in ("metrics.csv", "model.safetensors"):
        assert (tmp_path / "memory" / name).read_bytes() == (tmp_path / "disk" / name).read_bytes()


def test_another_place_is_refused() -> None:
    with pytest.raises(ValueError, match="remember_on must be 'memory' or 'disk', got 'tape'"):
        engine("tape")
    table = {"rounds": 1, "data": "fashion-three", "model": "logistic", "algorithm": "fedavg"}
    with pytest.raises(ConfigError, match="remember_on"):
        RunConfig.from_dict({**table, "engine": {"name": "stacked", "remember_on": "tape"}})
    with pytest.raises(ConfigError, match=r"engine\.remember_on: there is no setting"):
        RunConfig.from_dict({**table, "engine": {"name": "distributed", "remember_on": "disk"}})
