"""Chosen settings at the edge of what was tried: found where they are, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from experiments.harness.command import main
from experiments.harness.edges import find_edges, judge, read_tries, stored_choices
from experiments.harness.experiment import EXPERIMENTS, Table

COLUMNS = ("method", "settings", "score", "")


def stored(tmp_path: Path, rows: list[tuple[str, str, float, str | int]], last: str = "") -> Path:
    """Write a table of tries as an experiment does."""
    path = tmp_path / "grid.csv"
    path.write_text(Table("tries", (*COLUMNS[:3], last), rows).csv(), encoding="utf-8")
    return path


@pytest.mark.parametrize("best", range(5))
def test_an_edge_is_the_first_or_the_last_of_the_values(tmp_path: Path, best: int) -> None:
    rates = [0.001, 0.01, 0.1, 1.0, 10.0]
    rows = [("A", f"lr = {v:g}", 0.5, "chosen" if k == best else "") for k, v in enumerate(rates)]
    found = find_edges("x", read_tries(stored(tmp_path, rows)))
    assert [one.value for one in found] == ([rates[best]] if best in (0, 4) else [])
    assert all(one.tried == tuple(rates) for one in found)


def test_a_natural_limit_is_no_edge_and_settings_that_go_together_count_once(
    tmp_path: Path,
) -> None:
    tries = [(0.0, 0.1), (0.0, 1.0), (1.0, 0.1), (1.0, 1.0)]
    rows = [
        ("A", f"q = {q:g}, lr = {lr:g}, primal = {10 * lr:g}, tails = [0.5, {lr}]", 0.5,
         "chosen" if (q, lr) == (0.0, 1.0) else "") for q, lr in tries
    ]  # fmt: skip
    found = find_edges("x", read_tries(stored(tmp_path, rows)))
    assert [(one.setting, one.value) for one in found] == [("lr", 1.0)]
    assert "x: A, lr = 1 is the largest of 0.1, 1" in str(found[0])


@pytest.mark.parametrize(("times", "edges"), [([4, 1, 0], 1), ([1, 3, 1], 0), ([0, 2, 3], 1)])
def test_where_trials_choose_the_median_one_counts(
    tmp_path: Path, times: list[int], edges: int
) -> None:
    rows = [("A", f"lr = {10.0**k:g}", 0.5, n) for k, n in enumerate(times)]
    found = find_edges("x", read_tries(stored(tmp_path, rows, "trials that chose it")))
    assert len(found) == edges


def test_other_tables_have_no_tries(tmp_path: Path) -> None:
    path = tmp_path / "accuracy.csv"
    path.write_text(Table("x", ("method", "average"), [("A", 0.5)]).csv(), encoding="utf-8")
    assert read_tries(path) == []


def test_the_command_names_what_is_stored(capsys: pytest.CaptureFixture[str]) -> None:
    judged = {name: stored_choices([name]) for name in EXPERIMENTS}
    assert sum(map(len, judged.values())) > 500
    assert judged["own-hospitals"] and judged["own-shift"]
    without = next(name for name, found in judged.items() if not any(j.at_edge for j in found))
    assert main(["edges", without]) == 0
    assert "No chosen setting" in capsys.readouterr().out
    assert main(["edges", "own-hospitals"]) == 1
    shown = capsys.readouterr().out.splitlines()
    edges = [str(one) for one in judged["own-hospitals"] if one.at_edge]
    count = len(judged["own-hospitals"])
    assert shown == [*edges, f"{count} chosen settings of 1 experiments were judged, "
                     f"{len(edges)} lie at an edge."]  # fmt: skip
    assert len(edges) == sum("Hungary" in one for one in edges) == 5
    assert main(["edges", "no-such"]) == 2


def test_counts_are_judged_against_the_values_of_the_definition(tmp_path: Path) -> None:
    path = tmp_path / "chosen.csv"
    path.write_text('method,A,B\nshared,"0.1: 2, 1: 8","0.1: 9"\n', encoding="utf-8")
    told = {"l2": [0.01, 0.1, 1.0]}
    found = judge("x", read_tries(path, told))
    assert [(j.method, j.setting, j.value, j.at_edge) for j in found] == [
        ("shared, A", "l2", 1.0, True), ("shared, B", "l2", 0.1, False)
    ]  # fmt: skip


def test_what_each_seed_chose_is_judged_by_the_median_seed(tmp_path: Path) -> None:
    path = tmp_path / "chosen.csv"
    rows = [(0.1, 5), (0.1, 20), (0.2, 20)]
    lines = [f"a,{seed},{lr},{last}" for seed, (lr, last) in enumerate(rows)]
    path.write_text("\n".join(["method,seed,lr,round", *lines]), encoding="utf-8")
    told = {"lr": [0.05, 0.1, 0.2], "training": {"rounds": 20, "every": 5}}
    found = judge("x", read_tries(path, told))
    assert [(j.setting, j.value, j.at_edge) for j in found] == [
        ("lr", 0.1, False), ("round", 20.0, True)
    ]  # fmt: skip


def test_a_table_of_choices_that_is_not_known_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "choices.csv"
    path.write_text("who,what\na,b\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"choices.csv is named .* \(who, what\)"):
        read_tries(path)


@pytest.mark.parametrize(("limits", "edges"), [({}, 1), ({"tails": [0.25, 1.0]}, 0)])
def test_a_definition_may_name_limits_of_its_own(
    tmp_path: Path, limits: dict[str, list[float]], edges: int
) -> None:
    results = tmp_path / "four" / "results"
    results.mkdir(parents=True)
    rows = [("A", f"tails = {v}", 0.5, "chosen" if v == 0.25 else "") for v in (0.25, 0.5, 1.0)]
    stored(results, rows)
    record = json.dumps({"settings": {"limits": limits}})
    (results / "results.json").write_text(record, encoding="utf-8")
    assert sum(one.at_edge for one in stored_choices(["four"], tmp_path)) == edges
