"""``equifed privacy``: what was spent, and what a budget buys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_cli import equifed

from equifed.privacy.ledger import Entry, Ledger, compose

pytestmark = pytest.mark.long

PRIVATE = {
    "name": "private-fedavg", "epsilon": 2.0, "rounds": 4, "clip": 0.5,
    "local": {"lr": 0.1, "steps": 2},
}  # fmt: skip


def test_a_plan_keeps_to_its_budget() -> None:
    found = json.loads(equifed("privacy", "--plan", "--epsilon", 2, "--json").stdout)
    assert len(found["plan"]) == 9
    for line in found["plan"]:
        assert compose([Entry(**e) for e in line["answers"]], 1e-5) == pytest.approx(2.0)
    shown = equifed("privacy", "--plan", "--rows", "46", "--rounds", "12").stdout
    for word in ("second moments", "mean loss", "mean gradient", "12 times", "46"):
        assert word in shown
    plan = ("privacy", "--plan", "--algorithm", "private-fedavg", "--epsilon", 8, "--rounds", 20)
    (line,) = json.loads(equifed(*plan, "--json").stdout)["plan"]
    assert compose([Entry(**e) for e in line["answers"]], 1e-5) == pytest.approx(8.0)
    assert "sum of updates" in equifed(*plan).stdout


def test_a_run_tells_what_it_spent(config: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert equifed("run", config(algorithm=PRIVATE), "--out", out, "--quiet").exit_code == 0
    (told,) = json.loads(equifed("privacy", out, "--json").stdout)["ledgers"]
    assert (told["epsilon"], told["unit"], told["entries"][0]["steps"]) == (2.0, "client", 3)
    assert told["entries"][0]["share"] == pytest.approx(3 / 4)
    assert 0 < told["spent"] < 2.0
    shown = " ".join(equifed("privacy", out).stdout.split())
    assert "publish epsilon 2 at delta 1e-05 for every client" in shown
    assert "75.0%" in shown


def test_a_sites_ledger_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "north.json"
    ledger = Ledger(3.0, 1e-5, path=path, name="north\x1b[31m")
    ledger.spend(Entry("losses", 0.01, 0.1, steps=12), Entry("steps", 0.01, 0.1, 0.1, 5))
    shown = equifed("privacy", path).stdout
    assert "mean loss" in shown and "\x1b" not in shown
    assert "12" in shown and "north" in shown


def test_what_is_no_ledger_is_refused(config: Any, tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other.json"
    other.write_text('{"a": 1}')
    assert equifed("run", config(), "--out", out, "--quiet").exit_code == 0
    for given, words in [
        ((), "one of the two"),
        ((out, "--plan"), "one of the two"),
        ((out,), "records no privacy"),
        ((other,), "is not a privacy ledger"),
        ((tmp_path / "none.json",), "No such file"),
        (("--plan", "--rounds", "x"), "whole numbers from 1"),
        (("--plan", "--algorithm", "afl"), "one of fair-newton"),
        (("--plan", "--epsilon", -1), "epsilon must be positive"),
    ]:
        result = equifed("privacy", *given)
        assert (result.exit_code, words in result.stderr) == (2, True), (given, result.stderr)
