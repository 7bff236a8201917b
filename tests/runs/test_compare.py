"""Comparisons: same data, same seeds, only what is missing, the same bytes again."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from equifed.metrics import paired_difference
from equifed.report import read_methods
from equifed.runs.comparison import (
    compare_configs,
    merge_tables,
    plan_jobs,
    read_grid,
    read_variants,
)
from equifed.runs.schema import ConfigError
from equifed.training.files import RunFolderError, lock_folder
from equifed.training.history import History

pytestmark = pytest.mark.long

BASE = """
rounds = 3
[data]
name = "fashion-three"
train = 20
test = 20
[model]
name = "logistic"
[evaluate]
every = 1
splits = ["test"]
"""
VARIANTS = """
[variants.fedavg.algorithm]
name = "fedavg"
local = { lr = 0.05, steps = 2, batch_size = 5 }
[variants.afl.algorithm]
name = "afl"
local = { lr = 0.05, steps = 2, batch_size = 5 }
dual_step = 0.1
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "both.toml"
    path.write_text(BASE + VARIANTS)
    return path


def results(folder):
    """Return every file that a second comparison must reproduce, byte for byte."""
    names = ("metrics.csv", "weights.csv", "model.safetensors", "comparison.json")
    found = [p for p in sorted(folder.rglob("*")) if p.name in names]
    return {str(p.relative_to(folder)): p.read_bytes() for p in found}


@pytest.mark.long
def test_a_comparison_is_reproduced_byte_for_byte(config, tmp_path):
    variants = read_variants([config])
    report = compare_configs(variants, tmp_path / "one", seeds=2)
    compare_configs(variants, tmp_path / "two", seeds=2)
    first, second = results(tmp_path / "one"), results(tmp_path / "two")
    assert len(first) == 4 * 3 + 1 and first == second
    assert [m.seeds for m in report.methods] == [(0, 1), (0, 1)]
    assert (tmp_path / "one" / "report.html").exists()


def test_the_numbers_are_those_of_the_run_folders(config, tmp_path):
    compare_configs(read_variants([config]), tmp_path / "c", seeds=2)
    worst = {
        name: [
            History.load(tmp_path / "c" / "runs" / name / f"seed-{s}", model=False)
            .last()
            .values.min()
            for s in (0, 1)
        ]
        for name in ("fedavg", "afl")
    }
    document = json.loads((tmp_path / "c" / "comparison.json").read_text())
    found = document["methods"][1]["measures"]["worst"]
    assert found["values"] == worst["afl"]
    expected = paired_difference(worst["afl"], worst["fedavg"])
    assert found["difference"]["estimate"] == expected.estimate
    assert document["baseline"] == "fedavg"


@pytest.mark.long
def test_only_what_is_missing_is_run(config, tmp_path, monkeypatch):
    from equifed.runs import run as runs

    out, variants = tmp_path / "c", read_variants([config])
    compare_configs(variants, out, seeds=1)
    before, run, resumed = results(out), [], []
    monkeypatch.setattr(runs, "run", lambda *a, _f=runs.run, **k: run.append(a[1]) or _f(*a, **k))
    monkeypatch.setattr(
        runs, "resume", lambda *a, _f=runs.resume, **k: resumed.append(a) or _f(*a, **k)
    )
    compare_configs(variants, out, seeds=1)
    assert (run, resumed) == ([], []) and results(out) == before
    compare_configs(variants, out, seeds=2)
    assert [str(p.relative_to(out)) for p in run] == ["runs/fedavg/seed-1", "runs/afl/seed-1"]
    (out / "runs" / "afl" / "seed-0" / "summary.json").unlink()  # begun, not ended
    both = results(out)
    compare_configs(variants, out, seeds=2)
    assert len(resumed) == 1 and len(run) == 2 and results(out) == both
    compare_configs(variants, out, seeds=2, overwrite=True)
    assert len(run) == 2 + 4 and results(out) == both


def test_other_settings_are_refused_in_the_same_folder(config, tmp_path):
    compare_configs(read_variants([config]), tmp_path / "c", seeds=1)
    with pytest.raises(RunFolderError, match="another configuration"):
        compare_configs(read_variants([config], ["rounds=4"]), tmp_path / "c", seeds=1)


def test_what_was_measured_is_no_other_setting(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(BASE + "[algorithm]\nname = 'fedavg'")  # the local step size is measured
    reports = [compare_configs(read_variants([path]), tmp_path / "c", seeds=1) for _ in range(2)]
    assert [report.problems for report in reports] == [(), ()]


def test_two_processes_at_once_are_refused(tmp_path):
    with (
        lock_folder(tmp_path),
        pytest.raises(RunFolderError, match=f"Process {os.getpid()} on .* is working in"),
        lock_folder(tmp_path),
    ):
        pass


def test_a_run_that_fails_is_named_and_the_others_are_kept(config, tmp_path):
    config.write_text(BASE + VARIANTS.replace("lr = 0.05", "lr = 1e38", 1))
    report = compare_configs(read_variants([config]), tmp_path / "c", seeds=1)
    assert [m.name for m in report.methods] == ["afl"]
    assert len(report.problems) == 1 and "fedavg, seed 0" in report.problems[0]
    assert "fedavg, seed 0" in (tmp_path / "c" / "report.html").read_text()


@pytest.mark.long
def test_a_report_of_the_folder_is_that_of_the_comparison(config, tmp_path):
    compare_configs(read_variants([config]), tmp_path / "c", seeds=2)
    methods = read_methods([tmp_path / "c"])
    assert [(m.name, m.seeds) for m in methods] == [("fedavg", (0, 1)), ("afl", (0, 1))]


def test_files_are_variants_too(config, tmp_path):
    for name in ("fedavg", "fedprox"):
        local = "[algorithm.local]\nlr = 0.1\nsteps = 1\n"
        more = "mu = 0.1\n" if name == "fedprox" else ""
        (tmp_path / f"{name}.toml").write_text(f'{BASE}[algorithm]\nname = "{name}"\n{more}{local}')
    found = read_variants([tmp_path / "fedavg.toml", tmp_path / "fedprox.toml"])
    assert list(found) == ["fedavg", "fedprox"]
    with pytest.raises(ConfigError, match="two configurations"):
        read_variants([tmp_path / "fedavg.toml", tmp_path / "fedavg.toml"])


def test_different_data_are_refused(config):
    config.write_text(config.read_text() + "[variants.afl.data]\ntrain = 10\n")
    with pytest.raises(ConfigError, match="same data"):
        read_variants([config])


def test_a_wrong_setting_is_said_with_its_variant(config):
    config.write_text(config.read_text().replace("dual_step", "dual_stop"))
    with pytest.raises(ConfigError, match=r"afl: algorithm\.dual_stop"):
        read_variants([config])


HOSPITALS = """
rounds = 2
data = "heart-disease"
algorithm = { name = "scaff-pd", objective = "average" }
[model]
name = "logistic"
l2 = 0.03
[variants.shared]
[variants.own.model]
own = "bias"
"""


def test_with_and_without_an_own_part(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(HOSPITALS)
    compare_configs(read_variants([path]), tmp_path / "c", seeds=1)
    shared, own = (History.load(tmp_path / "c" / "runs" / name / "seed-0")
                   for name in ("shared", "own"))  # fmt: skip
    assert shared.own is None and shared.without_own is None and shared.alone is not None
    assert own.own["1.bias"].shape == (4, 2) and own.without_own is not None
    assert (own.alone.values == shared.alone.values).all()  # alone, nothing is shared
    page = (tmp_path / "c" / "report.html").read_text()
    assert "own: Own part: 1.bias, 2 numbers per client" in page and "Without own part" in page
    path.write_text(HOSPITALS.replace('"bias"', '"biass"'))
    with pytest.raises(ConfigError, match=r"^own: model\.own: .*'biass'; it trains .* bias, head"):
        compare_configs(read_variants([path]), tmp_path / "d", seeds=1)


def test_seeds_count_up_and_all_have_them(config, tmp_path):
    jobs = plan_jobs(read_variants([config], ["seed=7"]), 2, tmp_path)
    seeds = [(j.name, j.config.seed) for j in jobs]
    assert seeds == [("fedavg", 7), ("afl", 7), ("fedavg", 8), ("afl", 8)]
    assert all(j.config.threads == 1 for j in jobs)


def test_merging_leaves_its_arguments_alone():
    base = {"model": {"name": "logistic", "l2": 0.1}}
    assert merge_tables(base, {"model": {"l2": 0.2}, "rounds": 3}) != base
    assert base == {"model": {"name": "logistic", "l2": 0.1}}


def test_every_combination_of_values_is_a_method(config, tmp_path):
    over = ["algorithm.local.lr=0.01,0.1", "rounds=1, 2"]
    found = read_variants([config], over=over)
    points = ["lr = 0.01, rounds = 1", "lr = 0.01, rounds = 2", "lr = 0.1, rounds = 1",
              "lr = 0.1, rounds = 2"]  # fmt: skip
    assert list(found) == [f"{name}, {point}" for name in ("fedavg", "afl") for point in points]
    values = [(c.algorithm["local"]["lr"], c.rounds) for c in found.values()]
    assert values == 2 * [(0.01, 1), (0.01, 2), (0.1, 1), (0.1, 2)]
    single = tmp_path / "afl.toml"
    single.write_text(BASE + "[algorithm]\nname = 'afl'\nlocal = { lr = 0.1, steps = 1 }\n")
    assert list(read_variants([single], over=["rounds=1,2"])) == ["rounds = 1", "rounds = 2"]


@pytest.mark.parametrize(
    ("over", "words"),
    [
        (["rounds"], "key.path=value"),
        (["rounds=1,,2"], "key.path=value"),
        (["rounds=1,1"], "twice"),
        (["rounds=1", "rounds=2"], "twice"),
        (["seed=1,2"], "--seeds"),
        (["algorithm.dual_stop=1"], "dual_stop"),
        (["data.train=10,20"], "same data"),
    ],
)
def test_wrong_values_are_refused(config, over, words):
    with pytest.raises(ConfigError, match=words):
        read_variants([config], over=over)


def test_settings_with_the_same_last_word_have_their_whole_names():
    assert list(read_grid(["model.l2=1", "algorithm.l2=2"])) == ["model.l2 = 1, algorithm.l2 = 2"]


def command(*words):
    from typer.testing import CliRunner

    from equifed.cli.main import app

    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.long
def test_the_command_compares_and_reports(config, tmp_path):
    out, page = tmp_path / "c", tmp_path / "page.html"
    done = command("compare", config, "--seeds", 2, "--out", out, "--target", 0.2)
    assert done.exit_code == 0 and "afl" in done.output
    assert json.loads((out / "comparison.json").read_text())["target"]["value"] == 0.2
    again = command("report", out, "--page", page, "--per-client", "--baseline", "afl")
    assert again.exit_code == 0 and str(page) in again.output
    assert json.loads(page.with_suffix(".json").read_text())["baseline"] == "afl"
    assert len(list((tmp_path / "page-clients").iterdir())) == 3


@pytest.mark.parametrize("words", [[], ["--target", 0.2]], ids=["no target", "a target"])
def test_the_command_shows_a_single_method(words, config, tmp_path):
    """One method has nothing to be compared with, so no target is chosen for it."""
    algorithm = "[algorithm]\nname = 'fedavg'\nlocal = { lr = 0.05, steps = 2, batch_size = 5 }"
    config.write_text(BASE + algorithm)
    out = tmp_path / "c"
    done = command("compare", config, "--seeds", 1, "--out", out, *words)
    assert done.exit_code == 0, done.output
    assert "worst" in done.output and "difference to" not in done.output
    assert ("to target" in done.output) == bool(words)
    assert (out / "report.html").exists()


def test_the_command_fails_when_a_run_does(config, tmp_path):
    config.write_text(BASE + VARIANTS.replace("lr = 0.05", "lr = 1e38", 1))
    done = command("compare", config, "--seeds", 1, "--out", tmp_path / "c")
    assert done.exit_code == 1 and "fedavg, seed 0" in done.output
    assert (tmp_path / "c" / "report.html").exists()


def test_the_command_refuses_what_is_no_run(tmp_path):
    done = command("report", tmp_path)
    assert done.exit_code == 2 and "holds no run" in done.output


@pytest.mark.slow
def test_a_killed_parallel_comparison_goes_on_to_the_same_end(config, tmp_path):
    """Kill the command and it leaves no process behind; run it again and nothing is lost."""
    command = [
        sys.executable,
        "-c",
        "from equifed.cli.main import main; main()",
        "compare",
        str(config),
    ]
    options = ["--seeds", "3", "--jobs", "2", "--set", "rounds=60", "--out"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    subprocess.run([*command, *options, str(whole)], check=True, capture_output=True)
    process = subprocess.Popen([*command, *options, str(cut)], stdout=-3, stderr=-3)
    while process.poll() is None and not list(cut.rglob("summary.json")):
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = {p: p.stat().st_mtime_ns for p in cut.rglob("summary.json")}
    time.sleep(2)
    assert {p: p.stat().st_mtime_ns for p in cut.rglob("summary.json")}.keys() >= kept.keys()
    subprocess.run([*command, *options, str(cut)], check=True, capture_output=True)
    assert all(p.stat().st_mtime_ns == then for p, then in kept.items())
    assert results(cut) == results(whole)
