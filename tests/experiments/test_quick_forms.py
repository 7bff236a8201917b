"""The short forms as a user runs them: the command, from nothing to results and figures."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from equifed.cli.main import app

pytestmark = pytest.mark.long

BESIDE = Path(__file__).resolve().parents[2].parent / "shared" / "data"
SELF_CONTAINED = [
    "scaff-pd-synthetic",
    "scaff-pd-cifar10",
    "rc-fashion",
    "ia-points",
    "ia-penguins",
]


def results(name: str, out: Path) -> dict[str, object]:
    """Run the short form and return what it stored."""
    done = CliRunner().invoke(app, ["reproduce", name, "--quick", "--quiet", "--out", str(out)])
    assert done.exit_code == 0, done.output
    stored: dict[str, object] = json.loads((out / "results" / "results.json").read_text())
    assert stored["command"] == f"equifed reproduce {name} --quick"
    assert stored["checks"] and stored["problems"] == []
    assert list((out / "figures").glob("*.svg"))
    return stored


@pytest.mark.parametrize("name", SELF_CONTAINED)
def test_a_short_form_needs_no_files(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("EQUIFED_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setenv("EQUIFED_CACHE", str(tmp_path / "cache"))
    results(name, tmp_path / "out")


def test_the_short_form_on_all_of_fashion_mnist(tmp_path: Path, monkeypatch) -> None:
    folder = Path(os.environ.get("EQUIFED_DATA", BESIDE))
    if not (folder / "fashion_mnist").is_dir():
        pytest.skip(f"no data files: set EQUIFED_DATA (looked at {folder})")
    monkeypatch.setenv("EQUIFED_DATA", str(folder))
    results("drfa-fashion", tmp_path / "out")
