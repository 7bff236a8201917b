"""Words that we no longer use in what a user reads: messages, help, summaries, pages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INSTEAD = {
    r"\bgo(es)? on with\b": "resume, continue",
    r"\b(is|are) told\b": "reports",
    r"\bgiv(es|en) out\b|\bgave out\b": "returned, final",
    r"\b(no|some|every)body\b": "no client, a client, all clients",
    r"\bleads the (others|rest)\b": "dominates the weights",
    r"\bsay less\b": "use a smaller value",
    r"\bis no (device|setting|algorithm)\b": "unknown",
    r"\bgo(es)? on (by|as|without)\b|\bruns? goes on\b": "continues",
}
IN_MESSAGES = INSTEAD | {
    r"(?<!here )\bis no (?!longer\b|more\b)[a-z]+": "is not a ...",
    r"\bhand(ed)? (it )?over\b": "pass",
    r"\b[Ss]ay [\w.]+ ?=": "use, set, pass",
    r"\bsomething else than\b|\bother \w+ than (asked|the)\b": "name what came, and what should",
    r"\bis gone\b": "was removed, has left",
    r"\bwhoever\b": "the operator, any user",
}
SOURCES = sorted((ROOT / "src" / "equifed").rglob("*.py"))
PAGES = [
    ROOT / "README.md",
    *sorted(
        path
        for path in (ROOT / "docs").rglob("*.md")
        if path.parent.name not in ("made", "reference") and path.name != "reproductions.md"
    ),
]


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """Return the texts of a module that are neither docstrings nor single words."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    events = {"given out"}  # its name in events.jsonl, which other versions read
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in own:
            text = node.value
            if " " in text.strip() and text not in events:
                yield node.lineno, text


def find_words(text: str, instead: dict[str, str] = INSTEAD) -> list[str]:
    return [f"{m[0]!r}: {better}" for worse, better in instead.items()
            for m in re.finditer(worse, text, re.IGNORECASE)]  # fmt: skip


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT / "src")))
def test_messages_have_plain_words(path: Path) -> None:
    found = [
        (line, words) for line, text in strings(path) if (words := find_words(text, IN_MESSAGES))
    ]
    assert not found, found


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_pages_have_plain_words(path: Path) -> None:
    assert find_words(path.read_text(encoding="utf-8")) == []


def test_a_worse_word_is_found() -> None:
    assert find_words("Go on with the run that was given out to somebody") != []
