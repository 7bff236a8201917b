"""What experiments keep: tables are made again of it alone, and changed values are noticed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from experiments.harness import kept
from experiments.harness.command import main
from experiments.harness.experiment import EXPERIMENTS, ROOT
from experiments.harness.kept import VALUES, find_differences, keep
from experiments.harness.plan import KEPT
from experiments.harness.running import reproduce

KEEPING = [name for name in EXPERIMENTS if any((ROOT / name / k).exists() for k in (KEPT, VALUES))]


def read(folder: Path) -> list[dict]:
    return [
        json.loads(line) for line in gzip.decompress((folder / VALUES).read_bytes()).splitlines()
    ]


def write(folder: Path, lines: list[dict]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / VALUES).write_bytes(gzip.compress(text.encode()))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short form of runs over seeds, with tries, as a call leaves it."""
    out = tmp_path_factory.mktemp("experiments") / "rc-fashion"
    quick = {"run": {"rounds": 2, "data": {"train": 40}}}
    reproduce("rc-fashion", out, quick=True, changes=quick)
    return out


def test_tables_of_runs_are_made_of_kept_values(stored: Path) -> None:
    lines = read(stored)
    tries = [line for line in lines if line["seed"] >= 1000]
    assert tries and len(tries) < len(lines)
    assert {r["split"] for line in tries for r in line["records"]} >= {"validation"}
    assert find_differences("rc-fashion", stored.parent) == []


def test_a_changed_value_is_noticed(stored: Path) -> None:
    lines = read(stored)
    one = next(line for line in lines if line["run"].startswith("RC-FL") and line["seed"] == 0)
    for record in one["records"]:
        record["values"] = [0.0 for _ in record["values"]]
    before = (stored / VALUES).read_bytes()
    write(stored, lines)
    found = find_differences("rc-fashion", stored.parent)
    (stored / VALUES).write_bytes(before)
    assert found and any("accuracy.csv" in one for one in found)


def test_a_lost_part_is_named(tmp_path: Path) -> None:
    out = tmp_path / "noisy-clients"
    reproduce("noisy-clients", out, quick=True)
    assert find_differences("noisy-clients", tmp_path) == []
    write(out, read(out)[1:])
    with pytest.raises(ValueError, match="Nothing is kept of"):
        find_differences("noisy-clients", tmp_path)


def test_too_much_is_not_kept_and_said(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (stored / VALUES).read_bytes()
    monkeypatch.setattr(kept, "LARGEST", 100)
    (told,) = keep(stored)
    assert "not kept" in told and not (stored / VALUES).exists()
    (stored / VALUES).write_bytes(before)


@pytest.mark.slow
@pytest.mark.parametrize("name", KEEPING)
def test_stored_tables_are_made_of_kept_values(name: str) -> None:
    assert main(["tables", name]) == 0
