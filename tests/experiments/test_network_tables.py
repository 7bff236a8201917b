"""The network tables: their parts against oracles, and their short forms, cut off and resumed."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments.harness import network_task
from experiments.harness.experiment import EXPERIMENTS, definition
from experiments.harness.network_parts import (
    DecayingSteps,
    PatchConv2d,
    folded_femnist,
    image_cnn,
    shards,
    with_copies,
)
from experiments.harness.network_runs import KEPT, hasten
from experiments.harness.network_task import Result, Task, add_own_rows, carry_out, read_result
from experiments.harness.running import reproduce
from experiments.harness.shards_table import floor_of_minimum

import equifed as ef
from equifed.contract import Stream
from equifed.runs import RunConfig, build_run, merge_tables

SHARDS = ["fedmdfg-fashion", "fedmdfg-cifar10"]
BESIDE = Path(__file__).resolve().parents[2].parent / "shared" / "data"


@pytest.mark.parametrize("every", [1, 3])
def test_decaying_steps_are_those_of_paced(every: int) -> None:
    steps = DecayingSteps(lr=0.2, local_steps=4, dual=0.1, decay=0.9, every=every)
    paced, sizes = ef.Paced(ef.FedAvg(), decay=0.9, every=every), steps.start()
    for t in range(1, 9):
        assert sizes.local == pytest.approx(0.2 * paced.factor(t))
        assert sizes.primal == pytest.approx(4 * sizes.local)
        assert sizes.dual == 0.1
        sizes = steps.next(sizes)


def test_copies_follow_the_images_and_keep_their_labels() -> None:
    draw = np.random.default_rng(0)
    images, labels = draw.random((3, 1, 28, 28)).astype(np.float32), np.array([4, 5, 6])
    images[:, :, :6] = images[:, :, -6:] = images[..., :6] = images[..., -6:] = 0
    still, names = with_copies(images, labels, 2, 0.0, Stream(0))
    assert names.tolist() == [4, 5, 6] * 3
    np.testing.assert_allclose(still, np.concatenate([images] * 3), atol=1e-5)
    moved, _ = with_copies(images, labels, 200, 1.0, Stream(0))
    np.testing.assert_array_equal(moved[:3], images)
    ink = moved.sum((1, 2, 3))
    # Stretched both ways by up to a seventh.
    assert 0.7 * ink[:3].min() < ink.min() and ink.max() < 1.4 * ink[:3].max()
    across = np.arange(28) @ moved.sum((1, 2)).T / ink
    assert 1.5 < np.abs(across[3:].reshape(200, 3) - across[:3]).max() < 3  # about two pixels
    assert np.ptp(moved[3:].reshape(200, 3, -1), axis=0).max() > 0.1  # no two are alike


def test_patches_times_a_matrix_are_a_convolution() -> None:
    torch.manual_seed(0)
    for padding in (0, 1):
        plain = torch.nn.Conv2d(3, 4, 3, padding=padding, dtype=torch.float64)
        ours = PatchConv2d(3, 4, 3, padding=padding, dtype=torch.float64)
        ours.load_state_dict(plain.state_dict())
        images = torch.randn(2, 3, 7, 6, dtype=torch.float64, requires_grad=True)
        for one in (plain, ours):
            one(images).square().sum().backward()
        torch.testing.assert_close(ours(images), plain(images))
        torch.testing.assert_close(ours.weight.grad, plain.weight.grad)


def test_the_published_network_has_its_parameters() -> None:
    """Two convolutions of 64 channels without padding: 1,600 numbers reach the hidden layers."""
    wanted = 64 * 76 + 64 * 1601 + 384 * 1601 + 192 * 385 + 10 * 193
    assert sum(p.numel() for p in image_cnn((3, 32, 32), 10).parameters()) == wanted


def test_shards_have_two_classes_and_the_test_images_follow() -> None:
    data = shards("synthetic", clients=10, samples=400)
    assert data.test is not None
    assert (data.train.sizes == 40).all() and (data.test.sizes == 20).all()
    for i in range(10):
        trained, tested = (set(part.client(i)[1].tolist()) for part in (data.train, data.test))
        assert len(trained) <= 2 and trained == tested


def test_the_floor_of_the_minimum_is_that_of_draws() -> None:
    sizes, draw = np.full(100, 100.0), np.random.default_rng(0)
    one = Result([], {"test": np.full(100, 0.7)}, {"test": sizes}, 0.0)
    drawn = draw.binomial(100, 0.7, size=(4000, 100)).min(axis=1) / 100
    assert floor_of_minimum(one) == pytest.approx(drawn.mean(), abs=4 * drawn.std() / 4000**0.5)


def test_clients_that_diverge_alone_are_a_failed_try(tmp_path: Path) -> None:
    table = definition("fedmdfg-cifar10", quick=True)["run"]
    work = {"name": "fedavg", "local": {"lr": 1e30, "steps": 2, "batch_size": 5}}
    task = Task("alone", "", {**table, "algorithm": work}, 0, tmp_path / "alone.json")
    carry_out(task)
    assert task.complete and "missing" in read_result(task.path).failed


@pytest.mark.long
def test_a_client_that_diverges_alone_takes_a_smaller_step_but_not_in_a_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_task, "HALVINGS", 120)
    table = definition("fedmdfg-cifar10", quick=True)["run"]
    table["algorithm"] = {"name": "fedavg", "local": {"lr": 1e30, "steps": 2, "batch_size": 5}}
    test = Task("alone", "", table, 0, tmp_path / "test.json")
    tried = {**table, "data": {**table["data"], "holdout": {"validation": 0.2}}}
    tried["evaluate"] = {"splits": ["validation"]}
    for task in (test, Task("alone", "", tried, 0, tmp_path / "tried.json")):
        carry_out(task)
    assert not read_result(test.path).failed
    assert np.isfinite(read_result(test.path).accuracy["test"]).all()
    assert "missing" in read_result(tmp_path / "tried.json").failed


def test_rows_with_own_biases_stand_beside_the_runs_they_were_fitted_to() -> None:
    after = "test, own bias after training"
    one = Result(["a"], {"test": np.array([0.5]), after: np.array([0.75])},
                 {"test": np.array([4.0]), after: np.array([4.0])}, 1.0)  # fmt: skip
    runs = {"tuned SCAFF-PD, averaged": {3: one}, "AFL": {3: one}}
    rows = add_own_rows(runs, {"tuned SCAFF-PD, averaged": "bias"})
    assert list(rows) == ["tuned SCAFF-PD, averaged", "AFL", "ours", "AFL, own bias after training"]
    assert rows["ours"][3].accuracy["test"] == 0.75 and rows["AFL"][3].accuracy["test"] == 0.5
    others = add_own_rows(runs, {"tuned SCAFF-PD, averaged": "all"})
    assert "tuned SCAFF-PD, averaged, own bias after training" in others and "ours" not in others


@pytest.mark.parametrize("name", SHARDS)
def test_every_method_has_as_many_tries_and_one_decay(name: str) -> None:
    """A try takes the step sizes from first to last, in fewer rounds."""
    settings = definition(name, quick=False)
    assert {m for group in settings["groups"] for m in group} == set(settings["methods"])
    full, short = settings["run"]["rounds"], settings["tries"]["rounds"]
    for method, table in settings["methods"].items():
        assert [len(v) for v in settings["tried"][method].values()] == [len(settings["places"])]
        found = [_decay(one) for one in (table, hasten(table, full / short))]
        ends = [decay ** (every * (rounds // every - 1))
                for (decay, every), rounds in zip(found, (full, short), strict=True)]  # fmt: skip
        assert ends[1] == pytest.approx(ends[0], rel=0.01), method


def _decay(table: dict[str, Any]) -> tuple[float, int]:
    """Return decay and rounds between two changes, of the table that has both."""
    if "every" in table:
        return table["decay"], table["every"]
    inner = table.get("steps") or table.get("algorithm")
    assert inner is not None
    return _decay(inner)


@pytest.mark.long
def test_what_is_tested_is_the_mean_of_models() -> None:
    """Averaged, server momentum and decaying steps in one run, against a sum over its rounds."""
    settings = definition("fedmdfg-fashion", quick=True)
    table = merge_tables(settings["run"], settings["methods"]["tuned SCAFF-PD"])
    table = hasten({**table, "rounds": 4, "evaluate": {"splits": ["test"], "every": 4}}, 50)
    built = build_run(RunConfig.from_dict(table))
    history = built.train()
    plain: Any = built.algorithm.algorithm.wrapped()
    stream = Stream(table.get("seed", 0))
    state = plain.init(built.clients, built.clients.initial(stream.at("initial")))
    models = []
    for r in range(1, 5):
        state, _ = plain.round(state, built.clients, stream.at("round", r))
        models.append(state.x)
    eta, mean = built.algorithm.decay, torch.zeros_like(models[0])
    for t, x in enumerate(models, start=1):
        share = (eta + 1) / (t + eta)
        mean = (1 - share) * mean + share * x
    told = history.last("loss", "test")
    assert told is not None
    losses = [built.clients.evaluate(x, ("test",))[0].metrics["loss"] for x in (mean, state.x)]
    np.testing.assert_allclose(told.values, losses[0], rtol=1e-4)
    assert not np.allclose(told.values, losses[1], rtol=1e-2)


@pytest.mark.long
@pytest.mark.parametrize("name", SHARDS)
def test_a_short_form_goes_on_where_it_was(name: str, tmp_path: Path) -> None:
    some: dict[str, Any] = {"groups": [["FedAvg", "tuned SCAFF-PD"]]}
    reproduce(name, tmp_path, quick=True, changes=some)
    stored = sorted((tmp_path / "runs").glob("*.json"))
    before = {path: path.stat().st_mtime_ns for path in stored}
    lost = next(path for path in stored if "seed-0" in path.name and "fedavg" in path.name)
    lost.unlink()
    (tmp_path / KEPT).unlink()
    partial = reproduce(name, tmp_path, quick=True, changes={**some, "finish": False})
    assert next(row[0] for row in partial.tables["methods"].rows) == "tuned SCAFF-PD"
    assert not lost.exists()  # a table of what is there runs nothing
    whole = reproduce(name, tmp_path, quick=True, changes=some)
    rows = {row[0]: row for row in whole.tables["methods"].rows}
    assert rows["FedAvg"][-2:] == [4, 3] and rows["tuned SCAFF-PD"][-2:] == [3, 3]  # begun, ended
    same = {path: path.stat().st_mtime_ns for path in stored}
    assert {path for path in stored if same[path] != before[path]} == {lost}
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / KEPT).parent.mkdir(parents=True)
    (elsewhere / KEPT).write_bytes((tmp_path / KEPT).read_bytes())
    again = reproduce(name, elsewhere, quick=True, changes={**some, "finish": False})
    assert {key: table.csv() for key, table in again.tables.items()} == {
        key: table.csv() for key, table in whole.tables.items()
    }
    assert (elsewhere / KEPT).read_bytes() == (tmp_path / KEPT).read_bytes()
    with pytest.raises(ValueError, match="other settings"):
        reproduce(name, tmp_path, quick=True, changes={**some, "run": {"rounds": 4}})


@pytest.fixture
def femnist(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(os.environ.get("EQUIFED_DATA", BESIDE))
    if not (folder / "femnist").is_dir():
        pytest.skip(f"no data files: set EQUIFED_DATA (looked at {folder})")
    monkeypatch.setenv("EQUIFED_DATA", str(folder))


@pytest.mark.long
@pytest.mark.usefixtures("femnist")
def test_every_image_but_the_kept_ones_is_tested_once() -> None:
    whole = ef.load("femnist", writers=6)
    parts = [folded_femnist(k, 2, writers=6, validation=True) for k in (0, 1)]
    seen = []
    for split in ("train", "validation", "test"):
        seen.append([np.sort(part.splits()[split].client(3)[0].sum((1, 2, 3))) for part in parts])
    (_, _), (kept, again), tested = seen
    np.testing.assert_array_equal(kept, again)  # never tested, in no fold
    pooled = [(1 - one.client(3)[0]).sum((1, 2, 3)) for one in whole.splits().values()]
    once = np.sort(np.concatenate([kept, *tested]))
    np.testing.assert_allclose(once, np.sort(np.concatenate(pooled)), rtol=1e-5)
    for k in (0, 1):
        all_of_it = np.concatenate([split[k] for split in seen])
        np.testing.assert_allclose(np.sort(all_of_it), once, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("femnist")
def test_own_parts_are_chosen_once_for_all_folds(tmp_path: Path, monkeypatch) -> None:
    measured = importlib.import_module("experiments.femnist-cnn.measured")
    monkeypatch.setattr(measured, "RATES", (0.03,))
    monkeypatch.setattr(measured, "STEPS", (5,))
    copied = "tuned SCAFF-PD, averaged, copies"
    changes = {"groups": [["FedAvg", copied]], "places": [1]}
    outcome = reproduce("femnist-cnn", tmp_path, quick=True, changes=changes)
    rows = {row[0]: row for row in outcome.tables["methods"].rows}
    words = ("own shares", "own shares and offsets", "fine-tuned")
    own, kinds = ({f"{method}, {kind}" for kind in words} for method in ("FedAvg", copied))
    assert set(rows) - kinds == {"FedAvg", *own, copied, "ours, copies", "alone"}
    assert len(kinds & set(rows)) == 2  # the other one is called ours
    tuned = [json.loads(path.read_text())["tuned"] for path in (tmp_path / "runs").glob("fedavg-*")]
    assert len(tuned) == 3 and tuned.count(tuned[0]) == 3  # a try chose for both folds
    record = json.loads(next((tmp_path / "runs").glob("alone-0.json")).read_text())
    fold = folded_femnist(0, 2, writers=6, validation=True)
    assert record["splits"]["test"]["sizes"] == fold.splits()["test"].sizes.tolist()


def test_equal_counts_differ_by_nothing() -> None:
    module = EXPERIMENTS["femnist-cnn"].module
    counts = {m: (np.full(50, 40.0), np.full(50, 50.0)) for m in ("FedAvg", "ours")}
    assert module.difference(counts, "ours", "FedAvg", "worst 20 %, %").tolist() == [0.0, 0.0, 0.0]
