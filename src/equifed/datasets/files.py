"""Where data files are: a folder of the user's, a cache, or the publisher, with a checksum.

A file is looked for in the folder that the environment variable ``EQUIFED_DATA`` names, then in
the cache (``EQUIFED_CACHE``, by default ``equifed`` in the user's cache folder), and else fetched
from its publisher into the cache. What is fetched must have the SHA-256 known to us.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from equifed.data.mapped import cache_folder
from equifed.data.split import DataError

Progress = Callable[[str, int, int], None]
"""Called with the file's name, the bytes so far and the bytes in all."""

_BLOCK = 1 << 18


@dataclass(frozen=True)
class RemoteFile:
    """A publisher's file: its place in a data folder, its address, checksum and size."""

    folder: str
    name: str
    url: str
    sha256: str
    size: int

    def find(self) -> Path | None:
        """Return where the file is, or None."""
        return find(self.folder, self.name)

    def obtain(self, progress: Progress | None = None) -> Path:
        """Return where the file is, fetching it if need be."""
        return self.find() or fetch(self, cache_folder() / self.folder / self.name, progress)


def data_folders() -> list[Path]:
    """Return the folders that are searched: the user's, then the cache."""
    given = os.environ.get("EQUIFED_DATA")
    return [*([Path(given).expanduser()] if given else []), cache_folder()]


def find(folder: str, name: str) -> Path | None:
    """Return the first place that has ``folder/name``, or None."""
    for place in data_folders():
        path = place / folder / name
        if path.exists():
            return path
    return None


def obtain_all(files: Iterable[RemoteFile], progress: Progress | None = None) -> list[Path]:
    """Return where the files are, fetching what is missing."""
    return [file.obtain(progress) for file in files]


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksums(paths: Iterable[Path]) -> dict[str, str]:
    """Return the provenance entries ``sha256 of NAME`` for a federation's ``source``."""
    return {f"sha256 of {path.name}": digest(path) for path in paths}


def fetch(file: RemoteFile, target: Path, progress: Progress | None = None) -> Path:
    """Fetch a file into ``target``: whole and with the right checksum, or not at all.

    The bytes go to a temporary file in the same folder, which replaces ``target`` only when its
    SHA-256 is right, and is removed otherwise.
    """
    by_hand = (
        f"or put {file.name} by hand into {data_folders()[0] / file.folder} (EQUIFED_DATA may name "
        f"another folder, with {file.folder} in it)."
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
        part = Path(folder) / file.name
        try:
            _download(file, part, progress)
        except (OSError, urllib.error.URLError) as error:
            raise DataError(
                f"Cannot fetch {file.url}: {error}. Try again with a connection, {by_hand}"
            ) from None
        found = digest(part)
        if found != file.sha256:
            raise DataError(
                f"{file.url} has SHA-256 {found}, expected {file.sha256}; it was removed. The "
                f"publisher may have changed it, or the transfer was tampered with: try again, "
                f"{by_hand}"
            )
        part.replace(target)
    return target


def _download(file: RemoteFile, part: Path, progress: Progress | None) -> None:
    """Copy the bytes behind the address, at most as many as are expected."""
    done = 0
    request = urllib.request.Request(file.url, headers={"User-Agent": "equifed"})
    with urllib.request.urlopen(request, timeout=30) as response, part.open("wb") as out:
        while block := response.read(_BLOCK):
            done += len(block)
            if done > file.size:
                raise DataError(f"{file.url} is longer than the {file.size} bytes expected.")
            out.write(block)
            if progress:
                progress(file.name, done, file.size)
        out.flush()
        os.fsync(out.fileno())
