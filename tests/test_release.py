"""A release is refused while tag, version, changelog and citation differ."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts.check_release import ROOT, find_problems

FILES = {
    "pyproject.toml": '[project]\nversion = "1.2.3"\n',
    "CHANGELOG.md": "# Changelog\n\n## 1.2.3 (2026-01-31)\n\n## 1.2.2 (2025-01-31)\n",
    "CITATION.cff": "version: 1.2.3\n",
}


def write(root: Path, **changes: str) -> Path:
    for name, text in FILES.items():
        (root / name).write_text(changes.get(name.partition(".")[0], text))
    return root


def test_what_agrees_may_be_released(tmp_path: Path) -> None:
    assert find_problems("v1.2.3", write(tmp_path)) == []


@pytest.mark.parametrize(
    "tag, changes, word",
    [
        ("v1.2.4", {}, "tag"),
        ("v1.2.3.dev0", {"pyproject": '[project]\nversion = "1.2.3.dev0"\n'}, "no release"),
        ("v1.2.3", {"CHANGELOG": "## 1.2.2 (2025-01-31)\n"}, "begins with 1.2.2"),
        ("v1.2.3", {"CHANGELOG": "## 1.2.3 (unreleased)\n"}, "day of release"),
        ("v1.2.3", {"CITATION": "version: 1.2.2\n"}, "CITATION"),
    ],
)
def test_what_differs_is_named(
    tmp_path: Path, tag: str, changes: dict[str, str], word: str
) -> None:
    assert any(word in one for one in find_problems(tag, write(tmp_path, **changes)))


def test_actions_are_pinned_by_hash() -> None:
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for used in re.findall(r"uses: (\S+)", path.read_text("utf-8")):
            assert used.startswith("./") or re.search(r"@[0-9a-f]{40}$", used), (path.name, used)
