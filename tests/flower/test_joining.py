"""Who comes and goes: into a run under way, into a finished one, and out of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message
from safetensors.torch import load_file
from tests.flower.grid import QUICK, MemoryGrid
from tests.flower.test_tables import SIZES, TABLE
from tests.flower.test_tables import make_grid as make_table_grid
from typer.testing import CliRunner

from equifed.cli.flower import app as cli
from equifed.flower.app import run_federation
from equifed.flower.app_config import AppConfig, FederationSettings
from equifed.flower.client import make_client_app
from equifed.flower.hello import StartError
from equifed.flower.joining import ADMITTED, admit, find_open_part
from equifed.flower.welcome import welcome
from equifed.flower.wire import OPERATIONS, Reply, Request
from equifed.training.history import History

pytestmark = pytest.mark.long

NAMES = ("east", "north", "south", "west")
CONFIG: dict[str, Any] = {
    "rounds": 6,
    "seed": 3,
    "data": {"classes": 2},
    "model": {"name": "logistic", "l2": 0.1, "dtype": "float64"},
    "algorithm": {"name": "fedavg", "local": {"lr": 0.1, "steps": 3, "batch_size": 8}},
    "evaluate": {"splits": ["test"], "every": 1},
    "give_out": "last",
    "guard": "off",
}


def load(context: Context) -> Any:
    name = str(context.node_config["name"])
    rng = np.random.default_rng(NAMES.index(name))
    width = int(context.node_config.get("columns", 4))
    x = rng.normal(size=(40, width))
    y = (x[:, 0] + 0.3 * rng.normal(size=40) > 0).astype(np.int64)
    return {"train": (x[:30], y[:30]), "test": (x[30:], y[30:])}


def make_grid(root: Path, **more: dict[str, Any]) -> MemoryGrid:
    task = AppConfig.from_dict(CONFIG).build_task()
    apps = {i: make_client_app(load, task, classes=2, memory=root / "memory") for i in range(4)}
    return MemoryGrid(apps, {i: {"name": n, **more.get(n, {})} for i, n in enumerate(NAMES)})


def settings(out: Path, **given: Any) -> FederationSettings:
    return FederationSettings(**{"clients": 3, "deadlines": QUICK, "out": str(out), **given})


def connect_after(grid: MemoryGrid, rounds: int, out: Path, *nodes: int, word: str = "") -> None:
    """Let nodes come, and the operator say a word, when so many rounds were played."""
    grid.offline |= set(nodes)

    def tamper(partition: int, request: Message, reply: Message) -> list[Message]:
        rows = out / "rounds.csv"
        if rows.exists() and len(rows.read_text().splitlines()) > rounds and grid.offline:
            grid.offline -= set(nodes)
            if word:
                done = CliRunner().invoke(cli, ["admit", str(out), word])
                assert done.exit_code == 0, done.output
        return [reply]

    grid.tamper = tamper


def run(grid: MemoryGrid, out: Path, **given: Any) -> History:
    return run_federation(grid, AppConfig.from_dict(CONFIG), settings(out, **given))


def asked_of(grid: MemoryGrid, node: int) -> list[str]:
    sent = [m for m in grid.sent if m.metadata.dst_node_id == node]
    return [Request.from_records(m.content).op for m in sent]


@pytest.mark.parametrize("privacy", ["none", "sums", "secure"])
def test_an_admitted_site_takes_part_from_the_next_round(privacy: Any, tmp_path: Path) -> None:
    out, grid = tmp_path / "run", make_grid(tmp_path)
    connect_after(grid, 2, out, 3, word="west")
    history = run(grid, out, privacy=privacy)
    before, after = History.load(out), History.load(tmp_path / "run-part2")
    assert before.names == NAMES[:3] and after.names == history.names == NAMES
    assert len(before.rounds) + len(after.rounds) == 6 and len(before.rounds) < 6
    assert any("west joins by the operator's word" in str(e.get("reason")) for e in before.events)
    # The second part is the run of the four from the model of the first.
    grid = make_grid(tmp_path / "again")
    config = AppConfig.from_dict({**CONFIG, "seed": 4})
    left = len(after.rounds)
    more = {"clients": 4, "rounds": left, "start": str(out), "privacy": privacy}
    twin = run_federation(grid, config, settings(tmp_path / "twin", **more))
    assert twin.parameters is not None and history.parameters is not None
    for name, value in twin.parameters.items():
        assert (history.parameters[name] - value).abs().max() == 0.0
    told = json.loads((tmp_path / "run-part2" / "flower.json").read_text())
    assert told["start"] == str(out) and told["privacy"] == privacy


class Killed(BaseException):
    """Ends the server app as a signal would."""


def kill(*given: Any) -> Any:
    raise Killed


@pytest.mark.parametrize(
    ("when", "said", "place"),
    [
        ("between the parts", "ended for west to join", "run-part2"),
        ("before the second part was saved", "ended for west to join", "run-part3"),
        ("in the second part", "run-part2; that is resumed", "run-part2"),
    ],
)
def test_a_run_that_was_killed_while_a_site_joined_goes_on(
    when: str,
    said: str,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("equifed.training.loop.CHECKPOINT_SECONDS", 0.0)
    whole, grid = tmp_path / "whole", make_grid(tmp_path / "1")
    connect_after(grid, 2, whole, 3, word="west")
    expected = run(grid, whole)
    out, grid = tmp_path / "run", make_grid(tmp_path / "2")
    connect_after(grid, 2, out, 3, word="west")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        if when == "between the parts":
            patch.setattr("equifed.flower.app.plan_next_part", kill)
        else:
            connect, part = grid.tamper, tmp_path / "run-part2"
            assert connect is not None
            sign = part / "checkpoint" if when == "in the second part" else part / "rounds.csv"
            grid.tamper = lambda *a: kill() if sign.exists() else connect(*a)
        run(grid, out)
    grid.tamper = None
    done = run(grid, out, resume=True)
    assert said in capsys.readouterr().out
    for history in (done, History.load(tmp_path / place)):
        assert history.names == NAMES and len(history.rounds) == len(expected.rounds)
        for name, value in (history.parameters or {}).items():
            assert torch.equal(value, (expected.parameters or {})[name])
    assert find_open_part(out) is None
    told = CliRunner().invoke(cli, ["resume", str(tmp_path), "--out", str(out)])
    assert told.exit_code == 0 and "is complete" in told.output


def test_the_next_part_is_with_those_who_were_to_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, grid = tmp_path / "run", make_grid(tmp_path)
    connect_after(grid, 1, out, 2, 3, word="west")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("equifed.flower.app.plan_next_part", kill)
        run(grid, out, clients=2)
    grid.tamper, grid.offline = None, {3}
    with pytest.raises(StartError, match="is one of east, north, west; connected are"):
        run(grid, out, resume=True)


def test_without_the_operators_word_nobody_joins(tmp_path: Path) -> None:
    out, grid = tmp_path / "run", make_grid(tmp_path)
    connect_after(grid, 2, out, 3)
    history = run(grid, out)
    assert history.names == NAMES[:3] and len(history.rounds) == 6
    assert asked_of(grid, 3) == ["notice"]
    assert [e["client"] for e in history.events if e["event"] == "left out"] == ["west"]


def test_others_that_are_connected_do_not_slip_in(tmp_path: Path) -> None:
    out, grid = tmp_path / "run", make_grid(tmp_path)
    connect_after(grid, 1, out, 2, 3, word="west")
    history = run(grid, out, clients=2)
    assert history.names == ("east", "north", "west")
    assert not {"losses", "gradient", "local", "metrics"} & set(asked_of(grid, 2))


def test_an_admitted_site_that_does_not_fit_is_left_out_by_name(tmp_path: Path) -> None:
    out, grid = tmp_path / "run", make_grid(tmp_path, west={"columns": 5})
    connect_after(grid, 2, out, 3, word="west")
    history = run(grid, out)
    assert history.names == NAMES[:3] and len(history.rounds) == 6
    reasons = [str(e["reason"]) for e in history.events if e["event"] == "left out"]
    assert any("does not fit" in r and "(4,) and (5,)" in r for r in reasons), reasons
    assert "local" not in asked_of(grid, 3)


def test_a_site_that_is_admitted_before_it_is_there_is_waited_for(tmp_path: Path) -> None:
    out, grid = tmp_path / "run", make_grid(tmp_path)
    connect_after(grid, 3, out, 3)
    arrive = grid.tamper
    assert arrive is not None

    def tamper(partition: int, request: Message, reply: Message) -> list[Message]:
        if (out / "rounds.csv").exists() and not (out / ADMITTED).exists():
            admit(out, ["west"])
        return arrive(partition, request, reply)

    grid.tamper = tamper
    assert run(grid, out).names == NAMES
    waits = [e for e in History.load(out).events if "it waits" in str(e.get("reason"))]
    assert [(e["client"], e["reason"]) for e in waits] == [
        ("west", "it waits: it is not connected")
    ]


def test_another_version_is_not_admitted(tmp_path: Path) -> None:
    out, grid = tmp_path / "run", make_grid(tmp_path)
    connect_after(grid, 2, out, 3, word="west")
    connect = grid.tamper
    assert connect is not None

    def tamper(partition: int, request: Message, reply: Message) -> list[Message]:
        (kept,) = connect(partition, request, reply)
        told = Reply.from_records(kept.content)
        if told.op == "hello" and told.numbers["name"] == "west":
            told.numbers["versions"]["equifed"] = "0.0.7"
        return [Message(told.to_records(), reply_to=request)]

    grid.tamper = tamper
    history = run(grid, out)
    assert history.names == NAMES[:3]
    assert any("it has equifed 0.0.7" in str(e.get("reason")) for e in history.events)


def test_nobody_is_admitted_for_no_rounds(tmp_path: Path) -> None:
    out, grid = tmp_path / "run", make_grid(tmp_path)
    connect_after(grid, 6, out, 3, word="west")
    assert len(run(grid, out).rounds) == 6
    assert (out / ADMITTED).exists() and not (tmp_path / "run-part2").exists()


def test_admit_refuses_what_makes_no_sense(tmp_path: Path) -> None:
    out, grid = tmp_path / "run", make_grid(tmp_path)
    grid.offline = {3}

    def invoke(*words: str) -> Any:
        return CliRunner().invoke(cli, ["admit", *words])

    assert "holds no run" in invoke(str(out), "west").output
    run(grid, out, rounds=1)
    done = invoke(str(out), "west")
    assert done.exit_code == 2 and "complete" in done.output
    (out / "summary.json").unlink()
    done = invoke(str(out), "north")
    assert done.exit_code == 2 and "takes part already" in done.output
    assert not (out / ADMITTED).exists()
    (out / ADMITTED).write_text("[nonsense")
    admit(out, ["west"])
    assert set(json.loads((out / ADMITTED).read_text())) == {"west"}


UNITS = {"age": "years"}


def make_tables(root: Path, unit: str) -> tuple[MemoryGrid, AppConfig]:
    """Return hospitals with files; the last in order says in what it measures the age."""
    table = {**TABLE, "rounds": 6, "data": {**TABLE["data"], "units": UNITS}}
    more = {}
    root.mkdir()
    for name in SIZES:
        units = unit if name == "West" else "years"
        (root / f"{name}.toml").write_text(f'[units]\nage = "{units}"\n')
        more[name] = {"site": str(root / f"{name}.toml")}
    return make_table_grid(root / "sites", table, more=more), AppConfig.from_dict(table)


def test_a_table_joins_with_the_preparation_that_there_is(tmp_path: Path) -> None:
    out, (grid, config) = tmp_path / "run", make_tables(tmp_path / "a", "years")
    connect_after(grid, 2, out, max(grid.apps), word="West")
    history = run_federation(grid, config, settings(out))
    assert history.names == tuple(sorted(SIZES))
    parts = [(folder / "preparation.json").read_text() for folder in (out, tmp_path / "run-part2")]
    assert parts[0] == parts[1]
    assert "prepare" not in asked_of(grid, max(grid.apps))


def test_a_table_in_other_units_does_not_join(tmp_path: Path) -> None:
    out, (grid, config) = tmp_path / "run", make_tables(tmp_path / "a", "months")
    connect_after(grid, 2, out, max(grid.apps), word="West")
    history = run_federation(grid, config, settings(out))
    assert len(history.names) == 3 and len(history.rounds) == 6
    told = "West: column 'age' is in 'months', agreed is 'years'"
    assert any(told in str(event.get("reason")) for event in history.events)
    with pytest.raises(StartError, match=told):
        meet(grid, out, "West")
    with pytest.raises(StartError, match=told):
        run_federation(grid, config, settings(tmp_path / "next", clients=4, start=str(out)))
    assert not {"local", "deliver"} & set(asked_of(grid, max(grid.apps)))


# -- after the end ---------------------------------------------------------------------------------


def finish(root: Path, **more: dict[str, Any]) -> tuple[MemoryGrid, Path]:
    out, grid = root / "run", make_grid(root, **more)
    grid.offline = {3}
    run(grid, out)
    grid.offline = set()
    return grid, out


def meet(grid: MemoryGrid, out: Path, site: str = "west") -> tuple[Any, list[str]]:
    said: list[str] = []
    about = FederationSettings(3, deadlines=QUICK, do="welcome", start=str(out), site=site)
    return welcome(grid, about, said.append), said


def test_a_site_that_comes_after_the_end_measures_and_gets_the_model(tmp_path: Path) -> None:
    results = tmp_path / "west-results"
    grid, out = finish(tmp_path, west={"results": str(results)})
    found, said = meet(grid, out)
    parameters = load_file(out / "model.safetensors")
    (weight,) = [p for p in parameters.values() if p.ndim == 2]
    (bias,) = [p for p in parameters.values() if p.ndim == 1]
    data = load(grid.contexts[3])["test"]
    x, y = torch.from_numpy(data[0]), torch.from_numpy(data[1])
    right = ((x @ weight.T + bias).argmax(1) == y).double().mean()
    assert found["test"]["accuracy"] == pytest.approx(float(right))
    (folder,) = results.iterdir()
    assert {"card.md", "SHA256SUMS"} <= {path.name for path in folder.iterdir()}
    assert not (folder / "participant.html").exists(), "the pages are those of other sites"
    assert any(line.startswith("delivered to west, checksum") for line in said)
    assert set(asked_of(grid, 3)) == {"hello", "metrics", "deliver"}
    for node in range(3):
        assert asked_of(grid, node)[-1] == "hello", "others are asked for their names alone"


@pytest.mark.parametrize(
    ("site", "message"),
    [("east", "took part in the run"), ("nobody", "nobody is not connected; there are east, ")],
)
def test_who_cannot_be_welcomed(site: str, message: str, tmp_path: Path) -> None:
    grid, out = finish(tmp_path)
    with pytest.raises(StartError, match=message):
        meet(grid, out, site)


def test_a_site_with_other_data_is_not_welcomed(tmp_path: Path) -> None:
    grid, out = finish(tmp_path, west={"columns": 5})
    with pytest.raises(StartError, match=r"another model|had data whose input_shape"):
        meet(grid, out)
    assert OPERATIONS["deliver"] not in [
        m.metadata.message_type for m in grid.sent if m.metadata.dst_node_id == 3
    ]


def test_a_run_starts_from_a_finished_one_with_one_more_site(tmp_path: Path) -> None:
    grid, out = finish(tmp_path)
    history = run(grid, tmp_path / "next", clients=4, start=str(out), rounds=2)
    assert history.names == NAMES
    first = next(m for m in history.metrics if m.round == 0 and m.metric == "loss").values[:3]
    last = History.load(out).last("loss", "test")
    assert last is not None
    np.testing.assert_allclose(first, last.values, rtol=0, atol=0)


def test_a_run_does_not_start_from_one_that_has_no_model(tmp_path: Path) -> None:
    grid, out = finish(tmp_path)
    for name in ("summary.json", "model.safetensors"):
        (out / name).unlink()
    with pytest.raises(StartError, match="is not complete"):
        run(grid, tmp_path / "next", clients=4, start=str(out))
    with pytest.raises(StartError, match="is not complete"):
        meet(grid, out)


# -- out -------------------------------------------------------------------------------------------


def test_a_withdrawal_says_what_stays(tmp_path: Path) -> None:
    _, out = finish(tmp_path)
    done = CliRunner().invoke(cli, ["withdrawal", str(out), "north"])
    assert done.exit_code == 0, done.output
    text = (out / "withdrawal-north.md").read_text()
    assert "6 of 6 rounds (1 to 6)" in text and "30 train, 10 test" in text
    assert "**The model keeps what it learned from north**" in text
    assert "`clients.csv`" in text or "`flower.json`" in text
    wrong = CliRunner().invoke(cli, ["withdrawal", str(out), "west"])
    assert wrong.exit_code == 2 and "none of the clients" in wrong.output
    assert "holds no run" in CliRunner().invoke(cli, ["withdrawal", str(tmp_path), "x"]).output
