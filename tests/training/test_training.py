"""The loop over rounds: recording, quarantine, stopping, checkpoints and resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import equifed.training.loop as training
from equifed.algorithms.fedavg import FedAvg
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.algorithms.scaffold import Scaffold
from equifed.contract.clients import MissingClients
from equifed.contract.evaluation import SPLITS
from equifed.contract.local import LocalSGD
from equifed.data.federation import Federation
from equifed.engines.loop import LoopClients
from equifed.objectives import ChiSquare
from equifed.steps.schedules import ConstantSteps
from equifed.training.checkpoint import CheckpointError
from equifed.training.files import RunFolderError
from equifed.training.final_model import StopWhen
from equifed.training.folder import RunFolder
from equifed.training.history import History
from equifed.training.loop import train
from equifed.training.play_round import MissingPolicy, TrainingError
from equifed.training.trackers import Callback

pytestmark = pytest.mark.long

WORK = LocalSGD(lr=0.1, steps=3, batch_size=4)
ALGORITHMS = [
    FedAvg(WORK, participation=0.5),
    Scaffold(WORK),
    ScaffPD(ChiSquare(0.1, scale=1.0), WORK, ConstantSteps(0.3, 0.1)),
]


def federation() -> Federation:
    rng = np.random.default_rng(0)
    data = {
        name: (rng.normal(size=(m, 3)), rng.integers(0, 2, size=m))
        for name, m in [("anna", 9), ("ben", 6), ("cem", 12), ("dora", 5)]
    }
    return Federation.from_clients(data).split(test=0.3, seed=0)


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def clients(**options: object) -> LoopClients:
    given: dict[str, Any] = {"dtype": torch.float64, "init": "fresh", **options}
    return LoopClients(federation(), nn.Linear(3, 2), cross_entropy, **given)


def run(algorithm: object, folder: Path | None = None, **options: object) -> History:
    engine = clients()
    store = None
    if folder is not None:
        store = RunFolder(folder, engine.names)
        if not options.get("resume"):
            store.create()
    defaults = {"rounds": 6, "seed": 5, "every": 2}
    return train(
        algorithm,
        engine,
        evaluate=SPLITS,
        folder=store,
        **{**defaults, **options},
    )


class Poisoned(LoopClients):
    """Clients of which some report a loss that is not a number in some rounds."""

    bad: dict[int, set[int]] = {}  # noqa: RUF012 - set per test

    def local_steps(self, x, work, stream, **options):  # type: ignore[no-untyped-def]
        r = stream.address[stream.address.index("round") + 1]
        ill = self.bad.get(r, set()) & set(self.index.tolist())
        values = np.where(np.isin(self.index, list(ill)), np.nan, 1.0)
        self.require_finite(values, "loss")
        return super().local_steps(x, work, stream, **options)


def poisoned(bad: dict[int, set[int]]) -> Poisoned:
    given: dict[str, Any] = {"dtype": torch.float64, "init": "fresh"}
    engine = Poisoned(federation(), nn.Linear(3, 2), cross_entropy, **given)
    engine.bad = bad
    return engine


def test_everything_is_recorded() -> None:
    history = run(ALGORITHMS[2])
    assert [r.round for r in history.rounds] == [1, 2, 3, 4, 5, 6]
    assert all(r.exchanges == 2 for r in history.rounds)
    # Two exchanges: x down; loss and gradient up; x and target down; update up. d = 8 doubles.
    assert all(r.bytes_down == 4 * 3 * 64 for r in history.rounds)
    assert all(r.bytes_up == 4 * (2 * 64 + 8) for r in history.rounds)
    rounds, values = history.series("accuracy", "test")
    assert rounds.tolist() == [0, 2, 4, 6]
    assert values.shape == (4, 4)
    assert sorted(history.weights) == [1, 2, 4, 6]
    assert history.weights[6].sum() == pytest.approx(1)
    assert set(history.per_client()) <= set(history.names)


def test_metrics_equal_a_direct_computation() -> None:
    history = run(ALGORITHMS[0])
    assert history.parameters is not None
    weight, bias = history.parameters["weight"], history.parameters["bias"]
    data = federation()
    for i, name in enumerate(data.names):
        assert data.test is not None
        x, y = data.test.client(i)
        outputs = torch.as_tensor(x) @ weight.T + bias
        accuracy = (outputs.argmax(1).numpy() == y).mean()
        assert history.per_client()[name] == pytest.approx(accuracy)
        loss = cross_entropy(outputs, torch.as_tensor(y)).mean()
        assert history.per_client("loss")[name] == pytest.approx(float(loss))


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: type(a).__name__)
def test_the_same_seed_gives_the_same_bits(algorithm: object) -> None:
    one, two, other = run(algorithm), run(algorithm), run(algorithm, seed=6)
    assert one.parameters is not None and two.parameters is not None
    assert other.parameters is not None
    for name, value in one.parameters.items():
        assert torch.equal(value, two.parameters[name])
    assert not torch.equal(one.parameters["weight"], other.parameters["weight"])


def test_a_history_survives_its_folder(tmp_path: Path) -> None:
    history = run(ALGORITHMS[2], tmp_path / "run")
    again = History.load(tmp_path / "run")
    assert again.rounds[3].numbers == history.rounds[3].numbers
    assert [r.objective for r in again.rounds] == [r.objective for r in history.rounds]
    for a, b in zip(again.metrics, history.metrics, strict=True):
        assert (a.round, a.split, a.metric) == (b.round, b.split, b.metric)
        assert np.array_equal(a.values, b.values, equal_nan=True)
    assert all(np.array_equal(again.weights[r], w) for r, w in history.weights.items())
    assert again.parameters is not None and history.parameters is not None
    assert torch.equal(again.parameters["weight"], history.parameters["weight"])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary == json.loads(json.dumps(history.summary()))
    history.save(tmp_path / "copy")
    copied = (tmp_path / "copy" / "metrics.csv").read_bytes()
    assert copied == (tmp_path / "run" / "metrics.csv").read_bytes()


class Killed(Exception):
    """Stands for a kill."""


class KillAfter(Callback):
    def __init__(self, round: int) -> None:
        self.last = round

    def round(self, record: object, info: object) -> None:
        if record.round == self.last:  # type: ignore[attr-defined]
            raise Killed


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("killed_in", [1, 3, 4])
def test_a_resumed_run_ends_in_the_same_bytes(
    algorithm: object, killed_in: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", 0.0)
    run(algorithm, tmp_path / "whole")
    with pytest.raises(Killed):
        run(algorithm, tmp_path / "broken", callbacks=[KillAfter(killed_in)])
    history = run(algorithm, tmp_path / "broken", resume=True)
    for name in ("metrics.csv", "weights.csv", "hits.npz", "model.safetensors", "summary.json"):
        whole, broken = (tmp_path / "whole" / name).read_bytes(), tmp_path / "broken" / name
        assert broken.read_bytes() == whole, name
    said = [e["event"] for e in history.events if e["event"] not in ("note", "warning")]
    assert said == ["resume", "given out"]


def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", 0.0)
    run(ALGORITHMS[2], tmp_path / "whole")
    with pytest.raises(Killed):
        run(ALGORITHMS[2], tmp_path / "broken", callbacks=[KillAfter(4)])
    tensors = sorted((tmp_path / "broken" / "checkpoint").glob("*.safetensors"))
    assert len(tensors) == 2
    content = bytearray(tensors[-1].read_bytes())
    content[-1] ^= 1
    tensors[-1].write_bytes(bytes(content))
    run(ALGORITHMS[2], tmp_path / "broken", resume=True)
    for name in ("metrics.csv", "model.safetensors"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_checkpoints_of_another_algorithm_are_refused(tmp_path: Path) -> None:
    run(ALGORITHMS[0], tmp_path / "run")
    with pytest.raises(CheckpointError, match="No usable checkpoint"):
        run(ALGORITHMS[2], tmp_path / "run", resume=True)


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    run(ALGORITHMS[0], tmp_path / "run")
    with pytest.raises(RunFolderError, match="--overwrite to replace it, or continue it with"):
        run(ALGORITHMS[0], tmp_path / "run")
    RunFolder(tmp_path / "run", ["a"]).create(overwrite=True)


def test_a_client_that_is_not_finite_is_quarantined_for_that_round_only() -> None:
    engine = poisoned({2: {1}, 3: {0, 3}})
    history = train(FedAvg(WORK), engine, rounds=4, seed=0)
    events = [(e["round"], e["client"]) for e in history.events if e["event"] == "quarantine"]
    assert events == [(2, "ben"), (3, "anna"), (3, "dora")]
    assert "loss is nan" in history.events[0]["reason"]
    assert history.parameters is not None
    assert all(torch.isfinite(p).all() for p in history.parameters.values())
    assert history.weights[2][1] == 0
    assert history.weights[2].sum() == pytest.approx(1)
    assert (history.weights[4] > 0).all()


def test_a_round_without_a_client_equals_training_without_it() -> None:
    engine = poisoned({r: {1} for r in range(1, 4)})
    with_ill = train(FedAvg(WORK), engine, rounds=3, seed=0, give_out="last")
    without = train(FedAvg(WORK), clients().subset(np.array([0, 2, 3])), rounds=3, seed=0)
    assert with_ill.parameters is not None and without.parameters is not None
    assert torch.equal(with_ill.parameters["weight"], without.parameters["weight"])


def test_when_all_are_lost_the_last_good_state_is_kept(tmp_path: Path) -> None:
    engine = poisoned({3: {0, 1, 2, 3}})
    store = RunFolder(tmp_path / "run", engine.names)
    store.create()
    with pytest.raises(TrainingError, match="Round 3: no client gave a usable answer"):
        train(FedAvg(WORK), engine, rounds=5, seed=0, folder=store)
    assert "stopped" in (tmp_path / "run" / "events.jsonl").read_text()
    engine.bad = {}
    healed = train(FedAvg(WORK), engine, rounds=5, seed=0, folder=store, resume=True)
    never_ill = train(FedAvg(WORK), poisoned({}), rounds=5, seed=0)
    assert healed.parameters is not None and never_ill.parameters is not None
    assert torch.equal(healed.parameters["weight"], never_ill.parameters["weight"])


def test_policies_for_missing_clients() -> None:
    with pytest.raises(TrainingError, match="policy for missing clients is 'fail'"):
        train(FedAvg(WORK), poisoned({1: {2}}), rounds=2, missing=MissingPolicy("fail"))
    with pytest.raises(
        TrainingError, match="2 of 4 clients are left, fewer than the quorum of 75%"
    ):
        train(FedAvg(WORK), poisoned({1: {0, 2}}), rounds=2, missing=MissingPolicy(quorum=0.75))


def test_a_stop_rule_ends_the_run_and_says_why() -> None:
    history = run(ALGORITHMS[0], stop=[lambda h: "enough" if len(h.rounds) == 3 else None])
    assert len(history.rounds) == 3
    assert next(e["reason"] for e in history.events if e["event"] == "stopped") == "enough"
    assert history.series()[0][-1] == 3


def test_stop_takes_no_rule_one_rule_or_what_has_rules() -> None:
    def third(history: History) -> str | None:
        return "enough" if len(history.rounds) == 3 else None

    for given in (third, [third], (third,)):
        assert len(run(ALGORITHMS[0], stop=given).rounds) == 3
    assert len(run(ALGORITHMS[0], stop=StopWhen(seconds=1e-12)).rounds) == 1
    free = len(run(ALGORITHMS[0], stop=()).rounds)
    assert len(run(ALGORITHMS[0], stop=None).rounds) == free > 3
    for wrong in (5, "at_gap", [5], StopWhen, [third, None]):
        with pytest.raises(ValueError, match="stop must be a rule, a sequence of rules or None"):
            run(ALGORITHMS[0], stop=wrong)


@pytest.mark.parametrize("options", [{"rounds": 0}, {"every": 0}])
def test_wrong_numbers_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match="must be a whole number of at least 1, got 0"):
        run(ALGORITHMS[0], **options)


class Pair:
    """One of two processes, which notes what the first one has written when it waits."""

    size = 2

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder, self.seen = rank, folder, list[set[str]]()

    def wait(self) -> None:
        self.seen.append({file.name for file in self.folder.glob("*.*")})


@pytest.mark.parametrize("rank", [0, 1])
def test_all_processes_wait_after_the_first_one_has_written(rank: int, tmp_path: Path) -> None:
    history, pair = run(FedAvg(WORK)), Pair(rank, tmp_path)
    folder = RunFolder(tmp_path, history.names, pair)
    folder.create()
    assert len(pair.seen) == 1 and ("rounds.csv" in pair.seen[0]) == (rank == 0)
    folder.finish(history)
    assert len(pair.seen) == 2 and ("summary.json" in pair.seen[1]) == (rank == 0)


@pytest.mark.timeout(60)
def test_clients_that_are_missing_after_they_were_left_out_end_the_run() -> None:
    """As where an algorithm holds their vectors of another round."""

    class Holds(FedAvg):
        def round(self, state: Any, clients: Any, stream: Any) -> Any:
            raise MissingClients({0: "its vector is not finite"}, clients.names)

    with pytest.raises(TrainingError, match="left out already"):
        run(Holds(WORK))
