"""The evidence pack: complete, checked, the same twice; nothing is packed that is not whole."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import shutil
import zipfile
from pathlib import Path

import pytest
from tests.cli.test_cli import equifed

import equifed as ef
from equifed.runs import run as runs
from equifed.runs.config import RunConfig
from equifed.runs.evidence import LEFT, QUESTIONS, SUMS, pack_evidence
from equifed.training.files import Damaged, RunFolderError
from equifed.training.history import History

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evidence") / "run"
    table = {
        "rounds": 3,
        "data": {"name": "fashion-three", "train": 20, "test": 10},
        "model": {"name": "logistic", "l2": 0.01},
        "algorithm": {"name": "scaff-pd", "objective": {"name": "chi-square", "rho": 0.1}},
    }
    runs.run(RunConfig.from_dict(table), folder)
    return folder


def read(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as pack:
        assert pack.testzip() is None
        return {name: pack.read(name) for name in pack.namelist()}


def test_the_pack_holds_the_run_and_its_own_checksums(run: Path, tmp_path: Path) -> None:
    files = read(pack_evidence(run, tmp_path / "pack.zip"))
    for line in files[SUMS].decode().splitlines():
        told, name = line.split("  ")
        assert hashlib.sha256(files[name]).hexdigest() == told
    assert len(files[SUMS].decode().splitlines()) == len(files) - 1
    for name in json.loads((run / "checksums.json").read_text()):
        if name != "sha256":
            assert files[f"run/{name}"] == (run / name).read_bytes()
    assert files["report.html"].startswith(b"<!doctype html>")
    assert b"## Limits" in files["MODEL_CARD.md"]
    history = History.load(run)
    assert json.loads(files["certificate.json"])["certificate"] == history.certificate()
    assert json.loads(files["versions.json"]) == history.provenance["versions"]


def test_the_table_of_clients_is_that_of_the_run(run: Path, tmp_path: Path) -> None:
    files = read(pack_evidence(run, tmp_path / "pack.zip"))
    rows = {r["client"]: r for r in csv.DictReader(io.StringIO(files["clients.csv"].decode()))}
    history = History.load(run)
    for client, value in history.per_client("accuracy", "test").items():
        assert float(rows[client]["test accuracy"]) == pytest.approx(value, rel=1e-7)
        assert rows[client]["test accuracy n"] == "10"
    last = history.weights[max(history.weights)]
    assert [float(r["weight"]) for r in rows.values()] == pytest.approx(list(last), rel=1e-7)


def test_the_readme_maps_questions_to_files_that_are_there(run: Path, tmp_path: Path) -> None:
    files = read(pack_evidence(run, tmp_path / "pack.zip"))
    text = files["README.md"].decode()
    for _, question, names in QUESTIONS:
        (line,) = [li for li in text.splitlines() if f"| {question} |" in li]
        named = {name for name in names if f"`{name}`" in line}
        assert named == {name for name in names if name in files}
        assert named or line.endswith("| not part of this run |")
    assert all(sentence in text for sentence in LEFT)


def test_the_same_run_gives_the_same_bytes(run: Path, tmp_path: Path) -> None:
    first = pack_evidence(run, tmp_path / "a.zip").read_bytes()
    elsewhere = Path(shutil.copytree(run, tmp_path / "elsewhere" / "other"))
    assert pack_evidence(elsewhere, tmp_path / "b.zip").read_bytes() == first
    assert str(run.parent).encode() not in read(tmp_path / "a.zip")["report.html"]


@pytest.mark.parametrize("name", ["metrics.csv", "events.jsonl", "model.safetensors", "run.json"])
def test_a_damaged_run_is_refused_by_the_name_of_the_file(
    run: Path, tmp_path: Path, name: str
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    with pytest.raises(Damaged, match=name):
        pack_evidence(copy)
    assert not (tmp_path / "copy-evidence.zip").exists()


def test_a_run_that_has_not_ended_and_a_folder_without_one_are_refused(
    run: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    (copy / "summary.json").unlink()
    with pytest.raises(RunFolderError, match=r"has not ended.*equifed resume"):
        pack_evidence(copy)
    with pytest.raises(RunFolderError, match=r"holds no run: rounds.csv is missing"):
        pack_evidence(tmp_path)
    told = equifed("evidence", tmp_path / "nowhere")
    assert (told.exit_code, "holds no run" in told.stderr) == (2, True)


def test_a_run_of_python_objects_says_why_it_has_no_card(tmp_path: Path) -> None:
    clients = ef.simulate(ef.load("fashion-three", train=20, test=10), "logistic", l2=0.01)
    history = ef.train(ef.FedAvg(), clients, rounds=2, evaluate=["test"])
    history.save(tmp_path / "run")
    files = read(pack_evidence(tmp_path / "run"))  # beside the folder
    assert b"There is none:" in files["MODEL_CARD.md"] and b"config.toml" in files["MODEL_CARD.md"]
    assert b"report.html" in files["README.md"]


def test_the_command_writes_beside_the_run_and_replaces_nothing(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    done = equifed("evidence", copy, "--without-model")
    pack = tmp_path / "copy-evidence.zip"
    assert done.exit_code == 0 and str(pack) in done.stdout
    assert "run/model.safetensors" not in read(pack) and "run/metrics.csv" in read(pack)
    again = equifed("evidence", copy)
    assert (again.exit_code, "already exists" in again.stderr) == (2, True)
    assert equifed("evidence", copy, "--overwrite").exit_code == 0
    assert "run/model.safetensors" in read(pack)
