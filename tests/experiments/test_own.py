"""The experiments about own parts, in tiny forms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from experiments.harness.experiment import EXPERIMENTS, definition
from experiments.harness.running import reproduce

pytestmark = pytest.mark.long


def test_hospitals_are_compared_with_their_own_models(tmp_path: Path) -> None:
    outcome = reproduce("own-hospitals", tmp_path, quick=True, changes={"splits": 2})
    rows = {row[0]: row[1:] for row in outcome.tables["accuracy"].rows}
    assert {"own model", "majority class", "shared, average", "own intercept, worst-case"} <= set(
        rows
    )
    assert all(0 <= float(v) <= 100 for row in rows.values() for v in row)  # type: ignore[arg-type]
    gaps = [row[2] for row in outcome.tables["chosen"].rows]
    assert max(gaps) <= definition("own-hospitals")["gap"]  # type: ignore[type-var]
    stored = sorted((tmp_path / "runs").glob("*.json"))
    before = [path.stat().st_mtime_ns for path in stored]
    reproduce("own-hospitals", tmp_path, quick=True, changes={"splits": 2})
    assert [path.stat().st_mtime_ns for path in stored] == before  # it goes on where it was


def test_the_correction_for_shared_patients_widens_the_interval() -> None:
    """Nadeau and Bengio: (1/J + test/train) in the place of 1/J."""
    module = EXPERIMENTS["own-hospitals"].module
    draw = np.random.default_rng(0)
    found = [
        {"clients": ["a"], "train": [50], "test": [30],
         "accuracy": {"own model": [0.5], "m": [float(draw.random())]}}
        for _ in range(10)
    ]  # fmt: skip
    ((plain, wide),) = module.differences(found, "m")
    ratio = (wide.upper - wide.lower) / (plain.upper - plain.lower)
    assert ratio == pytest.approx(np.sqrt((1 / 10 + 30 / 50) / (1 / 10)))
