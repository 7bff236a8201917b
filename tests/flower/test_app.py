"""The app: configuration, a whole run on the in-memory grid, its folder, going on after a crash."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import typer
from flwr.app import Context, RecordDict
from tests.flower.grid import MemoryGrid, convex, flower_clients, memory_grid, task
from typer.testing import CliRunner

from equifed.cli import flower as flower_cli
from equifed.flower.app import find_risks, measure_model
from equifed.flower.app_config import AppConfig, FederationSettings, Kept, read_app_settings
from equifed.flower.members import StartError
from equifed.flower.rehearsal import sign_more_rounds
from equifed.flower.trial import apps, deploy, doctor
from equifed.flower.trial.apps import write_app
from equifed.objectives import CVaR, WorstCase
from equifed.runs.run import free_port
from equifed.runs.schema import ConfigError
from equifed.training.files import RunFolderError
from equifed.training.history import History
from equifed.training.keys import make_key

pytestmark = pytest.mark.long

TABLE: dict[str, Any] = {
    "rounds": 2,
    "data": {"name": "penguins"},
    "model": {"name": "logistic", "dtype": "float64"},
    "algorithm": {"name": "fedavg", "local": {"lr": 0.1, "steps": 2}},
}


def imported(folder: Path, name: str) -> ModuleType:
    """Import a module of an app that was just written."""
    package = folder.name.replace("-", "_")
    for part in (package, f"{package}.task", f"{package}.{name}"):
        file = (
            folder
            / package
            / ("__init__.py" if part == package else f"{part[len(package) + 1 :]}.py")
        )
        spec = importlib.util.spec_from_file_location(part, file)
        assert spec is not None and spec.loader is not None
        sys.modules[part] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[part])
    return sys.modules[f"{package}.{name}"]


@pytest.fixture
def app(tmp_path: Path) -> Path:
    folder = tmp_path / "penguin-app"
    package = write_app(folder, data="penguins")
    text = (package / "equifed.toml").read_text()
    (package / "equifed.toml").write_text(text.replace("rounds = 20", "rounds = 4"))
    return folder


def run_app(folder: Path, root: Path, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
    """Run an app's own ServerApp against its own ClientApp."""
    monkeypatch.setenv("EQUIFED_MEMORY", str(root / "memory"))
    client, server = imported(folder, "client"), imported(folder, "server")
    nodes = {100 + i: client.app for i in range(3)}
    grid = MemoryGrid(nodes, {100 + i: {"partition-id": i} for i in range(3)})
    settings = {**read_app_settings(folder), **config}
    server.app(grid, Context(1, 1, {}, RecordDict(), settings))


def test_a_new_app_runs_and_goes_on_after_a_crash(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    run_app(app, tmp_path, monkeypatch, out=str(whole))
    assert "round 4: objective" in capsys.readouterr().out
    run_app(app, tmp_path, monkeypatch, out=str(part), rounds=2)
    (part / "summary.json").unlink()
    run_app(app, tmp_path, monkeypatch, out=str(part), resume=True, rounds=4)
    first, second = History.load(whole), History.load(part)
    assert [r.round for r in second.rounds] == [1, 2, 3, 4]
    assert first.parameters is not None and second.parameters is not None
    for name, value in first.parameters.items():
        torch.testing.assert_close(second.parameters[name], value, rtol=0, atol=0)
    told = json.loads((part / "flower.json").read_text())
    assert [c["name"] for c in told["clients"]] == list(first.names)
    assert any(event["event"] == "resume" for event in second.events)


def test_a_run_that_goes_on_keeps_its_clients_privacy_and_rounds(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    run_app(app, tmp_path, monkeypatch, out=str(out), rounds=1, privacy="secure")
    told = json.loads((out / "flower.json").read_text())
    (out / "flower.json").write_text(json.dumps({**told, "rounds": 3}))  # as if stopped after one
    (out / "summary.json").unlink()
    run_app(app, tmp_path, monkeypatch, out=str(out), resume=True, privacy="none", clients=1)
    told = json.loads((out / "flower.json").read_text())
    assert (told["privacy"], told["rounds"], len(told["clients"])) == ("secure", 3, 3)
    # A round takes five exchanges; a new session three more for keys and shares, one for bounds.
    # The first session has its keys from measuring the loss scale, before the first round.
    assert [r.exchanges for r in History.load(out).rounds] == [6, 9, 5]


def test_a_new_app_runs_with_hidden_sums(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_app(app, tmp_path, monkeypatch, out=str(tmp_path / "clear"))
    run_app(app, tmp_path, monkeypatch, out=str(tmp_path / "hidden"), privacy="secure")
    clear, hidden = History.load(tmp_path / "clear"), History.load(tmp_path / "hidden")
    assert clear.parameters is not None and hidden.parameters is not None
    for name, value in clear.parameters.items():
        torch.testing.assert_close(hidden.parameters[name], value, rtol=0, atol=1e-10)


def test_a_folder_without_a_run_cannot_be_resumed(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StartError, match="holds no federation run"):
        run_app(app, tmp_path, monkeypatch, out=str(tmp_path), resume=True)


def test_own_data_are_read_from_the_nodes_file(app: Path, tmp_path: Path) -> None:
    import numpy as np

    np.savez(tmp_path / "own.npz", X_train=np.ones((3, 2)), y_train=[0, 1, 0])
    context = Context(1, 1, {"data": str(tmp_path / "own.npz")}, RecordDict(), {})
    x, y = imported(app, "client").load_data(context)["train"]
    assert x.shape == (3, 2) and y.tolist() == [0, 1, 0]


# -- configuration ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rouds": 3}, "there is no setting or table 'rouds'"),
        ({"rounds": 0}, "rounds"),
        ({"algorithm": {"name": "fedavgg"}}, "did you mean 'fedavg'"),
        ({"threads": 2}, "there is no setting or table 'threads'"),
        ({"data": {"name": "table", "path": "x.csv", "target": "y"}}, "data.path"),
        ({"data": {"klasses": 3}}, "'target' of the sites' tables, or 'classes' and arrays, pad"),
    ],
)
def test_a_wrong_configuration_names_the_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AppConfig.from_dict({**TABLE, **change})


def test_data_are_written_as_in_a_configuration_of_a_run() -> None:
    named = AppConfig.from_dict({**TABLE, "data": {"name": "table", "target": "y"}})
    assert named == AppConfig.from_dict({**TABLE, "data": {"target": "y"}})
    assert AppConfig.from_dict({**TABLE, "data": "penguins"}) == AppConfig.from_dict(TABLE)
    assert AppConfig.from_dict(named.to_dict()) == named


def test_data_of_an_embedded_set_go_by_partition() -> None:
    config = AppConfig.from_dict(TABLE)
    assert config.classes is None and config.load_client(0).names == ("Adelie",)
    with pytest.raises(ConfigError, match=r"has clients 0\.\.2, got 3"):
        config.load_client(3)
    own = AppConfig.from_dict({**TABLE, "data": {"classes": 4}})
    assert own.classes == 4
    with pytest.raises(ConfigError, match="load_data must read"):
        own.load_client(0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "clients is required"),
        ({"clients": 0}, "at least 1"),
        ({"clients": 2, "privacy": "total"}, "privacy must be"),
        ({"clients": 2, "privacy": "sums"}, "'sums'.*was removed: use 'secure'"),
        ({"clients": 2, "privacy": "secure"}, "at least three clients"),
        ({"clients": 2, "resume": True}, "resume needs 'out'"),
    ],
)
def test_wrong_settings_of_a_federation_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FederationSettings.from_run_config(values)


def test_an_objective_without_a_cap_is_warned_about(tmp_path: Path) -> None:
    members = flower_clients(memory_grid(convex(), task(), tmp_path), task()).members

    class Chosen:
        objective: Any = WorstCase()

    assert "no cap" in find_risks(Chosen(), members)[0]  # type: ignore[arg-type]
    Chosen.objective = CVaR(0.5)
    assert find_risks(Chosen(), members) == []  # type: ignore[arg-type]


# -- command line -----------------------------------------------------------------------------


def test_new_refuses_a_folder_in_use(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="not empty"):
        write_app(tmp_path)
    found = CliRunner().invoke(flower_cli.app, ["new", str(tmp_path)])
    assert found.exit_code == 2 and "not empty" in found.output
    with pytest.raises(ValueError, match="begin it with a letter"):
        write_app(tmp_path / "7")


def test_without_flower_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = CliRunner().invoke(flower_cli.app, ["doctor"])
    assert found.exit_code == 2 and "pip install 'equifed[flower]'" in found.output


KEPT = {"run": "1", "clients": [{"name": n} for n in "abc"], "deadlines": {}, "privacy": "none"}
KEPT |= {"rounds": 3, "config": {"algorithm": {}}, "model": "", "schema": {"input_shape": []}}
KEPT["plan"] = {"text": "", "signature": ""}
"""What a run folder tells of a federation, as far as it is read here."""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--connection", "fl", "--out", "runs/1"], "must be absolute"),
        (["--connection", "fl", "--out", "/runs/1", "--nodes", "2"], "for a federation here"),
        (["--connection", "fl", "--out", "/runs/1", "--keep", "k"], "for a federation here"),
        (["--out", "{out}", "-c", "privacy='none'"], "privacy: a resumed run keeps"),
        (["--out", "{out}", "-c", "rounds=3 clients=2"], "clients: a resumed run keeps"),
        (["--out", "{out}", "--nodes", "2"], "has 3 clients; --nodes cannot change that to 2"),
        (["--out", "{out}/none"], "is not a folder"),
    ],
)
def test_resume_refuses_what_cannot_change(
    options: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "flower.json").write_text(json.dumps(KEPT))
    words = [word.format(out=tmp_path) for word in options]
    found = CliRunner().invoke(flower_cli.app, ["resume", str(tmp_path), *words])
    assert found.exit_code == 2 and message in found.output


@pytest.mark.parametrize("where", [("algorithm", "name"), ("model", "name"), ("data", "name")])
def test_a_folder_brings_no_code_into_a_federation(where: tuple[str, str], tmp_path: Path) -> None:
    """What flower.json of a stranger names is loaded only if the app at hand names it, too."""
    app, (table, key), ran = AppConfig.from_dict(TABLE), where, tmp_path / "ran"
    evil = tmp_path / "evil.py"
    evil.write_text(f"import pathlib\npathlib.Path({str(ran)!r}).touch()\nclass Made: ...\n")
    config = {**TABLE, table: {**TABLE[table], key: f"{evil}:Made"}}
    (tmp_path / "flower.json").write_text(json.dumps({**KEPT, "config": config}))
    kept, asked = Kept(tmp_path), FederationSettings(3, start=str(tmp_path))
    for use in (
        lambda: kept.config(app),
        lambda: kept.apply(app, asked),
        lambda: measure_model(Mock(), app, asked),
    ):
        with pytest.raises(StartError, match=r"evil\.py:Made"):
            use()
    assert not ran.exists()
    (tmp_path / "flower.json").write_text(json.dumps({**KEPT, "config": TABLE}))
    assert Kept(tmp_path).config(app).model == app.model


def test_nobody_signs_more_rounds_for_code_of_a_stranger(tmp_path: Path) -> None:
    """The operator's key lies on the machine that reads the folder."""
    folder, ran = tmp_path / "more_rounds", tmp_path / "ran"
    write_app(folder, data="penguins")
    (tmp_path / "evil.py").write_text(f"import pathlib\npathlib.Path({str(ran)!r}).touch()\n")
    make_key(tmp_path / "keys", "anna")
    config = {**TABLE, "algorithm": {"name": f"{tmp_path / 'evil.py'}:Made"}}
    (tmp_path / "flower.json").write_text(json.dumps({**KEPT, "config": config}))
    with pytest.raises(StartError, match=r"evil\.py:Made"):
        sign_more_rounds(folder, tmp_path, [], tmp_path / "keys" / "anna.key")
    assert not ran.exists()


def test_a_linked_flower_json_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "secret").write_text(json.dumps(KEPT))
    (tmp_path / "run" / "flower.json").symlink_to(tmp_path / "secret")
    with pytest.raises(RunFolderError, match="symbolic link"):
        Kept(tmp_path / "run")


def test_resume_says_when_a_run_is_complete(tmp_path: Path) -> None:
    for name in ("flower.json", "summary.json"):
        (tmp_path / name).write_text(json.dumps(KEPT))
    (tmp_path / "events.jsonl").touch()
    found = CliRunner().invoke(flower_cli.app, ["resume", str(tmp_path), "--out", str(tmp_path)])
    assert found.exit_code == 0 and "is complete" in found.output


def test_resume_and_up_share_their_options() -> None:
    shown = {name: options(name) for name in ("up", "resume")}
    assert {k: shown["resume"].get(k) for k in shown["up"]} == shown["up"]


def options(command: str) -> dict[str, str]:
    """Return the options of a command and their help."""
    found = typer.main.get_command(flower_cli.app).commands[command]  # type: ignore[attr-defined]
    return {p.name: p.help for p in found.params if isinstance(p.help, str)}


def test_up_refuses_a_folder_that_is_no_app(tmp_path: Path) -> None:
    found = CliRunner().invoke(flower_cli.app, ["up", str(tmp_path)])
    assert found.exit_code == 2 and "not an app of equifed" in found.output


# -- doctor -----------------------------------------------------------------------------------


@contextlib.contextmanager
def serve_tls(keys: Path) -> Iterator[int]:
    """Accept one connection with a server's certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys / "server.pem", keys / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5)

        def accept() -> None:
            with contextlib.suppress(OSError), server.accept()[0] as one:
                context.wrap_socket(one, server_side=True).close()

        thread = threading.Thread(target=accept)
        thread.start()
        yield server.getsockname()[1]
    thread.join()


def test_the_doctor_finds_what_is_wrong_with_keys_and_certificates(tmp_path: Path) -> None:
    for name, days in (("good", 30), ("other", 30), ("old", -1)):
        deploy.make_certificates(tmp_path / name, ["127.0.0.1"], days)
    for name, ca, told in (
        ("good", "good/ca.pem", "answers with TLSv1.3, trusted"),
        ("good", "other/ca.pem", "was issued by another authority than the given one"),
        ("old", "old/ca.pem", "has expired"),
        ("good", "good/server.key", "is not a PEM certificate"),
    ):
        with serve_tls(tmp_path / name) as port:
            found = doctor.check_superlink(f"127.0.0.1:{port}", tmp_path / ca)
        assert told in found.text and found.good == ("trusted" in told), found.text
    key, _ = deploy.make_node_key(tmp_path, "node")
    assert not list(doctor.find_key_problems(key))
    key.chmod(0o644)
    (wrong,) = doctor.find_key_problems(key)
    assert "can be read by others" in wrong
    (wrong,) = doctor.find_key_problems(tmp_path / "good" / "server.key")
    assert "it must be in OpenSSH format" in wrong
    assert any("FileNotFoundError" in p for p in doctor.find_key_problems(tmp_path / "none"))


def test_the_doctor_looks_at_the_app_and_the_port(app: Path) -> None:
    port = free_port()
    found = {f.text: f.good for f in doctor.examine(app, f"127.0.0.1:{port}")}
    assert found[f"{app}: 3 clients, privacy 'none'"]
    assert found[f"{app / 'penguin_app' / 'equifed.toml'}: scaff-pd, 4 rounds"]
    assert not found[f"127.0.0.1:{port} cannot be reached (ConnectionRefusedError)"]
    told = CliRunner().invoke(flower_cli.app, ["doctor", str(app), "--json"])
    listed = json.loads(told.output)["findings"]
    assert {"good": True, "text": f"{app}: 3 clients, privacy 'none'"} in listed
    (app / "penguin_app" / "equifed.toml").write_text("rounds = 'many'")
    assert any("rounds" in f.text and not f.good for f in doctor.examine(app))
    assert not doctor.check_superlink("nowhere", None).good


def test_the_doctor_lets_a_site_say_hello_with_its_own_data(app: Path, tmp_path: Path) -> None:
    def found(config: str) -> dict[str, bool]:
        return {f.text: f.good for f in doctor.examine(app, node_config=config)}

    memory = tmp_path / "memory"
    good = found(f'partition-id=1 memory="{memory}"')
    assert good["Gentoo can take part with its data (83 train, 36 test samples)"]
    assert good[f"the memory folder {memory} can be written"] and not list(memory.iterdir())
    wrong = found(f'partition-id=7 name="north" memory="{memory}"')
    assert not wrong["north cannot take part: partition-id: penguins has clients 0..2, got 7"]
    memory.chmod(0o777)
    assert any("other users can read it" in text for text in found(f'memory="{memory}"'))
    assert not found('data="/nowhere.npz"')["the data /nowhere.npz are not there"]
    assert not found('privacy="total"')["privacy must be 'none' or 'secure', got 'total'"]
    assert any("cannot be read" in text for text in found('name="north" name="south"'))


# -- a run keeps its settings -----------------------------------------------------------------


def test_a_run_goes_on_with_the_settings_it_started_with(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, whole = tmp_path / "run", tmp_path / "whole"
    run_app(app, tmp_path, monkeypatch, out=str(whole), rounds=2)
    run_app(app, tmp_path, monkeypatch, out=str(out), rounds=1, timeout=77.0)
    (out / "summary.json").unlink()
    toml = app / "penguin_app" / "equifed.toml"
    toml.write_text(toml.read_text().replace("lr = 0.05", "lr = 5.0"))  # edited since
    capsys.readouterr()
    run_app(app, tmp_path, monkeypatch, out=str(out), resume="rounds wait", rounds=2, wait=9.0)
    told, said = json.loads((out / "flower.json").read_text()), capsys.readouterr().out
    assert (told["deadlines"]["timeout"], told["deadlines"]["wait"]) == (77.0, 9.0)
    assert told["config"]["algorithm"]["local"]["lr"] == 0.05 and "lr': 5.0" in said
    first, second = History.load(whole), History.load(out)
    assert first.parameters is not None and second.parameters is not None
    for name, value in first.parameters.items():
        torch.testing.assert_close(second.parameters[name], value, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "given", "message"),
    [
        ({}, {"resume": "privacy", "privacy": "none"}, "started with privacy = 'secure'"),
        (
            {"clients": ["Adelie", "Gentoo", "Emperor"]},
            {},
            r"other clients: missing \['Emperor'\], new \['Chinstrap'\]",
        ),
        ({"schema": {"input_shape": [9]}}, {}, r"input_shape is \[9\]; the clients have"),
        ({"schema": {"digest": "abc"}}, {}, "digest is abc"),
        ({"model": "another"}, {}, "had another model than the clients build now"),
        ({"config": 3}, {}, "holds no federation run"),
    ],
)
def test_a_run_does_not_go_on_as_another_one(
    change: dict[str, Any],
    given: dict[str, Any],
    message: str,
    app: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    run_app(app, tmp_path, monkeypatch, out=str(out), rounds=1, privacy="secure")
    (out / "summary.json").unlink()
    told = json.loads((out / "flower.json").read_text())
    if "clients" in change:
        pairs = zip(told["clients"], change["clients"], strict=True)
        change = {"clients": [{**client, "name": name} for client, name in pairs]}
    for key, value in change.items():
        told[key] = {**told[key], **value} if isinstance(value, dict) else value
    (out / "flower.json").write_text(json.dumps(told))
    with pytest.raises(StartError, match=message):
        run_app(app, tmp_path, monkeypatch, out=str(out), **{"resume": True, **given})
    assert "equifed: ENDED: " in capsys.readouterr().out


# -- following a run --------------------------------------------------------------------------

FAKE = """#!/bin/sh
case "$1" in
run) {run} ;;
log) cat "$0.log" ;;
list) echo '{{"runs": [{{"run-id": "7", "status": "'$(cat "$0.status")'"}}]}}' ;;
esac
"""


@pytest.mark.parametrize(
    ("run", "log", "status", "code", "told"),
    [
        ('echo \'{"run-id": "7"}\'', "equifed: round 1: fine", "finished:completed", 0, "fine"),
        (
            'echo \'{"run-id": "7"}\'',
            "equifed: ENDED: north is missing",
            "finished:failed",
            1,
            "The run ended: north is missing",
        ),
        ('echo \'{"run-id": "7"}\'', "INFO: start", "finished:failed", 1, "it was killed, or ran"),
        ('echo \'{"run-id": "7"}\'', "", "finished:stopped", 1, "stopped with flwr stop"),
        ('echo \'{"run-id": "7"}\'', "", "", 1, "cannot be reached any more"),
        ("echo 'ConnectError: refused'; exit 1", "", "", 2, "The SuperLink cannot be reached"),
    ],
)
def test_flower_run_says_how_a_run_ended(
    run: str,
    log: str,
    status: str,
    code: int,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = tmp_path / "flwr"
    script.write_text(FAKE.format(run=run))
    script.chmod(0o700)
    (tmp_path / "flwr.log").write_text(log + "\n")
    (tmp_path / "flwr.status").write_text(status)
    monkeypatch.setattr(apps, "find_script", lambda name: str(script))
    found = CliRunner().invoke(flower_cli.app, ["run", str(tmp_path), "fl"])
    assert found.exit_code == code and told in " ".join(found.output.split())
    assert "equifed: " not in found.stdout


@pytest.mark.parametrize(
    ("days", "authority", "told"),
    [
        (-1, "site", "has expired: its owner must renew it"),
        (30, "other", "was issued by another authority than the given one"),
    ],
)
def test_an_operator_is_told_what_is_wrong_with_the_certificate(
    days: int, authority: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower says of all causes that the connection is unavailable."""
    deploy.make_certificates(tmp_path / "site", ["127.0.0.1"], days)
    deploy.make_certificates(tmp_path / "other", ["127.0.0.1"])
    said = json.dumps({"success": False, "error-message": "Connection to it is unavailable."})
    script = tmp_path / "flwr"
    script.write_text(f"#!/bin/sh\necho '{said}'; exit 1\n")
    script.chmod(0o700)
    monkeypatch.setattr(apps, "find_script", lambda name: str(script))
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    with serve_tls(tmp_path / "site") as port:
        (tmp_path / "config.toml").write_text(
            f'[superlink.fl]\naddress = "127.0.0.1:{port}"\n'
            f'root-certificates = "{tmp_path / authority / "ca.pem"}"\n'
        )
        found = CliRunner().invoke(flower_cli.app, ["run", str(tmp_path), "fl"])
    line = " ".join(found.output.split())
    assert found.exit_code == 2 and told in line
    assert "did not start: Connection to it is unavailable. Its cause: the certificate" in line


def test_flower_fit_asks_for_a_fit_and_prints_its_result_alone_for_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "flwr"
    script.write_text(FAKE.format(run='echo "$@" > "$0.asked"; echo \'{"run-id": "7"}\''))
    script.chmod(0o700)
    (tmp_path / "flwr.log").write_text('equifed: candidate 1\nequifed: {"choice": "own bias"}\n')
    (tmp_path / "flwr.status").write_text("finished:completed")
    monkeypatch.setattr(apps, "find_script", lambda name: str(script))
    asked = ["fit", str(tmp_path), "fl", "--out", "/srv/run"]
    found = CliRunner().invoke(flower_cli.app, [*asked, "--json"])
    assert json.loads(found.stdout) == {"choice": "own bias"} and "candidate 1" in found.stderr
    assert 'do="fit"' in (tmp_path / "flwr.asked").read_text()
    plain = CliRunner().invoke(flower_cli.app, asked)
    assert "candidate 1" in plain.stdout and "{" not in plain.stdout
    relative = CliRunner().invoke(flower_cli.app, [*asked[:-1], "run"])
    assert relative.exit_code == 2 and "must be absolute" in relative.stderr
