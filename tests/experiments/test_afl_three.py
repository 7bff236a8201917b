"""Three classes as clients: the published preparation, and checks that can say no."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
from experiments.harness.choice import alternatives
from experiments.harness.experiment import EXPERIMENTS, definition
from experiments.harness.network_parts import CLIENTS, fashion_three_whole
from experiments.harness.running import configured

from equifed.training.history import History, MetricRecord

pytestmark = pytest.mark.long
THREE = EXPERIMENTS["afl-three"].module


def found(worst: dict[str, float]) -> dict[str, dict[int, History]]:
    """Return made-up runs of two seeds whose shirts are served so well."""
    out: dict[str, dict[int, History]] = {}
    for method, value in worst.items():
        out[method] = {}
        for seed in (0, 1):
            history = History(tuple(CLIENTS))
            values = np.array([0.9, 0.85, (value + 0.1 * seed) / 100])
            history.metrics.append(MetricRecord(5, "test", "accuracy", values, np.full(3, 1000)))
            out[method][seed] = history
    return out


def test_numbers_and_orders_are_compared() -> None:
    published = {"AFL": 71.4, "q-FFL": 74.7}
    same = THREE.checks(found({"AFL": 71.0, "q-FFL": 75.0, "SCAFF-PD": 76.0}), published, "x")
    assert [one.agrees for one in same] == [True] * 5
    other = THREE.checks(found({"AFL": 79.0, "q-FFL": 78.0, "SCAFF-PD": 60.0}), published, "x")
    assert [one.agrees for one in other] == [False] * 5
    table = THREE.beside(found({"AFL": 71.0}), published, "x")
    assert [row[:2] for row in table.rows] == [["AFL", 71.4], ["q-FFL", 74.7]]


def test_every_method_of_a_protocol_has_as_many_tries() -> None:
    table = definition("afl-three")
    for protocol in table["protocols"].values():
        merged = {**table, **protocol}
        counts = {len(alternatives(merged, method)) for method in merged["methods"]}
        assert counts == {25}


def test_the_preparation_is_the_published_one(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    folder = Path(os.environ.get("EQUIFED_DATA", beside)) / "fashion_mnist"
    if not folder.is_dir():
        pytest.skip(f"no data files: set EQUIFED_DATA (looked at {folder})")
    monkeypatch.setenv("EQUIFED_DATA", str(folder.parent))
    raw = {}
    for part in ("train", "t10k"):
        for kind, skip in (("images-idx3", 16), ("labels-idx1", 8)):
            packed = gzip.decompress((folder / f"{part}-{kind}-ubyte.gz").read_bytes())
            raw[part, kind] = np.frombuffer(packed, np.uint8, offset=skip)
    images = raw["train", "images-idx3"].reshape(-1, 784).astype(np.float32)
    mean, deviation = images.mean(0), images.std(0)
    data = fashion_three_whole(scaling="standardised")
    assert data.test is not None
    test = raw["t10k", "images-idx3"].reshape(-1, 784)[raw["t10k", "labels-idx1"] == 6]
    wanted = (test.astype(np.float32) - mean) / (deviation + 0.001)
    x, y = data.test.client(2)
    np.testing.assert_allclose(x.reshape(len(x), -1), wanted, rtol=2e-3, atol=2e-3)
    assert (y == 2).all() and data.train.sizes.tolist() == [6000] * 3
    assert configured(definition("afl-three"), {"algorithm": {"name": "fedavg"}}, 0).data
