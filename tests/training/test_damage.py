"""Folders that something has happened to: detected and named, or the same result as ever."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripts.trust.damage import DAMAGES, Outcome, damage_one, make_folders

import equifed as ef
from equifed.runs import run as runs
from equifed.runs.config import RunConfig
from equifed.training.checkpoint import CheckpointError
from equifed.training.files import (
    LOCK,
    Changed,
    Damaged,
    RunFolderError,
    StoredRun,
    lock_folder,
    read_sealed,
    seal,
)
from equifed.training.folder import RunFolder
from equifed.training.history import History

pytestmark = pytest.mark.long

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(document=st.dictionaries(st.text().filter(lambda key: key != "sha256"), JSON, max_size=4))
def test_a_sealed_document_is_read_as_it_was_written(document, tmp_path_factory):
    path = tmp_path_factory.mktemp("seal") / "a.json"
    path.write_bytes(seal(document))
    np.testing.assert_equal(read_sealed(path), json.loads(json.dumps(document)))


@given(at=st.integers(0), bit=st.integers(0, 7))
def test_a_flipped_bit_breaks_the_seal_or_changes_nothing(at, bit, tmp_path_factory):
    document = {"round": 12, "names": ["north", "south"], "gap": 0.25}
    content = bytearray(seal(document))
    content[at % len(content)] ^= 1 << bit
    path = tmp_path_factory.mktemp("seal") / "a.json"
    path.write_bytes(content)
    try:
        assert read_sealed(path) == document  # white space may differ
    except Damaged as error:
        assert str(path) in str(error)


@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b"", b"\xff\xfe", b'{"a": ' + b"9" * 5_000 + b"}", b"{", b"NaN,", b"[1]"],
    ids=["deep", "empty", "no text", "huge number", "half", "no JSON", "a list"],
)
def test_hostile_json_is_one_error_that_names_the_file(content, tmp_path):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(Damaged, match=r"a\.json is damaged"):
        StoredRun(tmp_path).json("a.json")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return make_folders(tmp_path_factory.mktemp("damage"))


@pytest.mark.parametrize("kind", sorted(DAMAGES))
def test_damage_is_named_or_without_consequence(kind, folders, tmp_path):
    outcomes = {damage_one(folders, kind, seed, tmp_path / str(seed)) for seed in range(12)}
    assert outcomes <= {Outcome.REFUSED, Outcome.SAME}


def test_a_damaged_table_falls_back_to_the_older_checkpoint(folders, tmp_path):
    shutil.copytree(folders.begun, tmp_path / "run")
    table = tmp_path / "run" / "rounds.csv"
    table.write_bytes(table.read_bytes()[:-3] + b"7\n\n")
    found = runs.resume(tmp_path / "run")
    assert [r.round for r in found.rounds] == [r.round for r in folders.history.rounds]
    for name, value in folders.history.parameters.items():
        assert bool((found.parameters[name] == value).all())


def test_an_edited_configuration_is_refused_unless_accepted(folders, tmp_path):
    shutil.copytree(folders.begun, tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 6", "rounds = 7"))
    with pytest.raises(RunFolderError, match=r"was changed since the run began.*--accept-config"):
        runs.resume(tmp_path / "run")
    assert len(runs.resume(tmp_path / "run", accept_config=True).rounds) == 7
    told = read_sealed(tmp_path / "run" / "run.json")
    assert len(told["replaced"]) == 1 and History.load(tmp_path / "run").rounds


def test_when_no_checkpoint_is_left_the_files_are_named(folders, tmp_path):
    shutil.copytree(folders.begun, tmp_path / "run")
    (tmp_path / "run" / "rounds.csv").write_text("round\n")
    with pytest.raises(CheckpointError, match=r"rounds\.csv is damaged"):
        runs.resume(tmp_path / "run")


# -- one writer -------------------------------------------------------------------------------


def _hold(folder: str, ready) -> None:
    with lock_folder(Path(folder)):
        ready.set()
        time.sleep(600)


@pytest.fixture
def holder(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_hold, args=(str(tmp_path / "run"), ready))
    process.start()
    assert ready.wait(60)
    yield process
    process.kill()
    process.join(60)


def test_the_second_writer_is_refused_and_told_who_holds_the_folder(holder, folders, tmp_path):
    shutil.copytree(folders.begun, tmp_path / "run", dirs_exist_ok=True)
    with pytest.raises(RunFolderError, match=f"Process {holder.pid} on .*since.*working in"):
        runs.resume(tmp_path / "run")
    with pytest.raises(RunFolderError, match=f"Process {holder.pid} on"):
        runs.run(RunConfig.read(folders.config), tmp_path / "run", overwrite=True)
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    assert len(runs.resume(tmp_path / "run").rounds) == 6  # the lock went with its process
    assert not (tmp_path / "run" / LOCK).exists()


@pytest.mark.parametrize(
    ("text", "free"),
    [
        ("", True),
        ('{"process": 2147483646, "host": "HERE", "since": "then"}', True),
        ('{"process": 1, "host": "HERE", "since": "then"}', False),
        ('{"process": 1, "host": "elsewhere", "since": "then"}', False),
    ],
    ids=["not signed", "gone", "running", "another host"],
)
def test_without_the_systems_locks_the_text_decides(text, free, tmp_path, monkeypatch):
    import errno
    import socket

    def refuse(_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("equifed.training.files._take", refuse)
    (tmp_path / LOCK).write_text(text.replace("HERE", socket.gethostname()))
    if free:
        with lock_folder(tmp_path):
            assert str(os.getpid()) in (tmp_path / LOCK).read_text()
        assert not (tmp_path / LOCK).exists()
        return
    with pytest.raises(RunFolderError, match="Process 1 on"), lock_folder(tmp_path):
        pass


# -- while a run goes on ----------------------------------------------------------------------


class Meddles(runs.Callback):
    """Does something to a run's folder after its second round."""

    def __init__(self, act):
        self.act = act

    def round(self, record, info):
        if record.round == 2:
            self.act()


def train_meddled(folder, act):
    clients = ef.simulate(ef.load("fashion-three", train=10, test=5), "logistic", l2=0.01)
    run = RunFolder(folder, clients.names)
    run.create()
    run.event({"event": "note", "round": 0, "reason": "a line that can be lost"})
    return ef.train(ef.FedAvg(), clients, rounds=4, folder=run, callbacks=[Meddles(act)],
                    progress=False)  # fmt: skip


def swap_first_digit(path):
    content = path.read_bytes()
    path.write_bytes(content[:-8] + bytes([content[-8] ^ 1]) + content[-7:])


@pytest.mark.parametrize("table", ["rounds.csv", "metrics.csv", "weights.csv", "events.jsonl"])
@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (Path.unlink, "was deleted"),
        (lambda path: path.write_bytes(path.read_bytes()[:-5]), "bytes where this run wrote"),
        (lambda path: path.write_bytes(b""), "has 0 bytes where this run wrote"),
        (swap_first_digit, "is not what this run wrote"),
    ],
    ids=["gone", "shrunk", "emptied", "changed"],
)
def test_a_table_that_changes_during_a_run_ends_it(tmp_path, table, act, reason):
    """A run with rounds.csv deleted on the way was sealed as if it were whole."""
    with pytest.raises(Changed, match=rf"{table} .*{reason}.*start the run again"):
        train_meddled(tmp_path, lambda: act(tmp_path / table))
    assert not (tmp_path / "summary.json").exists()


def test_a_run_over_an_old_one_keeps_nothing_of_it(tmp_path):
    clients = ef.simulate(ef.load("fashion-three", train=10, test=5), "logistic", l2=0.01)
    for seed in (1, 2):
        folder = RunFolder(tmp_path, clients.names)
        folder.create(overwrite=True)
        ef.train(ef.FedAvg(), clients, rounds=2, seed=seed, folder=folder, progress=False)
    assert History.load(tmp_path).seed == 2
