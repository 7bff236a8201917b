"""Files of publishers: where they are, how they are fetched, and how their formats are read.

A file is looked for in the folder that the environment variable ``EQUIFED_DATA`` names, then in
the cache (``EQUIFED_CACHE``, by default ``equifed`` in the user's cache folder), and else fetched
from its publisher into the cache. What is fetched must have the SHA-256 known to us.

Nothing here runs what a file says, and sizes are checked before memory is taken.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import struct
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from equifed.data.split import DataError, refuse

Bytes = NDArray[np.uint8]

_ROWS, _PIXELS = 10_000, 3072  # images in a CIFAR-10 batch, bytes of an image
_BATCHES = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
_LARGEST = 1 << 31


@dataclass(frozen=True)
class RemoteFile:
    """A publisher's file: its place in a data folder, its address and checksum."""

    folder: str
    name: str
    url: str
    sha256: str

    def find(self) -> Path | None:
        """Return where the file is, or None."""
        return find(self.folder, self.name)

    def obtain(self) -> Path:
        """Return where the file is, fetching it if need be: whole and right, or not at all."""
        if (here := self.find()) is not None:
            return here
        import pooch  # slow to import, and most runs fetch nothing

        pooch.get_logger().setLevel("WARNING")
        shelf = pooch.create(
            path=cache_folder() / self.folder,
            base_url="",
            registry={self.name: self.sha256},
            urls={self.name: self.url},
            retry_if_failed=2,
        )
        load = pooch.HTTPDownloader(timeout=30, headers={"User-Agent": "equifed"})
        try:
            return Path(shelf.fetch(self.name, downloader=load))
        except (OSError, ValueError) as error:
            where = data_folders()[0] / self.folder
            raise DataError(
                f"Cannot fetch {self.url}: {error} Try again with a connection, or put {self.name} "
                f"by hand into {where} (EQUIFED_DATA may name another folder, with {self.folder} "
                "in it)."
            ) from None


def data_folders() -> list[Path]:
    """Return the folders that are searched: the user's, then the cache."""
    given = os.environ.get("EQUIFED_DATA")
    return [*([Path(given).expanduser()] if given else []), cache_folder()]


def cache_folder() -> Path:
    """Return where fetched data are kept: ``EQUIFED_CACHE``, or a default."""
    if given := os.environ.get("EQUIFED_CACHE"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    return (Path(base) if base else Path.home() / ".cache") / "equifed"


def find(folder: str, name: str) -> Path | None:
    """Return the first place that has ``folder/name``, or None."""
    places = (place / folder / name for place in data_folders())
    return next((path for path in places if path.exists()), None)


def checksums(paths: Iterable[Path]) -> dict[str, str]:
    """Return the provenance entries ``sha256 of NAME`` for a federation's ``source``."""
    found = {}
    for path in paths:
        with path.open("rb") as file:
            found[f"sha256 of {path.name}"] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


# -- formats --------------------------------------------------------------------------------------


def as_images(pixels: Bytes) -> NDArray[np.float32]:
    """Return grey images (n, h, w) of bytes as (n, 1, h, w) in [0, 1]."""
    return pixels[:, None].astype(np.float32) / np.float32(255)


def read_idx(path: Path) -> Bytes:
    """Read an IDX file of unsigned bytes (MNIST, Fashion-MNIST), gzipped or not."""
    try:
        with _open(path) as file:
            zeros, kind, rank = struct.unpack(">HBB", file.read(4))
            if zeros != 0 or kind != 8 or not 1 <= rank <= 4:
                raise DataError(f"{path} is not an IDX file of unsigned bytes.")
            shape = struct.unpack(f">{rank}I", file.read(4 * rank))
            total = prod(shape)
            if total > _LARGEST:
                raise DataError(f"{path} announces {total} bytes, more than any file known to us.")
            body = file.read(total + 1)
    except (OSError, EOFError, struct.error) as error:
        raise DataError(f"Cannot read {path}: {error}; delete it and fetch it again.") from None
    if len(body) != total:
        raise DataError(f"{path} holds {len(body)} bytes after its header, expected {total}.")
    return np.frombuffer(body, dtype=np.uint8).reshape(shape)


def read_cifar_mosaics(
    folder: Path, names: Sequence[str] = _BATCHES, labels: str = ""
) -> dict[str, tuple[Bytes, Bytes]]:
    """Read lossless mosaics of 100 x 100 images (needs Pillow), and their ``labels.npz``.

    The last of the names is the test set; ``labels`` ends the keys (``"_fine"`` of CIFAR-100).
    """
    try:
        from PIL import Image
    except ImportError:
        raise DataError(
            "Reading CIFAR mosaics needs Pillow: pip install 'equifed[data]'."
        ) from None
    batches = []
    for name in names:
        with Image.open(folder / f"{name}.webp") as image:
            if image.size != (3200, 3200):
                raise DataError(f"{name}.webp must have 3200 x 3200 pixels, got {image.size}.")
            pixels = np.asarray(image.convert("RGB"))
        tiles = pixels.reshape(100, 32, 100, 32, 3).transpose(0, 2, 4, 1, 3)
        batches.append(tiles.reshape(_ROWS, _PIXELS))
    with np.load(folder / "labels.npz") as kept:
        train, test = kept[f"train{labels}"], kept[f"test{labels}"]
    return {"train": (np.concatenate(batches[:-1]), train), "test": (batches[-1], test)}


def read_cifar_archive(path: Path) -> dict[str, tuple[Bytes, Bytes]]:
    """Read ``cifar-10-binary.tar.gz`` as Toronto publishes it."""
    found: dict[str, Bytes] = {}
    wanted = _ROWS * (_PIXELS + 1)
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = Path(member.name).name.removesuffix(".bin")
                if not member.isfile() or name not in _BATCHES:
                    continue
                file = archive.extractfile(member)
                if file is None or member.size != wanted:
                    raise DataError(f"{path}: {name} has {member.size} bytes, expected {wanted}.")
                found[name] = np.frombuffer(file.read(), np.uint8).reshape(_ROWS, _PIXELS + 1)
    except (OSError, EOFError, tarfile.TarError) as error:
        raise DataError(f"Cannot read {path}: {error}; delete it and fetch it again.") from None
    refuse(
        (name for name in _BATCHES if name not in found),
        lambda name: f"{path} lacks the batch {name}.",
    )
    train, test = np.concatenate([found[name] for name in _BATCHES[:5]]), found[_BATCHES[5]]
    return {"train": (train[:, 1:], train[:, 0]), "test": (test[:, 1:], test[:, 0])}


def read_leaf(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Read LEAF JSON files, gzipped or not: user to ``{"x": ..., "y": ...}``, in file order."""
    users: dict[str, dict[str, Any]] = {}
    for path in paths:
        try:
            with _open(path) as file:
                content = json.load(file)
            users |= {name: content["user_data"][name] for name in content["users"]}
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path} is not LEAF JSON with 'users' and 'user_data': {error!r:.200}."
            ) from None
    if not users:
        raise DataError("There are no LEAF JSON files, or they name no users.")
    return users


def _open(path: Path) -> IO[bytes]:
    """Open a file, unpacking it when its name ends in .gz."""
    return cast(IO[bytes], gzip.open(path) if path.suffix == ".gz" else path.open("rb"))
