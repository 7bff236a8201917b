"""Folders from a stranger, given to one reader of each kind: `scripts.trust.strangers`, smaller."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from scripts.trust import strangers
from scripts.trust.gifts import GIFTS, HTML

pytestmark = pytest.mark.long

SOME = (
    "code: federation", "code: a module of the machine", "code: our own module in a checkpoint",
    "link: predictor.json", "link: choice.json", "path: a comparison's run", "pickled arrays",
    "pickled model", "odd names", "folder: events.jsonl", "a list: run.json", "deep: config.toml",
    "event of a stranger", "HTML: given out", "HTML: metric", "samples: nothing in them",
    "config: other types", "preparation: other types", "weights: NaN", "client: escapes",
    "own parts: of fewer clients", "predictor: other types", "comparison: other types",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return strangers.prepare(tmp_path_factory.mktemp("strangers").resolve())


@pytest.mark.parametrize("gift", SOME)
def test_no_reader_does_what_a_folder_wants(made: Path, gift: str) -> None:
    counts, wrong = strangers.sweep(made, [gift], strangers.QUICK)
    assert not wrong
    assert counts["read"] + counts["refused"] > 0  # it was there to be read


def test_folders_changed_at_random(made: Path) -> None:
    assert strangers.sweep(made, [], strangers.QUICK, range(12))[1] == []


def test_the_sweep_sees_what_goes_wrong(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers that do what none may do are all found, each by its own deed."""

    def crash(case: strangers.Case) -> None:
        raise KeyError("x")

    bad = {
        "reads": lambda c: (c.outside / "secret").read_text() and None,
        "writes": lambda c: (c.outside / "new").write_text("x") and None,
        "removes": lambda c: (c.outside / "secret").unlink(),
        "starts": lambda c: os.system("true") and None,
        "runs code": lambda c: (c.outside / "ran").touch(),
        "KeyError": crash,
        "holds": lambda c: (c.mine / "page.html").write_text(HTML) and None,
    }
    monkeypatch.setattr(strangers, "READERS", bad)
    _, wrong = strangers.sweep(made, ["clients: numbers"], list(bad))
    assert {name for name in bad if any(f"| {name}: " in line for line in wrong)} == set(bad)
    assert set(SOME) <= set(GIFTS)
