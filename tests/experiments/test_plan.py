"""A plan is said first: what may be called confirmatory, and what loses the name."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from experiments.harness.experiment import EXPERIMENTS, ROOT
from experiments.harness.page import name_standing, read_record
from experiments.harness.plan import KEPT, PLAN, find_broken, stand


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one experiment whose plan is committed."""
    folder = tmp_path / "experiments" / "one"
    folder.mkdir(parents=True)
    for name in (PLAN, "definition.toml", "run.py"):
        (folder / name).write_text(f"{name}\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "plan")
    return folder.parent


def test_a_committed_plan_makes_a_confirmatory_table_that_can_be_resumed(root: Path) -> None:
    out = root.parent / "runs" / "one"
    first = stand("one", out, True, root)
    (root / "other.txt").write_text("later work")
    git(root, "add", ".")
    git(root, "commit", "-qm", "later")
    assert first.confirmatory and stand("one", out, True, root) == first
    assert find_broken({"one": {"standing": asdict(first)}}, root) == []


def spoil_plan(root: Path, out: Path) -> None:
    (root / "one" / PLAN).write_text("now that we have seen the figures\n")
    git(root, "commit", "-qam", "plan changed")


def spoil_code(root: Path, out: Path) -> None:
    (root / "one" / "run.py").write_text("another measure\n")


def commit_code(root: Path, out: Path) -> None:
    spoil_code(root, out)
    git(root, "commit", "-qam", "code changed")


def run_before(root: Path, out: Path) -> None:
    (out / "runs" / "started.json").unlink()
    (out / "runs" / "fedavg").mkdir()


def kept_before(root: Path, out: Path) -> None:
    (out / "runs" / "started.json").unlink()
    (out / KEPT).parent.mkdir()
    (out / KEPT).touch()


@pytest.mark.parametrize(
    "spoil, reason",
    [(spoil_plan, "changed after the first run"), (spoil_code, "code was changed"),
     (commit_code, "code was changed"),
     (run_before, "have no plan"), (kept_before, "have no plan")],
)  # fmt: skip
def test_what_was_changed_or_run_before_is_exploratory(
    root: Path, spoil: Callable[[Path, Path], None], reason: str
) -> None:
    out = root.parent / "runs" / "one"
    assert stand("one", out, True, root).confirmatory
    spoil(root, out)
    found = stand("one", out, True, root)
    assert not found.confirmatory and reason in found.reason


@pytest.mark.parametrize("place", ["src/library.py", "experiments/harness/running.py"])
def test_a_library_or_a_harness_without_a_commit_makes_no_confirmatory_table(
    root: Path, place: str
) -> None:
    changed = root.parent / place
    changed.parent.mkdir()
    changed.write_text("x = 1\n")
    found = stand("one", root.parent / "runs" / "one", True, root)
    assert not found.confirmatory and "without a commit" in found.reason
    git(root.parent, "add", ".")
    git(root.parent, "commit", "-qm", "committed")
    assert stand("one", root.parent / "runs" / "two", True, root).confirmatory


def test_the_short_form_and_experiments_without_a_plan_are_exploratory(root: Path) -> None:
    assert not stand("one", root.parent / "quick", False, root).confirmatory
    (root / "one" / PLAN).unlink()
    assert "no plan.md" in stand("one", root.parent / "none", True, root).reason


def test_stored_results_whose_plan_was_changed_are_named(root: Path) -> None:
    first = stand("one", root.parent / "runs" / "one", True, root)
    spoil_plan(root, root)
    assert "another" in find_broken({"one": {"standing": asdict(first)}}, root)[0]
    forged = {**asdict(first), "commit": "0" * 40}
    assert any("no ancestor" in one for one in find_broken({"one": {"standing": forged}}, root))


@pytest.mark.parametrize("part, named", [("plan", PLAN), ("code", "run.py")])
def test_plan_and_code_are_those_of_the_commit_that_was_run(
    root: Path, part: str, named: str
) -> None:
    first = stand("one", root.parent / "runs" / "one", True, root)
    commit_code(root, root)  # later work on the code is no change of what was run
    assert find_broken({"one": {"standing": asdict(first)}}, root) == []
    forged = {**asdict(first), part: "0" * 64}
    assert any(
        f"{named} was another in the commit" in one
        for one in find_broken({"one": {"standing": forged}}, root)
    )


def test_the_stored_confirmatory_results_are_those_of_their_plans() -> None:
    stored = {name: record for name in EXPERIMENTS if (record := read_record(name))}
    assert "confirmatory" in map(name_standing, stored.values())
    if subprocess.run(["git", "-C", str(ROOT), "rev-parse"], capture_output=True).returncode:
        pytest.skip("no repository")
    assert find_broken(stored) == []


def test_every_exploratory_table_says_so_in_its_readme() -> None:
    stored = {name: record for name in EXPERIMENTS if (record := read_record(name))}
    assert stored
    for name, record in stored.items():
        text = (ROOT / name / "README.md").read_text(encoding="utf-8")
        assert ("*Exploratory: " in text) == (name_standing(record) == "exploratory"), name
