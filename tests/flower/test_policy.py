"""A site's own rules: what it refuses, where that is told, and how its vectors are shortened."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flwr.app import Context, RecordDict
from tests.flower.grid import QUICK, MemoryGrid, convex, flower_clients, memory_grid, task
from tests.flower.test_tables import TABLE, make_grid, run

from equifed.contract.clients import MissingClients
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.flower.app import run_federation
from equifed.flower.app_config import AppConfig, FederationSettings
from equifed.flower.handshake import StartError
from equifed.flower.preparing import show_statistics
from equifed.flower.rehearsal import make_plan
from equifed.flower.site import Policy, SiteError
from equifed.flower.wire import VERBS, Reply

pytestmark = pytest.mark.long


def write(path: Path, text: str) -> dict[str, Any]:
    path.write_text(text, encoding="utf-8")
    return {"policy": str(path)}


REFUSALS = {
    'privacy = "secure"': "this node takes part with privacy 'secure' only",
    "min_samples = 1000": "this site takes part with at least 1000 training samples, and has fewer",
    "max_steps = 2": "3 local steps are asked for, this site takes at most 2",
}


@pytest.mark.parametrize("rule", REFUSALS)
def test_what_a_site_refuses_is_told_before_anything_is_sent(rule: str, tmp_path: Path) -> None:
    grid = make_grid(tmp_path / "sites", more={"South": write(tmp_path / "policy.toml", rule)})
    with pytest.raises(StartError, match=f"South: refused: {REFUSALS[rule]}.*Agree with that site"):
        run(grid)
    ours = [Reply.from_records(m.content) for m in grid.received]
    (refused,) = [r for r in ours if r.error]
    assert set(refused.numbers) == {"name"}  # neither sizes nor columns
    assert {r.op for r in ours} == {"hello"}


def test_a_run_with_enough_others_goes_on_and_writes_it_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rule = write(tmp_path / "policy.toml", "max_steps = 2")
    grid = make_grid(tmp_path / "sites", more={"South": rule})
    history = run(grid, tmp_path / "run", clients=3)
    assert history.names == ("East", "North", "West")
    told = [e for e in history.events if e["event"] == "left out"]
    assert told[0]["client"] == "South" and "at most 2" in told[0]["reason"]
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert any(json.loads(line).get("client") == "South" for line in lines)
    assert "WARNING: round 0: left out of South: refused: 3 local steps" in capsys.readouterr().out


DEPLOY = Path(__file__).parents[2] / "docs" / "deploy-tables.md"
PRINTED = re.search(
    r"\n## Policy\n.*?```toml\n(.*?)```", DEPLOY.read_text(encoding="utf-8"), re.DOTALL
)


@pytest.mark.parametrize(
    "algorithm",
    [
        TABLE["algorithm"],
        {
            "name": "scaff-pd",
            "objective": {"name": "chi-square", "rho": 0.1},
            "local": {"lr": 0.1, "steps": 3, "batch_size": 8},
        },
    ],
    ids=lambda algorithm: algorithm["name"],
)
def test_the_printed_policy_takes_part_in_a_secure_run(
    algorithm: dict[str, Any], tmp_path: Path
) -> None:
    assert PRINTED is not None
    rule = write(tmp_path / "policy.toml", PRINTED[1])
    table = {**TABLE, "algorithm": algorithm}
    grid = make_grid(tmp_path / "sites", table, more={"North": rule})
    history = run(grid, tmp_path / "run", table=table, privacy="secure", deliver=True)
    assert "North" in history.names and len(history.rounds) == table["rounds"]
    troubles = ("left out", "quarantine")
    assert not [e for e in history.events if e["event"] in troubles]
    replies = [Reply.from_records(m.content) for m in grid.received]
    assert {"boxes", "unmask", "deliver"} <= {r.op for r in replies}
    assert not [(r.op, r.text) for r in replies if r.error]


def test_refusals_in_a_run_are_events(tmp_path: Path) -> None:
    """A rule that only a later request breaks: the round goes on without the site."""
    federation, the_task = convex(), task()
    grid = memory_grid(federation, the_task, tmp_path)
    clients = flower_clients(grid, the_task)
    for context in grid.contexts.values():
        if context.node_config["partition-id"] == 2:
            context.node_config |= write(tmp_path / "p.toml", "max_steps = 1")
    x = clients.initial(Stream(0))
    with pytest.raises(MissingClients, match=r"client-2.*2 local steps are asked for"):
        moved = clients.local_steps(x, LocalSGD(lr=0.1, steps=2), Stream(0, ("round", 1)))
        moved.displacement.weighted_sum(np.ones(4) / 4)
    assert len(clients.losses(x, Stream(0, ("round", 1, "l")))) == 4


def test_a_site_shortens_what_it_sends_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    federation, the_task = convex(), task()
    free = flower_clients(memory_grid(federation, the_task, tmp_path / "a"), the_task)
    rule = write(tmp_path / "policy.toml", "clip = 0.05")
    bound = flower_clients(memory_grid(federation, the_task, tmp_path / "b", **rule), the_task)
    x = free.initial(Stream(0))
    for clients in (free, bound):
        _, clients.last = clients.value_and_gradient(x, Stream(0, ("round", 1)))  # type: ignore
    for k in range(4):
        one = np.eye(4)[k]
        long, short = (c.last.weighted_sum(one).numpy() for c in (free, bound))  # type: ignore
        length = np.linalg.norm(long)
        expected = long * min(1.0, 0.05 / length)
        np.testing.assert_allclose(short, expected, rtol=1e-12)
        assert length > 0.05 >= np.linalg.norm(short) * (1 - 1e-12)
    run(make_grid(tmp_path / "sites", more={"East": rule}))
    told = capsys.readouterr().out
    assert "WARNING: East: shortens gradients and updates to length 0.05" in told


def test_a_policy_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    with pytest.raises(SiteError, match=r"cannot be read \(No such file"):
        Policy.read(path)
    for text, message in (
        ("max_step = 3", "max_step.*did you mean 'max_steps'"),
        ('privacy = "total"', "privacy must be 'none' or 'secure', got 'total'"),
        ('privacy = "sums"', "'sums'.*was removed: use 'secure'"),
        ("clip = -1.0", "clip must be above 0"),
        ("max_steps = 0", "max_steps must be above 0"),
        ("max_message = 9", "max_message"),
        ("min_samples = true", "min_samples"),
        ("=", "cannot be used"),
    ):
        path.write_text(text)
        with pytest.raises(SiteError, match=message):
            Policy.read(path)
    path.write_text("")
    assert Policy.read(path) == Policy()
    assert Policy.of({"policy": str(path), "privacy": "secure"}).privacy == "secure"
    path.write_text('privacy = "secure"')
    assert Policy.of({"policy": str(path), "privacy": "none"}).privacy == "secure"
    for level, message in (("much", "'none' or 'secure', got 'much'"), ("sums", "use 'secure'")):
        with pytest.raises(SiteError, match=message):
            Policy.of({"privacy": level})


def test_late_nodes_are_told_and_written_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    grid = make_grid(tmp_path / "sites")
    late = 999
    config = AppConfig.from_dict(TABLE)
    nodes, looks = grid.get_node_ids, iter(range(10_000))

    def later() -> Any:
        if next(looks) == 12:
            grid.apps[late] = grid.apps[100]
            settings = {**grid.contexts[100].node_config, "name": "Lake"}
            grid.contexts[late] = Context(1, late, settings, RecordDict(), {})
        return nodes()

    grid.get_node_ids = later  # type: ignore[method-assign]
    settings = FederationSettings(4, deadlines=QUICK, out=str(tmp_path / "run"))
    history = run_federation(grid, config, settings)
    told = [e for e in history.events if e["event"] == "left out"]
    assert [e["client"] for e in told] == ["Lake"] and "after the start" in told[0]["reason"]
    assert "the server says: a run is under way without this node" in caplog.text
    asked = [m.metadata.message_type for m in grid.sent if m.metadata.dst_node_id == late]
    assert asked == [VERBS["hello"].message], "it is greeted once, and asked for nothing"
    assert "left out of Lake" in capsys.readouterr().out


def show(
    grid: MemoryGrid, table: dict[str, Any] = TABLE, **settings: Any
) -> tuple[dict[str, Any], str]:
    lines: list[str] = []
    given = FederationSettings(4, deadlines=QUICK, do="statistics", **settings)
    plan = make_plan(AppConfig.from_dict(table), given)
    return show_statistics(grid, given, lines.append, plan), "\n".join(lines)


def test_statistics_of_the_sites_side_by_side(tmp_path: Path) -> None:
    def change(who: str, rows: pd.DataFrame) -> pd.DataFrame:
        return rows.assign(platelets=rows["platelets"] / 1000) if who == "East" else rows

    hidden = write(tmp_path / "policy.toml", "show_by_name = false")
    grid = make_grid(tmp_path / "sites", change=change, more={"North": hidden})
    found, text = show(grid, out=str(tmp_path / "told"))
    south = pd.read_csv(tmp_path / "sites" / "South.csv")
    told = found["sites"]["South"]
    assert sum(told["rows"].values()) == len(south)
    assert told["columns"]["lactate"]["rows"] == told["rows"]["train"]
    assert set(found["sites"]["North"]) == {"rows"}
    warned = "\n".join(found["warnings"])
    assert "East: column 'platelets' has the mean" in warned
    assert "Are its units the same?" in warned and "times theirs" in warned
    assert "West: column 'lactate' has no value at all" in warned
    assert "North does not show its numbers by name" in warned
    assert not any("'age'" in sentence for sentence in found["warnings"])
    assert "share of each class in %" in text and "WARNING: East" in text
    assert json.loads((tmp_path / "told" / "statistics.json").read_text()) == found
    assert not any(m.metadata.message_type.startswith(("train", "evaluate")) for m in grid.sent)


def test_a_column_of_one_value_is_named(tmp_path: Path) -> None:
    def change(who: str, rows: pd.DataFrame) -> pd.DataFrame:
        return rows.assign(creatinine=0.0) if who == "West" else rows

    found, _ = show(make_grid(tmp_path / "sites", change=change))
    (said,) = [w for w in found["warnings"] if "in every row" in w]
    assert said.startswith("West: column 'creatinine' is 0 in every row, and varies at other sites")


def test_statistics_are_the_means_of_training_rows(tmp_path: Path) -> None:
    table = {**TABLE, "data": {**TABLE["data"], "holdout": {}}}
    found, _ = show(make_grid(tmp_path / "sites", table), table)
    for who, told in found["sites"].items():
        rows = pd.read_csv(tmp_path / "sites" / f"{who}.csv")
        for column in ("age", "creatinine", "platelets"):
            numbers = rows[column].dropna()
            assert told["columns"][column]["missing"] == rows[column].isna().sum()
            assert told["columns"][column]["mean"] == pytest.approx(numbers.mean(), rel=1e-12)
            spread = told["columns"][column]["deviation"]
            assert spread == pytest.approx(numbers.std(ddof=0), rel=1e-9)
        assert told["labels"] == rows["outcome"].value_counts().to_dict()
