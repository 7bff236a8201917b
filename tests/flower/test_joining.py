"""Sites that come later: while a run is under way, and after its end."""

from __future__ import annotations

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

from equifed.flower.app import measure_model, run_federation
from equifed.flower.app_config import AppConfig, FederationSettings
from equifed.flower.client import make_client_app
from equifed.flower.handshake import StartError
from equifed.flower.wire import VERBS, Request
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


def connect_after(grid: MemoryGrid, rounds: int, out: Path, *nodes: int) -> None:
    """Let nodes come when so many rounds were played."""
    grid.offline |= set(nodes)

    def tamper(partition: int, request: Message, reply: Message) -> list[Message]:
        rows = out / "rounds.csv"
        if rows.exists() and len(rows.read_text().splitlines()) > rounds and grid.offline:
            grid.offline -= set(nodes)
        return [reply]

    grid.tamper = tamper


def run(grid: MemoryGrid, out: Path, **given: Any) -> History:
    return run_federation(grid, AppConfig.from_dict(CONFIG), settings(out, **given))


def asked_of(grid: MemoryGrid, node: int) -> list[str]:
    sent = [m for m in grid.sent if m.metadata.dst_node_id == node]
    return [Request.from_records(m.content).op for m in sent]


def test_nobody_joins_a_run_that_is_under_way(tmp_path: Path) -> None:
    out, grid = tmp_path / "run", make_grid(tmp_path)
    connect_after(grid, 2, out, 3)
    history = run(grid, out)
    assert history.names == NAMES[:3] and len(history.rounds) == 6
    assert asked_of(grid, 3) == ["hello"]
    assert [e["client"] for e in history.events if e["event"] == "left out"] == ["west"]


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


# -- after the end ---------------------------------------------------------------------------------


def finish(root: Path, **more: dict[str, Any]) -> tuple[MemoryGrid, Path]:
    out, grid = root / "run", make_grid(root, **more)
    grid.offline = {3}
    run(grid, out)
    grid.offline = set()
    return grid, out


def measure(grid: MemoryGrid, out: Path) -> Any:
    asked = FederationSettings(4, deadlines=QUICK, do="evaluate", start=str(out))
    return measure_model(grid, AppConfig.from_dict(CONFIG), asked)


def test_a_table_in_other_units_joins_nothing(tmp_path: Path) -> None:
    out, (grid, config) = tmp_path / "run", make_tables(tmp_path / "a", "months")
    grid.offline = {max(grid.apps)}
    run_federation(grid, config, settings(out, rounds=1))
    grid.offline = set()
    told = "West: column 'age' is in 'months', agreed is 'years'"
    with pytest.raises(StartError, match=told):
        measure(grid, out)
    with pytest.raises(StartError, match=told):
        run_federation(grid, config, settings(tmp_path / "next", clients=4, start=str(out)))
    assert not {"local", "deliver"} & set(asked_of(grid, max(grid.apps)))


def test_tables_go_on_with_the_preparation_that_there_is(tmp_path: Path) -> None:
    out, (grid, config) = tmp_path / "run", make_tables(tmp_path / "a", "years")
    grid.offline = {max(grid.apps)}
    run_federation(grid, config, settings(out, rounds=1))
    grid.offline = set()
    more = settings(tmp_path / "next", clients=4, start=str(out), rounds=1)
    assert run_federation(grid, config, more).names == tuple(sorted(SIZES))
    first, second = ((p / "preparation.json").read_text() for p in (out, tmp_path / "next"))
    assert first == second and "prepare" not in asked_of(grid, max(grid.apps))


def test_a_site_that_comes_after_the_end_measures_and_gets_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "west-results"
    grid, out = finish(tmp_path, west={"results": str(results)})
    found = measure(grid, out)
    parameters = load_file(out / "model.safetensors")
    (weight,) = [p for p in parameters.values() if p.ndim == 2]
    (bias,) = [p for p in parameters.values() if p.ndim == 1]
    data = load(grid.contexts[3])["test"]
    x, y = torch.from_numpy(data[0]), torch.from_numpy(data[1])
    right = ((x @ weight.T + bias).argmax(1) == y).double().mean()
    assert found["west"]["test"]["accuracy"] == pytest.approx(float(right))
    last = History.load(out).last("accuracy", "test")
    assert last is not None, "sites that took part measure what they measured at its end"
    assert [found[name]["test"]["accuracy"] for name in NAMES[:3]] == last.values.tolist()
    (folder,) = results.iterdir()
    assert {"card.md", "SHA256SUMS"} <= {path.name for path in folder.iterdir()}
    assert not (folder / "participant.html").exists(), "the pages are those of other sites"
    assert "delivered to west, checksum" in capsys.readouterr().out
    assert set(asked_of(grid, 3)) == {"hello", "metrics", "deliver"}


def test_a_site_with_other_data_gets_no_model(tmp_path: Path) -> None:
    grid, out = finish(tmp_path, west={"columns": 5})
    with pytest.raises(StartError, match=r"have different data: input_shape"):
        measure(grid, out)
    assert VERBS["deliver"].message not in [
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
        measure(grid, out)
