"""Files of a run folder: replaced in one step, sealed by a checksum, one process writes."""

from __future__ import annotations

import csv
import errno
import hashlib
import json
import os
import socket
import time
import tomllib
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

LOCK = ".lock"
SEAL = "sha256"
UNREADABLE: tuple[type[Exception], ...] = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError,
    EOFError, csv.Error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""What reading a file of wrong content may raise."""


class RunFolderError(RuntimeError):
    """The folder cannot be used, and what to do."""


class Damaged(RunFolderError):
    """A file is not what was written."""


def write_file(path: Path, content: bytes) -> None:
    """Replace a file in one step: temporary name, flush to the disk, rename, flush the folder."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def refuse_links(folder: Path) -> None:
    """Refuse a folder with a link at any depth: what it leads to lies elsewhere."""
    for place, folders, files in os.walk(folder):
        for name in sorted((*folders, *files)):
            refuse_link(Path(place) / name)


def refuse_link(path: Path) -> None:
    """Refuse a path that is a symbolic link."""
    if path.is_symlink():
        raise RunFolderError(
            f"{path} is a symbolic link; a run folder must hold its files itself. Put a copy of "
            "the file in its place if it belongs to the run, or delete the link."
        )


def digest(content: bytes) -> str:
    """Return the SHA-256 of some bytes."""
    return hashlib.sha256(content).hexdigest()


def as_plain(document: Any) -> Any:
    """Return a document as every reader of JSON has it: null for what is no finite number."""
    return json.loads(json.dumps(document, default=str), parse_constant=lambda _: None)


def seal(document: Mapping[str, Any]) -> bytes:
    """Return the text of a JSON document with its own checksum in it."""
    plain = json.loads(json.dumps(document))
    return (json.dumps({**plain, SEAL: _digest_of(plain)}, indent=2) + "\n").encode()


def _digest_of(plain: Mapping[str, Any]) -> str:
    return digest(json.dumps(plain, sort_keys=True).encode())


@contextmanager
def reading(path: Path, *more: type[Exception]) -> Iterator[None]:
    """Turn whatever is wrong with a file's content into one error that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise Damaged(f"{path} is missing.") from None
    except UNREADABLE + more as error:
        reason = str(error) or type(error).__name__
        raise Damaged(f"{path} is damaged: it cannot be read ({reason}).") from None


def read_json(path: Path, kind: type[dict[str, Any]] | type[list[Any]] = dict) -> Any:
    """Read a JSON file."""
    with reading(path):
        found = json.loads(path.read_bytes())
        if not isinstance(found, kind):
            raise ValueError(f"a {kind.__name__} is expected, not a {type(found).__name__}")
        return found


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file."""
    with reading(path):
        return tomllib.loads(path.read_bytes().decode())


def read_sealed(path: Path) -> dict[str, Any]:
    """Read a sealed document without its seal, or say that it is damaged."""
    document = read_json(path)
    told = document.pop(SEAL, None)
    try:
        if told is not None and told == _digest_of(document):
            return document  # type: ignore[no-any-return]
    except RecursionError:
        pass
    raise Damaged(f"{path} is damaged: it does not match its own checksum.")


# -- one writer per folder --------------------------------------------------------------------


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Refuse to work in a folder that another process works in, and say which one it is.

    The lock is the operating system's, gone with its process; without one the file's text decides.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    refuse_link(path)
    me = {"process": os.getpid(), "host": socket.gethostname()}
    with _hold(path) as file:
        file.truncate(0)
        file.write(json.dumps({**me, "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}).encode())
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # while it is held: who waits for it looks again


@contextmanager
def _hold(path: Path) -> Iterator[IO[bytes]]:
    while True:
        with path.open("a+b") as file:
            try:
                _take(file)
            except OSError as error:
                without = error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
                if not without and not isinstance(error, BlockingIOError):
                    raise
                if not without or is_worked_on(path.parent):
                    raise _refusal(path) from None
            with suppress(FileNotFoundError):  # its holder deletes the file before it lets go
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    yield file
                    return


def _take(file: IO[bytes]) -> None:
    try:
        import fcntl
    except ImportError:  # pragma: no cover - no such locks on this system
        raise OSError(errno.ENOSYS, "no file locks") from None
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _read_holder(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        told = json.loads(path.read_bytes())
        if isinstance(told, dict) and {"process", "host", "since"} <= told.keys():
            return told
    return {}


def is_worked_on(folder: Path) -> bool:
    """Tell whether a running process has signed a folder's lock, without touching it."""
    told = _read_holder(folder / LOCK)
    if not told or told["host"] != socket.gethostname() or not isinstance(told["process"], int):
        return bool(told)
    try:
        os.kill(told["process"], 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass
    return True


def _refusal(path: Path) -> RunFolderError:
    told = _read_holder(path)
    who = "Another process"
    if told:
        who = f"Process {told['process']} on {told['host']} (since {told['since']})"
    here = not told or told["host"] == socket.gethostname()
    cure = "wait for it, or end it" if here else f"wait for it; if it is gone, delete {path}"
    return RunFolderError(f"{who} is working in {path.parent}; {cure}.")
