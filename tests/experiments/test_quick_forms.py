"""The command as a user types it: the list, and short forms from nothing to results and figures."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from experiments.harness.command import main
from experiments.harness.experiment import ROOT

pytestmark = pytest.mark.long

BESIDE = Path(__file__).resolve().parents[2].parent / "shared" / "data"
SELF_CONTAINED = ["flamby-heart", "ia-points", "noisy-clients"]
LONGER = ["rc-fashion", "scaff-pd-synthetic", "scaff-pd-cifar10", "ia-penguins"]
"""Those whose experiments have tests with smaller forms."""


def results(name: str, out: Path) -> dict[str, object]:
    """Run the short form and return what it stored."""
    assert main(["run", name, "--quick", "--out", str(out)]) == 0
    stored: dict[str, object] = json.loads((out / "results" / "results.json").read_text())
    assert stored["command"] == f"python -m experiments run {name} --quick"
    assert stored["checks"] and stored["problems"] == []
    assert list((out / "figures").glob("*.svg"))
    return stored


@pytest.mark.parametrize(
    "name", [*SELF_CONTAINED, *(pytest.param(name, marks=pytest.mark.slow) for name in LONGER)]
)
def test_a_short_form_needs_no_files(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("EQUIFED_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setenv("EQUIFED_CACHE", str(tmp_path / "cache"))
    results(name, tmp_path / "out")


@pytest.mark.slow  # it has a test with a smaller form, too
def test_the_short_form_on_all_of_fashion_mnist(tmp_path: Path, monkeypatch) -> None:
    folder = Path(os.environ.get("EQUIFED_DATA", BESIDE))
    if not (folder / "fashion_mnist").is_dir():
        pytest.skip(f"no data files: set EQUIFED_DATA (looked at {folder})")
    monkeypatch.setenv("EQUIFED_DATA", str(folder))
    results("drfa-fashion", tmp_path / "out")


def test_the_command_lists_every_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert set(listed) == {path.parent.name for path in ROOT.glob("*/definition.toml")}
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown and one["title"] in shown for name, one in listed.items())


def test_the_command_runs_with_other_settings_and_refuses_what_it_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["run", "ia-points", "--quick", "--out", str(tmp_path / "points")]
    assert main(run) == 0
    assert "agree: NO" not in capsys.readouterr().out
    assert main([*run, "--set", "published.absolute=7.09"]) == 0
    assert "agree: NO" in capsys.readouterr().out
    assert main(["run", "ia-point", "--out", str(tmp_path / "x")]) == 2
    assert "did you mean 'ia-points'" in capsys.readouterr().err
