"""Sites that give files: one preparation by sums, the same run as on the table of all of them."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file
from tests.flower.grid import QUICK, MemoryGrid
from tests.hospitals import draw_hospitals
from typer.testing import CliRunner

from equifed.cli.flower import app as flower_cli
from equifed.data.federation import Federation
from equifed.data.preparation import Preparation
from equifed.data.site_table import SiteTable
from equifed.data.split import DataError
from equifed.engines.loop import LoopClients
from equifed.flower.app import measure_model, run_federation
from equifed.flower.app_config import AppConfig, FederationSettings
from equifed.flower.client import make_client_app
from equifed.flower.handshake import StartError
from equifed.flower.memory import Memory, digest, find_memories, write_private
from equifed.flower.wire import VERBS, Reply, Request
from equifed.models import architectures
from equifed.runs.load import load_predictor
from equifed.training.loop import train

pytestmark = pytest.mark.long

SIZES = {"North": 90, "South": 60, "East": 50, "West": 40}
TABLE: dict[str, Any] = {
    "rounds": 3,
    "data": {
        "target": "outcome",
        "client": "hospital",
        "dtype": "float64",
        "holdout": {"test": 0.2},
    },
    "model": {"name": "logistic", "l2": 0.01, "dtype": "float64"},
    "algorithm": {"name": "fedavg", "local": {"lr": 0.1, "steps": 3, "batch_size": 8}},
    "guard": "off",
}


def hospitals() -> pd.DataFrame:
    table = draw_hospitals(0, SIZES)
    table["admitted"] = table["admitted"].dt.strftime("%Y-%m-%d")
    return table


def read_back(table: pd.DataFrame, path: Path) -> Path:
    table.to_csv(path, index=False)
    return path


Change = Callable[[str, pd.DataFrame], pd.DataFrame]


def make_grid(
    folder: Path,
    table: dict[str, Any] | None = None,
    change: Change = lambda who, rows: rows,
    more: dict[str, dict[str, Any]] | None = None,
) -> MemoryGrid:
    """Return a grid with one node per hospital, each with its own CSV file and its own app."""
    folder.mkdir(exist_ok=True)
    whole, apps, configs = hospitals(), {}, {}
    for k, who in enumerate(sorted(SIZES)):
        own = whole[whole["hospital"] == who].drop(columns="hospital")
        path = read_back(change(who, own), folder / f"{who}.csv")
        config = AppConfig.from_dict(table or TABLE)
        apps[100 + 7 * k] = make_client_app(
            lambda context, config=config: config.load_site(context.node_config),
            config.build_task(),
            memory=folder / "memory",
        )
        configs[100 + 7 * k] = {"name": who, "data": str(path), **(more or {}).get(who, {})}
    return MemoryGrid(apps, configs)


def run(grid: MemoryGrid, out: Path | None = None, **settings: Any) -> Any:
    config = AppConfig.from_dict(settings.pop("table", TABLE))
    given = FederationSettings(
        settings.pop("clients", 4), deadlines=QUICK, out=str(out or ""), **settings
    )
    return run_federation(grid, config, given)


def pool(folder: Path, **options: Any) -> Federation:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = read_back(hospitals(), folder / "all.csv")
        pooled = Federation.from_table(
            path, "hospital", "outcome", test=0.2, dtype="float64", **options
        )
    return pooled.subset(sorted(SIZES))


@pytest.mark.parametrize("privacy", ["none", "secure"])
def test_sites_with_files_equal_the_table_of_all(privacy: Any, tmp_path: Path) -> None:
    pooled, config = pool(tmp_path), AppConfig.from_dict(TABLE)
    history = run(make_grid(tmp_path / "sites"), tmp_path / "run", privacy=privacy)
    fitted = json.loads((tmp_path / "run" / "preparation.json").read_text())
    assert pooled.preparation is not None
    assert Preparation.from_json(fitted) == pooled.preparation
    module = architectures.build("logistic", pooled.input_shape, 2)
    loop = LoopClients(pooled, module, "cross_entropy", l2=0.01, dtype=torch.float64)
    expected = train(
        config.build_algorithm(pooled.train.sizes.tolist()), loop, rounds=3, progress=False
    )
    for name, value in expected.parameters.items():  # type: ignore[union-attr]
        difference = (history.parameters[name] - value).abs().max().item()
        assert difference == 0.0 if privacy == "none" else difference < 1e-10
    assert history.names == tuple(sorted(SIZES))


def test_a_process_for_every_message_gives_the_same_model(tmp_path: Path) -> None:
    """As stock SuperNodes work: nothing is known but what lies in the memory folder."""
    expected = run(make_grid(tmp_path / "a"), privacy="secure")
    grid = make_grid(tmp_path / "b")
    for node in grid.apps:

        def answer(message: Message, context: Any) -> Message:
            config = AppConfig.from_dict(TABLE)
            app = make_client_app(
                lambda c: config.load_site(c.node_config),
                config.build_task(),
                memory=tmp_path / "b" / "memory",
            )
            return app(message, context)

        grid.apps[node] = answer  # type: ignore[assignment]
    found = run(grid, privacy="secure")
    for name, value in expected.parameters.items():
        assert (found.parameters[name] == value).all()


def test_a_clear_answer_tells_no_row_and_a_hidden_one_nothing(tmp_path: Path) -> None:
    """What a site sends for the fit is whole digits; under masks no two runs send the same."""
    grid = make_grid(tmp_path / "sites")
    run(grid, privacy="secure")
    told = [Reply.from_records(m.content) for m in grid.received]
    fits = [r for r in told if r.op == "prepare"]
    assert fits and all(set(r.arrays) <= {"masked"} for r in fits)
    words = np.concatenate([r.arrays["masked"] for r in fits if r.arrays])
    assert 0.49 < np.mean(words.view(np.uint8) >= 128) < 0.51  # as random bytes are
    named = [r.numbers["names"] for r in fits if not r.arrays]
    rows = hospitals()
    for column in ("ward", "sex"):
        counts = rows[column].value_counts()
        for names in named:
            assert all(counts[text] >= 5 for text in names[column])


def reorder(who: str, rows: pd.DataFrame) -> pd.DataFrame:
    columns = list(rows.columns)
    columns[1], columns[2] = columns[2], columns[1]
    return rows[columns] if who == "West" else rows


def words_for_age(who: str, rows: pd.DataFrame) -> pd.DataFrame:
    return rows.assign(age=["old"] * len(rows)) if who == "West" else rows


def drop_age(who: str, rows: pd.DataFrame) -> pd.DataFrame:
    return rows.drop(columns="admitted") if who == "West" else rows


def other_classes(who: str, rows: pd.DataFrame) -> pd.DataFrame:
    return rows.assign(outcome=rows["outcome"] == "home") if who == "West" else rows


def whole_numbers(who: str, rows: pd.DataFrame) -> pd.DataFrame:
    return rows.assign(outcome=(rows["outcome"] == "home") * 1) if who == "West" else rows


def test_other_names_of_classes_are_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(make_grid(tmp_path / "sites", change=other_classes))
    told = capsys.readouterr().out
    assert "WARNING: West: no other site has its labels False, True; does it call" in told
    table = {**TABLE, "data": {**TABLE["data"], "class_names": ["home", "died"]}}
    with pytest.raises(StartError, match="West has the label 'False', which is none of the agreed"):
        run(make_grid(tmp_path / "sites", table, other_classes), table=table)
    run(make_grid(tmp_path / "sites", table), tmp_path / "run", table=table)
    fitted = json.loads((tmp_path / "run" / "preparation.json").read_text())
    assert fitted["target"]["classes"] == ["home", "died"]


def test_whole_numbers_that_may_be_values_are_asked_about(tmp_path: Path) -> None:
    """Not more of them leave a site than the question needs."""

    def stay(who: str, rows: pd.DataFrame) -> pd.DataFrame:
        return rows.assign(outcome=np.arange(len(rows)) * 3)

    grid = make_grid(tmp_path / "sites", change=stay)
    with pytest.raises(StartError, match=r"values or classes\? Set task='regression'"):
        run(grid)
    told = [Reply.from_records(m.content).numbers["table"]["target"] for m in grid.received]
    assert max(len(t["labels"]) for t in told) == 21
    table = {**TABLE, "data": {**TABLE["data"], "task": "regression"}}
    grid = make_grid(tmp_path / "again", table, stay)
    run(grid, table=table)
    told = [Reply.from_records(m.content).numbers.get("table") for m in grid.received]
    assert not any(t["target"]["labels"] for t in told if t)


WRONG: dict[str, tuple[Change, str]] = {
    "order": (reorder, r"West: column 2 is 'creatinine', East: 'age'\. Bring both files"),
    "missing column": (drop_age, r"East has the column 'admitted', West has not"),
    "text for numbers": (words_for_age, r"West: column 'age' holds texts, East: numbers"),
    "whole numbers for text": (
        whole_numbers,
        r"'outcome' holds numbers at client 'West' and text at client 'East'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_site_whose_table_differs_is_named(case: str, tmp_path: Path) -> None:
    change, message = WRONG[case]
    with pytest.raises(StartError, match=message):
        run(make_grid(tmp_path / "sites", change=change))


def test_columns_that_are_listed_are_matched_by_name(tmp_path: Path) -> None:
    features = ["age", "creatinine", "ward"]
    table = {**TABLE, "data": {**TABLE["data"], "features": features}}
    plain = run(make_grid(tmp_path / "a", table), tmp_path / "one", table=table)
    other = run(make_grid(tmp_path / "b", table, reorder), tmp_path / "two", table=table)
    told = [json.loads((tmp_path / w / "preparation.json").read_text()) for w in ("one", "two")]
    assert told[0] == told[1] and [c["name"] for c in told[0]["columns"]] == features
    for name, value in plain.parameters.items():
        assert (other.parameters[name] == value).all()


def test_a_site_renames_its_columns_and_states_its_units(tmp_path: Path) -> None:
    def rename(who: str, rows: pd.DataFrame) -> pd.DataFrame:
        return rows.rename(columns={"age": "Alter"}) if who == "West" else rows

    site = tmp_path / "site.toml"
    site.write_text('[columns]\nage = "Alter"\n[units]\nplatelets = "per µl"\n', encoding="utf-8")
    table = {**TABLE, "data": {**TABLE["data"], "units": {"platelets": "per µl"}}}
    more = {"West": {"site": str(site)}}
    run(make_grid(tmp_path / "sites", table, rename, more), tmp_path / "run", table=table)
    fitted = Preparation.from_json(json.loads((tmp_path / "run/preparation.json").read_text()))
    assert fitted == pool(tmp_path).preparation
    site.write_text('[columns]\nage = "Alter"\n[units]\nplatelets = "10^9/l"\n')
    message = r"West: column 'platelets' is in '10\^9/l', agreed is 'per µl'; convert it there"
    with pytest.raises(StartError, match=message):
        run(make_grid(tmp_path / "sites", table, rename, more), table=table)


def test_a_site_with_other_settings_of_the_app_is_named(tmp_path: Path) -> None:
    other = {**TABLE, "data": {**TABLE["data"], "prepare": {"min_count": 3}}}
    grid, strange = make_grid(tmp_path / "a"), make_grid(tmp_path / "b", other)
    last = max(grid.apps)
    grid.apps[last] = strange.apps[last]
    with pytest.raises(StartError, match=r"West: refused: .*data\.prepare\.min_count is 5 there"):
        run(grid)


def test_other_units_are_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def scale(who: str, rows: pd.DataFrame) -> pd.DataFrame:
        return rows.assign(platelets=rows["platelets"] / 1000) if who == "East" else rows

    run(make_grid(tmp_path / "sites", change=scale))
    told = capsys.readouterr().out
    found = re.search(r"WARNING: East: its column 'platelets' has a mean that lies (\S+) dev", told)
    request = AppConfig.from_dict(TABLE).table
    values = {}
    for who in SIZES:
        site = SiteTable.read(tmp_path / "sites" / f"{who}.csv", who, request)
        cells = site.take(["platelets"], "train")["platelets"]
        values[who] = np.array([float(v) for v in cells if v is not None])
    east = values.pop("East")
    others = np.concatenate(list(values.values()))
    expected = abs(east.mean() - others.mean()) / others.std()
    assert found is not None and float(found[1]) == pytest.approx(expected, abs=0.051)
    assert expected > 3


def test_a_run_goes_on_with_its_preparation(tmp_path: Path) -> None:
    grid = make_grid(tmp_path / "sites")
    whole = run(grid, tmp_path / "whole", rounds=4)
    run(make_grid(tmp_path / "sites"), tmp_path / "run", rounds=2)
    before = (tmp_path / "run" / "preparation.json").read_bytes()
    again = make_grid(tmp_path / "sites")
    later = run(again, tmp_path / "run", rounds=4, resume=True)
    ops = {Request.from_records(m.content).op for m in again.sent}
    assert "prepare" not in ops
    assert (tmp_path / "run" / "preparation.json").read_bytes() == before
    for name, value in whole.parameters.items():
        assert (later.parameters[name] == value).all()


def test_bad_answers_of_a_fit_name_their_sender(tmp_path: Path) -> None:
    def tamper_with(change: Callable[[Reply], Reply]) -> Any:
        def tamper(partition: int, request: Message, reply: Message) -> list[Message]:
            told = Reply.from_records(reply.content)
            if told.op == "prepare" and request.metadata.dst_node_id == 107:
                told = change(told)
            return [Message(told.to_records(), reply_to=request)]

        return tamper

    def arrays(value: Any) -> Callable[[Reply], Reply]:
        def change(told: Reply) -> Reply:
            if "vector" not in told.arrays:
                return told
            vector = value(told.arrays["vector"])
            return Reply(told.op, told.run, told.tag, {}, {"vector": vector})

        return change

    def names(told: Reply) -> Reply:
        return told if told.arrays else Reply(told.op, told.run, told.tag, {"names": {"x": 1}})

    for change, message in (
        (arrays(lambda v: v + 0.5), "values that are not whole numbers"),
        (arrays(lambda v: v * np.nan), "values that are not whole numbers"),
        (arrays(lambda v: v + 1e9), "values that are not whole numbers"),
        (arrays(lambda v: v[:-1]), "expected float64 of shape"),
        (names, "categories of columns that were not requested"),
    ):
        grid = make_grid(tmp_path / "sites")
        grid.tamper = tamper_with(change)
        with pytest.raises(StartError, match=f"North: .*{message}"):
            run(grid)


def test_a_site_answers_about_what_was_agreed_alone(tmp_path: Path) -> None:
    grid = make_grid(tmp_path / "sites")
    run(grid)
    asked = next(
        Request.from_records(m.content).args["asked"]
        for m in grid.sent
        if m.metadata.message_type == VERBS["prepare"].message
    )
    for change in ({"columns": ["outcome"]}, {"prepare": {**asked["prepare"], "min_count": 1}}):
        request = Request("prepare", "r", "t", 0, {"asked": {**asked, **change}})
        (sent,) = grid.push_messages([Message(request.to_records(), 107, VERBS["prepare"].message)])
        (reply,) = grid.pull_messages([sent])
        told = Reply.from_records(reply.content)
        assert told.error == "data" and not told.arrays and not told.numbers.get("names")


def test_sites_get_the_model_and_can_predict_with_it(tmp_path: Path) -> None:
    more = {"East": {"results": str(tmp_path / "east")}}
    grid = make_grid(tmp_path / "sites", more=more)
    history = run(grid, tmp_path / "run", deliver=True)
    assert history.parameters is not None
    identity = json.loads((tmp_path / "run" / "flower.json").read_text())["run"]
    folder = tmp_path / "east" / identity
    sums = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=folder, capture_output=True)
    assert sums.returncode == 0, sums.stderr
    given = load_predictor(folder, trust=True)
    pooled, rows = pool(tmp_path), hospitals().head(20)
    assert given.preparation == pooled.preparation and given.classes == ("died", "home")
    inputs = torch.as_tensor(given.preparation.apply(rows))
    weight, bias = sorted(history.parameters.values(), key=lambda p: -p.ndim)
    scores = inputs @ weight.T + bias
    expected = [given.classes[k] for k in scores.argmax(1).tolist()]
    assert list(given.predict(rows)) == expected
    card, page = ((folder / name).read_text() for name in ("card.md", "participant.html"))
    assert "# Model card" in card and "West" not in card.split("## Limits")[0].split("## Data")[1]
    assert "East" in page
    assert (
        tmp_path / "sites" / "memory" / "results" / "West" / identity / "model.safetensors"
    ).exists()


OWN_TABLES = {
    "joint": {**TABLE, "model": {**TABLE["model"], "own": "bias"}},
    "profile": {
        **TABLE,
        "model": {**TABLE["model"], "own": "bias", "own_l2": 0.01},
        "algorithm": {"name": "scaff-pd", "objective": "average"},
    },
}


@pytest.mark.parametrize("steps", OWN_TABLES)
def test_sites_get_the_shared_part_with_their_own(steps: str, tmp_path: Path) -> None:
    """Those who trained have theirs; whoever measures the model after the end fits its own."""
    table, late = OWN_TABLES[steps], max(make_grid(tmp_path / "none").apps)
    folders = {who: tmp_path / who for who in ("East", "West")}
    more = {who: {"results": str(folder)} for who, folder in folders.items()}
    grid = make_grid(tmp_path / "sites", table, more=more)
    grid.offline = {late}
    history = run(grid, tmp_path / "run", table=table, clients=3, deliver=True)
    grid.offline = set()
    (trained,) = folders["East"].iterdir()
    start = str(tmp_path / "run")
    asked = FederationSettings(4, deadlines=QUICK, do="evaluate", start=start)
    found = measure_model(grid, AppConfig.from_dict(table), asked)
    shared, pooled = history.parameters["1.weight"], pool(tmp_path)
    for delivered in (path for folder in folders.values() for path in folder.iterdir()):
        who = delivered.parent.name
        weights = load_file(delivered / "model.safetensors")
        torch.testing.assert_close(weights["1.weight"], shared, rtol=0, atol=0)
        given = load_predictor(delivered, trust=True)
        rows = hospitals().query("hospital == @who")
        assert given.only == who and len(given.predict(rows)) == len(rows)
        with pytest.raises(DataError, match=f"This is the model of '{who}'"):
            given.predict(hospitals())
        if delivered == trained and steps == "joint":
            identity = json.loads((tmp_path / "run" / "flower.json").read_text())["run"]
            kept = Memory(tmp_path / "sites" / "memory", identity, who).own_before(1 << 60)
            np.testing.assert_array_equal(weights["1.bias"].numpy(), kept)
            continue
        rows = hospitals().query("hospital == @who").drop(columns="hospital")
        inputs, targets = split_of(given.preparation, rows, pooled, who)
        chance = torch.softmax(inputs @ shared.T + weights["1.bias"], dim=1)
        slope = (chance - torch.nn.functional.one_hot(targets, 2)).mean(0)
        held = 0.01 if steps == "profile" else 1 / len(targets)  # own_l2 = "1/n"
        torch.testing.assert_close(slope, -held * weights["1.bias"], rtol=0, atol=1e-10)
        right = (chance.argmax(1) == targets).double().mean()
        assert found[who]["train"]["accuracy"] == pytest.approx(float(right))


def split_of(
    preparation: Any, rows: pd.DataFrame, pooled: Federation, who: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a site's training rows as a preparation makes them, and their classes."""
    where = pooled.names.index(who)
    assert pooled.preparation is not None
    known = pooled.preparation.apply(rows, who)
    mine = {row.tobytes() for row in pooled.train.client(where)[0]}
    kept = [row.tobytes() in mine for row in known]
    made = preparation.apply(rows, who)[kept]
    truth = preparation.encode_target(list(rows["outcome"][kept]))
    return torch.as_tensor(made), torch.as_tensor(truth)


def test_a_delivery_that_was_changed_is_refused(tmp_path: Path) -> None:
    grid = make_grid(tmp_path / "sites")
    run(grid, deliver=True)
    delivery = VERBS["deliver"].message
    first = next(m for m in grid.sent if m.metadata.message_type == delivery)
    honest, node = Request.from_records(first.content), first.metadata.dst_node_id
    x = honest.arrays["x"]
    for args, message in (
        ({"sha256": digest(x + 1), "files": {}}, "changed on its way"),
        ({"sha256": digest(x), "files": {"../x": ""}}, "other files are delivered"),
        ({"sha256": digest(x), "files": {"card.md": 3}}, "is not text, or too long"),
    ):
        request = replace(honest, args={**honest.args, **args})
        (sent,) = grid.push_messages([Message(request.to_records(), node, delivery)])
        told = Reply.from_records(next(iter(grid.pull_messages([sent]))).content)
        assert told.error == "request" and message in told.text


def test_old_memories_are_found_and_others_left_alone(tmp_path: Path) -> None:
    grid = make_grid(tmp_path / "sites")
    run(grid, privacy="secure")
    root = tmp_path / "sites" / "memory"
    (root / "results").mkdir()
    (root / "audit.jsonl").write_text("")
    (one,) = find_memories(root)
    assert one.days < 1 and one.bytes > 0
    for path in (one.folder, *one.folder.rglob("*")):
        os.utime(path, (0, 0))
    (old,) = find_memories(root)
    assert old.days > 10_000
    told = CliRunner().invoke(flower_cli, ["clean", str(root)])
    assert told.exit_code == 0 and "would delete" in told.output and old.folder.exists()
    told = CliRunner().invoke(flower_cli, ["clean", str(root), "--yes"])
    assert "deleted" in told.output and not old.folder.exists()
    assert sorted(path.name for path in root.iterdir()) == ["audit.jsonl", "plans", "results"]


def headless(who: str, rows: pd.DataFrame) -> pd.DataFrame:
    return rows.rename(columns={c: str(v) for c, v in rows.iloc[0].items()})


def unnamed(who: str, rows: pd.DataFrame) -> pd.DataFrame:
    rows = rows.assign(when=range(len(rows)))
    return rows.drop(columns="age") if who == "South" else rows


def strange(who: str, rows: pd.DataFrame) -> pd.DataFrame:
    """Give a category to the rows of the test split alone."""
    ward = [*rows["ward"][:-12], *["secret"] * 12]
    return rows.assign(ward=ward if who == "South" else rows["ward"], when=range(len(rows)))


AGREED = {
    **TABLE["data"],
    "features": ["age", "ward"],
    "prepare": {"unknown": "error"},
    "time": "when",
}
UNUSABLE: dict[Change, str] = {
    headless: "data: its .* column.*line of column names.*Repair the data",
    unnamed: r"South: data: its table has no column 'age'; \[columns\] in site.toml says",
    strange: "South: data: its column 'ward' has a category that no training row has",
}


@pytest.mark.parametrize("change", UNUSABLE, ids=lambda change: change.__name__)
def test_an_unusable_table_is_told_to_the_operator_without_its_values(
    change: Change, tmp_path: Path
) -> None:
    grid = make_grid(tmp_path / "sites", {**TABLE, "data": AGREED}, change)
    with pytest.raises(StartError, match=UNUSABLE[change]) as caught:
        run(grid, table={**TABLE, "data": AGREED})
    values = hospitals().astype(str)
    assert "secret" not in str(caught.value)
    assert not any(v in str(caught.value) for v in values["admitted"])


def test_a_site_whose_disk_is_full_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes, sync: bool = False) -> None:
        if "sites" not in path.parts:
            return write_private(path, content, sync)
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("equifed.flower.memory.write_private", full)
    told = "no space is left on the disk in hello.*Make room on that site's disk"
    with pytest.raises(StartError, match=told) as caught:
        run(make_grid(tmp_path / "sites"))
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize("privacy", ["none", "secure"])
@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_a_target_in_another_unit_is_the_same_model(
    factor: float, privacy: Any, tmp_path: Path
) -> None:
    """Strengths and automatic steps know nothing of the unit, at sites as in a simulation."""
    fair = {"name": "chi-square", "rho": 0.3, "base": {"name": "cvar", "tail": 0.75}}
    table = {
        "rounds": 4,
        "data": {**TABLE["data"], "target": "creatinine"},
        "model": {"name": "linear", "l2": 0.01, "dtype": "float64"},
        "algorithm": {"name": "scaff-pd", "objective": fair, "local": {"lr": "auto", "steps": 3}},
        "guard": "off",
    }

    def scale(who: str, rows: pd.DataFrame) -> pd.DataFrame:
        return rows.assign(creatinine=factor * rows["creatinine"])

    plain = run(make_grid(tmp_path / "a", table), tmp_path / "one", table=table, privacy=privacy)
    grid = make_grid(tmp_path / "b", table, scale)
    other = run(grid, tmp_path / "two", table=table, privacy=privacy)
    told = [json.loads((tmp_path / w / "preparation.json").read_text()) for w in ("one", "two")]
    assert told[1]["target"]["scale"] == pytest.approx(factor * told[0]["target"]["scale"])
    for name, value in plain.parameters.items():
        assert float((other.parameters[name] - value).abs().max()) < 1e-9 < float(value.norm())
    assert other.last("mse", "test").values == pytest.approx(
        factor**2 * plain.last("mse", "test").values, rel=1e-7
    )
