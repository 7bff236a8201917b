"""Kill -9 at random moments: a resumed run ends as the uninterrupted one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from equifed.report import build, read_methods, write_report
from equifed.runs import run as runs
from equifed.runs.config import RunConfig
from equifed.training import loop as training
from equifed.training.files import RunFolderError
from equifed.training.history import History

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
SAME = ("model.safetensors", "metrics.csv", "weights.csv", "summary.json")


def config(**changes: Any) -> RunConfig:
    return RunConfig.from_dict(
        {
            "rounds": 6,
            "data": {"name": "fashion-three", "train": 8, "test": 4},
            "model": {"name": "logistic"},
            "algorithm": {"name": "scaffold", "local": {"lr": 0.1, "steps": 2, "batch_size": 3}},
            **changes,
        }
    )


class Dies(runs.Callback):
    """Breaks off after a round, as a kill would."""

    def __init__(self, after: int) -> None:
        self.after = after

    def evaluation(self, round: int, records: Any) -> None:
        if round == self.after:
            raise KeyboardInterrupt


@pytest.fixture
def save_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", 0.0)


@pytest.mark.long
@pytest.mark.skipif(not hasattr(runs.Path, "home") or sys.platform == "win32", reason="needs fork")
def test_killed_runs_end_bit_for_bit_as_uninterrupted_ones() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "kill_test.py"), "--kills", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("5 kills")


@pytest.mark.long
@pytest.mark.parametrize("after", [0, 1, 4, 6])
def test_broken_off_after_any_round(after: int, tmp_path: Path, save_every_round: None) -> None:
    runs.run(config(), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        runs.run(config(), tmp_path / "broken", callbacks=[Dies(after)])
    runs.resume(tmp_path / "broken")
    for name in SAME:
        whole, broken = ((tmp_path / f / name).read_bytes() for f in ("whole", "broken"))
        assert whole == broken, name


def test_broken_off_before_the_first_checkpoint_begins_again(tmp_path: Path) -> None:
    runs.run(config(), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        runs.run(config(), tmp_path / "broken", callbacks=[Dies(0)])
    assert not list((tmp_path / "broken" / "checkpoint").glob("*.json"))
    runs.resume(tmp_path / "broken")
    same = [(tmp_path / f / "metrics.csv").read_bytes() for f in ("whole", "broken")]
    assert same[0] == same[1]


def test_the_resolved_configuration_runs_again_to_the_same_model(tmp_path: Path) -> None:
    runs.run(config(), tmp_path / "first")
    again = RunConfig.read(tmp_path / "first" / "config.toml")
    runs.run(again, tmp_path / "second")
    for name in (*SAME, "config.toml", "run.json"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_a_complete_run_is_only_read(tmp_path: Path) -> None:
    first = runs.run(config(), tmp_path / "run")
    before = (tmp_path / "run" / "rounds.csv").read_bytes()
    assert runs.resume(tmp_path / "run").per_client() == first.per_client()
    assert (tmp_path / "run" / "rounds.csv").read_bytes() == before


def test_a_damaged_newest_checkpoint_falls_back_on_the_one_before(
    tmp_path: Path, save_every_round: None
) -> None:
    runs.run(config(), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        runs.run(config(), tmp_path / "broken", callbacks=[Dies(4)])
    newest = max((tmp_path / "broken" / "checkpoint").glob("*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-1])
    runs.resume(tmp_path / "broken")
    for name in SAME:
        whole, broken = ((tmp_path / f / name).read_bytes() for f in ("whole", "broken"))
        assert whole == broken, name


def test_other_data_under_the_same_configuration_are_refused(
    tmp_path: Path, save_every_round: None
) -> None:
    table = tmp_path / "people.csv"
    table.write_text("site,age,ill\nn,1,no\nn,2,yes\ns,3,no\ns,5,yes\n")
    own = {"name": "table", "path": str(table), "client": "site", "target": "ill"}
    with pytest.raises(KeyboardInterrupt):
        runs.run(config(data=own), tmp_path / "run", callbacks=[Dies(3)])
    table.write_text("site,age,ill\nn,1,no\nn,2,yes\ns,3,no\ns,9,yes\n")
    with pytest.raises(RunFolderError, match="trained on data that differ"):
        runs.resume(tmp_path / "run")


def test_a_stop_rule_that_fired_holds_after_a_resume(
    tmp_path: Path, save_every_round: None
) -> None:
    stop = {"target": 0.0, "split": "test"}  # reached at once
    whole = runs.run(config(stop=stop), tmp_path / "whole")
    assert len(whole.rounds) < 6
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "whole", copy)
    (copy / "summary.json").unlink()  # killed between the last checkpoint and the end
    runs.resume(copy)
    assert [r.round for r in History.load(copy).rounds] == [r.round for r in whole.rounds]
    for name in SAME:
        assert (copy / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"config\.toml is missing"):
        runs.resume(tmp_path)


def as_version_0_1(folder: Path) -> None:
    """Rewrite an interrupted run as version 0.1 left it: no format numbers, old names."""
    (folder / "summary.json").unlink(missing_ok=True)
    told = json.loads((folder / "run.json").read_text())
    told["versions"]["equifed"] = "0.1.0"
    del told["format"]
    (folder / "run.json").write_text(json.dumps(told))
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace("batch_size = ", "batch = "))
    for manifest in (folder / "checkpoint").glob("*.json"):
        old = json.loads(manifest.read_text())
        del old["format"]
        old["state"] = {"kind": "State", "fields": {"x": {"kind": "tensor", "key": "state.x"}}}
        manifest.write_text(json.dumps(old))


def test_a_run_of_version_0_1_is_read_and_not_resumed(
    tmp_path: Path, save_every_round: None
) -> None:
    with pytest.raises(KeyboardInterrupt):
        runs.run(config(), tmp_path / "old", callbacks=[Dies(4)])
    before = History.load(tmp_path / "old")
    as_version_0_1(tmp_path / "old")
    again = History.load(tmp_path / "old")
    assert again.per_client() == before.per_client() and len(again.rounds) == len(before.rounds)
    report = build(read_methods([tmp_path / "old"]))
    assert write_report(report, tmp_path / "report.html").exists()
    content = {p: p.read_bytes() for p in (tmp_path / "old").rglob("*") if p.is_file()}
    with pytest.raises(RunFolderError, match=r"was written by equifed 0\.1.*start it again"):
        runs.resume(tmp_path / "old")
    assert content == {p: p.read_bytes() for p in (tmp_path / "old").rglob("*") if p.is_file()}
