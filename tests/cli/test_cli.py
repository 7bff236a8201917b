"""The command line: what it prints, what it refuses and with which code, and what it leaves."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from equifed.cli import terminal
from equifed.cli.main import app, main
from equifed.runs import run as runs
from equifed.runs.config import RunConfig
from equifed.training import loop as training
from equifed.training.final_model import StopWhen
from equifed.training.history import History, RoundRecord
from equifed.training.show import describe_events, tabulate_clients


def equifed(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def people(path: Path, **ages: list[float]) -> dict[str, Any]:
    """Write a table of clients with two classes, and return the ``[data]`` that leaves it raw."""
    rows = [
        f"{client},{value!r},{'ill' if i % 2 else 'well'}"
        for client, values in ages.items()
        for i, value in enumerate(values)
    ]
    path.write_text("\n".join(["site,age,state", *rows]) + "\n")
    table = {"name": "table", "path": str(path), "client": "site", "target": "state"}
    return {**table, "prepare": {"scale": "none", "missing": "error"}}


# -- run and resume ---------------------------------------------------------------------------


def test_run_leaves_a_complete_folder_and_a_table(config: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = equifed("run", config(), "--out", out, "--seed", 5, "--engine", "loop")
    assert result.exit_code == 0, result.stderr
    for word in ("T-shirt", "pullover", "shirt", "average", "worst"):
        assert word in result.stdout
    names = {
        "config.toml", "run.json", "metrics.csv", "rounds.csv", "weights.csv", "events.jsonl",
        "summary.json", "model.safetensors", "checkpoint",
    }  # fmt: skip
    assert names <= {p.name for p in out.iterdir()}
    written = RunConfig.read(out / "config.toml")
    assert (written.seed, written.engine["name"]) == (5, "loop")
    about = json.loads((out / "run.json").read_text())
    assert set(about["versions"]) >= {"equifed", "torch", "numpy", "python"}
    assert len(about["data"]["sha256"]) == 64


def test_overrides_reach_the_run(config: Any, tmp_path: Path) -> None:
    sets = ["--set", "rounds=2", "--set", "algorithm.local.lr=0.5", "--set", "data.train=5"]
    assert equifed("run", config(), "--out", tmp_path / "out", *sets).exit_code == 0
    written = RunConfig.read(tmp_path / "out" / "config.toml")
    assert (written.rounds, written.algorithm["local"]["lr"], written.data["train"]) == (2, 0.5, 5)


def test_default_folder_has_the_name_and_the_seed(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert equifed("run", config(), "--seed", 7, "--quiet").exit_code == 0
    assert (tmp_path / "runs" / "small-7" / "summary.json").exists()


@pytest.mark.long
def test_existing_folder_is_refused_unless_overwritten(config: Any, tmp_path: Path) -> None:
    options = ["run", config(), "--out", tmp_path / "out", "--quiet"]
    assert equifed(*options).exit_code == 0
    refused = equifed(*options)
    assert refused.exit_code == 2
    assert "already holds a run" in refused.stderr
    assert "equifed resume" in refused.stderr
    assert equifed(*options, "--overwrite").exit_code == 0


def test_resume_of_a_complete_run_says_so(config: Any, tmp_path: Path) -> None:
    equifed("run", config(), "--out", tmp_path / "out", "--quiet")
    result = equifed("resume", tmp_path / "out")
    assert result.exit_code == 0
    assert "is complete" in result.stderr


def test_resume_of_an_interrupted_run_shows_the_end(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, train = tmp_path / "out", training.train

    def interrupted(*args: Any, **options: Any) -> History:
        train(*args, **{**options, "rounds": 1})
        raise KeyboardInterrupt

    monkeypatch.setattr("equifed.runs.build.train", interrupted)
    broken = equifed("run", config(), "--out", out)
    assert broken.exit_code == 130
    assert f"equifed resume {out}" in broken.stderr
    monkeypatch.undo()
    (out / "summary.json").unlink()  # what a shorter run wrote at its end
    result = equifed("resume", out)
    assert result.exit_code == 0, result.stderr
    assert "T-shirt" in result.stdout
    assert len(History.load(out).rounds) == 3


@pytest.mark.long
def test_a_model_and_a_loss_of_ones_own(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_parts.py").write_text(
        "from torch import nn\n"
        "def narrow(input_shape, outputs, *, width: int = 3):\n"
        "    first = nn.Linear(input_shape[-1] * input_shape[-2], width)\n"
        "    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), nn.Linear(width, outputs))\n"
        "def doubled(outputs, targets):\n"
        "    return 2 * nn.functional.cross_entropy(outputs, targets, reduction='none')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setattr("sys.argv", ["equifed", "--help"])
    with pytest.raises(SystemExit):
        main()  # what makes modules of this folder known
    model = {"name": "my_parts:narrow", "width": 2, "loss": "my_parts:doubled"}
    result = equifed("run", config(model=model), "--out", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    parameters = History.load(tmp_path / "out").parameters
    assert parameters is not None
    assert {p.shape[0] for p in parameters.values()} == {2, 3}
    wrong = equifed("run", config(model={**model, "depth": 1}), "--out", tmp_path / "other")
    assert wrong.exit_code == 2
    assert "model.depth: there is no setting 'depth'" in wrong.stderr


# -- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.lcoal.lr=1", "algorithm.lcoal: there is no setting 'lcoal' (did you mean 'l"),
        ("rounds=ten", 'rounds: must be a whole number; got "ten"'),
        ("algorithm.name=fedavgg", "algorithm.name: there is no algorithm 'fedavgg' (did you mean"),
        ("engine.device=gpu", "engine.device: unknown device 'gpu'"),
        ("rounds", "--set takes key.path=value, got 'rounds'"),
    ],
)
def test_bad_setting_is_one_line_and_code_2(
    override: str, message: str, config: Any, tmp_path: Path
) -> None:
    result = equifed("run", config(), "--out", tmp_path / "out", "--set", override)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"equifed: {message}")
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_missing_and_malformed_files(tmp_path: Path, config: Any) -> None:
    missing = equifed("run", tmp_path / "none.toml")
    assert (missing.exit_code, "none.toml: No such file" in missing.stderr) == (2, True)
    (tmp_path / "bad.toml").write_text("rounds = = 3")
    malformed = equifed("run", tmp_path / "bad.toml")
    assert (malformed.exit_code, "is not a TOML file" in malformed.stderr) == (2, True)
    data = {"name": "table", "path": "none.csv", "client": "a", "target": "b"}
    lost = equifed("run", config(data=data), "--out", tmp_path / "out")
    assert (lost.exit_code, "none.csv" in lost.stderr) == (2, True)
    folder = equifed("resume", tmp_path)
    assert (folder.exit_code, "config.toml is missing" in folder.stderr) == (2, True)


def test_a_file_in_the_place_of_a_folder(tmp_path: Path, config: Any) -> None:
    path = config()
    for words in (("run", path), ("compare", path), ("compare", path, "--over", "rounds=1,2")):
        result = equifed(*words, "--out", path)
        assert result.exit_code == 2
        assert str(path) in result.stderr and "file" in result.stderr


def test_an_interrupted_comparison_is_run_again(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("equifed.runs.build.train", interrupt)
    result = equifed("compare", config(), "--out", tmp_path / "c")
    assert (result.exit_code, "the same command" in result.stderr) == (130, True)
    monkeypatch.setattr("equifed.runs.run.build_run", interrupt)  # nothing is there to resume yet
    early = equifed("run", config(), "--out", tmp_path / "r")
    assert (early.exit_code, "resume" in early.stderr) == (130, False)


def test_data_with_a_gap_name_the_client(tmp_path: Path, config: Any) -> None:
    data = people(tmp_path / "people.csv", north=[1.0, 2.0], south=[3.0, float("nan")])
    result = equifed("run", config(data=data), "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "'south'" in result.stderr
    assert "'age'" in result.stderr


@pytest.mark.long
def test_a_client_that_is_not_finite_is_left_out_and_named(tmp_path: Path, config: Any) -> None:
    data = people(tmp_path / "people.csv", north=[1.0, 2.0], south=[2.0, 1.0], odd=[1e30, -3e30])
    result = equifed("run", config(data=data), "--out", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    history = History.load(tmp_path / "out")
    assert {e["client"] for e in history.events if e["event"] == "quarantine"} == {"odd"}
    assert "client odd was left out of 3 round(s)" in result.stdout
    assert history.parameters is not None
    assert all(bool(p.isfinite().all()) for p in history.parameters.values())


def test_when_all_are_lost_the_run_stops_with_its_checkpoint(tmp_path: Path, config: Any) -> None:
    data = people(tmp_path / "people.csv", north=[1e30, -2e30], south=[3e30, -1e30])
    out = tmp_path / "out"
    result = equifed("run", config(data=data), "--out", out)
    assert result.exit_code == 1
    assert "no client gave a usable answer" in result.stderr
    assert "Traceback" not in result.stderr
    assert list((out / "checkpoint").glob("*.json"))
    assert equifed("resume", out).exit_code == 1  # it goes on from there, to the same end


def test_traceback_on_demand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EQUIFED_TRACEBACK", "1")
    result = CliRunner().invoke(app, ["run", str(tmp_path / "none.toml")])
    assert isinstance(result.exception, FileNotFoundError)


# -- looking around ---------------------------------------------------------------------------


def test_list_names_everything() -> None:
    text = equifed("list").stdout
    for word in ("fedavg", "scaff-pd", "chi-square", "fashion-three", "logistic", "stacked"):
        assert word in text
    assert "fedavg" not in equifed("list", "models").stdout
    wrong = equifed("list", "model")
    assert (wrong.exit_code, "did you mean 'models'" in wrong.stderr) == (2, True)


def test_data_show_prints_who_has_what() -> None:
    result = equifed("data", "show", "fashion-three", "--set", "data.train=7")
    assert result.exit_code == 0
    row = next(line for line in result.stdout.splitlines() if line.startswith("pullover"))
    assert row.split() == ["pullover", "7", "500", "0", "7", "0"]
    assert equifed("data", "show", "nothing").exit_code == 2
    other = equifed("data", "show", "fashion-three", "--set", "rounds=7")
    assert (other.exit_code, "only data.KEY is used here" in other.stderr) == (2, True)


def test_data_fetch_of_embedded_and_unknown_data() -> None:
    assert "part of the package" in equifed("data", "fetch", "penguins").stdout
    assert equifed("data", "fetch", "nothing").exit_code == 2


# -- what is shown and when to stop -----------------------------------------------------------


def scored(*accuracies: list[float]) -> History:
    from equifed.training.history import MetricRecord

    history = History(("a", "b"))
    for r, values in enumerate(accuracies):
        sizes = np.array([1, 1])
        history.metrics.append(MetricRecord(r, "validation", "accuracy", np.array(values), sizes))
        history.rounds.append(RoundRecord(r + 1, None, 1, 0, 0, seconds=1.0))
    return history


def test_target_looks_at_the_worst_client_or_the_average() -> None:
    history = scored([0.5, 0.9])
    assert StopWhen(target=0.7, metric="accuracy", of="average")(history) is not None
    assert StopWhen(target=0.7, metric="accuracy", of="worst")(history) is None
    assert StopWhen(target=0.5, metric="accuracy", of="worst")(history) is not None
    assert (
        StopWhen(target=0.5, metric="loss", of="worst")(history) is None
    )  # there is no such metric


def test_patience_counts_evaluations_without_a_better_one() -> None:
    rule = StopWhen(patience=2)
    assert rule(scored([0.1, 0.5], [0.3, 0.5], [0.2, 0.9])) is None
    assert rule(scored([0.1, 0.5], [0.3, 0.5], [0.2, 0.9], [0.3, 0.9])) is not None
    assert rule(scored([0.1, 0.5], [0.3, 0.5], [0.2, 0.9], [0.4, 0.9])) is None


def test_time_limit_adds_up_the_rounds() -> None:
    assert StopWhen(seconds=2.5)(scored([0, 0], [0, 0])) is None
    assert StopWhen(seconds=2.0)(scored([0, 0], [0, 0])) is not None
    assert StopWhen()(scored([0, 0], [0, 0])) is None


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_of_many_clients_the_worst_are_shown(metric: str) -> None:
    from rich.console import Console

    from equifed.training.history import MetricRecord

    history = History(tuple(f"c{i:02d}" for i in range(50)))
    values = np.linspace(0.1, 0.9, 50) if metric == "accuracy" else np.linspace(0.9, 0.1, 50)
    history.metrics.append(MetricRecord(1, "test", metric, values, np.ones(50, dtype=np.int64)))
    console = Console(width=80)
    with console.capture() as captured:
        console.print(tabulate_clients({"run": history}))
    text = captured.get()
    assert "c00" in text
    assert "c39" in text
    assert "c40" not in text
    assert "and 10 better served" in text


def test_events_are_told_by_client_and_shortened() -> None:
    history = History(tuple(f"c{i}" for i in range(30)))
    history.events = [
        {"event": "quarantine", "round": r, "client": f"c{i}", "reason": "loss is nan"}
        for r in (3, 4)
        for i in range(30)
    ]
    lines = describe_events(history)
    assert lines[0] == "client c0 was left out of 2 round(s), first in round 3: loss is nan"
    assert lines[-1] == "and 20 more clients; see events.jsonl"


@pytest.mark.long
@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="other signals on this system")
@pytest.mark.parametrize("number", ["SIGTERM", "SIGHUP"])
def test_a_signal_saves_the_round_and_says_how_to_resume(
    config: Any, tmp_path: Path, number: str
) -> None:
    """Without a checkpoint of that round: they are written every so many seconds alone."""
    out, told = tmp_path / "out", "equifed.training.loop.CHECKPOINT_SECONDS = 1e9"
    code = f"import equifed.training.loop; {told}; from equifed.cli.main import main; main()"
    heard = f"import signal; signal.signal(signal.{number}, signal.SIG_DFL)"  # nohup ignores one
    command = [
        sys.executable,
        "-c",
        f"{heard}; {code}",
        "run",
        str(config(rounds=100_000)),
        "--out",
        str(out),
    ]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(600):
            if (out / "rounds.csv").exists() and (out / "rounds.csv").read_text().count("\n") > 3:
                break
            time.sleep(0.1)
        running.send_signal(getattr(signal, number))
        _, said = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 130
    assert f"{number}: the run ends after this round" in said and f"equifed resume {out}" in said
    rounds = (out / "rounds.csv").read_text().count("\n") - 1
    assert rounds >= 3
    assert (out / "checkpoint" / f"{rounds:08d}.json").exists()


@pytest.mark.parametrize("line", ["return {}[input_shape]", "raise ValueError", "open('/none/x')"])
def test_errors_of_ones_own_code_name_its_line(config: Any, tmp_path: Path, line: str) -> None:
    (tmp_path / "broken_parts.py").write_text(f"def model(input_shape, outputs):\n    {line}\n")
    model = {"name": "broken_parts.py:model", "loss": "cross_entropy"}
    result = equifed("run", config(model=model), "--out", tmp_path / "out")
    assert result.exit_code != 0 and "should not happen" not in result.stderr
    assert f"broken_parts.py, line 2, in model: {line}" in result.stderr


def test_errors_of_ones_own_code_in_another_process_name_its_line(tmp_path: Path) -> None:
    """What came from a process has no frames, only their text in its cause."""
    (tmp_path / "mine.py").touch()
    error = KeyError("x")
    error.__cause__ = RuntimeError(f'''
"""
Traceback (most recent call last):
  File "{terminal.__file__}", line 1, in outer
    inner()
  File "{tmp_path / "mine.py"}", line 2, in fail
    return {{}}["x"]
  File "{json.__file__}", line 3, in within_a_package
    pass
"""''')
    told, status = terminal._explain(error)
    assert 'mine.py, line 2, in fail: return {}["x"]' in told and "should not" not in told
    assert status == 1 and "should not happen" in terminal._explain(KeyError("x"))[0]


def test_who_interrupts_a_run_with_own_code_is_told_how_to_resume_it(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parts.py").write_text(
        "from torch import nn\ndef model(input_shape, outputs): return nn.Linear(1, outputs)\n"
    )
    model = {"name": "parts.py:model", "loss": "cross_entropy"}

    def begin(parsed: Any, out: Path, **more: Any) -> None:
        out.mkdir()
        (out / "config.toml").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "run", begin)
    for given, told in ({"model": model}, " --trust"), ({}, ""):
        out = tmp_path / f"out{told.strip()}"
        result = equifed("run", config(**given), "--out", out)
        assert result.exit_code == 130
        assert f"equifed resume {out}{told}\n" in result.stderr


@pytest.mark.parametrize("device", ["1.5", "true", "[1]"])
def test_a_device_is_a_name(config: Any, tmp_path: Path, device: str) -> None:
    result = equifed("run", config(), "--set", f"engine.device={device}", "--out", tmp_path / "o")
    assert result.exit_code == 2 and "should not happen" not in result.stderr
    assert "engine.device" in result.stderr
