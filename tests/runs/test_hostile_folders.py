"""Run folders from a stranger: no command runs their code, reads or writes outside of them."""

from __future__ import annotations

import ast
import io
import json
import os
import shutil
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from tests.models.test_predictor import draw_table
from torch import nn
from typer.testing import CliRunner, Result

import equifed as ef
from equifed.cli.main import app
from equifed.models import export
from equifed.report import read_methods
from equifed.runs import run as runs
from equifed.runs.catalogue import SECTIONS
from equifed.runs.config import RunConfig
from equifed.runs.evidence import CLIENT_TABLE, pack_evidence, write_model_card
from equifed.runs.load import evaluate
from equifed.runs.schema import settings
from equifed.training import loop as training
from equifed.training.files import RunFolderError, digest, seal
from equifed.training.folder import (
    CHOSEN_BY_DATA,
    EXPORTED,
    PROGRAM,
    RunFolder,
    open_run_folder,
)
from equifed.training.tables import (
    CHECKSUMS,
    CONFIG,
    EVENTS,
    FILES,
    RUN,
    SUMMARY,
    unpack_hits,
)

pytestmark = pytest.mark.long

SECRET = "the owner's private key"


def describe_run(folder: Path, **changes: Any) -> RunConfig:
    draw_table(80).to_csv(folder / "train.csv", index=False)
    draw_table(30, seed=1).to_csv(folder / "rows.csv", index=False)
    data = {"name": "table", "path": "train.csv", "client": "site", "target": "ill"}
    table = {
        "rounds": 4,
        "threads": 1,
        "data": {**data, "holdout": {"validation": 0.2, "test": 0.3}},
        "model": {"name": "logistic", "l2": 0.01},
        "algorithm": {"name": "fedavg", "local": {"lr": 0.1, "steps": 2}},
    }
    (folder / "run.toml").write_text(tomli_w.dumps({**table, **changes}))
    return RunConfig.read(folder / "run.toml")


class Dies(runs.Callback):
    """Breaks off after two rounds, as a kill would."""

    def evaluation(self, round: int, records: Any) -> None:
        if round == 2:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run, an interrupted one, and an export."""
    folder = tmp_path_factory.mktemp("made")
    config = describe_run(folder)
    ef.run(config, folder / "whole", progress=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "CHECKPOINT_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            runs.run(config, folder / "broken", callbacks=[Dies()], progress=False)
    assert (
        equifed("export", folder / "whole", "--out", folder / "program", "--torch").exit_code == 0
    )
    return folder


def equifed(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


# -- code --------------------------------------------------------------------------------------


def plant_code(gift: Path, fresh: bool = True, **changes: Any) -> Path:
    """Let a run's configuration name code beside it; return the file that the code writes."""
    ran = gift.parent / "ran"
    (gift / "evilmod.py").write_text(
        f"import pathlib\nfrom torch import nn\npathlib.Path({str(ran)!r}).write_text('ran')\n"
        "def make(input_shape, outputs):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0], outputs))\n"
    )
    table = tomllib.loads((gift / CONFIG).read_text())
    if not changes:
        model = {key: value for key, value in table["model"].items() if key != "bias"}
        changes = {"model": {**model, "name": "evilmod.py:make"}}
    (gift / CONFIG).write_text(tomli_w.dumps({**table, **changes}))
    if fresh:
        renew_checksums(gift)
    return ran


def renew_checksums(gift: Path) -> None:
    """Do what whoever changes a folder can do."""
    told = json.loads((gift / RUN).read_bytes())
    del told["sha256"]
    (gift / RUN).write_bytes(seal({**told, CONFIG: digest((gift / CONFIG).read_bytes())}))
    if (gift / CHECKSUMS).exists():
        there = [name for name in (*FILES, SUMMARY) if (gift / name).exists()]
        sums = {name: digest((gift / name).read_bytes()) for name in there}
        (gift / CHECKSUMS).write_bytes(seal(sums))


COMMANDS: dict[str, Callable[[Path, Path], tuple[object, ...]]] = {
    "predict": lambda gift, made: ("predict", gift, made / "rows.csv"),
    "evaluate": lambda gift, made: ("evaluate", gift, made / "rows.csv"),
    "export": lambda gift, made: ("export", gift, "--card"),
    "evidence": lambda gift, made: ("evidence", gift),
    "personalise": lambda gift, made: ("personalise", gift),
    "personalise a newcomer": lambda gift, made: (
        "personalise", gift, made / "rows.csv", "--client", "new", "--out", gift.parent / "new",
    ),
}  # fmt: skip
PYTHON: dict[str, Callable[[Path, Path], object]] = {
    "load_predictor": lambda gift, made: ef.load_predictor(gift),
    "predictor": lambda gift, made: ef.History.load(gift).predictor(),
    "model": lambda gift, made: ef.History.load(gift).model,
    "personalise": lambda gift, made: ef.personalise(gift),
    "History.personalise": lambda gift, made: ef.History.load(gift).personalise(),
    "evaluate": lambda gift, made: evaluate(gift, made / "rows.csv"),
    "pack_evidence": lambda gift, made: pack_evidence(gift),
    "write_model_card": lambda gift, made: write_model_card(gift, gift.parent),
}


@pytest.fixture
def gift(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "whole", tmp_path / "gift"))


@pytest.fixture
def broken(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "broken", tmp_path / "gift"))


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_runs_the_code_that_a_folder_names(made: Path, gift: Path, name: str) -> None:
    ran = plant_code(gift)
    result = equifed(*COMMANDS[name](gift, made))
    assert not ran.exists()
    assert result.exit_code == 2
    assert "evilmod.py:make" in result.stderr and "--trust" in result.stderr


@pytest.mark.parametrize("name", PYTHON)
def test_no_function_runs_the_code_that_a_folder_names(made: Path, gift: Path, name: str) -> None:
    ran = plant_code(gift)
    with pytest.raises(RunFolderError, match=r"evilmod\.py:make.*trust=True"):
        PYTHON[name](gift, made)
    assert not ran.exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_checksums_come_before_code(made: Path, gift: Path, name: str) -> None:
    ran = plant_code(gift, fresh=False)
    result = equifed(*COMMANDS[name](gift, made))
    assert not ran.exists()
    assert result.exit_code == 2 and "does not match its checksum" in result.stderr


def test_trusted_code_runs_unless_the_folder_is_damaged(made: Path, gift: Path) -> None:
    ran = plant_code(gift)
    result = equifed("predict", gift, made / "rows.csv", "--trust")
    assert result.exit_code == 0, result.stderr
    assert ran.exists() and result.stdout.startswith("prediction,")
    ran.unlink()
    (gift / CONFIG).write_text((gift / CONFIG).read_text() + "# changed\n")
    result = equifed("predict", gift, made / "rows.csv", "--trust")
    assert result.exit_code == 2 and "does not match its checksum" in result.stderr


@pytest.mark.parametrize("name", [n for n in COMMANDS if n != "personalise a newcomer"])
def test_every_command_can_be_told_to_trust(made: Path, gift: Path, name: str) -> None:
    plant_code(gift)
    result = equifed(*COMMANDS[name](gift, made), "--trust")
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize(
    "changes",
    [
        {"data": "evilmod.py:make"},
        {"data": {"name": "evilmod:make"}},
        {"data": {"name": "mnist", "partition": "evilmod:make"}},
        {"data": {"name": "mnist", "partition": {"name": "evilmod:make"}}},
        {"model": "evilmod:make"},
        {"algorithm": {"name": "scaff-pd", "objective": {"name": "evilmod:make"}}},
        {"evaluate": {"metrics": ["evilmod:make"]}},
    ],
)
def test_code_is_found_wherever_it_is_named(
    made: Path, gift: Path, changes: dict[str, Any]
) -> None:
    ran = plant_code(gift, **changes)
    with pytest.raises(RunFolderError, match=r"evilmod(\.py)?:make"):
        ef.load_predictor(gift)
    assert not ran.exists()


def test_only_known_settings_of_data_can_name_code() -> None:
    """What a data set chooses from the catalogue is looked at; other texts may hold colons."""
    for name, entry in SECTIONS["data"].entries().items():
        chosen = {key for key, one in settings(entry.load()).items() if one.section is not None}
        records = [one.record for one in settings(entry.load()).values() if one.record is not None]
        assert chosen <= set(CHOSEN_BY_DATA), name
        for record in records:
            assert not any(one.section for one in settings(record).values()), name
    assert (EXPORTED, PROGRAM) == (export.DESCRIPTION, export.PROGRAM)


def test_reading_needs_no_trust_and_runs_nothing(gift: Path, tmp_path: Path) -> None:
    """Tables and weights are data: a report about a run of one's own code is nothing to ask for."""
    ran = plant_code(gift)
    page = tmp_path / "page.html"
    for command in (("report", gift, "--page", page), ("resume", gift)):
        assert equifed(*command).exit_code == 0
    assert not ran.exists() and page.exists()


def test_resume_runs_no_code_of_a_stranger(broken: Path) -> None:
    ran = plant_code(broken)
    result = equifed("resume", broken)
    assert result.exit_code == 2 and "evilmod.py:make" in result.stderr
    assert not ran.exists()


@pytest.mark.parametrize("kind", ["whole", "broken"])
def test_a_comparison_runs_no_code_that_its_folder_names(
    made: Path, tmp_path: Path, kind: str
) -> None:
    config, out = describe_run(tmp_path), tmp_path / "comparison"
    other = describe_run(tmp_path, rounds=3)
    for path, one in (("a", config), ("b", other)):
        (tmp_path / f"{path}.toml").write_text(one.to_toml())
    command = ("compare", tmp_path / "a.toml", tmp_path / "b.toml", "--out", out, "--seeds", "1")
    assert equifed(*command).exit_code == 0
    gift = sorted(path.parent for path in out.glob("**/config.toml"))[0]
    if kind == "broken":
        (gift / SUMMARY).unlink()
    plant_code(gift)
    result = equifed(*command)
    assert not list(tmp_path.rglob("ran"))
    assert result.exit_code == 2 and "another configuration" in result.stderr


class Runs:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.path, "ran")


def test_a_program_is_code(made: Path, gift: Path, tmp_path: Path) -> None:
    """torch.export.load unpickles what an archive says is pickled."""
    ran = tmp_path / "ran"
    shutil.copytree(made / "program", gift, dirs_exist_ok=True)
    pickled = io.BytesIO()
    torch.save({"x": Runs(ran)}, pickled)
    with (
        zipfile.ZipFile(made / "program" / "model.pt2") as old,
        zipfile.ZipFile(gift / "model.pt2", "w") as new,
    ):
        for name in old.namelist():
            content = old.read(name)
            if name.endswith("model_weights_config.json"):
                told = json.loads(content)
                for weight in told["config"].values():
                    weight["use_pickle"] = True
                content = json.dumps(told).encode()
            if "/data/weights/weight_" in name:
                content = pickled.getvalue()
            new.writestr(name, content)
    result = equifed("predict", gift, made / "rows.csv")
    assert not ran.exists()
    assert result.exit_code == 2
    assert "model.pt2" in result.stderr and "--trust" in result.stderr


# -- links -------------------------------------------------------------------------------------


READERS: dict[str, Callable[[Path, Path], object]] = {
    **{name: lambda g, m, c=command: equifed(*c(g, m)) for name, command in COMMANDS.items()},
    "report": lambda gift, made: equifed("report", gift, "--page", gift.parent / "page.html"),
    "watch": lambda g, m: equifed("report", g, "--watch", "--page", g.parent / "page.html"),
    "resume": lambda gift, made: equifed("resume", gift),
}


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    return path


@pytest.mark.parametrize("link", ["flower.json", "events.jsonl", "notes/deep", "export"])
@pytest.mark.parametrize("name", READERS)
def test_links_in_a_run_folder_are_refused(
    made: Path, gift: Path, secret: Path, name: str, link: str
) -> None:
    target = secret if link != "export" else secret.parent / "elsewhere"
    (secret.parent / "elsewhere").mkdir()
    (gift / link).parent.mkdir(exist_ok=True)
    (gift / link).unlink(missing_ok=True)
    (gift / link).symlink_to(target)
    result: Any = READERS[name](gift, made)
    assert result.exit_code == 2, result.output
    assert str(gift / link) in result.stderr and "symbolic link" in result.stderr
    assert SECRET not in result.output and secret.read_text() == SECRET
    assert not list((secret.parent / "elsewhere").iterdir())
    assert not list(secret.parent.glob("*.zip"))


@pytest.mark.parametrize("link", [EVENTS, "clients.json", ".lock", "run.json.tmp", "checkpoint"])
def test_resume_writes_through_no_link(
    broken: Path, secret: Path, link: str, tmp_path: Path
) -> None:
    target = secret
    if link == "checkpoint":
        target = Path(shutil.move(broken / link, tmp_path / "elsewhere"))
    (broken / link).unlink(missing_ok=True)
    (broken / link).symlink_to(target)
    before = sorted(target.parent.rglob("*"))
    result = equifed("resume", broken)
    assert secret.read_text() == SECRET
    assert result.exit_code == 2
    assert str(broken / link) in result.stderr and "symbolic link" in result.stderr
    assert sorted(target.parent.rglob("*")) == before


def test_resume_cuts_no_file_outside(broken: Path, secret: Path) -> None:
    """A manifest says how long tables were; the names in it are no paths to anywhere."""
    for path in (broken / "checkpoint").glob("*.json"):
        manifest = json.loads(path.read_bytes())
        del manifest["sha256"]
        manifest["extra"]["lengths"]["../secret"] = 0
        manifest["extra"]["sums"]["../secret"] = digest(b"")
        path.write_bytes(seal(manifest))
    result = equifed("resume", broken)
    assert secret.read_text() == SECRET
    assert result.exit_code != 0 and "../secret" in result.stderr


def test_training_in_python_resumes_through_no_link(tmp_path: Path, secret: Path) -> None:
    data = ef.Federation.from_clients(
        {name: (torch.randn(6, 3).numpy(), [0, 1] * 3) for name in ("north", "south")}, classes=2
    )
    clients, path = ef.simulate(data, "logistic"), tmp_path / "run"
    folder = RunFolder(path, data.names)
    folder.create()
    ef.train(ef.FedAvg(), clients, rounds=2, folder=folder, progress=False)
    (path / EVENTS).unlink()
    (path / EVENTS).symlink_to(secret)
    with pytest.raises(RunFolderError, match="symbolic link"):
        ef.train(ef.FedAvg(), clients, rounds=3, folder=folder, resume=True, progress=False)
    assert secret.read_text() == SECRET


def test_overwriting_a_run_writes_through_no_link(gift: Path, made: Path, secret: Path) -> None:
    (gift / "clients.json").unlink()
    (gift / "clients.json").symlink_to(secret)
    result = equifed("run", made / "run.toml", "--out", gift, "--overwrite", "--quiet")
    assert secret.read_text() == SECRET
    assert result.exit_code == 2 and "symbolic link" in result.stderr


def test_python_readers_refuse_links(gift: Path, secret: Path) -> None:
    (gift / "flower.json").symlink_to(secret)
    for read in (ef.History.load, ef.load_predictor, lambda path: read_methods([path])):
        with pytest.raises(RunFolderError, match=r"flower\.json is a symbolic link"):
            read(gift)


def test_the_folder_itself_may_be_a_link(gift: Path, made: Path, tmp_path: Path) -> None:
    """Whoever names it has chosen it."""
    (tmp_path / "latest").symlink_to(gift)
    assert equifed("predict", tmp_path / "latest", made / "rows.csv").exit_code == 0
    assert isinstance(ef.load_predictor(tmp_path / "latest").module, nn.Module)


def test_a_report_follows_no_link_from_a_folder_of_runs(gift: Path, tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    shutil.move(gift, tmp_path / "elsewhere")
    (tmp_path / "many" / "one").symlink_to(tmp_path / "elsewhere")
    result = equifed("report", tmp_path / "many", "--page", tmp_path / "page.html")
    assert result.exit_code == 2 and "many/one is a symbolic link" in result.stderr
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("folder", ["../elsewhere", "/elsewhere", "runs/../../elsewhere"])
def test_a_plan_leads_to_no_folder_outside(gift: Path, tmp_path: Path, folder: str) -> None:
    (tmp_path / "many").mkdir()
    shutil.move(gift, tmp_path / "elsewhere")
    folder = folder if folder.startswith((".", "r")) else str(tmp_path / "elsewhere")
    plan = {"methods": [{"name": "a", "runs": [{"seed": 0, "folder": folder}]}]}
    (tmp_path / "many" / "comparison.json").write_text(json.dumps(plan))
    result = equifed("report", tmp_path / "many", "--page", tmp_path / "page.html")
    assert result.exit_code == 2 and "points outside" in result.stderr
    assert not (tmp_path / "page.html").exists()


def test_a_link_that_comes_after_the_look_is_not_followed(gift: Path, secret: Path) -> None:
    """The folder was clean when it was opened; every component is opened from the one before."""
    run = open_run_folder(gift)
    shutil.copytree(gift / "checkpoint", secret.parent / "moved")
    (gift / RUN).unlink()
    (gift / RUN).symlink_to(secret)
    shutil.rmtree(gift / "checkpoint")
    (gift / "checkpoint").symlink_to(secret.parent / "moved")
    inside = next((secret.parent / "moved").glob("*.json")).name
    for name in (RUN, f"checkpoint/{inside}"):
        with pytest.raises(RunFolderError, match="symbolic link"):
            run.read(name)


def test_a_file_that_changes_after_the_look_is_refused(gift: Path) -> None:
    run = open_run_folder(gift)
    (gift / "model.safetensors").write_bytes((gift / "model.safetensors").read_bytes() + b" ")
    with pytest.raises(RunFolderError, match=r"model\.safetensors.*does not match its checksum"):
        run.read("model.safetensors")


# -- sizes, and what is no file ----------------------------------------------------------------


def grow(path: Path) -> None:
    """Make a file of holes."""
    with path.open("ab") as file:
        file.truncate(2**38)


@pytest.mark.parametrize("file", [CONFIG, RUN, EVENTS, "clients.json", "model.safetensors"])
@pytest.mark.parametrize("name", READERS)
def test_absurd_sizes_are_refused(made: Path, gift: Path, name: str, file: str) -> None:
    grow(gift / file)
    result: Any = READERS[name](gift, made)
    assert result.exit_code == 2, result.output
    assert file in result.stderr and "274,877,906,944 bytes" in result.stderr


def test_arrays_that_say_they_are_large_are_refused(gift: Path) -> None:
    """The header of an array, and the number of samples that bits unpack to, are claims."""
    for name, array in {
        "test/correct": np.zeros(1, np.uint8),
        "test/total": np.array(2**50),
    }.items():
        out = io.BytesIO()
        np.savez(out, **{"test/checksums": np.zeros(1), "test/total": np.array(8),
                         "test/correct": np.zeros(1, np.uint8), name: array})  # fmt: skip
        content = out.getvalue()
        if name == "test/correct":
            content = content.replace(b"(1,), }             ", b"(1000000000000,), } ", 1)
        else:
            with pytest.raises(ValueError, match="says that it has"):
                unpack_hits(content)
        (gift / "hits.npz").write_bytes(content)
        renew_checksums(gift)
        with pytest.raises(RunFolderError, match=r"hits\.npz is damaged"):
            ef.History.load(gift)


def test_a_model_is_not_made_larger_than_its_weights(made: Path, gift: Path) -> None:
    told = json.loads((gift / RUN).read_bytes())
    del told["sha256"]
    told["samples"]["input_shape"] = [10**13]
    (gift / RUN).write_bytes(seal(told))
    renew_checksums(gift)
    result = equifed("predict", gift, made / "rows.csv")
    assert result.exit_code == 2 and "describes a model of 20,000,000,000,00" in result.stderr


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes on this system")
@pytest.mark.parametrize("name", READERS)
def test_nobody_waits_for_a_pipe(made: Path, gift: Path, name: str) -> None:
    (gift / EVENTS).unlink()
    os.mkfifo(gift / EVENTS)
    result: Any = READERS[name](gift, made)
    assert result.exit_code == 2 and "is not a plain file" in result.stderr


# -- one gate ----------------------------------------------------------------------------------

OPENS = {
    "open", "read_text", "read_bytes", "load_file", "safe_open", "fdopen", "memmap", "fromfile"
}  # fmt: skip
OURS = {"self.open", "self.folder.open"}
"""Of RunFolder: they open a folder by the gate."""
LOADS = {"np.load", "numpy.load", "torch.load", "tarfile.open", "zipfile.ZipFile"}
ELSEWHERE = {
    "training/files.py": "the gate",
    "training/tables.py": "an archive in memory, whose bytes came through the gate",
    "training/keys.py": "a person's own keys, and an evidence pack to verify, bound in size",
    "privacy/ledger.py": "a site's own ledger, at a path of its policy",
    "privacy/clients.py": "ledgers that somebody names to equifed privacy",
    "flower/app_config.py": "the pyproject.toml of the app that somebody runs",
    "flower/flwr_private.py": "messages of Flower",
    "flower/memory.py": "a site's own memory",
    "flower/node.py": "the audit log, keys and programs of a site, messages of Flower",
    "flower/participant.py": "a site's own data",
    "flower/site.py": "a site's own app and policy",
    "flower/trial/apps.py": "templates of the package",
    "flower/trial/deploy.py": "keys and logs of a trial that it has just begun",
    "flower/trial/doctor.py": "a site's own keys",
    "runs/config.py": "the configuration that somebody gives to run",
    "runs/evidence.py": "pages that it has just written, and the zip that it writes in memory",
    "report/page.py": "templates of the package",
}
OTHERS = ("datasets/", "data/", "models/architectures.py")
"""Tables and data sets: not run folders; what they read, their owner has chosen."""


def find_openings(source: str) -> list[int]:
    """Return the lines at which a module opens a file by a path."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if (name.split(".")[-1] in OPENS and name not in OURS) or name in LOADS:
                found.append(node.lineno)
    return found


def test_only_the_gate_opens_files_of_a_run() -> None:
    """A new command receives an opened folder, or says here what else it opens, and why."""
    source = Path(ef.__file__).parent
    opening = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if find_openings(path.read_text(encoding="utf-8"))
    }
    assert {name for name in opening if not name.startswith(OTHERS)} <= ELSEWHERE.keys()
    assert ELSEWHERE.keys() <= opening  # no reason outlives what it is about


@pytest.mark.parametrize(
    "line",
    ["(run / MODEL).read_bytes()", "open(p)", "p.open()", "load_file(p)", "np.load(p)",
     "os.open(p, 0)", "torch.load(p)"],
)  # fmt: skip
def test_the_scan_sees_openings(line: str) -> None:
    assert find_openings(f"x = {line}") == [1]


@pytest.mark.parametrize("link", ["tried/alone-0.json", "tried", "rounds.csv"])
def test_a_fit_reads_and_writes_through_no_link(tmp_path: Path, secret: Path, link: str) -> None:
    out = tmp_path / "fitted"
    (out / link).parent.mkdir(parents=True)
    (out / link).symlink_to(secret)
    table = draw_table(80)
    with pytest.raises(RunFolderError, match=r"symbolic link"):
        ef.fit(table, client="site", target="ill", out=out)
    assert secret.read_text() == SECRET


@pytest.mark.parametrize("name", READERS)
def test_folders_in_folders_without_end_are_refused(made: Path, gift: Path, name: str) -> None:
    deep = gift.joinpath(*(120 * ["d"]))
    deep.mkdir(parents=True)
    result: Any = READERS[name](gift, made)
    assert result.exit_code == 2 and "folders deep; no run wrote it" in result.stderr


@pytest.mark.parametrize("event", [{"client": {"a": 1}}, {"round": "one"}, {"client": ["s"]}])
def test_events_of_the_wrong_types_are_damage(gift: Path, event: dict[str, Any]) -> None:
    (gift / EVENTS).write_text(json.dumps({"event": "guard", "round": 1, **event}) + "\n")
    renew_checksums(gift)
    result = equifed("evidence", gift)
    assert result.exit_code == 2 and "should not happen" not in result.stderr
    assert EVENTS in result.stderr and "is damaged" in result.stderr


def test_a_name_of_a_million_letters_is_not_printed(broken: Path) -> None:
    (broken / "clients.json").write_text(json.dumps(["x" * 10**6, "n"]))
    result = equifed("resume", broken)
    assert result.exit_code == 2 and "of another run" in result.stderr
    assert len(result.stderr) < 5000


def test_columns_named_by_a_folder_are_no_formulas(gift: Path) -> None:
    metrics = (gift / "metrics.csv").read_text().replace(",test,accuracy,", ",test,=1+cmd(),")
    (gift / "metrics.csv").write_text(metrics.replace(",test,", ",=test,"))
    renew_checksums(gift)
    assert equifed("evidence", gift, "--out", gift.parent / "pack.zip").exit_code == 0
    with zipfile.ZipFile(gift.parent / "pack.zip") as pack:
        tables = [pack.read(name).decode() for name in pack.namelist() if name == CLIENT_TABLE]
    assert tables and not [c for c in tables[0].split("\n")[0].split(",") if c[:1] in "=+-@"]
