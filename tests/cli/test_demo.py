"""The demo: what it prints, what it leaves, and that the example is the same run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from equifed.cli.main import app
from equifed.cli.many import METHODS, NEAR, ROUNDS, configure
from equifed.runs.config import RunConfig
from equifed.training.history import History

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).parents[2] / "examples" / "three-clients.toml"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, dict], Path]:
    out = tmp_path_factory.mktemp("demo")
    result = CliRunner().invoke(app, ["demo", "--json", "--out", str(out)])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout), out


def test_json_has_exactly_the_promised_form(demo: tuple[dict[str, dict], Path]) -> None:
    numbers, _ = demo
    assert list(numbers) == ["methods"]
    assert list(numbers["methods"]) == ["fedavg", "scaffold", "scaff-pd", "fair-newton"]
    for method in numbers["methods"].values():
        assert list(method) == ["average", "worst", "clients"]
        clients = method["clients"]
        assert list(clients) == ["T-shirt", "pullover", "shirt"]
        assert method["worst"] == min(clients.values())
        assert method["average"] == pytest.approx(sum(clients.values()) / 3)


def test_worst_client_gains_five_points_for_at_most_two_and_a_half(
    demo: tuple[dict[str, dict], Path],
) -> None:
    methods = demo[0]["methods"]
    for plain in ("fedavg", "scaffold"):  # SCAFFOLD finds the average's optimum without drift
        assert methods["fair-newton"]["worst"] >= methods[plain]["worst"] + 0.05
        assert methods["fair-newton"]["average"] >= methods[plain]["average"] - 0.025


def test_every_method_leaves_a_run_folder(demo: tuple[dict[str, dict], Path]) -> None:
    numbers, out = demo
    for method in METHODS:
        history = History.load(out / method)
        assert history.per_client() == numbers["methods"][method]["clients"]
        first, *others = (r.exchanges for r in history.rounds)
        assert first <= (18 if method == "scaff-pd" else 3)  # the first looks around
        assert max(others) <= 2
        assert RunConfig.read(out / method / "config.toml").algorithm["name"] == method


def test_the_fair_method_ends_proved_in_a_tenth_of_the_rounds(
    demo: tuple[dict[str, dict], Path],
) -> None:
    _, out = demo
    history = History.load(out / "fair-newton")
    last = history.rounds[-1]
    assert len(history.rounds) <= ROUNDS / 10
    assert last.numbers["gap"] <= NEAR * last.objective
    assert "within" in str(history.describe_certificate())


def test_the_example_is_the_demo_run_of_fair_newton() -> None:
    example, demo = RunConfig.read(EXAMPLE), configure("fair-newton")
    assert example.model.pop("loss") == "cross_entropy"
    assert demo.model.pop("loss") == "auto"  # which is cross_entropy for classes
    assert example == demo


def test_existing_demo_is_refused_and_then_replaced(tmp_path: Path) -> None:
    options = ["demo", "--out", str(tmp_path), "--rounds", "1"]
    assert CliRunner().invoke(app, options).exit_code == 0
    again = CliRunner().invoke(app, options)
    assert again.exit_code == 2
    assert "already holds a run" in again.stderr
    shown = CliRunner().invoke(app, [*options, "--overwrite"])
    assert shown.exit_code == 0
    for word in ("T-shirt", "pullover", "shirt", "average", "worst", "fedavg", "fair-newton"):
        assert word in shown.stdout
