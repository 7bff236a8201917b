"""``equifed fit`` from a table to predictions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from equifed.cli.main import app
from equifed.runs import candidates

ROWS = "site,age,arm,ill\n" + "".join(
    f"{site},{20 + 7 * k % 60}.{i}{k},{'ab'[k % 2]},{'yes' if k * 7 % 60 > 25 + k % 20 else 'no'}\n"
    for i, site in enumerate(("north", "south", "west"))
    for k in range(40)
)


def test_a_table_becomes_a_model_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, values in {"L2": (1e-2,), "RHOS": (0.3,), "OWN_L2": (1e-2,), "OWN_RHOS": ()}.items():
        monkeypatch.setattr(candidates, name, values)
    table, out = tmp_path / "clinics.csv", tmp_path / "run"
    table.write_text(ROWS)
    asked = [str(table), "--client", "site", "--target", "ill", "--out", str(out), "--json"]
    said = CliRunner().invoke(app, ["fit", *asked])
    assert said.exit_code == 0, said.stderr
    told = json.loads(said.stdout)
    assert told["choice"] and [row["chosen"] for row in told["candidates"]].count(True) == 1
    assert (out / "report.html").exists()
    predicted = ["predict", str(out), str(table), "--out", str(tmp_path / "found.csv")]
    assert CliRunner().invoke(app, predicted).exit_code == 0
    assert len((tmp_path / "found.csv").read_text().splitlines()) == 121


def test_fit_says_what_columns_were_taken_for_and_init_chooses_the_same(tmp_path: Path) -> None:
    """With numbers of rows that rounding tells apart: 0.15 and 0.2 (1 - 0.25) of 150."""
    rng, lines = np.random.default_rng(0), ["row,site,age,visits,ill"]
    for k in range(300):
        seen = ["1", "2", "3 or more"][k % 3]
        lines.append(f"{k},{'ab'[k % 2]},{rng.normal():.7f},{seen},{rng.integers(2)}")
    table = tmp_path / "t.csv"
    table.write_text("\n".join(lines))
    asked = [str(table), "--client", "site", "--target", "ill"]
    fitted = CliRunner().invoke(app, ["fit", *asked, "--out", str(tmp_path / "run")])
    begun = CliRunner().invoke(app, ["init", *asked, "--out", str(tmp_path / "run.toml")])
    assert fitted.exit_code == begun.exit_code == 0, fitted.stderr + begun.stderr
    for said in (fitted.stdout, begun.stdout):
        assert "left out    row: an identifier" in said and "'3 or more', taken as" in said
    chosen = next(line for line in begun.stdout.splitlines() if line.startswith("chosen"))
    assert chosen.removeprefix("chosen").strip() in fitted.stdout


def test_privacy_is_asked_for_with_its_bounds(tmp_path: Path) -> None:
    table, out = tmp_path / "clinics.csv", tmp_path / "run"
    table.write_text(ROWS)
    asked = ["fit", str(table), "--client", "site", "--target", "ill", "--out", str(out), "--json"]
    asked += ["--epsilon", "3"]
    half = CliRunner().invoke(app, asked)
    assert half.exit_code != 0 and "--rows-bound" in half.stderr
    asked += ["--rows-bound", "3", "--loss-bound", "2"]
    secret = CliRunner().invoke(app, asked)
    assert secret.exit_code != 0 and "--public-preparation" in secret.stderr
    said = CliRunner().invoke(app, [*asked, "--public-preparation"])
    assert said.exit_code == 0, said.stderr
    assert any("epsilon 3 at delta 1e-05" in note for note in json.loads(said.stdout)["notes"])
    assert CliRunner().invoke(app, ["privacy", str(out)]).exit_code == 0
    predicted = ["predict", str(out), str(table), "--out", str(tmp_path / "found.csv")]
    assert CliRunner().invoke(app, predicted).exit_code == 0
