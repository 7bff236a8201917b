"""Following a run that another thread does; examples that come with the package."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_cli import equifed
from typing_extensions import override

from equifed.runs import run as runs
from equifed.runs.config import RunConfig
from equifed.runs.init import find_examples
from equifed.training.files import LOCK
from equifed.training.trackers import Callback

pytestmark = pytest.mark.long


class Gate(Callback):
    """Holds a run after a round until it is told to go on."""

    def __init__(self, stop_after: int) -> None:
        self.stop_after, self.there, self.go = stop_after, threading.Event(), threading.Event()

    @override
    def round(self, record: Any, info: Any) -> None:
        if record.round == self.stop_after:
            self.there.set()
            assert self.go.wait(timeout=120)


def test_a_report_follows_a_run_to_its_end(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, page, gate = tmp_path / "run", tmp_path / "page.html", Gate(2)
    given = {"callbacks": [gate]}
    thread = threading.Thread(
        target=runs.run, args=(RunConfig.read(config(rounds=4)), folder), kwargs=given
    )
    thread.start()
    assert gate.there.wait(timeout=120)
    pages: list[str] = []

    def wait(seconds: float) -> None:
        pages.append(page.read_text())
        gate.go.set()
        thread.join()

    monkeypatch.setattr(time, "sleep", wait)
    told = equifed("report", folder, "--page", page, "--watch")
    assert told.exit_code == 0 and told.stdout.splitlines()[-1] == f"report: {page}"
    assert told.stdout.splitlines()[0].startswith("round ") and len(pages) == 1
    assert 'http-equiv="refresh"' in pages[0]
    assert 'http-equiv="refresh"' not in page.read_text()


def test_a_watched_report_is_written_until_the_run_has_ended(config: Any, tmp_path: Path) -> None:
    folder, page = tmp_path / "run", tmp_path / "page.html"
    equifed("run", config(), "--out", folder)
    done = equifed("report", folder, "--page", page, "--watch")
    assert done.exit_code == 0 and done.stdout == f"report: {page}\n"
    assert 'http-equiv="refresh"' not in page.read_text()
    (folder / "summary.json").unlink()
    many = equifed("report", tmp_path, "--page", page, "--watch")
    assert (many.exit_code, "single runs" in many.stderr) == (2, True)
    left = equifed("report", folder, "--page", page, "--watch")
    assert (left.exit_code, "equifed resume" in left.stderr) == (1, True)
    for name in ("rounds.csv", "metrics.csv", "events.jsonl"):  # half a line is no record yet
        with (folder / name).open("ab") as file:
            file.write(b'9,0.5,{"ev')
    assert equifed("report", folder, "--page", page, "--watch").exit_code == 1


def test_a_lock_of_another_machine_counts_as_running(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    equifed("run", config(), "--out", folder)
    (folder / "summary.json").unlink()
    signed = {"process": 2**22 + 1, "host": "elsewhere.example", "since": "now"}
    (folder / LOCK).write_text(json.dumps(signed))
    monkeypatch.setattr(time, "sleep", lambda seconds: (folder / LOCK).unlink())
    told = equifed("report", folder, "--page", tmp_path / "page.html", "--watch")
    assert (told.exit_code, told.stdout.startswith("round 3: ")) == (1, True)


# -- examples --------------------------------------------------------------------------------------


def test_examples_are_copied_and_nothing_is_replaced_unasked(tmp_path: Path) -> None:
    out = tmp_path / "here"
    done = equifed("init", "--examples", out)
    source = find_examples()
    assert done.exit_code == 0
    assert {p.name for p in out.iterdir()} == {p.name for p in source.iterdir()}
    (out / "three-clients.toml").write_text("mine")
    again = equifed("init", "--examples", out)
    assert (again.exit_code, "already exists" in again.stderr) == (2, True)
    assert (out / "three-clients.toml").read_text() == "mine"
    told = equifed("init", "--examples", out, "--overwrite", "--json")
    assert set(json.loads(told.stdout)["examples"]) == {str(path) for path in out.iterdir()}
    assert (out / "three-clients.toml").read_bytes() == (source / "three-clients.toml").read_bytes()
    itself = equifed("init", "--examples", source)
    assert (itself.exit_code, "where the examples come from" in itself.stderr) == (2, True)


@pytest.mark.parametrize("path", sorted(find_examples().glob("*.toml")), ids=lambda p: p.name)
def test_an_example_is_a_configuration(path: Path, tmp_path: Path) -> None:
    shutil.copytree(find_examples(), tmp_path / "examples")
    from equifed.runs.comparison import read_variants

    assert read_variants([tmp_path / "examples" / path.name], [])


def test_the_example_table_is_what_its_script_writes() -> None:
    from scripts.example_table import draw_table

    written = (find_examples() / "hospitals.csv").read_text(encoding="utf-8")
    assert written == draw_table().to_csv(index=False)
