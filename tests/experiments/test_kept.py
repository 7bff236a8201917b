"""What experiments keep: tables are made again of it alone, and changed values are noticed."""

from __future__ import annotations

import csv
import gzip
import json
import re
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


def test_who_keeps_no_values_is_named_with_what_it_costs() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text.partition("**Without kept values**")[2].partition("**Say first")[0]
    assert re.findall(r"^\| `([a-z0-9-]+)` \|", table, re.M) == sorted({*EXPERIMENTS} - {*KEEPING})
    files = [file for name in KEEPING for k in (KEPT, VALUES) if (file := ROOT / name / k).exists()]
    assert max(file.stat().st_size for file in files) <= kept.LARGEST


@pytest.mark.slow
@pytest.mark.parametrize("name", KEEPING)
def test_stored_tables_are_made_of_kept_values(name: str) -> None:
    assert main(["tables", name]) == 0


def test_the_tables_of_promise_are_made_of_its_clients() -> None:
    """They were stored before values were kept: four digits of every client in every split."""
    results, module = ROOT / "promise" / "results", EXPERIMENTS["promise"].module

    def read(name: str) -> list[dict[str, str]]:
        return list(csv.DictReader((results / f"{name}.csv").read_text("utf-8").splitlines()))

    metrics = {row["set"]: row["metric"] for row in read("levels")}
    splits: dict[str, dict[str, list[dict[str, str]]]] = {}
    for row in read("clients"):
        splits.setdefault(row["set"], {}).setdefault(row["split"], []).append(row)
    found = {
        name: [
            {
                "metric": metrics[name],
                "clients": rows,
                "values": {
                    m: [float(row[m]) if row[m] else None for row in rows] for m in module.METHODS
                },
            }
            for rows in by_split.values()
        ]
        for name, by_split in splits.items()
    }
    assert {len(one) for one in found.values()} == {10} and list(found) == list(metrics)
    for key, table, close in (
        ("levels", module.levels_table(found), {"rel": 1e-3}),
        ("changes", module.changes_table(found), {"abs": 0.1}),
    ):
        stored = read(key)
        assert [row["set"] for row in stored] == [row[0] for row in table.rows]
        for old, new in zip(stored, table.rows, strict=True):
            numbers = [float(old[column].removeprefix("'")) for column in table.columns[2:]]
            assert numbers == pytest.approx(list(new[2:]), **close), (key, new[0])
