"""Comparisons and runs from Python tell as much as those from configuration files."""

from __future__ import annotations

import json

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

import equifed as ef
from equifed.contract.local import LocalSGD
from equifed.report import as_json, as_methods, build, read_methods
from equifed.runs.config import RunConfig
from equifed.training.files import RunFolderError
from equifed.training.show import COLUMNS
from equifed.training.trackers import ProgressBar, follow_by_default

pytestmark = pytest.mark.long

LOCAL = LocalSGD(steps=2, lr=0.02, batch_size=4)
METHODS = {"plain": ef.FedAvg(LOCAL), "fair": ef.ScaffPD(ef.objectives.ChiSquare(0.1), LOCAL)}


@pytest.fixture(scope="module")
def data():
    return ef.load("synthetic-regression", samples=8).split(test=0.25)


@pytest.fixture(scope="module")
def found(data):
    return ef.compare(METHODS, data, "linear", rounds=3, seeds=2, metrics=["mae"])


def train(data, seed=0, **more):
    clients = ef.simulate(data, "linear")
    return ef.train(METHODS["plain"], clients, rounds=3, seed=seed, evaluate=["test"], **more)


def test_a_comparison_is_what_train_and_the_report_make_of_it(data, found):
    direct = [train(data, seed) for seed in (0, 1)]
    for ours, theirs in zip(found.histories["plain"], direct, strict=True):
        assert ours.per_client("mse", "test") == theirs.per_client("mse", "test")
    expected = build(as_methods(found.histories)).told
    for ours, theirs in zip(found.measured.told, expected, strict=True):
        assert ours.estimates["worst"].values == theirs.estimates["worst"].values
        assert ours.estimates["worst"].difference == theirs.estimates["worst"].difference
    assert found.measured.told[1].estimates["worst"].difference.pairs == 2


def test_the_frame_is_tidy_and_has_every_number_once(found):
    frame = found.to_frame()
    assert tuple(frame.columns) == COLUMNS
    assert not frame.duplicated(["method", "seed", "client", "split", "metric", "round"]).any()
    history = found.histories["fair"][1]
    last = frame[(frame.method == "fair") & (frame.seed == 1) & (frame["round"] == 3)]
    for metric in ("loss", "mse", "mae"):
        mine = last[(last.metric == metric) & (last.split == "test")]
        assert dict(zip(mine.client, mine.value, strict=True)) == history.per_client(metric, "test")
    assert tuple(history.to_frame().columns) == COLUMNS
    assert set(history.to_frame().method) == {"ScaffPD"}


def test_text_and_html_show_the_names_of_methods(data):
    names = {"50%_a&b": "fedavg", r"back\slash": {"name": "fedavg", "local": {"lr": 0.01}}}
    found = ef.compare(names, data, "linear", rounds=1, seeds=1)
    assert "50%_a&b" in repr(found) and "50%_a&amp;b" in found._repr_html_()


def test_figures_show_the_recorded_numbers(found):
    mpl.use("Agg")
    worst, average, *_ = found.plot().get_lines()
    series = [h.series("mse", "test")[1] for h in found.histories["plain"]]
    np.testing.assert_allclose(worst.get_ydata(), np.mean([s.max(axis=1) for s in series], axis=0))
    np.testing.assert_allclose(average.get_ydata(), np.mean([s.mean(1) for s in series], axis=0))
    history = found.histories["plain"][0]
    drawn = history.plot("mae", "test")
    rounds, _ = history.series("mae", "test")
    labels = [line.get_label() for line in drawn.get_lines()]
    if len(history.names) <= 10:
        assert labels == list(history.names)
    np.testing.assert_array_equal(drawn.get_lines()[0].get_xdata(), rounds)
    with pytest.raises(ValueError, match="nothing to draw"):
        ef.History(("a",)).plot()


def test_a_folder_of_a_comparison_is_read_back_as_the_command_reads_it(data, tmp_path):
    given = {"rounds": 2, "seeds": [3, 5], "out": tmp_path}
    found = ef.compare(METHODS, data, "linear", **given)
    back = build(read_methods([tmp_path]))
    assert [m.seeds for m in back.methods] == [(3, 5), (3, 5)]
    assert (
        as_json(back)["methods"][1]["measures"]
        == (as_json(found.measured)["methods"][1]["measures"])
    )


def test_finished_runs_are_not_run_again_and_other_settings_are_refused(data, tmp_path, capfd):
    given = {"rounds": 2, "out": tmp_path}
    first = ef.compare(METHODS, data, "linear", seeds=1, **given)
    marks = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("model.safetensors")}
    more = ef.compare(METHODS, data, "linear", seeds=2, **given)
    assert "2 of 4 runs are there already" in capfd.readouterr().err
    assert {p: p.stat().st_mtime_ns for p in marks} == marks
    again = ef.compare(METHODS, data, "linear", seeds=2, rounds=2)
    pd.testing.assert_frame_equal(more.to_frame(), again.to_frame())
    assert first.to_frame().equals(more.to_frame().query("seed == 0").reset_index(drop=True))
    with pytest.raises(RunFolderError, match=r"other settings \(rounds\).*overwrite=True"):
        ef.compare(METHODS, data, "linear", seeds=1, rounds=3, out=tmp_path)
    with pytest.raises(RunFolderError, match=r"other settings \(engine\)"):
        ef.compare(METHODS, data, "linear", seeds=1, l2=0.5, **given)
    ef.compare(METHODS, data, "linear", seeds=1, rounds=3, out=tmp_path, overwrite=True)


def test_a_method_may_have_an_own_part_of_its_own(tmp_path):
    parts = ef.load("heart-disease").subset(["Cleveland", "Hungary"])
    work = ef.ScaffPD(ef.objectives.Average())
    found = ef.compare(
        {"shared": work, "own": (work, {"own": "bias"})}, parts, "logistic", rounds=2, seeds=1,
        l2=0.01,
    )  # fmt: skip
    shared, own = found.histories["shared"][0], found.histories["own"][0]
    assert shared.own is None and own.own is not None and own.without_own is not None
    assert shared.alone is not None  # small and convex
    page = found.report(tmp_path / "r.html").read_text()
    assert "own: Own part: 1.bias, 2 numbers per client" in page and "Without own part" in page


def test_what_cannot_be_compared_is_refused(data):
    with pytest.raises(ValueError, match="nothing to compare"):
        ef.compare({}, data, "linear", rounds=1)
    with pytest.raises(ValueError, match="no method 'x'; choose from a"):
        ef.compare({"a": "fedavg"}, data, "linear", rounds=1, baseline="x")
    with pytest.raises(ValueError, match="each once"):
        ef.compare({"a": "fedavg"}, data, "linear", rounds=1, seeds=[1, 1])
    with pytest.raises(ValueError, match="did you mean 'fedavg'"):
        ef.compare({"a": "fedavgg"}, data, "linear", rounds=1, seeds=1)


def test_runs_side_by_side_give_the_same_numbers(data, found):
    both = ef.compare(METHODS, data, "linear", rounds=3, seeds=2, metrics=["mae"], jobs=2)
    assert both.to_frame().equals(found.to_frame())


# -- what a run remembers ------------------------------------------------------------------------


def test_a_run_says_what_it_was_made_of_and_a_folder_keeps_it(data, tmp_path):
    history = train(data, seed=7)
    told = history.provenance
    assert (told["seed"], told["algorithm"]["name"], told["loss"]) == (7, "FedAvg", "squared")
    assert told["algorithm"]["local"]["lr"] == LOCAL.lr
    assert told["data"]["sha256"] == data.checksum() and told["data"]["name"] == data.name
    assert "equifed" in told["versions"] and "Linear" in told["model"]
    back = ef.History.load(history.save(tmp_path / "run"))
    assert {k: back.provenance[k] for k in told} == json.loads(json.dumps(told))
    again = ef.History.load(back.save(tmp_path / "again"))
    assert again.provenance == back.provenance


def test_reports_group_runs_that_differ_in_the_seed_alone(data, tmp_path):
    runs = [train(data, seed) for seed in (0, 1)]
    other = train(data, 0, every=3)
    grouped = as_methods([*runs, other])
    assert sorted(m.seeds for m in grouped) == [(0,), (0, 1)]
    for i, history in enumerate([*runs, other]):
        history.save(tmp_path / f"run-{i}")
    saved = read_methods(tmp_path / f"run-{i}" for i in range(3))
    assert sorted(m.seeds for m in saved) == [(0,), (0, 1)]


CONFIG = {
    "rounds": 2,
    "seed": 4,
    "data": {"name": "synthetic-regression", "samples": 5},
    "model": {"name": "linear"},
    "algorithm": {"name": "fedavg", "local": {"lr": 0.01, "steps": 1}},
}


def test_a_file_a_table_and_a_configuration_are_one_run(tmp_path):
    config = RunConfig.from_dict(CONFIG)
    (tmp_path / "c.toml").write_text(config.to_toml())
    ways = [ef.run(way) for way in (config, CONFIG, tmp_path / "c.toml", str(tmp_path / "c.toml"))]
    numbers = [history.per_client("mse", "train") for history in ways]
    assert numbers.count(numbers[0]) == 4
    folder = ways[0].save(tmp_path / "saved")
    kept = RunConfig.read(folder / "config.toml")
    assert kept.algorithm == config.algorithm and kept.seed == 4
    rows = np.zeros((2, *ef.load("synthetic-regression", samples=5).input_shape))
    np.testing.assert_array_equal(
        ef.load_predictor(folder).predict(rows), ways[0].predictor().predict(rows)
    )


def test_a_history_is_three_lines_and_notebooks_get_tables(data, found):
    lines = repr(found.histories["fair"][0]).splitlines()
    assert len(lines) == 3 and "ScaffPD" in lines[0] and "worst" in lines[1]
    assert len(repr(ef.History(("a",))).splitlines()) == 3
    for shown in (data, data.table(), found.histories["fair"][0]):
        html = shown._repr_html_()
        assert html.startswith("<table>") and data.names[0] in html
    evil = ef.Federation.from_clients({"<b>": ([[0.5]], [0.5])})
    assert "&lt;b&gt;" in evil._repr_html_() and "<b>" not in evil._repr_html_()


def test_a_bar_is_shown_where_a_person_looks_on(monkeypatch):
    class Screen:
        is_terminal = is_jupyter = False

        def __init__(self, **_):
            pass

    monkeypatch.setattr("equifed.training.trackers.Console", Screen)
    assert follow_by_default([], None) is None and follow_by_default([], False) is None
    assert isinstance(follow_by_default([], True), ProgressBar)
    monkeypatch.setattr(Screen, "is_terminal", True)
    assert follow_by_default([], None) is None  # under pytest
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    bar = follow_by_default([], None)
    assert isinstance(bar, ProgressBar) and follow_by_default([bar], None) is None
