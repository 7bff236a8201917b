"""The README: its example runs, it is short, its links lead somewhere; the tables of names."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import pytest
from scripts import public_names

from equifed.runs.catalogue import ALGORITHMS, OBJECTIVES, Entry

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Column .* is left out")
def test_the_example_runs_and_serves_the_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) == 5
    shutil.copy(ROOT / "examples" / "hospitals.csv", tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    told = capsys.readouterr().out
    for candidate in ("one shared model, average", "own bias, fair", "each client alone"):
        assert candidate in told
    assert (tmp_path / "runs" / "hospitals" / "summary.json").exists()
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_it_is_at_most_900_words() -> None:
    assert len(README.split()) <= 900


def test_what_follows_from_the_catalogue_is_written() -> None:
    stale = public_names.find_stale()
    assert not stale, f"{'; '.join(stale)}: run make names"


@pytest.mark.parametrize("name", [*ALGORITHMS, *OBJECTIVES])
def test_the_tables_are_complete(name: str) -> None:
    assert f"| `{name}` |" in public_names.PAGE.read_text(encoding="utf-8")


def test_what_is_stale_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = dataclasses.replace(ALGORITHMS["fedavg"], summary="something else")
    monkeypatch.setitem(ALGORITHMS, "fedavg", changed)
    assert public_names.find_stale() == ["catalogue.md"]
    monkeypatch.setitem(ALGORITHMS, "new", Entry("equifed.steps.phi:choose_phi", "moved"))
    assert "algorithms/__init__.py lacks choose_phi" in public_names.find_stale()
    assert "__init__.pyi" in public_names.find_stale()


def test_links_lead_somewhere_from_a_package_index_too() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    own = [re.fullmatch(r"https://github.com/equifed/equifed/(?:blob|tree)/main/(.*)", t)
           for t in targets]  # fmt: skip
    assert targets and all(t.startswith("https://") for t in targets)
    assert [found[1] for found in own if found and not (ROOT / found[1]).exists()] == []
    assert sum(found is not None for found in own) > 8


def test_the_hooks_are_the_versions_that_make_check_has() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    (wanted,) = re.findall(r"ruff-pre-commit\n    rev: v([\d.]+)", hooks)
    assert f"\nruff=={wanted}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("target", ["demo", "quick", "test", "install"])
def test_commands_are_targets_of_the_makefile(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
