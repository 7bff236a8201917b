"""A fetched file is whole and right, or it is not there."""

import contextlib
import hashlib
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from equifed.data import DataError
from equifed.datasets import DATASETS, fetch
from equifed.datasets.files import RemoteFile, cache_folder, checksums, find

BODY = bytes(range(256)) * 4096


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)  # between two tries


def remote(url, sha256=None):
    return RemoteFile("things", "thing.bin", url, sha256 or hashlib.sha256(BODY).hexdigest())


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@contextlib.contextmanager
def served(folder):
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def published(tmp_path):
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "thing.bin").write_bytes(BODY)
    return folder


def cached():
    return [p.name for p in cache_folder().rglob("*") if p.is_file()]


def test_a_file_is_fetched_once(own_folder, published):
    with served(published) as url:
        path = remote(f"{url}/thing.bin").obtain()
    assert path.read_bytes() == BODY
    assert checksums([path]) == {"sha256 of thing.bin": hashlib.sha256(BODY).hexdigest()}
    assert remote("http://127.0.0.1:9/gone").obtain() == path  # from the cache, no connection
    assert cached() == ["thing.bin"]


@pytest.mark.parametrize(
    ("content", "sha256", "told"),
    [
        (BODY, "0" * 64, "expected 000.* but got"),
        (BODY[:-1], None, "does not match the known hash"),
        (BODY + BODY, None, "does not match the known hash"),
    ],
)
def test_a_wrong_file_is_removed(own_folder, published, content, sha256, told):
    (published / "thing.bin").write_bytes(content)
    with served(published) as url, pytest.raises(DataError, match=rf"Cannot fetch .*{told}"):
        remote(f"{url}/thing.bin", sha256).obtain()
    assert cached() == [] and find("things", "thing.bin") is None


@pytest.mark.parametrize("place", ["/absent", None])
def test_an_unreachable_file_says_what_to_do(own_folder, published, place):
    with served(published) as url:
        address = url + place if place else "http://127.0.0.1:9/thing.bin"
        told = f"Cannot fetch {address}: .* put thing.bin by hand into {own_folder / 'things'}"
        with pytest.raises(DataError, match=told):
            remote(address).obtain()
    assert cached() == []


def test_the_users_folder_comes_before_the_cache(own_folder, published):
    with served(published) as url:
        remote(f"{url}/thing.bin").obtain()
    (own_folder / "things").mkdir()
    (own_folder / "things" / "thing.bin").write_bytes(b"mine")
    assert find("things", "thing.bin").read_bytes() == b"mine"


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("EQUIFED_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "equifed"
    monkeypatch.setenv("EQUIFED_CACHE", str(tmp_path / "other"))
    assert cache_folder() == tmp_path / "other"


def test_known_files_have_the_checksums_of_the_real_ones(data_folder):
    checked = 0
    for entry in DATASETS.values():
        for file in entry.files:
            path = data_folder / file.folder / file.name
            if path.exists():
                assert checksums([path]) == {f"sha256 of {file.name}": file.sha256}
                checked += 1
    assert checked >= 10


def test_known_addresses_are_encrypted():
    assert all(f.url.startswith("https://") for d in DATASETS.values() for f in d.files)


def test_fetch_by_name(data_folder):
    assert len(fetch("adult")) == 2 and fetch("penguins") == []
    for name in ("cifar10", "vehicle"):  # other files that serve as well are there
        assert DATASETS[name].missing() == [] and len(fetch(name)) == 1
    with pytest.raises(DataError, match="no data set 'mnits'"):
        fetch("mnits")
    with pytest.raises(DataError, match="no file with a known checksum"):
        fetch("femnist")


def test_what_is_missing_is_listed(own_folder):
    assert [file.name for file in DATASETS["adult"].missing()] == ["adult.data", "adult.test"]
    (own_folder / "adult").mkdir()
    (own_folder / "adult" / "adult.data").touch()
    assert [file.name for file in DATASETS["adult"].missing()] == ["adult.test"]
