"""Federations in files: the same numbers as in memory, and each process reads its own part."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from tests.problems import classification

import equifed as ef
from equifed.data import DataError, Federation, FederationWriter, open_federation
from equifed.engines.distributed import cut_shard

pytestmark = pytest.mark.long


def write(data: Federation, folder: Path) -> Path:
    with FederationWriter(folder, classes=data.classes) as writer:
        for i, name in enumerate(data.names):
            writer.add(name, **{k: s.client(i) for k, s in data.splits().items()})
    return folder


def test_training_from_files_is_training_from_memory(tmp_path: Path) -> None:
    data = classification([7, 5, 9], (4,), 3).split(test=0.3)
    opened = open_federation(write(data, tmp_path / "data"))
    assert isinstance(opened.train.inputs, np.memmap)
    ends = [
        ef.train(
            ef.ScaffPD(ef.objectives.CVaR(0.5)),
            ef.simulate(held, "logistic", l2=0.1),
            rounds=3,
            evaluate=("test",),
            progress=False,
        )
        for held in (data, opened)
    ]
    assert [r.objective for r in ends[0].rounds] == [r.objective for r in ends[1].rounds]
    config = {
        "rounds": 1,
        "data": {"name": "mapped", "path": str(tmp_path / "data")},
        "model": {"name": "logistic"},
        "algorithm": {"name": "fedavg", "local": {"lr": 0.1, "steps": 1}},
    }
    assert ef.run(config, progress=False).provenance["data"]["sha256"] == opened.checksum()


def test_a_process_holds_its_own_clients_alone(tmp_path: Path) -> None:
    opened = open_federation(write(classification([7, 5, 9], (4,), 3), tmp_path / "data"))
    shard = cut_shard(opened, np.array([False, True, False]))
    assert not isinstance(shard.train.inputs.base, np.memmap)
    np.testing.assert_array_equal(shard.train.client(1)[0], opened.train.client(1)[0])
    assert len(shard.train) == 5


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_pages_of_other_clients_are_never_read(tmp_path: Path) -> None:
    """What of the file is in memory after a process took its clients: their part of it."""
    opened = open_federation(write(classification([64] * 8, (1024,), 3), tmp_path / "data"))
    held = np.arange(8) >= 6
    cut_shard(opened, held)
    parts = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    mapped = [part for part in parts if str(tmp_path) in part and "train-inputs" in part]
    read = sum(int(n) for part in mapped for n in re.findall(r"(?m)^Rss: +(\d+) kB", part))
    own = opened.train.inputs.nbytes * held.mean() / 1024
    assert own <= read <= own + 128  # the system reads a few pages around


def test_what_is_derived_has_a_checksum_of_its_own(tmp_path: Path) -> None:
    data = classification([7, 5, 9], (4,), 3)
    opened = open_federation(write(data, tmp_path / "data"))
    for derive in (lambda one: one.subset([0, 2]), lambda one: one.split(test=0.3)):
        assert derive(opened).checksum() == derive(data).checksum() != opened.checksum()


def test_other_samples_have_another_checksum(tmp_path: Path) -> None:
    data = classification([4, 4], (2,), 2)
    moved = Federation.from_clients(
        {n: data.train.client(1 - i) for i, n in enumerate(data.names)}, classes=2
    )
    first, again, other = (
        open_federation(write(held, tmp_path / str(k))).checksum()
        for k, held in enumerate((data, data, moved))
    )
    assert first == again != other


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    X, y = np.zeros((3, 2)), np.array([0, 1, 1])
    with FederationWriter(tmp_path / "a", classes=2) as writer:
        writer.add("north", train=(X, y))
        for wrong, message in (
            ({"train": (X * np.nan, y)}, "'south': train features contain NaN"),
            ({"train": (X, y + 5)}, "'south': train labels must lie in 0..1"),
            ({"train": (X[:, :1], y)}, "'south' differs from the first one"),
            ({"train": (X, y), "test": (X, y)}, "'south' has the splits train, test"),
        ):
            with pytest.raises(DataError, match=message):
                writer.add("south", **wrong)
        with pytest.raises(DataError, match="'north' was added before"):
            writer.add("north", train=(X, y))
    assert open_federation(tmp_path / "a").names == ("north",)
    with pytest.raises(DataError, match="choose another folder"):
        FederationWriter(tmp_path / "a")
    with pytest.raises(DataError, match=r"federation\.json is missing"):
        open_federation(tmp_path / "b")
    file = tmp_path / "a" / "train-inputs.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match="47 bytes, not 48"):
        open_federation(tmp_path / "a")
    (tmp_path / "a" / "federation.json").write_text("[" * 10)
    with pytest.raises(DataError, match="cannot be read"):
        open_federation(tmp_path / "a")


def test_samples_of_several_arrays_are_kept_with_their_names(tmp_path):
    draw = np.random.default_rng(0)
    clients = {
        c: ({"ids": draw.integers(0, 9, (n, 4)), "age": draw.standard_normal(n)}, np.arange(n) % 2)
        for c, n in {"north": 5, "south": 3}.items()
    }
    with FederationWriter(tmp_path / "data", classes=2) as writer:
        for client, pair in clients.items():
            writer.add(client, train=pair, test=pair)
    found = open_federation(tmp_path / "data")
    wanted = Federation.from_clients(clients, test=clients)
    assert found.layout == wanted.layout
    np.testing.assert_array_equal(found.test.inputs, wanted.test.inputs)
    x, y = clients["south"]
    for odd, message in (
        ({"ids": x["ids"]}, "'west': X has no 'age', the first client's X has age"),
        (x["ids"].astype("float64"), "has one array, the first client's X has age"),
    ):
        writer = FederationWriter(tmp_path / "other", classes=2)
        with pytest.raises(DataError, match=message), writer:
            writer.add("south", train=(x, y))
            writer.add("west", train=(odd, y))
