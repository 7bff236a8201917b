"""Looking at a run that another process or thread does; examples that come with the package."""

from __future__ import annotations

import io
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.cli.test_cli import equifed
from typing_extensions import override

from equifed.cli.data import find_examples
from equifed.cli.run import show_live, tabulate_look
from equifed.runs import run as runs
from equifed.runs.config import RunConfig
from equifed.runs.watch import Look, follow, look_at
from equifed.training.files import LOCK
from equifed.training.history import History
from equifed.training.trackers import Callback

pytestmark = pytest.mark.long


class Gate(Callback):
    """Lets a run go on when it is told to, and keeps what can be seen from outside."""

    def __init__(self, folder: Path, stop_after: int) -> None:
        self.folder, self.stop_after = folder, stop_after
        self.there, self.go = threading.Event(), threading.Event()
        self.looks: list[Look] = []

    @override
    def round(self, record: Any, info: Any) -> None:
        self.looks.append(look_at(self.folder))
        if record.round == self.stop_after:
            self.there.set()
            assert self.go.wait(timeout=120)


def begin(config: Path, folder: Path, stop_after: int) -> tuple[Gate, threading.Thread]:
    """Start a run in a thread, and return when it waits after a round."""
    gate = Gate(folder, stop_after)
    thread = threading.Thread(
        target=runs.run, args=(RunConfig.read(config), folder), kwargs={"callbacks": [gate]}
    )
    thread.start()
    assert gate.there.wait(timeout=120)
    return gate, thread


def test_a_look_is_what_the_run_has_recorded_so_far(config: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    gate, thread = begin(config(rounds=4), folder, 2)
    now = look_at(folder)
    assert (now.stage, now.planned) == ("running", 4)
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        gate.go.set()
        thread.join()

    stages = [look.stage for look in follow(folder, 0.5, wait)]
    assert (stages, waited) == (["running", "complete"], [0.5])
    assert {look.stage for look in gate.looks} == {"running"}
    seen = [look.round for look in gate.looks]
    assert seen == sorted(seen) and seen[-1] - seen[0] == 3  # one more at every look
    last, history = look_at(folder), History.load(folder)
    assert last.round == 4
    worst = min(history.per_client().items(), key=lambda pair: pair[1])
    assert last.describe_worst().startswith(f"{worst[0]}: ")
    assert last.describe_missing() == "nobody"


def test_half_a_line_is_no_record_yet(config: Any, tmp_path: Path) -> None:
    equifed("run", config(), "--out", tmp_path / "run")
    before = look_at(tmp_path / "run")
    for name in ("rounds.csv", "metrics.csv", "events.jsonl"):
        with (tmp_path / "run" / name).open("ab") as file:
            file.write(b'9,0.5,{"ev')
    after = look_at(tmp_path / "run")
    assert after.to_line() == before.to_line() and after.round == 3


def test_who_is_missing_is_named(config: Any, tmp_path: Path) -> None:
    equifed("run", config(), "--out", tmp_path / "run")
    events = tmp_path / "run" / "events.jsonl"
    lost = {"event": "quarantine", "round": 3, "client": "shirt", "reason": "not finite"}
    with events.open("a") as file:
        file.write(json.dumps(lost) + "\n" + json.dumps({**lost, "round": 2, "client": "x"}) + "\n")
    look = look_at(tmp_path / "run")
    assert look.list_missing() == ["shirt"]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(tabulate_look(tmp_path / "run", look))
    text = console.export_text()
    assert "shirt" in text and "3 of 3, complete" in text and "not finite" in text


def test_the_command_tells_each_end_from_the_other(config: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    equifed("run", config(), "--out", folder)
    done = equifed("watch", folder)
    assert done.exit_code == 0 and done.stdout.startswith("round 3/3  objective")
    (folder / "summary.json").unlink()
    dead = equifed("watch", folder)
    assert (dead.exit_code, f"equifed resume {folder}" in dead.stderr) == (1, True)
    signed = {"process": 2**22 + 1, "host": "elsewhere.example", "since": "now"}
    (folder / LOCK).write_text(json.dumps(signed))
    assert look_at(folder).stage == "running"  # nobody here can know better
    nothing = equifed("watch", tmp_path)
    assert (nothing.exit_code, "holds no run yet" in nothing.stderr) == (2, True)


def test_a_terminal_shows_the_last_look(
    config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    equifed("run", config(), "--out", tmp_path / "run")
    last = show_live(tmp_path / "run", 0.1)
    assert last is not None and last.stage == "complete"
    text = capsys.readouterr().out
    assert all(word in text for word in ("certified gap", "worst client", "missing", "nobody"))


def test_a_watched_report_is_written_until_the_run_has_ended(config: Any, tmp_path: Path) -> None:
    folder, page = tmp_path / "run", tmp_path / "page.html"
    equifed("run", config(), "--out", folder)
    done = equifed("report", folder, "--page", page, "--watch")
    assert done.exit_code == 0 and done.stdout == f"report: {page}\n"
    assert 'http-equiv="refresh"' not in page.read_text()
    (folder / "summary.json").unlink()
    many = equifed("report", tmp_path, "--page", page, "--watch")
    assert (many.exit_code, "not the folder of one run" in many.stderr) == (2, True)
    left = equifed("report", folder, "--page", page, "--watch")
    assert (left.exit_code, "equifed resume" in left.stderr) == (1, True)


# -- examples --------------------------------------------------------------------------------------


def test_examples_are_copied_and_nothing_is_replaced_unasked(tmp_path: Path) -> None:
    out = tmp_path / "here"
    done = equifed("examples", "copy", "--out", out)
    source = find_examples()
    assert done.exit_code == 0
    assert {p.name for p in out.iterdir()} == {p.name for p in source.iterdir()}
    (out / "three-clients.toml").write_text("mine")
    again = equifed("examples", "copy", "--out", out)
    assert (again.exit_code, "is there already" in again.stderr) == (2, True)
    assert (out / "three-clients.toml").read_text() == "mine"
    assert equifed("examples", "copy", "--out", out, "--overwrite").exit_code == 0
    assert (out / "three-clients.toml").read_bytes() == (source / "three-clients.toml").read_bytes()
    itself = equifed("examples", "copy", "--out", source)
    assert (itself.exit_code, "where the examples come from" in itself.stderr) == (2, True)


@pytest.mark.parametrize("path", sorted(find_examples().glob("*.toml")), ids=lambda p: p.name)
def test_an_example_is_a_configuration(path: Path, tmp_path: Path) -> None:
    shutil.copytree(find_examples(), tmp_path / "examples")
    from equifed.runs.many import read_variants

    assert read_variants([tmp_path / "examples" / path.name], [])


def test_the_example_table_is_what_its_script_writes() -> None:
    from scripts.example_table import draw_table

    written = (find_examples() / "hospitals.csv").read_text(encoding="utf-8")
    assert written == draw_table().to_csv(index=False)
