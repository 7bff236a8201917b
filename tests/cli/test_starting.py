"""From a table to a run in two commands; nothing is guessed without being said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tests.cli.test_cli import equifed
from tests.hospitals import SIZES, draw_hospitals, write_hospitals

from equifed.data import Federation, Preparation
from equifed.runs import run as runs
from equifed.runs.build import load_data
from equifed.runs.config import RunConfig
from equifed.runs.init import write_first_config
from equifed.runs.load import read_preparation
from equifed.training.files import RunFolderError, StoredRun
from equifed.training.history import History

pytestmark = pytest.mark.long


def test_a_hospital_table_becomes_a_model_that_serves_every_hospital(tmp_path: Path) -> None:
    write_hospitals(tmp_path / "hospitals.csv")
    config, out = tmp_path / "run.toml", tmp_path / "out"
    begun = equifed("init", tmp_path / "hospitals.csv", "--out", config)
    assert begun.exit_code == 0, begun.stderr
    done = equifed("run", config, "--out", out)
    assert done.exit_code == 0, done.stderr
    history, federation = History.load(out), load_data(RunConfig.read(config).data)
    accuracy = history.per_client("accuracy", "test")
    assert set(accuracy) == set(SIZES)
    counts = federation.test.class_counts(2)
    for name, row in zip(federation.names, counts, strict=True):
        assert accuracy[name] > row.max() / row.sum(), name
    assert read_preparation(StoredRun(out)) == federation.preparation
    page = equifed("report", out, "--page", tmp_path / "report.html")
    assert page.exit_code == 0
    assert "scaled to mean 0 and deviation 1" in (tmp_path / "report.html").read_text()


def test_init_says_what_it_left_out_and_why(tmp_path: Path) -> None:
    path, out = write_hospitals(tmp_path / "h.csv"), tmp_path / "deep" / "run.toml"
    told = json.loads(equifed("init", path, "--out", out, "--json").stdout)
    assert (told["client"], told["target"], told["task"]) == (
        "hospital",
        "outcome",
        "classification",
    )
    assert set(told["left_out"]) == {"record", "unit", "admitted"}
    text = out.read_text()
    for word in ("identifier", "constant", "dates", '# time = "admitted"', "401 gaps"):
        assert word in text or word == "401 gaps"
    data = RunConfig.read(out).data
    assert Path(data["path"]).samefile(path)
    assert data["holdout"]["test"] > 0 and data["prepare"]["scale"] == "standard"
    again = equifed("init", path, "--out", out)
    assert (again.exit_code, "--overwrite" in again.stderr) == (2, True)


def test_a_long_table_is_read_once_and_tried_on_some_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from equifed.cli import run as command
    from equifed.data import files

    sizes: list[int] = []
    read, build = files.read_csv, Federation.from_table

    def count(*given: Any, **settings: Any) -> Federation:
        sizes.append(given[0].rows)
        return build(*given, **settings)

    calls: list[Path] = []

    def note(path: Path) -> Any:
        calls.append(path)
        return read(path)

    monkeypatch.setattr(files, "read_csv", note)
    monkeypatch.setattr(Federation, "from_table", count)
    monkeypatch.setattr(command, "TRIED_ROWS", 20)
    path = table(tmp_path, y=["no", "yes"] * 30)
    rows = len(pd.read_csv(path))
    console = command.terminal.open_console(quiet=True)
    columns, guess = command.guess_table(path, console, "bank", "y", [], [])
    (tmp_path / "run.toml").write_text(write_first_config(guess, path, tmp_path / "run.toml"))
    command._try(tmp_path / "run.toml", columns, guess, lambda _: None)
    assert calls == [path]
    assert len(sizes) == 1 and sizes[0] < rows and sizes[0] <= 20 + 3


def test_a_terminal_shows_how_far_init_is(tmp_path: Path) -> None:
    import io

    from rich.console import Console

    from equifed.cli.run import look_at_table

    screen = io.StringIO()
    look_at_table(table(tmp_path), Console(file=screen, force_terminal=True))
    assert "reading" in screen.getvalue() and "looking at columns" in screen.getvalue()


def test_codes_are_named(tmp_path: Path) -> None:
    path = table(tmp_path, stage=[1, 2, 3] * 20, ward=["u", "v"] * 30, y=["no", "yes"] * 30)
    out = tmp_path / "r.toml"
    equifed("init", path, "--out", out)
    assert RunConfig.read(out).data["prepare"]["categorical"] == "auto"
    assert "if they are codes, list the column in categorical" in out.read_text()
    equifed("init", path, "--out", out, "--overwrite", "--categorical", "stage")
    named = RunConfig.read(out).data
    assert named["prepare"]["categorical"] == ["stage"]
    names = load_data(named).preparation.feature_names
    assert names == ("x", "stage=1", "stage=2", "stage=3", "ward=u", "ward=v")
    wrong = equifed("init", path, "--out", out, "--overwrite", "--categorical", "none", "--quiet")
    assert wrong.exit_code == 2 and "no column 'none'; it has" in wrong.stderr


def test_columns_are_forced_either_way(tmp_path: Path) -> None:
    words = {"a": ["1", "2", "3 or more"] * 20, "b": ["1", "2", "3 or more"] * 20}
    path, out = (
        table(tmp_path, **words, c=[1, 2, 3] * 20, y=["no", "yes"] * 30),
        tmp_path / "r.toml",
    )
    assert equifed("init", path, "--out", out).exit_code == 0
    assert RunConfig.read(out).data["prepare"]["categorical"] == ["a", "b"]
    assert "taken as a category; list it in numeric" in out.read_text()
    options = ("--categorical", "a, c", "--numeric", "b", "--overwrite", "--target", "y")
    assert equifed("init", path, "--out", out, *options).exit_code == 0
    names = load_data(RunConfig.read(out).data).preparation.feature_names
    assert [n for n in names if n[0] == "b"] == ["b", "b missing"]
    assert [n for n in names if n[0] in "ac"] == [
        "a=1", "a=2", "a=3 or more", "c=1", "c=2", "c=3",
    ]  # fmt: skip


def table(tmp_path: Path, **more: list[Any]) -> Path:
    draw = np.random.default_rng(0)
    frame = {"bank": ["a", "b", "c"] * 20, "x": draw.standard_normal(60), **more}
    pd.DataFrame(frame).to_csv(tmp_path / "t.csv", index=False)
    return tmp_path / "t.csv"


ODD = {
    "patients with several rows": (
        {"patient": [k // 3 for k in range(60)], "y": [0, 1] * 30},
        {"keep_together": "patient", "features": ["x"], "task": "classification"},
    ),
    "names that TOML must quote": (
        {'say "hi"\\ #': [1.5, 2.5] * 30, "label": ["u", "v"] * 30},
        {"features": ["x", 'say "hi"\\ #'], "target": "label"},
    ),
    "whole numbers with gaps": (
        {"price": [k * 7 for k in range(60)]},
        {"target": "price", "task": "regression"},
    ),
    "numbers and text": (
        {"level": ["1", "<5"] * 30, "y": ["u", "v"] * 30},
        {"features": ["x", "level"], "target": "y"},
    ),
    "many numbers and text": (
        {"level": [*range(40, 98), "<5", "none seen"], "y": ["u", "v"] * 30},
        {"features": ["x"], "target": "y"},
    ),
    "rare texts": (
        {"note": [f"n{k // 4}" for k in range(60)], "y": ["u", "v"] * 30},
        {"features": ["x"], "target": "y"},
    ),
    "row numbers": (
        {"row_id": list(range(60)), "k": [7 * k % 61 for k in range(60)], "y": ["u", "v"] * 30},
        {"features": ["x"], "target": "y"},
    ),
    "amounts that all differ": (
        {"income": [1000 + 13 * k for k in range(60)], "y": ["u", "v"] * 30},
        {"features": ["x", "income"], "target": "y"},
    ),
}


@pytest.mark.parametrize(("more", "expected"), ODD.values(), ids=ODD)
def test_odd_columns_end_in_a_configuration_that_loads(
    tmp_path: Path, more: dict[str, list[Any]], expected: dict[str, Any]
) -> None:
    out = tmp_path / "run.toml"
    result = equifed("init", table(tmp_path, **more), "--out", out)
    assert result.exit_code == 0, result.stderr
    config = RunConfig.read(out)
    assert {key: config.data[key] for key in expected} == expected
    federation = load_data(config.data)
    assert federation.names == ("a", "b", "c") and federation.test is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--client", "nobody"], "no column 'nobody'; it has bank, x"),
        (["--target", "nothing"], "no column 'nothing'"),
        (["--target", "same"], "'same' has fewer than two different values"),
    ],
)
def test_columns_that_are_not_there(tmp_path: Path, options: list[str], message: str) -> None:
    result = equifed(
        "init", table(tmp_path, y=[0, 1] * 30, same=["z"] * 60), "--out", tmp_path / "r", *options
    )
    assert result.exit_code == 2 and message in result.stderr
    assert not (tmp_path / "r").exists()


def test_a_table_without_anything_like_a_client(tmp_path: Path) -> None:
    pd.DataFrame({"u": [0.5, 1.5], "v": [2.5, 3.5]}).to_csv(tmp_path / "t.csv", index=False)
    result = equifed("init", tmp_path / "t.csv", "--out", tmp_path / "r.toml")
    assert result.exit_code == 2 and "--client COLUMN, one of u, v" in result.stderr


# -- what there is, and what it takes ----------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> Path:
    equifed("init", write_hospitals(tmp_path / "h.csv"), "--out", tmp_path / "run.toml")
    return tmp_path / "run.toml"


def test_gaps_scales_and_shares_are_shown_per_client(config: Path) -> None:
    plain = equifed("data", "show", config).stdout
    for word in ("missing values in %", "share of each class", "mean and deviation", "Hill"):
        assert word in plain
    told = json.loads(equifed("data", "show", config, "--json").stdout)
    frame = pd.read_csv(config.parent / "h.csv")
    for hospital, mine in frame.groupby("hospital"):
        for column in ("age", "lactate"):
            found = told["columns"][column][hospital]
            assert found["missing"] == mine[column].isna().sum()
            if found["missing"] < len(mine):
                assert found["mean"] == pytest.approx(mine[column].mean())
                assert found["deviation"] == pytest.approx(mine[column].std(ddof=0))
        assert sum(told["shares"][hospital].values()) == pytest.approx(1)
    assert Preparation.from_json(told["preparation"]).feature_names[0] == "age"


def test_a_dry_run_tells_the_traffic_of_the_run_and_writes_nothing(config: Path) -> None:
    before = sorted(config.parent.iterdir())
    short = ["--set", "rounds=7"]
    told = json.loads(equifed("run", config, *short, "--dry-run", "--json").stdout)
    assert sorted(config.parent.iterdir()) == before
    equifed("run", config, *short, "--out", config.parent / "out")
    history = History.load(config.parent / "out")
    for key in ("exchanges", "bytes_up", "bytes_down"):
        assert told[key] == sum(getattr(r, key) for r in history.rounds)
    assert told["parameters"] == sum(p.numel() for p in history.parameters.values())
    assert told["rounds"] == 7 and told["minutes"] > 0
    long = ["--set", "rounds=700000", "--set", "evaluate.every=700000"]
    more = json.loads(equifed("run", config, *long, "--dry-run", "--json").stdout)
    assert more["minutes"] > 100 * told["minutes"]  # a round takes some time, whatever it is
    plain = equifed("run", config, *short, "--dry-run").stdout
    assert "measured in 3 round(s)" in plain and "memory" in plain


def test_the_preparation_of_a_run_is_kept_and_no_other_taken(config: Path) -> None:
    out = config.parent / "out"
    runs.run(RunConfig.read(config, ["rounds=1"]), out)
    kept = read_preparation(StoredRun(out))
    assert kept == load_data(RunConfig.read(out / "config.toml").data).preparation
    path = out / "preparation.json"
    text = path.read_text()
    path.write_text(text.replace('"scale": "standard"', '"scale": "robust"'))
    with pytest.raises(RunFolderError, match="is not the preparation that the run"):
        read_preparation(StoredRun(out))
    for damage in (text[:100], "[]", '{"format": 1}'):
        path.write_text(damage)
        with pytest.raises(RunFolderError, match=r"preparation.json is (damaged|missing)"):
            read_preparation(StoredRun(out))
    path.unlink()
    with pytest.raises(RunFolderError, match=r"preparation.json is (damaged|missing)"):
        read_preparation(StoredRun(out))
    runs.run(RunConfig.from_dict(ARRAYS), out, overwrite=True)
    assert read_preparation(StoredRun(out)) is None and not path.exists()


ARRAYS = {
    "rounds": 1,
    "data": {"name": "synthetic-regression", "samples": 5},
    "model": {"name": "linear"},
    "algorithm": {"name": "fedavg", "local": {"lr": 0.01, "steps": 1}},
}


def test_python_and_toml_prepare_alike(config: Path) -> None:
    data = RunConfig.read(config).data
    federation = Federation.from_table(
        draw_hospitals(), "hospital", "outcome", features=data["features"], test=0.25, name="h"
    )
    assert load_data(data).checksum() == federation.checksum()
