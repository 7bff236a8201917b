"""Every format of the same data gives the same arrays; damaged files give one clear error."""

import gzip
import io
import json
import struct
import tarfile

import numpy as np
import pytest
from tests.datasets.idx import idx

from equifed.data import DataError
from equifed.datasets import files as formats
from equifed.datasets.files import read_cifar_archive, read_idx, read_leaf

ARRAY = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)


@pytest.mark.parametrize("name", ["a-idx3-ubyte", "a-idx3-ubyte.gz"])
def test_idx_comes_back(tmp_path, name):
    content = idx(ARRAY)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    np.testing.assert_array_equal(read_idx(tmp_path / name), ARRAY)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Cannot read"),
        (b"\x00\x00\x09\x01\x00\x00\x00\x01\x00", "not an IDX file"),
        (idx(ARRAY)[:-1], "holds 23 bytes"),
        (idx(ARRAY) + b"x", "holds 25 bytes"),
        (struct.pack(">HBB3I", 0, 8, 3, 2**31, 2**31, 2**31), "announces"),
    ],
)
def test_damaged_idx_files_are_refused(tmp_path, content, message):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_idx(tmp_path / "a")


def test_damaged_gzip_is_refused(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(idx(ARRAY))[:-12])
    with pytest.raises(DataError, match="Cannot read"):
        read_idx(tmp_path / "a.gz")


# -- CIFAR-10 -------------------------------------------------------------------------------------


ROWS = 50  # images in a batch; the real ones have 10,000


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(formats, "_ROWS", ROWS)


def batch(seed):
    draw = np.random.default_rng(seed)
    return draw.integers(256, size=(ROWS, 3072), dtype=np.uint8), draw.integers(10, size=ROWS)


def binary(pixels, labels):
    return np.concatenate([labels.astype(np.uint8)[:, None], pixels], axis=1).tobytes()


def archive(path, write, names):
    with tarfile.open(path, "w") as tar:
        for seed, name in enumerate(names):
            content = write(*batch(seed))
            member = tarfile.TarInfo(f"cifar/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


NAMES = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]


def test_a_cifar_archive_gives_images_and_labels_in_order(small_batches, tmp_path):
    pools = read_cifar_archive(archive(tmp_path / "c.tar", binary, [f"{n}.bin" for n in NAMES]))
    assert pools["train"][0].shape == (5 * ROWS, 3072) and pools["train"][1].shape == (5 * ROWS,)
    for seed in (0, 4):
        rows = slice(ROWS * seed, ROWS * (seed + 1))
        np.testing.assert_array_equal(pools["train"][0][rows], batch(seed)[0])
        np.testing.assert_array_equal(pools["train"][1][rows], batch(seed)[1])
    np.testing.assert_array_equal(pools["test"][0], batch(5)[0])


@pytest.mark.parametrize(
    ("write", "names", "message"),
    [
        (binary, [f"{n}.bin" for n in NAMES[:5]], "lacks the batch test_batch"),
        (lambda x, y: binary(x, y)[:-1], ["test_batch.bin"], f"{ROWS * 3073 - 1} bytes"),
        (lambda x, y: b"garbage", ["test_batch"], "test_batch has 7 bytes"),
    ],
)
def test_wrong_archives_are_refused(small_batches, tmp_path, write, names, message):
    with pytest.raises(DataError, match=message):
        read_cifar_archive(archive(tmp_path / "c.tar", write, names))


def test_a_file_that_is_no_archive_is_refused(tmp_path):
    (tmp_path / "c.tar.gz").write_bytes(b"no")
    with pytest.raises(DataError, match="Cannot read"):
        read_cifar_archive(tmp_path / "c.tar.gz")


# -- LEAF -----------------------------------------------------------------------------------------


def test_leaf_files_are_joined_in_the_order_of_their_users(tmp_path):
    for name, users in (("b.json", ["u2"]), ("a.json.gz", ["u9", "u1"])):
        content = json.dumps(
            {"users": users, "user_data": {u: {"x": [u], "y": [0]} for u in users}}
        )
        raw = content.encode()
        (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    read = read_leaf([tmp_path / "a.json.gz", tmp_path / "b.json"])
    assert list(read) == ["u9", "u1", "u2"] and read["u2"]["x"] == ["u2"]


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"users": ["a"]}', '{"users": ["a"], "user_data": {}}']
)
def test_other_json_is_refused(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match="not LEAF JSON"):
        read_leaf([tmp_path / "a.json"])
    with pytest.raises(DataError, match="no LEAF JSON"):
        read_leaf([])
