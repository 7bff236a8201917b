"""Arrays of one's own, divided by a partition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from equifed.data import DataError
from equifed.datasets.pooled import arrays
from equifed.runs.build import build_run
from equifed.runs.config import RunConfig

PARTITION = {"name": "dirichlet", "clients": 4, "alpha": 0.5, "min_samples": 5}


def stored(folder: Path, **changes: Any) -> Path:
    draw = np.random.default_rng(0)
    held = {
        "x_train": draw.standard_normal((200, 3), dtype=np.float32),
        "y_train": np.arange(200, dtype=np.uint8) % 3,
        "x_test": draw.standard_normal((60, 3), dtype=np.float32),
        "y_test": np.arange(60, dtype=np.uint8) % 3,
        "about": "drawn",
    } | changes
    path = folder / "pool.npz"
    np.savez(path, **{key: value for key, value in held.items() if value is not None})
    return path


def test_every_row_has_one_owner_and_keeps_its_label(tmp_path: Path) -> None:
    path = stored(tmp_path)
    pool = np.load(path)
    federation = arrays(path, PARTITION, seed=3)
    assert len(federation) == 4 and federation.classes == 3
    for label, split in federation.splits().items():
        rows = {x.tobytes(): y for x, y in zip(pool[f"x_{label}"], pool[f"y_{label}"], strict=True)}
        assert len(split) == len(rows)
        assert all(
            rows.pop(x.tobytes()) == y for x, y in zip(split.inputs, split.targets, strict=True)
        )
    assert federation.source["about"] == "drawn"
    assert "sha256 of pool.npz" in federation.source


def test_the_seed_draws_the_partition_and_samples_limits_the_pool(tmp_path: Path) -> None:
    path = stored(tmp_path)
    sums = {arrays(path, PARTITION, seed=seed).checksum() for seed in (0, 0, 1)}
    assert len(sums) == 2
    few = arrays(path, PARTITION, samples=120)
    assert (len(few.train), len(few.test or [])) == (120, 20)


def test_a_configuration_can_name_the_file(tmp_path: Path) -> None:
    data = {"name": "arrays", "path": str(stored(tmp_path)), "partition": PARTITION}
    algorithm = {"name": "fedavg", "local": {"lr": 0.1, "steps": 1}}
    config = RunConfig.from_dict(
        {"rounds": 1, "data": data, "algorithm": algorithm, "model": "linear"}
    )
    assert build_run(config).federation.checksum() == arrays(data["path"], PARTITION).checksum()


def test_what_is_wrong_with_a_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file .*none\.npz; give an \.npz file with x_train"):
        arrays(tmp_path / "none.npz")
    with pytest.raises(DataError, match="lacks y_test; it has x_train"):
        arrays(stored(tmp_path, y_test=None))
    with pytest.raises(DataError, match="x_test has 60 rows, y_test 59 labels"):
        arrays(stored(tmp_path, y_test=np.zeros(59, dtype=np.int64)))
